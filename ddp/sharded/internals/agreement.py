"""Ranks say what they are about to do before they do it: all the same, or none.

A step and, in `fsdp`, a forward are collective. If one rank left one out, the others would pair it
with the next one, and apply half of a step.
"""

from collections.abc import Callable
from typing import Any

FAILED = (  # the error comes last: messages between ranks are cut
    "optimizer.step() has failed on rank {rank}, and nothing has changed on any rank: {error}"
)
BROKEN = (
    "a step was applied in part, for it has failed on rank {rank} and other ranks have stepped "
    "their slices: load a checkpoint on all ranks, by optimizer.load_state_dict() too: {error}"
)
NOT_THE_SAME = (
    "ranks are about to do different things, and nothing has changed on any of them: {acts}. {cure}"
)
AS_OFTEN = "Every rank must step as often as the others: leave a step out on all of them or on none"
NOT_TOGETHER = (
    "the {what} of {name} has failed. With fsdp each forward and backward is a call of all ranks, "
    "and another rank has not made it: it has ended, failed, left its loop earlier, returned from "
    "its forward before this block, or evaluates alone. Take the same steps on all ranks and call "
    "the same blocks in them; to evaluate on one rank, let all enter `with "
    "model.whole_parameters():`. After an error start all ranks again, from a checkpoint"
)
ON_ALL = (
    "Every forward is a call of all ranks: to evaluate on one rank, let all enter `with "
    "model.whole_parameters():`"
)


class ToldError(RuntimeError):
    """An error that every rank raises: none has to be told of it again."""


def status_of(act: str, message: str = "") -> str:
    """Returns what a rank tells the others: what it is about to do, and why it cannot."""
    return f"{act}\n{message}"


def agree(
    exchange: Callable[[str], list[str]], act: str, message: str = "", differ: str = NOT_THE_SAME
) -> None:
    """Returns once all ranks are about to do the same; a collective call.

    Args:
        exchange: tells all ranks the status of this one, and returns those of all.
        message: why this rank cannot.
        differ: the message where ranks are about to do different things.

    Raises:
        ToldError: on every rank, if one has a message, or is about to do something else.
    """
    told = [status.partition("\n")[::2] for status in exchange(status_of(act, message))]
    if message := next((each for _, each in told if each), ""):
        raise ToldError(message)
    ranks: dict[str, list[int]] = {}
    for rank, (other, _) in enumerate(told):
        ranks.setdefault(other, []).append(rank)
    if len(ranks) > 1:
        acts = ", ".join(f"{other} on rank {first}" for other, (first, *_) in ranks.items())
        evaluates = any(" without " in other or " in eval" in other for other in ranks)
        raise ToldError(differ.format(acts=acts, cure=ON_ALL if evaluates else AS_OFTEN))


def noted(call: Callable[[], Any], what: str, block: str) -> Any:
    """Calls a collective of a block, to whose error it adds what may have happened."""
    try:
        return call()
    except RuntimeError as error:
        error.add_note(NOT_TOGETHER.format(what=what, name=block or "what is in no block"))
        raise
