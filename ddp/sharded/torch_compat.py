"""Wraps what the sharded variants use of PyTorch without a public name, as ddp/torch_compat.py."""

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ddp.torch_compat import all_gather, found


def copy_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies tensors, of another dtype perhaps, in few launches: `torch._foreach_copy_`."""
    found(torch, "torch", "_foreach_copy_")(targets, sources)


def gather_on_hosts(everyone: Tensor, own: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Starts to write every rank's `own` [n] to `everyone` [W, n], both on the CPU."""
    if (beside := gloo_beside(group)) is None:
        return all_gather(everyone.view(-1), own, group)
    return beside.allgather([[*everyone]], [own])


_beside: WeakKeyDictionary[dist.ProcessGroup, Any] = WeakKeyDictionary()


def gloo_beside(group: dist.ProcessGroup) -> Any:
    """Returns gloo for the ranks of a group that has no backend for CPU tensors; else None.

    The first call is collective. `dist.new_group` would want the same calls on all ranks of the
    job, or, for some of them, each to be in equally many groups. So gloo meets in the store of the
    group itself, with its timeout, `ProcessGroup._get_backend(..).options._timeout`.
    """
    if "cpu:" in dist.get_backend_config(group):
        return None
    if group not in _beside:  # each has sockets and threads
        backend = found(group, "ProcessGroup", "_get_backend")(group._device_types[0])
        store = dist.PrefixStore("hosts", found(group, "ProcessGroup", "get_group_store")())
        timeout = found(backend, "Backend", "options._timeout")
        _beside[group] = dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout)
    return _beside[group]


def refuse_writes(x: Tensor) -> None:
    """Makes whatever writes to the memory of a tensor raise a RuntimeError.

    `torch._C._set_throw_on_mutable_data_ptr`. Without it, writes are as ever.
    """
    if (refuse := getattr(torch._C, "_set_throw_on_mutable_data_ptr", None)) is not None:
        refuse(x)
