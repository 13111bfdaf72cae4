"""Fits the law to short private runs on text, then predicts a longer one and trains it."""

from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

from ddp_by_hand.examples.private_text import Text
from ddp_by_hand.experiments.plan_privacy.curves import Curves, interpolate
from ddp_by_hand.experiments.plan_privacy.law import Law, Observation
from ddp_by_hand.experiments.plan_privacy.plan import Budget, Candidate, Planner
from ddp_by_hand.experiments.plan_privacy.runs import CONTEXT, SmallRun, parameters_of, train
from ddp_by_hand.measure import OK, Results, cell_key, environment

WIDTHS = (24, 40, 64)  # of the runs that the law is fitted to
RATIOS = tuple(2.0**-k for k in (11, 10, 9, 8))
MARKS = (48, 64, 96, 128, 192)  # steps after which a run's held-out loss is taken
BATCH = 64
PLANNED = (32, 48, 56)  # widths that the check may choose: of no fitting run
STRETCH = 1.5  # so much longer than a fitting run the check may be
FIT, CHECK = "fit", "check"  # kinds of rows


def fitting_runs() -> list[SmallRun]:
    return [SmallRun(w, max(MARKS), BATCH, ratio) for w, ratio in product(WIDTHS, RATIOS)]


def config_of(kind: str, run: SmallRun, text: Text) -> dict:
    return {"kind": kind, **asdict(run), "context": CONTEXT, "data_digest": text.digest}


def train_runs(folder: Path, text: Text, runs: list[SmallRun], say: Callable[[str], None]) -> None:
    """Trains the runs that the folder lacks."""
    results = Results(folder)
    for number, run in enumerate(runs, start=1):
        config = config_of(FIT, run, text)
        if not results.finished(cell_key(config)):
            found = train(run, text, MARKS, delta=None)
            row = {"kind": FIT, "status": OK, "config": config, **found}
            results.record(row | {"environment": environment()})
            say(f"run {number} of {len(runs)}: {describe(run, found)}")


def law_of(folder: Path) -> Curves:
    """Returns the law of a folder's runs; raises ValueError if they are not of one text."""
    rows = fitting_rows(folder)
    if len({row["config"]["data_digest"] for row in rows}) != 1:
        raise ValueError(
            f"{folder}: has no finished runs of one text; give another folder to python -m "
            "ddp_by_hand.experiments.plan_privacy --calibrate FOLDER"
        )
    return interpolate(
        observations(rows), tokens=CONTEXT, unit="nats per byte",
        source=f"{len(rows)} private runs of this package in {folder.name}",
    )  # fmt: skip


def fitting_rows(folder: Path) -> list[dict]:
    return [row for row in Results(folder).rows() if row.get("kind") == FIT]


def observations(rows: list[dict]) -> list[Observation]:
    """Returns the losses of fitting runs, one per run and mark."""
    return [
        Observation(row["parameters"], int(step), row["config"]["ratio"], loss)
        for row in rows
        for step, loss in row["losses"].items()
    ]


def plan_check(law: Law, budget: Budget, accountant: str) -> tuple[Planner, int, Candidate]:
    """Returns planner, width and candidate of the check: the best of `PLANNED` for the budget."""
    low, high = law.steps
    widths = {parameters_of(width): width for width in PLANNED}
    planner = Planner(replace(law, steps=(low, STRETCH * high)), budget, list(widths))
    chosen = planner.exact(planner.best(), accountant)
    return planner, widths[int(chosen.parameters)], chosen


def checked(
    folder: Path, text: Text, width: int, chosen: Candidate, budget: Budget, law: str
) -> dict:
    """Trains the planned run, or reads it; returns its row with prediction and measurement.

    `law` names the law. Its time is predicted from FLOP/s of the fitting runs.
    """
    results = Results(folder)
    run = SmallRun(width, int(chosen.steps), int(chosen.batch), chosen.ratio, seed=1)
    config = config_of(CHECK, run, text) | {"epsilon": budget.epsilon, "delta": budget.delta}
    if not results.finished(cell_key(config)):
        found = train(run, text, [run.steps], budget.delta)
        row = {
            "kind": CHECK, "status": OK, "config": config, **found,
            "law": law, "sigma": chosen.sigma, "predicted_loss": chosen.loss,
            "predicted_seconds": chosen.flops(CONTEXT) / speed_of(folder),
            "measured_loss": found["losses"][run.steps],
        }  # fmt: skip
        results.record(row | {"environment": environment()})
    return next(row for row in results.rows() if row["key"] == cell_key(config))


def speed_of(folder: Path) -> float:
    """Returns FLOP/s of the fitting runs together, at 6 · M FLOPs per token."""
    rows = fitting_rows(folder)
    flops = sum(6 * row["parameters"] * row["tokens"] for row in rows)
    return flops / sum(row["seconds"] for row in rows)


def describe(run: SmallRun, found: dict) -> str:
    loss = list(found["losses"].values())[-1]
    return (
        f"{found['parameters']:,} parameters, {run.steps} steps of {run.batch}, noise-batch ratio "
        f"{run.ratio:.2g}: {loss:.3f} nats per byte in {found['seconds']:.0f} s"
    )


def side_by_side(row: dict) -> str:
    predicted, measured = row["predicted_loss"], row["measured_loss"]
    return (
        f"predicted {predicted:.3f} nats per byte, measured {measured:.3f}: "
        f"{predicted / measured - 1:+.1%}\n"
        f"predicted {row['predicted_seconds']:.0f} s, measured {row['seconds']:.0f} s; "
        f"epsilon {row['epsilon']:.3f} at delta {row['config']['delta']:.2g}, by the engine"
    )
