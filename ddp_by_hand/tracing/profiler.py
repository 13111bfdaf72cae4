"""Records a trace: torch.profiler with the options that the rest of this package reads."""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import torch
from torch.profiler import ProfilerActivity

from dp_clipping.files import written_whole

from .phases import BOOT, CONFIGURATION

# The profiler's own log goes to stderr, from 2.13 on with a line at each start and stop.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


@contextmanager
def profile(
    trace_path: str | Path,
    *,
    device_type: str,
    memory: bool = True,
    configuration: dict = MappingProxyType({}),
) -> Iterator[torch.profiler.profile]:
    """Profiles the body and, if it succeeds, writes its Chrome trace to `trace_path`.

    Keep the body to a few steps, after warming up outside: a trace grows by about 100 kB a step
    even for a tiny model, and the first steps allocate, compile and connect. `configuration`, plain
    values, is kept in the trace for whoever reads it later.
    """
    activities = [ProfilerActivity.CPU]
    if device_type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with torch.profiler.profile(
        activities=activities, profile_memory=memory, record_shapes=False, acc_events=True
    ) as profiler:
        if boot := _boot():
            profiler.add_metadata(BOOT, boot)
        profiler.add_metadata_json(CONFIGURATION, json.dumps(dict(configuration)))
        yield profiler
        if device_type == "cuda":
            torch.cuda.synchronize()  # kernels still in flight belong to the trace
    path = Path(trace_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as temporary:
        _export(profiler, temporary, path)


def _boot() -> str | None:
    """Returns an identifier of this host since it was started; None where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _export(profiler: torch.profiler.profile, temporary: Path, path: Path) -> None:
    """Writes the trace; raises OSError if it is not there afterwards, as the profiler does not."""
    try:
        profiler.export_chrome_trace(str(temporary))
        if not temporary.exists():
            raise OSError(errno.EIO, "the trace could not be written; is the disk full?", str(path))
    finally:
        temporary.with_name(f"{temporary.name}.tmp").unlink(missing_ok=True)  # the profiler's own
