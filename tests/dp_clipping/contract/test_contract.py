"""Norms and clipped sums of each network in each way, beside one backward per sample in float64.

The networks are small, and together they have what per-sample gradients go wrong on: tied and
reused weights, frozen and unused parameters, sizes that coincide, batches that are not first,
parameters of no layer, ragged tokens. A run makes steps of four samples, one, none, four again and
three. Each kind of layer by itself is in `tests/dp_clipping/ops`.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support import turns, zoo
from tests.support.private_steps import BATCHES, FEWER, FUSED, REFERENCE, Way, compare, on_kernels

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight"),
]

NETWORKS = (
    "half_frozen",
    "unused",
    "tokens_t_p_d_are_b",
    "transformer_tied",
    "same_weight",
    "reused_on_fewer_tokens",
    "changed_in_place",
    "time_major_flattened",
    "routed",
    "table",
    "padding_idx_tied",
    "tables",
    "embedding_as_head",
    "positions_batch_of_one",
    "relative_positions",
    "wide",
    "frames",
    "instance_norm",
    "encoder_layer",
    "class_token",
    "queries",
    "layer_for_samples_and_table",
    "scalar",
    "bilinear",
    "lstm_packed",
    "cells",
    "registered",
    "gpt2_lm",
    "bert_labels",
    "llama_lm",
    "lora_labels",
)
REFUSED = {"routed", "embedding_as_head", "time_major_flattened"}  # in some ways, by name
COMPILED = ("half_frozen", "padding_idx_tied", "layer_norm")

WAYS = {
    "flat": Way(),
    "automatic": Way(function="automatic"),
    "per_layer": Way(clipping="per_layer"),
    "units": Way(units=True),
    "padded": Way(padded=True),
    "padded_units": Way(units=True, padded=True, clipping="per_layer"),
    "checkpointed": Way(checkpointed=True, dtype=torch.float32),
    "float16": Way(dtype=torch.float16),
    "float32": Way(dtype=torch.float32),
    "bfloat16": Way(dtype=torch.bfloat16),
    "autocast": Way(dtype=torch.float32, autocast=torch.bfloat16),
}
OTHERS = tuple(WAYS)[1:]
INTERPRETED = OTHERS[: OTHERS.index("float32")]  # the interpreter has no products in bfloat16


def in_all(way: str, modes: tuple[str, ...]) -> Iterator[tuple]:
    """Yields the way for each network in each mode."""
    yield from ((network, way, mode) for network in zoo.parameters(*NETWORKS) for mode in modes)


def in_turn(
    ways: tuple[str, ...], modes: tuple[str, ...], each: int = 1, start: int = 0
) -> Iterator[tuple]:
    """Yields `each` of the ways for each network: others, or in another mode, for the next one."""
    turns = islice(cycle((way, mode) for mode in modes for way in ways), start, None)
    for network in zoo.parameters(*NETWORKS):
        yield from ((network, *next(turns)) for _ in range(each))


def rows(*chosen: tuple) -> pytest.MarkDecorator:
    """Returns the parameters `case` and `way` of a test."""
    return pytest.mark.parametrize(
        ("case", "way"),
        [
            pytest.param(*network.values, replace(WAYS[way], mode=mode), marks=network.marks,
                         id=f"{network.id}-{way}-{mode}")
            for network, way, mode in chosen
        ],
    )  # fmt: skip


def check(case: zoo.Case, way: Way, **options: Any) -> SimpleNamespace | None:
    """Compares; which networks are handled is part of the contract, and only grows."""
    run = compare(case, way, **options)
    assert run is not None or case.name in REFUSED
    return run


@rows(*in_turn(("flat",), REFERENCE), *in_turn(OTHERS, REFERENCE, start=6))
def test_networks(case, way):
    check(case, way, is_checked=way == Way(mode=way.mode))


@pytest.mark.slow
@rows(*in_all("flat", REFERENCE), *in_turn(OTHERS, REFERENCE, len(OTHERS)))
def test_all_networks(case, way):
    check(case, way, is_checked=way == Way(mode=way.mode))


def compare_on_kernels(name: str, way: Way, batches: tuple[range, ...] = BATCHES) -> None:
    run = check(zoo.BY_NAME[name], on_kernels(way), batches=batches)
    assert run is None or run.model.plan_table(), "which raises if no step ran on kernels"


@rows(*in_turn(("flat", *INTERPRETED), FUSED))
def test_networks_in_the_interpreter(interpreter, case, way):
    interpreter.run(compare_on_kernels, case.name, way, FEWER)


@pytest.mark.slow
@rows(*in_all("flat", FUSED), *in_turn(INTERPRETED, FUSED, len(INTERPRETED)))
def test_all_of_it_in_the_interpreter(interpreter, case, way):
    interpreter.run(compare_on_kernels, case.name, way)


@pytest.mark.gpu
@rows(*in_all("flat", (*REFERENCE, *FUSED)), *in_turn(OTHERS, (*FUSED, *REFERENCE), len(OTHERS)))
def test_networks_on_gpu(case, way):
    way = on_kernels(way) if way.mode in FUSED else way
    check(case, replace(way, device="cuda"))


# Compiled as a whole


def compiled(mode: str, clipping: str, backend: str = "aot_eager", **more) -> Way:
    return Way(
        mode=mode, clipping=clipping, dtype=torch.float32, compiled=backend, **more
    )  # fmt: skip


OF_COMPILED = zoo.parameters(*COMPILED)


@pytest.mark.parametrize(
    ("case", "mode"),
    [
        *turns.in_turn(OF_COMPILED[:1], ("bookkeeping", "ghost")),
        *turns.in_turn(OF_COMPILED[1:2], ("ghost", "bookkeeping"), fast=0),
    ],
)
def test_compiled(case, mode):
    compare(case, compiled(mode, "flat"))


@pytest.mark.parametrize(
    ("case", "clipping"),
    [
        *turns.in_turn(OF_COMPILED[1:2], ("flat", "per_layer")),
        *turns.in_turn(OF_COMPILED[2:], ("flat", "per_layer"), fast=0),
    ],
)
def test_compiled_in_the_interpreter(interpreter, case, clipping):
    interpreter.run(compare_on_kernels, case.name, compiled("flash_bookkeeping", clipping))


@pytest.mark.gpu
@pytest.mark.parametrize("units", [False, True], ids=["examples", "units"])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("mode", FUSED)
@pytest.mark.parametrize("case", zoo.parameters(*COMPILED, "transformer_tied"))
def test_compiled_on_gpu(case, mode, clipping, units):
    compare(case, compiled(mode, clipping, "inductor", device="cuda", units=units))
