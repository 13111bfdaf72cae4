"""What is installed, its version, what an import costs, and what a type checker sees of it."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CITATION = ROOT / "CITATION.cff"
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


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_imports_add_next_to_nothing_to_torch():
    """`dp_clipping` imports its rooms when they are used, `ddp` Triton."""
    torch_alone = modules_after("import torch")
    assert modules_after("import dp_clipping") - torch_alone == {"dp_clipping"}
    added = modules_after("import ddp") - torch_alone
    assert not added & SLOW_TO_IMPORT
    assert {name for name in added if name.startswith("torch.")} == set()


def files_of(root: Path, package: str) -> set[Path]:
    found = (root / package).rglob("*.*")
    return {path.relative_to(root) for path in found if path.suffix in SUFFIXES}


def test_only_the_packages_are_installed(tmp_path):
    """With their marks for type checkers, every folder of theirs, and what programs read."""
    source, target = tmp_path / "source", tmp_path / "target"
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for file in listed.stdout.split():
        if (ROOT / file).is_file():
            (source / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, source / file)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(target), str(source)], check=True)
    folders = {path.name for path in target.iterdir() if path.suffix != ".dist-info"}
    assert folders == set(PACKAGES)
    for package in PACKAGES:
        assert (target / package / "py.typed").is_file()
        assert files_of(target, package) == files_of(ROOT, package)


def test_the_version_is_one():
    """Of the package, of the citation, and of the newest section with a date."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    citation = dict(re.findall(r"^(version|date-released): (.+)$", CITATION.read_text(), re.M))
    changes = (ROOT / "CHANGELOG.md").read_text()
    newest, date = re.search(r"^## ([\d.]+) \(([\d-]+)\)$", changes, re.M).groups()
    assert citation == {"version": version, "date-released": date}
    assert newest == version


def check_types(path: Path) -> list[str]:
    settings = ["--config-file", str(ROOT / "pyproject.toml"), "--no-error-summary"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *settings, str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
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
