"""Rows of text: language models over bytes, pretrained on public text, and planned ones."""

import sysconfig
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ddp_by_hand.examples.private_text import Text, cut_sequences
from ddp_by_hand.experiments.plan_privacy.calibrate import law_of, plan_check
from ddp_by_hand.experiments.plan_privacy.plan import Budget
from ddp_by_hand.experiments.plan_privacy.runs import CONTEXT, SmallRun, train
from ddp_by_hand.lm.model import ModelConfig, Transformer
from ddp_by_hand.lm.timing import PeakMemory

LAW = Path("results/plan-privacy-stdlib")  # of the clone
LICENSES = (Path("/usr/share/common-licenses"), Path("/usr/share/doc"))
PUBLIC_BYTES = 4_000_000
RANK = 4  # of LoRA
BATCH, RATE = 128, 3e-3  # of pretraining


class Language(nn.Module):
    """A transformer over bytes: [B, T] -> logits [B, 256, T], as cross-entropy takes them."""

    def __init__(self, length: int) -> None:
        super().__init__()
        shape = ModelConfig(
            d_model=64, num_layers=2, num_heads=4, d_ff=128, context_length=length
        )  # fmt: skip
        self.body = Transformer(shape)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.body(tokens).transpose(1, 2)


class LowRank(nn.Module):
    """A frozen linear layer plus a trained product of two small ones (Hu et al. 2021, LoRA)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        kept = {"bias": False, "device": base.weight.device}
        self.down = nn.Linear(base.in_features, rank, **kept)
        self.up = nn.Linear(rank, base.out_features, **kept)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def with_lora(network: nn.Module) -> nn.Module:
    """Freezes a network, and adds a trained term of low rank to each linear layer."""
    network.requires_grad_(False)
    for module in list(network.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, LowRank(child, RANK))
    return network


@cache
def private_text() -> Text:
    return cut_sequences("stdlib", CONTEXT)


@cache
def public_text() -> Tensor:
    """Returns sequences uint8 [N, T + 1] of license files of this machine's packages.

    Raises FileNotFoundError where there are none.
    """
    packages = Path(sysconfig.get_paths()["purelib"])
    paths = sorted(packages.glob("*.dist-info/**/LICENSE*"))
    paths += sorted(path for root in LICENSES for path in root.rglob("*"))
    text = _joined(path for path in paths if path.is_file())
    if len(text) < BATCH * (CONTEXT + 1):
        raise FileNotFoundError("no license files are found on this machine to pretrain on")
    count = len(text) // (CONTEXT + 1)
    tokens = np.frombuffer(text, np.uint8)[: count * (CONTEXT + 1)]
    return torch.from_numpy(tokens.reshape(count, CONTEXT + 1).copy())


def _joined(paths: Iterable[Path]) -> bytes:
    """Joins different texts, packed or plain ones, up to `PUBLIC_BYTES`."""
    parts: dict[bytes, None] = {}
    size = 0
    for path in paths:
        content = path.read_bytes()
        if b"\0" not in content and content not in parts and size < PUBLIC_BYTES:
            parts[content] = None
            size += len(content)
    return b"".join(parts)[:PUBLIC_BYTES]


def pretrain_text(network: nn.Module, steps: int) -> None:
    """Trains a `Language` on public text, without privacy."""
    if not steps:
        return
    device = next(network.parameters()).device
    text = public_text().to(device)
    optimizer = torch.optim.Adam(network.parameters(), lr=RATE)
    for _ in range(steps):
        some = text[torch.randint(len(text), (BATCH,)).to(device)].long()
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(some[:, :-1]), some[:, 1:]).backward()
        optimizer.step()
    optimizer.zero_grad()


@dataclass(frozen=True)
class Planned:
    """A language model whose size, batch and steps `plan_privacy` chooses, and whose loss it says.

    Attributes:
        compute: FLOPs of the training.
    """

    epsilon: float
    compute: float = 1.2e12
    method: str = "planned_lm"
    source: str = "plan_privacy, from twelve runs"
    published: None = None
    unit: ClassVar[str] = "nats per byte"
    grid: ClassVar[dict] = {}

    @property
    def name(self) -> str:
        return f"{self.method}@{self.epsilon:g}"

    def settings(self) -> dict[str, Any]:
        return asdict(self)

    def run(self, engine: str, seed: int, device: torch.device) -> dict[str, Any]:
        """Trains what the plan says, and returns what a row of results records.

        Raises ValueError for another engine than `"ours"`, FileNotFoundError without `LAW`.
        """
        if engine != "ours":
            raise ValueError(
                f"{self.name} is trained by plan_privacy, which has one engine: leave --engine out"
            )
        if not LAW.is_dir():
            raise FileNotFoundError(f"no {LAW} here: call the program in the root of the clone")
        text = private_text()
        examples = len(text.training)
        delta = examples**-1.1
        budget = Budget(self.epsilon, delta, examples, self.compute)
        _, width, chosen = plan_check(law_of(LAW), budget, "pld")
        planned = SmallRun(width, int(chosen.steps), int(chosen.batch), chosen.ratio, seed)
        on_device = replace(
            text, training=text.training.to(device), held_out=text.held_out.to(device)
        )
        peak, began = PeakMemory(device), time.perf_counter()
        found = train(planned, on_device, [planned.steps], delta)
        return {
            "score": found["losses"][planned.steps],
            "predicted": chosen.loss,
            "epsilon": found["epsilon"],
            "delta": delta,
            "noise_multiplier": planned.noise_multiplier,
            "parameters": found["parameters"],
            "seconds": time.perf_counter() - began,
            "step_ms": [found["seconds"] / planned.steps * 1e3],
            "peak_memory_bytes": peak.bytes(),
        }
