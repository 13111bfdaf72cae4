"""Train a WideResNet privately on pictures of digits, at several ε, and draw accuracy over ε.

    python -m ddp_by_hand.examples.private_images  # a small one: over 7 minutes
    python -m ddp_by_hand.examples.private_images --epsilons 2 4
    python -m ddp_by_hand.examples.private_images --depth 16 --factor 4 --size 32 \
        --images 16384 --epochs 12                             # WideResNet-16-4; needs a GPU

The recipe is that of De et al., Unlocking High-Accuracy Differentially Private Image Classification
through Scale (2022): GroupNorm in place of BatchNorm, large Poisson batches, plain SGD at a high
constant learning rate, the mean gradient of several views of a picture (`--views 4`), and
evaluation of a running mean of the parameters. The pictures are made here, of the fonts that
matplotlib ships (`examples.font_digits`); one picture is the unit of privacy. Each ε is a run of
its own, from the same first parameters. The last run is not private: as many steps of SGD with
momentum, without clipping and noise.

Writes `accuracy.json` and `accuracy.png`. Accuracies are of pictures that no run trains on, so they
say nothing of the ones that it does.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from ddp_by_hand.examples.font_digits import font_digits
from ddp_by_hand.experiments.networks.models import WideResNet
from ddp_by_hand.lm.runtime import find_hardware, seed_everything
from ddp_by_hand.measure.command_line import bad_input, check_folder
from ddp_by_hand.measure.files import write_atomically
from ddp_by_hand.measure.options import is_seed, option, positive, program
from ddp_by_hand.measure.picture import FAINT, frame, new_figure, save_picture
from dp_clipping import BatchMemoryManager, PrivacyEngine

HELD_OUT = 4096
DECAY = 0.98  # of the running mean of the parameters, a step
ORDINARY = "#009E73"
COLOURS = ("#8CC5E8", "#56B4E9", "#0072B2", "#003F63")


@dataclass(frozen=True)
class Options:
    epsilons: tuple[float, ...] = option(
        (0.5, 1.0, 3.0, 8.0), "budgets, each a run", metavar="ε", check=positive
    )
    delta: float = option(1e-5, "the other half of each budget", check=positive)
    epochs: int = option(10, "epochs of each run", check=positive)
    batch_size: int = option(512, "pictures of a step, on average", check=positive)
    max_physical_batch_size: int = option(
        512, "pictures, or views of some, that are in memory at a time", check=positive
    )
    views: int = option(
        1, "random moves of a picture in a step, whose mean gradient is clipped", check=positive
    )
    images: int = option(8192, "to train on", check=positive)
    size: int = option(16, "pixels of a picture's side", check=positive)
    depth: int = option(10, "depth of the WideResNet: 10, 16, 22, ...", check=positive)
    factor: int = option(1, "by which it is wider than a ResNet", check=positive)
    learning_rate: float = option(2.0, "learning rate of private SGD", check=positive)
    ordinary_learning_rate: float = option(
        0.05, "learning rate of SGD with momentum 0.9, without privacy", check=positive
    )
    seed: int = option(
        0, "seed of pictures and initial parameters, never of the noise", check=is_seed
    )
    device: str = option("auto", "", choices=("auto", "cpu", "cuda"))
    output_dir: Path = option(Path("results_private_images"), "where the two files are written")


class Moved(TensorDataset):
    """Pictures and digits; a picture is moved by up to two pixels whenever it is read."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        picture, digit = super().__getitem__(index)
        moves = torch.randint(-2, 3, (2,)).tolist()
        return picture.roll(moves, (1, 2)), digit


@dataclass(frozen=True)
class Run:
    """One run: its budget (None: not private), σ, and the accuracies along it."""

    epsilon: float | None
    noise_multiplier: float | None
    seconds: float
    points: list[dict[str, float]]


@program("private_images", Options, needs=["matplotlib"])
def main(options: Options) -> int:
    with bad_input():
        if options.batch_size > options.images:
            raise ValueError("--batch-size is larger than --images: give fewer or more")
        if (options.depth - 4) % 6 or options.depth < 10:
            raise ValueError(f"--depth is {options.depth}, and 10, 16, 22, ... can be built")
        device = torch.device(find_hardware(options.device, 1).device_type)
        check_folder("--output-dir", options.output_dir, create=True)
    pictures, digits = font_digits(options.images + HELD_OUT, options.size, options.seed)
    split = [x.to(device).split([options.images, HELD_OUT]) for x in (pictures, digits)]
    (training, held_out), (labels, answers) = split
    data = (Moved if options.views > 1 else TensorDataset)(training, labels)
    runs = []
    for epsilon in [*options.epsilons, None]:
        runs.append(train(options, epsilon, data, (held_out, answers), device))
        write(options, runs)
    print(f"\n{options.output_dir / 'accuracy.json'}, {options.output_dir / 'accuracy.png'}")
    return 0


