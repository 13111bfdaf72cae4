"""The private text example as a user meets it: its numbers, its files, kills and wrong input."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
import warnings
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch

from ddp_by_hand.examples import private_text
from ddp_by_hand.examples.private_text_picture import draw_training

ROOT = Path(__file__).parents[2]
SMALL = {
    "context-length": 16, "d-model": 8, "num-layers": 1, "num-heads": 2, "d-ff": 16,
    "batch-size": 40, "max-physical-batch-size": 32, "report-every": 4, "checkpoint-every": 3,
}  # fmt: skip
TINY = ["--device", "cpu", *(part for name, n in SMALL.items() for part in (f"--{name}", str(n)))]
LINES = "".join(f"def name_{n}(self, value={n % 7}):\n    return value + {n}\n" for n in range(300))


@pytest.fixture
def letters(tmp_path):
    path = tmp_path / "letters.txt"
    path.write_text(LINES)
    return path


def arguments(letters: Path, folder: Path, *more: str) -> list[str]:
    return [*TINY, "--data", str(letters), "--output-dir", str(folder), *more]


def log_of(folder: Path) -> list[dict]:
    lines = (folder / "not_covered_by_epsilon.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def start(*arguments: str, ranks: int = 1) -> subprocess.Popen:
    command = [sys.executable, "-m", "ddp_by_hand.examples.private_text", *arguments]
    if ranks > 1:
        command[1:2] = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "-m"]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run and what it printed."""
    folder = tmp_path_factory.mktemp("finished")
    letters = folder / "letters.txt"
    letters.write_text(LINES)
    with warnings.catch_warnings(record=True) as said, redirect_stdout(StringIO()) as out:
        assert private_text.main(arguments(letters, folder / "run")) == 0
    assert not [one.message for one in said if "Optimal order" in str(one.message)]
    return letters, folder / "run", out.getvalue()


class TestARun:
    def test_spends_its_budget_and_says_what_it_does_not_cover(self, finished):
        _, folder, out = finished
        settings = json.loads((folder / "settings.json").read_text())
        assert settings["delta"] == pytest.approx(settings["sequences"] ** -1.1)
        spent = log_of(folder)[-1]["epsilon"]
        assert 7.5 < spent <= 8
        assert f"epsilon {spent:.3f} at delta {settings['delta']:.1e} for one sequence of 17" in out
        assert "not covered by epsilon" in out

    def test_sequences_are_disjoint_and_some_are_held_out(self, finished):
        letters, folder, _ = finished
        text = private_text.cut_sequences(str(letters), 16)
        sequences = json.loads((folder / "settings.json").read_text())["sequences"]
        assert sequences == len(text.training) == len(LINES) // 17 - len(LINES) // 17 // 20
        joined = torch.cat([text.training, text.held_out]).flatten()
        assert bytes(joined.tolist()) == LINES.encode()[: len(joined)]

    def test_every_step_is_in_the_log(self, finished):
        lines = log_of(finished[1])[1:]
        assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
        assert all(0 <= line["clipped"] <= 1 for line in lines)
        assert lines[-1]["held_out_bits"] < 8

    def test_the_model_can_be_loaded_and_the_key_is_its_owners(self, finished):
        folder = finished[1]
        state = torch.load(folder / "model.pt", weights_only=True)
        assert state["token_embedding.weight"].shape == (256, 8)
        assert stat.S_IMODE((folder / "checkpoint.pt.key").stat().st_mode) == 0o600
        assert (folder / "training.png").read_bytes().startswith(b"\x89PNG")
        assert not list(folder.glob("*.part"))

    def test_a_finished_run_is_not_trained_again(self, finished, capsys):
        letters, folder, _ = finished
        before = (folder / "model.pt").read_bytes()
        assert private_text.main(arguments(letters, folder)) == 0
        assert (folder / "model.pt").read_bytes() == before
        assert "epsilon 7." in capsys.readouterr().out


def interrupt(training) -> None:
    raise KeyboardInterrupt


class TestStops:
    def wait_for_step(self, folder: Path, step: int) -> None:
        for _ in range(2400):
            if folder.joinpath("not_covered_by_epsilon.jsonl").exists() and (
                log_of(folder)[-1].get("step", 0) >= step
            ):
                return
            time.sleep(0.05)
        pytest.fail(f"no step {step} within two minutes")

    def kill_after(self, step: int, arguments: list[str], folder: Path) -> None:
        process = start(*arguments)
        self.wait_for_step(folder, step)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert not (folder / "model.pt").exists(), "the run was over before it was killed"

    @pytest.mark.slow
    def test_a_killed_run_ends_as_if_it_had_not_been(self, letters, tmp_path, monkeypatch, capsys):
        """Two runs from one beginning have one key; one of them is killed on the way."""
        whole, killed = tmp_path / "whole", tmp_path / "killed"
        longer = ("--epochs", "4", "--report-every", "30", "--checkpoint-every", "7")
        longer += ("--epsilon", "1")  # the less to spend, the faster the search for the noise
        with monkeypatch.context() as patched:
            patched.setattr(private_text.Training, "_train_epoch", interrupt)
            assert private_text.main(arguments(letters, whole, *longer)) == private_text.INTERRUPTED
        said = capsys.readouterr().out
        assert "python -m ddp_by_hand.examples.private_text --" in said
        assert f"{TINY[0]} {TINY[1]}" in said
        shutil.copytree(whole, killed)
        self.kill_after(30, arguments(letters, killed, *longer), killed)
        for folder in (whole, killed):
            assert private_text.main(arguments(letters, folder, *longer)) == 0
        assert (whole / "model.pt").read_bytes() == (killed / "model.pt").read_bytes()
        assert log_of(whole) == log_of(killed)
        assert [line["step"] for line in log_of(killed)[1:]] == list(range(1, len(log_of(whole))))


class TestWrongInput:
    def test_a_folder_of_another_run_is_refused(self, finished, capsys):
        letters, folder, _ = finished
        assert private_text.main(arguments(letters, folder, "--epsilon", "3")) == 2
        assert "--epsilon is 3.0, and 8.0 in the run that" in capsys.readouterr().err

    def test_other_text_is_refused(self, finished, tmp_path, capsys):
        other = tmp_path / "other.txt"
        other.write_text(LINES.replace("self", "mine"))
        folder = shutil.copytree(finished[1], tmp_path / "run")
        settings = json.loads((folder / "settings.json").read_text())
        (folder / "settings.json").write_text(json.dumps(settings | {"data": str(other)}))
        assert private_text.main(arguments(other, folder)) == 2
        assert "--data differs from the text of the run" in capsys.readouterr().err


def test_the_picture_of_a_run_without_any_step(tmp_path):
    draw_training(tmp_path / "empty.png", [], unigram_bits=4.0, epsilon=8.0, title="nothing yet")
    assert (tmp_path / "empty.png").stat().st_size > 1000
