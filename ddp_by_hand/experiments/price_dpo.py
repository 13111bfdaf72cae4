#!/usr/bin/env python3
"""Measures a private step on preference pairs with LoRA, against TRL's own step.

    python -m ddp_by_hand.experiments.price_dpo      the 1B shape on one GPU
    python -m ddp_by_hand.experiments.price_dpo --rows 8x1024 --variants ordinary bookkeeping
    python -m ddp_by_hand.experiments.price_dpo --checkpointing
    python -m ddp_by_hand.experiments.price_dpo --model tiny --rows 2x16 --rounds 1 --steps 2

`ordinary` is a `trl.DPOTrainer`; other variants are a `PrivateDPOTrainer` in that mode. Both train
adapters of all linear layers of a Llama in bfloat16 with random weights, in their own loops. Each
step takes all pairs of the data, whose completions have T tokens with their prompt; the reference
is the model without its adapters. Variants take turns in interleaved rounds; each is built, warmed
up, timed and freed. Two times per step: forward, backward and clipping alone, and the complete step
with noise and fused AdamW.
"""

import random
import string
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

import torch

from ddp_by_hand.experiments.llama_fsdp.network import SHAPES
from ddp_by_hand.experiments.rounds import (
    BASELINE,
    RoundCell,
    RoundOptions,
    Row,
    device_for,
    row_of,
    run_program,
)
from ddp_by_hand.lm.timing import MIB, PeakMemory, StepClock, wait_for_all
from ddp_by_hand.measure.options import option, positive, program
from dp_clipping import MODES

CHOICES = (BASELINE, *MODES[1:])
WARM_UP = 4  # steps of a round that are not timed: the first, the second and the fourth check


# fmt: off
@dataclass(frozen=True)
class Options(RoundOptions):
    model: str = option("llama-3.2-1b", "shape of the network", choices=tuple(SHAPES))
    rows: tuple[Row, ...] = option((Row(4, 512), Row(8, 512), Row(4, 1024)), metavar="BxT",
        type=row_of, unique=True, help="pairs x tokens of a completion with its prompt")
    variants: tuple[str, ...] = option((BASELINE, "flash_bookkeeping", "bookkeeping"),
        choices=CHOICES, unique=True, metavar="VARIANT", help=f"of {', '.join(CHOICES)}")
    rank: int = option(16, "of the adapters", check=positive)
    checkpointing: bool = option(False, "recompute activations, in all variants (TRL's default)")
# fmt: on


def quieten() -> None:
    """Leaves out what trainers print of each step and each map of the data."""
    import datasets
    import transformers

    datasets.disable_progress_bars()
    transformers.logging.set_verbosity_error()
    transformers.trainer.PrinterCallback.on_log = lambda *_, **__: None


def pairs_of(row: Row) -> Any:
    """Makes pairs of random letters, longer than T."""
    from datasets import Dataset

    draw = random.Random(0)
    names = ("prompt", "chosen", "rejected")
    return Dataset.from_list(
        [
            {name: "".join(draw.choices(string.ascii_letters, k=row.tokens)) for name in names}
            | {"prompt": "".join(draw.choices(string.ascii_letters, k=row.tokens // 2))}
            for _ in range(row.samples)
        ]
    )


def trainer_of(cell: RoundCell, options: Options, device: torch.device, folder: str) -> Any:
    """Builds the variant's trainer."""
    from peft import LoraConfig
    from transformers import ByT5Tokenizer, LlamaForCausalLM
    from trl import DPOConfig, DPOTrainer

    from dp_clipping.integrations.trl import PrivacyArguments, PrivateDPOTrainer

    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(SHAPES[options.model].config()).to(torch.bfloat16)
    on_gpu = device.type == "cuda"
    args = DPOConfig(
        folder, per_device_train_batch_size=cell.row.samples, max_steps=WARM_UP + options.steps,
        max_length=cell.row.tokens, max_grad_norm=0.0, gradient_checkpointing=options.checkpointing,
        bf16=on_gpu, use_cpu=not on_gpu, report_to=[], disable_tqdm=True, save_strategy="no",
        logging_strategy="no", optim="adamw_torch_fused",
    )  # fmt: skip
    given: dict[str, Any] = dict(
        model=model, args=args, train_dataset=pairs_of(cell.row), processing_class=ByT5Tokenizer(),
        peft_config=LoraConfig(r=options.rank, target_modules="all-linear"),
    )  # fmt: skip
    if cell.variant == BASELINE:
        return DPOTrainer(**given)
    privacy = PrivacyArguments(  # at this rate a Poisson batch has all pairs
        noise_multiplier=1.0, target_delta=1e-5, sample_rate=1.0, steps=args.max_steps,
        accountant="rdp", options={"grad_sample_mode": cell.variant},
    )  # fmt: skip
    return PrivateDPOTrainer(**given, privacy=privacy)


def clocked(trainer: Any, clock: StepClock, begin: Any) -> Any:
    """Returns a callback that marks steps, and lets `training_step` mark its end."""
    from transformers import TrainerCallback

    own = trainer.training_step

    def training_step(*given: Any, **named: Any) -> Any:
        loss = own(*given, **named)
        if trainer.state.global_step >= WARM_UP:
            clock.mark()
        return loss

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step == WARM_UP:
                begin()
            if state.global_step >= WARM_UP:
                clock.mark()

    trainer.training_step = training_step
    return Clock()


def measure(cell: RoundCell, options: Options, device: torch.device) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(cell, options, device, folder)
        clock, memory = StepClock(device), []

        def begin() -> None:
            wait_for_all(device)
            memory.append(PeakMemory(device))

        trainer.add_callback(clocked(trainer, clock, begin))
        trainer.train()
    marks = clock.milliseconds()
    return {
        "step_ms": [a + b for a, b in zip(marks[0::2], marks[1::2], strict=True)],
        "without_step_ms": marks[0::2],
        "peak_memory_mb": (memory[0].bytes() or 0) / MIB,
    }


@program("ddp_by_hand.experiments.price_dpo", Options, needs=("transformers", "peft", "trl"))
def main(options: Options) -> int:
    """Measures all cells. Returns 1 if one failed."""
    device = device_for(options.model)
    quieten()
    config = {
        "model": options.model, "rank": options.rank, "checkpointing": options.checkpointing,
    }  # fmt: skip
    return run_program(
        options, options.rows, options.variants, lambda cell: measure(cell, options, device),
        config, device,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
