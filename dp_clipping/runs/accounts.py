"""The account of an engine's runs: ε so far, what it depends on, and metrics of each step."""

import math
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from dp_clipping.accounting import pld
from dp_clipping.accounting.history import History, joined
from dp_clipping.accounting.ledger import Account
from dp_clipping.accounting.mechanism import DEFAULT, Mechanism
from dp_clipping.accounting.pld import PLDAccountant, interface
from dp_clipping.accounting.proofs import options_of
from dp_clipping.accounting.statement import PrivacyStatement, statement_of
from dp_clipping.accounting.tradeoff import Curve, curve_of
from dp_clipping.arguments.checks import check, checked
from dp_clipping.checkpoint.run import PrivateRun
from dp_clipping.kinds import Argument, instance_of, is_count
from dp_clipping.layers.registered.registry import is_registered
from dp_clipping.profiling.metrics import StepMetrics
from dp_clipping.runs.steps import StepCounter

if TYPE_CHECKING:
    from opacus.accountants.accountant import IAccountant

NAMES = '"pld", "prv", "rdp" or "gdp"'
APPROXIMATE = "states an approximation that may be below the true epsilon"


class Accounts(StepCounter):
    """Keeps the account of what an engine's runs have released.

    Args:
        accountant: `"pld"`; `"prv"`, `"rdp"` or `"gdp"`, Opacus's own; or the name of a registered
            one of Opacus.
        secure: an approximation is refused, as ε would not include what it is for.
    """

    def __init__(self, accountant: str, *, secure: bool = False) -> None:
        instance_of(str, NAMES).check("accountant", accountant)
        self._refuses_approximation = secure
        super().__init__(Account(self._checked(_made(accountant))))
        self._unit: tuple = ()  # of all runs, as `Sampled.unit`
        self._deltas: set[float] = set()  # of which the user was warned

    @property
    def accountant(self) -> "IAccountant":
        """Returns Opacus's accountant. One that has counted the same steps can replace it.

        Setting one that lacks steps of this engine raises ValueError.
        """
        interface()  # of which it is one
        return self._account.accountant

    @accountant.setter
    def accountant(self, accountant: "IAccountant") -> None:
        if self._mechanism is not DEFAULT:
            raise ValueError(
                f"ε comes from the account of the mechanism {self._mechanism.name!r}, and steps "
                "of another accountant were of another one: leave engine.accountant as it is"
            )
        self._account.replace(self._checked(accountant))

    def _checked(self, accountant: "IAccountant") -> "IAccountant":
        if self._refuses_approximation and is_approximate(accountant):
            raise ValueError(
                f"accountant {accountant.mechanism()} {APPROXIMATE}, and secure_mode=True is for "
                "guarantees: build PrivacyEngine(secure_mode=True), whose accountant is pld"
            )
        return accountant

    @checked("engine.get_epsilon(delta=1e-5)")
    def get_epsilon(self, delta: float) -> float:
        """Returns ε spent so far at this δ; infinite if a step had no noise (as in mode `no_dp`).

        Raises ValueError unless 0 < δ < 1; it should be far below one over the number of samples.
        Warns with accountant `"gdp"`, whose ε is an approximation that may be below the true one.
        """
        if self._runs:
            self._warn_of_delta(delta, self._runs[-1].units, 3)
        if any(run.keys.fixed for run in self._runs):
            warnings.warn(
                "noise and sampling come from a fixed seed: anyone who knows it can subtract the "
                "noise, and ε means nothing",
                stacklevel=3,
            )
        if self._approximates:
            warnings.warn(
                f"accountant {self.accountant.mechanism()} {APPROXIMATE}: do not publish it; "
                "PrivacyEngine() counts with pld, an upper bound",
                stacklevel=3,
            )
        return self._epsilon(delta)

    def _epsilon(self, delta: float) -> float:
        is_own = self._mechanism.epsilon is None and self._account.certificate is None
        return self._account.epsilon(delta, None if is_own else self._epsilon_of)

    def _epsilon_of(
        self, histories: Sequence[History], delta: float,
        account: Callable[[History, float], float] | None = None,
    ) -> float:  # fmt: skip
        """Returns ε of the steps of each key.

        Args:
            account: ε of steps with Gaussian noise; default: that of the engine's accountant.
        """
        if self._mechanism.epsilon is not None:
            return self._mechanism.epsilon(histories, delta)
        account, certificate = account or self._account.of_history, self._account.certificate
        history = joined([], [entry for part in histories for entry in part])
        if certificate is None:
            return account(history, delta)
        if not certificate.additions:  # before the first step nothing is known of its parts
            certificate = certificate.as_a_whole()
        return certificate.epsilon(history, delta, account=account)

    def _privacy_curve(self, delta: float, stated: float) -> Curve:
        """Returns ε, which is `stated` at this δ, at others too.

        Opacus's accountants take up to minutes for each: they give one pair.
        """
        of: Callable[[float], float] = self._epsilon
        is_pld = self.accountant.mechanism() == "pld"
        if math.isinf(stated) or (self._mechanism.epsilon is None and not is_pld):
            return [(delta, stated)]
        if self._mechanism.curve is not None:
            of = self._mechanism.curve(self._account.histories(), delta)
        elif self._mechanism.epsilon is None and self._account.certificate is None:
            of = pld.curve(self._account.history, delta)
        elif self._mechanism.epsilon is None:
            account = lru_cache(lambda history: pld.curve(list(history), delta))
            of = partial(
                self._epsilon_of, self._account.histories(),
                account=lambda steps, at: account(tuple(steps))(at),
            )  # fmt: skip
        return curve_of(lambda at: stated if at == delta else of(at), delta)

    def epsilon_at_end(self, optimizer: Any, steps: int, delta: float) -> float:
        """Returns ε after `steps` more steps of an optimizer that `make_private` has returned.

        Steps that are made again, as after a load, are in the account already.
        """
        check("delta", delta)
        Argument("a whole number of steps", is_count).check("steps", steps)
        run = self._run_with(optimizer)
        if not run.keys.fixed:
            steps -= self._account.made_ahead(run.keys.fingerprint, optimizer.steps)
        more = [(optimizer.noise_multiplier, run.settings["sample_rate"], steps)]
        parts = self._account.parts()
        first, part = parts.get(run.keys.fingerprint, (0, []))
        parts[run.keys.fingerprint] = first, joined(part, more if steps > 0 else [])
        return self._epsilon_of([part for _, part in parts.values()], delta)

    @checked("engine.privacy_statement(delta=1e-5)")
    def privacy_statement(self, delta: float) -> PrivacyStatement:
        """Returns the guarantee at this δ with all that it depends on: `print` it.

        It also says ε at other δ, what an attacker can achieve, and what no proof covers.
        `as_dict()` has the same as numbers and strings, `save` writes a file, and `write_beside` a
        file and a section of a model card.

        Raises:
            RuntimeError: before `make_private`.
            ValueError: unless 0 < δ < 1.
        """
        self._refuse_before_a_run("privacy_statement")
        epsilon = self.get_epsilon(delta)
        name = self.accountant.mechanism()
        return statement_of(
            self._runs,
            self._account,
            self._mechanism,
            [self._options_of(run) for run in self._runs],
            accountant=f"{name}, which {APPROXIMATE}" if self._approximates else name,
            epsilon=epsilon,
            delta=delta,
            secure=self._described_secure(),
            curve=self._privacy_curve(delta, epsilon),
        )

    def _options_of(self, run: PrivateRun) -> dict[str, Any]:
        """Returns the options of a run that a proof depends on."""
        own = self._mechanism.epsilon is None
        return options_of(
            run.settings, self.accountant.mechanism() if own else None,
            own_layers=any(map(is_registered, run.model.network.modules())),
            is_adaptive=run.optimizer.adaptive_threshold is not None,
        )  # fmt: skip

    @checked()
    def on_step(
        self,
        call: Callable[[dict[str, Any]], object],
        *,
        delta: float | None = None,
        unprotected: Sequence[str] = (),
        every: int = 1,
    ) -> None:
        """Calls `call(metrics)` after each step of what `make_private` has returned so far.

        The metrics are `step`, and the σ (`noise_multiplier`) and C (`max_grad_norm`) of that step.
        ε covers them, and `epsilon`. What it does not cover is apart, in a dict
        `metrics["unprotected"]`, and there only if asked for by name. Every rank calls this, and
        the callback on each gets the same, of the samples of all ranks.

        Args:
            call: of one dict of numbers.
            delta: adds `epsilon`, spent so far at this δ.
            unprotected: of `"loss"` (the mean over the step's samples), `"samples"` (how many),
                `"clipped_fraction"`, `"median_norm"` and `"nonfinite_samples"`.
            every: 2 leaves out every other step, and so on: ε and norms take time.

        Raises:
            RuntimeError: before `make_private`; for `unprotected` with `hide_unprotected=True`.
            ValueError: for an unknown name, or mode `no_dp`, which has no norms.
        """
        self._refuse_before_a_run("on_step")
        epsilon = None if delta is None else partial(self.get_epsilon, delta)
        metrics = StepMetrics(call, epsilon, unprotected, every)
        for run in self._runs:
            metrics.attach(run.model, run.optimizer)

    @property
    def _approximates(self) -> bool:
        """Returns whether ε is an approximation, and no upper bound."""
        is_of_accountant = self._mechanism.epsilon is None
        return is_of_accountant and is_approximate(self.accountant)

    def _warn_of_delta(self, delta: float, units: int, stacklevel: int) -> None:
        """Warns, once per δ, of a δ that is too large for this number of units."""
        if delta in self._deltas or not units or delta < 1 / units:
            return
        self._deltas.add(delta)
        example = min(0.1 / units, units**-1.1)
        warnings.warn(
            f"delta is {delta:g}, and the data have {units} units of privacy: from 1 / {units} = "
            f"{1 / units:.2g} on, publishing one of them as it is satisfies (ε, δ); give less, "
            f"such as {example:.1g}",
            stacklevel=stacklevel + 1,
        )

    def _described_secure(self) -> dict[str, Any] | None:
        """Returns what ε includes of secure noise, and the grids of the coming steps."""
        certificate = self._account.certificate
        if certificate is None:
            return None
        stds = [
            run.optimizer.noise_multiplier * math.hypot(*run.model.thresholds.clip_norms())
            for run in self._runs
        ]
        return certificate.described(self._account.history, stds)

    def _refuse_other_mechanism(self, mechanism: Mechanism) -> None:
        """Raises ValueError if no account covers this mechanism and the steps so far."""
        before = self._mechanism if self._runs else None
        mechanism.refuse_beside(before, self._account.history)
        self._mechanism = mechanism

    def _refuse_other_units(self, unit: tuple[int, bytes]) -> None:
        """Raises ValueError if the account counts other units than these, as `Sampled.unit`."""
        if self._runs and unit != self._unit:
            each, before = unit[0], self._unit[0]
            what = (
                "unit_ids make other units than those that this engine has accounted for"
                if each == before
                else f"examples_per_unit is {each}, and this engine has accounted for units of "
                f"{before}"
            )
            raise ValueError(
                f"{what}: ε of both together is that of neither, use a PrivacyEngine for each"
            )
        self._unit = unit

    def _refuse_before_a_run(self, method: str) -> None:
        if not self._runs:
            raise RuntimeError(
                f"nothing is private yet: call engine.make_private(..) before {method}"
            )

    def _run_of(self, module: Any, optimizer: Any, loader: Any, name: str = "module") -> PrivateRun:
        for run in self._runs:
            if module is run.model or module is run.model.returned:
                for other, given, own in (
                    ("optimizer", optimizer, run.optimizer),
                    ("data_loader", loader, run.loader),
                ):
                    if given is not None and given is not own:
                        raise ValueError(
                            f"{other} is not the one that make_private returned with this module"
                        )
                return run
        raise ValueError(
            f"{name} is not one that this engine's make_private returned: give that one"
        )


def _made(name: str) -> "IAccountant":
    """Returns a new accountant of this name."""
    if name == "pld":
        return PLDAccountant()
    try:
        from opacus.accountants import create_accountant  # importing Opacus takes seconds

        return create_accountant(mechanism=name)
    except ValueError as error:
        raise ValueError(f"accountant: {error}; give {NAMES}") from error


def is_approximate(accountant: "IAccountant") -> bool:
    """Returns whether an accountant's ε may be below the true one."""
    from opacus.accountants import GaussianAccountant

    return isinstance(accountant, GaussianAccountant)
