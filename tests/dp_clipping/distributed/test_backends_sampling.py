"""Poisson draws, microbatches, keys and the account on several ranks, beside one process."""

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as OpacusReplica
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset

import ddp
from dp_clipping import BatchMemoryManager, PrivacyEngine
from dp_clipping.noise.keys import fixed_keys
from dp_clipping.sampling.poisson import included
from dp_clipping.validation import check_module
from lm.rank_pool import Context
from tests.ddp.conftest import CPU_COPY_ENGINE
from tests.support.replicas import SYNCHRONISING, applied, build, flat, parameters, train

COUNT, BATCH = 24, 4  # 6 draws an epoch


def epoch(
    context: Context, variant: str, microbatch: int | None, steps: int, options: dict,
    pad: bool = False,
) -> dict:  # fmt: skip
    """So many steps: what was drawn, and what must agree."""
    run = build(context, variant, **options)
    draws = train(run, steps, microbatch, pad=pad)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "noise and sampling come from a fixed seed")
        epsilon = run.engine.get_epsilon(1e-5)
    return {
        "draws": draws,
        "parameters": parameters(run),
        "agreed": (
            parameters(run).tobytes(),
            run.optimizer.steps,
            tuple(run.engine.accountant.history),
            epsilon,
            run.optimizer.expected_batch_size,
            run.loader.sample_rate,
        ),
    }


