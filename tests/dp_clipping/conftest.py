"""Private steps without an engine around them, for all tests of this folder."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import tests.support.accountants  # noqa: F401 - makes them fast, on ranks too
from ddp_by_hand.experiments.verify_correctness import reference as oracle
from dp_clipping.clipping.accumulation import accumulation_dtype
from dp_clipping.clipping.coefficients import GAMMA
from dp_clipping.criterion import PrivateCriterion, PrivateLoss
from dp_clipping.distributed.detect import sharding_of
from dp_clipping.layers.recorder import Trainable
from dp_clipping.model import PrivateModel
from dp_clipping.modes import policy_of
from tests.support import zoo

MODES = ("per_sample", "ghost", "bookkeeping")


@pytest.fixture
def path(tmp_path):
    """Of a checkpoint that is not there yet."""
    return tmp_path / "run.pt"


@pytest.fixture
def one_rank(tmp_path):
    """Makes this process a group of one."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class Unseen:
    """Keeps a list for a test where no check finds it: what one leaves elsewhere is put back."""

    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values: list = []


def private(
    network: nn.Module,
    mode: str = "bookkeeping",
    max_grad_norm: float | list[float] = 1.0,
    clipping: str = "flat",
    clipping_function: str = "abadi",
    policy: dict | None = None,
    data_parallel_group: ProcessGroup | None = None,
    **options,
) -> PrivateModel:
    """The network as `PrivacyEngine.make_private` wraps it."""
    policy = policy_of(
        mode,
        clipping_function=clipping_function,
        gamma=GAMMA,
        per_layer=clipping == "per_layer",
        **policy or {},
    )
    settings = {
        "module": network, "grad_sample_mode": mode, "policy": policy, "clipping": clipping,
        "max_grad_norm": max_grad_norm, "batch_first": True, "norm_reduction": "async",
        "wrap_model": True, "loss_reduction": "mean", "rows_per_unit": 1, "views": 1,
        "checks": "first",
    }  # fmt: skip
    settings |= {name: options.pop(name) for name in [*options] if name in settings}
    sharding = sharding_of(network, data_parallel_group)
    return PrivateModel(SimpleNamespace(**settings), sharding=sharding, **options)


def skip_all_checks(model: PrivateModel) -> None:
    """Looks in no batch for samples that see each other, which users cannot leave out.

    For tests of sums and norms, whose steps take a fraction of it. It has tests of its own, and
    runs where every network is tested.
    """
    model.skip_checks()
    guard = model.passes._establishment
    assert hasattr(guard, "_is_settled"), "or nothing is skipped"
    guard._is_settled = True


def unchecked(*arguments: Any, **options: Any) -> PrivateModel:
    """Returns `private(...)` without the search for samples that see each other."""
    model = private(*arguments, **options)
    skip_all_checks(model)
    return model


def criterion_of(model: PrivateModel, per_sample_loss: oracle.PerSampleLoss) -> PrivateCriterion:
    return PrivateCriterion(model, zoo.Criterion(per_sample_loss, "sum"), "sum")


def private_loss(
    model: PrivateModel, batch: oracle.Batch, per_sample_loss: oracle.PerSampleLoss
) -> PrivateLoss:
    """The loss of one forward, a sum over the batch."""
    criterion = criterion_of(model, per_sample_loss)
    return criterion(oracle.forward(model, batch[0]), batch[1])


def clipped_sums(
    model: PrivateModel, batch: oracle.Batch, per_sample_loss: oracle.PerSampleLoss = zoo.product
) -> dict[str, Tensor]:
    """Name of a trainable parameter -> Σ_i c_i g_i, as one step leaves it in `.grad`."""
    model.clear_gradients()
    private_loss(model, batch, per_sample_loss).backward()
    return gradients_of(model)


def gradients_of(model: PrivateModel) -> dict[str, Tensor]:
    """By name; whole ones, where ranks have parts of them: then all ranks call it."""
    named = [(name, p) for name, p in model.network.named_parameters()]
    whole_gradients = getattr(model.module, "whole_gradients", None)
    if whole_gradients is None:
        return {name: p.grad.clone() for name, p in named if p.requires_grad}
    return {
        name: gradient.clone()
        for (name, p), gradient in zip(named, whole_gradients(), strict=True)
        if p.requires_grad
    }


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Parameter by parameter, relative to the largest entry of all."""
    assert list(actual) == list(expected)
    scale = max((float(g.abs().max()) for g in expected.values()), default=0.0)
    for name, g in expected.items():
        torch.testing.assert_close(
            actual[name].double(),
            g.double(),
            rtol=0,
            atol=tolerance * scale,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def count_calls(function: Callable) -> Callable:
    """The function, with the number of its calls in `.count`."""

    def counted(*args, **kwargs):
        counted.count += 1
        return function(*args, **kwargs)

    counted.count = 0
    return counted


def unit_gradients(gradients: oracle.Gradients, rows_per_unit: int) -> oracle.Gradients:
    """Returns the gradients of units, each the sum of those of its rows, side by side."""
    return {name: g.unflatten(0, (-1, rows_per_unit)).sum(1) for name, g in gradients.items()}


def assert_step(
    model: PrivateModel,
    plain: nn.Module,
    batch: oracle.Batch,
    per_sample_loss: oracle.PerSampleLoss = zoo.product,
    *,
    limit: float = 1.0,
    clipping: str = "flat",
    rows_per_unit: int = 1,
    tolerance: float = 1e-9,
) -> None:
    """Compares norms and clipped sums of one step with one ordinary backward a unit.

    `plain` is an equal network that is not private, and `limit` the model's threshold.
    """
    gradients = oracle.per_sample_gradients(plain, batch, per_sample_loss)
    gradients = unit_gradients(gradients, rows_per_unit)
    sums = clipped_sums(model, batch, per_sample_loss)
    if clipping == "flat":
        found, norms = model.per_sample_gradient_norms.double(), oracle.norms(gradients).double()
        assert ((found - norms).abs() <= tolerance * norms.max()).all()
    assert_close(sums, oracle.clipped_sum(gradients, limit, clipping), tolerance)


def assert_exact(
    network: nn.Module, batch: oracle.Batch, mode: str = "bookkeeping", tolerance: float = 1e-9
) -> set[str]:
    """Compares norms and clipped sums with one sample at a time; returns the kinds of its layers.

    The threshold is the median norm, which clips some samples.
    """
    norms = oracle.norms(oracle.per_sample_gradients(network, batch, zoo.product))
    limit = norms.median().item()
    model = private(copy.deepcopy(network), mode, max_grad_norm=limit)
    assert_step(model, network, batch, limit=limit, tolerance=tolerance)
    return {handle.kind for handle in model.capture.handles}


def trained(parameter: nn.Parameter, name: str = "", group: int = 0) -> Trainable:
    """A parameter as the steps of a model know it."""
    trigger = torch.zeros((), requires_grad=True)
    dtype = accumulation_dtype(parameter.dtype)
    return Trainable(parameter, 0, name, parameter.shape, group, group, dtype, trigger)
