"""Lists the cells that `experiments.llama_fsdp` measures and those left; describes a dry run."""

from __future__ import annotations

from collections.abc import Iterable

from ddp_by_hand.experiments.llama_fsdp.network import config_of, on_meta
from ddp_by_hand.experiments.llama_fsdp.options import LENGTHS, PROGRAM, Options, new_folder
from ddp_by_hand.experiments.llama_fsdp.results import GIB, MODES, GridCell, GridSettings, ran_as
from ddp_by_hand.experiments.llama_fsdp.run import Run
from ddp_by_hand.lm.runtime import Hardware
from ddp_by_hand.measure import plan_rounds
from ddp_by_hand.measure.options import shared_values
from ddp_by_hand.measure.words import counted


def plan(options: Options) -> list[GridCell]:
    """Lists cells: lengths from short to long, the modes of a length in interleaved rounds."""
    if options.mode:
        return [GridCell(options.mode, options.seq_length, options.round)]
    modes = list(dict.fromkeys(options.modes or MODES))
    return [
        GridCell(mode, length, number)
        for length in sorted({*(options.seq_lengths or LENGTHS)})
        for number, mode in plan_rounds(modes, options.rounds or 1, seed=0)
    ]


def run_of(options: Options, hardware: Hardware) -> Run:
    settings, folder = shared_values(options, GridSettings), options.output_dir or new_folder("run")
    return Run(PROGRAM, options, plan(options), settings, folder, hardware)


def say_reference_modes(modes: Iterable[str], device_type: str) -> str:
    """Names the modes that run as their reference modes, without kernels; empty if none does."""
    pairs = [(mode, ran_as(mode, device_type)) for mode in dict.fromkeys(modes)]
    references = ", ".join(
        f"{mode} runs as {reference}" for mode, reference in pairs if mode != reference
    )
    return f"{references}, in plain PyTorch: fused kernels need a CUDA device and Triton" * bool(
        references
    )


def describe_plan(run: Run) -> str:
    """Describes what would run, for `--dry-run`."""
    options, hardware, world_size = run.options, run.hardware, run.hardware.world_size
    network = on_meta(config_of(options.model_name), options.train_embedding)
    count = sum(p.numel() for p in network.parameters())
    trained = sum(p.numel() for p in network.parameters() if p.requires_grad)
    state = (4 * count + 12 * trained) / world_size / GIB  # weights; gradients and AdamW's two
    cells, finished = run.todo, run.say_finished()
    if options.mode:  # one cell alone is measured whenever it is asked for
        cells, finished = run.cells, ""
    remarks = [say_reference_modes((c.mode for c in cells), hardware.device_type), finished]
    place = f"in {counted(world_size, 'process', 'processes')} of its own:"
    each = "each " if len(cells) > 1 else ""
    left = " left" if finished else ""
    return "\n".join([
        hardware.sentence,
        f"model: {options.model_name}, {count:,} parameters, {trained:,} of them trained; weights, "
        f"gradients and AdamW in float32 take {state:,.2f} GiB on each of "
        f"{counted(world_size, 'rank')}, activations not counted",
        f"batch: {counted(options.batch_size, 'sample')} a rank, "
        f"{options.batch_size * world_size} in all; {options.warmup_iter} + {options.num_iter} "
        f"steps a cell; clipping {options.clipping}",
        *filter(None, remarks),
        f"{counted(len(cells), 'cell')}{left}, {each}{place}" if cells else "nothing is left",
        *(f"  {cell.label}" for cell in cells),
        f"results: {run.folder}",
    ])  # fmt: skip
