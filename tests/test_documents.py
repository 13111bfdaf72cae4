"""What the documents name is there: links, files, modules; and programs take the commands shown."""

import argparse
import builtins
import dis
import importlib.util
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import CodeType
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.run import get_args_parser as torchrun_parser

import tests.support.accountants  # noqa: F401 - makes them fast
from ddp_by_hand.bench.options import Options as BenchmarkOptions
from ddp_by_hand.bench.settings import settings_from
from ddp_by_hand.exercises.check import parse as parse_exercise
from ddp_by_hand.measure import options

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = [p.parent for p in sorted((ROOT / "dp_clipping").rglob("__init__.py"))]
SLOW = ("post_training.md",)  # whose blocks train with TRL
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs/proofs").glob("*.md")),
    ROOT / "ddp_by_hand/examples/README.md", ROOT / "ddp_by_hand/exercises/README.md",
]  # fmt: skip
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
SCRIPTS = {  # console scripts -> what `python -m` starts
    name: re.sub(r"\.(main|__main__)$", "", entry.partition(":")[0])
    for name, entry in PROJECT["scripts"].items()
}
COMMAND = re.compile(
    r"(?:.*?[\s/])?(?:(python3?|torchrun)\s+(-.*|\S+\.py\b.*)"
    rf"|({'|'.join(SCRIPTS)})((?:\s.*)?))",
    re.DOTALL,
)
PARSES_FIRST = re.compile(
    r"\w+\.py|ddp_by_hand\.bench|(?:docs|ddp_by_hand\.(?:examples|experiments|measure))\.[\w.]+"
    r"|tests\.support\.checks_cost"
)
NOT_PARSED = {  # the others would run
    "your_training.py": "the reader's own program",
    "pytest": "not ours",
    "tests.support.agreement_cost": "takes no arguments",
    "tests.support.host_cost": "takes no arguments",
}
PYTHON = re.compile(
    r"^(?:<!-- after: (\S+) -->\n)?(<!-- not run: .+ -->\n)?```python\n([^`]*)^```", re.MULTILINE
)
each_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))


def prose_of(path: Path) -> str:
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchor_of(heading: str) -> str:
    """Returns the anchor that GitHub makes of a heading, `#` signs included."""
    return re.sub(r"[^\w\- ]", "", heading.lstrip("# ").lower()).replace(" ", "-")


def anchors_of(path: Path) -> set[str]:
    return {anchor_of(text) for text in re.findall(r"^#+ .+$", prose_of(path), re.MULTILINE)}


