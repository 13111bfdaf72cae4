"""A fused mode on its kernels, in Triton's interpreter: ranges and measured times of each layer."""

import re

import pytest

from tests.bench.test_profile import ranges
from tests.support.benchmark_command import forked_benchmark

LAYERS = [
    *(f"blocks.0.attention.{name}.weight" for name in ("query", "key", "value", "output")),
    *(f"blocks.0.feed_forward.{name}.weight" for name in ("gate", "up", "down")),
    "head.weight",
]


def lines_of_plan(text: str) -> dict[str, str]:
    """Layer -> its line, of the first plan in a text."""
    body = re.search(r"^layer  .*\n-+  .*\n((?:.+\n)+)", text, re.MULTILINE)[1]
    return {line.split()[0]: line for line in body.splitlines()}


@pytest.mark.slow
def test_each_layer_has_its_ranges_and_the_summary_has_measured_times(tmp_path):
    """One rank, one epoch: there are seconds in it as it is."""
    pytest.importorskip("triton")
    run = forked_benchmark(
        *("--num-layers", 1, "--num-processes", 1, "--num-epochs", 1, "--warmup-epochs", 0),
        *("--data", "synthetic", "--implementations", "ddp_bucketed", "--rounds", 1),
        *("--clipping", "flash_bookkeeping:width", "--tile-size", 16),
        *("--profile", "--profile-output-dir", tmp_path),
        env={"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    stem = "ddp_bucketed_flash_bookkeeping_width"
    files = [f"{stem}_{rest}" for rest in ("rank_0_trace.json", "summary.txt", "timeline.png")]
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    found = ranges(tmp_path, stem, 0)
    for prefix in ("norm/width/", "sum/"):  # layers may have a launch, and so a range, in common
        names = [name for name in found if name.startswith(prefix)]
        assert set(LAYERS) <= {
            one for name in names for one in name.removeprefix(prefix).split("+")
        }
        for name in names:
            for (start, end), whole in zip(found[name], found["backward_pass"], strict=True):
                assert whole[0] <= start <= end <= whole[1]
    text = (tmp_path / f"{stem}_summary.txt").read_text()
    assert re.search(r"^clipping\.norm_algorithm +width$", text, re.M)
    assert re.search(r"^clipping\.tile_size +16$", text, re.M)
    assert "Plan of a private step, rank 0\n" in text
    lines = lines_of_plan(text)
    assert list(lines) == [*LAYERS, "all"]
    measured = {layer: float(line.split()[-1]) for layer, line in lines.items()}
    assert min(measured.values()) > 0
    assert measured.pop("all") == pytest.approx(sum(measured.values()), abs=0.01)
    operators = text.partition("Slowest operators")[2].partition("How to open")[0]
    assert "sum/" not in operators
    assert "norm/" not in operators
