"""What the options mean together, checked before any worker starts."""

import argparse
import errno
import functools
import hashlib
import math
import os
import re
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from ddp import implementation
from lm.data import Batches, Corpus, open_data
from lm.model import PRESETS, ModelConfig


@dataclass(frozen=True)
class Settings:
    """What one call of the benchmark does; sizes are per rank, sequences in tokens."""

    implementations: tuple[str, ...]
    model: ModelConfig
    batch_size: int
    bucket_size_mb: float | None
    num_epochs: int
    warmup_epochs: int
    steps_per_epoch: int
    rounds: int
    seed: int
    dtype: str
    compile: bool
    data: str
    timeout_s: float
    output_dir: Path

    @property
    def warmup_steps(self) -> int:
        return self.warmup_epochs * self.steps_per_epoch

    @property
    def num_steps(self) -> int:
        return self.num_epochs * self.steps_per_epoch

    def identity(self) -> dict:
        """What makes two measurements comparable: everything but names, order and places."""
        skipped = {"implementations", "output_dir", "rounds", "timeout_s"}
        return {k: v for k, v in asdict(self).items() if k not in skipped}


def settings_from(options: argparse.Namespace, device_type: str, default_folder: Path) -> Settings:
    """Check what the options mean together.

    Raises:
        ValueError: one line that names the option, what is wrong, and what to do.
    """
    _require_positive(options)
    names = _names(options)
    if options.warmup_epochs > options.num_epochs:
        raise ValueError(
            f"--warmup-epochs {options.warmup_epochs} exceeds --num-epochs "
            f"{options.num_epochs}: warmup is a part of them, give no more"
        )
    if options.warmup_epochs == options.num_epochs and not options.profile:
        raise ValueError(
            f"--warmup-epochs {options.warmup_epochs} leaves no epoch to time, "
            "give a larger --num-epochs"
        )
    settings = Settings(
        implementations=tuple(names),
        model=_model(options, device_type),
        batch_size=options.batch_size,
        bucket_size_mb=options.bucket_size_mb,
        num_epochs=options.num_epochs,
        warmup_epochs=options.warmup_epochs,
        steps_per_epoch=options.steps_per_epoch or (3 if options.profile else 6),
        rounds=options.rounds,
        seed=options.seed,
        dtype=options.dtype,
        compile=options.compile,
        data=_data_source(options.data),
        timeout_s=options.timeout,
        output_dir=options.output_dir or default_folder,
    )
    batches_for(settings, rank=0, world_size=1)  # unreadable, empty or too short a text
    return settings


def check_folder(option: str, folder: Path, create: bool) -> None:
    """Can files be written there? Raises ValueError, in one line that names the option, if not."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise ValueError(f"{option} {folder}: {existing} is a file, name a folder")
    try:
        if create:
            folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder if create else existing, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ValueError(
            f"{option} {folder}: cannot be written to ({error.strerror}), name another folder"
        ) from error


def label(name: str) -> str:
    """What an implementation is called in tables and files: a plug-in by its class."""
    return name.rpartition(":")[2]


@functools.cache
def source_digest(name: str) -> str | None:
    """Of a plug-in's file: an edited one is another implementation, and is measured anew."""
    path = name.rpartition(":")[0]
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16] if path else None


def batches_for(settings: Settings, rank: int, world_size: int) -> Batches:
    return Batches(
        _corpus(settings.data, settings.model.vocab_size),
        batch_size=settings.batch_size,
        context_length=settings.model.context_length,
        rank=rank,
        world_size=world_size,
        seed=settings.seed,
    )


@functools.cache
def _corpus(source: str, vocab_size: int) -> Corpus:
    """Read once a process: every implementation trains on the same text."""
    return open_data(source, vocab_size)


def _names(options: argparse.Namespace) -> list[str]:
    names, option = options.implementations, "--implementations"
    if options.profile_implementation and not options.profile:
        raise ValueError("--profile-implementation: give --profile too")
    if options.profile and options.profile_implementation not in (None, "all"):
        names, option = [options.profile_implementation], "--profile-implementation"
    for name in names:
        try:
            implementation(name)
        except ValueError as error:
            raise ValueError(f"{option}: {error}") from error
    labels = [label(name) for name in names]
    twice = next((one for one in labels if labels.count(one) > 1), None)
    if twice:
        raise ValueError(f"{option}: {twice} appears twice, give each name once")
    return names


def _model(options: argparse.Namespace, device_type: str) -> ModelConfig:
    preset = options.preset or ("small" if device_type == "cuda" else "laptop")
    names = {field.name for field in fields(ModelConfig)}
    given = {k: v for k, v in vars(options).items() if k in names and v is not None}
    try:
        return replace(PRESETS[preset], **given)
    except ValueError as error:
        raise ValueError(_with_options(str(error), names)) from error


def _with_options(message: str, fields: set[str]) -> str:
    """`d_model` is what the model calls it; the user knows it as `--d-model`."""
    names = "|".join(sorted(fields))
    return re.sub(rf"\b({names})\b", lambda m: "--" + m[0].replace("_", "-"), message)


def _data_source(source: str) -> str:
    """A path is made absolute: it names the same text when a resumed run starts elsewhere."""
    if source in ("stdlib", "synthetic", ""):  # an empty path would be the current folder
        return source
    return str(Path(source).expanduser().absolute())


def _require_positive(options: argparse.Namespace) -> None:
    sizes = [
        "d_model", "num_layers", "num_heads", "d_ff", "vocab_size", "context_length", "batch_size",
        "num_epochs", "steps_per_epoch", "rounds", "num_processes", "bucket_size_mb", "timeout",
    ]  # fmt: skip
    for name in sizes:
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} {value}: give a positive number")
    for name in ("warmup_epochs", "seed"):
        if getattr(options, name) < 0:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(options, name)}: give 0 or more")
