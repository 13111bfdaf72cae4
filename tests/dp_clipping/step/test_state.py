"""The state machine of a step: each transition from each phase, and what goes with it."""

import pytest
import torch
from torch import nn

from dp_clipping.sampling.usage import SampleUsage, Ticket
from dp_clipping.step.state import BatchNorms, Phase, StepState
from tests.support import engine, zoo

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


def test_without_privacy_noise_needs_no_sums():
    state = StepState(is_private=False)
    state.require_sums()
    state.add_noise()
    state.apply()
    assert state.is_idle


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


class TestSamples:
    def test_a_dropped_step_gives_its_samples_back_and_a_counted_one_does_not(self):
        usage = SampleUsage()
        state = at(OPEN, usage=usage)
        usage.hand_over(Ticket(5))
        usage.use(5)
        state.drop()
        assert usage.left == 5
        usage.use(5)
        state.open([1.0])
        state.count()
        state.drop()
        assert usage.left == 0

    @pytest.mark.parametrize("phase", Phase)
    def test_a_draw_begins_when_the_last_one_is_used(self, phase):
        state = at(phase)
        if phase is OPEN:
            with pytest.raises(RuntimeError, match="batch 3 of the loader begins before"):
                state.begin_batch(3, in_training=True)
            assert state.batch_number is None
        else:
            state.begin_batch(3, in_training=True)
            assert state.batch_number == 3

    def test_a_draw_may_stay_unused_in_evaluation(self):
        state = StepState()
        state.usage.begin(0, in_training=False)
        state.begin_batch(1, in_training=False)
        state.usage.begin(0, in_training=True)
        with pytest.raises(RuntimeError, match="batch 1 of the loader begins before"):
            state.begin_batch(1, in_training=True)
        state.begin_batch(1, in_training=False)


def test_microbatches_skip_all_steps_but_the_last():
    state, kept = StepState(), []
    for do_skip in (True, True, False):
        state.signal_part(do_skip)
        assert state.accumulating == state.skips_next == do_skip
        kept.append(state.take_signal())
        assert not state.skips_next
        assert state.keeps_sums == do_skip
    assert kept == [True, True, False]
    state.signal_part(True)
    state.end_parts()
    assert not any([state.accumulating, state.skips_next, state.keeps_sums])


def test_a_resumed_run_is_between_two_steps():
    state = at(NOISY)
    state.begin_batch(2, in_training=True)
    state.signal_part(True)
    state.resume(9)
    assert (state.phase, state.steps, state.batch_number) == (IDLE, 9, None)
    assert not state.accumulating


def test_a_run_resumed_before_its_first_step_still_looks_for_a_finite_norm():
    state = StepState()
    for steps, had_finite in ((0, False), (1, True), (0, True)):
        state.resume(steps)
        assert state.had_finite is had_finite


def test_one_step_of_an_engine_passes_through_all_phases():
    dataset = torch.utils.data.TensorDataset(*zoo.classes(8, 3, count=2))
    run = engine.build(module=nn.Linear(3, 2), dataset=dataset, noise_generator=engine.fixed())
    model, optimizer, criterion = run.model, run.optimizer, run.criterion
    state, phases = model.step_state, []
    assert optimizer.step_state is state
    note = lambda: phases.append(state.phase)  # noqa: E731
    note()
    criterion(model(dataset.tensors[0][:4]), dataset.tensors[1][:4]).backward()
    note()
    optimizer.pre_step()
    note()
    optimizer.step()
    note()
    assert phases == [IDLE, OPEN, NOISY, IDLE]
    assert state.steps == 1
