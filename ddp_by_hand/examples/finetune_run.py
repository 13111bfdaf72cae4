"""Runs `examples.finetune` once its options are parsed: data, model, training, files."""

import csv
import json
import random
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PrinterCallback, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from ddp_by_hand.examples.finetune_options import RESUMABLE, Options
from ddp_by_hand.measure.command_line import check_folder
from ddp_by_hand.measure.extras import require
from ddp_by_hand.measure.files import write_atomically
from ddp_by_hand.measure.options import flag
from dp_clipping.integrations.transformers import PrivacyArguments, PrivateTrainer

HELD_OUT = 10  # one row of so many is never trained on
END = 256  # the token after the last byte
MADE = 1024  # sentences of --data made


def read_rows(source: str, column: str) -> list[str]:
    """Returns the texts of a table; raises ValueError that shows the option that works."""
    if source == "made":
        return make_rows(MADE)
    path = Path(source)
    try:
        with open(path, newline="", encoding="utf-8") as file:
            if path.suffix == ".csv":
                rows: list[Any] = list(csv.DictReader(file))
            elif path.suffix in (".jsonl", ".json"):
                rows = _json_rows(file.read())
            else:
                raise ValueError(f"--data {source}: give a file that ends in .csv or .jsonl")
    except OSError as error:
        raise ValueError(
            f"--data {source}: {error.strerror}: give a .csv or .jsonl file"
        ) from error
    except (csv.Error, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"--data {source} is damaged: {error}") from error
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ValueError(
                f'--data {source}: row {number} has no columns: write rows as {{"text": ".."}}'
            )
        if column not in row:
            there = ", ".join(map(str, row))
            raise ValueError(
                f"--column {column}: row {number} of {source} has {there}: give one of them, as "
                f"--column {next(reversed(row), 'text')}"
            )
        if not isinstance(row[column], str):
            raise ValueError(
                f"--column {column}: row {number} of {source} has {row[column]!r} there, and a "
                "text is wanted: give another --column, or leave the row out"
            )
    texts = [row[column] for row in rows]
    if len(texts) < 2 * HELD_OUT:
        raise ValueError(f"--data {source} has {len(texts)} rows: give {2 * HELD_OUT} or more")
    return texts


def _json_rows(text: str) -> list[Any]:
    """Returns the rows of a JSON list, or one row per line."""
    if text.lstrip().startswith("["):
        return json.loads(text)
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def make_rows(count: int) -> list[str]:
    """Returns short notes of a made-up ward; the same ones each time."""
    chosen = random.Random(0)
    parts = (
        "the patient|the visitor|the nurse", "had|reported|noticed", "a mild|a severe|no",
        "headache|fever|cough|rash", "on monday|on friday|at night|after lunch",
    )  # fmt: skip
    return [" ".join(chosen.choice(part.split("|")) for part in parts) for _ in range(count)]


class Bytes:
    """A tokenizer without a file: the bytes of a text, and one more token for its end."""

    size = END + 1

    def encode(self, text: str) -> list[int]:
        return [*text.encode(), END]

    def decode(self, tokens: list[int]) -> str:
        return bytes(token for token in tokens if token < END).decode(errors="replace")


def tokenizer_of(model: str, vocabulary: int) -> Any:
    """Returns the tokenizer in a model's folder, or bytes if there is none."""
    folder = Path(model)
    if any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if vocabulary < Bytes.size:
        raise ValueError(
            f"--model {model} has no tokenizer, and {vocabulary} tokens, too few for bytes: save "
            f"it with tokenizer.save_pretrained({model!r})"
        )
    return Bytes()


def to_samples(rows: list[str], tokenizer: Any, length: int) -> list[dict[str, Tensor]]:
    """Returns tokens of one length: no sample's padding depends on the others."""
    samples = []
    for row in rows:
        ids = torch.tensor(tokenizer.encode(row)[:length])
        there = torch.arange(length) < len(ids)
        ids = torch.cat([ids, ids.new_zeros(length - len(ids))])
        samples.append(
            {"input_ids": ids, "attention_mask": there.long(), "labels": ids.where(there, -100)}
        )
    return samples


