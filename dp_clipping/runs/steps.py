"""Describes what a step releases, as the account counts it, and says what it should not."""

import logging
import warnings
from collections.abc import Callable
from typing import Any

from dp_clipping.accounting.ledger import Release, public_of, settings_of
from dp_clipping.accounting.statement import private_constants
from dp_clipping.checkpoint.run import PrivateRun
from dp_clipping.sampling.schemes import FIXED

LOG = logging.getLogger(__name__)
PRIVATE_SIZE = (
    "epsilon takes the number of samples as public, because {} of this training came from it: "
    "if it is private, give {} (docs/sharp_edges.md says how)"
)
TO_STEP = 5  # frames from `Accounts._count` to the user's call of `optimizer.step()`
OTHER_BATCH = (
    "the batch of this step did not come from the data_loader that make_private returned with this "
    "model: it is no batch of sampling={sampling!r}, and the ε that is stated does not hold; use "
    "the returned one, model, optimizer, criterion, loader = engine.make_private(..), and for x, y "
    "in loader:"
)


def release_of(run: PrivateRun) -> Release:
    """Returns what the step that a run is about to make releases."""
    optimizer, state = run.optimizer, run.model.step_state
    is_private = run.model.policy is not None
    return Release(
        run.keys.fingerprint,
        optimizer.steps,
        sigma=state.settings.noise_multiplier if is_private else 0.0,
        rate=run.settings["sample_rate"] * optimizer.accumulated_iterations,
        clip_norms=tuple(state.clip_norms) if is_private else (),
        batch_number=state.batch_number,
        settings=(state.settings, settings_of(optimizer), public_of(run.criterion)),
    )


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
