"""One private training of images, by this package or by Opacus, with equal σ."""

import copy
import math
import time
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ddp_by_hand.experiments.records.data import Images
from ddp_by_hand.experiments.records.networks import NETWORKS
from ddp_by_hand.experiments.records.rows import Row
from ddp_by_hand.experiments.records.scattering import scattered
from ddp_by_hand.experiments.records.texts import private_text
from ddp_by_hand.experiments.records.views import views
from ddp_by_hand.lm.timing import PeakMemory
from dp_clipping import BatchMemoryManager, PrivacyEngine

OURS, OPACUS = "ours", "opacus"
FIXED_SEED = "noise and sampling come from a fixed seed"  # these data are public


class Split(NamedTuple):
    """Features and labels on the device, to train on and to score.

    Of text they are bytes [N, T] and the bytes that follow.
    """

    train: Tensor
    labels: Tensor
    test: Tensor
    answers: Tensor


def sequences(device: torch.device) -> Split:
    """Returns the private text on the device."""
    text = private_text()
    train, test = text.training.to(device).long(), text.held_out.to(device).long()
    return Split(train[:, :-1], train[:, 1:], test[:, :-1], test[:, 1:])


def features_of(images: Images, kind: str, device: torch.device) -> Split:
    """Returns features `scatter`, or `pixels` from −1 to 1, of all images on the device."""

    def made(pixels: Tensor) -> Tensor:
        if kind == "scatter":
            return scattered(pixels, device)
        return pixels.to(device).float().div_(127.5).sub_(1)

    return Split(
        made(images.train), images.labels.to(device), made(images.test), images.answers.to(device)
    )


def held_out(split: Split, count: int) -> Split:
    """Returns a split without test images: the last training images are scored instead."""
    kept, scored = split.train[:-count], split.train[-count:]
    return Split(kept, split.labels[:-count], scored, split.labels[-count:])


def normalised(split: Split, groups: int) -> Split:
    """Returns it with mean 0 and variance 1 over each group of an image's channels.

    An image's features depend on that image alone, so this costs no privacy.
    """
    train, test = (F.group_norm(x, groups) for x in (split.train, split.test))
    return split._replace(train=train, test=test)


def run(row: Row, engine: str, seed: int, split: Split) -> dict[str, Any]:
    """Trains, and returns what a row of results records.

    `score` is that of a running mean of the parameters, in the row's unit; `epsilon` is by privacy
    loss distributions; `step_ms` is the mean of all steps, as a list. The seed fixes initial
    parameters, batches and noise. `seconds` includes a pretraining, `step_ms` does not.
    """
    device = split.train.device
    sigma = noise_multiplier(row, len(split.train))
    torch.manual_seed(seed)
    kind = NETWORKS[row.network]
    network = kind.made(*split.train.shape[1:3]).to(device)
    peak, began = PeakMemory(device), time.perf_counter()
    kind.pretrain(network, row.pretraining)
    network = kind.adapt(network)
    mean = copy.deepcopy(network).requires_grad_(False)
    started = time.perf_counter()
    steps, spent = STEPS[engine](row, network, split, sigma, seed)
    for step in range(1, row.steps + 1):
        next(steps)
        torch._foreach_lerp_(
            list(mean.parameters()), [p.detach() for p in network.parameters()],
            1 - min(row.decay, step / (step + 9)),
        )  # fmt: skip
    if device.type == "cuda":
        torch.cuda.synchronize()
    ended = time.perf_counter()
    return {
        "score": score_of(mean, split.test, split.answers),
        "epsilon": spent(),
        "noise_multiplier": sigma,
        "seconds": ended - began,
        "step_ms": [(ended - started) / row.steps * 1e3],
        "peak_memory_bytes": peak.bytes(),
    }


@torch.no_grad()
def score_of(network: nn.Module, features: Tensor, labels: Tensor) -> float:
    """Returns the percentage of labels that the network finds; of text, nats per byte."""
    outputs = torch.cat([network(part) for part in features.split(1000)])
    if labels.dim() > 1:
        return float(F.cross_entropy(outputs, labels))
    return 100 * float((outputs.argmax(1) == labels).float().mean())


