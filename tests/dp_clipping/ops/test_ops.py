"""Each record beside one backward per sample: norms, clipped sums, bounds, frozen, two uses."""

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from ddp_by_hand.experiments.verify_correctness import reference as oracle
from dp_clipping.layers import projection
from tests.dp_clipping.conftest import assert_step, private
from tests.dp_clipping.ops.records import (
    CASES,
    NUMBER,
    QUIET,
    RECORDS,
    REST,
    UNLIKE,
    Record,
    cancelling,
    mode_of,
)
from tests.support import zoo
from tests.support.kernel_cases import on_gpu
from tests.support.private_steps import (
    BATCHES,
    FEWER,
    FUSED,
    REFERENCE,
    SAMPLES,
    Way,
    check_bounds,
    compare,
    make_private,
    skip_all_checks,
)
from tests.support.private_steps import gradients_of as samples_of
from tests.support.turns import in_turn

pytestmark = QUIET
EVEN, ODD = UNLIKE[::2], UNLIKE[1::2]  # fast tests of what a kind of layer hardly changes
every_record = pytest.mark.parametrize("record", CASES)

# Norms and sums


@pytest.mark.parametrize(("record", "mode"), in_turn(CASES, REFERENCE))
def test_reference(record, mode):
    compare(record.case(), Way(mode=mode))


@pytest.mark.parametrize("name", ["linear", "linear_large", "lstm"])
def test_reference_with_few_samples_at_a_time(name, monkeypatch):
    monkeypatch.setattr(projection, "PIECE_ELEMENTS", 1)
    compare(RECORDS[NUMBER[name]].case(), Way(mode="bookkeeping"))


@pytest.mark.parametrize(
    ("record", "mode"), [*in_turn(EVEN, REFERENCE, 1), *in_turn([*ODD, *REST], REFERENCE, fast=0)]
)
def test_two_uses(record, mode):
    compare(record.case(is_reused=True), Way(mode=mode))


def half_frozen(build: Callable[[], nn.Module], first: int) -> nn.Module:
    network = build()
    for parameter in list(network.parameters())[first::2]:
        parameter.requires_grad_(False)
    return network


@pytest.mark.parametrize(
    ("record", "first"), [*in_turn(ODD, (0, 1)), *in_turn([*EVEN, *REST], (0, 1), fast=0)]
)
def test_half_of_the_parameters_are_frozen(record, first):
    case = record.case()
    case = replace(case, build=lambda build=case.build: half_frozen(build, first))
    if any(p.requires_grad for p in case.build().parameters()):
        run = compare(case, Way(mode=mode_of(record, 2)))
        assert all(p.grad is None for p in run.network.parameters() if not p.requires_grad)


def on_kernels(record: Record, mode: str) -> Way:
    return Way(mode=mode, dtype=torch.float32, options=dict(record.options))


IN_INTERPRETER = (torch.float32, torch.float16)


def check_on_kernels(
    name: str,
    mode: str,
    is_reused: bool,
    dtypes: tuple[torch.dtype, ...] = IN_INTERPRETER,
    batches: tuple[range, ...] = BATCHES,
) -> None:
    """`dtypes`: in which a sample's contribution is bounded."""
    record = RECORDS[NUMBER[name]]
    compare(record.case(is_reused=is_reused), on_kernels(record, mode), batches=batches)
    if record.tokens is not None and not is_reused:
        for dtype in dtypes:
            check_record(record, replace(on_kernels(record, mode), dtype=dtype))


@pytest.mark.parametrize("record", UNLIKE)
def test_kernels_in_the_interpreter(interpreter, record):
    dtype = IN_INTERPRETER[NUMBER[record.name] % 2]
    interpreter.run(check_on_kernels, record.name, "flash_bookkeeping", False, (dtype,), FEWER)


@pytest.mark.slow
@every_record
@pytest.mark.parametrize(
    ("mode", "is_reused"),
    [("flash", False), ("flash_bookkeeping", False), ("flash_bookkeeping", True)],
    ids=["flash", "flash_bookkeeping", "two_uses"],
)
def test_more_of_kernels_in_the_interpreter(interpreter, record, mode, is_reused):
    interpreter.run(check_on_kernels, record.name, mode, is_reused)


@on_gpu
@every_record
@pytest.mark.parametrize("mode", FUSED)
def test_kernels_on_gpu(record, mode):
    way = replace(on_kernels(record, mode), device="cuda")
    with torch.backends.cudnn.flags(allow_tf32=False):  # PyTorch lets recurrent layers have it
        compare(record.case(), way)
        compare(record.case(is_reused=True), way)
        check_record(record, way)
        if record.in_16_bit:
            compare(record.case(), replace(way, dtype=torch.bfloat16))
            compare(record.case(), replace(way, autocast=torch.bfloat16))
            for dtype in (torch.bfloat16, torch.float16):
                check_record(record, replace(way, dtype=dtype))


# A contribution is at most C in the arithmetic that is used


