"""Processes from which ranks and programs of tests are forked: they have imported what takes long.

Triton's interpreter must be chosen before Triton is imported, so that its processes have a server
of their own.
"""

import functools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import forkserver
from unittest.mock import patch

PRELOADED = [
    "torch.distributed.fsdp", "torch._dynamo", "opacus", "pytest", "dp_clipping.engine",
    "tests.support.frozen",
]  # fmt: skip
INTERPRETED = {"TRITON_INTERPRET": "1"}


def preload() -> None:
    forkserver.set_forkserver_preload(PRELOADED)


@functools.cache
def _interpreting() -> forkserver.ForkServer:
    server = forkserver.ForkServer()
    server.set_forkserver_preload(PRELOADED)
    with patch.dict(os.environ, INTERPRETED):
        server.ensure_running()
    return server


@contextmanager
def server_for(environment: Mapping[str, str]) -> Iterator[None]:
    """Lets processes with these variables start, each from the server that suits it."""
    if not environment.items() >= INTERPRETED.items():
        yield
        return
    connect = _interpreting().connect_to_new_process
    with patch.object(forkserver, "connect_to_new_process", connect):
        yield
