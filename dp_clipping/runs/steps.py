"""Counts a step: what it releases, as the account takes it, and what is said of it before."""

import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

from torch import Tensor

from dp_clipping.accounting.ledger import Account, Release
from dp_clipping.accounting.mechanism import DEFAULT
from dp_clipping.accounting.statement import private_constants
from dp_clipping.checkpoint.run import PrivateRun
from dp_clipping.kinds import shown
from dp_clipping.sampling.schemes import FIXED, SAMPLINGS

LOG = logging.getLogger(__name__)
PRIVATE_SIZE = (
    "epsilon takes the number of samples as public, because {} of this training came from it: "
    "if it is private, give {} (docs/sharp_edges.md says how)"
)
TO_STEP = 5  # frames from `StepCounter._count` to the user's call of `optimizer.step()`
OTHER_BATCH = (
    "the batch of this step did not come from the data_loader that make_private returned with this "
    "model: it is no batch of sampling={sampling!r}, and the ε that is stated does not hold; use "
    "the returned one, model, optimizer, criterion, loader = engine.make_private(..), and for x, y "
    "in loader:"
)
COUNTED_BY_A_HOOK = (
    "a step hook has counted the step in engine.accountant, where the engine counts every step by "
    "itself: remove the hook (accountant.get_optimizer_hook_fn(..)), or let it count in an "
    "accountant of its own"
)


class StepCounter(ABC):
    """Counts the steps of an engine's runs in its account."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._runs: list[PrivateRun] = []
        self._mechanism = DEFAULT  # of all runs

    @abstractmethod
    def epsilon_at_end(self, optimizer: Any, steps: int, delta: float) -> float:
        """Returns ε after `steps` more steps of an optimizer."""

    def _count(self, optimizer: Any) -> None:
        """Counts a step, before it changes a parameter; once, also if it is made again."""
        run, state = self._run_with(optimizer), optimizer.step_state
        fingerprint = run.keys.fingerprint
        say_of_constants(run)
        certificate = run.certificate and run.certificate.with_step(additions_of(run))
        is_private = optimizer.model.policy is not None
        if is_private:
            if not run.keys.fixed:
                self._account.refuse_other_run(fingerprint, run)
            if state.batch_number is None and self._mechanism.sampler != SAMPLINGS[0]:
                raise RuntimeError(OTHER_BATCH.format(sampling=self._mechanism.sampler))
            look_at_plan(run, self.epsilon_at_end)
        if optimizer.hooks:
            before = list(self._account.history)
            try:
                optimizer.run_step_hooks()
            finally:
                counted = self._account.history != before
                self._account.accountant.history = before
            if counted:
                raise RuntimeError(COUNTED_BY_A_HOOK)
        step = release_of(run)
        if step.batch_number is None and is_private and step.sigma:
            if not self._account.other_batches and run.poisson is not None:
                warnings.warn(OTHER_BATCH.format(sampling=SAMPLINGS[0]), stacklevel=TO_STEP)
            self._account.other_batches += 1
        if certificate is not None:
            self._account.cover(certificate)
        self._account.count(step, key_is_fixed=run.keys.fixed)
        run.certificate = certificate

    def _run_with(self, optimizer: Any) -> PrivateRun:
        for run in self._runs:
            if run.optimizer is optimizer:
                return run
        raise ValueError(
            f"optimizer is {shown(optimizer)}, and none that this engine's make_private returned: "
            "give that one"
        )


def release_of(run: PrivateRun) -> Release:
    """Returns what the step that a run is about to make releases."""
    optimizer, state = run.optimizer, run.model.step_state
    is_private = run.model.policy is not None
    return Release(
        run.keys.fingerprint,
        optimizer.steps,
        sigma=state.settings.noise_multiplier if is_private else 0.0,
        rate=run.settings["sample_rate"],
        clip_norms=tuple(state.clip_norms) if is_private else (),
        batch_number=state.batch_number,
        settings=(state.settings, settings_of(optimizer), public_of(run.criterion)),
    )


def settings_of(optimizer: Any) -> tuple:
    """Returns the settings of an optimizer's groups, but for tensors on a GPU, which take time."""
    found = []
    for group in optimizer.param_groups:
        for name, value in group.items():
            if name not in ("params", "param_names", "initial_lr"):
                found.append((name, repr(_plain(value) if isinstance(value, Tensor) else value)))
    return tuple(found)


