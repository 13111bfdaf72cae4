"""experiments.price_sharded as a command, on two CPU processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import price_sharded

ROOT = Path(__file__).parents[2]


def test_a_rehearsal(tmp_path):
    output = tmp_path / "price.json"
    command = [
        sys.executable, "-m", "experiments.price_sharded", "--model-name", "tiny", "--rows", "2x16",
        "--variants", "ordinary", "flash_bookkeeping_per_layer",
        "--rounds", "1", "--steps", "2", "--warm-up", "1", "--output", str(output),
        "--num-processes", "2",
    ]  # fmt: skip
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    cells = json.loads(output.read_text())["cells"]
    assert [c["variant"] for c in cells].count("ordinary") == 1
    assert len(cells) == 2
    for cell in cells:
        assert cell["ranks"] == 2
        assert len(cell["step_ms"]) == 2
        pairs = zip(cell["without_step_ms"], cell["step_ms"], strict=True)
        assert all(0 < part < whole for part, whole in pairs)
        ratio = next(
            x for x in run.stdout.splitlines() if x.startswith(f"2x16  {cell['variant']} ")
        )
        assert float(ratio.split()[2]) > 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["--rows", "2by3"],
        ["--rounds", "0"],
        ["--variants", "ghostly"],
        ["--num-processes", "0"],
        ["--output", "/dev/null/x.json"],
    ],
)
def test_wrong_options(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        price_sharded.main(arguments)
    assert end.value.code == 2
    assert arguments[0] in capsys.readouterr().err
