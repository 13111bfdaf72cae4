#!/usr/bin/env python3
"""Accounts for what a private step costs on a GPU: kernel time by part, beside its least time.

    python -m ddp_by_hand.experiments.networks.account    all networks
    python -m ddp_by_hand.experiments.networks.account --networks vit_b16 --output account.json
    python -m ddp_by_hand.experiments.networks.account --markdown account.json   without a GPU

An ordinary and a private step (`flash_bookkeeping`) of each network are profiled. Kernels are added
up by what they are for, as their names tell; PyTorch's own that no part claims are compared by
name. A kernel that both steps run alike adds nothing to the difference, whatever part it is in.

| column | milliseconds of one step |
| --- | --- |
| ordinary, private | all kernels of the part |
| extra | private less ordinary |
| floor | the least that the extra can be: see `floors` |
| gap | extra less floor; parts are in this order |

The ceilings that floors follow from are measured in the same call.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from ddp_by_hand.experiments.networks import floors as of
from ddp_by_hand.experiments.networks.bounds import kernels_of
from ddp_by_hand.experiments.networks.rows import ROWS, NetworkRow
from ddp_by_hand.experiments.networks.training import NetworkTraining, training_of
from ddp_by_hand.experiments.rounds import BASELINE, Recorder, attempted
from ddp_by_hand.experiments.training import OURS
from ddp_by_hand.lm.timing import release_memory
from ddp_by_hand.measure import OK, Column, describe_failure, format_table
from ddp_by_hand.measure.command_line import BadInput
from ddp_by_hand.measure.options import is_writable, option, positive, program

WARM_UP = 4  # steps before those that are profiled
LEAST_MS = 0.1  # of a kernel's extra that is named, and of a gap that is in a document,
LEAST_GAP = 0.1  # where it is also this part of all that is extra
MOST_NAMED = 8  # kernels of a network
LEAST_FLOOR_MS = 0.01  # that extras are divided by
OPTIMIZER, MORE, LESS, ALL = "optimizer", "other kernels: more", "other kernels: less", "all"

# The first pattern that is found in a kernel's name says what it is for. cuBLAS names products by
# their layouts, and those of weight gradients, which go over the tokens, are NT.
KERNELS = {
    of.NORMS: r"^_(gram|gradients?|conv_gram|narrow|products)_kernel",
    of.SUMS: r"^_weighted_products?_kernel|nvjet_.*_NT[NT]$|gemm.*_nt_|splitKreduce"
    r"|wgrad|Wgrad|conv_depthwise\dd_grad_weight",
    of.LAYOUTS: r"^_(pack|largest)_kernel|nchwToNhwc|nhwcToNchw",
    of.KEPT: r"^_weighted_sum_kernel",
    # That of norm layers forms the biases of linear layers too.
    of.NORM_LAYERS: r"^_(norm_layer|group|channel_sums|input_gradient)_kernel|GammaBetaBackward"
    r"|ComputeInternalGradients|ComputeBackwardFusedParams",
    of.EMBEDDINGS: r"^_(keys|token_sums|weighted_tokens|table)_kernel|compute_grad_weight"
    r"|sum_and_scatter|krn_partial|embedding_backward|EmbeddingBag.*[bB]ackward|radix_sort"
    r"|unique_by_key|searchsorted",
    of.VECTORS: r"^_(vectors|squared_norms|tiles)_kernel|reduce_kernel.*sum_functor",
    of.COEFFICIENTS: r"^_(coefficients|sort)_kernel|NormTwoOps",
    of.NOISE: r"^_add_(noise|integers)",
    OPTIMIZER: r"multi_tensor_apply.*FusedOptimizer",
}
COLUMNS = [
    Column("part"),
    *(Column(key, f"{key} ms", ".2f") for key in ("ordinary", "private", "extra", "floor", "gap")),
    Column("ratio", "extra / floor", ".1f"),
]
IN_DOCUMENT = [
    Column("network"),
    *(Column(key, f"{key}, ms", ".1f") for key in ("ordinary", "private")),
    Column("of", "private / ordinary"),
    *(Column(key, f"{key}, ms", ".1f") for key in ("extra", "floor")),
    Column("gaps", "parts far from their floors: extra, ms"),
]

Kernels = Mapping[str, Sequence[float]]  # name -> milliseconds and launches of a step


# fmt: off
@dataclass(frozen=True)
class Options:
    networks: tuple[str, ...] = option(tuple(ROWS), choices=tuple(ROWS), unique=True,
        aliases=("--rows",), metavar="NETWORK", help=f"of {', '.join(ROWS)} (default: all)")
    steps: int = option(3, "profiled steps", check=positive)
    small: bool = option(False, "small networks on small batches (default: off)")
    output: Path | None = option(None, "JSON of all kernels and floors (default: none)",
        check=is_writable)
    markdown: Path | None = option(None, metavar="JSON",
        help="in place of measuring, the table of an earlier run's file for a document "
        "(default: none)")
# fmt: on


def measure(
    row: NetworkRow, options: Options, device: torch.device, ceilings: of.Ceilings
) -> dict[str, Any]:
    """Returns a network's kernels without privacy and with it, and its floors."""
    training, batch, private = _profiled(OURS, row, options, device)
    algorithms = algorithms_of(training.model)
    del training, batch
    release_memory(device)
    training, (inputs, targets), ordinary = _profiled(BASELINE, row, options, device)
    network: Any = training.model
    floors, without = of.floors_of(network, inputs, len(targets), algorithms, ceilings)
    kernels = {BASELINE: ordinary, OURS: private}
    return {"kernels": kernels, "floors": floors, "without_floor": without}


