"""What the documents name is there: links, files, modules, options."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("bench", "ddp", "dp_clipping", "examples", "experiments", "lm", "measure", "tracing")
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), ROOT / "exercises/README.md"
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
            spellings = (option, option[2:], option[2:].replace("-", "_"))
            assert any(f'"{name}"' in sources for name in spellings), f"{option} in: {command}"


def file_tree() -> str:
    text = (ROOT / "README.md").read_text().partition("## Files, in reading order")[2]
    return text.split("```")[1]


@pytest.mark.parametrize("room", ROOMS)
def test_every_module_is_in_the_file_tree(room):
    section = re.search(rf"^{room}/.*\n(?:[ ].*\n)*", file_tree(), re.MULTILINE)[0]
    folders = [ROOT / room, *(p.parent for p in (ROOT / room).glob("*/__main__.py"))]
    modules = {path.name for folder in folders for path in folder.glob("[!_]*.py")}
    assert modules <= set(re.findall(r"\w+\.py", section))


def test_every_file_of_the_tree_is_there():
    rooms = [ROOT / name for name in (*ROOMS, "docs", "exercises", "tests")]
    there = {path.name for room in rooms for path in room.rglob("*.*")}
    there |= {path.name for path in ROOT.glob("*.*")}
    assert not set(re.findall(r"\w+\.(?:py|md)", file_tree())) - there
