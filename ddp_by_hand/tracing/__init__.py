"""Reads a profiler's trace and draws it: trace → intervals → overlap → timeline.

Read in this order: `intervals` (time as sets), `trace` with `cpu_rules` and `gpu_rules` (what is
computation, what is communication), `waiting` (for a slower rank), `overlap` (the numbers),
`timeline` (the picture), `budget` and `budget_chart` (numbers and picture beside a step that does
not communicate), `pieces` (a step, cut at each gradient). `phases` and `profiler` are for the code
that is being measured. Of the other packages it imports the writers of files, tables and pictures.
"""

from .budget import basis_of, budget, budgets, describe_budgets
from .budget_chart import draw_budgets
from .overlap import (
    disturbance,
    hidden_fraction,
    overlap,
    representative_step,
    steps,
)
from .phases import PHASES, phase
from .pieces import (
    StepPieces,
    collective_seconds,
    pieces,
    slowdown,
    undisturbed,
)
from .profiler import profile
from .summary import OperatorRow, slowest_operators, write_summary
from .timeline import draw_timeline
from .trace import Trace, load_trace
from .waiting import load_runs, load_traces
