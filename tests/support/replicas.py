"""Private training on several ranks: replicas of the zoo's networks, and what is beside them."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddp import wrap
from ddp_by_hand.experiments.verify_correctness import reference as oracle
from ddp_by_hand.lm.rank_pool import Context
from dp_clipping import PrivacyEngine
from dp_clipping.clipping.coefficients import MARGIN
from dp_clipping.model import PrivateModel
from tests.ddp.conftest import COPY_ENGINE, CPU_COPY_ENGINE, HAND_BUILT
from tests.dp_clipping.conftest import (
    assert_close,
    gradients_of,
    private_loss,
    skip_all_checks,
    unchecked,
)
from tests.support import zoo
from tests.support.beside import small_buckets
from tests.support.engine import endless
from tests.support.private_steps import limits_of

SYNCHRONISING = [*HAND_BUILT, CPU_COPY_ENGINE, "torch_ddp", "torch_ddp_tuned"]
VARIANTS = ["none", *SYNCHRONISING]
BUCKET_MB = 0.003  # some of the transformer's matrices to a bucket, its largest alone
ALL = slice(0, zoo.SIZE)

SPLITS: dict[int, list[tuple[int, ...]]] = {
    1: [(4,)],
    2: [(3, 1), (0, 4), (2, 2)],
    3: [(1, 0, 3), (2, 2, 0)],
    4: [(2, 0, 1, 1), (0, 0, 4, 0), (1, 1, 1, 1)],
}
"""By number of ranks: how many of the `zoo.SIZE` samples of a global batch each rank has."""


@cache
def reference(name: str, batch_size: int, dtype: torch.dtype) -> oracle.Gradients:
    """Returns float64 gradients of a network of the zoo, rounded to `dtype` as its batch is."""
    case = zoo.BY_NAME[name]
    batch = oracle.move(case.batch(batch_size), dtype=dtype)
    return oracle.per_sample_gradients(case.build().to(dtype), batch, case.per_sample_loss)


def part(sizes: Sequence[int], rank: int) -> slice:
    """This rank's samples of the global batch."""
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


class Beside:
    """A network of the zoo on this rank, and the oracle of the whole global batch.

    The threshold clips some samples and not others.
    """

    def __init__(
        self,
        context: Context,
        variant: str,
        mode: str = "bookkeeping",
        name: str = "transformer",
        clipping: str = "flat",
        dtype: torch.dtype = torch.float32,
        tolerance: float = 1e-5,
        **options: Any,
    ):
        case = zoo.BY_NAME[name]
        self.context, self.variant, self.clipping, self.tolerance = (
            context, variant, clipping, tolerance,
        )  # fmt: skip
        self.per_sample_loss = case.per_sample_loss
        self.expected = reference(name, zoo.SIZE, dtype)
        self.clip_norms = limits_of(self.expected, clipping)
        self.batch = oracle.move(case.batch(zoo.SIZE), device=context.device, dtype=dtype)
        wrapped = wrap(
            variant,
            case.build().to(context.device, dtype),
            process_group=context.group,
            **small_buckets(variant, BUCKET_MB),
            **options,
        )
        self.model: PrivateModel = unchecked(wrapped, mode, self.clip_norms, clipping)

    def backward(self, mine: slice) -> None:
        batch = oracle.pick(self.batch, mine)
        private_loss(self.model, batch, self.per_sample_loss).backward()

    def finish(self) -> None:
        self.model.module.finish_gradient_synchronization()

    def check_sums(self, whose: slice = ALL) -> None:
        """`.grad` is Σ c_i g_i over these samples of the global batch."""
        sums = gradients_of(self.model)
        assert {g.dtype for g in sums.values()} == {torch.float32}
        # Coefficients are a margin below C / n, by which 1e-5 could not see.
        margin = 1 + MARGIN[torch.float32]
        below = (
            self.clip_norms / margin
            if isinstance(self.clip_norms, float)
            else [limit / margin for limit in self.clip_norms]
        )
        expected = oracle.clipped_sum(oracle.pick(self.expected, whose), below, self.clipping)
        assert_close({n: g.cpu() for n, g in sums.items()}, expected, self.tolerance)

    def check_norms(self, mine: slice) -> None:
        """Those of the local batch, and nobody else's."""
        actual = self.model.per_sample_gradient_norms
        assert actual.dtype == torch.float32
        expected = oracle.norms(self.expected)[mine].float()
        torch.testing.assert_close(actual.cpu(), expected, rtol=self.tolerance, atol=0)

    def check_step(self, sizes: Sequence[int]) -> None:
        mine = part(sizes, self.context.rank)
        self.backward(mine)
        self.finish()
        self.check_norms(mine)
        self.check_sums(mine if self.variant == "none" else ALL)
        self.model.clear_gradients()


