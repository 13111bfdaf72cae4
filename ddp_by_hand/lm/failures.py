"""Formats where an exception was raised: the traceback from the user's own code downwards.

A run consists mostly of code that its user did not write: torch, and this project's own packages.
A frame is the user's if its file lies elsewhere, or is named as theirs.
"""

import linecache
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import torch

MAX_FRAMES = 24  # of a traceback; a recursion has a thousand
_ROOT = Path(__file__).resolve().parents[2]
_OURS = ("bench", "lm", "measure", "tracing")  # and no examples or exercises: users write on these
_PROJECT = tuple(
    f"{_ROOT / room}{os.sep}"
    for room in ("ddp", "dp_clipping", *(f"ddp_by_hand/{name}" for name in _OURS))
)
_LIBRARIES = tuple(
    f"{folder}{os.sep}"
    for folder in {
        str(Path(torch.__file__).parent),
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    }
)
_COLLECTIVES = f"{Path(torch.__file__).parent / 'distributed'}{os.sep}"

Frames = Sequence[traceback.FrameSummary]


def describe_traceback(error: BaseException, own: Collection[str] = ()) -> str:
    """Returns the traceback of `error` and of its causes, from the first frame of the user's code.

    Args:
        own: files that are the user's wherever they lie, as absolute paths.
    """
    whole = traceback.TracebackException.from_exception(error, compact=True)
    for one in _chain(whole):
        one.stack = traceback.StackSummary.from_list(_shorten(_from_user(one.stack, own)))
    return "".join(whole.format()).rstrip()


def locate(error: BaseException, own: Collection[str] = ()) -> str:
    """Returns `file:line in function: source` of the innermost frame of the user's code.

    Empty if the error has no traceback.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return _place(error.filename, error.lineno, "", error.text)
    return _innermost(traceback.extract_tb(error.__traceback__), own)


def concerns_user(error: BaseException, own: Collection[str] = ()) -> bool:
    """Returns whether a frame of the traceback is the user's."""
    return any(_is_own(frame, own) for frame in traceback.extract_tb(error.__traceback__))


def locate_threads(own: Collection[str] = ()) -> tuple[str, str, bool]:
    """Returns `locate` and `describe_traceback` of the code that this process runs now.

    That is the main thread, or another one if only that runs the user's code (autograd's). The
    third value says whether a thread waits in a collective, that is, for other ranks.
    """
    main, mine = threading.main_thread().ident, threading.get_ident()
    frames = sys._current_frames()
    threads = sorted((number for number in frames if number != mine), key=lambda n: n != main)
    stacks = [traceback.extract_stack(frames[number]) for number in threads]
    stack = next((s for s in stacks if any(_is_own(f, own) for f in s)), stacks[0])
    lines = traceback.StackSummary.from_list(_shorten(_from_user(stack, own))).format()
    text = "Stack of the thread that stands still (most recent call last):\n" + "".join(lines)
    return _innermost(stack, own), text.rstrip(), any(_waits_for_ranks(s[-1]) for s in stacks)


def _waits_for_ranks(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(_COLLECTIVES) or ".wait(" in (frame.line or "")


def _chain(error: traceback.TracebackException | None) -> Iterator[traceback.TracebackException]:
    while error is not None:
        yield error
        for one in error.exceptions or ():  # of an ExceptionGroup
            yield from _chain(one)
        error = error.__cause__ or error.__context__


def _is_own(frame: traceback.FrameSummary, own: Collection[str]) -> bool:
    name = os.path.abspath(frame.filename)
    if name in own:
        return True
    is_file = not frame.filename.startswith("<")  # <string>, <frozen importlib._bootstrap>
    is_script = name == os.path.abspath(sys.argv[0])
    return is_file and not is_script and not name.startswith((*_PROJECT, *_LIBRARIES))


def _from_user(stack: Frames, own: Collection[str]) -> Frames:
    """Returns the frames from the first one of the user's code on; all if there is none."""
    first = next((i for i, frame in enumerate(stack) if _is_own(frame, own)), 0)
    return stack[first:]


def _shorten(stack: Frames) -> Frames:
    half = MAX_FRAMES // 2
    return stack if len(stack) <= MAX_FRAMES else [*stack[:half], *stack[-half:]]


def _innermost(stack: Frames, own: Collection[str]) -> str:
    """Returns the innermost of the user's frames; without any, of those outside libraries."""
    own_frames = [frame for frame in stack if _is_own(frame, own)]
    project = [frame for frame in stack if frame.filename.startswith(_PROJECT)]
    for frames in (own_frames, project, stack):
        if frames:
            frame = frames[-1]
            return _place(frame.filename, frame.lineno, frame.name, frame.line)
    return ""


def _place(file: str, line: int | None, function: str, source: str | None) -> str:
    path = Path(file)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    source = source or linecache.getline(file, line or 0)
    inside = f" in {function}" if function and not function.startswith("<") else ""
    return f"{path}:{line}{inside}: {' '.join(source.split())}"