def make_model(options: Options) -> Any:
    """Returns the model with what `--train` says trainable."""
    torch.manual_seed(options.seed)
    sizes: dict[str, Any] = {"vocab_size": Bytes.size, "bos_token_id": END, "eos_token_id": END}
    if options.model == "gpt2":
        config: Any = transformers.GPT2Config(
            n_positions=256, n_embd=64, n_layer=2, n_head=4, **sizes
        )
        model = AutoModelForCausalLM.from_config(config)
    elif options.model == "llama":
        config = transformers.LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256, **sizes,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config)
    else:
        model = _saved_model(options.model)
    if options.train == "full":
        return model
    require("peft")
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of fan_in_fan_out, which it then sets
        return get_peft_model(
            model,
            LoraConfig(r=options.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM"),
        )


def _saved_model(name: str) -> Any:
    if not (Path(name) / "config.json").exists():
        raise ValueError(
            f"--model {name} is no folder with a config.json: give gpt2, llama, or the folder that "
            f"model.save_pretrained({name!r}) has written"
        )
    try:
        return AutoModelForCausalLM.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"--model {name} cannot be read: {error}") from error


def _check_positions(options: Options, config: Any) -> None:
    most = getattr(config, "max_position_embeddings", None) or options.length
    if options.length > most:
        raise ValueError(f"--length is {options.length}: the model has {most} positions: give less")


@torch.no_grad()
def sample(model: Any, tokenizer: Any, options: Options) -> str:
    """Returns the model's continuation; uses the same random numbers each time."""
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    ids = tokenizer.encode(options.prompt)
    ids = torch.tensor([[token for token in ids if token != END]], device=device)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        found = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, pad_token_id=0,
            max_new_tokens=options.new_tokens,
        )  # fmt: skip
    model.train(was_training)
    return tokenizer.decode(found[0].tolist())


@dataclass(frozen=True)
class Data:
    training: list[dict[str, Tensor]]
    held_out: list[dict[str, Tensor]]


