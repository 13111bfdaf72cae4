"""Packages that only some programs need: each says in one line how to install what is missing."""

import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from ddp_by_hand.measure.extras import EXTRA_OF, require

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
DRAWS = "matplotlib is not installed: pip install 'ddp-by-hand[benchmark]'"
TRAINS = "transformers is not installed: pip install 'ddp-by-hand[transformers]'"
NEEDS = {
    "bench.main": DRAWS, "measure.report": DRAWS, "experiments.simulate.__main__": DRAWS,
    "experiments.local_steps": DRAWS, "experiments.correlated_noise": DRAWS,
    "experiments.examples_per_step": DRAWS,
    "experiments.plan_privacy.__main__": DRAWS, "examples.private_images": DRAWS,
    "examples.private_diffusion": DRAWS, "examples.private_text": DRAWS,
    "examples.finetune": TRAINS,
    "experiments.llama_fsdp.__main__": TRAINS, "experiments.profile_bottlenecks.__main__": TRAINS,
}  # fmt: skip
ARGUMENTS = {
    "measure.report": ["folder"], "experiments.simulate.__main__": ["folder"],
    "experiments.plan_privacy.__main__": [
        "--epsilon", "2", "--examples", "1e8", "--compute", "1e21",
    ],
}  # fmt: skip
WITHOUT = f"""
import importlib, pkgutil, sys
for name in {[*EXTRA_OF, "PIL", "huggingface_hub", "markupsafe", "safetensors"]}:
    sys.modules[name] = None
import ddp_by_hand
for module in pkgutil.walk_packages(ddp_by_hand.__path__, "ddp_by_hand."):
    if not module.name.endswith(("starter", "examples.finetune_run")):
        importlib.import_module(module.name)
print("imported")
"""


def test_each_is_of_the_extra_that_has_it_and_what_is_there_is_no_error():
    for package, extra in EXTRA_OF.items():
        assert package in [re.match(r"[\w-]+", needed)[0] for needed in EXTRAS[extra]]
    require(*EXTRA_OF)
    require()


@pytest.mark.parametrize("module", NEEDS)
def test_a_program_says_how_to_install_what_it_needs(module, capsys, monkeypatch):
    """Its `--help` needs nothing."""
    main = import_module(f"ddp_by_hand.{module}").main
    monkeypatch.setattr("ddp_by_hand.measure.extras.find_spec", lambda name: None)
    assert main(ARGUMENTS.get(module, [])) == 2
    assert capsys.readouterr().err in (f"{NEEDS[module]}\n", f"{module[9:]}: {NEEDS[module]}\n")
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert capsys.readouterr().out.startswith("usage: ")


@pytest.mark.slow
def test_every_module_can_be_imported_without_them():
    run = subprocess.run([sys.executable, "-c", WITHOUT], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout == "imported\n", run.stderr