def commands_of(path: Path) -> list[str]:
    """What starts a program: lines of code blocks, continued ones as one, and code in the text.

    There a command without arguments may only name its program.
    """
    blocks = re.findall(r"^```\w*\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    in_text = filter(COMMAND.fullmatch, re.findall(r"`([^`]+)`", prose_of(path)))
    lines += (command for command in in_text if program_of(command)[-1])
    return list(dict.fromkeys(filter(COMMAND.fullmatch, lines)))


class Parsed(BaseException):
    """Ends a program once it has parsed its options; it has no handler for this."""


@contextmanager
def stopping() -> Iterator[None]:
    """Programs parse what `sys.argv` gives, with all checks of their options, and end there.

    They find a GPU, which some options need.
    """
    real = argparse.ArgumentParser.parse_args

    def of_argparse(parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        raise Parsed(real(parser, sys.argv[1:]))

    def of_options(kind: type, **texts: Any) -> NoReturn:
        with pytest.MonkeyPatch.context() as whole:
            whole.setattr(argparse.ArgumentParser, "parse_args", real)
            whole.setattr(options, "parser_of", parser_of)
            found = options.parse_options(kind, sys.argv[1:], **texts)
        raise Parsed(found)

    parser_of = options.parser_of  # `parse_options` begins with it
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(argparse.ArgumentParser, "parse_args", of_argparse)
        patches.setattr(options, "parser_of", of_options)
        patches.setattr(torch.cuda, "is_available", lambda: True)
        yield


def program_of(command: str) -> tuple[bool, str, list[str]]:
    """Whether a command starts a module (-m) or a file, which, and the arguments that it gets."""
    launcher, text, script, more = COMMAND.fullmatch(command).groups()
    words = shlex.split(text or more, comments=True)
    if script:
        return True, SCRIPTS[script], words
    if launcher == "torchrun":
        found = torchrun_parser().parse_args(words)
        return found.module, found.training_script, found.training_script_args
    is_module = words[0] == "-m"
    program, *arguments = words[1:] if is_module else words
    return is_module, program, arguments


def check(command: str) -> None:
    """Lets the program of a command take its options, and no more.

    Raises:
        ImportError, FileNotFoundError: there is no such program.
        SystemExit: it refuses them; stderr says why.
        ValueError: the benchmark, or the exercises' check, refuses what they mean together.
        AssertionError: it has parsed nothing, or is not known to parse first.
    """
    is_module, program, arguments = program_of(command)
    if program in NOT_PARSED:
        assert program.endswith(".py") or importlib.util.find_spec(program), program
        return
    if program == "ddp_by_hand.exercises":  # it has no argparse, and wants a file
        task, *words = arguments
        assert task in ("start", "check"), task
        parse_exercise([*(words if task == "start" else words[:-1]), __file__])
        return
    assert PARSES_FIRST.fullmatch(program), f"{program} might run: see NOT_PARSED"
    with pytest.MonkeyPatch.context() as patches, stopping():
        patches.setattr(sys, "argv", [program, *arguments])
        try:
            if is_module:
                runpy.run_module(program, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(str(ROOT / program), run_name="__main__")
        except Parsed as parsed:
            (found,) = parsed.args
            if isinstance(found, BenchmarkOptions):  # its parser knows no names
                ours = tuple(name for name in found.implementations if ":" not in name)
                found = replace(found, implementations=ours, data="synthetic")
                settings_from(found, "cuda", Path())
            return
    raise AssertionError(f"{program} has ended without parsing options: see NOT_PARSED")


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


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize(
    "path",
    [path for path in DOCUMENTS if path.name != "CHANGELOG.md"],  # which names what is gone
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_programs_take_the_commands_of_documents(path):
    for command in commands_of(path):
        try:
            check(command)
        except (ImportError, FileNotFoundError, SystemExit, ValueError) as error:
            raise AssertionError(f"{command}: {error!r}, see stderr") from error


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize(
    ("command", "error", "says"),
    [
        ("python -m ddp_by_hand.measure.compare A B --treshold 0.05", SystemExit, "--treshold"),
        ("python benchmark_ddp.py --clipping bookkeping", ValueError, ""),
        ("torchrun --procs=2 benchmark_ddp.py", SystemExit, "--procs"),
        ("python -m ddp_by_hand.measure.compares A B", ImportError, ""),
        ("ddp-exercise check averages my_average.py", ValueError, ""),
        ("python -m ddp_by_hand.lm.launch", AssertionError, ""),
    ],
)
def test_a_wrong_command_is_found(command, error, says, capsys):
    with pytest.raises(error):
        check(command)
    assert says in capsys.readouterr().err


def given() -> dict[str, Any]:
    """What documents take for granted: the reader's own network, data and training loop."""
    network = nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 2))
    x, y = torch.randn(32, 20), torch.randint(2, (32,))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    criterion = nn.CrossEntropyLoss()
    return {
        "torch": torch, "nn": nn, "network": network, "optimizer": optimizer, "loader": loader,
        "criterion": criterion, "loss_function": criterion, "x": x, "y": y, "batch": (x, y),
    }  # fmt: skip


def unknown_names(code: CodeType, names: set[str]) -> set[str]:
    """Returns the global names that a block, or a function in it, uses and nobody has defined."""
    names = names | {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_NAME"}
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    uses = (i for i in dis.get_instructions(code) if i.opname in ("LOAD_NAME", "LOAD_GLOBAL"))
    return {i.argval for i in uses} - names - set(dir(builtins)) - {"__name__"} | {
        name for function in inner for name in unknown_names(function, names)
    }


def run_blocks(path: Path) -> dict[str, Any]:
    """Executes the Python blocks of a document, one after the other, and returns their names.

    A block continues the one before it. Below `<!-- after: FILE -->` it continues the blocks of
    another document. Below `<!-- not run: REASON -->` only its syntax and its names are checked.
    """
    text = path.read_text()
    names = given()
    blocks = list(PYTHON.finditer(text))
    assert len(blocks) == text.count("```python"), (
        f"{path.name} has a block or marker unlike others"
    )
    for block in blocks:
        after, is_not_run, source = block.groups()
        if after:
            names = run_blocks(ROOT / after)
        line = text.count("\n", 0, block.start(3))
        code = compile("\n" * line + source, path, "exec")
        unknown = unknown_names(code, set(names))
        assert not unknown, f"{path.name}, block from line {line + 1}: {unknown} are not defined"
        if not is_not_run:
            exec(code, names)
    return names


