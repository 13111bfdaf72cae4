"""Train the shared transformer on text under a stated (ε, δ).

    python -m ddp_by_hand.examples.private_text                 # Python's own sources; some minutes
    python -m ddp_by_hand.examples.private_text --data letters/ --epsilon 4
    torchrun --nproc_per_node=4 -m ddp_by_hand.examples.private_text  # the same run on four ranks

The privacy unit is one sequence: the text is cut into sequences of T + 1 bytes that do not overlap,
and (ε, δ) bounds what anyone can tell from the trained parameters about whether one of them was
there. A file, or an author, spans many sequences: for k of them the bound is kε, and δ grows faster
than k times (C. Dwork and A. Roth, The Algorithmic Foundations of Differential Privacy, theorem
2.2). If authors are what you must protect, give each one sample.

Files in the output folder, sorted by who may see them:

| file | |
| --- | --- |
| `model.pt` | covered by ε: this one may be published |
| `settings.json` | public: options and sizes |
| `training.png`, `not_covered_by_epsilon.jsonl` | for you alone: losses, clipped fractions |
| `checkpoint.pt`, `checkpoint.pt.key` | to resume; whoever has both can subtract the noise |
"""

import hashlib
import json
import shlex
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from ddp import wrap
from ddp_by_hand.examples.private_text_options import (
    DOES,
    EXAMPLES,
    PROGRAM,
    RESUMABLE,
    Options,
)
from ddp_by_hand.examples.private_text_picture import draw_training
from ddp_by_hand.lm.data import open_data
from ddp_by_hand.lm.model import ModelConfig, Transformer
from ddp_by_hand.lm.runtime import (
    find_hardware,
    launched,
    launched_rank,
    launched_world_size,
    process_group,
    seed_everything,
    typed_command,
)
from ddp_by_hand.lm.schedule import learning_rate
from ddp_by_hand.measure.command_line import INTERRUPTED, bad_input
from ddp_by_hand.measure.files import append_line, read_lines, replacing, write_atomically
from ddp_by_hand.measure.options import as_arguments, program
from dp_clipping import BatchMemoryManager, PrivacyEngine

HELD_OUT = 20  # one sequence of so many is never trained on: the last ones of the text
EVALUATED = 1024  # of these, so that looking does not take longer than training
WARMUP_STEPS = 20
BETAS = (0.9, 0.98)
NATS_PER_BIT = float(np.log(2))


@dataclass(frozen=True)
class Text:
    """Sequences [n, T + 1] of bytes, disjoint, and a digest of the text they come from."""

    training: Tensor
    held_out: Tensor
    digest: str


@program(PROGRAM, Options, needs=("matplotlib",), description=DOES, epilog=EXAMPLES)
def main(options: Options) -> int:
    """Trains, or goes on from a checkpoint. Returns 0, or 130 after Ctrl-C."""
    warnings.filterwarnings("ignore", message="Optimal order is the")  # in the search for the noise
    with bad_input():
        text = cut_sequences(options.data, options.context_length)
        settings = public_settings(options, text)
        check_folder(options.output_dir, settings, text)
        find_hardware(options.device)
    try:
        with this_device(options.device) as device:
            with bad_input():
                training = Training(options, settings, text, device)
            training.run()
    except KeyboardInterrupt:
        if launched_rank() == 0:
            again = shlex.join(typed_command(PROGRAM, as_arguments(options)))
            print(f"\nstopped; to continue from the last checkpoint:\n  {again}")
        return INTERRUPTED
    return 0


def cut_sequences(source: str, context_length: int) -> Text:
    """Cuts the text of `--data` into sequences; raises ValueError if it is too short or no text."""
    if source == "synthetic":
        raise ValueError("--data synthetic is no text: give a file, a folder or stdlib")
    tokens = open_data(source, vocab_size=256).tokens
    length = context_length + 1
    count = len(tokens) // length
    if count < HELD_OUT:
        raise ValueError(
            f"--data {source!r} makes {count} sequences of --context-length + 1 = {length} bytes, "
            f"and {HELD_OUT} are needed: give more text or a shorter context"
        )
    sequences = torch.from_numpy(tokens[: count * length].reshape(count, length).copy())
    kept = count - count // HELD_OUT
    digest = hashlib.blake2b(tokens.tobytes(), digest_size=16).hexdigest()
    return Text(sequences[:kept], sequences[kept:][:EVALUATED], digest)


def public_settings(options: Options, text: Text) -> dict:
    """Returns the settings of a run with its δ; raises ValueError if the text does not allow it."""
    sequences = len(text.training)
    settings = {k: v for k, v in vars(options).items() if k not in RESUMABLE} | {
        "sequences": sequences
    }
    # Far below 1/n: a mechanism that publishes one random sequence of n has δ = 1/n.
    settings["delta"] = sequences**-1.1 if options.delta is None else options.delta
    if settings["delta"] >= 1 / sequences:
        raise ValueError(
            f"--delta is {options.delta}, not below 1/sequences = {1 / sequences:.1e}: with such a "
            "δ a sequence may be published outright; leave it out, or give a smaller one"
        )
    if options.batch_size > sequences:
        raise ValueError(
            f"--batch-size is {options.batch_size}, and there are {sequences} sequences: give fewer"
        )
    return settings


