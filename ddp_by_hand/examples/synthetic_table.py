"""Synthetic entities from an auto-regressive model of a table; each with its rows is protected.

    python -m ddp_by_hand.examples.synthetic_table

The training core of mostlyai-engine, written anew on `PrivacyEngine`: an embedding per column, an
LSTM over an entity's rows, a small network per column; early stop, schedule, a budget of ε, resume,
generation. ε covers validation too, whose losses are noisy sums over entities not trained on.
"""

import sys
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.utils.data import DataLoader, TensorDataset

from ddp_by_hand.examples import functions_table as table
from ddp_by_hand.measure.command_line import BadInput, bad_input, check_file
from ddp_by_hand.measure.options import option, positive, program
from dp_clipping import BatchMemoryManager, PrivacyEngine

SIZES = [len(values) for values in table.COLUMNS.values()]
ROWS = 8  # of an entity, at most
MOST = 5.0  # loss of a held-out entity that counts
PATIENCE = 3  # epochs without a lower loss


# fmt: off
@dataclass(frozen=True)
class Options:
    entities: int = option(2000, "entities; about a fifth is held out", metavar="N", check=positive)
    batch_size: int = option(100, "entities of a step, on average", metavar="N", check=positive)
    epochs: int = option(12, "epochs, at most", metavar="N", check=positive)
    noise: float = option(0.9, "noise multiplier of training", metavar="S", check=positive)
    loss_noise: float = option(2.5, "noise multiplier of a loss", metavar="S", check=positive)
    epsilon: float = option(8.0, "what the run may spend", metavar="E", check=positive)
    delta: float = option(1e-4, "δ of the guarantee", metavar="D", check=positive)
    checkpoint: Path = option(Path("results_synthetic_table/epoch.pt"), "written after each epoch")
    resume: bool = option(False, "continue from --checkpoint (default: begin)")
# fmt: on


class TableModel(nn.Module):
    """Predicts each column of each row from the columns before it and the rows before."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(size, width) for size in SIZES)
        self.history = nn.LSTM(width, width, batch_first=True)
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(width * (1 + j), width), nn.ReLU(), nn.Linear(width, size))
            for j, size in enumerate(SIZES)
        )

    def forward(self, values: Tensor) -> list[Tensor]:
        """Returns scores of each column's values, [entities, rows, values]."""
        parts = [layer(values[..., j].clamp(min=0)) for j, layer in enumerate(self.embeddings)]
        before = pad(self.history(sum(parts))[0][:, :-1], (0, 0, 1, 0))
        return [head(torch.cat([before, *parts[:j]], 2)) for j, head in enumerate(self.heads)]


def losses(scores: list[Tensor], values: Tensor) -> Tensor:
    """Returns the loss of each entity, its rows' sum / ROWS, so that each row counts alike."""
    own = zip(scores, values.unbind(2), strict=True)
    of_columns = [cross_entropy(s.mT, v, ignore_index=-1, reduction="none") for s, v in own]
    return torch.stack(of_columns).sum((0, 2)) / ROWS


@torch.no_grad()
def noisy_loss(model: Any, held_out: Tensor, options: Options) -> float:
    """Returns about the mean loss of held-out entities: each at most MOST, and noise on the sum."""
    total = losses(model.eval()(held_out), held_out).clamp(max=MOST).sum()
    model.train()
    return float(total + options.loss_noise * MOST * torch.randn(())) / (options.entities / 5)


@torch.no_grad()
def generate(model: Any, count: int) -> Tensor:
    """Returns so many entities, [count, ROWS, columns]; -1 below the last row of one."""
    values = torch.full((count, ROWS, len(SIZES)), -1)
    for row in range(ROWS):
        is_going_on = (values[:, :row, -1] != 1).all(1)
        for column in range(len(SIZES)):
            found = torch.multinomial(model.eval()(values)[column][:, row].softmax(1), 1)
            values[:, row, column] = found.squeeze(1).where(is_going_on, -1)
    return values


@program("synthetic_table", Options)
@bad_input()
def main(options: Options) -> int:
    """Trains, and prints synthetic entities and ε."""
    check_file("--checkpoint", options.checkpoint)
    data: tuple[list, list] = [], []
    for name, rows in table.read_entities(options.entities).items():
        data[table.is_held_out(name, 5)].append(table.to_values(rows, ROWS))
    if not all(data):
        raise BadInput("--entities is too small, none is held out: give 20 or more")
    training, held_out = map(torch.stack, data)
    torch.seed()  # from the operating system: the noise of losses is secret, as checkpoints are
    model, engine = TableModel(), PrivacyEngine()
    rate = options.batch_size / (0.8 * options.entities)
    steps = round(1 / rate)  # of an epoch
    model, optimizer, criterion, loader = engine.make_private(
        module=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), criterion=losses,
        data_loader=DataLoader(TensorDataset(training), batch_size=options.batch_size),
        noise_multiplier=options.noise, max_grad_norm=1.0, sample_rate=rate, steps=steps,
        wrap_model=False,
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    parts: dict[str, Any] = {"optimizer": optimizer, "data_loader": loader}
    at: dict[str, Any] = {"epoch": 0, "best": 0, "loss": 1e9, "weights": model.state_dict()}
    if options.resume:
        found = engine.load_checkpoint(path=options.checkpoint, module=model, **parts)
        at = found["at"]
        schedule.load_state_dict(found["schedule"])
    options.checkpoint.parent.mkdir(parents=True, exist_ok=True)

    def epsilon(epochs: int) -> float:
        spent = engine.epsilon_at_end(optimizer, epochs * steps - optimizer.steps, options.delta)
        return max(spent, table.independent_epsilon(options.loss_noise, 1, epochs, options.delta))

    while at["epoch"] < min(options.epochs, at["best"] + PATIENCE):
        if epsilon(at["epoch"] + 1) > options.epsilon:
            print(f"one more would spend more than --epsilon {options.epsilon}")
            break
        with BatchMemoryManager(max_physical_batch_size=64, **parts) as batches:
            for (values,) in batches:
                criterion(model(values), values).backward()
                optimizer.step()
                optimizer.zero_grad()
        schedule.step(loss := noisy_loss(model, held_out, options))
        epoch = at["epoch"] = at["epoch"] + 1
        if loss < at["loss"]:
            at |= {"best": epoch, "loss": loss, "weights": deepcopy(model.state_dict())}
        more = {"at": at, "schedule": schedule.state_dict()}
        engine.save_checkpoint(path=options.checkpoint, module=model, checkpoint_dict=more, **parts)
        print(f"epoch {epoch:2d}   loss {loss:.3f}   epsilon {epsilon(epoch):.3f}", flush=True)
    model.load_state_dict(at["weights"])
    made = generate(model, 1000)
    print(*map(table.to_words, made[:4]), table.shares(training, made), sep="\n")
    print(table.report(engine, options.delta, rate, optimizer.steps))
    print(f"with validation losses:  {epsilon(at['epoch']):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
