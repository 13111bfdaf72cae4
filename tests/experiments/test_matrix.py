"""`experiments.matrix`: rows of each outcome, and the page that is committed."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from torch import nn

from ddp_by_hand.experiments.matrix import page
from ddp_by_hand.experiments.matrix.__main__ import FAMILIES, NEEDS, main
from ddp_by_hand.experiments.matrix.trial import SAMPLES, Outcome, Row, Subject, subject_of, try_row

PAGE = Path(__file__).parents[2] / "docs/matrix.md"


SECTION = re.compile(r"^### (.+?): (\d+) of (\d+) work\n", re.MULTILINE)


def read(path: Path, family: str) -> dict[tuple[str, str], tuple[str, str]]:
    """Returns (section, name) -> (status, words) of a page's family."""
    parts = page.FAMILY.split(path.read_text())
    text = dict(zip(parts[1::2], parts[2::2], strict=True)).get(family, "")
    sections, found = SECTION.split(text), {}
    for section, body in zip(sections[1::4], sections[4::4], strict=True):
        for line in body.splitlines():
            if line.startswith("`"):
                found |= {(section, n): ("works", "") for n in re.findall("`([^`]+)`", line)}
            elif row := re.fullmatch(r"\| (`.+`) \| (changed|refused|failed): (.+) \|", line):
                for name in re.findall("`([^`]+)`", row[1]):
                    found[section, name] = row[2], row[3]
    return found


class Mixing(nn.Linear):
    def forward(self, x):
        return super().forward(x - x.mean(0, keepdim=True))


class Doubled(torch.autograd.Function):
    """Doubles the gradient of a batch, and not that of one sample."""

    @staticmethod
    def forward(ctx, x):
        ctx.is_batch = len(x) > 1
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return 2 * g if ctx.is_batch else g


class Inexact(nn.Linear):
    def forward(self, x):
        return Doubled.apply(super().forward(x))


class Broken(nn.Linear):
    def forward(self, x):
        raise KeyError("lost")


class Wrapped(nn.Module):
    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 64), *layers, nn.Linear(64, 3))

    def forward(self, x):
        return self.layers(x)


def outcome_of(*layers: nn.Module) -> Outcome:
    def build() -> Subject:
        inputs = {"x": torch.randn(SAMPLES, 4)}
        return Subject(Wrapped(*layers), inputs, torch.randint(3, (SAMPLES,)), lambda y: y)

    return try_row(Row("Layers", "row", build))


@pytest.mark.parametrize(
    ("layer", "status", "says"),
    [
        (nn.Dropout(0.5), "works", "^$"),
        (nn.BatchNorm1d(64), "changed", "GroupNorm for BatchNorm$"),
        (Mixing(64, 64), "refused", r"^ValueError: .*layers\.1.* depends on the other samples"),
        (Inexact(64, 64), "failed", "^Differs: the norm of sample .* is off by"),
        (Broken(64, 64), "failed", "^KeyError: 'lost'$"),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, nn.Module) else None,
)
def test_what_comes_of_a_row(layer, status, says):
    outcome = outcome_of(layer)
    assert outcome.status == status
    assert re.search(says, outcome.words), outcome.words


def test_targets_are_classes_of_the_outputs():
    found = subject_of(nn.Linear(4, 3), {"input": torch.randn(SAMPLES, 5, 4)}, lambda y: y)
    assert found.targets.shape == (SAMPLES, 5)
    assert 0 <= found.targets.min() <= found.targets.max() < 3


def test_a_page_is_read_as_it_was_written(tmp_path):
    rows = [Row(s, n, lambda: None) for s, n in (("A", "a"), ("A", "b, c=1"), ("B", "d"))]
    outcomes = [
        Outcome(rows[0], "works"), Outcome(rows[1], "refused", "ValueError: x_*y* | `z`"),
        Outcome(rows[2], "changed", "`f(m)`: GroupNorm"),
    ]  # fmt: skip
    file = tmp_path / "page.md"
    file.write_text(page.written("", "ours", outcomes, "(versions)"))
    first = read(file, "ours")
    assert first == {(o.row.section, o.row.name): page.words_of(o) for o in outcomes}
    assert "### A: 1 of 2 work" in file.read_text()
    file.write_text(page.written(file.read_text(), "theirs", outcomes[:1], "(versions)"))
    assert read(file, "ours") == first
    file.write_text(page.written(file.read_text(), "ours", outcomes[2:], "(versions)"))
    assert list(read(file, "ours")) == [("B", "d")]
    assert list(read(file, "theirs")) == [("A", "a")]


def as_on_the_page(family: str, *names: str, capsys) -> None:
    """Runs rows by the command, and compares them with the page if that has the same versions."""
    for package in NEEDS.get(family, (family,)):
        pytest.importorskip(package)
    status = main(["--families", family, *(["--names", *names] if names else [])])
    lines = [line.split("  ", 4) for line in capsys.readouterr().out.splitlines()]
    found = {(section, name): status for _, section, name, status, *_ in lines if "|" not in name}
    assert status == int("failed" in found.values())
    expected = {key: outcome for key, (outcome, _) in read(PAGE, family).items()}
    assert set(found) <= set(expected)
    assert names or set(found) == set(expected)
    text = PAGE.read_text().partition(f"## {family}\n")[2].partition("\n## ")[0]
    if f"{family} {version(family)}" in text:
        assert found == {key: expected[key] for key in found}


FEW = {
    "transformers": ("gpt2", "resnet"),
    "peft": ("IA3",),
    "torchvision": ("vit",),
    "timm": ("test_vit",),
}


@pytest.mark.parametrize("family", FEW)
def test_a_handful_of_rows(family, capsys):
    as_on_the_page(family, *FEW[family], capsys=capsys)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_row(family, capsys):
    as_on_the_page(family, capsys=capsys)


def test_a_name_that_no_row_has(capsys):
    pytest.importorskip("transformers")
    assert main(["--families", "transformers", "--names", "gpt2", "gtp3"]) == 2
    assert "no row of the installed libraries is named gtp3" in capsys.readouterr().out
