"""The `flash` modes on their kernels: in Triton's interpreter here, compiled in test_on_gpu.py."""

import importlib.util
import logging
from collections import Counter
from itertools import product
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dp_clipping import modes
from dp_clipping.clipping.coefficients import MARGIN
from dp_clipping.layers.linear_factors import LinearFactors
from dp_clipping.step.fused import launch_schedule
from dp_clipping.step.fused import norm_queue as waiting
from dp_clipping.step.fused.backend import FusedBackend
from dp_clipping.step.private_step import PrivateStep
from dp_clipping.verification import reference as oracle
from tests.dp_clipping.conftest import (
    assert_close,
    clipped_sums,
    count_calls,
    criterion_of,
    gradients_of,
    private,
)
from tests.dp_clipping.step.test_on_gpu import FLASH, compare_with_oracle, largest_contribution
from tests.support import zoo

ROUNDING = 3e-7
ALLOWANCE = 1e-4  # what coefficients from Gram matrices are smaller by, with few tokens


def plans(some: int) -> list[dict]:
    """Options of the plan; `some`: bytes that keep a part of the network's layers."""
    return [
        dict(norm_algorithm="width"),
        dict(norm_algorithm="input_length"),
        dict(norm_algorithm="width", tile_size=16),
        dict(tile_size=32),
        dict(memory_budget=0),
        dict(memory_budget=some),
    ]


def network_and_batch(name: str = "transformer", batch_size: int = 4):
    torch.manual_seed(0)
    case = zoo.BY_NAME[name]
    return case, case.build(), case.batch(batch_size)


def tolerance(options: dict) -> float:
    return ALLOWANCE if options.get("norm_algorithm") == "width" else ROUNDING


def check_zoo(everything: bool = False) -> None:
    """The default mode on every fourth network, the other, `flash`, on each twelfth."""
    for mode, every in zip(FLASH, (1, 1) if everything else (12, 4), strict=True):
        for case in zoo.CASES[::every]:
            if all(importlib.util.find_spec(package) for package in case.needs):
                compare_with_oracle(case, "cpu", torch.float32, mode)


def check_options(everything: bool = False) -> None:
    """Whatever the plan, sums and norms are the same."""
    batch, loss = zoo.tokens(3), zoo.cross_entropy

    def build() -> nn.Module:
        return zoo.seeded(lambda: zoo.transformer(num_layers=1))

    for clipping in ("flat", "per_layer"):
        for function in ("abadi", "automatic"):
            shared = dict(max_grad_norm=0.3, clipping=clipping, clipping_function=function)
            plain = private(build(), "per_sample", **shared)
            expected = clipped_sums(plain, batch, loss)
            most = everything or (clipping, function) == ("flat", "abadi")
            for mode in FLASH:
                for options in plans(7_000) if most else plans(7_000)[:1]:
                    model = private(build(), mode, policy=options, **shared)
                    sums = clipped_sums(model, batch, loss)
                    assert_close(sums, expected, tolerance(options))
                    torch.testing.assert_close(
                        model.per_sample_gradient_norms, plain.per_sample_gradient_norms,
                        rtol=1e-6, atol=0,
                    )  # fmt: skip


def check_nonfinite() -> None:
    """A sample whose norm is not finite adds nothing and is counted, in every way of summing."""
    for n, (clipping, mode) in enumerate(product(("flat", "per_layer"), FLASH)):
        for k, options in enumerate(plans(1_000)):
            case, network, (inputs, weights) = network_and_batch("tokens", 3)
            model = private(network, mode, clipping=clipping, policy=options)
            keep = torch.tensor([0, 2])
            expected = clipped_sums(model, (inputs[keep], weights[keep]), case.per_sample_loss)
            inputs[1] = (torch.nan, torch.inf)[(n + k) % 2]
            sums = clipped_sums(model, (inputs, weights), case.per_sample_loss)
            assert_close(sums, expected, ROUNDING)
            assert model.nonfinite_samples == 1
            assert not model.per_sample_gradient_norms[1].isfinite()


