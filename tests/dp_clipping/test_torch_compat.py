"""Private interfaces of PyTorch are there, in one file; without one it falls back or says so."""

import importlib.util
import sys
from collections import OrderedDict
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch._dynamo
import torch._functorch.config
import torch.utils._pytree
from torch import Tensor, nn
from torch.autograd import profiler
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import _StridedShard
from torch.overrides import TorchFunctionMode

from dp_clipping import torch_compat
from tests.support.private_torch import imported_by, private_uses


class Pair(NamedTuple):
    one: object
    other: object


def test_no_other_file_uses_a_private_torch_interface():
    assert private_uses("dp_clipping") == []


def test_it_imports_nothing_of_the_package():
    file = "dp_clipping/torch_compat.py"
    assert not any(name.startswith("dp_clipping") for name in imported_by(file))


def imported_again() -> None:
    spec = importlib.util.spec_from_file_location("another", torch_compat.__file__)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_trees(monkeypatch):
    assert torch_compat.tree_map(lambda x: 2 * x, {"a": [1, 2]}) == {"a": [2, 4]}
    monkeypatch.delattr(torch.utils._pytree, "tree_map_only")
    with pytest.raises(RuntimeError, match=r"torch\.utils\._pytree, needed .* 2\.11 to 2\.15"):
        imported_again()


@pytest.mark.parametrize(("owner", "name", "message"), [
    (torch.utils.hooks.RemovableHandle, "next_id", r"RemovableHandle\.next_id"),
    (nn.modules.dropout, "_DropoutNd", r"torch\.nn\.modules\.dropout\._DropoutNd"),
    (torch._C, "_current_graph_task_id", r"torch\._C\._current_graph_task_id"),
])  # fmt: skip
def test_what_is_always_needed_is_looked_for_when_it_is_imported(monkeypatch, owner, name, message):
    imported_again()
    monkeypatch.delattr(owner, name)
    with pytest.raises(RuntimeError, match=f"has no {message}, needed"):
        imported_again()


class Own(dict):
    """A dict of a user's own class, which PyTorch takes for a leaf."""


@pytest.mark.parametrize("tree", [
    3, [], {}, (), (1, [2, {"a": 3, "b": ()}], {}), [None, Own(a=1)],
    OrderedDict(a=[1, 2], b={"c": 3}), ([OrderedDict(a=1), 2], Pair(1, {"x": 2})),
])  # fmt: skip
def test_a_tree_is_flattened_as_pytorch_does(tree):
    leaves, structure = torch_compat.tree_flatten(tree)
    assert leaves == torch_compat.tree_leaves(tree) == torch.utils._pytree.tree_leaves(tree)
    found = torch_compat.tree_unflatten(leaves, structure)
    assert found == tree
    assert type(found) is type(tree)
    assert hash(structure) == hash(torch_compat.tree_flatten(tree)[1])


def test_structures_differ_by_containers_keys_and_lengths():
    trees = [(1,), [1], {"a": 1}, {"b": 1}, (1, 2), ((1,),), OrderedDict(a=1)]
    structures = [torch_compat.tree_flatten(tree)[1] for tree in trees]
    assert len(set(structures)) == len(trees)


# ---- tensors and operators -----------------------------------------------------------------------