def check_folder(folder: Path, settings: dict, text: Text) -> None:
    """Raises ValueError if the folder holds another run than this one."""
    try:
        saved = json.loads((folder / "settings.json").read_text())
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--output-dir {str(folder)!r}: settings.json cannot be read ({error}): give another "
            "folder"
        ) from error
    for name, value in settings.items():
        if saved.get(name) != value:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"{option} is {value}, and {saved.get(name)} in the run that "
                f"--output-dir {str(folder)!r} holds: give that value, or another folder"
            )
    header = read_lines(folder / "not_covered_by_epsilon.jsonl")[:1]
    if header and header[0]["data_digest"] != text.digest:
        raise ValueError(
            f"--data differs from the text of the run that --output-dir {str(folder)!r} holds: "
            "ε counts steps on one data set; give the same text, or another folder"
        )


@contextmanager
def this_device(choice: str) -> Iterator[torch.device]:
    """Yields the device of this process; under torchrun, inside a process group."""
    if not launched() or launched_world_size() == 1:
        yield torch.device(find_hardware(choice, 1).device_type)
        return
    with process_group(find_hardware(choice), timeout_s=300) as worker:
        yield worker.device


class Training:
    """One private run, from the beginning or from its checkpoint."""

    def __init__(self, options: Options, settings: dict, text: Text, device: torch.device):
        self.options, self.settings, self.text, self.device = options, settings, text, device
        self.is_first = launched_rank() == 0
        self.log = options.output_dir / "not_covered_by_epsilon.jsonl"
        self.checkpoint = options.output_dir / "checkpoint.pt"
        seed_everything(options.seed)
        network = Transformer(
            ModelConfig(
                d_model=options.d_model,
                num_layers=options.num_layers,
                num_heads=options.num_heads,
                d_ff=options.d_ff,
                context_length=options.context_length,
            )
        ).to(device)
        self.parameters = sum(p.numel() for p in network.parameters())
        optimizer = torch.optim.Adam(network.parameters(), lr=options.learning_rate, betas=BETAS)
        self.engine = PrivacyEngine(accountant="prv")
        self.model, self.optimizer, self.criterion, self.loader = (
            self.engine.make_private_with_epsilon(
                module=wrap("ddp_bucketed", network) if dist.is_initialized() else network,
                optimizer=optimizer,
                criterion=nn.CrossEntropyLoss(),
                data_loader=DataLoader(TensorDataset(text.training), options.batch_size),
                target_epsilon=options.epsilon,
                target_delta=settings["delta"],
                epochs=options.epochs,
                max_grad_norm=options.max_grad_norm,
                grad_sample_mode=options.mode,
            )
        )
        self.steps = options.epochs * len(self.loader)

    def run(self) -> None:
        self._say(self._describe())
        self._restore()
        began, before = time.monotonic(), self.optimizer.steps
        while self.optimizer.steps < self.steps:
            self._train_epoch()
        if before < self.steps:
            self._say(f"{self.steps - before} steps in {time.monotonic() - began:.0f} s")
        self._finish()

    def _train_epoch(self) -> None:
        """Trains the rest of an epoch: Poisson batches, each in microbatches that fit in memory."""
        losses: list[Tensor] = []
        with BatchMemoryManager(
            data_loader=self.loader,
            max_physical_batch_size=self.options.max_physical_batch_size,
            optimizer=self.optimizer,
        ) as microbatches:
            for (sequences,) in microbatches:
                number = self.optimizer.steps
                losses.append(self._train(sequences.to(self.device).long()))
                if self.optimizer.steps > number:
                    self._look(torch.cat(losses))
                    losses.clear()
                self.optimizer.zero_grad()

    def _train(self, sequences: Tensor) -> Tensor:
        """Trains on one microbatch; returns its losses [B] in nats per byte."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(
                self.optimizer.steps + 1, WARMUP_STEPS, self.options.learning_rate
            )
        outputs = self.model(sequences[:, :-1])
        targets = rearrange(sequences[:, 1:], "b t -> (b t)")
        logits = rearrange(outputs, "b t v -> (b t) v")
        loss = self.criterion(logits, targets, shape=outputs.shape)
        loss.backward()
        self.optimizer.step()
        return loss.loss_per_sample.detach()

    def _look(self, losses: Tensor) -> None:
        """Logs what the step's samples looked like; at some steps reports and saves."""
        step, options = self.optimizer.steps, self.options
        norms = self.model.per_sample_gradient_norms
        sums = torch.stack(
            [losses.sum(), (norms > options.max_grad_norm).sum(), losses.new_tensor(len(losses))]
        ).double()
        if dist.is_initialized():
            dist.all_reduce(sums)
        total, clipped, count = sums.tolist()
        line = {"step": step}
        if count:
            line |= {"bits": total / count / NATS_PER_BIT, "clipped": clipped / count}
        is_last = step == self.steps
        reports = step % options.report_every == 0 or is_last
        if reports:
            line["held_out_bits"] = self._held_out_bits()
            line["epsilon"] = self.engine.get_epsilon(self.settings["delta"])
        if self.is_first:
            append_line(self.log, json.dumps(line))
        if reports:
            self._say(self._report(line))
        if step % options.checkpoint_every == 0 or is_last:
            self._save()

    def _held_out_bits(self) -> float:
        """Returns the bits per byte on sequences that are never trained on."""
        network, sequences = self.model.network, self.text.held_out.to(self.device).long()
        total = 0.0
        with torch.no_grad():
            for part in sequences.split(self.options.max_physical_batch_size):
                logits = rearrange(network(part[:, :-1]), "b t v -> (b t) v")
                targets = rearrange(part[:, 1:], "b t -> (b t)")
                total += cross_entropy(logits, targets, reduction="sum")
        return float(total) / sequences[:, 1:].numel() / NATS_PER_BIT

    def _restore(self) -> None:
        """Loads the checkpoint, or writes the first one: a run can be resumed at any time."""
        if self.checkpoint.exists():
            self.engine.load_checkpoint(path=self.checkpoint, **self._parts())
            if self.is_first:
                lines = [x for x in read_lines(self.log) if x.get("step", 0) <= self.steps_done]
                write_atomically(self.log, "".join(f"{json.dumps(x)}\n" for x in lines))
            if self.steps_done < self.steps:
                self._say(f"going on after step {self.steps_done}")
            return
        if self.is_first:
            folder = self.options.output_dir
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / "settings.json", json.dumps(self.settings, indent=1) + "\n")
            write_atomically(self.log, json.dumps({"data_digest": self.text.digest}) + "\n")
        self._save()

    @property
    def steps_done(self) -> int:
        return self.optimizer.steps

    def _save(self) -> None:
        self.engine.save_checkpoint(path=self.checkpoint, **self._parts())

    def _parts(self) -> dict:
        return {"module": self.model, "optimizer": self.optimizer, "data_loader": self.loader}

    def _finish(self) -> None:
        epsilon, delta = self.engine.get_epsilon(self.settings["delta"]), self.settings["delta"]
        folder = self.options.output_dir
        if self.is_first:
            with replacing(folder / "model.pt") as file:
                torch.save(self.model.network.state_dict(), file)
            draw_training(
                folder / "training.png",
                read_lines(self.log)[1:],
                unigram_bits=self._unigram_bits(),
                epsilon=self.options.epsilon,
                title=self._title(),
            )
        self._say(
            f"epsilon {epsilon:.3f} at delta {delta:.1e} for one sequence of "
            f"{self.options.context_length + 1} bytes, added or removed: {folder / 'model.pt'}\n"
            f"not covered by epsilon: {folder / 'training.png'}, {self.log}; "
            f"secret: {self.checkpoint}.key"
        )

    def _unigram_bits(self) -> float:
        """Returns the entropy of the held-out bytes' frequencies: the bits without context."""
        counts = np.bincount(self.text.held_out[:, 1:].flatten().numpy())
        shares = counts[counts > 0] / counts.sum()
        return float(-(shares * np.log2(shares)).sum())

    def _title(self) -> str:
        length = self.options.context_length + 1
        return (
            f"{self.parameters:,} parameters, {len(self.text.training):,} sequences of {length} "
            f"bytes, ({self.options.epsilon:g}, {self.settings['delta']:.1e})-private for each"
        )

    def _describe(self) -> str:
        options = self.options
        return (
            f"{self._title()}\n"
            f"{self.steps} steps of {options.batch_size} sequences on average, each drawn with "
            f"probability 1/{len(self.loader)}; clipped at {options.max_grad_norm:g}, noise "
            f"multiplier {self.optimizer.noise_multiplier:.3f}\n"
            f"bits per byte: 8 is a guess, {self._unigram_bits():.2f} uses how often bytes occur "
            f"(held-out sequences)\n"
            "               |     not covered by epsilon     |\n"
            "        step   |  training   clipped   held-out | epsilon spent"
        )

    def _report(self, line: dict) -> str:
        bits = f"{line['bits']:8.3f}" if "bits" in line else "  nobody"
        clipped = f"{line['clipped']:7.0%}" if "clipped" in line else "       "
        where = f"{line['step']:5d}/{self.steps}"
        return (
            f"{where:>12}   |  {bits}   {clipped}   {line['held_out_bits']:8.3f} "
            f"| {line['epsilon']:.2f}"
        )

    def _say(self, text: str) -> None:
        if self.is_first:
            print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
