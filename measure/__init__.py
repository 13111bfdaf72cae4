"""Shared by programs that measure: resuming, JSON lines, statistics, tables, pictures, reports.

Of the other packages it imports the writers of files and of aligned tables only, which are in
`dp_clipping`. Matplotlib and torch are imported where they are used, so that importing this package
is cheap.
"""

from measure.cells import plan_rounds
from measure.chart import draw_comparison
from measure.environment import environment, git_state, peak_flops
from measure.files import append_line, read_lines, replacing, write_atomically
from measure.memory_bars import draw_memory
from measure.progress import Progress, duration
from measure.results import (
    ERROR,
    FINISHED,
    OK,
    OOM,
    SCHEMA_VERSION,
    STATUSES,
    TIMEOUT,
    UNAVAILABLE,
    Results,
    cell_key,
)
from measure.statistics import Ratio, Summary, ratio, summarize
from measure.table import Column, describe_failure, format_table

__all__ = [
    "ERROR",
    "FINISHED",
    "OK",
    "OOM",
    "SCHEMA_VERSION",
    "STATUSES",
    "TIMEOUT",
    "UNAVAILABLE",
    "Column",
    "Progress",
    "Ratio",
    "Results",
    "Summary",
    "append_line",
    "cell_key",
    "describe_failure",
    "draw_comparison",
    "draw_memory",
    "duration",
    "environment",
    "format_table",
    "git_state",
    "peak_flops",
    "plan_rounds",
    "ratio",
    "read_lines",
    "replacing",
    "summarize",
    "write_atomically",
]
