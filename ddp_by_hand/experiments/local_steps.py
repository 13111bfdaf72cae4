"""Shows what `diloco` saves in bytes, and what that costs in loss, on Python's own library's text.

    python -m ddp_by_hand.experiments.local_steps  4 ranks, 15 minutes on two cores
    python -m ddp_by_hand.experiments.local_steps --every 10 100 --seeds 1 --steps 400

The same transformer is trained by `ddp_bucketed`, by `diloco` with several numbers of local steps,
and by `none`, whose ranks never meet. Batches, steps and AdamW's learning rate are the same. The
loss is on text that no rank trains on, of rank 0's network; bytes are those that a rank hands to
collectives. It prints a table and draws both in one picture.
"""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ddp import wrap
from ddp_by_hand.lm.data import Batches, Corpus, open_data
from ddp_by_hand.lm.model import ModelConfig, Transformer, forward_loss
from ddp_by_hand.lm.rank_pool import Context, RankPool
from ddp_by_hand.measure import Column, format_table
from ddp_by_hand.measure.command_line import BadInput, bad_input
from ddp_by_hand.measure.curves import COLOURS
from ddp_by_hand.measure.options import is_writable, option, positive, program, requires
from ddp_by_hand.measure.picture import FAINT, frame, new_figure, save_picture

TOGETHER, APART = "ddp_bucketed", "none"
HELD_OUT = 10  # one part of the text in so many is not trained on
EVALUATED = 256  # sequences of it
HEAD = 32  # width of one


# fmt: off
@dataclass(frozen=True)
class Options:
    every: tuple[int, ...] = option((5, 20, 100), "local steps of diloco, a line each", metavar="H",
        check=positive, unique=True)
    ranks: int = option(4, "on GPUs, if there are as many; else on the CPU", check=positive)
    steps: int = option(1000, "of each run; whole rounds for each H", check=positive)
    seeds: int = option(2, "runs of each, with other parameters and batches", check=positive)
    learning_rate: float = option(2e-3, "of AdamW, in every variant", check=positive)
    outer_lr: float = option(0.5, "of diloco", check=positive)
    outer_momentum: float = option(0.5, "of diloco", metavar="M",
        check=requires(lambda value: 0 <= value < 1, "{}: give 0 or more, and less than 1"))
    batch_size: int = option(4, "sequences per rank", check=positive)
    context_length: int = option(32, "tokens of each", check=positive)
    d_model: int = option(64, "width of the network", check=requires(
        lambda value: value > 0 and value % HEAD == 0, f"{{}}: give a multiple of {HEAD}"))
    num_layers: int = option(2, "its blocks", check=positive)
    output: Path = option(Path("local_steps.png"), "the picture", metavar="FILE",
        check=is_writable)
# fmt: on

    def __post_init__(self) -> None:
        if uneven := [every for every in self.every if self.steps % every]:
            raise ValueError(
                f"--steps {self.steps}: {uneven[0]} local steps do not divide it, give a multiple"
            )


class Run(NamedTuple):
    """One training: loss on held-out text after some of the steps, and MiB that a rank sent."""

    losses: list[tuple[int, float]]
    mib: float


@program("ddp_by_hand.experiments.local_steps", Options, needs=["matplotlib"])
def main(options: Options) -> int:
    with bad_input():
        batches_of(split(open_data("stdlib", 256))[1], options, 0, 1, 0)
    is_gpu = torch.cuda.device_count() >= options.ranks
    pool = RankPool(options.ranks, "cuda" if is_gpu else "cpu", {"OMP_NUM_THREADS": "1"},
                    seconds=3600)  # fmt: skip
    runs: dict[str, list[Run]] = {}
    try:
        for name, variant, more in variants(options):
            for seed in range(options.seeds):
                run = pool.run(options.ranks, train, options, variant, more, seed)[0]
                runs.setdefault(name, []).append(run)
                last = f"loss {run.losses[-1][1]:.4f}, {run.mib:,.1f} MiB"
                print(f"{name}, seed {seed}: {last}", file=sys.stderr)
    finally:
        pool.close()
    print(table(runs))
    for name, own in runs.items():
        if not all(isfinite(loss) for run in own for _, loss in run.losses):
            raise BadInput(f"no picture: the loss of {name} is not finite, give a smaller "
                           "--learning-rate")  # fmt: skip
    draw(runs, options, f"{options.ranks} {'GPUs' if is_gpu else 'CPU processes'}")
    print(f"picture: {options.output}")
    return 0


