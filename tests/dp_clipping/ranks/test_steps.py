"""Norms and clipped sums on ranks, beside one ordinary backward per sample in float64.

A row is a layout and a way to make steps; each makes two, with samples split in other ways.
"""

import importlib.util
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import cycle, product

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ddp import wrap
from ddp_by_hand.experiments.verify_correctness import reference as oracle
from ddp_by_hand.lm.rank_pool import Context
from dp_clipping.distributed.norm_reduce import NORM_REDUCTIONS
from tests.dp_clipping.conftest import MODES, private, private_loss
from tests.support import around_blocks, zoo
from tests.support.on_ranks import on_ranks
from tests.support.ranks import (
    DIVIDED,
    LAYOUTS,
    ON_FOUR,
    REPLICAS,
    SHARDED,
    Way,
    step_beside_one_process,
)

pytestmark = pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
CLIPPINGS = ("flat", "per_layer")
STYLES = tuple(product(MODES, CLIPPINGS))
CORE = (*REPLICAS, *DIVIDED, *SHARDED, *ON_FOUR)


def some() -> Iterator[Way]:
    """Yields each layout in one mode: per layer, tied and reduced in turn.

    `test_every_style` has the others.
    """
    turns = cycle(product(("uneven", "transformer_tied"), CLIPPINGS, NORM_REDUCTIONS))
    modes = cycle(MODES)
    for layout in CORE:
        name, clipping, reduction = next(turns)
        if name == "transformer_tied" and layout in (*SHARDED, *ON_FOUR):
            name = "uneven"  # not every sharding takes tied weights
        yield Way(layout, name, next(modes), clipping, reduction)


LOOKS = [
    Way("fsdp2 block", looks=True), Way("tensor", looks=True),
    Way("fsdp2 root", "lstm_packed", looks=True),
    Way("fsdp2 leaf", "gru_time_major", looks=True),  # units whose own lists have DTensors
    *(Way("tensor", name, tolerance=1e-5) for name in ("transformer_tied", "llama_labels")),
]  # fmt: skip
MORE_LOOKS = [
    *(Way(layout, looks=True) for layout in ("fsdp1 block", "fsdp1 on one", "fsdp2 on one",
                                             "data x tensor", "fsdp2 x tensor", "hybrid")),
    Way("fsdp2 root", "llama_labels", looks=True),
]  # fmt: skip
UNITS = [
    Way(layout, mode=mode, clipping=clipping, units=True, looks=mode == "per_sample")
    for layout, mode, clipping in (
        ("ddp_bucketed", "bookkeeping", "flat"), ("fsdp2 leaf", "per_sample", "flat"),
        ("fsdp2 block", "ghost", "per_layer"), ("fsdp1 block", "ghost", "flat"),
        ("fsdp2 x tensor", "bookkeeping", "per_layer"),
    )
]  # fmt: skip
PARTS = [  # of a network: frozen, computed again in backward, used by nobody
    *(Way(layout, name, mode)
      for layout in ("fsdp1 block", "fsdp2 block")
      for name, mode in (("frozen", "bookkeeping"), ("recomputed", "ghost"))),
    Way("tensor", "recomputed", "bookkeeping", "per_layer"),
    Way("fsdp", mode="flash_bookkeeping"),  # as bookkeeping, where there are no kernels
    Way("fsdp2 x tensor", "norms alone"),
    Way("ddp_bucketed", "unused"),
]  # fmt: skip
MORE_PARTS = [
    *(Way(layout, "unused") for layout in ("torch_ddp", "copy engine")),
    *(Way("tensor", "compiled", clipping=clipping) for clipping in CLIPPINGS),
    Way("tensor", "recomputed", "ghost"), Way("fsdp2 x tensor", "recomputed", "ghost"),
    Way("fsdp2 block", "frozen", "ghost"), Way("fsdp1 block", "recomputed", "per_sample"),
    Way("fsdp1 block, SHARD_GRAD_OP", "frozen"), Way("data x tensor", "norms alone"),
    Way("fsdp1 block, SHARD_GRAD_OP", "recomputed", "ghost"),
]  # fmt: skip
AROUND = ("vit", "product", "lists", "nested", "tied", "linked", "frozen_block",
          "frozen_parameter", "checkpointed_product")  # fmt: skip
GATHERED = ("fsdp", "fsdp2 block", "fsdp2 leaf", "fsdp1 block")
ONE_UNIT = {("tied", "fsdp2 leaf")}  # FSDP2 wants a parameter that two modules have in one unit
STYLES_AROUND = cycle([("bookkeeping", "flat"), ("ghost", "per_layer"),
                       ("bookkeeping", "per_layer"), ("per_sample", "flat")])  # fmt: skip
