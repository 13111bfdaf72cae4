"""Counts an engine's steps by the noise key that they used, so that no load loses a step.

A history of Opacus's accountants is a list of (σ, q, number of steps). It does not show whether its
steps are among those of another history, and a load that replaced the engine's history by the saved
one would lower ε if the engine had made other steps since. So the steps of each key are listed
apart, here and in a checkpoint.

Step n of a key always has the same noise for the same samples. So two lists of one key agree as
far as both go, and the longer one has the steps of both; lists of different keys compose. A run
that was set back makes the steps of its key again: the same releases, which the account has
already. That holds only if they are made alike. With another C or σ, other samples, or parameters
that another learning rate has led to, two results under the same noise could be solved for the
difference of their sums. So a step with other such settings is refused. Other parameters for
another reason (changed by hand, or by other code) cannot be seen here.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dp_clipping.accounting.history import (
    History,
    HistoryPart,
    Parts,
    after,
    count,
    joined,
    shared,
    totals_of,
)
from dp_clipping.accounting.pld import interface
from dp_clipping.kinds import instance_of

if TYPE_CHECKING:
    from opacus.accountants.accountant import IAccountant

OTHERS = ""
"""In place of a fingerprint: steps that no run of this engine has made (of a user's own mechanism,
or of an accountant that was passed on)."""


OF_ONE_KIND = (
    "accountant gdp has no ε of steps with several noise multipliers or sample rates: keep them, "
    "or build PrivacyEngine()"
)


def _computed(accountant: "IAccountant", delta: float) -> float:
    """Returns ε of the accountant's steps by its own method, which `refuse_direct` hides.

    Raises:
        ValueError: Opacus's accountant finds none: gdp searches between 0 and 500, and prv's errors
            may be larger than δ.
    """
    try:
        return max(0.0, float(type(accountant).get_epsilon(accountant, delta)))
    except (ValueError, RuntimeError) as error:
        name = accountant.mechanism()
        if name == "pld":
            raise
        where = " between 0 and 500" if name == "gdp" else ""
        raise ValueError(
            f"accountant {name} finds no ε{where} at delta={delta:g}: build "
            "PrivacyEngine(), whose accountant pld computes ε for any noise"
        ) from error


@dataclass(frozen=True)
class Release:
    """Identifies a step's release by its key and public settings.

    Attributes:
        fingerprint: the fingerprint of the key.
        number: the step's number in the noise stream of its key.
        sigma, rate: as they are counted.
        clip_norms: C, or those of the clipping groups.
        batch_number: the number of its batch in the loader; None if it is made of another batch.
        settings: those that the sum and what becomes of it depend on, such as the learning rate.
    """

    fingerprint: str
    number: int
    sigma: float
    rate: float
    clip_norms: tuple[float, ...]
    batch_number: int | None
    settings: tuple = ()

    @property
    def digest(self) -> int:
        """Returns a digest of the settings that are not in an accountant's history."""
        return hash((self.clip_norms, self.batch_number, self.settings))