class Modes(TorchFunctionMode):
    """Notes the functions of PyTorch that are called in it."""

    def __init__(self):
        super().__init__()
        self.called = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.called.append(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("tells_modes", [True, False])
def test_gradients_by_the_engine_and_without_it(monkeypatch, tells_modes):
    """The code of a backward runs outside of a user's mode, as by `torch.autograd.grad`."""
    if not tells_modes:
        monkeypatch.delattr(torch._C, "_len_torch_function_stack")
    x, unused = torch.ones(3, requires_grad=True), torch.ones(1, requires_grad=True)

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient.mul(2).add(0)

    total = Twice.apply(x).square().sum()
    with Modes() as mode:
        found = torch_compat.gradients_at(total, [x, unused], True)
        assert found[0].tolist() == [8, 8, 8]
        assert found[1] is None
    assert Tensor.add not in mode.called
    torch_compat.gradients_at(total, [x], False)
    with pytest.raises(RuntimeError, match="second time"):
        torch_compat.gradients_at(total, [x], False)
    assert x.grad is None


# ---- compilation and profiling -------------------------------------------------------------------


def test_graphs_break_at_a_function(monkeypatch):
    for _ in range(2):
        alone = torch_compat.never_compiled(lambda: torch.compiler.is_compiling())
        compiled = torch.compile(
            lambda f=alone: (torch.compiler.is_compiling(), f()), backend="eager"
        )
        assert compiled() == (True, False)
        monkeypatch.delattr(torch, "_disable_dynamo", raising=False)


def test_reusable_backwards(monkeypatch):
    config = torch._functorch.config
    before = config.donated_buffer
    with torch_compat.reusable_backwards():
        assert not config.donated_buffer
    assert config.donated_buffer == before
    nothing = SimpleNamespace(__name__="torch._functorch.config")
    monkeypatch.setattr(torch._functorch, "config", nothing)
    monkeypatch.setitem(sys.modules, "torch._functorch.config", nothing)
    with (
        pytest.raises(RuntimeError, match=r"has no torch\._functorch\.config\.donated_buffer"),
        torch_compat.reusable_backwards(),
    ):
        pass


def test_whether_a_profiler_records(monkeypatch):
    assert torch_compat.is_profiling() is False
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert torch_compat.is_profiling() is True
    monkeypatch.delattr(profiler, "_is_profiler_enabled")
    assert torch_compat.is_profiling() is True


# ---- process groups, DTensor and FSDP1 -----------------------------------------------------------


def test_grouped_collectives_are_there():
    """What they compute: `ranks/test_steps.py`."""
    group = torch.distributed.ProcessGroup
    assert hasattr(group, "allreduce_coalesced")
    names = ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
    assert any(hasattr(group, name) for name in names)
    with pytest.raises(RuntimeError, match=r"has no ProcessGroup\.allreduce_coalesced"):
        torch_compat.all_reduce_together([], SimpleNamespace())
    with pytest.raises(RuntimeError, match=r"has no ProcessGroup\.reduce_scatter_tensor_coal"):
        torch_compat.reduce_scatter_together([], [], SimpleNamespace())


def test_strided_shards():
    assert torch_compat.strided_shard(_StridedShard(1, split_factor=4)) == (1, 4)
    assert torch_compat.strided_shard(Replicate()) is None
    unknown = type("_StridedShard", (), {})()
    with pytest.raises(RuntimeError, match=r"otherwise than 2\.11 to 2\.15"):
        torch_compat.strided_shard(unknown)


def of_fsdp1(without: str = "", tensors: list | None = None) -> SimpleNamespace:
    """A unit as FSDP1 makes it, as far as it is looked at."""
    found = {name: None for name in torch_compat.FSDP1_HANDLE if name != without}
    if without != "flat_param":
        found["flat_param"] = SimpleNamespace(_tensors=tensors)
    unit = {"_handle": SimpleNamespace(**found), torch_compat.WRAPPED: None}
    return SimpleNamespace(**{name: x for name, x in unit.items() if name != without})


@pytest.mark.parametrize(("without", "owner"), [
    ("_handle", "FullyShardedDataParallel"),
    (torch_compat.WRAPPED, "FullyShardedDataParallel"),
    *[(name, "FlatParamHandle") for name in torch_compat.FSDP1_HANDLE],
    ("_tensors", "list FlatParameter"),
])  # fmt: skip
def test_an_fsdp1_without_what_is_needed_is_refused_by_name(without, owner):
    right = of_fsdp1(tensors=[None])
    unit = of_fsdp1(without, None if without == "_tensors" else [None])
    torch_compat.check_fsdp1([right])
    with pytest.raises(RuntimeError, match=rf"has no {owner}\.{without}, needed .*fully_shard"):
        torch_compat.check_fsdp1([right, unit])


@pytest.mark.parametrize("found", [None, lambda state, handle: None])
def test_an_fsdp1_whose_functions_differ_is_refused_by_name(monkeypatch, found):
    from torch.distributed.fsdp import _runtime_utils

    torch_compat.check_fsdp1([])
    monkeypatch.setattr(_runtime_utils, "_reshard", found)
    with pytest.raises(RuntimeError, match=r"_reshard\(state, handle, free_unsharded_flat_param\)"):
        torch_compat.check_fsdp1([])


def test_parameters_that_stay_gathered_are_refused(monkeypatch):
    from torch.distributed.fsdp import _runtime_utils

    monkeypatch.setattr(_runtime_utils, "_reshard", lambda *_, **__: None)
    torch_compat.fsdp1_free(None, SimpleNamespace(needs_unshard=lambda: True))
    with pytest.raises(RuntimeError, match=r"has no .*_reshard that frees gathered parameters"):
        torch_compat.fsdp1_free(None, SimpleNamespace(needs_unshard=lambda: False))