def _profiled(
    variant: str, row: NetworkRow, options: Options, device: torch.device
) -> tuple[NetworkTraining, Any, Kernels]:
    training, batch = training_of(variant, row, options.small, device)
    for _ in range(WARM_UP):
        training.backward(batch)
        training.step()
    return training, batch, kernels_of(training, batch, options.steps)


def algorithms_of(model: Any) -> dict[str, str]:
    """Returns weight -> algorithm of the plan of a private model's last step on kernels."""
    plan = model.step_context.plans.last
    if plan is None:
        return {}
    return {use.name: own.algorithm for use, own in zip(plan.uses, plan.choices, strict=True)}


def run_all(options: Options, device: torch.device) -> list[dict]:
    """Measures the ceilings and all networks, and prints each one's table."""
    ceilings = of.measure_ceilings(device)
    print(f"ceilings: {ceilings}", flush=True)
    recorder = Recorder(options.output, ceilings=ceilings._asdict())
    for name in options.networks:
        batch = "small" if options.small else ROWS[name].batch
        found: dict[str, Any] = {"row": name, "config": {"batch": batch}}
        found |= attempted(partial(measure, ROWS[name], options, device, ceilings), device)
        recorder.add(found, report(found))
    return recorder.cells


def part_of(kernel: str) -> str | None:
    """Returns what a kernel is for; None where its name does not tell."""
    return next((part for part, names in KERNELS.items() if re.search(names, kernel)), None)


def parts_of(
    ordinary: Kernels, private: Kernels, floors: Mapping[str, Sequence[float]]
) -> list[dict[str, Any]]:
    """Returns the rows of a network's table: the largest gap first, and all parts last.

    Args:
        ordinary, private: a step's kernels.
        floors: part -> milliseconds without privacy and with it.
    """
    times: dict[str, list[float]] = {part: [0.0, 0.0] for part in floors}
    for name in {**ordinary, **private}:
        both = [kernels.get(name, (0.0,))[0] for kernels in (ordinary, private)]
        part = part_of(name) or (MORE if both[1] >= both[0] else LESS)
        before = times.get(part, (0.0, 0.0))
        times[part] = [a + b for a, b in zip(before, both, strict=True)]
    rows = [_row(part, *both, floors.get(part)) for part, both in times.items()]
    rows.sort(key=lambda row: -row["gap"])
    total = [sum(both[n] for both in times.values()) for n in (0, 1)]
    whole = [sum(floor[n] for floor in floors.values()) for n in (0, 1)]
    return [*rows, _row(ALL, *total, whole)]