def check_record(record: Record, *ways: Way) -> None:
    """`ways`: of one dtype."""
    case = record.case(is_first=True)
    batch = cancelling(case.batch(SAMPLES), record.tokens, ways[0].dtype)
    case = zoo.Case(case.name, case.build, lambda _: batch, case.per_sample_loss)
    for way in ways:
        check_bounds(case, way, has_cancelling=True)


ROUNDED = [case for case in CASES if case.values[0].in_16_bit]  # where a bound is hardest to keep
IN_16_BITS = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize(
    ("record", "dtype"),
    [
        *in_turn([case for case in ROUNDED if case in ODD], IN_16_BITS),
        *in_turn([case for case in ROUNDED if case not in ODD], IN_16_BITS, fast=0),
        *in_turn([case for case in UNLIKE if case not in ROUNDED], (torch.float32,)),
        *in_turn([case for case in REST if case not in ROUNDED], (torch.float32,), fast=0),
    ],
)
def test_a_sample_adds_at_most_c(record, dtype):
    """In every mode where tokens may cancel, else in one of them."""
    mode = mode_of(record, NUMBER[record.name] // 3)
    modes = [mode] if record.tokens is None else REFERENCE
    check_record(record, *(Way(mode=mode, dtype=dtype) for mode in modes))


@pytest.mark.slow
@pytest.mark.parametrize("record", ROUNDED)
def test_a_sample_adds_at_most_c_in_float32(record):
    modes = [mode_of(record)] if record.tokens is None else REFERENCE
    check_record(record, *(Way(mode=mode, dtype=torch.float32) for mode in modes))


# Outputs

IN_ANOTHER_DTYPE = {  # under autocast, with the same values: under vmap, and of two dtypes at once
    "conv1d_standardised", "conv2d_own_arithmetic", "prelu", "trained_mask", "lstm_all",
    "lstm_packed", "opacus_lstm", "opacus_lstm_packed", "opacus_gru", "lstm_cell", "gru_cell",
    "attention_widths", "attention_widths_no_bias", "attention_more_keys",
    "attention_more_keys_batch_second", "attention_windows", "attention_one_weight",
}  # fmt: skip


IN_16_BIT = {  # autocast's dtype, and that of the layer's input; its parameters are in float32
    "autocast": (torch.bfloat16, torch.float32),
    "autocast_of_16_bit": (torch.bfloat16, torch.bfloat16),
    "16_bit_before_float32": (None, torch.bfloat16),
}


@pytest.mark.parametrize(
    ("record", "arithmetic"),
    [
        *in_turn(CASES, {"float32": (None, torch.float32)}),
        *in_turn(EVEN, IN_16_BIT), *in_turn([*ODD, *REST], IN_16_BIT, fast=0),
    ],
)  # fmt: skip
def test_outputs_are_pytorchs_and_norms_those_of_float64(record, arithmetic):
    autocast, given = arithmetic
    is_16_bit = torch.bfloat16 in (autocast, given)
    if is_16_bit and not record.in_16_bit:
        return
    case = record.case(is_first=autocast is None and is_16_bit)
    x, y = case.batch(SAMPLES)
    x = x.to(given) if x.is_floating_point() else x
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        try:
            expected = case.build()(x)
        except (RuntimeError, ValueError) as error:
            pytest.skip(f"PyTorch's own layer does not run so here ({error})")
        run = make_private(case, Way(dtype=torch.float32), 1.0)
        skip_all_checks(run.model)
        outputs = run.model(x)
        tolerance = 2e-2 if is_16_bit else 1e-5
        torch.testing.assert_close(
            outputs, expected, rtol=tolerance, atol=tolerance,
            check_dtype=record.name not in IN_ANOTHER_DTYPE,
        )  # fmt: skip
        run.criterion(outputs, y).backward()
    norms = run.model.per_sample_gradient_norms.double()
    torch.testing.assert_close(
        norms,
        oracle.norms(samples_of(case, torch.float32)),
        rtol=6e-2 if is_16_bit else 2e-4,
        atol=1e-12,
    )


# Settings that change between steps


def change_convolution(layer: nn.Module) -> None:
    layer.stride, layer.padding = (2,), (3,)


def change_groups(layer: nn.Module) -> None:
    layer.num_groups, layer.eps = 2, 0.5


@pytest.mark.parametrize(
    ("build", "change"),
    [
        (lambda: nn.Conv1d(4, 4, 3, padding=1), change_convolution),
        (lambda: nn.ConvTranspose1d(4, 4, 3), change_convolution),
        (lambda: nn.Conv1d(4, 4, 3), lambda layer: setattr(layer, "padding_mode", "circular")),
        (lambda: nn.GroupNorm(4, 4), change_groups),
    ],
    ids=["convolution", "transposed", "padding", "groups"],
)
def test_a_setting_that_changes_between_steps(build, change):
    torch.manual_seed(0)
    plain = zoo.Net(lambda net, x: net.layer(x), layer=build()).double()
    model = private(copy.deepcopy(plain), "bookkeeping")
    for size, changes in ((3, False), (5, False), (4, True), (6, False)):
        if changes:
            change(plain.layer)
            change(model.network.layer)
        x = torch.randn(size, 4, 8, dtype=torch.float64)
        batch = x, torch.randn_like(plain(x))
        assert_step(model, plain, batch)