def variants(options: Options) -> list[tuple[str, str, dict[str, Any]]]:
    """Returns name, variant and its options of each line."""
    outer = {"outer_lr": options.outer_lr, "outer_momentum": options.outer_momentum}
    apart = [(f"diloco, every {h}", "diloco", {"every": h, **outer}) for h in options.every]
    return [(TOGETHER, TOGETHER, {}), *apart, (APART, APART, {})]


def train(context: Context, options: Options, variant: str, more: dict, seed: int) -> Run:
    """Trains on one rank; its losses are those of this rank's network."""
    torch.set_num_threads(1)
    corpus, held_out = split(open_data("stdlib", 256))
    config = ModelConfig(
        d_model=options.d_model, num_layers=options.num_layers, num_heads=options.d_model // HEAD,
        d_ff=3 * options.d_model, context_length=options.context_length,
    )  # fmt: skip
    torch.manual_seed(seed)
    network = Transformer(config).to(context.device)
    model = wrap(variant, network, process_group=context.group, **more)
    optimizer = model.make_optimizer(torch.optim.AdamW, lr=options.learning_rate)
    batches = batches_of(corpus, options, context.rank, context.world_size, seed)
    tokens, targets = batches_of(held_out, replace(options, batch_size=EVALUATED), 0, 1, 0)(0)
    evaluated = tokens.to(context.device), targets.to(context.device)
    losses, sent = [], 0
    shown = {options.steps * part // 20 for part in range(21)}
    for step in range(options.steps):
        inputs, targets = batches(step)
        batch = inputs.to(context.device), targets.to(context.device)
        forward_loss(model, batch).backward()
        model.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
        sent += model.stats()["bytes"]
        if step + 1 in shown and not any(getattr(model, "counts", ())):  # not inside of a round
            with torch.no_grad():
                losses.append((step + 1, forward_loss(network, evaluated).item()))
    return Run(losses, sent / 2**20)


def split(corpus: Corpus) -> tuple[Corpus, Corpus]:
    """Returns the text to train on, and the end of it, which is held out."""
    assert corpus.tokens is not None
    end = len(corpus.tokens) - len(corpus.tokens) // HELD_OUT
    return replace(corpus, tokens=corpus.tokens[:end]), replace(corpus, tokens=corpus.tokens[end:])


def batches_of(corpus: Corpus, options: Options, rank: int, ranks: int, seed: int) -> Batches:
    sizes = {"batch_size": options.batch_size, "context_length": options.context_length}
    return Batches(corpus, **sizes, rank=rank, world_size=ranks, seed=seed)


def finals(runs: Sequence[Run]) -> list[float]:
    return [run.losses[-1][1] for run in runs]


def table(runs: dict[str, list[Run]]) -> str:
    whole = runs[TOGETHER]
    rows = []
    for name, own in runs.items():
        losses, mib = finals(own), own[0].mib
        rows.append({
            "run": name, "MiB sent": mib, "part": mib / whole[0].mib,
            "loss": statistics.mean(losses), "more": statistics.mean(losses)
            - statistics.mean(finals(whole)), "smallest": min(losses), "largest": max(losses),
        })  # fmt: skip
    columns = [
        Column("MiB sent", None, ",.1f"), Column("part", f"of {TOGETHER}'s", ".2%"),
        Column("loss", "held-out loss", ".4f"), Column("more", f"more than {TOGETHER}", "+.4f"),
        Column("smallest", None, ".4f"), Column("largest", None, ".4f"),
    ]  # fmt: skip
    return format_table(["run", *columns], rows, f"means of {len(whole)} seeds")


def draw(runs: dict[str, list[Run]], options: Options, where: str) -> None:
    """Writes the picture: loss over the steps, and at their end over the bytes that were sent."""
    title = "diloco, every H steps: 1/H of the bytes, for a higher loss"
    lines = [
        f"{where} train a transformer on the text of Python's library, with {options.batch_size} x "
        f"{options.context_length} bytes a rank and step, by AdamW.",
        f"Means of {options.seeds} seeds; bars go from the smallest to the largest. Losses of "
        f"diloco are those behind an outer step (outer_lr {options.outer_lr:g}, outer_momentum "
        f"{options.outer_momentum:g}).",
    ]
    figure = new_figure(5.6, title, lines, width=11)
    curves = figure.add_axes((0.065, 0.115, 0.44, 0.68))
    costs = figure.add_axes((0.565, 0.115, 0.415, 0.68), sharey=curves)
    last = {name: statistics.mean(finals(own)) for name, own in runs.items()}
    top = max(last.values()) + 0.6 * (max(last.values()) - min(last.values()))
    bottom = min(last.values()) - 0.2 * (max(last.values()) - min(last.values()))
    colours = dict(zip(runs, COLOURS[1:], strict=False)) | {APART: FAINT}
    for name, own in runs.items():
        steps = [step for step, _ in own[0].losses]
        means = [statistics.mean(run.losses[k][1] for run in own) for k in range(len(steps))]
        dashes = "--" if name == APART else "-"
        curves.plot(steps, means, color=colours[name], lw=1.9, ls=dashes, label=name)
        if name == APART:
            costs.axhline(last[name], color=FAINT, lw=1.4, ls="--")
            note = {"va": "bottom", "ha": "right", "fontsize": 9, "color": FAINT}
            costs.text(0.99, last[name], "none: ranks never meet, 0 MiB", **note,
                       transform=costs.get_yaxis_transform())  # fmt: skip
            continue
        mib, losses = own[0].mib, finals(own)
        costs.plot([mib] * 2, [min(losses), max(losses)], color=colours[name], lw=1.4)
        costs.plot(mib, last[name], "o", ms=8, color=colours[name])
        part = "" if name == TOGETHER else f"1/{runs[TOGETHER][0].mib / mib:.0f} of the bytes\n"
        text = f"{name}\n{part}loss {last[name]:.3f}"
        costs.annotate(text, (mib, last[name]), (9, 3), textcoords="offset points", fontsize=9,
                       color=colours[name])  # fmt: skip
    costs.set_xscale("log")
    low = min(own[0].mib for name, own in runs.items() if name != APART)
    costs.set_xlim(low / 3, 10 * runs[TOGETHER][0].mib)
    curves.set_ylim(bottom, top)
    curves.set_xlim(0, options.steps)
    curves.set(xlabel="steps of each rank", ylabel="loss on held-out text, nats a byte")
    costs.set_xlabel(f"MiB that a rank has sent in all {options.steps:,} steps, logarithmic")
    costs.xaxis.set_major_formatter(lambda mib, _: f"{mib:,g}")
    costs.text(0.02, 0.03, "← fewer bytes   ↓ better", transform=costs.transAxes, fontsize=9,
               color=FAINT)  # fmt: skip
    curves.set_title("the same steps, apart or together", fontsize=10, loc="left")
    costs.set_title("where they end, and what they sent", fontsize=10, loc="left")
    curves.legend(frameon=False, fontsize=9, loc="lower left")
    for axes in (curves, costs):
        frame(axes, "bottom", "left")
        axes.grid(axis="y", color="#E6E6E6", lw=0.8)
    save_picture(figure, options.output, " ".join([f"{title}.", *lines]))


if __name__ == "__main__":
    sys.exit(main())