def _row(
    part: str, ordinary: float, private: float, floor: Sequence[float] | None
) -> dict[str, Any]:
    extra, least = private - ordinary, None if floor is None else floor[1] - floor[0]
    ratio = extra / least if least is not None and least >= LEAST_FLOOR_MS else None
    return {
        "part": part, "ordinary": ordinary, "private": private, "extra": extra, "floor": least,
        "gap": extra - (least or 0.0), "ratio": ratio,
    }  # fmt: skip


def unclaimed(ordinary: Kernels, private: Kernels) -> dict[str, float]:
    """Returns PyTorch's kernels that no part claims: by how many milliseconds a step has more."""
    names = [name for name in {**ordinary, **private} if part_of(name) is None]
    more = {n: private.get(n, (0.0,))[0] - ordinary.get(n, (0.0,))[0] for n in names}
    return {n: more[n] for n in sorted(names, key=lambda n: -abs(more[n]))}


def report(cell: Mapping[str, Any]) -> str:
    """Returns a network's table, and what is behind its kernels that no part claims."""
    if cell["status"] != OK:
        return f"\n{cell['row']}: {describe_failure(dict(cell))}"
    both = cell["kernels"][BASELINE], cell["kernels"][OURS]
    lines = [format_table(COLUMNS, parts_of(*both, cell["floors"]), f"\n{cell['row']}")]
    most = islice(unclaimed(*both).items(), MOST_NAMED)
    lines += [f"{ms:+.2f} ms: {name[:150]}" for name, ms in most if abs(ms) >= LEAST_MS]
    if cell["without_floor"]:
        names = cell["without_floor"]
        lines.append(f"{len(names)} parameters have no floor, such as {names[0]}")
    return "\n".join(lines)


def document(results: Mapping[str, Any]) -> str:
    """Returns the ceilings and a table with a line for each network, as Markdown."""
    rows = []
    for cell in results["cells"]:
        if cell["status"] != OK:
            continue
        both = cell["kernels"][BASELINE], cell["kernels"][OURS]
        *parts, whole = parts_of(*both, cell["floors"])
        least = max(LEAST_MS, LEAST_GAP * whole["extra"])
        largest = [p for p in parts if p["floor"] is not None and p["gap"] >= least]
        gaps = [f"{p['part']} {p['extra']:+.2f} (floor {p['floor']:.2f})" for p in largest]
        ratio = f"{whole['private'] / whole['ordinary']:.2f}"
        rows.append({**whole, "network": f"`{cell['row']}`", "of": ratio, "gaps": "; ".join(gaps)})
    ceilings = of.Ceilings(**results["ceilings"])
    return f"Ceilings: {ceilings}.\n\n{format_table(IN_DOCUMENT, rows, markdown=True)}"


@program("ddp_by_hand.experiments.networks.account", Options)
def main(options: Options) -> int:
    """Measures all networks, or prints an earlier run. Returns 1 if a network failed."""
    if options.markdown:
        try:
            print(document(json.loads(options.markdown.read_text())))
        except (OSError, ValueError, KeyError, TypeError) as error:
            what = f"--markdown {options.markdown}: no results of this: {error!r}"
            raise BadInput(what) from error
        return 0
    if not torch.cuda.is_available():
        raise BadInput(
            "there is no GPU, whose kernels this profiles: run it on one, or print an earlier "
            "run's table with --markdown"
        )
    cells = run_all(options, torch.device("cuda"))
    return int(any(cell["status"] != OK for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
