"""Synthetic records from a language model with private LoRA adapters; an entity is protected.

    python -m ddp_by_hand.examples.synthetic_text

The training core of NVIDIA NeMo Safe-Synthesizer, written anew on `PrivateTrainer`: rows of a table
as JSON, Poisson sampling of entities, one row of an entity in a step, LoRA, resume, generation. The
table is `functions_table`. The base model stands for a pretrained one: it has learned the form of
a record from made-up ones, and sees no row.
"""

import random
import shlex
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ddp_by_hand.examples import functions_table as table
from ddp_by_hand.examples.functions_table import Row
from ddp_by_hand.measure.command_line import INTERRUPTED, bad_input
from ddp_by_hand.measure.files import write_atomically
from ddp_by_hand.measure.options import as_arguments, option, positive, program

LENGTH = 64  # bytes of a record


# fmt: off
@dataclass(frozen=True)
class Options:
    entities: int = option(1024, "entities of the table", metavar="N", check=positive)
    batch_size: int = option(64, "entities of a step, on average", metavar="N", check=positive)
    rows: int = option(1, "rows of an entity in a step", metavar="M", check=positive)
    steps: int = option(60, "private steps", metavar="N", check=positive)
    save_every: int = option(20, "steps between two checkpoints", metavar="N", check=positive)
    epsilon: float = option(8.0, "what the whole run may spend", metavar="E", check=positive)
    delta: float = option(1e-4, "δ of the guarantee", metavar="D", check=positive)
    public_steps: int = option(150, "steps of the base model", metavar="N", check=positive)
    records: int = option(64, "records to generate", metavar="N", check=positive)
    output_dir: Path = option(Path("results_synthetic_text"), "adapters, records, checkpoints")
    resume: bool = option(False, "continue the run in --output-dir (default: begin one)")
# fmt: on


def make_base(options: Options) -> Any:
    """Returns a language model that knows the form of records, from public ones alone."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from ddp_by_hand.examples.finetune_run import END, Bytes, to_samples

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(
        vocab_size=Bytes.size, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, bos_token_id=END,
        eos_token_id=END, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    ))  # fmt: skip
    optimizer, chosen = torch.optim.AdamW(model.parameters(), lr=5e-3), random.Random(0)
    for _ in range(options.public_steps):
        texts = [Row.made_up(chosen).to_text() for _ in range(32)]
        samples = to_samples(texts, Bytes(), LENGTH)
        model(**{k: torch.stack([one[k] for one in samples]) for k in samples[0]}).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def make_trainer(base: Any, entities: dict[str, list[Row]], options: Options, **own: Any) -> Any:
    """Returns the trainer of the adapters; `own` has precedence in its `PrivacyArguments`."""
    from peft import LoraConfig, get_peft_model
    from transformers import PrinterCallback, TrainingArguments

    from ddp_by_hand.examples.finetune_run import Bytes, to_samples
    from dp_clipping.integrations.transformers import PrivacyArguments, PrivateTrainer

    lora = LoraConfig(r=8, target_modules="all-linear", fan_in_fan_out=True, task_type="CAUSAL_LM")
    texts = [row.to_text() for rows in entities.values() for row in rows]
    privacy = {
        "unit_ids": [entity for entity, rows in entities.items() for _ in rows],
        "examples_per_step": options.rows, "sample_rate": options.batch_size / options.entities,
        "steps": options.steps, "target_epsilon": options.epsilon, "target_delta": options.delta,
    }  # fmt: skip
    trainer = PrivateTrainer(
        model=get_peft_model(base, lora),
        args=TrainingArguments(
            str(options.output_dir), per_device_train_batch_size=options.batch_size * options.rows,
            max_steps=options.steps, learning_rate=1e-2, save_steps=options.save_every,
            logging_steps=10, max_grad_norm=0, report_to=[], use_cpu=True, disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=to_samples(texts, Bytes(), LENGTH),
        privacy=PrivacyArguments(**privacy | own),
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    return trainer


@torch.no_grad()
def generate(model: Any, count: int) -> list[str]:
    """Returns what the model writes from the first `{` on, so many times."""
    from ddp_by_hand.examples.finetune_run import Bytes

    prompt = torch.full((count, 1), ord("{"))
    found = model.eval().generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), do_sample=True,
        max_new_tokens=LENGTH - 1, pad_token_id=Bytes.size - 1,
    )  # fmt: skip
    return [Bytes().decode(ids.tolist()) for ids in found]


@program("synthetic_text", Options, needs=("transformers", "accelerate", "peft"))
@bad_input()
def main(options: Options) -> int:
    """Trains, and prints synthetic records and ε."""
    from transformers import logging

    from ddp_by_hand.examples.finetune_run import Progress, begin, stopping

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    settings = {k: v for k, v in asdict(options).items() if k not in ("output_dir", "resume")}
    entities = table.read_entities(options.entities)
    checkpoint, progress = begin(options, settings), Progress()
    base = make_base(options)
    base.save_pretrained(options.output_dir / "base")
    trainer = make_trainer(base, entities, options)
    trainer.add_callback(progress)
    with stopping(progress):
        trainer.train(resume_from_checkpoint=checkpoint)
    if trainer.state.global_step < options.steps:
        words = as_arguments(replace(options, resume=True))
        print(f"to continue: python -m ddp_by_hand.examples.synthetic_text {shlex.join(words)}")
        return INTERRUPTED
    texts = generate(trainer.model, options.records)
    valid = [text for text in texts if Row.from_text(text)]
    write_atomically(options.output_dir / "records.jsonl", "".join(f"{one}\n" for one in valid))
    trainer.save_model(str(options.output_dir / "adapters"))
    rate = options.batch_size / options.entities
    print(*valid[:5], f"{len(valid)} of {len(texts)} records are valid", sep="\n")
    print(table.report(trainer.engine, options.delta, rate, options.steps))
    return 0


if __name__ == "__main__":
    sys.exit(main())
