"""Private interfaces of PyTorch are there, in one file; without one its function falls back."""

import gc
import re
import sys
import warnings
from datetime import timedelta
from runpy import run_path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ddp import torch_compat
from ddp.sharded import torch_compat as sharded_compat
from ddp_by_hand.lm.rank_pool import Context
from tests.support.on_ranks import on_ranks
from tests.support.private_torch import imported_by, private_uses


def test_no_other_file_uses_a_private_torch_interface():
    assert private_uses("ddp") == []


def test_it_imports_nothing_of_the_package():
    assert not any(name.startswith("ddp.") for name in imported_by("ddp/torch_compat.py"))


def test_without_a_record_of_pytorchs_ddp_there_is_none():
    assert torch_compat.ddp_record(SimpleNamespace()) == {}


def test_what_is_needed_is_there():
    assert hasattr(dist.ProcessGroup, "allreduce_coalesced")
    memory = torch_compat.symmetric_memory()
    assert callable(memory.empty)
    assert callable(memory.rendezvous)


NOTHING = SimpleNamespace()
SYMMETRIC = "torch.distributed._symmetric_memory"


@pytest.mark.parametrize(
    ("gone", "call", "name"),
    [
        ("torch.Tensor._version", lambda: run_path(torch_compat.__file__), "Tensor._version"),
        ("", lambda: torch_compat.own(NOTHING, "buffers"), "Module._buffers"),
        (
            "torch.autograd.Variable._execution_engine",
            lambda: torch_compat.at_end_of_backward(print),
            "Variable._execution_engine.queue_callback",
        ),
        ("torch._C._current_graph_task_id", torch_compat.in_backward, "_current_graph_task_id"),
        (
            "torch._C.DisableTorchFunctionSubclass",
            torch_compat.without_torch_functions,
            "DisableTorchFunctionSubclass",
        ),
        ("torch._foreach_copy_", lambda: sharded_compat.copy_([], []), "torch._foreach_copy_"),
        (
            "",
            lambda: torch_compat.coalesced_all_reduce([], dist.ReduceOp.SUM, NOTHING),
            "ProcessGroup.allreduce_coalesced",
        ),
        (SYMMETRIC, torch_compat.symmetric_memory, SYMMETRIC),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_another_version_lacks_is_named(monkeypatch, gone, call, name):
    monkeypatch.delattr(torch.autograd.graph, "queue_callback", raising=False)
    if gone == "torch.Tensor._version":  # a type of C, of which nothing can be deleted
        monkeypatch.setattr(torch, "Tensor", type("Tensor", (), {}))
    elif gone:
        monkeypatch.delattr(gone)
    monkeypatch.setitem(sys.modules, SYMMETRIC, None)
    with pytest.raises(RuntimeError, match=rf"torch .* has no .*{re.escape(name)}.*2\.11 to 2\.15"):
        call()


@on_ranks(2)
def test_reduce_scatter_and_all_gather(context: Context) -> None:
    """In place and not, by the names of torch 2.13 and of before."""
    for missing in ((), ("reduce_scatter_single", "all_gather_single")):
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            for name in missing:
                patch.delattr(dist, name, raising=False)
            for in_place in (True, False):
                flat = torch.arange(4.0) + 10 * context.rank
                own = flat[2 * context.rank :][:2]
                target = own if in_place else torch.empty(2)
                torch_compat.reduce_scatter(target, flat, dist.ReduceOp.SUM, context.group).wait()
                assert target.tolist() == [[10, 12], [14, 16]][context.rank]
                torch_compat.all_gather(flat, target, context.group).wait()
                assert flat.tolist() == [10, 12, 14, 16]


@on_ranks(4)
def test_cpu_tensors_are_gathered_in_any_group(context: Context) -> None:
    """A group for CUDA tensors alone gets gloo beside it, once, with its ranks and timeout.

    Its ranks are in unequal numbers of groups here.
    """
    ranks = [1, 3]
    group = dist.new_group(ranks, timeout=timedelta(seconds=91), backend="cuda:gloo")
    with_cpu = dist.new_group(ranks)
    if context.rank not in ranks:
        return
    beside = sharded_compat.gloo_beside(group)
    assert beside is sharded_compat.gloo_beside(group)
    assert beside.options._timeout == timedelta(seconds=91)
    assert sharded_compat.gloo_beside(with_cpu) is None
    for each in (group, with_cpu):
        everyone = torch.empty(2, 1, dtype=torch.int64)
        sharded_compat.gather_on_hosts(everyone, torch.tensor([context.rank]), each).wait()
        assert everyone.flatten().tolist() == ranks
    known, _ = sharded_compat._beside, gc.collect()
    before = len(known)
    del beside, each
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert len(known) == before - 1  # and with it, its sockets and threads have gone