def gathered(row: Row, split: Split) -> DataLoader:
    """Returns a loader of the training images, whose batches are taken on the device at once.

    With several views, `row.views` examples side by side are views of one image.
    """

    def batch(examples: Sequence[tuple[int]]) -> tuple[Tensor, Tensor]:
        found = torch.from_numpy(np.asarray(examples).reshape(-1))
        if split.labels.is_cuda:  # a copy from other memory waits for the last step
            found = found.pin_memory().to(split.labels.device, non_blocking=True)
        places = found // row.views
        images, labels = split.train[places], split.labels[places]
        return (views(images) if row.views > 1 else images), labels

    count = len(split.train)
    examples = Numbers(count * row.views)
    return DataLoader(examples, -(-count // row.batches) * row.views, collate_fn=batch)


class Numbers(Dataset):
    """The numbers of examples, of which a loader takes a batch at once: an array, not a list."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[int]:
        return (number,)  # Opacus wants a tuple

    def __getitems__(self, numbers: list[int]) -> np.ndarray:
        return np.array(numbers, dtype=np.int64)


@cache
def noise_multiplier(row: Row, samples: int) -> float:
    """Returns σ with which the row's steps end at (ε, δ), by this package's account."""
    layer = nn.Linear(1, 1)
    _, optimizer, *_ = PrivacyEngine().make_private_with_epsilon(
        module=layer, optimizer=torch.optim.SGD(layer.parameters(), lr=1.0), max_grad_norm=1.0,
        data_loader=DataLoader(range(samples), -(-samples // row.batches)),
        target_epsilon=row.epsilon, target_delta=row.delta, epsilon_tolerance=1e-3 * row.epsilon,
        **sampled(row),
    )  # fmt: skip
    return optimizer.noise_multiplier


def sampled(row: Row) -> dict[str, Any]:
    """Returns the arguments that say how batches are drawn, all of them public constants."""
    if row.sampling == "poisson":
        return {"sample_rate": 1 / row.batches, "steps": row.steps}
    return {"sampling": row.sampling, "steps": row.batches, "epochs": row.epochs}


def ours(row: Row, network: nn.Module, split: Split, sigma: float, seed: int) -> tuple:
    """Returns steps to take one by one, and what gives the ε that they have spent.

    On a GPU a step is one CUDA graph, but where a unit of privacy is several views.
    """
    engine, arguments = PrivacyEngine(), sampled(row)
    arguments.pop("epochs", None)
    is_graph = split.train.is_cuda and row.views == 1
    mean = len(split.train) / row.batches
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=FIXED_SEED)
        warnings.filterwarnings("ignore", message=".*runs as bookkeeping")
        model, optimizer, criterion, loader = engine.make_private(
            module=network, optimizer=optimizer_of(row, network, is_graph),
            criterion=nn.CrossEntropyLoss(), data_loader=gathered(row, split),
            noise_multiplier=sigma, max_grad_norm=row.clip, expected_batch_size=round(mean),
            examples_per_unit=row.views, cuda_graph=is_graph,
            noise_generator=torch.Generator().manual_seed(seed), **arguments,
        )  # fmt: skip

    def body(x: Tensor, y: Tensor) -> None:
        criterion(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    step = optimizer.graphed(body) if is_graph else body
    # A larger Poisson batch, one in a billion, is split.
    physical = row.physical or math.ceil(mean + 6 * math.sqrt(mean))

    def steps() -> Iterator[None]:
        while True:
            with BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=physical * row.views,
                optimizer=optimizer, pad_batches=is_graph,
            ) as pieces:  # fmt: skip
                for x, y in pieces:
                    before = optimizer.steps
                    step(x, y)
                    if optimizer.steps > before:
                        yield

    def spent() -> float:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=FIXED_SEED)
            return engine.get_epsilon(row.delta)

    return steps(), spent


def opacus(row: Row, network: nn.Module, split: Split, sigma: float, seed: int) -> tuple:
    """Returns the same of Opacus, whose ε is computed by this package: its σ and q are equal.

    Raises ValueError for a row that Opacus has no counterpart of.
    """
    from opacus import PrivacyEngine as Engine
    from opacus.utils.batch_memory_manager import BatchMemoryManager as Manager

    if row.views > 1 or row.sampling != "poisson":
        raise ValueError(
            f"{row.name}: Opacus has no units of several examples and no {row.sampling} batches "
            "beside Poisson ones: leave --engine out"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer, loader = Engine().make_private(
            module=network, optimizer=optimizer_of(row, network),
            data_loader=gathered(row, split), noise_multiplier=sigma, max_grad_norm=row.clip,
        )  # fmt: skip
    criterion = nn.CrossEntropyLoss()
    taken = 0

    def steps() -> Iterator[None]:
        nonlocal taken
        while True:
            with Manager(
                data_loader=loader, max_physical_batch_size=row.physical or len(split.train),
                optimizer=optimizer,
            ) as pieces:  # fmt: skip
                for x, y in pieces:
                    with warnings.catch_warnings():
                        warnings.filterwarnings("ignore", message="Full backward hook is firing")
                        criterion(model(x), y).backward()
                    optimizer.step()
                    is_whole = not optimizer._is_last_step_skipped
                    optimizer.zero_grad()
                    if is_whole:
                        taken += 1
                        yield

    def spent() -> float:
        from dp_clipping.accounting import pld

        return pld.epsilon([(sigma, 1 / row.batches, taken)], row.delta)

    return steps(), spent


STEPS = {OURS: ours, OPACUS: opacus}


def optimizer_of(row: Row, network: nn.Module, is_graph: bool = False) -> torch.optim.Optimizer:
    trained = [p for p in network.parameters() if p.requires_grad]
    if row.optimizer == "adam":
        return torch.optim.Adam(trained, lr=row.rate, capturable=is_graph)
    return torch.optim.SGD(trained, lr=row.rate, momentum=row.momentum)