class Account:
    """Opacus's accountant, with a record of which of its steps belong to which run.

    A step of this process releases itself and all steps that it was made on top of. Released steps
    stay in the account whatever is loaded later. An account that was only loaded, without a step
    after it, is replaced by the next load, because looking at checkpoints releases nothing.

    Attributes:
        other_batches: private steps on batches that no known sampling has made.
        computes: ε comes from Opacus's accountant, and not from another account.
        certificate: what secure noise costs the steps of all runs; None without secure noise.
    """

    def __init__(self, accountant: "IAccountant") -> None:
        self.accountant = accountant
        self._parts: Parts = {}
        self._released: Parts = {}
        self._made: dict[tuple[str, int], int] = {}  # digests of this process's steps
        self._is_used = False  # a step was made since the last load
        self._counted: History | None = None  # the history after the last step
        self._loaded_for: object = None
        self._run_of: dict[str, object] = {}  # the one that makes steps with a key
        self._is_direct = self.computes = True
        self.other_batches = 0
        self.certificate: Any = None

    @property
    def history(self) -> History:
        return self.accountant.history

    def epsilon(
        self, delta: float, of: Callable[[Sequence[History], float], float] | None = None
    ) -> float:
        """Returns ε at this δ; infinite if a step had no noise.

        Args:
            of: computes it from the steps of each key; default: the accountant.
        """
        self._reconcile()
        if any(sigma == 0 for sigma, _, _ in self.history):
            return math.inf
        if not self.history:
            return 0.0
        if of is not None:
            if OTHERS in self._parts:
                raise RuntimeError(
                    "engine.accountant has steps that no run of this engine has made, and ε comes "
                    "from an account of other noise or sampling, which does not cover them: let "
                    "them be counted by an accountant of their own"
                )
            return max(0.0, float(of(self.histories(), delta)))
        return _computed(self.accountant, delta)

    def histories(self) -> list[History]:
        """Returns the steps of each key."""
        return [list(part) for _, part in self.parts().values() if part]

    def of_history(self, history: History, delta: float) -> float:
        """Returns ε of these steps with Gaussian noise, as this accountant computes it.

        Raises:
            ValueError: for steps of several σ or rates, of which Opacus's gdp counts the last one.
        """
        if self.accountant.mechanism() == "gdp" and len(history) > 1:
            raise ValueError(OF_ONE_KIND)
        if not history:
            return 0.0
        other = copy(self.accountant)
        other.history = history
        return _computed(other, delta)

    def refuse_direct(self, *, computes: bool) -> None:
        """Lets the accountant refuse ε, which is not the one of these steps.

        Args:
            computes: ε comes from it all the same, of other numbers.
        """
        setattr(self.accountant, "get_epsilon", _refuse_epsilon)  # noqa: B010
        self._is_direct, self.computes = False, computes

    def cover(self, certificate: Any) -> None:
        """Includes what a run with this `noise.secure.certificate.Certificate` may cost."""
        known = self.certificate
        self.certificate = certificate if known is None else known.joined(certificate)

    def _reconcile(self, *, may_lack: bool = False) -> None:
        """Records steps that others have added to the accountant's history as no run's.

        Args:
            may_lack: the history is about to be replaced. Otherwise RuntimeError if it lacks steps
                that were counted.
        """
        if self.accountant.history == self._counted:
            return
        counted: Counter[tuple[float, float]] = Counter()
        for _, part in self._parts.values():
            counted += totals_of(part)
        now = totals_of(self.history)
        lost, more = counted - now, now - counted
        if lost and not may_lack:
            raise RuntimeError(
                f"engine.accountant has lost {lost.total()} steps that this engine has counted: "
                "its history was changed or loaded from elsewhere; load with "
                "engine.load_checkpoint, which keeps them"
            )
        if more:
            self._add(OTHERS, 0, [(*how, steps) for how, steps in more.items()])

    def replace(self, accountant: "IAccountant") -> None:
        """Counts with another accountant from here on.

        Steps that it has counted and this one has not are recorded as steps of no run.

        Raises:
            ValueError: if it lacks steps that this one has counted.
        """
        instance_of(interface(), "one of opacus.accountants").check("accountant", accountant)
        self._reconcile(may_lack=True)
        lacking = totals_of(self.history) - totals_of(accountant.history)
        if lacking:
            raise ValueError(
                f"accountant lacks {lacking.total()} steps that this engine has counted, and ε "
                "would forget them: set an accountant before the first step, or one that has "
                "counted them too"
            )
        self.accountant = accountant
        self._reconcile(may_lack=True)
        if not self._is_direct:
            self.refuse_direct(computes=self.computes)

    def hand_over(self, fingerprint: str, run: object) -> None:
        """Records that this run has loaded a key, and goes on with it."""
        self._run_of[fingerprint] = run

    def refuse_other_run(self, fingerprint: str, run: object) -> None:
        """Raises RuntimeError if another run of the engine goes on with this run's key."""
        if self._run_of.setdefault(fingerprint, run) is not run:
            raise RuntimeError(
                "another run of this engine has loaded a checkpoint of this one and goes on with "
                "its key, so both would have the same noise: go on with that run, or load one of "
                "them with engine.load_checkpoint(.., new_keys=True)"
            )

    def made_ahead(self, fingerprint: str, number: int) -> int:
        """Returns how many steps from this one on the account has, which are made again."""
        return max(0, self._next(fingerprint) - number)

    def _next(self, key: str) -> int:
        """Returns the number of the step after the last one of a key."""
        first, part = self._parts.get(key, (0, []))
        return first + count(part)

    def count(self, step: Release, *, key_is_fixed: bool) -> None:
        """Counts one step more, unless the account has it and it is made again.

        Args:
            key_is_fixed: of a test, where runs with one key are not the same run: each step counts.

        Raises:
            RuntimeError: if it was made with another σ, sample rate, C, setting of the optimizer or
                the criterion, or of another batch.
        """
        self._reconcile()
        if not key_is_fixed and self._holds(step):
            return
        before = list(self.accountant.history)
        if self.computes:
            try:
                self.accountant.step(noise_multiplier=step.sigma, sample_rate=step.rate)
            except BaseException as error:
                self.accountant.history = before  # Opacus's gdp forgets it when σ changes
                if isinstance(error, ValueError) and self.accountant.mechanism() == "gdp":
                    raise ValueError(OF_ONE_KIND) from error
                raise
        else:  # also where σ changes, of which gdp has no account
            self.accountant.history = joined(before, [(step.sigma, step.rate, 1)])
        self._add(step.fingerprint, step.number, [(step.sigma, step.rate, 1)])
        self._made[step.fingerprint, step.number] = step.digest
        self._counted = list(self.accountant.history)

    def _holds(self, step: Release) -> bool:
        if step.number >= self._next(step.fingerprint):
            return False
        first, history = self._parts[step.fingerprint]
        same = after(history, step.number - first)[0][:2] == (step.sigma, step.rate)
        made = self._made.get((step.fingerprint, step.number))
        if not same or made not in (None, step.digest):
            raise RuntimeError(
                f"step {step.number} was made before, from the same key and with another "
                "noise_multiplier, max_grad_norm, sample rate, batch, learning rate or other "
                "setting of the optimizer or the criterion: two results under the same noise give "
                "away the difference of their sums; load with new_keys=True, or give the "
                "learning-rate scheduler its state of that step, scheduler.load_state_dict(..)"
            )
        self._is_used = True
        return True

    def _add(self, key: str, number: int, new: History) -> None:
        """Appends steps to those of a key, whose first one has this number."""
        _, part = self._parts.setdefault(key, (number, []))
        part[-1:] = joined(part[-1:], new)
        self._is_used = True

    def parts(self) -> Parts:
        """Returns the parts for a checkpoint."""
        self._reconcile()
        return deepcopy(self._parts)

    def beyond(self, saved: Mapping[str, HistoryPart], run: object) -> Parts:
        """Returns released steps that a load of `saved` for this run would forget."""
        self._reconcile(may_lack=True)
        lost = {}
        for key, (first, part) in self._released_until(run).items():
            there = saved.get(key, (first, []))[1]
            lost[key] = first, after(part, shared(part, there))
        return {key: (first, part) for key, (first, part) in lost.items() if part}

    def _released_until(self, run: object) -> Parts:
        """Returns the steps that were released before a load for this run."""
        released = dict(self._released)
        is_anothers = self._loaded_for is not None and self._loaded_for is not run
        if self._is_used or is_anothers:
            for key, (first, part) in self._parts.items():
                if count(part) > count(released.get(key, (first, []))[1]):
                    released[key] = first, list(part)
        return released

    def load(
        self,
        state: Mapping[str, Any],
        saved: Mapping[str, HistoryPart],
        unsaved: Parts,
        run: object,
    ) -> None:
        """Replaces this run's account by a saved one and the steps that `beyond` has found.

        Args:
            state: the saved accountant's `state_dict`.
            saved: its steps by key.
        """
        self._released, self._is_used = self._released_until(run), False
        # Of an older file: prv keeps the same history as pld, which has replaced it as the default.
        own = {**deepcopy(state), "mechanism": self.accountant.mechanism()}
        self.accountant.load_state_dict(own)
        self._parts = {key: (first, list(part)) for key, (first, part) in saved.items()}
        for key, (first, part) in unsaved.items():
            self.accountant.history = joined(self.history, part)
            first, there = self._parts.get(key, (first, []))
            self._parts[key] = first, joined(there, part)
        self._loaded_for, self._counted = run, None


def _refuse_epsilon(*_: Any, **__: Any) -> float:
    raise RuntimeError(
        "engine.accountant computes ε of Poisson batches with independent Gaussian noise, which is "
        "not that of this engine's steps: call engine.get_epsilon(delta=1e-5)"
    )