AROUND_BLOCKS = [  # parameters of the root, or of another module around the blocks
    Way(layout, name, *next(STYLES_AROUND))
    for name, layout in zip(AROUND, cycle(("fsdp", "fsdp2 block", "fsdp1 block")), strict=False)
]
HANDED = [  # a parameter of the root, given to a block: expanded, or where all is gathered at once
    *(Way(layout, "handed_expanded") for layout in ("fsdp", "fsdp2 block")),
    *(Way(layout, "handed") for layout in ("zero2", "fsdp1 root")),
]
MORE_HANDED = [Way("fsdp1 block", "handed_expanded"), Way("fsdp2 root", "handed")]
IN_16_BIT = [
    Way("fsdp1 in bfloat16", mode="per_sample", tolerance=8e-2),
    Way("fsdp2 in bfloat16", mode="ghost", tolerance=8e-2),
    Way("fsdp in bfloat16", "product", "bookkeeping", tolerance=8e-2),
    *(Way(layout, dtype=torch.bfloat16) for layout in ("ddp_bucketed", "zero2")),
]
MORE_IN_16_BIT = [
    *(Way(layout, mode=mode, tolerance=8e-2)
      for layout, mode in product(("fsdp1 in bfloat16", "fsdp2 in bfloat16"), MODES)),
    *(Way("fsdp in bfloat16", "product", mode, tolerance=8e-2) for mode in MODES),
    *(Way(layout, dtype=torch.bfloat16)
      for layout in ("ddp_individual_v2", "copy engine", "torch_ddp")),
]  # fmt: skip


def rows(ways: Iterable[Way]) -> pytest.MarkDecorator:
    def called(way: Way) -> str:
        more = ["units"] * way.units + ["looks"] * way.looks
        more += ["bfloat16"] * (way.dtype is not None)
        return "-".join((way.layout, way.name, way.mode, way.clipping, *more)).replace(" ", "_")

    return pytest.mark.parametrize("way", [pytest.param(way, id=called(way)) for way in ways])


@rows([*some(), *LOOKS, *UNITS, *PARTS, *AROUND_BLOCKS, *HANDED, *IN_16_BIT])
def test_steps(cpu_ranks, way):
    cpu_ranks.run(LAYOUTS[way.layout].ranks, step_beside_one_process, way)


@pytest.mark.slow
@rows([*MORE_LOOKS, *MORE_PARTS, *MORE_HANDED, *MORE_IN_16_BIT])
def test_more_steps(cpu_ranks, way):
    cpu_ranks.run(LAYOUTS[way.layout].ranks, step_beside_one_process, way)


def handed(context: Context, layout: str) -> None:
    model = private(LAYOUTS[layout].place(context, around_blocks.make("handed")))
    batch = oracle.move(zoo.classes(4, 6, 5), dtype=torch.float64)
    goes_on = layout != "fsdp2 block" or hasattr(FSDPModule, "reset_iter_state")  # torch 2.13
    for _ in range(2 if goes_on else 1):
        with pytest.raises(ValueError, match=r"it gives blocks\.0.* a tensor made of") as raised:
            private_loss(model, batch, zoo.cross_entropy)
        assert "expand that to the batch" in str(raised.value)


@pytest.mark.parametrize("layout", ["fsdp", "fsdp2 block", "fsdp1 block"])
def test_a_parameter_that_is_handed_to_a_block_is_refused(cpu_ranks, layout):
    """Its layers would have to run under vmap."""
    cpu_ranks.run(2, handed, layout)


@on_ranks(2)
def test_an_attention_whose_layers_are_gathered_one_by_one_is_refused(context: Context) -> None:
    by_hand = partial(wrap, "fsdp", units=[nn.Linear], process_group=context.group)
    for shard in (by_hand, partial(LAYOUTS["fsdp2 leaf"].place, context)):
        network = shard(zoo.BY_NAME["multihead_attention"].build())
        with pytest.raises(ValueError, match=r"attention\.out_proj is gathered .* without a call"):
            private(network)


# All of it


def in_every_style(context: Context, way: Way) -> None:
    for (mode, clipping), reduction in zip(STYLES, cycle(NORM_REDUCTIONS), strict=False):
        style = {"mode": mode, "clipping": clipping, "reduction": reduction}
        step_beside_one_process(context, replace(way, **style))


@pytest.mark.slow
@rows([
    *(Way(layout) for layout in CORE),
    *(Way(layout, "transformer_tied") for layout in (*REPLICAS, *DIVIDED)),
    *(Way(layout, units=True) for layout in CORE),
    *(Way(layout, name, looks=True)
      for layout in (*GATHERED, "fsdp1 root", "fsdp2 root", "zero1", "zero2")
      for name in around_blocks.NETWORKS if (name, layout) not in ONE_UNIT),
])  # fmt: skip
def test_every_style(cpu_ranks, way):
    cpu_ranks.run(LAYOUTS[way.layout].ranks, in_every_style, way)


def of_the_zoo(context: Context, layout: str, name: str) -> None:
    for mode in ("bookkeeping", "ghost"):
        try:
            step_beside_one_process(context, Way(layout, name, mode, looks=True))
        except (ValueError, RuntimeError):
            if not zoo.BY_NAME[name].or_refused:
                raise


def has_scalars(case: zoo.Case) -> bool:
    """Which both FSDPs refuse."""
    return any(p.dim() == 0 for p in case.build().parameters())


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp1 root", "fsdp2 root"])
@pytest.mark.parametrize("case", zoo.CASES, ids=lambda case: case.name)
def test_the_zoo(cpu_ranks, case, layout):
    if not all(importlib.util.find_spec(package) for package in case.needs):
        pytest.skip(f"needs {case.needs}")
    if has_scalars(case) or case.name.startswith("registered"):
        pytest.skip("is refused")
    cpu_ranks.run(2, of_the_zoo, layout, case.name)


@pytest.mark.parametrize("layout", ["fsdp1 root", "fsdp2 root"])
@on_ranks(2)
def test_registered_layers_are_refused(context: Context, layout: str) -> None:
    with pytest.raises(ValueError, match="make the network private unsharded"):
        private(LAYOUTS[layout].place(context, zoo.BY_NAME["registered"].build().double()))
