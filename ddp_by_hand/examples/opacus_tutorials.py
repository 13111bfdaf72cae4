"""The tasks of Opacus's tutorials in ghost mode, on either library and without a download.

    python -m ddp_by_hand.examples.opacus_tutorials images        a CNN whose BatchNorm is replaced
    python -m ddp_by_hand.examples.opacus_tutorials text          the last block of a BERT
    python -m ddp_by_hand.examples.opacus_tutorials text --train lora
                      its LoRA adapters; or `all` of it
    python -m ddp_by_hand.examples.opacus_tutorials distributed   the CNN; two ranks, or torchrun's
    python -m ddp_by_hand.examples.opacus_tutorials accounting    ε of each accountant

`--engine opacus` runs the same program on Opacus. Only `engine_classes` and `data_parallel` depend
on the engine: to move a program from Opacus, change its imports.

Pictures are of digits (`examples.font_digits`); texts are words in a row from four packages of
Python's standard library, and the label is the package. The BERT is built from its configuration,
with random weights: with `BertForSequenceClassification.from_pretrained(..)` in its place this is
the tutorial. It needs `transformers`, and `peft` for LoRA.
"""

import argparse
import importlib.util
import re
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from opacus.schedulers import ExponentialNoise
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ddp_by_hand.examples.font_digits import font_digits
from ddp_by_hand.lm.launch import run_ranks
from ddp_by_hand.lm.runtime import find_hardware, launched, process_group
from ddp_by_hand.measure.command_line import Parser, ending_quietly, refuse
from ddp_by_hand.measure.extras import require

ENGINES = ("dp_clipping", "opacus")
HELD_OUT = 512  # samples that no run trains on
SIDE = 16  # pixels of a picture's side
PACKAGES = ("asyncio", "encodings", "pydoc_data", "unittest")
LENGTH = 24  # tokens of a text at most, with the first one
VOCABULARY = 1024  # words are hashed: a vocabulary of the private texts would itself tell of them
ACCOUNTANTS = ("prv", "rdp", "gdp")
REPEATED = (  # warnings of Opacus, peft and PyTorch that come in each run
    "Optimal order is the", "Secure RNG turned off", "GDP accounting", "PRV", "Full backward hook",
    ".is_gradient_checkpointing",
)  # fmt: skip
GAMMA = 0.9  # what the noise is multiplied with after each epoch, by a scheduler

Parts = tuple[nn.Module, TensorDataset, TensorDataset]  # network, samples, held-out samples


def engine_classes(name: str) -> tuple[Any, Any]:
    """Returns `PrivacyEngine` and `BatchMemoryManager` of the package that `--engine` names."""
    if name == "opacus":
        from opacus import PrivacyEngine
        from opacus.utils.batch_memory_manager import BatchMemoryManager
    else:
        from dp_clipping import BatchMemoryManager, PrivacyEngine
    return PrivacyEngine, BatchMemoryManager


def data_parallel(name: str, network: nn.Module) -> nn.Module:
    """Returns the network in the wrapper that adds up this engine's clipped sums over ranks."""
    if name == "opacus":
        from opacus.distributed import DifferentiallyPrivateDistributedDataParallel

        return DifferentiallyPrivateDistributedDataParallel(network)
    from ddp import wrap

    return wrap("ddp_bucketed", network)


def picture_parts(options: argparse.Namespace) -> Parts:
    """Builds a small CNN with BatchNorm, and pictures [N, 3, 16, 16] with their digits [N]."""
    pictures, digits = font_digits(options.samples + HELD_OUT, SIDE, options.seed)
    network = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * (SIDE // 4) ** 2, 10),
    )  # fmt: skip
    return network, *split(pictures, digits)


def text_parts(options: argparse.Namespace) -> Parts:
    """Builds a BERT, partly frozen as `--train` says, and token ids, masks and packages."""
    return make_bert(options.train), *split(*make_texts(options.samples + HELD_OUT))


def split(*tensors: Tensor) -> tuple[TensorDataset, TensorDataset]:
    """Returns the samples to train on, and those that are held out."""
    return (
        TensorDataset(*(t[:-HELD_OUT] for t in tensors)),
        TensorDataset(*(t[-HELD_OUT:] for t in tensors)),
    )


def make_bert(train: str) -> nn.Module:
    require("transformers")
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=128, max_position_embeddings=LENGTH, num_labels=len(PACKAGES),
        pad_token_id=0, initializer_range=0.1,  # frozen random blocks must let the words through
    )  # fmt: skip
    network = BertForSequenceClassification(config)
    if train == "lora":
        require("peft")
        from peft import LoraConfig, get_peft_model

        return get_peft_model(
            network,
            LoraConfig(r=8, target_modules=["query", "value"], modules_to_save=["classifier"]),
        )
    if train == "last":
        network.requires_grad_(False)
        for part in (network.bert.encoder.layer[-1], network.bert.pooler, network.classifier):
            part.requires_grad_(True)
    return network


