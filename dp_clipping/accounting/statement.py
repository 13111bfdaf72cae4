"""The guarantee of a private run, with everything that it depends on."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dp_clipping.accounting.history import count
from dp_clipping.accounting.ledger import Account
from dp_clipping.accounting.mechanism import Mechanism
from dp_clipping.accounting.proofs import covered_by
from dp_clipping.accounting.tradeoff import Curve, gaussian_mu, true_positive_rate
from dp_clipping.files import write_atomically
from dp_clipping.kinds import file

RATES = (0.001, 0.01, 0.1)
"""False positive rates of which a statement has the largest true positive rate."""

SCHEMA_VERSION = 1
FILE = "privacy.json"
BEGIN, END = "<!-- privacy statement -->", "<!-- end of the privacy statement -->"
NAMES = {"sample_rate": "sample rate", "steps": "steps", "divisor": "divisor", "account": "epsilon"}
ENGINES = "ε is of one engine: those of several engines on the same data add up"


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
        curve: pairs [δ, ε]: ε holds for each δ.
        mu: μ of the tightest Gaussian mechanism that covers the curve from `delta` on: for every δ'
            of at least `delta`, μ-GDP states an ε that holds. See `tradeoff.gaussian_mu`.
        true_positive_rates: pairs [false positive rate, the largest true positive rate] of attacks
            that decide whether one unit was in the data.
        public_constants: which of rate, steps, divisor and account are given as constants. What is
            not follows from the private number of units.
        proofs: pages of `docs/proofs` that cover the run.
        unproved: what none of them covers, in words.
        account: what ε is computed from.
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
    secure: dict[str, Any] | None
    curve: Curve
    mu: float
    true_positive_rates: Curve
    public_constants: dict[str, bool]
    proofs: list[str]
    unproved: list[str]
    account: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Returns the attributes as numbers, strings, lists and dicts, in this order.

        `secure`, a dict of numbers, is there for secure noise alone.
        """
        return {k: v for k, v in asdict(self).items() if k != "secure" or v is not None}

    def save(self, path: str | Path) -> None:
        """Writes the statement as JSON, whole or not at all, with what ε is recomputed from.

        It has the keys of `as_dict`, null in place of an infinite number, `schema_version`,
        `software`, and `answers` to what NIST SP 800-226 asks of a guarantee.
        `python -m ddp_by_hand.examples.check_privacy FILE` checks its numbers.
        """
        file("path").check("path", path)
        content = {
            "schema_version": SCHEMA_VERSION,
            **_finite(self.as_dict()),
            "answers": self.answers(),
            "software": {name: _version(name) for name in ("ddp-by-hand", "dp-accounting")},
        }
        write_atomically(path, json.dumps(content, indent=1, allow_nan=False) + "\n")

    def write_beside(self, folder: str | Path) -> None:
        """Writes `privacy.json` into a model's folder, and a section of its `README.md`.

        The section is `as_markdown()`. It takes the place of the one from an earlier call, or comes
        at the end.
        """
        file("folder").check("folder", folder)
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        card = folder / "README.md"
        text = card.read_text(encoding="utf-8") if card.exists() else ""
        before, _, rest = text.partition(BEGIN)
        if BEGIN in text and END not in rest:
            raise ValueError(
                f"{card} has {BEGIN!r} and not {END!r}, so where the section ends is not known: "
                "put the second one back, or delete the section"
            )
        section = f"{BEGIN}\n{self.as_markdown()}\n{END}"
        after = rest.partition(END)[2]
        before = before.rstrip() + "\n\n" if before.strip() else ""
        self.save(folder / FILE)
        write_atomically(card, f"{before}{section}{after or chr(10)}")

    def answers(self) -> dict[str, str]:
        """Returns in words what NIST SP 800-226 asks of a guarantee: question -> answer."""
        if math.isinf(self.epsilon):
            parameters = f"no finite ε holds at δ = {self.delta:g}"
        else:
            parameters = f"ε = {self.epsilon:.4g} at δ = {self.delta:g}"
        private = private_constants([self.public_constants])
        return {
            "unit of privacy": self.unit,
            "neighbouring data sets": self.relation,
            "parameters": parameters,
            "mechanism": f"DP-SGD: the gradient of each unit is clipped to norm C = "
            f"{_shown(self.max_grad_norm)}, and their sum gets noise of σ = "
            f"{_shown(self.noise_multiplier)} times C, in {self.steps} steps; batches: "
            f"{self.sampler}",
            "accounting": self.accountant,
            "what an attacker can achieve": self._attack(),
            "trust model": "central: whoever trains has the data, the key of the noise and the "
            "machines, and is trusted with them",
            "what is released": "parameters after each step; losses, norms, batch sizes and the "
            "accuracy on people's data are not covered",
            "constants": f"{', '.join(private)}: from the private number of units, and taken as "
            "public"
            if private
            else "sample rate, steps and divisor are public",
            "noise": "rounded to a grid, from a cryptographic generator, rounding included in ε"
            if self.secure is not None
            else "float32, from a generator that is not cryptographic; attacks by floating point "
            "and by time are not covered",
            "not covered": f"choosing settings on the private data, and other training on it: "
            f"{ENGINES}; data that was used before, as for a tokenizer or a pretrained model",
            "unproved": "; ".join(self.unproved) or "nothing",
        }

    def as_markdown(self) -> str:
        """Returns a section of a model card."""
        rows = [f"| {question} | {answer} |" for question, answer in self.answers().items()]
        return "\n".join(["## Differential privacy", "", "| | |", "| --- | --- |", *rows])

    def _attack(self) -> str:
        rates = [f"{100 * t:.3g} % at {100 * f:g} %" for f, t in self.true_positive_rates]
        return (
            "of whether a unit was in the data, true positives are at most "
            f"{', '.join(rates)} false positives"
        )

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
        known = self.public_constants.items()
        at = [f"{e:.3g} ({d:g})" for d, e in self.curve if d in (1e-6, 1e-4, 1e-2)]
        private = private_constants([self.public_constants])
        lines += [
            ("epsilon (delta)", ", ".join(at)),
            ("Gaussian mu", f"{self.mu:.4g}, for delta of {self.delta:g} and above"),
            ("true positive rate", ", ".join(
                f"{t:.3g} (false: {f:g})" for f, t in self.true_positive_rates)),
            ("public constants", ", ".join(NAMES[name] for name, is_given in known if is_given)),
            ("from private numbers", ", ".join(private)),
            *(("unproved", words) for words in self.unproved),
            ("several engines", "their epsilons on the same data add up"),
        ]  # fmt: skip
        if self.secure is not None:
            lines.append(("secure noise", "rounded to a grid, integers of ChaCha20; included are"))
            lines += [("  " + name, value) for name, value in self.secure.items()]
        shown = [(name, _shown(value)) for name, value in lines]
        return "\n".join([first, *(f"  {name + ': ':24}{text}" for name, text in shown if text)])