def check_overflow() -> None:
    """A Gram sum of minus infinity is no small norm: such a sample is left out, and counted."""
    x, y = torch.zeros(1, 128, 16), torch.zeros(1, 128, 16)
    x[0, 0, 0], x[0, 64, 0] = 1e10, -1e10
    y[0, 0, 0], y[0, 64, 0] = 1.8e9, 1e9
    for mode in FLASH:
        for tile_size in (None, 16):
            network = nn.Linear(16, 16, bias=False)
            policy = dict(norm_algorithm="width", tile_size=tile_size)
            model = private(network, mode, policy=policy)
            assert not clipped_sums(model, (x, y))["weight"].any()
            assert model.nonfinite_samples == 1
            assert not model.per_sample_gradient_norms.isfinite().any()


class Many(nn.Module):
    """Many small parameters beside a large one."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(200))

    def forward(self, x):
        return torch.cat([layer(x[:, n : n + 1]) for n, layer in enumerate(self.layers)], dim=1)


def check_many_parameters() -> None:
    """Small norms beside a large one are not lost in the sum: without a margin to hide it."""
    x = torch.full((1, 200), 5.9e-8**0.5)
    x[0, 0] = 1.0
    model = private(Many(), "flash_bookkeeping", max_grad_norm=0.5)
    with patch.dict(MARGIN, {torch.float32: 0.0}):
        sums = clipped_sums(model, (x, torch.ones(1, 200)))
    total = sum(value.double().square().sum() for value in sums.values()).sqrt()
    assert 0.9999 * 0.5 <= total <= 0.5 * (1 + 1e-6)


class Branches(nn.Module):
    """Two layers that see different inputs."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return torch.cat([self.a(x[:, :4]), self.b(x[:, 4:])], dim=1)


def check_one_bad_group() -> None:
    """Per layer, a sample is left out of every group that is clipped with or after the bad one."""
    torch.manual_seed(0)
    network, before = Branches(), launch_schedule.PENDING_BYTES
    x, y = torch.randn(3, 8), torch.randn(3, 8)
    options = dict(clipping="per_layer", max_grad_norm=0.5)
    others = clipped_sums(private(network, "flash_bookkeeping", **options), (x[[0, 2]], y[[0, 2]]))
    x[1, :4] = torch.inf
    try:
        for pending, everywhere in ((1 << 28, True), (0, False)):
            launch_schedule.PENDING_BYTES = pending
            model = private(network, "flash_bookkeeping", **options)
            sums = clipped_sums(model, (x, y))
            assert model.nonfinite_samples == 1
            excess = {name: (sums[name] - others[name]).norm().item() for name in sums}
            assert excess["a.weight"] <= 1e-6
            assert excess["b.weight"] <= (1e-6 if everywhere else 0.5 / 2**0.5 * (1 + 1e-6))
    finally:
        launch_schedule.PENDING_BYTES = before


def check_padding() -> None:
    """Rows that are no samples are in no sum, norm or count, whatever is in them."""
    for name, mode, clipping in (
        ("mlp", "flash", "flat"), ("mlp", "flash_bookkeeping", "per_layer"),
        ("conv2d", "flash_bookkeeping", "flat"), ("transformer", "flash_bookkeeping", "flat"),
    ):  # fmt: skip
        case = zoo.BY_NAME[name]
        network, (inputs, targets) = case.build(), case.batch(4)
        rows = inputs.clone()
        rows[2:] = torch.nan if inputs.is_floating_point() else 0
        model = private(network, mode, 0.5, clipping)
        expected = clipped_sums(model, (inputs[:2], targets[:2]), case.per_sample_loss)
        norms = model.per_sample_gradient_norms
        model.step_state.usage.pad(4, 2)
        found = clipped_sums(model, (rows, targets), case.per_sample_loss)
        assert_close(found, expected, 1e-6)
        torch.testing.assert_close(model.per_sample_gradient_norms, norms)
        assert model.nonfinite_samples == 0
        model.to_standard_module()


def check_contributions() -> None:
    """At most C also where tokens cancel, by each algorithm of the norm."""
    for mode in FLASH:
        for dtype in (torch.float32, torch.float16):
            for algorithm in ("width", "input_length"):
                policy = dict(norm_algorithm=algorithm)
                largest = largest_contribution("cpu", dtype, mode, [(64, 48, 32)], policy)
                assert largest <= 1 + 1e-6
        assert (
            largest_contribution("cpu", torch.float16, mode, [(64, 96, 80), (1, 64, 32)])
            <= 1 + 1e-6
        )


