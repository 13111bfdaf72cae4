"""Bad input: one line that names the option, exit status 2, and nothing has started."""

import errno
import os
import tempfile
from pathlib import Path

import pytest

from ddp import IMPLEMENTATIONS
from ddp_by_hand.bench import main as command
from ddp_by_hand.bench import memory
from ddp_by_hand.bench.names import plain
from ddp_by_hand.bench.options import EXAMPLES
from ddp_by_hand.bench.settings import settings_from, source_digest
from ddp_by_hand.bench.worker import plan
from tests.support.benchmark_command import parse

CPU = ["--device", "cpu"]


@pytest.fixture
def no_workers(monkeypatch, tmp_path):
    """Any start is a failure, and the largest model that fits is not looked for."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(memory, "machine_memory", lambda: None)
    monkeypatch.setattr(command, "run_ranks", lambda *_: pytest.fail("workers were started"))


def test_a_folder_without_permission(no_workers, capfd, monkeypatch):
    def refused(**options):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(tempfile, "TemporaryDirectory", refused)  # the superuser may write anywhere
    assert command.main([*CPU, "--output-dir", "new", "--dry-run"]) == 2
    assert "--output-dir new: cannot be written to (Permission denied)" in capfd.readouterr().err
    assert not Path("new").exists()


@pytest.mark.parametrize("mode", [[], ["--profile"]])
def test_a_dry_run_starts_and_writes_nothing(no_workers, capfd, tmp_path, mode):
    before = sorted(tmp_path.rglob("*"))
    assert command.main([*CPU, *mode, "--dry-run"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert out.startswith("gloo, 2 processes on CPU (as asked)\nmodel: 1,115,264 parameters")
    cells = len(IMPLEMENTATIONS) * (1 + 5)  # a gate and five rounds each
    assert (f"{cells} cells" in out) != bool(mode)
    assert sorted(tmp_path.rglob("*")) == before


def test_help_has_groups_and_examples(capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(["--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0
    assert EXAMPLES in text
    for group in ("what to compare", "privacy", "model", "run", "output", "profile mode"):
        assert f"\n{group}" in text


def test_settings_and_data_follow_options(tmp_path, monkeypatch):
    settings = settings_from(parse(["--preset", "small", "--d-ff", "64"]), "cpu", "folder")
    assert (settings.model.d_model, settings.model.d_ff) == (768, 64)
    assert (settings.steps_per_epoch, settings.output_dir) == (6, "folder")
    one = ["--profile", "--profile-implementation", "ddp"]
    settings = settings_from(parse(one), "cuda", "folder")
    assert (settings.implementations, settings.steps_per_epoch) == (("ddp",), 3)
    assert settings.model.num_layers == 12  # `small` on GPUs
    (tmp_path / "text.txt").write_text("word " * 100)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for path in ("~/text.txt", "text.txt"):
        assert settings_from(parse(["--data", path]), "cpu", "").data == str(tmp_path / "text.txt")


def test_an_edited_plugin_is_another_implementation(tmp_path):
    (tmp_path / "mine.py").write_text("a = 1")
    first = source_digest(f"{tmp_path}/mine.py:Mine")
    (tmp_path / "mine.py").write_text("a = 2")
    source_digest.cache_clear()
    assert first != source_digest(f"{tmp_path}/mine.py:Mine")
    assert source_digest("ddp") is None


CLASS = """
class {}(__import__("torch").nn.Module):
    def finish_gradient_synchronization(self): ...
"""


def test_plugins_of_one_name_have_titles_files_and_keys_of_their_own(tmp_path, monkeypatch):
    for file in ("a/mine.py", "b/mine.py", "a/other.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(CLASS.format("Mine") + CLASS.format("ddp"))
    monkeypatch.chdir(tmp_path)
    given = {
        "none": "none",
        "a/mine.py:Mine": "a/mine.Mine",
        "b/mine.py:Mine": "b/mine.Mine",
        "a/other.py:Mine": "other.Mine",
        "./b/mine.py:Mine": "b/mine.Mine#2",
        "b/mine.py:ddp": "mine.ddp",  # a built-in one has that name
    }
    names = [*given, "a/mine.py:Mine", "a/mine.py:Mine"]
    settings = settings_from(parse(["--implementations", *names]), "cpu", tmp_path)
    titles = [subject.label for subject in settings.subjects]
    assert titles == [*given.values(), "a/mine.Mine#2", "a/mine.Mine#3"]
    assert len({subject.file_stem for subject in settings.subjects}) == len(names)
    cells = plan(settings)
    assert len({cell.row(settings, 2, "cpu")["key"] for cell in cells}) == len(cells)
    assert {cell.label.partition(" ")[0] for cell in cells} == set(titles)
    assert {plain(name) for name in settings.implementations} == set(given)
