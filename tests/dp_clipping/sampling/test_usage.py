"""What the loader hands out is in one sum of one step, once."""

from contextlib import nullcontext

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager as OpacusBatchMemoryManager
from torch.utils.data import DataLoader

from dp_clipping import BatchMemoryManager
from dp_clipping.sampling.usage import SampleUsage, Ticket
from tests.support.engine import backward, build, data, fixed, in_parts, step

TWICE = "a sample is in one backward of one step only"
SECOND_DRAW = "a step is one batch"


def first_draw(run):
    """A batch with samples, of an iteration that goes on."""
    batches = iter(run.loader)
    batch = next(batches)
    assert len(batch[0]) > 1
    return batches, batch


def make(**changes):
    return build(noise_generator=fixed(), noise_multiplier=0.0, **changes)


@pytest.mark.parametrize("mode", ["ghost", "bookkeeping", "per_sample"])
def test_a_batch_counts_once(mode):
    run = make(grad_sample_mode=mode)
    _, batch = first_draw(run)
    backward(run, batch)
    with pytest.raises(RuntimeError, match=TWICE):
        backward(run, batch)
    run.optimizer.step()
    run.optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=TWICE):
        backward(run, batch)  # in a second step
    with pytest.raises(RuntimeError, match="without a backward"):
        run.optimizer.step()


def test_a_second_draw_of_an_iteration():
    run = make()
    batches, batch = first_draw(run)
    with pytest.raises(RuntimeError, match=SECOND_DRAW):
        next(batches)
    backward(run, batch)
    run.optimizer.step()


def test_a_batch_that_was_left_comes_again():
    run = make()
    _, batch = first_draw(run)
    again = next(iter(run.loader))
    assert torch.equal(batch[0], again[0])
    backward(run, again)
    with pytest.raises(RuntimeError, match=TWICE):
        backward(run, batch)
    run.optimizer.step()
    run.optimizer.zero_grad()
    assert not torch.equal(next(iter(run.loader))[0], batch[0])


def test_a_loop_cannot_choose_among_batches():
    run = make()
    for _ in range(3):
        step(run, next(iter(run.loader)))
    batches = [next(iter(run.loader))[0] for _ in range(3)]  # it waits for another batch
    assert all(torch.equal(batch, batches[0]) for batch in batches)
    assert (run.loader.position, run.optimizer.steps) == (3, 3)
    for batch in run.loader:
        step(run, batch)
    assert run.loader.position == run.optimizer.steps == 3 + len(run.loader)


def test_prefetched_batches_are_not_chosen_among_either():
    run = make(data_loader=DataLoader(data(), batch_size=3, num_workers=1))
    batch, again = (next(iter(run.loader))[0] for _ in range(2))
    assert torch.equal(batch, again)


@pytest.mark.parametrize("iterations", [1, 3])
def test_nor_in_evaluation(iterations):
    """It may take the first batch of each iteration, or several of one."""
    run = make()
    run.model.eval()
    for _ in range(iterations):
        batches = iter(run.loader)
        for _ in range(4 - iterations):
            batch = next(batches)
    run.model.train()
    with pytest.raises(RuntimeError, match="no step has used batch 0, which was passed over"):
        backward(run, batch)
    step(run, next(iter(run.loader)))
    assert run.loader.usage.ticket.number == 3


def numbers_of_pass(run, loader=None):
    """The numbers of the batches of a pass in evaluation, and how often each was yielded."""
    run.model.eval()
    found = [run.loader.usage.ticket.number for _ in loader or run.loader]
    run.model.train()
    return found


@pytest.mark.parametrize("manager", [None, BatchMemoryManager, OpacusBatchMemoryManager])
@pytest.mark.parametrize("is_left", [False, True])
def test_each_pass_in_evaluation_has_new_batches(manager, is_left):
    """Steps go on after them, with a batch that was `left` in training before."""
    run = make(sample_rate=0.5, steps=4)
    left = next(iter(run.loader))[0] if is_left else None
    seen = [0] * is_left
    with nullcontext() if manager is None else in_parts(run, 2, manager) as loader:
        for _ in range(3):
            found = sorted(set(numbers_of_pass(run, loader)))
            assert found == list(range(len(seen), len(seen) + len(run.loader)))
            seen += found
    batch = next(iter(run.loader))
    assert run.loader.usage.ticket.number == (0 if is_left else len(seen))
    assert left is None or torch.equal(batch[0], left)
    step(run, batch)
    assert run.loader.position == len(seen) + (not is_left)


def test_a_loop_that_trains_in_a_batch_of_evaluation_goes_on():
    """One whose body ends in evaluation, as on a test set, and begins with `model.train()`."""
    run = make()
    for _ in range(2):
        for batch in run.loader:
            run.model.train()
            step(run, batch)
            run.model.eval()
    assert run.loader.position == run.optimizer.steps == 2 * len(run.loader)


