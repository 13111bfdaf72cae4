"""Lists the cells that `experiments.llama_fsdp` measures and those left; describes a dry run."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from experiments.llama_fsdp.network import config_of, on_meta
from experiments.llama_fsdp.options import LENGTHS, Options, folder_of, settings_of
from experiments.llama_fsdp.results import GIB, MODES, GridCell, ran_as
from lm.runtime import Hardware
from measure import Results, plan_rounds
from measure.words import counted


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


class Plan:
    """The cells with what they are recognised by on these devices, and those still to be measured.

    Of one cell alone nothing is finished: it is measured whenever it is asked for.
    """

    def __init__(self, options: Options, hardware: Hardware, world_size: int):
        self._settings, self._world_size = settings_of(options), world_size
        on_cpu = hardware.device_type == "cpu"
        self._device = "cpu" if on_cpu else torch.cuda.get_device_name(0)
        self.folder = folder_of(options)
        self.keys = {cell: self.key_of(cell) for cell in plan(options)}
        results = Results(self.folder)
        self.todo = [c for c, k in self.keys.items() if options.mode or not results.finished(k)]

    def key_of(self, cell: GridCell) -> str:
        return cell.key(self._settings, self._world_size, self._device, torch.__version__)

    def say_finished(self) -> str:
        """Says how many cells are finished; empty if none is."""
        if len(self.todo) == len(self.keys):
            return ""
        verb = "is" if len(self.keys) == 1 else "are"
        done = len(self.keys) - len(self.todo)
        return f"{done} of {counted(len(self.keys), 'cell')} {verb} finished in {self.folder}"


def say_reference_modes(modes: Iterable[str], device_type: str) -> str:
    """Names the modes that run as their reference modes, without kernels; empty if none does."""
    pairs = [(mode, ran_as(mode, device_type)) for mode in dict.fromkeys(modes)]
    references = ", ".join(
        f"{mode} runs as {reference}" for mode, reference in pairs if mode != reference
    )
    return f"{references}, in plain PyTorch: fused kernels need a CUDA device and Triton" * bool(
        references
    )


def describe_plan(options: Options, hardware: Hardware, world_size: int) -> str:
    """Describes what would run, for `--dry-run`."""
    network = on_meta(config_of(options.model_name), options.train_embedding)
    count = sum(p.numel() for p in network.parameters())
    trained = sum(p.numel() for p in network.parameters() if p.requires_grad)
    state = (4 * count + 12 * trained) / world_size / GIB  # weights; gradients and AdamW's two
    planned = Plan(options, hardware, world_size)
    cells, finished = planned.todo, planned.say_finished()
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
        f"results: {planned.folder}",
    ])  # fmt: skip
