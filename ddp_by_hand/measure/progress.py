"""One line on a terminal that says what runs and how long the rest may take."""

import shutil
import sys
import time
from collections.abc import Sequence
from typing import Self, TextIO

_CLEAR_LINE = "\r\x1b[K"


class Progress:
    """A line on stderr, rewritten for each step, on a terminal only.

    Call `update(label)` as each of `total` steps *starts*, and `close()` at the end. Elsewhere
    (in the log of a job) `finished(text)` prints a line for each step that has ended. As a context
    manager it closes itself, also when an exception passes through, so that a traceback or a
    table starts on a clean line. `done` of the steps were over before. `weights` say how long steps
    take, relative to each other; default: all the same.

        with Progress(total=len(cells)) as progress:
            for cell in cells:
                progress.update(cell.name)
                measure(cell)
    """

    def __init__(
        self,
        total: int,
        enabled: bool | None = None,
        stream: TextIO | None = None,
        done: int = 0,
        weights: Sequence[float] | None = None,
    ):
        self.total, self.done_before = total, done
        self._weights = [1.0] * total if weights is None else list(weights)
        self.stream = sys.stderr if stream is None else stream
        self.enabled = self.stream.isatty() if enabled is None else enabled
        self.prints_lines = enabled is None and not self.enabled
        self.started = done
        self.began = time.monotonic()
        self._dirty = False

    def update(self, label: str) -> None:
        """Shows that the next step, called `label`, starts now."""
        if self.enabled:
            self._show(f"[{self.started + 1}/{self.total}] {' '.join(label.split())}{self.left()}")
        self.started += 1

    def left(self) -> str:
        """Returns `, about 3 min 05 s left`, from how long the steps took that have started.

        All of them have ended. Returns nothing if there are none, or if all are over.
        """
        done, rest = self._weights[self.done_before : self.started], self._weights[self.started :]
        if not done or not rest:
            return ""
        seconds = (time.monotonic() - self.began) * sum(rest) / sum(done)
        return f", about {duration(seconds)} left"

    def _show(self, line: str) -> None:
        width = shutil.get_terminal_size().columns - 1  # a full line would scroll
        self.stream.write(_CLEAR_LINE + line[:width])
        self.stream.flush()
        self._dirty = True

    def finished(self, text: str) -> None:
        """Prints how the step ended that started last, as a line, without a terminal."""
        if self.prints_lines:
            seconds = duration(time.monotonic() - self.began)
            line = f"{self.started} of {self.total}, after {seconds}: {' '.join(text.split())}\n"
            self.stream.write(line)
            self.stream.flush()

    def close(self) -> None:
        """Erases the line and leaves the cursor at its start. A second call does nothing."""
        if self._dirty:
            self.stream.write(_CLEAR_LINE)
            self.stream.flush()
            self._dirty = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception) -> None:
        self.close()


def duration(seconds: float) -> str:
    """Formats seconds as `42 s`, `3 min 05 s` or `2 h 07 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
