"""Poisson draws, microbatches, keys and the account on several ranks, beside one process."""

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as OpacusReplica
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

import ddp
from ddp_by_hand.lm.parallel import DATA, TENSOR
from ddp_by_hand.lm.rank_pool import Context
from dp_clipping import PrivacyEngine
from dp_clipping.noise.adaptive_threshold import AdaptiveThreshold
from dp_clipping.validation import check_module
from tests.support.meshes import square
from tests.support.on_ranks import on_ranks
from tests.support.replicas import SYNCHRONISING, applied, build, parameters, train
from tests.support.turns import in_turn


def with_a_module(
    context: Context, wrap: Callable[[nn.Module], nn.Module], axis: str | None = None
) -> list[str]:
    """What is said of it: warnings, or why it is refused."""
    group = None if axis is None else square(DATA, TENSOR).get_group(axis)
    module = wrap(nn.Linear(3, 2))
    loader = DataLoader(TensorDataset(torch.ones(8, 3), torch.zeros(8, dtype=torch.long)), 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            PrivacyEngine().make_private(
                module=module, optimizer=torch.optim.SGD(module.parameters(), 0.1),
                data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0,
                data_parallel_group=group,
            )  # fmt: skip
        except ValueError as error:
            return [str(error)]
    return [str(w.message) for w in caught if issubclass(w.category, UserWarning)]


@pytest.mark.parametrize(
    ("wrap", "name"),
    [
        (nn.parallel.DistributedDataParallel, "DistributedDataParallel"),
        (OpacusReplica, OpacusReplica.__name__),
        (replicate, "DDPLinear"),
    ],
)
def test_replicas_whose_sums_would_not_leave_are_refused(cpu_ranks, wrap, name):
    for (said,) in cpu_ranks.run(4, with_a_module, wrap):
        assert f"{name}): would not exchange clipped sums" in said
        assert 'ddp.wrap("torch_ddp", network)' in said


def test_a_replicated_part_of_a_network_is_refused_too():
    network = nn.Sequential(nn.Linear(3, 3), replicate(nn.Linear(3, 2)))
    with pytest.raises(ValueError, match=r"1 \(DDPLinear\): would not exchange clipped sums"):
        check_module(network)


def alone(network: nn.Module) -> nn.Module:
    return network


def together(network: nn.Module) -> nn.Module:
    return ddp.wrap("ddp", network)


def test_a_plain_network_on_several_ranks_is_told_that_it_is_alone(cpu_ranks):
    assert all(
        "neither wrapped nor sharded" in s for (s,) in cpu_ranks.run(4, with_a_module, alone)
    )
    assert cpu_ranks.run(4, with_a_module, together) == [[]] * 4


def divided(network: nn.Module) -> nn.Module:
    plan = {"": ColwiseParallel(output_layouts=Replicate())}
    return parallelize_module(network, square(DATA, TENSOR)[TENSOR], plan)


def test_tensor_parallel_groups_beside_each_other_are_told_so(cpu_ranks):
    """Without the ranks that have the same parts. With them, as it is said, they train one."""
    for (said,) in cpu_ranks.run(4, with_a_module, divided):
        assert said.startswith("4 ranks, and tensor parallelism divides module among 2")
    assert cpu_ranks.run(4, with_a_module, divided, DATA) == [[]] * 4


THRESHOLD = AdaptiveThreshold(0.7, expected_batch_size=4, count_std=6.0)


def differing(context: Context, name: str, values: list) -> str:
    try:
        build(context, **{name: values[context.rank]})
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "values", "shown"),
    [
        ("noise_multiplier", [1.0, 0.25], "noise_multiplier (1.0 on rank 0, 0.25 on rank 1)"),
        ("max_grad_norm", [1, 2], "max_grad_norm (1 on rank 0, 2 on rank 1)"),
        ("count", [24, 28], "num_samples (24 on rank 0, 28 on rank 1)"),
        ("batch_size", [4, 6], "expected_batch_size (4.0 on rank 0, 6.0 on rank 1)"),
        ("expected_batch_size", [4.0, 5.0], "expected_batch_size (4.0 on rank 0"),
        ("loss_reduction", ["mean", "mean"], ""),
        ("max_grad_norm", [1, 1.0], ""),
        ("clipping_function", ["abadi", "automatic"], "clipping_function (abadi"),
        ("gamma", [0.01, 0.1], "gamma (0.01"),
        ("grad_sample_mode", ["ghost", "no_dp"], "mode (ghost on rank 0, no_dp on rank 1)"),
        ("poisson_sampling", [True, False], "poisson_sampling (True"),
        ("batch_first", [True, False], "batch_first (True"),
        ("rand_on_empty", [True, False], "rand_on_empty (True"),
        ("norm_algorithm", ["auto", "input_length"], "norm_algorithm (auto"),
        ("adaptive_threshold", [None, THRESHOLD], "adaptive_threshold"),
        ("accountant", ["prv", "rdp"], "accountant (prv on rank 0, rdp on"),
    ],
)
def test_ranks_must_agree_on_the_settings(cpu_ranks, name, values, shown):
    one, other = cpu_ranks.run(2, differing, name, values)
    assert one == other
    assert shown in one if shown else not one


