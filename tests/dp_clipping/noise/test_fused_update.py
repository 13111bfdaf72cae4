"""Updates in the noise's kernel against the plain way: noise first, then the user's optimizer."""

import copy
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dp_clipping import CorrelatedNoise
from dp_clipping.distributed.placement import Span
from dp_clipping.noise import fused_update, gaussian, kernel
from dp_clipping.noise.adaptive_threshold import AdaptiveThreshold
from dp_clipping.noise.add_noise import add_noise_to_all
from dp_clipping.noise.fused_update import refuse, updates_of
from dp_clipping.noise.gaussian import NoiseStream
from tests.support import engine

OPTIMIZERS = {
    "adam": lambda p: Adam(p, lr=0.03, weight_decay=0.1),
    "adam of other betas": lambda p: Adam(p, lr=0.03, betas=(0.0, 0.5), eps=1e-4),
    "adamw": lambda p: AdamW(p, lr=torch.tensor(0.03), weight_decay=0.1, eps=1e-4),
    "adamw of two groups": lambda p: AdamW(
        [{"params": p[:2], "weight_decay": 0.3}, {"params": p[2:], "lr": 0.2}], lr=0.01
    ),
    "sgd": lambda p: SGD(p, lr=0.3, weight_decay=0.1),
    "momentum": lambda p: SGD(p, lr=0.3, momentum=0.9, dampening=0.25, weight_decay=0.1),
    "nesterov": lambda p: SGD(p, lr=0.3, momentum=0.9, nesterov=True),
}
ON_DEVICE = {  # the number of the step, and a learning rate
    "adamw, fused": lambda p: AdamW(p, lr=0.03, fused=True),
    "adamw, capturable": lambda p: AdamW(
        p, lr=torch.tensor(0.03, device="cuda"), capturable=True, weight_decay=0.1
    ),
}
SIZES = [1, 7, 4 * kernel.BLOCK + 2]
# As FSDP and tensor parallelism divide parameters: whole rows, and parts of rows.
PLACES = [(Span(0, 3, 1, 1, 1),), (Span(0, 8, 3, 5, 2), Span(6, 2**34, 1, 1, 1))]
PLACES.append((Span(0, 4, SIZES[2], SIZES[2], 1),))


def parameters(device: str, dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(n, generator=generator).to(device, dtype)) for n in SIZES]


def step(optimizer, own: list[nn.Parameter], number: int, std: float, places, fused: bool) -> None:
    """One step with noise, fused or not."""
    generator = torch.Generator().manual_seed(number)
    sums = [(9 * torch.randn(n, generator=generator)).to(own[0].device) for n in SIZES]
    streams = NoiseStream.derive_all(bytes(32), step=number, parameters="abc", share=0)
    updates = updates_of(optimizer, own, sums) if fused else []
    noisy = add_noise_to_all(
        sums, streams, std=std, divisor=3.0, dtypes=[p.dtype for p in own], places=places,
        updates=updates,
    )  # fmt: skip
    for p, gradient, update in zip(own, noisy, updates or [None] * 3, strict=True):
        assert (update is None) == (gradient.data_ptr() != p.data_ptr())
        p.grad = gradient if update is None else None
    optimizer.step()
    for p in own:
        p.grad = None


