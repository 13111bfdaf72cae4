"""What is installed, its version, what an import costs, and what a type checker sees of it."""

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from contextlib import suppress
from importlib import import_module
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CITATION = ROOT / "CITATION.cff"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = ("ddp", "ddp_by_hand", "dp_clipping")
SUFFIXES = {".py", ".jinja", ".md", ".typed"}
SLOW_TO_IMPORT = {
    "einops", "matplotlib", "numpy.random", "opacus", "scipy", "sympy", "torch._dynamo",
    "torch._inductor", "torch.distributed.checkpoint", "torch.distributed.fsdp",
    "torch.distributed.tensor", "transformers", "triton",
}  # fmt: skip
USER = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ddp
from dp_clipping import BatchMemoryManager, PrivacyEngine

network = nn.Linear(2, 2)
loader = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)
engine = PrivacyEngine()
model, optimizer, criterion, data_loader = engine.make_private(
    module=network,
    optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
    criterion=nn.CrossEntropyLoss(),
    data_loader=loader,
    noise_multiplier=1.0,
    max_grad_norm=[1.0],
    clipping="per_layer",
)
loss = criterion(model(torch.ones(2, 2)), torch.zeros(2, dtype=torch.long))
loss.backward()
optimizer.step()
with BatchMemoryManager(data_loader=data_loader, max_physical_batch_size=2, optimizer=optimizer):
    pass
wrapped: nn.Module = ddp.wrap("ddp_bucketed", network, bucket_size_mb=25)
"""
MAKE = USER.replace("import ddp\n", "").partition("loss = criterion")[0]
ORDINARY = MAKE.partition("engine = ")[0].replace("from dp_clipping", "# ")
MISTAKES = {
    "make_private": """
engine.make_private(
    module="network", optimizer=optimizer, criterion=criterion, data_loader=loader,
    noise_multiplier="1", max_grad_norm=1.0,
)
""",
    "no_such_argument": "PrivacyEngine(no_such_argument=1)\n",
    "no_such_method": "engine.no_such_method()\n",
    "max_physical_batch_size": """
BatchMemoryManager(data_loader=loader, max_physical_batch_size="2", optimizer=optimizer)
""",
    "wrap": 'ddp.wrap(network, "ddp_bucketed")\n',
}


def modules_after(*statements: str) -> list[set[str]]:
    """Returns what one process has imported after each statement."""
    code = "\nimport sys\nprint(*sys.modules)\n".join((*statements, ""))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [set(line.split()) for line in done.stdout.splitlines()]


def test_imports_add_next_to_nothing_and_what_starts_a_private_training_is_soon_there():
    """Modules are counted, since seconds depend on the machine.

    `dp_clipping` imports its rooms when they are used, `ddp` Triton.
    """
    ordinary = f"{ORDINARY}\noptimizer = torch.optim.SGD(network.parameters(), lr=0.1)"
    torch_alone, private, both, before, after = modules_after(
        "import torch", "import dp_clipping", "import ddp", ordinary, MAKE
    )
    assert private - torch_alone == {"dp_clipping"}
    added = both - private
    assert not added & SLOW_TO_IMPORT
    assert {name for name in added if name.startswith("torch.")} == set()
    added = after - before
    assert len(added) <= 500, sorted(added)
    ours = {name for name in added if name.startswith("dp_clipping")}
    assert 200 <= len(ours) <= 300
    slow = SLOW_TO_IMPORT & {"matplotlib", "opacus", "torch._inductor", "transformers"}
    assert not added & {"dp_accounting", "scipy.stats", *slow}


def copy_source(target: Path) -> None:
    """Copies the files of the repository."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for file in listed.stdout.split():
        if (ROOT / file).is_file():
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, target / file)


def files_of(root: Path, package: str) -> set[Path]:
    found = (root / package).rglob("*.*")
    return {path.relative_to(root) for path in found if path.suffix in SUFFIXES}


def named(requirements: list[str]) -> set[str]:
    return {re.match(r"[\w-]+", needed)[0].lower().replace("_", "-") for needed in requirements}


