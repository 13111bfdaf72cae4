"""The progress line: only on a terminal, with an estimate, and clean afterwards."""

import io
import sys

import pytest

from ddp_by_hand.measure import progress as room
from ddp_by_hand.measure.progress import Progress, duration


class Terminal(io.StringIO):
    def isatty(self):
        return True


def _last_line(stream):
    return stream.getvalue().split("\r")[-1].removeprefix("\x1b[K")


@pytest.fixture
def clock(monkeypatch):
    """A list with the seconds that it is."""
    now = [100.0]
    monkeypatch.setattr(room.time, "monotonic", lambda: now[0])
    return now


def test_estimate_of_the_remaining_time(monkeypatch, clock):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    progress = Progress(5)
    progress.update("first")
    assert _last_line(stream) == "[1/5] first"
    clock[0] += 30
    progress.update("second\nline")
    assert _last_line(stream) == "[2/5] second line, about 2 min 00 s left"
    assert "\n" not in stream.getvalue()


def test_steps_may_weigh_more_than_others(clock):
    progress = Progress(4, enabled=False, done=1, weights=[9, 1, 2, 3])
    assert progress.left() == ""
    progress.update("the second")
    clock[0] += 4
    assert progress.left() == ", about 20 s left"
    progress.update("the third")
    progress.update("the last")
    assert progress.left() == ""


def test_long_label_does_not_wrap_and_the_line_is_clean_after_an_exception(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()

    def fail():
        with Progress(1, stream=stream) as progress:
            progress.update("x" * 100)
            assert len(_last_line(stream)) == 39
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fail()
    assert stream.getvalue().endswith("\r\x1b[K")


def test_duration():
    found = [duration(s) for s in (0.4, 59.6, 65, 7620)]
    assert found == ["0 s", "1 min 00 s", "1 min 05 s", "2 h 07 min"]


def test_without_a_terminal_each_finished_step_is_a_line(monkeypatch, clock):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress(5, done=2) as progress:
        progress.update("a")
        assert stream.getvalue() == ""
        clock[0] += 65
        progress.finished("a: 3 ms\n")
        progress.update("b")
        progress.finished("b: 4 ms")
    assert stream.getvalue() == (
        "3 of 5, after 1 min 05 s: a: 3 ms\n4 of 5, after 1 min 05 s: b: 4 ms\n"
    )
    for progress in (Progress(1, stream=Terminal()), Progress(1, False, io.StringIO())):
        progress.finished("a")  # on a terminal, and of other ranks, there are no lines
        assert progress.stream.getvalue() == ""
