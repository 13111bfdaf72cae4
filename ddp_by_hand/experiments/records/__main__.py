"""Repeats published private trainings: accuracy with its spread beside the published one.

    make records-data                                       Fashion-MNIST, without root
    python -m ddp_by_hand.experiments.records               all rows, five seeds each
    python -m ddp_by_hand.experiments.records --rows scatter_linear@2.7 --engine opacus --seeds 1
    python -m ddp_by_hand.experiments.records --rows scatter_cnn --tune

Each run is a line of `results.jsonl` in the output folder, and is not repeated: an interrupted call
goes on. `--tune` tries the settings of a row's grid on training images that it leaves out of
training, and `--tuned` trains with the best of those that the folder has. docs/records.md has the
table, and says how settings were chosen.
"""

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ddp_by_hand.experiments.records.data import FOLDER, Images, open_images
from ddp_by_hand.experiments.records.networks import NETWORKS
from ddp_by_hand.experiments.records.picture import draw
from ddp_by_hand.experiments.records.results import best_first, table, tuning_table
from ddp_by_hand.experiments.records.rows import Row, rows_of
from ddp_by_hand.experiments.records.texts import Planned
from ddp_by_hand.experiments.records.train import (
    OPACUS,
    OURS,
    Split,
    features_of,
    held_out,
    normalised,
    run,
    sequences,
)
from ddp_by_hand.experiments.rounds import attempted
from ddp_by_hand.lm.runtime import find_hardware
from ddp_by_hand.measure import (
    OK,
    UNAVAILABLE,
    Results,
    cell_key,
    describe_failure,
    environment,
)
from ddp_by_hand.measure.command_line import BadInput, bad_input, check_folder
from ddp_by_hand.measure.extras import require
from ddp_by_hand.measure.options import is_writable, option, positive, program

HELD_OUT = 5000  # training images that `--tune` scores


# fmt: off
@dataclass(frozen=True)
class Options:
    rows: tuple[str, ...] | None = option(None, unique=True, metavar="ROW", help=(
        "names such as scatter_linear, or scatter_linear@2.7 for one ε (default: all)"))
    engine: str = option(OURS, "that trains", choices=(OURS, OPACUS))
    seeds: int = option(5, "runs of each row", check=positive)
    data: Path = option(FOLDER, "folder with the data sets", metavar="FOLDER")
    tune: bool = option(False, "try the rows' grids on held-out training images (default: off)")
    tuned: bool = option(False, "take the best settings of --tune (default: the rows' own)")
    device: str = option("auto", "that trains", choices=("auto", "cpu", "cuda"))
    output_dir: Path = option(Path("results_records"), "of results.jsonl", metavar="FOLDER")
    picture: Path | None = option(None, "accuracy over ε (default: none)", metavar="FILE",
        check=is_writable)
# fmt: on


@program("ddp_by_hand.experiments.records", Options)
def main(options: Options) -> int:
    """Trains what is not there yet, and prints the table. Returns 1 if a run failed."""
    warnings.filterwarnings("ignore", "overflow encountered", RuntimeWarning, "dp_accounting")
    with bad_input():
        rows = rows_of(options.rows)
        check_folder("--output-dir", options.output_dir, create=True)
        if options.picture:
            if options.tune:
                raise ValueError("--picture is of records: leave out --tune")
            require("matplotlib")
        device = torch.device(find_hardware(options.device, 1).device_type)
        results = Results(options.output_dir)
    splits = Splits(options.data, device, HELD_OUT if options.tune else 0)
    kind = "tuning" if options.tune else "record"
    if options.tune:
        rows = [tried for row in rows if row.grid for tried in grid_of(row)]
    elif options.tuned:
        rows = [tuned(row, results.rows()) for row in rows]
    for row in rows:
        for seed in [1000] if options.tune else range(options.seeds):
            try:
                measure(kind, row, options.engine, seed, splits, results)
            except FileNotFoundError as error:  # not recorded: they may be there in the next call
                print(f"{row.name} {UNAVAILABLE}: {error}", flush=True)
                break
    own = [found for found in results.rows() if found["kind"] == kind]
    if not own:
        raise BadInput("no row was trained: give --data FOLDER of the data")
    print((tuning_table if options.tune else table)(own))
    if options.picture:
        with bad_input():
            draw(options.picture, own)
    return int(any(found["status"] not in (OK, UNAVAILABLE) for found in own))


def grid_of(row: Any) -> list[Any]:
    """Returns the row with each combination of its grid's values."""
    return [
        replace(row, **dict(zip(row.grid, v, strict=True))) for v in product(*row.grid.values())
    ]


def tuned(row: Any, results: Sequence[dict[str, Any]]) -> Any:
    """Returns the row with the settings of its grid that had the best score; as it is, if none."""
    tried = [one for one in results if (one["kind"], one["row"]) == ("tuning", row.name)]
    tried = [one["settings"] | {"score": one["score"]} for one in tried if one["status"] == OK]
    if not tried:
        return row
    best = min(tried, key=best_first)
    return replace(row, **{name: best[name] for name in row.grid})


class Splits:
    """The features of data sets on the device: those of the last row are kept.

    Args:
        folder: `--data`.
        scored: training images that are scored in place of the test's; 0: none.
    """

    def __init__(self, folder: Path, device: torch.device, scored: int) -> None:
        self.folder, self.device, self.scored = folder, device, scored
        self._kept: dict[str, tuple[Any, Any]] = {}

    def of(self, row: Row) -> Split:
        features, groups = NETWORKS[row.network].features, row.groups
        if features == "text":
            return self._once("raw", "text", self._text)
        images = self._once("images", row.data, lambda: open_images(row.data, self.folder))
        key = (row.data, features)
        raw = self._once("raw", key, lambda: self._features(images, features))
        if features == "pixels":
            return raw
        return self._once("normalised", (*key, groups), lambda: normalised(raw, groups))

    def _text(self) -> Split:
        found = sequences(self.device)
        return held_out(found, self.scored) if self.scored else found

    def _features(self, images: Images, kind: str) -> Split:
        self._kept.pop("normalised", None)
        found = features_of(images, kind, self.device)
        return held_out(found, self.scored) if self.scored else found

    def _once(self, name: str, key: Any, make: Callable[[], Any]) -> Any:
        if name not in self._kept or self._kept[name][0] != key:
            self._kept.pop(name, None)
            self._kept[name] = key, make()
        return self._kept[name][1]


def measure(kind: str, row: Row, engine: str, seed: int, splits: Splits, results: Results) -> None:
    """Trains, unless its results are there, and records them.

    Raises FileNotFoundError if the row's data are not in the folder.
    """
    settings = row.settings()
    names = {"kind": kind, "row": row.name, "variant": engine, "round": seed}
    key = cell_key(names | {"settings": settings, "device": splits.device.type})
    if results.finished(key):
        return
    found: dict[str, Any] = {"key": key, **names, "settings": settings}
    found["config"] = {"device": splits.device.type, "torch": torch.__version__}

    def trained() -> dict[str, Any]:
        if isinstance(row, Planned):
            return row.run(engine, seed, splits.device)
        return run(row, engine, seed, splits.of(row))

    found |= attempted(trained, splits.device, FileNotFoundError)
    said = describe_failure(found)
    if found["status"] == OK:
        said = f"{found['score']:.4g} {row.unit} in {found['seconds']:.1f} s"
    results.record(found | {"environment": environment()})
    tried = " ".join(f"{name} {settings[name]}" for name in row.grid) if kind == "tuning" else ""
    print(f"{row.name} {engine} {tried or f'seed {seed}'}: {said}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
