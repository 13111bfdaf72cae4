"""The four pictures of `experiments.llama_fsdp`, from its results.

| file | question |
| --- | --- |
| memory_comparison | how much memory does a mode need, at each length? |
| time_comparison | how long is a step, and what part of it is noise and AdamW? |
| memory_vs_time_tradeoff | what does a mode pay in one for the other? |
| overhead_analysis | how does the overhead over `no_dp` change with the length? |

Every mark is labelled: where it stands, on its right, or beside the shape of its point. A cell that
failed says so in words.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ddp_by_hand.experiments.llama_fsdp.bars import draw_memory, draw_time
from ddp_by_hand.experiments.llama_fsdp.overhead import draw_overhead
from ddp_by_hand.experiments.llama_fsdp.results import BASELINE
from ddp_by_hand.experiments.llama_fsdp.tradeoff import draw_tradeoff
from ddp_by_hand.measure.picture import save_picture
from ddp_by_hand.measure.runs import Cell

PICTURES = {
    "memory_comparison": (
        draw_memory,
        f"Of bars of one length, what one is longer than that of {BASELINE} is memory that the "
        "mode costs.",
    ),
    "time_comparison": (
        draw_time,
        "The coloured part of a bar is forward, backward, clipping and exchange, the grey end "
        f"noise and AdamW: a mode is cheap where both end near those of {BASELINE}.",
    ),
    "memory_vs_time_tradeoff": (
        draw_tradeoff,
        "A point left of and below another is better in both; one near the crossing of the dashed "
        f"lines costs hardly more than {BASELINE}.",
    ),
    "overhead_analysis": (
        draw_overhead,
        "A line that falls towards 1 is an overhead that longer samples pay off, a level one is "
        "paid at every length; intervals that overlap show no difference between modes.",
    ),
}
"""File -> what draws it, and how to read it."""


def draw(cells: Sequence[Cell], folder: Path) -> list[Path]:
    """Writes all four; returns their paths."""
    paths = [folder / f"{name}.png" for name in PICTURES]
    for path, (make, sentence) in zip(paths, PICTURES.values(), strict=True):
        save_picture(make(cells), path, sentence)
    return paths
