"""Private training where each rank steps a part of the parameters: zero1, zero2, fsdp by hand."""

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from ddp import wrap
from dp_clipping.arguments.given import check_optimizer
from experiments.verify_correctness import reference as oracle
from lm.rank_pool import Context
from tests.dp_clipping.conftest import MODES, gradients_of, private, private_loss
from tests.support import around_blocks, zoo
from tests.support.replicas import SPLITS, Beside, alone, applied, build, parameters, train

VARIANTS = ["zero1", "zero2", "fsdp"]
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def beside_oracle(context: Context, variant: str, mode: str, name: str, clipping: str) -> None:
    pair = Beside(context, variant, mode, name, clipping)
    for sizes in SPLITS[context.world_size]:
        pair.check_step(sizes)


@every_variant
@pytest.mark.parametrize(("mode", "name", "clipping"), [
    ("bookkeeping", "transformer_tied", "flat"),
    ("ghost", "transformer", "per_layer"),
    ("flash_bookkeeping", "transformer", "flat"),
])  # fmt: skip
def test_sums_are_those_of_one_process(cpu_ranks, variant, mode, name, clipping):
    cpu_ranks.run(2, beside_oracle, variant, mode, name, clipping)


def steps(context: Context, variant: str, options: dict) -> tuple[np.ndarray, np.ndarray]:
    run = build(context, variant, **options)
    train(run, 3)
    return applied(run), parameters(run)


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_noise_and_steps_are_those_of_one_process(cpu_ranks, variant, dtype):
    """Each element gets the noise of its place in the parameter, whoever steps it."""
    options = {"name": "transformer", "dtype": dtype}
    answers = cpu_ranks.run(2, steps, variant, options)
    expected = alone(3, **options)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    for found in answers:
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance)


def in_bfloat16(context: Context) -> None:
    """Arguments, too, are converted to what `fsdp` gathers parameters in; sums are float32."""
    batch = oracle.move(zoo.classes(4, 6, 5), dtype=torch.float32)
    mine = slice(2 * context.rank, 2 * context.rank + 2)
    wide = oracle.move(batch, dtype=torch.float64)
    exact = oracle.per_sample_gradients(around_blocks.make("product"), wide, zoo.cross_entropy)
    norms, limit = oracle.norms(exact), float(oracle.norms(exact).median())
    expected = oracle.clipped_sum(exact, limit)
    options = {"process_group": context.group, "param_dtype": torch.bfloat16}
    for mode in MODES:
        network = wrap("fsdp", around_blocks.make("product").float(), **options)
        model = private(network, mode, limit)
        private_loss(model, oracle.pick(batch, mine), zoo.cross_entropy).backward()
        model.finish_synchronization()
        found = model.per_sample_gradient_norms.double()
        torch.testing.assert_close(found, norms[mine], rtol=3e-2, atol=0, msg=mode)
        for name, total in gradients_of(model).items():
            assert total.dtype == torch.float32
            error = (total.double() - expected[name]).norm()
            assert error <= 0.08 * expected[name].norm() + 1e-3, (mode, name)


def test_fsdp_in_bfloat16(cpu_ranks):
    cpu_ranks.run(2, in_bfloat16)


def saved(context: Context, variant: str, path: Path) -> tuple[np.ndarray, np.ndarray]:
    """A run that was saved after two steps, and its parameters two steps later."""
    run = build(context, variant, name="transformer")
    train(run, 2)
    run.optimizer.zero_grad()
    run.engine.save_checkpoint(path=path, module=run.model, optimizer=run.optimizer)
    before = parameters(run)
    train(run, 2)
    return before, parameters(run)


def resumed(context: Context, variant: str, path: Path) -> tuple[np.ndarray, np.ndarray]:
    run = build(context, variant, name="transformer")
    run.engine.load_checkpoint(path=path, module=run.model, optimizer=run.optimizer)
    before = parameters(run)
    train(run, 2)
    return before, parameters(run)


@pytest.mark.parametrize(("variant", "other"), [
    ("zero1", "fsdp"), ("fsdp", "zero2"), ("zero2", "ddp_bucketed"),
])  # fmt: skip
def test_a_checkpoint_goes_on_with_another_variant(cpu_ranks, tmp_path, variant, other):
    path = tmp_path / "run.pt"
    expected = cpu_ranks.run(2, saved, variant, path)
    for rank, found in enumerate(cpu_ranks.run(2, resumed, other, path)):
        np.testing.assert_array_equal(found[0], expected[rank][0])
        np.testing.assert_allclose(found[1], expected[rank][1], rtol=0, atol=1e-5)


def refused(context: Context, variant: str) -> None:
    run = build(context, variant)
    inputs, targets, _ = next(iter(run.loader))
    run.criterion(run.model(inputs), targets).backward()
    wrapper = run.optimizer.model.module
    wrapper.finish_gradient_synchronization()
    wrapper.clip_grad_norm_(0.1)  # of sums that have no noise yet
    with pytest.raises(RuntimeError, match=r"gradient of .* was changed"):
        run.optimizer.step()
    module = wrap(variant, torch.nn.Linear(3, 2), process_group=context.group)
    plain = torch.optim.AdamW(module.parameters())
    with pytest.raises(ValueError, match=r"module\.make_optimizer\(AdamW"):
        check_optimizer(plain, module)


@every_variant
def test_what_is_refused(cpu_ranks, variant):
    cpu_ranks.run(2, refused, variant)


def is_freed(context: Context, variant: str, mode: str) -> bool:
    run = build(context, variant, name="transformer", grad_sample_mode=mode)
    train(run, 2)
    held = weakref.ref(run.model)
    del run
    gc.collect()
    return held() is None


@pytest.mark.parametrize("variant", [*VARIANTS, "ddp_bucketed"])
@pytest.mark.parametrize("mode", ["per_sample", "flash_bookkeeping"])
def test_a_run_that_nobody_holds_is_freed(cpu_ranks, variant, mode):
    """Its network, its optimizer state and its gathered parameters with it."""
    assert cpu_ranks.run(2, is_freed, variant, mode) == [True, True]