def make_texts(count: int) -> list[Tensor]:
    """Makes token ids [count, LENGTH] padded with 0, masks [count, LENGTH], packages [count]."""
    ids = torch.zeros(count, LENGTH, dtype=torch.long)
    words = [words_of(package) for package in PACKAGES]
    each = min(map(len, words)) // (LENGTH - 1)
    if count > each * len(PACKAGES):
        most = each * len(PACKAGES) - HELD_OUT
        raise ValueError(f"--samples: these packages have {most} texts: give at most so many")
    order, lengths = torch.randperm(each), torch.randint(LENGTH // 2, LENGTH, (count,))
    for row in range(count):
        start = int(order[row // len(PACKAGES)]) * (LENGTH - 1)
        text = words[row % len(PACKAGES)][start : start + int(lengths[row])]
        numbers = [2 + zlib.crc32(word.encode()) % (VOCABULARY - 2) for word in text]
        ids[row, : 1 + len(text)] = torch.tensor([1, *numbers])
    return [ids, (ids > 0).long(), torch.arange(count) % len(PACKAGES)]


def words_of(package: str) -> list[str]:
    """Returns the words of a package's sources, in their order."""
    folder = Path(importlib.util.find_spec(package).origin).parent
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py")))
    return re.findall(r"[a-z]+", text.lower())


def train(options: argparse.Namespace, accountant: str = "prv", gamma: float = 1) -> dict[str, Any]:
    """Trains and prints each epoch.

    Args:
        options: the options of the command; `noise_multiplier` is only there where it stands in for
            `epsilon`.
        accountant: Opacus's name of it.
        gamma: the noise is multiplied with it after each epoch.

    Returns:
        `losses` and `epsilons` after each epoch, and of the end `accuracy`, `noise_multiplier`
        and `parameters`.
    """
    PrivacyEngine, BatchMemoryManager = engine_classes(options.engine)
    torch.manual_seed(options.seed)  # the same data and first parameters on every rank
    network, samples, held_out = options.parts(options)
    engine = PrivacyEngine(accountant=accountant)
    network = engine.get_compatible_module(network)  # BatchNorm, which mixes samples, is replaced
    is_distributed = dist.is_available() and dist.is_initialized()
    module = data_parallel(options.engine, network) if is_distributed else network
    trainable = [p for p in module.parameters() if p.requires_grad]
    given = {
        "module": module,
        "optimizer": torch.optim.Adam(trainable, lr=options.learning_rate),
        "criterion": nn.CrossEntropyLoss(),
        "data_loader": DataLoader(samples, batch_size=options.batch_size),
        "max_grad_norm": options.max_grad_norm,
        "grad_sample_mode": "ghost",
    }
    if "noise_multiplier" in options:
        private = engine.make_private(noise_multiplier=options.noise_multiplier, **given)
    else:
        private = engine.make_private_with_epsilon(
            target_epsilon=options.epsilon,
            target_delta=options.delta,
            epochs=options.epochs,
            **given,
        )
    model, optimizer, criterion, loader = private
    scheduler = ExponentialNoise(optimizer, gamma=gamma)
    started, means, epsilons, accuracy = time.monotonic(), [], [], 0.0
    for epoch in range(options.epochs):
        model.train()
        losses = []
        with BatchMemoryManager(
            data_loader=loader,
            max_physical_batch_size=options.max_physical_batch_size,
            optimizer=optimizer,
        ) as batches:
            for *inputs, labels in batches:
                optimizer.zero_grad()
                loss = criterion(logits_of(model, inputs), labels)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        means.append(sum(losses) / len(losses))
        epsilons.append(float(engine.get_epsilon(options.delta)))
        accuracy = accuracy_of(model, held_out)
        if gamma != 1:
            scheduler.step()
        if not is_distributed or dist.get_rank() == 0:
            print(
                f"epoch {epoch + 1}: epsilon {epsilons[-1]:.2f} at delta {options.delta:g}; "
                f"held-out accuracy {accuracy:.1%}; loss {means[-1]:.3f} (not covered by epsilon); "
                f"{time.monotonic() - started:.1f} s"
            )
    return {
        "losses": means, "epsilons": epsilons, "accuracy": accuracy,
        "noise_multiplier": float(optimizer.noise_multiplier),
        "parameters": [p.detach().clone() for p in network.parameters()],
    }  # fmt: skip


def logits_of(model: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
    outputs = model(*inputs)
    return getattr(outputs, "logits", outputs)  # Hugging Face's models return several things


@torch.no_grad()
def accuracy_of(model: nn.Module, samples: TensorDataset) -> float:
    model.eval()
    *inputs, labels = samples.tensors
    return (logits_of(model, inputs).argmax(-1) == labels).float().mean().item()


def compare_accountants(options: argparse.Namespace) -> dict[str, list[float]]:
    """Returns ε after each epoch by accountant, and with noise that a scheduler lets decay.

    `gdp` only approximates: do not publish its ε.
    """
    runs = {accountant: (accountant, 1.0) for accountant in ACCOUNTANTS}
    runs["rdp, less noise"] = ("rdp", GAMMA)
    spent = {}
    for name, (accountant, gamma) in runs.items():
        print(f"accountant {name}, noise multiplier {options.noise_multiplier:g}")
        spent[name] = train(options, accountant, gamma)["epsilons"]
    print(f"\n{'epsilon':<16}" + "".join(f"  epoch {n + 1:2d}" for n in range(options.epochs)))
    for name, epsilons in spent.items():
        print(f"{name:<16}" + "".join(f"{epsilon:10.3f}" for epsilon in epsilons))
    return spent


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="opacus_tutorials", description="Run a task of Opacus's tutorials, on either library."
    )
    tasks = made.add_subparsers(dest="task", required=True, metavar="TASK")
    add_task(tasks, "images", "classify pictures of digits with a CNN", picture_parts)
    text = add_task(tasks, "text", "fine-tune a small BERT", text_parts)
    text.add_argument(
        "--train", choices=("last", "lora", "all"), default="last",
        help="what is not frozen: the last block, LoRA adapters or everything (last); `all` is not "
        "for Opacus, whose position embeddings need a batch",
    )  # fmt: skip
    add_task(tasks, "distributed", "the pictures, on several ranks", picture_parts)
    add_task(
        tasks, "accounting", "compare what accountants say", picture_parts,
        run=compare_accountants, samples=1024, epochs=2,
    )  # fmt: skip
    return made


def add_task(
    tasks: Any, name: str, does: str, parts: Callable[..., Parts],
    run: Callable[..., Any] = train, samples: int = 4096, epochs: int = 5,
) -> argparse.ArgumentParser:  # fmt: skip
    """Adds a subcommand with the options that it uses."""
    made = tasks.add_parser(name, help=does, description=f"{does[0].upper()}{does[1:]}.")
    made.set_defaults(run=run, parts=parts)
    made.add_argument(
        "--engine", choices=ENGINES, default=ENGINES[0],
        help=f"which package makes the training private ({ENGINES[0]})",
    )  # fmt: skip
    budget = ("epsilon", float, 8.0, "what the run may spend")
    noise = ("noise-multiplier", float, 1.0, "standard deviation of the noise, in units of C")
    rows: list[tuple[str, type, float, str]] = [
        ("epochs", int, epochs, "how often a sample takes part, on average"),
        ("samples", int, samples, "to train on"),
        ("batch-size", int, 256, "samples per step over all ranks, on average"),
        ("max-physical-batch-size", int, 128, "samples in memory at a time"),
        ("learning-rate", float, 1e-2, "learning rate of Adam"),
        budget if run is train else noise,
        ("delta", float, 1e-4, "probability that the bound fails; below 1/samples"),
        ("max-grad-norm", float, 1.0, "norm C that a sample's gradient is clipped to"),
    ]
    for option, kind, default, what in rows:
        made.add_argument(
            f"--{option}", type=kind, default=default, metavar="N", help=f"{what} ({default})"
        )
    made.add_argument(
        "--seed", type=int, default=0, metavar="N",
        help="seed of data and initial parameters, never of noise and batches (0)",
    )  # fmt: skip
    return made


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the options; a wrong one ends the program with status 2 and one line."""
    made = parser()
    options = made.parse_args(arguments)
    for name, value in vars(options).items():
        if isinstance(value, int | float) and not value > 0 and name != "seed":
            made.error(f"--{name.replace('_', '-')} is {value}: give a number above 0")
    return options


@ending_quietly
def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = parse(arguments)
    for repeated in REPEATED:
        warnings.filterwarnings("ignore", message=repeated)
    try:
        if options.task != "distributed":
            options.run(options)
        elif launched():
            with process_group(find_hardware("cpu"), timeout_s=600):
                options.run(options)
        else:
            command = [sys.executable, "-m", "ddp_by_hand.examples.opacus_tutorials", *arguments]
            return run_ranks(command, 2).status
    except (ValueError, ImportError) as error:
        return refuse("opacus_tutorials", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