def build(
    context: Context | None = None,
    variant: str = "ddp_bucketed",
    *,
    name: str = "mlp",
    count: int = 24,
    batch_size: int = 4,
    dtype: torch.dtype = torch.float32,
    seed: int | None = 5,
    distributed_sampler: bool = False,
    shard: Callable[[nn.Module], nn.Module] | None = None,
    accountant: str = "rdp",
    module: nn.Module | None = None,
    secure_mode: bool = False,
    looks: bool = False,
    **changes: Any,
) -> SimpleNamespace:
    """What `make_private` returns on this rank, or in a process without ranks.

    A sample's last entry is its number. `seed` fixes the keys; None draws them. `shard`: takes the
    place of a data-parallel variant; `module`: of the case's own. `looks`: whether samples of the
    first batch see each other, which takes longer than a step.
    """
    case = zoo.BY_NAME[name]
    device = torch.device("cpu") if context is None else context.device
    module = (case.build() if module is None else module).to(device, dtype)
    if shard is not None:
        module = shard(module)
    plain, sgd = module, {"lr": 0.1, "momentum": 0.9}
    if context is not None and shard is None:
        options = small_buckets(variant, BUCKET_MB)
        module = wrap(variant, module, process_group=context.group, **options)
        optimizer = module.make_optimizer(torch.optim.SGD, plain.parameters(), **sgd)
    else:
        # Tensor parallel has DTensors beside tensors, which foreach refuses on a GPU.
        optimizer = torch.optim.SGD(plain.parameters(), foreach=False if shard else None, **sgd)
    dataset = TensorDataset(*oracle.move(case.batch(count), dtype=dtype), torch.arange(count))
    sampler = None
    if distributed_sampler:
        sampler = DistributedSampler(dataset, context.world_size, context.rank, shuffle=False)
    arguments = {"noise_multiplier": 0.8, "max_grad_norm": 0.7} | changes
    if seed is not None:
        arguments |= {"noise_generator": torch.Generator().manual_seed(seed)}
    engine = PrivacyEngine(accountant=accountant, secure_mode=secure_mode)
    reduction = arguments.get("loss_reduction", "mean")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "poisson_sampling=False")
        model, private_optimizer, criterion, loader = engine.make_private(
            module=module,
            optimizer=optimizer,
            criterion=zoo.Criterion(case.per_sample_loss, reduction),
            data_loader=DataLoader(dataset, batch_size=batch_size, sampler=sampler),
            **arguments,
        )
    if looks:
        private_optimizer.model.skip_checks()
    elif arguments.get("grad_sample_mode") != "no_dp":
        skip_all_checks(private_optimizer.model)
    return SimpleNamespace(
        engine=engine,
        model=model,
        optimizer=private_optimizer,
        criterion=criterion,
        loader=loader,
        device=device,
    )


def train(
    run: SimpleNamespace, steps: int, microbatch: int | None = None, zero_grad=None,
    pad: bool = False,
) -> list[list[list[int]]]:  # fmt: skip
    """So many steps; the samples of each microbatch of each draw, of padded ones too.

    `zero_grad(step)` is called before each step but the first, in place of the optimizer's.
    """
    draws, pieces = [], []
    for *batch, numbers in endless(run, microbatch, pad_batches=pad):
        inputs, targets = oracle.move(batch, device=run.device)
        if run.optimizer.steps and not pieces and zero_grad:
            zero_grad(run.optimizer.steps)
        elif not zero_grad:
            run.optimizer.zero_grad()
        run.criterion(run.model(inputs), targets).backward()
        real = run.optimizer.model.step_state.ticket.real_of(len(numbers))
        pieces.append(numbers[:real].tolist())
        before = run.optimizer.steps
        run.optimizer.step()
        if run.optimizer.steps > before:
            draws.append(pieces)
            pieces = []
        if len(draws) == steps:
            return draws
    raise AssertionError


@cache
def alone(steps: int, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """What the last of so many steps of one process applied, and the parameters after it."""
    run = build(**options)
    train(run, steps)
    return applied(run), parameters(run)


def flat(tensors: Sequence[Tensor]) -> np.ndarray:
    """All values in one float32 vector, which holds every 16-bit value exactly."""
    return torch.cat([t.detach().float().flatten() for t in tensors]).cpu().numpy()


def parameters(run: SimpleNamespace) -> np.ndarray:
    whole = getattr(run.optimizer.model.module, "whole_parameters", nullcontext)
    with whole():
        return flat(list(run.model.network.parameters()))


def applied(run: SimpleNamespace) -> np.ndarray:
    """What `step()` has left in `.grad`, or in the ranks' parts of it."""
    return flat(list(gradients_of(run.optimizer.model).values()))


def on_gpus(variant: str) -> str:
    """The variant of which this one is the CPU's stand-in."""
    return COPY_ENGINE if variant == CPU_COPY_ENGINE else variant
