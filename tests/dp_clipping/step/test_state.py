"""The state machine of a step: each transition from each phase, and what goes with it."""

import pytest
import torch

from dp_clipping.step.state import BatchNorms, Phase, StepState

IDLE, OPEN, NOISY = Phase

NO_BACKWARD = "without a backward since the last one"
NO_NOISE = "sums without noise must not be applied"
TABLE = {
    "open": {IDLE: OPEN, OPEN: "open already", NOISY: OPEN},
    "add_noise": {IDLE: NO_BACKWARD, OPEN: NOISY, NOISY: NO_BACKWARD},
    "apply": {IDLE: NO_NOISE, OPEN: NO_NOISE, NOISY: IDLE},
    "drop": dict.fromkeys(Phase, IDLE),
    "resume": dict.fromkeys(Phase, IDLE),
}
ARGUMENTS = {"open": ([3.0, 4.0],), "resume": (7,)}
WALK = {IDLE: (), OPEN: ("open",), NOISY: ("open", "add_noise")}


def at(phase: Phase, **options) -> StepState:
    state = StepState(**options)
    for transition in WALK[phase]:
        take(state, transition)
    assert state.phase is phase
    return state


def take(state: StepState, transition: str) -> None:
    getattr(state, transition)(*ARGUMENTS.get(transition, ()))


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("transition", TABLE)
def test_each_transition_from_each_phase(transition, phase):
    state, after = at(phase), TABLE[transition][phase]
    if isinstance(after, Phase):
        take(state, transition)
        assert state.phase is after
        is_now = (state.is_idle, state.is_open, state.is_noisy)
        assert is_now == tuple(after is one for one in Phase)
        return
    with pytest.raises(RuntimeError, match=after):
        take(state, transition)
    assert state.phase is phase


@pytest.mark.parametrize("ends", ["drop", "resume"])
def test_a_refusal_ends_with_its_step(ends):
    state = at(OPEN)
    state.refuses_late = True
    with state.refused_together():
        raise ValueError("sample 3 is cut")
    assert state.refusal == "sample 3 is cut"
    take(state, ends)
    assert state.refusal is None


class TestASteps:
    def test_settings_are_fixed_as_it_opens(self):
        state, seen = StepState(), []
        state.on_open = lambda: seen.append((state.phase, state.sensitivity))
        state.open([3.0, 4.0])
        assert seen == [(OPEN, 5.0)]

    def test_settings_that_are_refused_leave_nothing(self):
        state = StepState()
        state.on_open = lambda: 1 / 0
        with pytest.raises(ZeroDivisionError):
            state.open([1.0])
        assert state.is_idle

    def test_norms_last_until_sums_are_dropped(self):
        state = at(OPEN)
        state.norms.append(BatchNorms(torch.ones(2), torch.ones(1, 2)))
        state.add_noise()
        state.apply()
        assert state.norms
        state.drop()
        assert not state.norms

    def test_numbers_are_never_given_twice(self):
        state, numbers = StepState(), []
        for noisy in (True, False, True):
            state.open([1.0])
            numbers.append(state.count())
            if noisy:
                state.add_noise()
                state.apply()
            state.drop()
        assert (numbers, state.steps) == ([0, 1, 2], 3)


def test_a_run_resumed_before_its_first_step_still_looks_for_a_finite_norm():
    state = StepState()
    for steps, had_finite in ((0, False), (1, True), (0, True)):
        state.resume(steps)
        assert state.had_finite is had_finite
