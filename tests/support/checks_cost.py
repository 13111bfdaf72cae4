"""Prints what looking for samples that see each other costs in a run of 1,000 steps.

`python -m tests.support.checks_cost` times `lm`'s transformer on one CPU thread, in process time.
`python -m tests.support.checks_cost --device cuda` times GPT-2, BERT-base and ViT-B/16 in bfloat16,
built from their configurations, and counts how often the host waits for the GPU. Ten of 1,000 steps
are checked: 1, 2, 4, ..., 512. Each network is trained for a step before the one that is measured:
what only the first check of a process takes, to load kernels and parts of PyTorch, is told apart.
"""

import argparse
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import mean, median
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ddp_by_hand.lm.model import ModelConfig, Transformer
from dp_clipping import PrivacyEngine
from dp_clipping.guard.guard import LayoutDiscovery
from dp_clipping.guard.losses import Criterion, Watched

CHECKS = {"network": (LayoutDiscovery, "ensure"), "losses' graph": (Watched, "check_graph"),
          "criterion": (Criterion, "check")}  # fmt: skip
STEPS, COUNTED = 32, 16  # in step `COUNTED` the host's waits are counted, which takes time

Data = tuple[torch.Tensor, torch.Tensor]


class Logits(nn.Module):
    """Calls a Hugging Face network for its logits."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x).logits


def tokens(rows: int, length: int, vocabulary: int) -> Data:
    ids = torch.randint(vocabulary, (rows, length))
    return ids, ids.roll(-1, 1)


def lm(rows: int) -> tuple[nn.Module, Data]:
    config = ModelConfig(d_model=128, num_layers=4, num_heads=4, d_ff=512)
    return Transformer(config), tokens(rows, 128, 256)


def gpt2(rows: int) -> tuple[nn.Module, Data]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(use_cache=False)
    return Logits(GPT2LMHeadModel(config)), tokens(rows, 1024, config.vocab_size)


def bert(rows: int) -> tuple[nn.Module, Data]:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(num_labels=3)
    ids, _ = tokens(rows, 128, config.vocab_size)
    return Logits(BertForSequenceClassification(config)), (ids, torch.randint(3, (rows,)))


def vit(rows: int) -> tuple[nn.Module, Data]:
    from transformers import ViTConfig, ViTForImageClassification

    network = ViTForImageClassification(ViTConfig(num_labels=1000))
    return Logits(network), (torch.randn(rows, 3, 224, 224), torch.randint(1000, (rows,)))


ROWS = {
    "lm 4 x 128": (lm, 4), "lm 8 x 128": (lm, 8), "lm 32 x 128": (lm, 32),
    "gpt2 16 x 1024": (gpt2, 16), "bert 64 x 128": (bert, 64), "vit 64 x 224": (vit, 64),
}  # fmt: skip


class Clock:
    """Seconds of one thread of the host, or until a GPU has done all that it was given."""

    def __init__(self, device: torch.device):
        self._device = device

    def __call__(self) -> float:
        if self._device.type != "cuda":
            return time.process_time()
        torch.cuda.synchronize(self._device)
        return time.perf_counter()


@contextmanager
def timed(spent: dict[str, float], clock: Clock) -> Iterator[None]:
    """Inside, the seconds of each check are added to its number in `spent`."""

    def around(name: str, function: Callable) -> Callable:
        def call(*args, **kwargs):
            start = clock()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] += clock() - start

        return call

    patches = [
        patch.object(owner, method, around(name, getattr(owner, method)))
        for name, (owner, method) in CHECKS.items()
    ]
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in patches:
            one.stop()


def training(name: str, device: torch.device) -> Callable[[], None]:
    """Returns a private step of a network on one batch, as a user writes it."""
    torch.manual_seed(0)
    build, rows = ROWS[name]
    network, data = build(rows)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    network.to(device, dtype).train()
    dataset: Any = TensorDataset(*(x.repeat(4, *[1] * (x.dim() - 1)) for x in data))
    model, optimizer, criterion, _ = PrivacyEngine(accountant="rdp").make_private(
        module=network, optimizer=torch.optim.AdamW(network.parameters()),
        criterion=nn.CrossEntropyLoss(), data_loader=DataLoader(dataset, batch_size=rows),
        noise_multiplier=1.0, max_grad_norm=1.0, poisson_sampling=False,
    )  # fmt: skip
    x, y = (z.to(device, dtype) if z.is_floating_point() else z.to(device) for z in data)

    def step() -> None:
        outputs = model(x)
        if y.dim() == 1:
            loss = criterion(outputs, y)
        else:
            loss = criterion(outputs.flatten(0, 1), y.flatten(), shape=outputs.shape)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def waits(step: Callable[[], None]) -> int:
    """Returns how often the host waits for the GPU in a step."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in said)


def cost(name: str, device: torch.device) -> str:
    clock, spent = Clock(device), dict.fromkeys(CHECKS, 0.0)
    with timed(spent, clock):
        training(name, device)()
    cold = sum(spent.values())
    step = training(name, device)
    plain: list[float] = []
    checks: dict[int, dict[str, float]] = {}
    counts: list[int] = []
    with timed(spent, clock):
        for number in range(1, STEPS + 1):
            is_counted = device.type == "cuda" and number in (COUNTED, COUNTED + 1)
            spent |= dict.fromkeys(spent, 0.0)
            start = clock()
            if is_counted:
                counts.append(waits(step))
                continue
            step()
            if number & (number - 1):
                plain.append(clock() - start)
            else:
                checks[number] = dict(spent)
    seconds = median(plain)
    warm = sum(checks[1].values())
    first = warm / seconds
    later = {key: mean([checks[n][key] for n in checks if n > 1]) / seconds for key in CHECKS}
    ten = first + 9 * sum(later.values())
    parts = ", ".join(f"{key} {value:.2f}" for key, value in later.items())
    said = f"; the host waits {counts[0] - counts[1]} times more" if counts else ""
    return (
        f"{name:14}: a step {seconds * 1e3:.0f} ms, the first check {first:.1f} steps, a later one "
        f"{sum(later.values()):.2f} ({parts}{said}): {ten / 10:.2f} %; once a process "
        f"{cold - warm:.1f} s more"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    known = ", ".join(map(repr, ROWS))
    parser.add_argument(
        "--rows", nargs="+", choices=ROWS, metavar="ROW", help=f"by default the device's; {known}"
    )
    options = parser.parse_args()
    device = torch.device(options.device)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    is_cpu = device.type == "cpu"
    for name in options.rows or [name for name in ROWS if name.startswith("lm") == is_cpu]:
        try:
            print(cost(name, device), flush=True)
        except (ImportError, torch.OutOfMemoryError) as error:
            print(f"{name:14}: {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
