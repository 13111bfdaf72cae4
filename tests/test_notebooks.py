"""Notebooks are small, read from the result on, and say what their code gives when it runs."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
MOST_BYTES, MOST_CELLS, MOST_LINES = 300_000, 13, 50
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def outputs_of(cell) -> list[tuple[str, str]]:
    """Returns what a cell shows, in order: kind and text, of which a picture has none."""
    shown = []
    for output in cell.get("outputs", []):
        if output.output_type == "stream":  # of which the kernel may send one print in two parts
            before = shown.pop()[1] if shown and shown[-1][0] == output.name else ""
            shown.append((output.name, before + output.text))
        else:
            kind = "image/png" if "image/png" in output.data else "text/plain"
            shown.append((kind, output.data[kind] if kind == "text/plain" else ""))
    return shown


def differences(before: str, now: str, tolerance: float | None) -> list[str]:
    """Where two outputs differ: words, and numbers by more than a part of what they were.

    With `None` numbers are times, which are others on each machine.
    """
    words = [re.sub(r"\s+", " ", NUMBER.sub("#", text)) for text in (before, now)]
    if words[0] != words[1]:
        return [f"{before!r} was written, and {now!r} is shown"]
    if tolerance is None:
        return []
    pairs = zip(NUMBER.findall(before), NUMBER.findall(now), strict=True)
    numbers = [[float(text.replace(",", "")) for text in pair] for pair in pairs]
    return [f"{a} is {b}" for a, b in numbers if abs(a - b) > tolerance * abs(a)]


@each_notebook
def test_a_committed_notebook_is_small_and_was_run_from_the_top(path):
    assert path.stat().st_size < MOST_BYTES
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    cells = notebook.cells
    assert len(cells) <= MOST_CELLS
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert cells[0].source.startswith("# ")
    told = re.findall(r"\*\*([\d.]+)\*\*", cells[0].source)
    shown = {n for cell in code for _, text in outputs_of(cell) for n in NUMBER.findall(text)}
    assert set(told) <= shown
    assert told or cells[1].outputs, "it opens with the result"
    for cell in code:
        assert cell.source.count("\n") < MOST_LINES
        for kind, text in outputs_of(cell):
            assert kind != "stderr", text
            assert not re.search(r"/(?:home|root|tmp|work|usr|Users)\b", text), text


@each_notebook
def test_links_of_a_notebook_lead_somewhere(path):
    texts = [cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "markdown"]
    links = [link for text in texts for link in LINK.findall(text)]
    assert links
    for link in links:
        assert (path.parent / link).resolve().is_file(), link


@pytest.mark.slow
@each_notebook
def test_a_notebook_shows_what_is_committed(path, tmp_path, monkeypatch):
    """It runs in a folder that has nothing else, with the packages of this interpreter."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(path, 4)
    before = [outputs_of(cell) for cell in notebook.cells]
    NotebookClient(
        notebook, timeout=600, record_timing=False, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    for cell, written in zip(notebook.cells, before, strict=True):
        now = outputs_of(cell)
        assert [kind for kind, _ in now] == [kind for kind, _ in written], cell.source
        for (_, text), (_, text_now) in zip(written, now, strict=True):
            assert not differences(text, text_now, cell.metadata.get("tolerance", 1e-3))
