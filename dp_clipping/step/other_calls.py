"""Calls of the network beside the one of a step: on other rows, as the user makes it, and again.

They find where the samples are, and what a call that failed says of the user's own network.
"""

from collections.abc import Callable
from opcode import opmap
from typing import Any

import torch

from dp_clipping.capture.network import CapturedNetwork
from dp_clipping.capture.samples.batch import tensors_of
from dp_clipping.guard.carried import restored
from dp_clipping.guard.state import State
from dp_clipping.layers.batch_layout import LayoutUnknown
from dp_clipping.torch_compat import flush_ready_nodes, is_passed_on

OF_ANY_SIZE = (
    "let it take any number of samples, as x.view(len(x), -1) does and x.view(64, -1) does not"
)
JOINED = (
    "row i of each tensor must be of sample i, and a number in it must not be that of another row, "
    "as in graphs that are joined into one; pad them to one number of nodes, as x [batch, nodes, "
    "features] and adjacency [batch, nodes, nodes], adjacency @ x"
)
OF_ZEROS = (
    "the batch has no sample, as a Poisson batch may, and the network cannot run on the row of "
    "zeros that takes its place ({error}): let forward take one, of which nothing is used"
)


class OtherCalls:
    """Calls of a captured network, of which nothing of a step is left in it.

    Args:
        capture: the network.
        state: what a call may change, and is put back.
        recover: puts a sharded network back after a call that failed.
    """

    def __init__(self, capture: CapturedNetwork, state: State, recover: Callable[[], None]):
        self.capture, self.network = capture, capture.network
        self._state, self._recover = state, recover

    def own_errors_first(
        self, run: Callable[[], Any], args: tuple, kwargs: dict, size: int = -1
    ) -> Any:
        """Returns what a run with other samples than a call has returns.

        If it fails, and the user's own call with all of its samples does, too, that error is
        raised, otherwise one that says what it means. Ranks of a sharded network cannot repeat a
        call alone.

        Args:
            run: the run; nothing of a step is left in the network afterwards.
            args, kwargs: of the user's call.
            size: of the call's batch; -1: it is not known yet.
        """
        try:
            return run()
        except BaseException as error:
            self._recover()
            if not isinstance(error, Exception):
                raise
            is_lost = "CUDA error" in str(error)  # after which nothing more can be computed
            if self.capture.sharding is not None or (is_passed_on(error) and not is_lost):
                raise
            if size and not is_lost:
                self._as_it_is(args, kwargs, has_backward=not _is_refusal(error))
            if _is_refusal(error) or "use_reentrant=True" in str(error):
                raise
            if not size:
                raise ValueError(OF_ZEROS.format(error=shown(error))) from error
            is_index = is_lost or isinstance(error, IndexError)
            cure = JOINED if is_index else OF_ANY_SIZE
            raise ValueError(
                "the network runs on its batch, and not on some of the rows in it, as it does "
                f"to find where the samples are ({shown(error)}): {cure}"
            ) from error

    def _as_it_is(self, args: tuple, kwargs: dict, has_backward: bool) -> None:
        """Calls the network as the user does, without a step, and puts back what that changes.

        Args:
            has_backward: a backward follows, which no gradient is kept of.
        """
        try:
            with (
                restored(self._state),
                self.capture.looked_at(lambda *_: None),
            ):
                ends = [y for y in tensors_of(self.network(*args, **kwargs)) if y.requires_grad]
                if has_backward and ends:
                    ones = list(map(torch.ones_like, ends))
                    torch.autograd.grad(ends, self.capture.parameters, ones, allow_unused=True)
        except Exception as error:
            flush_ready_nodes()
            raise error from None

    def again(self, private_step: Any, args: tuple, kwargs: dict) -> Any:
        """Calls the network without its wrapper, which has prepared this forward already."""
        try:
            with self.capture.attached(private_step):
                return self.network(*args, **kwargs)
        except LayoutUnknown as error:
            raise ValueError(
                f"{error} is called in a way that depends on more than the batch: where its "
                "samples are cannot be established"
            ) from error


def _is_refusal(error: Exception) -> bool:
    """Returns whether a `raise` of this package raised the error, and not what it calls."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not isinstance(error, ValueError | RuntimeError):
        return False
    frame = trace.tb_frame
    is_raised = frame.f_code.co_code[trace.tb_lasti] == opmap["RAISE_VARARGS"]
    return is_raised and frame.f_globals.get("__name__", "").startswith("dp_clipping.")


def shown(error: Exception) -> str:
    """Returns the kind of an error and the first line of its text."""
    said = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {said}"