def test_one_that_was_left_after_its_backward_is_no_batch_of_the_next_iteration():
    run = make()
    for batch in run.loader:
        backward(run, batch)
        break
    with pytest.raises(RuntimeError, match=SECOND_DRAW):
        next(iter(run.loader))
    run.optimizer.step()
    run.optimizer.zero_grad()
    step(run, next(iter(run.loader)))
    assert (run.loader.position, run.optimizer.steps) == (2, 2)


def test_the_last_batch_of_an_epoch_that_was_left_is_the_first_of_the_next():
    run, numbers = make(), []
    for _ in range(3):
        for i, batch in enumerate(run.loader):
            if i == 2:
                break
            step(run, batch)
            numbers.append(run.loader.usage.ticket.number)
    assert numbers == [0, 1, 2, 3, 4, 5]


def test_parts_that_may_have_samples_in_common():
    """Uses parts as several losses do, each of the samples that have its label."""
    run = make()
    _, (x, y) = first_draw(run)
    has = torch.arange(len(x)) < len(x) - 1
    for first, second in (
        ((x[has], y[has]), (x[~has], y[~has])),  # copies
        ((x[:-1], y[:-1]), (x[:1].clone(), y[:1])),
        ((x[:1], y[:1]), (x[:1], y[:1])),
    ):
        backward(run, first)
        with pytest.raises(RuntimeError, match=f"may have had some of them: {TWICE}.*mask"):
            backward(run, second)
        run.optimizer.zero_grad()
    backward(run, (x[:1], y[:1]))
    backward(run, (x[1:], y[1:]))
    run.optimizer.step()


def test_parts_that_are_declared():
    run, whole = make(), make()
    (_, (x, y)), (_, batch) = first_draw(run), first_draw(whole)
    run.optimizer.signal_skip_step(True)
    backward(run, (x[:1].clone(), y[:1]))
    with pytest.raises(RuntimeError, match="may have had some of them"):
        backward(run, (x[:1].clone(), y[:1]))  # before the end of the part
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.optimizer.signal_skip_step(False)
    backward(run, (x[1:].clone(), y[1:]))
    backward(whole, batch)
    run.optimizer.step()
    whole.optimizer.step()
    for a, b in zip(run.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_declared_parts_have_no_more_samples_than_the_batch():
    run = make()
    _, (x, y) = first_draw(run)
    run.optimizer.signal_skip_step(True)
    backward(run, (x, y))
    run.optimizer.step()
    run.optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=f"an earlier one of this step had samples.*{TWICE}"):
        backward(run, (x[:1].clone(), y[:1]))


def test_what_the_memory_manager_announces_are_no_parts_of_a_microbatch():
    run = make(data_loader=DataLoader(data(20), batch_size=20))
    with in_parts(run, 6) as loader:
        batches = iter(loader)
        x, y = next(batches)
        backward(run, (x[:1], y[:1]))
        with pytest.raises(RuntimeError, match="may have had some of them"):
            backward(run, (x[:1].clone(), y[:1]))


def test_parts_dropped_sums_and_evaluation():
    run, whole = make(), make()
    (_, (x, y)), (_, batch) = first_draw(run), first_draw(whole)
    backward(run, (x, y))
    run.optimizer.zero_grad()
    run.model.eval()
    run.model(x)
    run.model.train()
    with torch.no_grad():
        run.model(x)
    for part in zip(x.split(1), y.split(1), strict=True):
        backward(run, part)
    backward(whole, batch)
    run.optimizer.step()
    whole.optimizer.step()
    for a, b in zip(run.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    run.optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=TWICE):
        backward(run, (x[:1], y[:1]))


