"""The guarantee of a private run, with everything that it depends on."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dp_clipping.accounting.history import History, count
from dp_clipping.accounting.mechanism import Mechanism


@dataclass(frozen=True)
class PrivacyStatement:
    """The stated (ε, δ) and what it was computed from; prints as text.

    An attribute is a list where steps had several values: all of them, in the order in which they
    were first used.

    Attributes:
        relation: which data sets are neighbours.
        unit: the unit of privacy, in which neighbouring data sets differ.
        noise_multiplier: σ.
        max_grad_norm: C, or C_k of each clipping group. With an adaptive threshold: where it is
            now; what it follows is paid for in σ.
        sample_rate: q, the expected part of the units in a step.
        steps: taken so far.
        sampler: how the units of a step are chosen.
        accountant: which computed ε; of a registered noise mechanism or another sampling, its own.
        epsilon: infinite if a step had no noise, or no known sampling.
        delta: δ.
        secure: of secure noise, what ε and δ include: numbers by name; None for other noise.
    """

    relation: str
    unit: str
    noise_multiplier: float | list[float]
    max_grad_norm: float | list[float]
    sample_rate: float | list[float]
    steps: int
    sampler: str
    accountant: str
    epsilon: float
    delta: float
    secure: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Returns the attributes as numbers, strings and lists, in this order.

        `secure`, a dict of numbers, is there for secure noise alone.
        """
        return {k: v for k, v in asdict(self).items() if k != "secure" or v is not None}

    def __str__(self) -> str:
        if math.isinf(self.epsilon):
            first = f"No finite epsilon holds at delta = {self.delta:g}."
        else:
            first = f"(epsilon, delta) = ({self.epsilon:.4g}, {self.delta:g})"
        lines = [
            ("neighbouring data sets", self.relation),
            ("unit", self.unit),
            ("noise multiplier", self.noise_multiplier),
            ("clipping threshold", self.max_grad_norm),
            ("sample rate", self.sample_rate),
            ("steps taken", self.steps),
            ("sampler", self.sampler),
            ("accountant", self.accountant),
        ]
        if self.secure is not None:
            lines.append(("secure noise", "rounded to a grid, integers of ChaCha20; included are"))
            lines += [("  " + name, value) for name, value in self.secure.items()]
        return "\n".join([first, *(f"  {name + ': ':24}{_shown(value)}" for name, value in lines)])


def statement_of(
    runs: Sequence[Any],
    history: History,
    *,
    mechanism: Mechanism,
    others: int,
    accountant: str,
    epsilon: float,
    delta: float,
    secure: dict[str, Any] | None = None,
) -> PrivacyStatement:
    """Returns the statement of an engine's runs.

    Args:
        runs: the `PrivateRun` of each `make_private`.
        history: the history of the engine's accountant.
        mechanism: what these steps release.
        others: so many of them were made on batches that no known sampling has made.
        accountant: the name of the engine's.
        epsilon: as it was computed.
        secure: what secure noise adds (`noise.secure.certificate`).
    """
    is_known = not others and all(run.settings["poisson_sampling"] for run in runs)
    sigmas = [sigma for sigma, _, _ in history] or [run.optimizer.noise_multiplier for run in runs]
    rates = [rate for _, rate, _ in history] or [run.settings["sample_rate"] for run in runs]
    return PrivacyStatement(
        relation=mechanism.relation,
        unit="; ".join(dict.fromkeys(_unit(run.settings) for run in runs)),
        noise_multiplier=_one_or_all(sigmas),
        max_grad_norm=_one_or_all([run.optimizer.max_grad_norm for run in runs]),
        sample_rate=_one_or_all(rates),
        steps=count(history),
        sampler=mechanism.sampler if is_known else _other_sampler(runs, others),
        accountant=mechanism.accountant or accountant,
        epsilon=epsilon if is_known else math.inf,
        delta=delta,
        secure=secure,
    )


def _other_sampler(runs: Sequence[Any], others: int) -> str:
    if all(run.settings["poisson_sampling"] for run in runs):
        return f"not known for {others} batches that make_private's loader did not yield"
    return "the loader's own, for which no account is known"


def _unit(settings: Mapping[str, Any]) -> str:
    """Returns the unit that a run samples, clips and counts."""
    each, drawn = settings["examples_per_unit"], settings.get("examples_per_step")
    step = "" if drawn is None else f", of which a step takes {drawn}"
    if settings["unit_ids are given"]:
        most = f", at most {each}" if each > 1 else ""
        return f"all examples with the same entry in unit_ids{most}{step}"
    if each == 1:
        return "one example"
    of = "the data set" if settings["poisson_sampling"] else "a batch"
    return f"{each} consecutive examples of {of}{step}"


def _one_or_all(values: list[Any]) -> Any:
    """Returns the one value that all are, or the list of those that differ."""
    found = [value for i, value in enumerate(values) if value not in values[:i]]
    return found[0] if len(found) == 1 else found


def _shown(value: Any) -> str:
    if isinstance(value, list):
        shown = ", ".join(_shown(v) for v in value[:4])
        return f"{shown}, ... ({len(value)} of them)" if len(value) > 4 else shown
    return f"{value:.6g}" if isinstance(value, float) else str(value)
