"""A batch of the loader is in one step, whatever is set back, copied or held on to."""

import copy
import pickle

import pytest
import torch

from tests.support.engine import in_parts, step
from tests.support.saved_runs import build, load, save, train, trained

SAMPLINGS = [
    {},
    {"sampling": "truncated_poisson", "max_batch_size": 9},
    {"sampling": "balls_in_bins"},
]
every_sampling = pytest.mark.parametrize("options", SAMPLINGS, ids=str)


@every_sampling
def test_a_loader_that_was_set_back_is_refused(options):
    run = build(**options)
    start = run.loader.state_dict()
    train(run, 3)
    with pytest.raises(ValueError, match=r"set back to batch 0, and .* before batch 3"):
        run.loader.load_state_dict(start)
    run.loader.load_state_dict(start | {"position": 3})
    train(run, 1)
    assert run.optimizer.steps == 4


def test_a_checkpoint_knows_which_batches_were_used(tmp_path):
    """Batches that were looked at in evaluation are not left, and do not come again."""
    run = trained(1)
    run.model.eval()
    batches = iter(run.loader)
    for _ in range(4):
        next(batches)
    run.model.train()
    train(run, 1)
    save(run, tmp_path / "run.pt")
    resumed = build()
    load(resumed, tmp_path / "run.pt")
    assert resumed.loader.position == 6
    train(resumed, 1)
    assert resumed.loader.usage.ticket.number == 6


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda f: f.__name__
)
def test_copies_are_refused(again):
    run = build()
    with in_parts(run, 2) as parts:
        for one in (run.loader, run.loader.batch_sampler, parts):
            with pytest.raises(TypeError, match=f"a {type(one).__name__} holds the key of its"):
                again(one)


def test_a_part_of_a_batch_that_was_left_is_refused():
    run = build(noise_generator=torch.Generator().manual_seed(1))
    manager = in_parts(run, 1)
    with manager as parts:
        held = next(iter(parts))  # and the iterator is gone
    with pytest.raises(RuntimeError, match="of the loader's last batch none are unused"):
        step(run, held)
    run.optimizer.zero_grad()
    train(run, 3, microbatch=1)
    assert run.optimizer.steps == 3
    assert run.loader.position == 3