class Stack(nn.Module):
    """Five layers that are the same."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(5))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def visits_of(mode: str, budget: int | None, clipping: str = "flat") -> tuple[dict[str, int], int]:
    """How often backward came by each layer, and the most parameters whose remains were held."""
    torch.manual_seed(0)
    network = Stack()
    policy = dict(memory_budget=budget, norm_algorithm="width")
    model = private(network, mode, policy=policy, clipping=clipping)
    visits = dict.fromkeys(sorted(model.capture.names.values()), 0)
    most = 0
    arrived = PrivateStep.factors

    def factors(self, parameter, saved):
        nonlocal most
        visits[parameter.name] += isinstance(saved, LinearFactors)
        arrived(self, parameter, saved)
        most = max(most, len(self.backend.sums.kept) + len(self.backend.sums))

    PrivateStep.factors = factors
    try:
        batch = (torch.randn(2, 8, 16), torch.randn(2, 8, 16))
        clipped_sums(model, batch)
    finally:
        PrivateStep.factors = arrived
    return visits, most


def check_depth() -> None:
    """A second backward comes only to layers that were not kept, those nearest the output."""
    one = 2 * 8 * (16 + 16) * 4  # bytes of a layer's factors
    before, launch_schedule.PENDING_BYTES = (
        launch_schedule.PENDING_BYTES,
        0,
    )  # what is not kept does not wait either
    try:
        for mode, budget, twice in [
            ("flash_bookkeeping", None, 0), ("flash_bookkeeping", 2 * one, 3),
            ("flash_bookkeeping", 0, 5), ("flash", None, 5), ("flash", 2 * one, 3),
            ("flash", 5 * one, 0),
        ]:  # fmt: skip
            visits, most = visits_of(mode, budget)
            assert list(visits.values()) == [1] * (5 - twice) + [2] * twice, (mode, budget)
            assert most == 5 - twice
    finally:
        launch_schedule.PENDING_BYTES = before


class Towers(nn.Module):
    """Two checkpointed branches: a second backward has to come to the one with linear layers."""

    def __init__(self, preserve_rng_state: bool):
        super().__init__()
        self.options = dict(use_reentrant=False, preserve_rng_state=preserve_rng_state)
        self.linear = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.8), nn.Linear(16, 16))
        self.norm = nn.Sequential(nn.LayerNorm(16), nn.Dropout(0.8))

    def forward(self, x):
        return sum(checkpoint(tower, x, **self.options) for tower in (self.linear, self.norm))


def check_random_numbers_of_a_backward() -> None:
    """A second backward comes to all layers if the first one drew some, else where it must."""
    arrived = PrivateStep.normalized

    def normalized(self, weight, *rest):
        visits[weight.name] += 1
        arrived(self, weight, *rest)

    for preserved in (True, False):
        model = private(zoo.seeded(lambda: Towers(preserved)), "flash", max_grad_norm=0.1)  # noqa: B023
        for _ in range(4):
            visits = Counter()
            with patch.object(PrivateStep, "normalized", normalized):
                sums = clipped_sums(model, (3 * torch.randn(1, 16), torch.randn(1, 16)))
            total = sum(value.double().square().sum() for value in sums.values()).sqrt()
            assert 0.1 * (1 - ALLOWANCE) <= total <= 0.1 * (1 + 1e-6)
            assert visits["norm.0.weight"] == (1 if preserved else 2)


def check_streaming() -> None:
    """Per-layer clipping with one backward holds what waits for a launch, and no more."""
    before = launch_schedule.PENDING_BYTES
    one = 2 * 8 * (16 + 16) * 4 + 16 * 16 * 4  # bytes of a layer's factors and sum
    try:
        for pending, expected in ((0, 0), (2 * one, 2), (100 * one, 5)):
            launch_schedule.PENDING_BYTES = pending
            visits, most = visits_of("flash_bookkeeping", None, "per_layer")
            assert set(visits.values()) == {1}
            assert most == expected, (pending, most)
            _, most = visits_of("flash_bookkeeping", None, "flat")
            assert most == 5
    finally:
        launch_schedule.PENDING_BYTES = before


def check_room() -> None:
    """More may wait in memory that backward has freed, and only there."""
    one = 2 * 8 * (16 + 16) * 4 + 16 * 16 * 4
    prepare, pending, allocated = (
        FusedBackend.begin,
        launch_schedule.PENDING_BYTES,
        launch_schedule.allocated,
    )
    level = [0]

    def freeing(backend, *arguments):
        level[0] = held
        prepare(backend, *arguments)
        level[0] = left

    FusedBackend.begin, launch_schedule.allocated = freeing, lambda device: level[0]
    launch_schedule.PENDING_BYTES = one
    try:
        for held, left, expected in ((0, 0, 1), (100 * one, 0, 5), (100 * one, 100 * one, 1)):
            _, most = visits_of("flash_bookkeeping", None, "per_layer")
            assert most == expected, (held, left, most)
    finally:
        FusedBackend.begin, launch_schedule.allocated = prepare, allocated
        launch_schedule.PENDING_BYTES = pending


def check_shared_inputs() -> None:
    """Layers with one input have one Gram matrix, also more of them than one launch's row takes."""
    torch.manual_seed(0)

    class Fan(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(16, n, bias=False) for n in (8, 24, 16, 40, 8))

        def forward(self, x):
            return torch.cat([head(x) for head in self.heads], dim=-1)

    network, batch = Fan(), (torch.randn(3, 8, 16), torch.randn(3, 8, 96))
    for clipping in ("flat", "per_layer"):
        options = dict(max_grad_norm=0.5, clipping=clipping)
        expected = clipped_sums(private(network, "per_sample", **options), batch)
        model = private(
            network, "flash_bookkeeping", policy=dict(norm_algorithm="width"), **options
        )
        assert_close(clipped_sums(model, batch), expected, ALLOWANCE)


