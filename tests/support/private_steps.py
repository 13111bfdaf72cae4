"""Private steps through the public API, beside their definition: one backward per sample.

A `Way` says how a step is made. `compare` makes the steps of one run, on batches of several sizes,
and compares norms and clipped sums with one ordinary backward per sample in float64. Nothing here
knows how the library computes them: `make_private`, the criterion, `backward()`, `pre_step()`,
`.grad` and `per_sample_gradient_norms` are all that it calls.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from ddp_by_hand.experiments.verify_correctness import reference as oracle
from dp_clipping import BatchMemoryManager, PrivacyEngine
from tests.dp_clipping.conftest import assert_close, skip_all_checks
from tests.support import zoo

REFERENCE = ("per_sample", "ghost", "bookkeeping")  # modes in plain PyTorch
FUSED = ("flash", "flash_bookkeeping")
SAMPLES = 5
BATCHES = (range(4), range(4, 5), range(0), range(4), range(1, 4))
"""Samples of the batches of a run: four, one, none, the first again, another size."""
FEWER = BATCHES[0], BATCHES[2], BATCHES[4]  # in the interpreter, which is slow
UNITS = [0, 1, 0, 2, 2]  # the unit of each sample, where two examples are one: one is half full
TOLERANCES = {
    torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 6e-2, torch.float16: 3e-2,
}  # fmt: skip


@dataclass(frozen=True)
class Way:
    """How private steps are made.

    Attributes:
        dtype: of parameters and inputs.
        autocast: the dtype of `torch.autocast`, if the forward runs under it.
        units: two examples are a unit of privacy, and a unit with one is filled up.
        padded: batches are split into microbatches of three rows, the last ones padded.
        checkpointed: backward computes the network's activations again.
        compiled: the backend of `torch.compile` that compiles the private network as a whole.
        options: further arguments of `make_private`.
    """

    mode: str = "bookkeeping"
    clipping: str = "flat"
    function: str = "abadi"
    dtype: torch.dtype = torch.float64
    device: str = "cpu"
    autocast: torch.dtype | None = None
    units: bool = False
    padded: bool = False
    checkpointed: bool = False
    compiled: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.autocast or self.dtype]


def on_kernels(way: Way) -> Way:
    """Returns the way in float32 where it is in float64, which kernels do not have."""
    return replace(way, dtype=torch.float32) if way.dtype == torch.float64 else way


class Checkpointed(nn.Module):
    """A network whose activations are computed again in backward."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.network, *args, use_reentrant=False, **kwargs)


class Samples(Dataset):
    """The samples of a batch, one by one."""

    def __init__(self, batch: oracle.Batch) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(self.batch[1])

    def __getitem__(self, i: int) -> oracle.Batch:
        return oracle.pick(self.batch, i)


def make_private(case: zoo.Case, way: Way, limit: float | list[float], **more: Any) -> Any:
    """Returns what `make_private` does for a network and its samples, and the plain network."""
    network = case.build().to(way.device, way.dtype)
    batch = oracle.move(case.batch(SAMPLES), dtype=way.dtype)
    if way.units:
        more |= {"examples_per_unit": 2, "unit_ids": UNITS, "sample_rate": 1.0, "steps": 2}
    else:
        more |= {"poisson_sampling": False}
    arguments = {
        "criterion": zoo.Criterion(case.per_sample_loss, "sum"), "loss_reduction": "sum"
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "poisson_sampling=False")
        model, optimizer, criterion, loader = PrivacyEngine(accountant="rdp").make_private(
            module=Checkpointed(network) if way.checkpointed else network,
            optimizer=torch.optim.SGD(network.parameters(), lr=0.0),
            data_loader=DataLoader(Samples(batch), batch_size=SAMPLES - SAMPLES % 2),
            noise_multiplier=0.0,
            max_grad_norm=limit,
            grad_sample_mode=way.mode,
            clipping=way.clipping,
            clipping_function=way.function,
            **arguments | way.options | more,
        )
    if way.compiled is not None:
        torch.compiler.reset()
        network.compile(backend=way.compiled, fullgraph=True)
    return SimpleNamespace(
        network=network, batch=batch, model=model, optimizer=optimizer, criterion=criterion,
        loader=loader,
    )  # fmt: skip


def parts(
    run: SimpleNamespace, way: Way, batches: tuple[range, ...] = BATCHES
) -> Iterator[oracle.Batch]:
    """Yields what each forward of a run is given: batches, or the microbatches of them."""
    if not (way.units or way.padded):
        yield from (oracle.pick(run.batch, list(samples)) for samples in batches)
        return
    loader = run.loader
    if not way.units:
        loader = DataLoader(loader.dataset, batch_sampler=[list(samples) for samples in batches])
    if not way.padded:
        yield from loader
        return
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=4 if way.units else 3,
        optimizer=run.optimizer, pad_batches=True,
    ) as microbatches:  # fmt: skip
        yield from microbatches