@on_ranks(2)
def test_ranks_must_agree_on_the_sampling(context: Context) -> None:
    most = 5 + context.rank
    with pytest.raises(ValueError, match=r"max_batch_size \(5 .*6"):
        build(context, sampling="truncated_poisson", max_batch_size=most)
    sampling = ("cyclic", "balls_in_bins")[context.rank]
    with pytest.raises(ValueError, match=r"sampling \('?cyclic"):
        build(context, sampling=sampling)


def held_back(context: Context, variant: str) -> tuple[bytes, str]:
    run, usual = build(context, variant), build(context, variant)
    inputs, targets, _ = next(iter(run.loader))
    for one in (run, usual):  # PyTorch's first step must not be under no_sync
        one.loader.usage.handed = None  # of tensors of its own
        one.criterion(one.model(inputs), targets).backward()
        one.optimizer.step()
        one.optimizer.zero_grad()
    with run.model.no_sync():
        run.criterion(run.model(inputs), targets).backward()
        message = ""
        try:
            run.optimizer.step()
        except RuntimeError as error:
            message = str(error)
    usual.criterion(usual.model(inputs), targets).backward()
    for one in (run, usual):
        one.optimizer.step()
    assert run.optimizer.steps == 2
    np.testing.assert_allclose(parameters(run), parameters(usual), rtol=0, atol=1e-6)
    return parameters(run).tobytes(), message


@pytest.mark.parametrize("variant", SYNCHRONISING, ids=lambda v: v.rpartition(":")[2])
def test_sums_of_no_sync_alone_leave_before_the_step(cpu_ranks, variant):
    one, other = cpu_ranks.run(2, held_back, variant)
    assert one == other
    assert "step() under no_sync()" in one[1]


def used_twice(context: Context, **options) -> list[str]:
    """Draws until one rank has samples and the other none; that one's backward, twice."""
    run, said = build(context, "ddp_bucketed", batch_size=1, **options), []
    for number, (inputs, targets, _) in enumerate(run.loader):
        sizes = [len(share) for share in run.loader.batch_sampler.shares(number)]
        run.criterion(run.model(inputs), targets).backward()
        if min(sizes) == 0 < max(sizes):
            try:
                run.criterion(run.model(inputs), targets).backward()
            except RuntimeError as error:
                said.append(str(error).partition(":")[0])
        run.optimizer.step()
        run.optimizer.zero_grad()
    return said


def test_a_second_backward_is_refused_by_ranks_without_samples_too(cpu_ranks):
    one, other = cpu_ranks.run(2, used_twice)
    assert len(one) == len(other) > 1
    for mine, others in zip(one, other, strict=True):
        assert {"another rank" in text for text in (mine, others)} == {True, False}


@pytest.mark.parametrize(
    ("microbatch", "dtype"), in_turn([None, 1], [torch.float32, torch.bfloat16])
)
def test_the_models_zero_grad_is_the_optimizers(dtype, microbatch):
    """Also between microbatches, where it keeps what is accumulated."""
    runs = [build(dtype=dtype, name="transformer") for _ in range(2)]
    by_optimizer, by_model = runs
    train(by_optimizer, 4, microbatch)
    by_model.optimizer.zero_grad = by_model.model.zero_grad
    train(by_model, 4, microbatch)
    assert parameters(by_model).tobytes() == parameters(by_optimizer).tobytes()


def test_gradients_without_privacy_are_accumulated_over_microbatches():
    run = build(grad_sample_mode="no_dp", loss_reduction="mean", batch_size=12, count=24)
    (pieces,) = train(run, 1, 3)
    assert len(pieces) > 1
    alone = build(grad_sample_mode="no_dp", batch_size=12, count=24)
    inputs, targets, _ = alone.loader.dataset.tensors
    for piece in pieces:
        alone.criterion(alone.model(inputs[piece]), targets[piece]).backward()
    np.testing.assert_allclose(applied(run), applied(alone), rtol=1e-5, atol=1e-7)