def check_norm_layers() -> None:
    """Weights of norms have a kernel of their own, which is what runs, once for all of them."""
    for name in ("rms_norm", "layer_norm", "llama_labels"):
        counted = count_calls(waiting.norm_layer_gradients)
        waiting.norm_layer_gradients, before = counted, waiting.norm_layer_gradients
        try:
            case, network, batch = network_and_batch(name)
            clipped_sums(private(network, "flash_bookkeeping"), batch, case.per_sample_loss)
        finally:
            waiting.norm_layer_gradients = before
        assert counted.count == 1, (name, counted.count)


class Blocks(nn.Module):
    """A norm and a linear layer, four times."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16, bias=False)) for _ in range(4)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def check_norm_layers_wait() -> None:
    """For a common launch, as long as there is room for their operands."""
    arrived, before = PrivateStep.normalized, launch_schedule.PENDING_BYTES
    one = 2 * 3 * 8 * 16 * 4  # bytes of a norm's operands
    most = 0

    def normalized(self, *rest):
        nonlocal most
        arrived(self, *rest)
        most = max(most, len(self.backend.queue._normalized))

    batch = torch.randn(3, 8, 16), torch.randn(3, 8, 16)
    try:
        for pending, expected in ((0, 0), (2 * one, 2), (100 * one, 5)):
            launch_schedule.PENDING_BYTES, most = pending, 0
            norms = nn.Sequential(*(nn.LayerNorm(16) for _ in range(5)))
            with patch.object(PrivateStep, "normalized", normalized):
                clipped_sums(private(norms, "flash_bookkeeping"), batch)
            assert most == expected, (pending, most)
    finally:
        launch_schedule.PENDING_BYTES = before


def check_order_of_sums() -> None:
    """That in which backward came by, norms among the others: sharded modules leave one by one."""
    batch = torch.randn(3, 8, 16), torch.randn(3, 8, 16)
    orders = []
    for mode in ("bookkeeping", "flash_bookkeeping"):
        model, order = private(zoo.seeded(Blocks), mode), []
        received = model.gradient_buffer.accumulate
        model.gradient_buffer.accumulate = lambda p, total: (order.append(p), received(p, total))  # noqa: B023
        clipped_sums(model, batch)
        orders.append([p.name.rpartition(".")[0] for p in order])
    assert list(dict.fromkeys(orders[0])) == list(dict.fromkeys(orders[1]))


def check_lengths_that_change() -> None:
    """Each step is planned for the tokens that it has."""
    model = private(nn.Linear(16, 16, bias=False), "flash_bookkeeping")
    for tokens in (8, 24, 8):
        clipped_sums(model, (torch.randn(3, tokens, 16), torch.randn(3, tokens, 16)))
        (use,) = model.step_context.plans.last.uses
        assert (use.tokens, use.element_size) == (tokens, 4)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.LayerNorm(8), nn.LayerNorm(8)

    def forward(self, x):
        return self.a(x), self.b(x)


def check_a_refused_backward_leaves_nothing() -> None:
    """What an ordinary backward of private outputs hands over is in no sum of the right one."""
    before = launch_schedule.PENDING_BYTES
    try:
        for clipping, pending in product(("flat", "per_layer"), (0, 1 << 28)):
            launch_schedule.PENDING_BYTES = pending
            sums = []
            for refused in (False, True):
                torch.manual_seed(0)
                x, y = torch.randn(3, 4, 8), torch.randn(3, 8, 8)
                model = private(Pair(), "flash_bookkeeping", max_grad_norm=1.0, clipping=clipping)
                outputs = model(x)
                if refused:
                    with pytest.raises(RuntimeError, match="private criterion"):
                        outputs[0].pow(3).sum().backward()
                criterion_of(model, zoo.product)(torch.cat(outputs, 1), y).backward()
                sums.append(gradients_of(model))
            assert_close(sums[1], sums[0], 0.0)
    finally:
        launch_schedule.PENDING_BYTES = before


def check_units() -> None:
    """Samples of two examples each, on the kernels; fill and padding are in no sum."""
    for name, mode, clipping, rounding in (
        ("mlp", "flash", "flat", 4e-5), ("layer_norm", "flash", "per_layer", 4e-5),
        ("conv2d", "flash_bookkeeping", "flat", 1e-3),  # whose operands are TF32
        ("transformer", "flash_bookkeeping", "per_layer", 4e-5),
    ):  # fmt: skip
        case = zoo.BY_NAME[name]
        network, batch = case.build(), case.batch(8)
        each = oracle.per_sample_gradients(network, batch, case.per_sample_loss)
        counted = torch.arange(8) != 3
        units = oracle.unit_gradients(each, 2, counted)
        first = {n: g[:3] for n, g in units.items()}
        model = private(network, mode, 0.5, clipping, examples_per_unit=2)
        usage = model.step_state.usage
        usage.fill = ~counted[:6]
        usage.pad(8, 6)
        sums = clipped_sums(model, batch, case.per_sample_loss)
        assert_close(sums, oracle.clipped_sum(first, 0.5, clipping), rounding)
        norms = model.per_sample_gradient_norms
        torch.testing.assert_close(norms.double(), oracle.norms(first), rtol=rounding, atol=0)


BODIES = [
    check_norm_layers, check_zoo, check_options, check_nonfinite, check_padding,
    check_contributions, check_overflow, check_many_parameters, check_one_bad_group, check_depth,
    check_streaming, check_room, check_shared_inputs, check_random_numbers_of_a_backward,
    check_a_refused_backward_leaves_nothing, check_norm_layers_wait, check_order_of_sums,
    check_lengths_that_change, check_units,
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_in_the_interpreter(interpreter, body):
    interpreter.run(body)


@pytest.mark.slow
@pytest.mark.parametrize("body", [check_zoo, check_options], ids=lambda body: body.__name__)
def test_all_of_it_in_the_interpreter(interpreter, body):
    interpreter.run(body, True)


def test_without_a_gpu_reference_modes_run_and_say_so_once(caplog, monkeypatch):
    monkeypatch.setattr(modes, "_said", set())
    case, network, batch = network_and_batch()
    expected = clipped_sums(private(network, "bookkeeping"), batch, case.per_sample_loss)
    with caplog.at_level(logging.INFO, logger="dp_clipping"):
        model = private(network, "flash_bookkeeping")
        for _ in range(2):
            assert_close(clipped_sums(model, batch, case.per_sample_loss), expected, 1e-12)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "runs as bookkeeping" in said[0]
