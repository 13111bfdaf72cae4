"""Frees what a backward that failed leaves behind."""

import torch


def flush_ready_nodes() -> None:
    """Frees what a backward that failed in this thread has left in autograd's queue.

    Its nodes hold activations until another backward runs in the thread: a trivial one does.
    """
    with torch.enable_grad():
        nothing = torch.zeros((), requires_grad=True)
        torch.autograd.grad(nothing + 0, nothing)