def imported(package: str, providers: dict[str, list[str]]) -> dict[str, set[str]]:
    """Returns the distributions that the files of a package import, each with these files."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / package).rglob("*.py"):
        names = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.add(node.module)
        tops = {name.partition(".")[0] for name in names}
        for top in tops - {*PACKAGES, *sys.stdlib_module_names}:
            name = providers.get(top, [top])[0].lower().replace("_", "-")
            found.setdefault(name, set()).add(str(path.relative_to(ROOT)))
    return found


def test_every_import_is_declared():
    """Packages and programs need what is installed with them, and the extras that say so."""
    core = named(PROJECT["dependencies"])
    extras = {name: named(needed) for name, needed in PROJECT["optional-dependencies"].items()}
    providers = packages_distributions()
    libraries = imported("ddp", providers) | imported("dp_clipping", providers)
    beyond = {name: files for name, files in libraries.items() if name not in core}
    assert set(beyond) <= extras["transformers"] | extras["trl"] | extras["lightning"], beyond
    assert all("/integrations/" in file for files in beyond.values() for file in files), beyond
    assert core <= set(libraries), "what nothing imports is no dependency"
    programs = imported("ddp_by_hand", providers)
    wanted = set(programs) | set(beyond)
    names = ("benchmark", "transformers", "trl", "matrix")
    of_programs = set().union(*(extras[name] for name in names))
    assert set(programs) <= core | of_programs, programs
    assert of_programs - {PROJECT["name"]} <= wanted | {PROJECT["name"]}


@pytest.mark.parametrize("script", PROJECT["scripts"])
def test_a_script_is_what_python_m_starts(script, capsys, monkeypatch):
    module, _, name = PROJECT["scripts"][script].partition(":")
    for started, shown in (
        (f"/bin/{script}", script),
        (module, re.sub(r"\.(__main__|main)$", "", module)),
    ):
        monkeypatch.setattr(sys, "argv", [started, "--help"])
        with suppress(SystemExit):
            assert getattr(import_module(module), name)() == 0
        assert re.match(rf"usage: (python -m )?{re.escape(shown)} ", capsys.readouterr().out)


@pytest.mark.slow
def test_what_is_installed_from_the_source_distribution_works(tmp_path):
    """Away from the clone: README's example, an exercise, the benchmark, the verifier.

    Only the packages are there, with their marks for type checkers, and what programs read.
    """
    source, away, python = tmp_path / "source", tmp_path / "away", tmp_path / "env/bin/python"
    copy_source(source)
    away.mkdir()
    build = f"import setuptools.build_meta as b; b.build_sdist({str(tmp_path)!r})"
    run([sys.executable, "-c", build], cwd=source)
    run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], cwd=away)
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (site / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    (packed,) = tmp_path.glob("*.tar.gz")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-index"]
    run([*pip, "--no-deps", "--no-build-isolation", packed], cwd=away)
    where = "import ddp, ddp_by_hand, dp_clipping\nprint(ddp_by_hand.__path__[0], ddp, dp_clipping)"
    assert run([python, "-c", where], cwd=away).count(str(site)) == 3
    (example,) = re.findall(
        r"```python\n(import torch\n.*?)```", (ROOT / "README.md").read_text(), re.S
    )
    assert 0 < float(run([python, "-c", example], cwd=away)) < 5
    own = {path.name for path in site.iterdir() if path.suffix not in (".dist-info", ".pth")}
    assert own == set(PACKAGES)
    for package in PACKAGES:
        assert (site / package / "py.typed").is_file()
        assert files_of(site, package) == files_of(ROOT, package)
    scripts = python.parent
    assert set(PROJECT["scripts"]) <= {path.name for path in scripts.iterdir()}
    run([scripts / "ddp-exercise", "start", "plan"], cwd=away)
    checked = [scripts / "ddp-exercise", "check", "plan", "my_plan.py"]
    assert "0 of 7 right" in run(checked, cwd=away, status=1)
    verified = run([scripts / "dp-verify", "--modes", "ghost", "--networks", "transformer"], away)
    assert "2 of 2 cases agree" in verified
    options = (
        "--device cpu --d-model 16 --num-layers 1 --num-heads 2 --d-ff 32 --context-length 16 "
        "--batch-size 2 --rounds 1 --steps-per-epoch 2 --implementations none ddp --output-dir out"
    )
    assert "report: out/report.html" in run([scripts / "ddp-benchmark", *options.split()], away)
    assert '"command": ["ddp-benchmark", ' in (away / "out/results.jsonl").read_text()


def run(command: list, cwd: Path, status: int = 0) -> str:
    """Runs a command that knows nothing of this clone; returns its output."""
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def test_the_version_is_one():
    """Of the package, of the citation, and of the newest section with a date."""
    version = PROJECT["version"]
    citation = dict(re.findall(r"^(version|date-released): (.+)$", CITATION.read_text(), re.M))
    changes = (ROOT / "CHANGELOG.md").read_text()
    newest, date = re.search(r"^## ([\d.]+) \(([\d-]+)\)$", changes, re.M).groups()
    assert citation == {"version": version, "date-released": date}
    assert newest == version


def check_types(path: Path) -> list[str]:
    settings = ["--config-file", str(ROOT / "pyproject.toml"), "--no-error-summary"]
    command = [sys.executable, "-m", "mypy", *settings, str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return [line for line in done.stdout.splitlines() if "error:" in line]


@pytest.mark.slow
def test_a_type_checker_sees_a_users_mistakes(tmp_path):
    """And nothing in right use."""
    path = tmp_path / "training.py"
    path.write_text(USER)
    assert check_types(path) == []
    path.write_text(USER + "".join(MISTAKES.values()))
    errors = check_types(path)
    first = USER.count("\n") + 1
    for name, mistake in MISTAKES.items():
        last = first + mistake.count("\n")
        lines = [int(e.split(":")[1]) for e in errors]
        assert any(first <= line < last for line in lines), (name, errors)
        first = last
