"""What is said of an exception: the user's own frames, down to the line that failed."""

import threading

import pytest
import torch
import torch.distributed as dist

from ddp_by_hand.lm.failures import MAX_FRAMES, describe_traceback, locate, locate_threads

SOURCE = """
import torch

def fail(x):
    assert x is None

def chained():
    try:
        {}["key"]
    except KeyError as error:
        raise RuntimeError("outer") from error

def forever():
    again()

def again():
    forever()

def inside_torch():
    torch.zeros(2) @ torch.zeros(3)

def hook(parameter):
    fail(parameter)

def wait(ready, done):
    ready.set()
    done.wait()
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A user's module, in the current folder."""
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "mine"}
    exec(compile(SOURCE, str(path), "exec"), names)
    return names, [str(path)]


def caught(call, *arguments) -> BaseException:
    try:
        call(*arguments)
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def through_torch(call):
    """As a training step calls it: frames of torch come before the user's."""
    parameter = torch.ones(1, requires_grad=True)
    parameter.register_post_accumulate_grad_hook(call)
    parameter.sum().backward()


def test_an_assertion_without_a_message_in_a_hook_of_backward(mine):
    names, own = mine
    error = caught(through_torch, names["hook"])
    assert locate(error, own) == "mine.py:5 in fail: assert x is None"
    lines = describe_traceback(error, own).splitlines()
    assert "mine.py" in lines[1] or "test_failures" in lines[1]
    source = set(map(str.strip, SOURCE.splitlines()))
    shown = [line.strip() for line in lines if line.strip() in source]
    assert shown == ["fail(parameter)", "assert x is None"]
    assert lines[-1] == "AssertionError"
    assert not any("autograd/graph.py" in line for line in lines[:2])


def test_an_error_that_torch_raises_is_located_in_the_users_line(mine):
    names, own = mine
    error = caught(names["inside_torch"])
    assert locate(error, own).startswith("mine.py:20 in inside_torch: torch.zeros(2) @ torch.")
    error = caught(compile, "a = 1\ndef f(:\n", "theirs.py", "exec")
    assert locate(error) == "theirs.py:2: def f(:"  # a syntax error has its own line


def test_causes_are_told_with_their_lines_and_a_recursion_is_cut(mine):
    names, own = mine
    text = describe_traceback(caught(names["chained"]), own)
    assert text.index("KeyError: 'key'") < text.index("direct cause") < text.index("outer")
    assert '{}["key"]' in text
    text = describe_traceback(caught(names["forever"]), own)
    assert text.count("mine.py") <= MAX_FRAMES


def test_a_thread_that_waits_for_other_ranks_is_told_from_others():
    store = dist.HashStore()  # its wait is C++, as that of a collective
    thread = threading.Thread(target=lambda: store.wait(["from rank 1"]))
    thread.start()
    found = []
    while not any(waits for *_, waits in found):
        looker = threading.Thread(target=lambda: found.append(locate_threads()))
        looker.start()
        looker.join()
    store.set("from rank 1", "")
    thread.join()