def test_a_backward_that_failed_may_be_repeated(monkeypatch):
    run = make()
    _, batch = first_draw(run)
    with monkeypatch.context() as patch:
        patch.setattr(run.model.gradient_buffer, "accumulate", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            backward(run, batch)
    step(run, batch)


def test_a_microbatch_counts_once():
    run = make(data_loader=DataLoader(data(20), batch_size=20))
    with in_parts(run, 6) as loader:
        batches = iter(loader)
        batch = next(batches)
        backward(run, batch)
        with pytest.raises(RuntimeError, match=TWICE):
            backward(run, batch)
        run.optimizer.step()  # skipped
        run.optimizer.zero_grad()
        with pytest.raises(RuntimeError, match=TWICE):
            backward(run, batch)
        backward(run, next(batches))
        run.optimizer.step()
        run.optimizer.step()  # not skipped: a step on half of the draw
        with pytest.raises(RuntimeError, match="a part of Poisson batch 0"):
            next(batches)


def test_a_made_up_sample_is_none():
    run = make(data_loader=DataLoader(data(6), batch_size=1), rand_on_empty=True)
    for batch in run.loader:
        dummy = run.loader.usage.ticket.is_dummy
        assert run.model.step_state.usage.handed == (0 if dummy else len(batch[0]))
        step(run, batch)


@pytest.mark.parametrize("rand_on_empty", [False, True])
def test_batches_that_opacus_takes_count(rand_on_empty):
    run = make(rand_on_empty=rand_on_empty)
    _, batch = first_draw(run)
    step(run, batch)
    with in_parts(run, 2, OpacusBatchMemoryManager) as loader:
        sizes = [len(batch[0]) for batch in loader if step(run, batch) or True]
    assert max(sizes) == 2
    _, batch = first_draw(run)
    step(run, batch)
    assert run.loader.position == run.optimizer.steps == 2 + len(run.loader), "a step has a batch"
    with pytest.raises(RuntimeError, match=TWICE):
        backward(run, batch)


def test_steps_on_batches_that_opacus_takes_are_those_of_whole_ones():
    whole, parts = make(rand_on_empty=True), make(rand_on_empty=True)
    for batch in whole.loader:
        step(whole, batch)
    with in_parts(parts, 2, OpacusBatchMemoryManager) as loader:
        for batch in loader:
            step(parts, batch)
    assert parts.optimizer.steps == whole.optimizer.steps
    torch.testing.assert_close(
        dict(parts.model.named_parameters()), dict(whole.model.named_parameters())
    )


def test_two_batches_that_opacus_takes_are_not_one_step():
    run = make()
    with in_parts(run, 100, OpacusBatchMemoryManager) as loader:
        batches = iter(loader)
        backward(run, next(batches))
        with pytest.raises(RuntimeError, match=SECOND_DRAW):
            next(batches)


def test_batches_that_opacus_would_mix_up_are_refused():
    """It skips steps as it fetches, ahead of them."""
    run = make(data_loader=DataLoader(data(), batch_size=3, num_workers=1))
    match = "use dp_clipping.BatchMemoryManager, or num_workers=0"
    with (
        in_parts(run, 2, OpacusBatchMemoryManager) as pieces,
        pytest.raises(RuntimeError, match=match),
    ):
        next(iter(pieces))


def test_a_refusal_tells_too_many_samples_from_those_of_another_rank():
    usage = SampleUsage()
    usage.hand_over(Ticket(3))
    with pytest.raises(RuntimeError, match=r"of 5 samples, and of .* 3 of 3 are unused: a sample"):
        usage.use(5)
    usage.use(2)
    with pytest.raises(RuntimeError, match="of samples that another rank has used already"):
        usage.use(0, lambda here: True)


def test_ranks_that_have_other_numbers_of_parts_do_not_wait_for_each_other():
    usage = SampleUsage()
    usage.hand_over(Ticket(3, same_parts=False))
    for _ in range(3):
        usage.use(1, lambda _: pytest.fail("another rank is asked"))
        usage.end_part()


def test_a_step_in_each_part_of_a_batch_is_refused_by_what_to_do():
    run = make(batch_size=6, sample_rate=0.9, steps=2)
    _, (x, y) = first_draw(run)
    first, second, *_ = zip(x.split(3), y.split(3), strict=True)
    step(run, first)
    with pytest.raises(RuntimeError, match=r"none are unused: .* after the last part .*x\.split"):
        step(run, second)
    assert run.optimizer.steps == 1


def test_a_batch_of_another_models_loader_is_refused_by_whose_loader_to_take():
    run, other = make(), make()
    _, batch = first_draw(run)
    step(other, first_draw(other)[1])
    with pytest.raises(RuntimeError, match=r"the loader that make_private returned with this mode"):
        step(other, batch)


def test_a_batch_that_was_looked_at_alone_is_the_next_step_s():
    """A loop that looks at one in evaluation cannot leave it out, either."""
    run, numbers = make(), []
    for _ in range(4):
        run.model.eval()
        next(iter(run.loader))
        run.model.train()
        step(run, next(iter(run.loader)))
        numbers.append(run.loader.position)
    assert numbers == [1, 2, 3, 4]


def test_a_loop_that_leaves_batches_out_is_told():
    run = make()
    for _ in range(100):
        next(iter(run.loader))
    with pytest.raises(RuntimeError, match=r"100 iterations .* batch 0, and no step has used it"):
        next(iter(run.loader))


def test_a_state_does_not_pass_over_a_batch():
    """A step has the next of batches in order, and of others the one that was yielded for it."""
    in_order = make(sampling="cyclic", steps=4)
    step(in_order, next(iter(in_order.loader)))
    owed = make()
    next(iter(owed.loader))
    for run in (in_order, owed):
        state = run.loader.state_dict()
        run.loader.load_state_dict(state)
        run.loader.load_state_dict(state | {"position": state["position"] + 2})
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the next step must have batch"):
                next(iter(run.loader))
        run.model.eval()
        next(iter(run.loader))
        run.model.train()
        with pytest.raises(RuntimeError, match="the next step must have batch"):
            next(iter(run.loader))
        run.loader.load_state_dict(run.loader.state_dict())
        next(iter(run.loader))
        assert run.loader.state_dict() == state
