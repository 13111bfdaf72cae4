"""A table with an entity column that every machine has, and what the programs on it share.

Each row is a method of Python's standard library, and its entity is the class that has it, as each
row of a table of visits has a patient. `synthetic_text`, `synthetic_table` and `federated` train on
it.
"""

import ast
import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor
from torch.nn.functional import pad

from ddp_by_hand.measure.command_line import BadInput
from dp_clipping import PrivacyEngine

COLUMNS = {
    "name": ("__special__", "_private", "public"), "args": ("0", "1", "2", "3", "4", "5 or more"),
    "lines": ("1-2", "3-5", "6-10", "11-20", "21-50", "more"), "doc": ("no", "yes"),
    "last": ("no", "yes"),
}  # fmt: skip
"""The values of columns where they are few, public constants; `last` is an entity's last row."""

WORDS = ("get", "set", "add", "read", "write", "close", "run", "is", "to", "from", "new", "data")


class Row(NamedTuple):
    """A method: its name, the number of its arguments and lines, and whether it has a docstring."""

    name: str
    args: int
    lines: int
    doc: int

    def to_text(self) -> str:
        return json.dumps(self._asdict(), separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> "Row | None":
        """Returns the row of a text; None if it is not valid."""
        try:
            found = cls(**json.loads(text))
        except (ValueError, TypeError):
            return None
        fits = [isinstance(x, t) for x, t in zip(found, (str, int, int, int), strict=True)]
        return found if all(fits) else None

    @classmethod
    def made_up(cls, chosen: random.Random) -> "Row":
        """Returns a row that follows from the form of a row alone, which is public."""
        name = "_".join(chosen.choices(WORDS, k=chosen.randint(1, 3)))
        return cls(name, chosen.randint(1, 5), chosen.randint(1, 40), chosen.randint(0, 1))


def to_values(rows: list[Row], most: int) -> Tensor:
    """Returns which of `COLUMNS` the first rows of an entity have, [most, columns]; else -1."""
    values = [
        (
            0 if row.name.startswith("__") else 1 if row.name.startswith("_") else 2,
            min(row.args, 5), sum(row.lines > top for top in (2, 5, 10, 20, 50)), row.doc,
            int(row is rows[-1]),
        )
        for row in rows[:most]
    ]  # fmt: skip
    return pad(torch.tensor(values), (0, 0, 0, most - len(values)), value=-1)


def to_words(values: Tensor) -> str:
    """Returns an entity as text, a line per row."""
    columns = [(name, words) for name, words in COLUMNS.items() if name != "last"]
    return "a class with\n" + "\n".join(
        "    " + ", ".join(f"{k} {words[i]}" for (k, words), i in zip(columns, row, strict=False))
        for row in values[values[:, 0] >= 0].tolist()
    )


def shares(table: Tensor, made: Tensor) -> str:
    """Returns how often each value of each column is in rows of a table, and in made ones.

    Both are [.., columns] as of `to_values`. The former are not covered by ε.
    """
    lines = ["rows with a value, in percent: of the table (not covered by epsilon) / synthetic"]
    for j, (name, words) in enumerate(COLUMNS.items()):
        parts = [x.flatten(0, -2)[:, j] for x in (table, made)]
        counts = [part[part >= 0].bincount(minlength=len(words)) for part in parts]
        both = zip(*(100 * count / count.sum().clamp(min=1) for count in counts), strict=True)
        each = [f"{w} {a:.0f} / {b:.0f}" for w, (a, b) in zip(words, both, strict=True)]
        lines.append(f"    {name:6}{'   '.join(each)}")
    return "\n".join(lines)


def to_letters(rows: list[Row]) -> tuple[Tensor, Tensor]:
    """Returns pairs of letters of the names, [rows, 64], and whether args is above 1, [rows, 1]."""
    x = torch.zeros(len(rows), 64)
    for one, row in zip(x, rows, strict=True):
        for pair in zip(f"^{row.name}", f"{row.name}$", strict=True):
            one[crc32("".join(pair).encode()) % 64] += len(row.name) ** -0.5
    return x, torch.tensor([[float(row.args > 1)] for row in rows])


def read_entities(count: int) -> dict[str, list[Row]]:
    """Returns the rows of `count` entities.

    Raises:
        BadInput: the standard library has fewer classes.
    """
    found: dict[str, list[Row]] = {}
    root = Path(sysconfig.get_path("stdlib"))
    for file in [*sorted(root.glob("*.py")), *sorted(root.glob("[a-z]*/*.py"))]:
        if len(found) >= count:
            return dict(list(found.items())[:count])
        for name, rows in _classes(file) if file.parent.name != "site-packages" else ():
            found.setdefault(f"{file.relative_to(root)}: {name}", []).extend(rows)
    raise BadInput(f"{count} entities are asked for, and the table has {len(found)}: give less")


def _classes(file: Path) -> Iterator[tuple[str, list[Row]]]:
    try:
        tree = ast.parse(file.read_bytes())
    except SyntaxError:  # some files there are examples of them
        return
    for owner in ast.walk(tree):
        rows = [
            Row(
                one.name, len(one.args.args), (one.end_lineno or one.lineno) - one.lineno + 1,
                int(ast.get_docstring(one) is not None),
            )
            for one in getattr(owner, "body", []) if isinstance(one, ast.FunctionDef)
        ] if isinstance(owner, ast.ClassDef) else []  # fmt: skip
        if rows:
            yield owner.name, rows


def is_held_out(entity: str, one_of: int) -> bool:
    """Returns whether an entity is not trained on, which does not depend on the others."""
    return crc32(entity.encode()) % one_of == 0


def independent_epsilon(noise_multiplier: float, rate: float, steps: int, delta: float) -> float:
    """Returns ε of so many steps with Gaussian noise on Poisson batches, by dp-accounting alone."""
    import dp_accounting as dp  # takes a second
    from dp_accounting.pld import PLDAccountant

    step = dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise_multiplier))
    return PLDAccountant().compose(step, steps).get_epsilon(delta)


def report(engine: PrivacyEngine, delta: float, rate: float, steps: int) -> str:
    """Returns the engine's statement, and below it ε of a program's own numbers."""
    statement = engine.privacy_statement(delta=delta)
    noise: Any = statement.noise_multiplier
    other = independent_epsilon(noise, rate, steps, delta)
    return f"{statement}\nby dp-accounting alone:   {other:.3f}"
