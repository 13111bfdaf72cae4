"""Runs one rank of several: joins the group, watches it and leaves it in order."""

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from ddp_by_hand.lm.interrupt import INTERRUPTED
from ddp_by_hand.lm.runtime import Hardware, Worker, connect_store, process_group
from ddp_by_hand.lm.watch import Cause, Watch


@contextmanager
def watched_rank(
    hardware: Hardware,
    timeout_s: float,
    on_failure: Callable[[Cause], None] = lambda cause: None,
    on_interrupt: Callable[[], None] = lambda: None,
    own: Collection[str] | None = None,
) -> Iterator[tuple[Worker, Watch]]:
    """Joins the ranks that the launcher started; an exception inside ends all of them.

    Args:
        hardware, timeout_s: see `lm.runtime.process_group`.
        on_failure: called with the first cause, on every rank, before the process ends.
        on_interrupt: called after Ctrl-C, before the process ends.
        own: see `Watch`.
    """
    with process_group(hardware, timeout_s) as worker:
        store = connect_store(timedelta(seconds=timeout_s))
        watch = Watch(store, worker.rank, worker.world_size, timeout_s, on_failure, own)
        try:
            yield worker, watch
            dist.barrier()  # no rank exits while others work
        except KeyboardInterrupt:
            on_interrupt()
            os._exit(INTERRUPTED)  # the others may be gone: an orderly end is not possible
        except BaseException as error:  # SystemExit of a plug-in too
            watch.fail(error)
        watch.close()
        dist.barrier()  # the first rank may host the store, which the other watches use
