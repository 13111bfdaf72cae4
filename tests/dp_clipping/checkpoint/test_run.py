"""What the ranks of a run agree on, and where its draws and random numbers go on."""

from types import SimpleNamespace

import pytest
import torch

from dp_clipping.checkpoint.run import agree, of_all_ranks
from dp_clipping.distributed.agreement import agree_on_settings
from tests.support.on_ranks import on_ranks
from tests.support.saved_runs import build


def test_settings_that_a_load_compares():
    run = build().engine._runs[0]
    found = run.describe()
    assert (found["world_size"], found["data_ranks"], found["device"]) == (1, 1, "cpu")
    assert found["optimizer"] == "SGD"
    assert found["private"]
    assert found["parameters"]["first.weight"] == [5, 3]
    assert found["noise_multiplier"] == 0.8


@on_ranks(2)
def test_ranks_go_on_together_or_not_at_all(context) -> None:
    run = SimpleNamespace(
        group=context.group, device=context.device, rank=context.rank, world_size=2
    )
    first, mine = context.rank == 0, KeyError("mine")
    assert of_all_ranks(run, context.rank) == [0, 1]

    agree_on_settings({"sigma": 1}, context.group)
    with pytest.raises(ValueError, match=r"ranks differ in sigma .*: give the same on all"):
        agree_on_settings({"sigma": context.rank}, context.group)

    agree(run, "write it", None)
    for failing in range(2):
        own = context.rank == failing
        kind, said = (KeyError, "mine") if own else (RuntimeError, f"rank {failing} could not")
        with pytest.raises(kind, match=said):
            agree(run, "write it", mine if own else None)

    agree(run, "load it", None, b"1")
    content, problem = (b"", mine) if first else (b"1", None)
    kind, said = (KeyError, "mine") if first else (ValueError, "rank 0 could not load it")
    with pytest.raises(kind, match=said):
        agree(run, "load it", problem, content, ValueError)
    with pytest.raises(ValueError, match="ranks have read other content to load it"):
        agree(run, "load it", None, bytes([context.rank]))


def test_a_rank_that_does_not_come_is_told_of(monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("Timed out waiting 5000ms")

    run = SimpleNamespace(group=object(), world_size=2, device=torch.device("cpu"))
    monkeypatch.setattr("dp_clipping.checkpoint.run.gathered", fails)
    with pytest.raises(RuntimeError, match=r"on every rank, between the same two steps.*5000ms"):
        agree(run, "load it", None)