def public_of(criterion: Any) -> tuple:
    """Returns the name of the user's criterion, and settings: a partial's, and of PyTorch's own."""
    own, bound = criterion.criterion, []
    while isinstance(own, partial):
        bound += [*map(_plain, own.args), *own.keywords, *map(_plain, own.keywords.values())]
        own = own.func
    kind = own if isinstance(own, FunctionType) else type(own)
    values = vars(own) if (kind.__module__ or "").startswith("torch.") else {}
    values = values | values.get("_buffers", {})
    names = [name for name in values if not name.startswith("_") and name != "training"]
    return (kind.__qualname__, repr(bound), repr([(name, _plain(values[name])) for name in names]))


def _plain(value: Any) -> Any:
    """Returns a setting as what it can be compared by, which objects at an address are not."""
    if isinstance(value, Tensor):
        return value.tolist() if value.device.type == "cpu" else None
    return value if isinstance(value, bool | int | float | str) else None


def additions_of(run: PrivateRun) -> int:
    """Returns in how many additions a unit's contribution to this step takes part, at most."""
    assert run.certificate is not None
    state, settings = run.model.step_state, run.settings
    each = settings.get("examples_per_step") or settings["examples_per_unit"]
    each *= settings["views"]
    largest = state.ticket.largest
    if largest is not None and any(len(one.norms) * each > largest for one in state.norms):
        largest = None  # parts were put together again
    part = None if largest is None else max(1, largest // each)
    return run.certificate.additions_of(part, run.world_size, len(state.norms))


def look_at_plan(run: PrivateRun, epsilon_at_end: Callable[[Any, int, float], float]) -> None:
    """Warns, once, of a step that the run's target was not computed for.

    With `stop=True` one after the planned ones raises RuntimeError.

    Args:
        epsilon_at_end: of the optimizer, so many more steps, and δ.
    """
    plan = run.plan
    if plan is None:
        return
    sigma = run.model.step_state.settings.noise_multiplier
    what, instead = plan.missed_by(run.optimizer.steps, sigma)
    if what and what not in run.said:
        run.said.add(what)
        spent = epsilon_at_end(run.optimizer, 1, plan.delta)
        warnings.warn(
            f"{what}: with this step epsilon is {spent:.4g} at delta={plan.delta:g}, and grows "
            f"with each further one; {instead}",
            stacklevel=TO_STEP + 1,
        )


def look_at_account(
    run: PrivateRun, path: Any, epsilon_at_end: Callable[[Any, int, float], float]
) -> None:
    """Warns, after a load, if ε will end above the run's target, by steps that are no part of it.

    It computes ε where the account has other steps than the plan's.

    Args:
        path: of the checkpoint.
        epsilon_at_end: of the optimizer, so many more steps, and δ.
    """
    plan, account, taken = run.plan, run.account, run.optimizer.steps
    if plan is None:
        return
    known = taken + account.made_ahead(run.keys.fingerprint, taken)
    if account.history == [(plan.noise_multiplier, run.settings["sample_rate"], known)]:
        return
    spent = epsilon_at_end(run.optimizer, max(0, plan.steps - taken), plan.delta)
    if spent > plan.epsilon:
        now = epsilon_at_end(run.optimizer, 0, plan.delta)
        warnings.warn(
            f"{path}: the account has steps that target_epsilon={plan.epsilon:g} was not computed "
            f"for, so epsilon is {now:.4g} at delta={plan.delta:g} and ends at {spent:.4g}: end "
            "the training earlier, or load into a run with a smaller target_epsilon",
            stacklevel=4,
        )


def say_of_constants(run: PrivateRun) -> None:
    """Logs, in a run's first step, which constants follow from the private number of units.

    Not where no ε is stated that takes them: `poisson_sampling=False` has said that.
    """
    if PRIVATE_SIZE in run.said or not run.settings["poisson_sampling"]:
        return
    run.said.add(PRIVATE_SIZE)
    known = {name: x for name, x in run.public_constants.items() if name != "account"}
    private = private_constants([known])
    if private and run.rank == 0 and run.model.policy is not None:
        is_fixed = run.settings["sampling"] in FIXED  # whose rate follows from the steps
        give = [name for name, is_public in known.items() if not is_public]
        give = [name for name in give if not (is_fixed and name == "sample_rate")]
        give = [f"{name}=".replace("divisor", "expected_batch_size") for name in give]
        LOG.warning(PRIVATE_SIZE.format(" and ".join(private), " and ".join(give)))
