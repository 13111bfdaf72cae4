"""What the documents name is there: links, files, modules, options."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = [p.parent for p in sorted((ROOT / "dp_clipping").rglob("__init__.py"))]
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "examples/README.md", ROOT / "exercises/README.md",
]  # fmt: skip
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
COMMAND = re.compile(
    r"python3? -m ([\w.]+)|python3? (\w+\.py)|torchrun .*?(?:-m ([\w.]+)|(\w+\.py))"
)
each_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))


def prose_of(path: Path) -> str:
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors_of(path: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", prose_of(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands_of(path: Path) -> list[str]:
    """Lines of the code blocks that start a program of ours, continued ones as one, no comments."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.partition(" #")[0] for line in lines if COMMAND.search(line)]


@each_document
def test_links_lead_somewhere(path):
    for link in LINK.findall(prose_of(path)):
        if link.startswith("http"):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        assert not anchor or anchor in anchors_of(target), link


@each_document
def test_options_of_commands_exist(path):
    for command in commands_of(path):
        program = next(name for name in COMMAND.search(command).groups() if name)
        if program.startswith(("torch.", "my_", "your_")) or program == "pytest":
            continue
        module = program.removesuffix(".py")
        assert importlib.util.find_spec(module), command
        place = ROOT / ("bench" if module == "benchmark_ddp" else module.replace(".", "/"))
        folder = place if place.is_dir() else place.parent
        sources = "\n".join(file.read_text() for file in folder.glob("*.py"))
        for option in re.findall(r"(?<!\S)--[\w-]+", command[command.index(program) :]):
            field = rf"^    {option[2:].replace('-', '_')}: "
            is_there = f'"{option}"' in sources or re.search(field, sources, re.MULTILINE)
            assert is_there, f"{option} in: {command}"


def test_the_readme_stays_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 200, "a newcomer reads it: put more into a page of docs/"


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.name)
def test_a_package_lists_its_modules(package):
    """In its docstring, which takes the place of a file tree in the README."""
    text = (package / "__init__.py").read_text()
    modules = {p.stem for p in package.glob("*.py")} - {"__init__", "__main__"}
    modules |= {p.parent.name for p in package.glob("*/__init__.py")}
    assert modules <= set(re.findall(r"\w+", text))


STOP = re.compile(r"`((?:dp_clipping|ddp)/[\w/]+\.py)`:\s+`(\w+)`")


@pytest.mark.parametrize("stop", STOP.findall((ROOT / "docs/how_it_works.md").read_text()))
def test_a_stop_of_the_tour_is_there(stop):
    file, name = stop
    assert re.search(rf"^ *(?:def|class) {name}\b", (ROOT / file).read_text(), re.MULTILINE)
