"""Shared by programs that measure: resuming, JSON lines, statistics, tables, pictures, reports.

Of the other packages it imports the writers of files and of aligned tables only, which are in
`dp_clipping`. Matplotlib and torch are imported where they are used, so that importing this package
is cheap.
"""

from ddp_by_hand.measure.cells import plan_rounds
from ddp_by_hand.measure.chart import draw_comparison
from ddp_by_hand.measure.environment import environment, peak_flops
from ddp_by_hand.measure.files import write_atomically
from ddp_by_hand.measure.memory_bars import draw_memory
from ddp_by_hand.measure.progress import Progress
from ddp_by_hand.measure.results import (
    ERROR,
    FINISHED,
    OK,
    OOM,
    SCHEMA_VERSION,
    UNAVAILABLE,
    Results,
    cell_key,
)
from ddp_by_hand.measure.statistics import Ratio, summarize
from ddp_by_hand.measure.table import Column, describe_failure, format_table