def train(
    options: Options,
    epsilon: float | None,
    data: TensorDataset,
    held_out: tuple[Tensor, Tensor],
    device: torch.device,
) -> Run:
    """Trains from the same first parameters; ε None: without privacy."""
    seed_everything(options.seed)
    network = WideResNet(options.depth, options.factor).to(device)
    network.to(memory_format=torch.channels_last)
    average = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    if epsilon is None:
        rate, momentum = options.ordinary_learning_rate, 0.9
    else:
        rate, momentum = options.learning_rate, 0.0
    optimizer = torch.optim.SGD(network.parameters(), lr=rate, momentum=momentum)
    loader = DataLoader(data, batch_size=options.batch_size, shuffle=epsilon is None)
    if epsilon is None:
        batches, spent, sigma = ordinary(network, optimizer, loader), lambda: None, None
    else:
        with bad_input():  # δ, say
            batches, spent, sigma = private(options, epsilon, network, optimizer, loader)
    began, points = time.perf_counter(), []
    steps = options.epochs * len(loader)
    for step, _ in zip(range(1, steps + 1), batches, strict=False):
        average.update_parameters(network)
        if step % max(1, steps // 16) == 0 or step == steps:
            accuracy = accuracy_of(average.module, *held_out)
            points.append({"step": step, "accuracy": accuracy, "epsilon": spent()})
            said = "not private" if epsilon is None else f"ε {spent():.2f} of {epsilon:g}"
            print(f"{said}, step {step} of {steps}: {accuracy:.1%} of held-out pictures")
    return Run(epsilon, sigma, time.perf_counter() - began, points)


def private(
    options: Options,
    epsilon: float,
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader,
) -> tuple[Iterator[None], Callable[[], float], float]:
    """Returns steps to take one by one, what gives the ε spent so far, and σ."""
    engine = PrivacyEngine(accountant="prv")
    model, private_optimizer, criterion, private_loader = engine.make_private_with_epsilon(
        module=network,
        optimizer=optimizer,
        criterion=nn.CrossEntropyLoss(),
        data_loader=loader,
        target_epsilon=epsilon,
        target_delta=options.delta,
        max_grad_norm=1.0,
        epochs=options.epochs,
        views=options.views,
    )
    most = max(1, options.max_physical_batch_size // options.views) * options.views

    def steps() -> Iterator[None]:
        while True:
            with BatchMemoryManager(
                data_loader=private_loader,
                max_physical_batch_size=most,
                optimizer=private_optimizer,
            ) as microbatches:
                for pictures, digits in microbatches:
                    before = private_optimizer.steps
                    criterion(model(pictures), digits).backward()
                    private_optimizer.step()
                    private_optimizer.zero_grad()
                    if private_optimizer.steps > before:
                        yield

    return steps(), lambda: engine.get_epsilon(options.delta), private_optimizer.noise_multiplier


def ordinary(
    network: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader
) -> Iterator[None]:
    """Takes one step after another."""
    for pictures, digits in (batch for _ in cycle([None]) for batch in loader):
        nn.functional.cross_entropy(network(pictures), digits).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


@torch.no_grad()
def accuracy_of(network: nn.Module, pictures: Tensor, digits: Tensor) -> float:
    found = torch.cat([network(part).argmax(1) for part in pictures.split(512)])
    return float((found == digits).float().mean())


def write(options: Options, runs: list[Run]) -> None:
    """Writes the accuracies of the runs so far, and draws them."""
    content = {"options": asdict(options) | {"output_dir": str(options.output_dir)}}
    content |= {"torch": torch.__version__, "runs": [asdict(run) for run in runs]}
    write_atomically(options.output_dir / "accuracy.json", json.dumps(content, indent=1) + "\n")
    draw(options.output_dir / "accuracy.png", options, runs)


def draw(path: Path, options: Options, runs: list[Run]) -> None:
    """Draws accuracy over steps, one line per run, and the last accuracy over ε."""
    title = f"A WideResNet-{options.depth}-{options.factor} on pictures of digits"
    said = (
        f"{options.images:,} training pictures of {options.size} × {options.size} pixels, "
        f"batches of {options.batch_size:,} on average, {options.epochs} epochs; one picture is "
        "the unit of privacy"
    )
    figure = new_figure(4.6, title, [said], width=10)
    over_steps, over_epsilon = figure.subplots(1, 2, width_ratios=[1.35, 1], sharey=True)
    figure.subplots_adjust(left=0.065, right=0.975, top=0.76, bottom=0.12, wspace=0.08)
    budgets = sorted(run.epsilon for run in runs if run.epsilon is not None)
    for run in runs:
        steps = [0] + [point["step"] for point in run.points]
        shares = [10.0] + [100 * point["accuracy"] for point in run.points]
        if run.epsilon is None:
            colour, name = ORDINARY, "not private"
        else:
            place = budgets.index(run.epsilon) / max(1, len(budgets) - 1)
            colour, name = COLOURS[round(place * (len(COLOURS) - 1))], f"ε = {run.epsilon:g}"
        over_steps.plot(steps, shares, color=colour, lw=1.8, label=f"{name}: {shares[-1]:.1f} %")
        if run.epsilon is None:
            over_epsilon.axhline(shares[-1], color=colour, lw=1.2, ls=(0, (4, 3)))
            over_epsilon.annotate(
                name, (budgets[0], shares[-1]), (0, 4), textcoords="offset points", color=colour,
                size=9,
            )  # fmt: skip
        else:
            over_epsilon.plot([run.epsilon], shares[-1:], "o", color=colour, ms=8)
    over_epsilon.set_xscale("log")
    over_epsilon.set_xticks(budgets, [f"{budget:g}" for budget in budgets])
    over_epsilon.minorticks_off()
    over_epsilon.set_xlabel(f"ε at δ = {options.delta:g}; smaller is more private", color=FAINT)
    over_steps.set_xlabel("steps", color=FAINT)
    over_steps.set_ylim(0, 102)
    handles, labels = over_steps.get_legend_handles_labels()
    over_steps.legend(handles[::-1], labels[::-1], frameon=False, fontsize=9, loc="lower right")
    over_steps.set_title("Held-out pictures named right, in percent", loc="left", size=10)
    over_epsilon.set_title("After the last step", loc="left", size=10)
    for axes in (over_steps, over_epsilon):
        frame(axes, "bottom", "left")
        axes.grid(axis="y", color="#E4E4E4", lw=0.6)
    save_picture(figure, path, f"{title}. {said}")


if __name__ == "__main__":
    sys.exit(main())