class Progress(TrainerCallback):
    """Prints ε so far, and ends the training after a whole step on Ctrl-C."""

    def __init__(self) -> None:
        self.is_stopping = False
        self._begin = time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "epsilon" in logs and "train_runtime" not in logs:
            seconds = time.monotonic() - self._begin
            print(
                f"step {state.global_step:4d} of {state.max_steps}   epsilon "
                f"{logs['epsilon']:.3f}   {seconds:.0f} s",
                flush=True,
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.is_stopping:
            control.should_save = control.should_training_stop = True


@contextmanager
def stopping(progress: Progress) -> Iterator[None]:
    """Handles Ctrl-C: the first one ends the step and saves, a second one ends the program."""

    def stop(*_: Any) -> None:
        if progress.is_stopping:
            raise KeyboardInterrupt
        progress.is_stopping = True
        print("\nstopping after this step (Ctrl-C again: at once)", flush=True)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def run(options: Options) -> bool:
    """Trains. Returns whether training was completed, not interrupted."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message="Optimal order is the")  # in the search for the noise
    model = make_model(options)
    _check_positions(options, model.config)
    tokenizer = tokenizer_of(options.model, model.config.vocab_size)
    samples = to_samples(read_rows(options.data, options.column), tokenizer, options.length)
    data = Data([s for i, s in enumerate(samples) if i % HELD_OUT], samples[::HELD_OUT])
    settings = settings_of(options, len(data.training))
    checkpoint = begin(options, settings)
    progress = Progress()
    trainer = make_trainer(model, data, options, settings["delta"], progress)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{options.model}: {trainable:,} of {parameters:,} parameters, {len(data.training)} rows "
        f"of at most {options.length} tokens\n"
        f"before: {sample(model, tokenizer, options)!r}"
    )
    with stopping(progress):
        trainer.train(resume_from_checkpoint=checkpoint)
    if progress.is_stopping and trainer.state.global_step < trainer.state.max_steps:
        return False
    _finish(trainer, options)
    print(f"after: {sample(trainer.model, tokenizer, options)!r}")
    if options.model in ("gpt2", "llama"):
        print(
            f"the text is not meant to be good, {parameters:,} parameters began at random: give "
            "--model a folder that save_pretrained has written"
        )
    return True


def settings_of(options: Options, rows: int) -> dict[str, Any]:
    """Returns the settings that identify a run, with its δ."""
    public = {k: v for k, v in vars(options).items() if k not in RESUMABLE}
    delta = rows**-1.1 if options.delta is None else options.delta
    if delta >= 1 / rows:
        raise ValueError(f"--delta is {delta:g}: give less than 1 / {rows} rows = {1 / rows:.1e}")
    if options.batch_size > rows:
        raise ValueError(f"--batch-size is {options.batch_size}: there are {rows} rows, give less")
    return public | {"rows": rows, "delta": delta}


def begin(options: Any, settings: dict[str, Any]) -> str | None:
    """Returns the checkpoint to continue from; raises ValueError if the folder does not fit."""
    folder, file = options.output_dir, options.output_dir / "settings.json"
    there = json.loads(file.read_text()) if file.exists() else None
    if not options.resume:
        if there is not None:
            raise ValueError(
                f"--output-dir {folder} holds a run: add --resume to continue it, or give another"
            )
        check_folder("--output-dir", folder, create=True)
        write_atomically(file, json.dumps(settings, indent=1) + "\n")
        return None
    if there is None:
        raise ValueError(f"--resume: {folder} holds no run: leave --resume out")
    for name, value in settings.items():
        if there.get(name) != value:
            raise ValueError(
                f"--resume: {flag(name)} was {there.get(name)} and is {value}: give the same, or "
                "another --output-dir"
            )
    return get_last_checkpoint(str(folder))


def make_trainer(
    model: Any, data: Data, options: Options, delta: float, progress: Progress
) -> PrivateTrainer:
    arguments = transformers.TrainingArguments(
        str(options.output_dir),
        per_device_train_batch_size=options.max_physical_batch_size,
        per_device_eval_batch_size=options.max_physical_batch_size,
        gradient_accumulation_steps=options.batch_size // options.max_physical_batch_size,
        num_train_epochs=options.epochs, learning_rate=options.learning_rate, seed=options.seed,
        logging_steps=options.report_every, save_steps=options.save_every, save_total_limit=2,
        max_grad_norm=0, report_to=[], disable_tqdm=True, use_cpu=options.device == "cpu",
        dataloader_pin_memory=options.device != "cpu" and torch.cuda.is_available(),
    )  # fmt: skip
    if options.device == "cuda" and arguments.device.type != "cuda":
        raise ValueError("--device cuda: PyTorch finds no GPU: give --device cpu")
    trainer = PrivateTrainer(
        model=model, args=arguments, train_dataset=data.training, eval_dataset=data.held_out,
        callbacks=[progress],
        privacy=PrivacyArguments(
            target_epsilon=options.epsilon, target_delta=delta, max_grad_norm=options.max_grad_norm
        ),
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    return trainer


def _finish(trainer: PrivateTrainer, options: Options) -> None:
    folder, statement = options.output_dir, trainer.privacy_statement()
    trainer.save_model(str(folder / "model"))
    statement.save(folder / "privacy.json")
    loss = trainer.evaluate()["eval_loss"]
    print(
        f"{statement}\nmay be published: {folder / 'model'}\n"
        f"not covered by epsilon: loss {loss:.3f} on {len(trainer.eval_dataset)} held-out rows; "
        f"secret: {folder}.keys"
    )
