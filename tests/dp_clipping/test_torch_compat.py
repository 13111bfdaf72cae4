"""Private interfaces of PyTorch are in files of one name, and do what is said of them."""

from collections import OrderedDict
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch._dynamo
import torch._functorch.config
import torch.utils._pytree
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dp_clipping import torch_compat
from dp_clipping.distributed import torch_compat as of_ranks
from tests.support.private_torch import imported_by, private_uses


class Pair(NamedTuple):
    one: object
    other: object


def test_no_other_file_uses_a_private_torch_interface():
    assert private_uses("dp_clipping") == []


def test_it_imports_nothing_of_the_package():
    file = "dp_clipping/torch_compat.py"
    assert not any(name.startswith("dp_clipping") for name in imported_by(file))


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


def test_each_module_is_found_once():
    shared = torch.nn.Linear(2, 2)
    network = torch.nn.Sequential(shared, torch.nn.Sequential(shared, torch.nn.ReLU()))
    network.register_module("nothing", None)
    found = torch_compat.every_module(network)
    assert len(found) == len(set(found)) == 4
    assert set(found) == set(network.modules())


class Modes(TorchFunctionMode):
    """Notes the functions of PyTorch that are called in it."""

    def __init__(self):
        super().__init__()
        self.called = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.called.append(function)
        return function(*args, **(kwargs or {}))


def test_gradients_by_the_engine_and_without_it():
    """The code of a backward runs outside of a user's mode, as by `torch.autograd.grad`."""
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


def test_graphs_break_at_a_function():
    alone = torch_compat.never_compiled(lambda: torch.compiler.is_compiling())
    compiled = torch.compile(lambda: (torch.compiler.is_compiling(), alone()), backend="eager")
    assert compiled() == (True, False)


def test_reusable_backwards():
    config = torch._functorch.config
    before = config.donated_buffer
    with torch_compat.reusable_backwards():
        assert not config.donated_buffer
    assert config.donated_buffer == before


def test_whether_a_profiler_records():
    assert torch_compat.is_profiling() is False
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert torch_compat.is_profiling() is True
    assert torch_compat.is_profiling() is False


def test_grouped_collectives_are_there():
    """What they compute: `ranks/test_steps.py`."""
    group = torch.distributed.ProcessGroup
    assert hasattr(group, "allreduce_coalesced")
    names = ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
    assert any(hasattr(group, name) for name in names)


def test_parameters_that_stay_gathered_are_refused(monkeypatch):
    from torch.distributed.fsdp import _runtime_utils

    monkeypatch.setattr(_runtime_utils, "_reshard", lambda *_, **__: None)
    of_ranks.fsdp1_free(None, SimpleNamespace(needs_unshard=lambda: True))
    with pytest.raises(RuntimeError, match=r"has not freed gathered parameters: .*fully_shard"):
        of_ranks.fsdp1_free(None, SimpleNamespace(needs_unshard=lambda: False))


def test_contexts_that_decide_how_tensors_are_saved():
    assert not torch_compat.saves_by_hooks()
    with torch.autograd.graph.save_on_cpu():
        assert torch_compat.saves_by_hooks()
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        assert torch_compat.saves_by_hooks()