def with_a_module(context: Context, wrap: Callable[[nn.Module], nn.Module]) -> list[str]:
    """What is said of it: warnings, or why it is refused."""
    module = wrap(nn.Linear(3, 2))
    loader = DataLoader(TensorDataset(torch.ones(8, 3), torch.zeros(8, dtype=torch.long)), 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            PrivacyEngine().make_private(
                module=module, optimizer=torch.optim.SGD(module.parameters(), 0.1),
                data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0,
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


def replicated_by_fsdp(network: nn.Module) -> nn.Module:
    return replicate_with_fsdp(network, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def test_replicas_of_fsdp_are_sharded_ones(cpu_ranks):
    assert cpu_ranks.run(4, with_a_module, replicated_by_fsdp) == [[]] * 4


def alone(network: nn.Module) -> nn.Module:
    return network


def together(network: nn.Module) -> nn.Module:
    return ddp.wrap("ddp", network)


def test_a_plain_network_on_several_ranks_is_told_that_it_is_alone(cpu_ranks):
    assert all(
        "neither wrapped nor sharded" in s for (s,) in cpu_ranks.run(4, with_a_module, alone)
    )
    assert cpu_ranks.run(4, with_a_module, together) == [[]] * 4


def joined(lists) -> list:
    return list(itertools.chain.from_iterable(lists))


def check_against_one_process(answers: list, steps: int, **options) -> None:
    """Disjoint parts of the same draws, and the same parameters after them."""
    alone = build(**options)
    draws = train(alone, steps)
    for step, draw in enumerate(draws):
        shares = [joined(a["draws"][step]) for a in answers]
        assert sorted(joined(shares)) == joined(draw)
        for rank, share in enumerate(shares):
            assert all(i % len(answers) == rank for i in share)
        assert len({len(a["draws"][step]) for a in answers}) == 1, "microbatches"
    assert len({a["agreed"] for a in answers}) == 1
    assert answers[0]["agreed"][1] == steps
    assert len(answers[0]["agreed"][2]) == 1, "one entry of the account, all steps are alike"
    assert answers[0]["agreed"][2] == tuple(alone.engine.accountant.history)
    np.testing.assert_allclose(answers[0]["parameters"], parameters(alone), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("world_size", "microbatch", "pad"),
    [(2, None, False), (4, None, False), (2, 1, False), (4, 1, False), (2, 2, False), (4, 2, False),
     (4, 2, True)],
)  # fmt: skip
def test_ranks_share_one_draw(cpu_ranks, world_size, microbatch, pad):
    answers = cpu_ranks.run(world_size, epoch, "ddp_bucketed", microbatch, 9, {}, pad)
    check_against_one_process(answers, 9)
    sizes = [[len(joined(draw)) for draw in a["draws"]] for a in answers]
    mixed = [0 in of_ranks and any(of_ranks) for of_ranks in zip(*sizes, strict=True)]
    assert any(mixed) or world_size == 2, "some rank must have had nothing"
    if microbatch:
        for step, of_ranks in enumerate(zip(*sizes, strict=True)):
            needed = max(1, -(-max(of_ranks) // microbatch))
            assert len(answers[0]["draws"][step]) == needed


@pytest.mark.parametrize("variant", SYNCHRONISING, ids=lambda v: v.rpartition(":")[2])
def test_an_empty_draw_is_a_step(cpu_ranks, variant):
    """Noise alone, counted on every rank; every variant has its turn with nothing to send."""
    options = {"count": 6, "batch_size": 1, "noise_multiplier": 1.5}
    answers = cpu_ranks.run(2, epoch, variant, 1, 8, options)
    one, other = (a["draws"] for a in answers)
    assert [] in [joined(a) + joined(b) for a, b in zip(one, other, strict=True)]
    check_against_one_process(answers, 8, **options)


def noise_of_an_empty_draw(context: Context, seed: int) -> np.ndarray:
    run = build(context, name="transformer", count=6, batch_size=1, seed=seed)
    assert train(run, 1) == [[[]]]
    assert run.model.per_sample_gradient_norms.shape == (0,)
    return applied(run)


def test_an_empty_draw_has_the_whole_noise(cpu_ranks):
    def is_empty(seed: int) -> bool:
        key = fixed_keys(torch.Generator().manual_seed(seed)).sampling
        return not included(key, 0, 6, 1 / 6).any()

    seed = next(filter(is_empty, itertools.count()))
    one, other = cpu_ranks.run(2, noise_of_an_empty_draw, seed)
    assert one.tobytes() == other.tobytes()
    assert abs(one.std() / (0.8 * 0.7) - 1) < 0.05


@pytest.mark.parametrize("distributed", [False, True])
def test_the_divisor_is_a_public_constant(cpu_ranks, distributed):
    """`batch_size`, times the ranks with a DistributedSampler; drawn sizes do not enter."""
    options = {"distributed_sampler": distributed, "batch_size": 3}
    answers = cpu_ranks.run(2, epoch, "ddp_bucketed", None, 5, options)
    assert len({a["agreed"] for a in answers}) == 1
    *_, expected_batch, rate = answers[0]["agreed"]
    assert expected_batch == (6 if distributed else 3)
    assert rate == expected_batch / COUNT
    again = {"batch_size": 6 if distributed else 3}
    check_against_one_process(answers, 5, **again)


def test_made_up_samples_of_empty_draws_count_for_nothing(cpu_ranks):
    answers = cpu_ranks.run(4, epoch, "ddp_individual_v2", 1, 6, {"rand_on_empty": True})
    alone = build()
    train(alone, 6)
    assert len({a["agreed"] for a in answers}) == 1
    np.testing.assert_allclose(answers[0]["parameters"], parameters(alone), rtol=0, atol=1e-5)


def without_privacy(context: Context) -> tuple[bytes, list[int]]:
    run = build(context, grad_sample_mode="no_dp", count=6, batch_size=1)
    draws = train(run, 8, 1)
    return parameters(run).tobytes(), [len(pieces) for pieces in draws]


def test_no_dp_on_the_same_draws(cpu_ranks):
    """Unequal and empty ones: the ranks stay in step, and no empty batch makes a NaN."""
    one, other = cpu_ranks.run(2, without_privacy)
    assert one == other
    assert np.isfinite(np.frombuffer(one[0], np.float32)).all()


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
    ],
)
def test_ranks_must_agree_on_the_settings(cpu_ranks, name, values, shown):
    one, other = cpu_ranks.run(2, differing, name, values)
    assert one == other
    assert shown in one if shown else not one


def held_back(context: Context, variant: str) -> tuple[bytes, str]:
    run, usual = build(context, variant), build(context, variant)
    inputs, targets, _ = next(iter(run.loader))
    for one in (run, usual):  # PyTorch's first step must not be under no_sync
        one.loader.usage.forget()
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


def left_early(context: Context, variant: str) -> tuple[bytes, list[str]]:
    run, usual = build(context, variant, batch_size=12), build(context, variant, batch_size=12)
    with (
        warnings.catch_warnings(record=True) as caught,
        BatchMemoryManager(
            data_loader=run.loader, max_physical_batch_size=1, optimizer=run.optimizer
        ) as loader,
    ):
        warnings.simplefilter("always")
        for inputs, targets, _ in loader:
            run.criterion(run.model(inputs), targets).backward()
            run.optimizer.step()
            break
    assert train(run, 3) == train(usual, 3)
    np.testing.assert_allclose(parameters(run), parameters(usual), rtol=0, atol=1e-6)
    return parameters(run).tobytes(), [str(w.message)[:24] for w in caught]


@pytest.mark.parametrize("variant", ["ddp_bucketed", CPU_COPY_ENGINE], ids=["bucketed", "copy"])
def test_ranks_agree_after_a_draw_that_was_left(cpu_ranks, variant):
    one, other = cpu_ranks.run(2, left_early, variant)
    assert one == other
    assert any("Poisson batch 0 was left" in message for message in one[1])


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


# ---- keys and account ----------------------------------------------------------------------------


def with_drawn_keys(context: Context) -> tuple:
    torch.manual_seed(0)
    run = build(context, seed=None)
    draws = train(run, 4)
    keys = run.engine._runs[0].keys
    assert not keys.fixed
    history = tuple(run.engine.accountant.history)
    return keys.fingerprint, history, run.engine.get_epsilon(1e-5), parameters(run).tobytes(), draws


def test_ranks_share_one_secret_that_is_new_in_each_run(cpu_ranks):
    runs = [cpu_ranks.run(2, with_drawn_keys) for _ in range(2)]
    for one, other in runs:
        assert one[:4] == other[:4]
        assert not set(joined(joined(one[4]))) & set(joined(joined(other[4])))
    first, second = (answers[0] for answers in runs)
    assert first[1:3] == second[1:3], "the account is the same"
    assert first[0] != second[0]
    assert first[3] != second[3]


def other_seeds(context: Context) -> tuple:
    run = build(context, seed=100 + context.rank)
    train(run, 2)
    return run.engine._runs[0].keys.fingerprint, parameters(run).tobytes()


def test_fixed_keys_are_those_of_rank_0(cpu_ranks):
    """Replicas with other noise would drift apart."""
    one, other = cpu_ranks.run(2, other_seeds)
    assert one == other
    generator = torch.Generator().manual_seed(100)
    assert one[0] == fixed_keys(generator).fingerprint


# ---- checkpoint ----------------------------------------------------------------------------------


def resumed(context: Context, variant: str, folder: str) -> tuple[list, bytes]:
    """16-bit parameters, whose gradients change type, and microbatches."""
    path = Path(folder) / "run.pt"
    options = {"name": "transformer", "dtype": torch.bfloat16, "seed": None}
    whole = build(context, variant, **options)
    train(whole, 3, 1)
    files = {"path": path, "module": whole.model, "optimizer": whole.optimizer}
    whole.engine.save_checkpoint(**files)
    expected = train(whole, 4, 1)
    again = build(context, variant, **options)
    again.engine.load_checkpoint(path=path, module=again.model, optimizer=again.optimizer)
    assert train(again, 4, 1) == expected
    assert parameters(again).tobytes() == parameters(whole).tobytes()
    momentum = [
        flat([s["momentum_buffer"] for s in run.optimizer.state.values()]).tobytes()
        for run in (whole, again)
    ]
    assert momentum[0] == momentum[1]
    return parameters(again).tobytes()


@pytest.mark.parametrize("variant", ["ddp_individual_v2", CPU_COPY_ENGINE], ids=["v2", "copy"])
def test_a_resumed_run_goes_on_bit_for_bit(cpu_ranks, variant, tmp_path):
    one, other = cpu_ranks.run(2, resumed, variant, str(tmp_path))
    assert one == other


# ---- one process ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("microbatch", [None, 1])
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


def test_engines_of_one_process_draw_different_keys():
    fingerprints = {build(seed=None).engine._runs[0].keys.fingerprint for _ in range(3)}
    assert len(fingerprints) == 3