def step(
    run: SimpleNamespace, way: Way, batch: oracle.Batch, factors: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]] | None:
    """Returns norms and clipped sums of a step; None if it goes on with another microbatch.

    The parameters stay as they are. `factors` [B] multiply the samples' losses.
    """
    inputs, targets = oracle.move(batch, device=way.device)
    wide = oracle.Widened(way.dtype) if way.dtype == torch.float64 else nullcontext()
    with torch.autocast(way.device, way.autocast, enabled=way.autocast is not None), wide:
        loss = run.criterion(oracle.forward(run.model, inputs), targets)
    (loss if factors is None else loss * factors).backward()
    found = None
    if run.optimizer.pre_step():  # the last part of its batch
        named = run.network.named_parameters()
        sums = {name: p.grad.double().cpu() for name, p in named if p.requires_grad}
        found = run.model.per_sample_gradient_norms.double().cpu(), sums
    run.optimizer.step()
    run.optimizer.zero_grad()
    return found


@cache
def gradients_of(case: zoo.Case, dtype: torch.dtype) -> oracle.Gradients:
    """Returns float64 gradients of the samples, with parameters and inputs rounded to `dtype`."""
    batch = oracle.move(case.batch(SAMPLES), dtype=dtype)
    return oracle.per_sample_gradients(case.build().to(dtype), batch, case.per_sample_loss)


def middle(norms: Tensor) -> float:
    """Returns a threshold that clips some samples and not others."""
    ordered = norms.sort().values
    found = float(ordered[len(ordered) // 2 - 1 : len(ordered) // 2 + 1].mean())
    return found or 1.0  # of a parameter that nothing reaches


def limits_of(gradients: oracle.Gradients, clipping: str) -> float | list[float]:
    """Returns the thresholds of a run, each in the middle of its group's norms."""
    if clipping == "flat":
        return middle(oracle.norms(gradients))
    groups = oracle.module_groups(list(gradients))
    return [middle(oracle.norms({name: gradients[name] for name in group})) for group in groups]


def is_refusal(error: Exception, case: zoo.Case, network: nn.Module) -> bool:
    """Returns whether a case may be refused, and the message names a module or a parameter."""
    named = [name for name, _ in (*network.named_modules(), *network.named_parameters()) if name]
    return case.or_refused and any(name in str(error) for name in named)


@contextmanager
def full_precision() -> Iterator[None]:
    """Enters a context without TensorFloat-32, whose products round to ten bits."""
    backends = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = [backend.fp32_precision for backend in backends]
    for backend in backends:
        backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def compare(
    case: zoo.Case, way: Way, *, is_checked: bool = False, batches: tuple[range, ...] = BATCHES
) -> SimpleNamespace | None:
    """Makes a run, and compares each of its steps with the definition.

    Returns the run, or None if the network was refused, by name, as the case says it may be.

    `is_checked`: with the library's own search for samples that see each other, which takes longer
    than the steps. A case that may be refused has it always. `batches`: the samples of each.
    """
    each = gradients_of(case, way.dtype)
    expected = [oracle.pick(each, list(samples)) for samples in batches]
    if way.units:
        order = [i for unit in range(3) for i in range(SAMPLES) if UNITS[i] == unit]
        units = [[i for i in order if UNITS[i] == unit] for unit in range(3)]
        whole = {n: torch.stack([g[members].sum(0) for members in units]) for n, g in each.items()}
        expected = [whole] * 2
    limits = limits_of(expected[0], way.clipping)
    if way.clipping == "flat":
        norms = oracle.norms(expected[0])
        assert (norms > limits).any()
        assert (norms <= limits).any(), "or no test would tell"
    try:
        run = make_private(case, way, limits)
        if not (is_checked or case.or_refused):
            skip_all_checks(run.model)
        with full_precision():
            found = [step(run, way, part) for part in parts(run, way, batches)]
    except (ValueError, RuntimeError) as error:
        if is_refusal(error, case, case.build()):
            return None
        raise
    of_steps = [one for one in found if one is not None]
    assert len(of_steps) == len(expected)
    for one, gradients in zip(of_steps, expected, strict=True):
        check_step(one, gradients, limits, way)
    return run


def check_step(
    found: tuple[Tensor, dict[str, Tensor]],
    gradients: oracle.Gradients,
    limits: float | list[float],
    way: Way,
) -> None:
    """Compares the norms and sums of a step with those of these gradients."""
    norms, sums = found
    torch.testing.assert_close(norms, oracle.norms(gradients), rtol=way.tolerance, atol=1e-12)
    expected = oracle.clipped_sum(gradients, limits, way.clipping, way.function)
    assert_close(sums, expected, way.tolerance)


def check_bounds(case: zoo.Case, way: Way, *, has_cancelling: bool = False) -> None:
    """Each sample is a batch: its part of `.grad` before noise, normed in float64, is at most C.

    Nor is it much less, of the samples whose tokens do not cancel: all, or the first and the last.
    """
    norms = oracle.norms(gradients_of(case, way.dtype))
    run = make_private(case, way, 1.0)
    skip_all_checks(run.model)
    for i, norm in enumerate(norms.tolist()):
        run.optimizer.max_grad_norm = limit = max(0.3 * norm, 1e-6)
        inputs, targets = oracle.move(oracle.pick(run.batch, [i]), device=way.device)
        with full_precision():
            run.criterion(oracle.forward(run.model, inputs), targets).backward()
        squares = [p.grad.double().square().sum() for p in run.network.parameters()]
        found = float(torch.stack(squares).sum().sqrt())
        assert found <= limit * (1 + 1e-6), f"sample {i}: {found / limit} C"
        if norm and not (has_cancelling and 0 < i < len(norms) - 1):
            assert found >= limit * (1 - (1e-4 if way.dtype == torch.float32 else 1e-2))
        run.optimizer.step()
        run.optimizer.zero_grad()