def check_rules(device: str) -> None:
    """Compares weights and the optimizer's states after each step, by every rule and dtype."""
    makes = OPTIMIZERS | (ON_DEVICE if device == "cuda" else {})
    dtypes = [torch.float32, torch.float16] + [torch.bfloat16] * (device == "cuda")
    cases = [(2.0, None), (2.0, PLACES), (0.0, None)]
    for i, ((name, make), dtype) in enumerate(product(makes.items(), dtypes)):
        if device == "cpu" and dtype == torch.float16 and name != "adamw":
            continue  # PyTorch's fused SGD is wrong there for more than a vector's elements
        for std, places in cases if device == "cuda" else cases[i // 2 % 3 :][:1]:
            plain, fused = parameters(device, dtype), parameters(device, dtype)
            optimizers = make(plain), make(fused)
            if dtype != torch.float32:  # PyTorch's fused ones round 16 bit once, as kernels do
                for group in (*optimizers[0].param_groups, *optimizers[1].param_groups):
                    group["fused"] = True
            for number in range(2 if device == "cpu" else 4):
                step(optimizers[0], plain, number, std, places, fused=False)
                step(optimizers[1], fused, number, std, places, fused=True)
                # The first makes the states; later ones compare a single update.
                assert all(u is not None for u in updates_seen(optimizers[1], fused))
                close(fused, plain, (name, dtype, std, number))
                states = [[*s.values()] for o in optimizers for s in o.state.values()]
                half = len(states) // 2
                for mine, wanted in zip(states[half:], states[:half], strict=True):
                    close(mine, wanted, (name, dtype, std, number))
                for p, q in zip(fused, plain, strict=True):
                    p.data.copy_(q)
                optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
                if number == 0:
                    for optimizer in optimizers:
                        lr = optimizer.param_groups[0]["lr"]
                        optimizer.param_groups[0]["lr"] = lr * 0.5


def updates_seen(optimizer, own: list[nn.Parameter]) -> list:
    """Returns how the next step would update parameters, and does not count it."""
    with patch.object(fused_update, "add_to_each"):
        return updates_of(optimizer, own, [torch.zeros_like(p, dtype=torch.float32) for p in own])


def close(found: list[Tensor], wanted: list[Tensor], case: tuple) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype
        epsilon = torch.finfo(b.dtype).eps
        error = (a.double() - b.double()).abs()
        # What is added up may be larger than its sum.
        assert (error <= 4 * epsilon * b.double().abs() + 2e-6).all(), (case, error.max())


def interpreted(body: Callable[[str], None]) -> None:
    with (
        patch.object(gaussian, "serves", lambda total: total.dtype == torch.float32),
        patch.object(kernel, "LOOPS", 2),
    ):
        body("cpu")


def check_runs(device: str) -> None:
    """Whole private runs: weights and the optimizer's state are those of the plain way."""
    for options in ({}, {"noise_mechanism": CorrelatedNoise(bands=2, epochs=2)}):
        if options:
            options |= {"sampling": "cyclic", "sample_rate": None}
        runs = [private_run(device, fused, **options) for fused in (True, False)]
        seen = [[train(run, 3), run.optimizer.state_dict()] for run in runs]
        close(seen[0][0], seen[1][0], ("run", options))
        assert seen[0][1]["private_steps"] == 3
        mine, wanted = ([*s["state"].values()] for _, s in seen)
        for one, other in zip(mine, wanted, strict=True):
            close([*one.values()], [*other.values()], ("state", options))


def private_run(device: str, fused: bool, **options):
    network = engine.network().to(device)
    optimizer = AdamW(network.parameters(), lr=0.01)
    return engine.build(
        module=network, optimizer=optimizer, noise_generator=engine.fixed(), fused_step=fused,
        **{k: v for k, v in options.items() if v is not None},
    )  # fmt: skip


def train(run, steps: int) -> list[Tensor]:
    own = list(run.network.parameters())
    for x, y in engine.endless(run):
        x, y = x.to(own[0].device), y.to(own[0].device)
        run.criterion(run.model(x), y).backward()
        assert all(p.grad is not None for p in own)
        versions = [p._version for p in own]
        run.optimizer.step()
        assert all(p._version > v for p, v in zip(own, versions, strict=True))
        assert all(p.grad is None for p in own) == (run.optimizer.noise.fused_with is not None)
        run.optimizer.zero_grad()
        if run.optimizer.steps == steps:
            return [p.detach() for p in own]
    raise AssertionError


def halve(optimizer, *_) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
        for p in group["params"]:
            p.grad *= 0.5


def check_hooks(device: str) -> None:
    """Hooks before the step see the noisy gradient, and what they change is applied."""
    runs = [private_run(device, fused) for fused in (True, False)]
    for run in runs:
        train(run, 2)
        assert not run.optimizer.has_step_hooks()
    registers = (
        lambda run: run.optimizer.register_step_pre_hook(halve),
        lambda run: register_optimizer_step_pre_hook(halve),
    )
    for register in registers:
        found = []
        for run in runs:
            with register(run):
                found.append(train(run, run.optimizer.steps + 1))
                assert run.optimizer.has_step_hooks()
        close(*found, "hooks")
        assert not runs[0].optimizer.has_step_hooks()


BODIES = [check_rules, check_runs, check_hooks]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_in_the_interpreter(interpreter, body):
    interpreter.run(interpreted, body)


@pytest.mark.gpu
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_compiled(body):
    body("cuda")


def test_without_kernels_the_optimizer_takes_the_step():
    runs = [private_run("cpu", fused) for fused in (True, False)]
    found = [train(run, 3) for run in runs]
    assert all(map(torch.equal, *found))


def test_parameters_without_a_kernel_are_left_to_the_optimizer():
    with patch.object(gaussian, "serves", lambda total: total.dtype == torch.float32):
        own = [nn.Parameter(torch.ones(4, 3).T), nn.Parameter(torch.ones(3).double())]
        own.append(nn.Parameter(torch.ones(3)))
        optimizer = SGD(own, lr=0.1)
        sums = [torch.zeros(3, 4), torch.zeros(3).double(), torch.zeros(3)]
        assert [u is not None for u in updates_of(optimizer, own, sums)] == [False, False, True]
        optimizer.param_groups[0]["maximize"] = True
        assert updates_of(optimizer, own, sums) == [None] * 3


@pytest.mark.parametrize(("changes", "is_read"), [
    ({}, True),
    ({"exp_avg": torch.zeros(4)}, False),  # as of another network
    ({"step": torch.zeros((), dtype=torch.float64)}, False),  # as of capturable=True
])  # fmt: skip
def test_states_that_the_kernel_would_misread_are_left_to_the_optimizer(changes, is_read):
    own = [nn.Parameter(torch.ones(3))]
    optimizer = AdamW(own, lr=0.1)
    state = {"exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3), "step": torch.zeros(())}
    optimizer.state[own[0]] = state | changes
    with (
        patch.object(gaussian, "serves", lambda total: True),
        patch.object(Tensor, "is_cuda", property(lambda x: x.dtype == torch.float64)),
    ):
        (update,) = updates_of(optimizer, own, [torch.zeros(3)])
    assert (update is not None) == is_read


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [True, False])
def test_a_step_has_its_own_norms_without_zero_grad(fused, dtype):
    """`.grad` is None, by the fused step or by hand: norms of the step before count in none."""
    shown: list[dict] = []
    limits = []
    for zero_grad in (True, False):
        threshold = AdaptiveThreshold(0.5, expected_batch_size=6.0, count_std=4.0)
        run = engine.on_any_batches(
            module=engine.network().to(dtype), adaptive_threshold=threshold, fused_step=fused,
            noise_generator=engine.fixed(),
        )  # fmt: skip
        run.engine.on_step(shown.append, unprotected=["loss", "samples"])
        for _ in range(3):
            x, y = engine.data()[:5]
            engine.backward(run, (x.to(dtype), y))
            run.optimizer.step()
            for p in () if fused else run.network.parameters():
                p.grad = None
            if zero_grad:
                run.optimizer.zero_grad()
        limits.append(run.optimizer.max_grad_norm)
    assert limits[0] == limits[1] != 0.5
    assert [one["unprotected"] for one in shown[:3]] == [one["unprotected"] for one in shown[3:]]
    assert run.optimizer.steps == 3
    assert run.model.norm_statistics().samples == 5


def test_pre_step_has_no_gradient_to_show():
    run = private_run("cpu", True)
    x, y = next(iter(run.loader))
    run.criterion(run.model(x), y).backward()
    with pytest.raises(RuntimeError, match="call make_private without it"):
        run.optimizer.pre_step()


def test_what_is_refused():
    def build(make, hook=False, **options):
        network = engine.network()
        if hook:
            network[0].weight.register_hook(lambda g: g)
        return engine.build(
            module=network, optimizer=make(network.parameters()), fused_step=True, **options
        )

    for make, words in (
        (torch.optim.RMSprop, "RMSprop: use torch.optim.AdamW, Adam or SGD itself"),
        (type("Mine", (AdamW,), {}), "Mine: use torch"),
        (lambda p: AdamW(p, amsgrad=True), "AdamW with amsgrad"),
        (lambda p: SGD(p, maximize=True), "SGD with .*maximize"),
    ):
        with pytest.raises(ValueError, match=words):
            build(make)
    with pytest.raises(ValueError, match="remove them"):
        build(SGD, hook=True)
    divided = SimpleNamespace(module=SimpleNamespace(gradient_pieces=[], parameters=list))
    divided.optimizer = SGD([torch.ones(1)], lr=0.1)
    with pytest.raises(ValueError, match="give the network itself"):
        refuse(divided, SimpleNamespace(sharding=None))
