"""Private interfaces of PyTorch are there, in one file; without one it falls back or says so."""

import importlib.util
import sys
import weakref
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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import _StridedShard
from torch.overrides import TorchFunctionMode

from dp_clipping import torch_compat
from dp_clipping.torch_compat import flush_ready_nodes
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


def test_versions_count_changes():
    x = torch.zeros(2)
    before = torch_compat.version_of(x)
    x.add_(1)
    assert torch_compat.version_of(x) == before + 1


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gy):
        assert (
            sys._getframe(1).f_code is not torch.autograd.function.BackwardCFunction.apply.__code__
        )
        return 3 * ctx.saved_tensors[0] ** 2 * gy


def test_a_function_is_applied_directly_and_its_backward_called_so():
    x = torch.tensor(2.0, requires_grad=True)
    y = torch_compat.apply_directly(Cube)(x)
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad(first, x)
    assert (y, first, second) == (8, 12, 12)


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


def test_hooks_that_have_come():
    layer = nn.Linear(1, 1)
    layer.register_forward_hook(old := lambda *_: None)
    number = torch_compat.hooks_so_far()
    layer.register_forward_pre_hook(new := lambda *_: None)
    assert torch_compat.hooks_so_far() > number
    ((hooks, key, hook),) = torch_compat.take_hooks_since(layer, number)
    assert hook is new
    assert torch_compat.hooks_of(layer) == [old]
    hooks[key] = hook
    assert torch_compat.hooks_of(layer) == [new, old]


def test_the_fused_rms_norm():
    x, weight = torch.randn(3, 4), torch.randn(4)
    expected = nn.functional.rms_norm(x, (4,), weight, 1e-6)
    y, rstd = torch_compat.fused_rms_norm(x, (4,), weight, 1e-6)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(rstd, (x.square().mean(1, keepdim=True) + 1e-6).rsqrt())