@pytest.fixture
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=pytest.mark.slow) if path.name in SLOW else path
        for path in DOCUMENTS
        if "```python" in path.read_text()
    ],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_python_blocks_run(path, group_of_one, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write files
    run_blocks(path)


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("```python\nx.no_such_method()\n```", AttributeError, "no_such_method"),
        ("```python\nmake_public(x)\n```", AssertionError, "line 2: {'make_public'}"),
        ("<!-- not run: why -->\n```python\n1 / 0\nlost\n```", AssertionError, "lost"),
        ("- a\n  ```python\n  x\n  ```", AssertionError, "unlike others"),
        ("<!-- after: README.md -->\n```python\nengine.lost\n```", AttributeError, "lost"),
    ],
)
def test_a_wrong_block_is_found(text, error, says, group_of_one, tmp_path):
    (tmp_path / "page.md").write_text(text + "\n")
    with pytest.raises(error, match=re.escape(says)):
        run_blocks(tmp_path / "page.md")


def section_of(path: Path, anchor: str) -> str:
    """Returns the text from the heading with this anchor to the next heading of its level."""
    parts = re.split(r"^(#+ .+)$", path.read_text(), flags=re.MULTILINE)
    headings = dict(enumerate(parts[1::2]))
    first = next(n for n, text in headings.items() if anchor_of(text) == anchor)
    level = len(headings[first].split()[0])
    after = (n for n, text in headings.items() if n > first and len(text.split()[0]) <= level)
    return "".join(parts[2 * first + 1 : 2 * next(after, len(headings)) + 1])


@pytest.mark.parametrize(
    "path",
    [path for path in DOCUMENTS if "<!-- not run" in path.read_text()],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_a_block_that_needs_gpus_says_so(path):
    """In the text that a reader sees: the marker itself is a comment."""
    text = path.read_text()
    for block in PYTHON.finditer(text):
        if "GPU" in (block[2] or ""):
            before = re.split(r"^#+ ", text[: block.start()], flags=re.MULTILINE)[-1]
            assert "GPU" in before + block[3], f"{path.name}: {block[2]}"


def test_headline_figures_stand_in_the_tables_that_they_link_to():
    rows = re.findall(r"^\| \[relative to .+?\]\((.+?)#(.+?)\) \| (.+) \|$",
                      (ROOT / "README.md").read_text(), re.MULTILINE)  # fmt: skip
    assert len(rows) == 2
    for name, anchor, figures in rows:
        table = section_of(ROOT / name, anchor)
        for figure in re.findall(r"\d+\.\d+", figures):
            assert re.search(rf"\| [^|\n]*\b{re.escape(figure)}\b", table), (name, figure)


def test_readme_examples_and_files_of_the_course_are_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 200, "a newcomer reads it: put more into a page of docs/"
    blocks = PYTHON.findall((ROOT / "docs/extend.md").read_text())
    assert len(blocks) >= 5
    assert max(block.count("\n") for *_, block in blocks) <= 40
    readme = (ROOT / "README.md").read_text()
    limit = int(re.search(r"six files of at\s+most\s+(\d+)\s+lines", readme)[1])
    row = re.compile(r"`(ddp/(?!torch_|sharded|diloco)[\w/]+\.py)` \|$", re.MULTILINE)
    files = set(row.findall(readme))
    assert len(files) == 6
    assert all(len((ROOT / file).read_text().splitlines()) <= limit for file in files)


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


PROOFS = sorted((ROOT / "docs/proofs").glob("*.md"))
NAMED = re.compile(r"`((?:tests|dp_clipping|ddp)/[\w/]+\.py)(?:(?:::\w+)*::(\w+))?`")
each_proof = pytest.mark.parametrize("path", PROOFS, ids=lambda p: p.name)


def preconditions_of(path: Path) -> list[str]:
    """Returns the rows of the tables of a proof that say what enforces a precondition."""
    table = re.search(
        r"^\| precondition \|.*\n\|[ -|]+\n((?:\|.*\n?)+)", path.read_text(), re.MULTILINE
    )
    return table[1].splitlines()


@each_proof
def test_what_a_proof_names_is_there(path):
    named = NAMED.findall(path.read_text())
    assert named
    for file, name in named:
        text = (ROOT / file).read_text()
        assert not name or re.search(rf"^ *(?:def|class) {name}\b", text, re.M), (file, name)


@each_proof
def test_a_proof_is_short_and_each_precondition_is_enforced_or_said_not_to_be(path):
    """By a test, on another page, or by nobody."""
    for row in preconditions_of(path):
        assert re.search(r"`tests/|\*\*not enforced\*\*|\]\(\w+\.md\)", row, re.IGNORECASE), row
    assert len(path.read_text().split()) <= 950, "about two pages"
