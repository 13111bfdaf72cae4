"""Options of `experiments.price`, and what they are by default in each kind of step."""

import re
from argparse import ArgumentTypeError
from dataclasses import dataclass

from ddp_by_hand.experiments.price.models import MODELS
from ddp_by_hand.experiments.rounds import BASELINE, PER_LAYER, RoundOptions, Row, row_of
from ddp_by_hand.experiments.training import CHOICES, OPACUS, OURS
from ddp_by_hand.measure.options import flag, not_negative, option, positive

DEFAULT_NOISE, SECURE = "default", "secure"
VARIANTS = {  # kind of step -> variants by default; of noise they are --noise
    "": (BASELINE, OURS, "flash", "bookkeeping", "opacus_ghost"),
    "pairs": (BASELINE, OURS, "bookkeeping"),
    "sharded": (BASELINE, OURS, OURS + PER_LAYER, "flash"),
}
ROWS = {  # kind of step -> rows by default, of models that are not tiny
    "noise": (Row(8, 1024), Row(64, 1024)),
    "pairs": (Row(4, 512), Row(8, 512), Row(4, 1024)),
    "sharded": (Row(2, 1024), Row(2, 2048), Row(2, 4096)),
}
OWN = {  # kind of step -> options that no other has
    "": ("compile", "profile"),
    "noise": ("part",),
    "pairs": ("rank", "checkpointing"),
    "sharded": ("num_processes", "timeout"),
}


def noise_of(text: str) -> str:
    """Parses `default`, `secure` or such as `bands_8`."""
    if text not in (DEFAULT_NOISE, SECURE) and not re.fullmatch(r"bands_[1-9]\d*", text):
        raise ArgumentTypeError(f"{text!r} is none of default, secure, and such as bands_8")
    return text


# fmt: off
@dataclass(frozen=True)
class Options(RoundOptions):
    model: str | None = option(None, choices=tuple(MODELS), aliases=("--model-name",), help=(
        "shape of the network (default: llama-3.2-1b; with --sharded llama-3.1-8b)"))
    layers: int | None = option(None, "decoder layers (default: the model's)", check=positive)
    rows: tuple[Row, ...] | None = option(None, metavar="BxT", type=row_of, unique=True, help=(
        "samples (of a rank) or pairs x tokens of each (default: those of the model and the step)"))
    variants: tuple[str, ...] | None = option(None, choices=CHOICES, unique=True, metavar="VARIANT",
        help=f"of {', '.join(CHOICES)} (default: those of the step)")
    warm_up: int = option(4, "steps of a round that are not timed: checks are in the first, the "
        "second and the fourth", check=not_negative)
    compile: bool = option(False, "compile each decoder layer, in all variants")
    profile: bool = option(False, "print the slowest kernels")
    noise: tuple[str, ...] | None = option(None, group="steps that differ in their noise",
        metavar="NOISE", type=noise_of, unique=True, help="default, secure, and such as bands_8")
    part: int = option(8, "samples of a batch that are computed at once", check=positive)
    pairs: bool = option(False, "TRL's steps on preference pairs", group="steps on pairs")
    rank: int = option(16, "of the adapters", check=positive)
    checkpointing: bool = option(False, "recompute activations, in all variants (TRL's default)")
    sharded: bool = option(False, "steps under FSDP2 on all ranks", group="sharded steps")
    num_processes: int | None = option(None, metavar="N", check=positive,
        help="ranks, unless torchrun says it (default: one per GPU, two on a CPU)")
    timeout: float = option(300.0, metavar="S", check=positive,
        help="seconds without progress after which the run ends")
# fmt: on

    def __post_init__(self) -> None:
        kinds = [kind for kind in ROWS if getattr(self, kind)]
        if len(kinds) > 1:
            raise ValueError(f"{' and '.join(map(flag, kinds))}: give one of them")
        for kind, names in OWN.items():
            for name in names:
                if getattr(self, name) != getattr(Options, name) and kind != self.kind:
                    cure = f"give {flag(kind)} too" if kind else f"leave {flag(self.kind)} out"
                    raise ValueError(f"{flag(name)}: {cure}")
        others = [name for name in self.variants or () if name.startswith(OPACUS)]
        if self.kind and others:
            raise ValueError(f"--variants {others[0]}: leave {flag(self.kind)} out")
        if self.noise:
            self._check_noise(self.noise)

    def _check_noise(self, noise: tuple[str, ...]) -> None:
        if self.variants:
            raise ValueError("--variants: --noise has them, leave one of the two out")
        if DEFAULT_NOISE not in noise:
            raise ValueError(f"--noise has no {DEFAULT_NOISE}, to which ratios are: add it")
        for row in self.rows or ():
            if row.samples > self.part and row.samples % self.part:
                raise ValueError(
                    f"--rows {row} has no whole number of parts of {self.part}: give another "
                    "--part or another number of samples"
                )

    @property
    def kind(self) -> str:
        """Returns the kind of step: `noise`, `pairs`, `sharded`, or empty for a plain one."""
        return next((kind for kind in ROWS if getattr(self, kind)), "")