def test_dtype_casts():
    casts = []

    class Seen(torch_compat.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            casts.append(torch_compat.is_dtype_cast(function))
            return function(*args, **(kwargs or {}))

    x = torch.ones(2)
    with Seen():
        x.to(torch.int64)
        x.neg()
    assert casts == [True, False]


def test_weights_in_one_buffer(monkeypatch):
    """As `nn.RNNBase.flatten_parameters` calls it, which a GPU has."""
    calls = []
    monkeypatch.setattr(torch, "_cudnn_rnn_flatten_weight", lambda *args: calls.append(args))
    monkeypatch.setattr(torch.backends.cudnn.rnn, "get_cudnn_mode", {"GRU": 3}.__getitem__)
    weights = [torch.zeros(2) for _ in range(8)]
    for _ in range(2):
        torch_compat.to_one_buffer_(weights, "GRU", 12, 2, 0, True)
        assert calls == [(weights, 4, 12, 3, 2, 0, 1, False, True)]
        monkeypatch.delattr(torch, "_cudnn_rnn_flatten_weight", raising=False)


def test_spinning(monkeypatch):
    assert hasattr(torch.cuda, "_sleep")
    cycles = []
    monkeypatch.setattr(torch.cuda, "_sleep", cycles.append)
    torch_compat.spin(7)
    monkeypatch.delattr(torch.cuda, "_sleep")
    torch_compat.spin(8)
    assert cycles == [7]


# ---- modules -------------------------------------------------------------------------------------


def test_what_a_module_holds():
    module = nn.Sequential(nn.BatchNorm1d(2))
    module.register_buffer("here", torch.ones(1), persistent=False)
    handle = module.register_forward_pre_hook(lambda *_: None)
    module.register_full_backward_hook(lambda *_: None)
    assert list(torch_compat.own_parameters(module[0])) == ["weight", "bias"]
    assert list(torch_compat.own_buffers(module)) == ["here"]
    assert list(torch_compat.own_modules(module)) == ["0"]
    assert torch_compat.non_persistent_buffers(module) == {"here"}
    assert len(torch_compat.forward_pre_hooks(module)) == 1
    assert len(torch_compat.hooks_of(module)) == 2
    handle.remove()
    assert torch_compat.forward_pre_hooks(module) == []


def test_the_name_of_what_is_pruned():
    layer = nn.utils.prune.l1_unstructured(nn.Linear(2, 2), "bias", 1)
    (hook,) = torch_compat.forward_pre_hooks(layer)
    assert torch_compat.pruned_name(hook) == "bias"
    assert torch_compat.pruned_name(object()) == "weight"


@pytest.mark.parametrize(("name", "layers"), [
    ("BATCH_NORM", [nn.BatchNorm1d(2), nn.LazyBatchNorm2d(), nn.SyncBatchNorm(2)]),
    ("INSTANCE_NORM", [nn.InstanceNorm1d(2), nn.LazyInstanceNorm2d()]),
    ("DROPOUT", [nn.Dropout(), nn.Dropout1d(), nn.AlphaDropout(), nn.FeatureAlphaDropout()]),
])  # fmt: skip
def test_kinds_of_layers(name, layers):
    kind = getattr(torch_compat, name)
    assert all(isinstance(layer, kind) for layer in layers)
    assert not isinstance(nn.GroupNorm(1, 2), kind)


def test_composable_replicas(monkeypatch):
    assert [kind.__name__ for kind in torch_compat.composable_replicas()] == ["DDP"]
    monkeypatch.setitem(sys.modules, "torch.distributed._composable.replicate", None)
    assert torch_compat.composable_replicas() == ()


# ---- compilation and profiling -------------------------------------------------------------------


def test_compiled_modules():
    plain, in_place = nn.Linear(2, 2), nn.Linear(2, 2)
    in_place.compile()
    wrapped = torch.compile(nn.Linear(2, 2))
    assert not torch_compat.any_compiled(nn.Sequential(plain, nn.Sequential(plain)))
    for inner in (in_place, wrapped):
        assert torch_compat.any_compiled(nn.Sequential(plain, nn.Sequential(inner)))
    assert [torch_compat.is_compiled_in_place(m) for m in (plain, in_place)] == [False, True]


def test_graphs_break_at_a_function(monkeypatch):
    for _ in range(2):
        alone = torch_compat.never_compiled(lambda: torch.compiler.is_compiling())
        compiled = torch.compile(
            lambda f=alone: (torch.compiler.is_compiling(), f()), backend="eager"
        )
        assert compiled() == (True, False)
        monkeypatch.delattr(torch, "_disable_dynamo", raising=False)


def test_graphs_for_any_size(monkeypatch):
    config = torch._dynamo.config
    with torch_compat.any_size():
        assert config.allow_unspec_int_on_nn_module
        assert not config.force_nn_module_property_static_shapes
    assert not config.allow_unspec_int_on_nn_module
    monkeypatch.setattr(torch, "_dynamo", SimpleNamespace(config=SimpleNamespace()))
    with torch_compat.any_size():
        pass


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


# ---- optimizers ----------------------------------------------------------------------------------


def test_hooks_of_optimizers():
    optimizer = torch.optim.SGD([torch.ones(1)], lr=1)
    registries = {name for name in vars(optimizer) if torch_compat.is_hook_registry(name)}
    assert {"_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"} <= registries


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


def layouts(context):
    mesh = DeviceMesh.from_group(context.group, "cpu")
    made = DTensor.from_local(torch.ones(2), mesh, [Replicate()])
    again = torch_compat.with_layout(torch.zeros(2), torch_compat.layout_of(made))
    return again.placements == made.placements and again.to_local().tolist() == [0, 0]


def test_a_layout_serves_again(cpu_ranks):
    assert all(cpu_ranks.run(2, layouts))
    assert torch_compat.layout_of(object()) is None


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


@pytest.mark.parametrize(
    ("wrapped", "name"),
    [
        ("weight", "weight"),
        ("_fsdp_wrapped_module.weight", "weight"),
        ("_fsdp_wrapped_module.blocks.0._fsdp_wrapped_module.up.weight", "blocks.0.up.weight"),
        ("blocks.0._fsdp_wrapped_module", "blocks.0"),
    ],
)
def test_names_before_fsdp1(wrapped, name):
    assert torch_compat.plain_name(wrapped) == name


# ---- a backward that failed ----------------------------------------------------------------------


class Held(torch.autograd.Function):
    """Keeps an activation, which is watched."""

    @staticmethod
    def forward(ctx, x):
        ctx.kept = torch.ones(3)
        HELD.append(weakref.ref(ctx.kept))
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Fails(torch.autograd.Function):
    """A node that another one is queued behind."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError


HELD: list[weakref.ref] = []


def fail() -> None:
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(ArithmeticError):
        (Held.apply(x) + Fails.apply(x)).sum().backward()


def test_activations_of_a_failed_backward_go():
    HELD.clear()
    with torch.autograd.set_multithreading_enabled(False):
        fail()
        with torch.no_grad():
            flush_ready_nodes()
    assert HELD
    assert not any(held() is not None for held in HELD)


def test_the_distribution_of_the_privacy_loss_is_that_of_the_accountant():
    from opacus.accountants import create_accountant

    accountant = create_accountant("prv")
    accountant.history = [(2.0, 0.2, 10)]
    found = torch_compat.loss_distribution(accountant, epsilon_error=0.01, delta_error=1e-8)
    for delta in (1e-5, 0.01):
        expected = accountant.get_epsilon(delta, delta_error=1e-8)
        assert found.compute_epsilon(delta, 1e-8, 0.01)[2] == expected
    other = create_accountant("rdp")
    assert torch_compat.loss_distribution(other, epsilon_error=0.01, delta_error=1e-8) is None
