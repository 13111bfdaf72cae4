"""Steps of `experiments.price --pairs`: TRL's trainer, and its private form, in their own loops."""

import random
import string
import tempfile
from typing import Any

import torch

from ddp_by_hand.experiments.price.models import MODELS
from ddp_by_hand.experiments.price.options import Options
from ddp_by_hand.experiments.rounds import BASELINE, RoundCell, Row
from ddp_by_hand.experiments.training import options_of
from ddp_by_hand.lm.timing import MIB, PeakMemory, StepClock, wait_for_all


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
    lengths = {"prompt": row.tokens // 2, "chosen": row.tokens, "rejected": row.tokens}
    return Dataset.from_list(
        [
            {name: "".join(draw.choices(string.ascii_letters, k=k)) for name, k in lengths.items()}
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
    config = MODELS[options.model].shape.config(options.layers)
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    on_gpu = device.type == "cuda"
    args = DPOConfig(
        folder, per_device_train_batch_size=cell.row.samples,
        max_steps=options.warm_up + options.steps,
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
        accountant="rdp", options=options_of(cell.variant),
    )  # fmt: skip
    return PrivateDPOTrainer(**given, privacy=privacy)


def measure(cell: RoundCell, options: Options, device: torch.device) -> dict:
    from transformers import TrainerCallback

    clock, memory = StepClock(device), []

    class Clock(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step == options.warm_up:
                wait_for_all(device)
                memory.append(PeakMemory(device))
                clock.mark()

        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step > options.warm_up:
                clock.mark()

    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(cell, options, device, folder)
        own = trainer.training_step

        def training_step(*given: Any, **named: Any) -> Any:
            loss = own(*given, **named)
            if trainer.state.global_step >= options.warm_up:
                clock.mark()
            return loss

        trainer.training_step = training_step
        trainer.add_callback(Clock())
        trainer.train()
    marks = clock.milliseconds()
    return {
        "step_ms": [a + b for a, b in zip(marks[0::2], marks[1::2], strict=True)],
        "without_step_ms": marks[0::2],
        "peak_memory_mb": (memory[0].bytes() or 0) / MIB,
    }
