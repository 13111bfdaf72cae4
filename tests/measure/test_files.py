"""Files survive kills: whole or absent, and a cut last line is dropped and repaired."""

import json
import random
import signal
import subprocess
import sys
import time

import pytest

from ddp_by_hand.measure.files import append_line, read_lines, write_atomically


def test_append_and_read(tmp_path):
    path = tmp_path / "log.jsonl"
    assert read_lines(path) == []
    append_line(path, '{"a": 1}')
    append_line(path, '{"a": "ü"}')
    assert read_lines(path) == [{"a": 1}, {"a": "ü"}]
    with pytest.raises(ValueError, match="line break"):
        append_line(path, '{"a":\n1}')


CUT = ['{"b', '{"b": "ü'.encode()[:-1].decode("latin-1"), "x" * 9000, "{"]


@pytest.mark.parametrize(
    ("lines", "last", "whole"),
    [*((['{"a": 1}'], cut, False) for cut in CUT), ([], CUT[0], False),
     (['{"a": 1}'], '{"b": 2}', True)],
)  # fmt: skip
def test_a_cut_last_line_is_dropped_and_repaired_and_a_whole_one_kept(tmp_path, lines, last, whole):
    path = tmp_path / "log.jsonl"
    path.write_bytes("".join(f"{line}\n" for line in lines).encode() + last.encode("latin-1"))
    lines = [*lines, last] if whole else lines
    assert read_lines(path) == [*map(json.loads, lines)]
    append_line(path, '{"c": 3}')
    assert read_lines(path) == [*map(json.loads, lines), {"c": 3}]
    assert path.read_text() == "".join(f"{line}\n" for line in [*lines, '{"c": 3}'])


@pytest.mark.parametrize("broken", ['{"a', "", "\x00\x00", "{}{}"])
def test_corrupt_line_elsewhere_names_file_and_line(tmp_path, broken):
    path = tmp_path / "log.jsonl"
    path.write_text(f'{{"a": 1}}\n{broken}\n{{"c": 3}}\n')
    with pytest.raises(ValueError, match=r"log\.jsonl, line 2") as caught:
        read_lines(path)
    assert "\n" not in str(caught.value)


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    (tmp_path / "whole.txt").write_text("old")
    with pytest.raises(TypeError):
        write_atomically(tmp_path / "whole.txt", 3)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("whole.txt", "old")]


def _kill_while_running(code: str, folder, seconds: float) -> None:
    """Start `code` with `folder` as argument, wait until it has begun, SIGKILL it a bit later."""
    process = subprocess.Popen([sys.executable, "-c", code, str(folder)])
    deadline = time.monotonic() + 120
    while not (folder / "begun").exists():
        assert process.poll() is None, "the writing process ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    (folder / "begun").unlink()


_WRITER = """
import importlib.util, json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
spec = importlib.util.spec_from_file_location("files", {source!r})  # without measure's imports
files = importlib.util.module_from_spec(spec)
spec.loader.exec_module(files)
i = 0
while True:
    text = json.dumps({{"i": i, "padding": "ü" * 200_000}})
    files.write_atomically(folder / "whole.json", text)
    files.append_line(folder / "log.jsonl", text)
    (folder / "begun").touch()
    i += 1
"""


def test_killed_writer_leaves_whole_files(tmp_path):
    code = _WRITER.format(source=sys.modules["ddp_by_hand.measure.files"].__file__)
    generator = random.Random(0)
    for _ in range(5):
        _kill_while_running(code, tmp_path, generator.uniform(0, 0.05))
        whole = json.loads((tmp_path / "whole.json").read_text())
        assert len(whole["padding"]) == 200_000
        assert {len(line["padding"]) for line in read_lines(tmp_path / "log.jsonl")} == {200_000}
    leftovers = {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")}
    assert leftovers == {"whole.json", "log.jsonl"}