def statement_of(
    runs: Sequence[Any],
    account: Account,
    mechanism: Mechanism,
    options: Sequence[Mapping[str, Any]],
    *,
    accountant: str,
    epsilon: float,
    delta: float,
    secure: dict[str, Any] | None,
    curve: Curve,
) -> PrivacyStatement:
    """Returns the statement of an engine's runs.

    Args:
        runs: the `PrivateRun` of each `make_private`.
        mechanism: what their steps release.
        options: of each run, which a proof depends on (`accounting.proofs`).
        accountant: the name of the engine's.
        epsilon: as it was computed.
        secure: what secure noise adds (`noise.secure.certificate`).
        curve: pairs (δ, ε) of these steps.
    """
    history, others = account.history, account.other_batches
    proofs, unproved = covered_by(options)
    is_known = not others and all(run.settings["poisson_sampling"] for run in runs)
    sigmas = [sigma for sigma, _, _ in history] or [run.optimizer.noise_multiplier for run in runs]
    rates = [rate for _, rate, _ in history] or [run.settings["sample_rate"] for run in runs]
    if not is_known:
        curve = [(delta, math.inf)]
    own = mechanism.epsilon is None
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
        curve=curve,
        mu=gaussian_mu(curve, delta),
        true_positive_rates=[(rate, true_positive_rate(curve, rate)) for rate in RATES],
        public_constants={
            name: all(run.public_constants[name] for run in runs)
            for name in runs[0].public_constants
        },
        proofs=proofs,
        unproved=unproved,
        account={
            "accountant": accountant.partition(",")[0] if own else None,
            "sampling": mechanism.sampler,
            "noise": mechanism.name.partition(",")[0],
            **mechanism.constants,
            "histories": [[list(entry) for entry in part] for part in account.histories()],
        },
    )


def private_constants(known: Sequence[Mapping[str, bool]]) -> list[str]:
    """Returns the names of what follows from the private number of units, of `public_constants`."""
    return [NAMES[name] for name in NAMES if not all(one.get(name, True) for one in known)]


def _finite(value: Any) -> Any:
    """Returns what JSON has a form of: null in place of an infinite number."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None  # a clone that is not installed


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
