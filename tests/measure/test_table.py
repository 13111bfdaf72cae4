"""Tables line up, print what is missing, and say why a row failed."""

from ddp_by_hand.measure.table import Column, format_table

COLUMNS = [
    Column("name", "implementation"),
    Column("median", "step ms", ".1f"),
    Column("collectives"),
    Column("ratio", "to reference", lambda ratio: f"{ratio[0]:.2f} [{ratio[1]:.2f}]", right=True),
    Column("exact"),
]
ROWS = [
    {"name": "short", "median": 1234.56, "collectives": 7, "ratio": (1.0, 0.9), "exact": True},
    {"name": "a much longer name", "median": float("nan"), "status": "ok", "ratio": None},
    {"name": "broken", "status": "oom", "reason": "out of memory:\n  tried 2 | 3 GiB" + "!" * 80},
]


def test_plain_table():
    assert format_table(COLUMNS, ROWS, title="Steps").splitlines() == [
        "Steps",
        "",
        "implementation      step ms  collectives  to reference  exact",
        "------------------  -------  -----------  ------------  -----",
        "short                1234.6            7   1.00 [0.90]    yes",
        "a much longer name        –            –             –      –",
        "broken              oom: out of memory: tried 2 | 3 GiB" + "!" * 80,
    ]


def test_markdown_table():
    lines = format_table(COLUMNS, ROWS, title="Steps", markdown=True).splitlines()
    assert lines[:4] == [
        "**Steps**",
        "",
        "| implementation | step ms | collectives | to reference | exact |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    assert lines[4] == "| short | 1234.6 | 7 | 1.00 [0.90] | yes |"
    assert lines[6].startswith("| broken | oom: out of memory: tried 2 \\| 3 GiB!")
    assert lines[6].endswith("! |  |  |  |")


def test_a_failure_keeps_every_text_column_and_begins_at_the_left():
    columns = ["mode", "backend", "ms"]
    rows = [
        {"mode": "m", "backend": "gloo", "ms": 1},
        {"mode": "n", "backend": "a long backend", "status": "timeout"},
    ]
    assert format_table(columns, rows).splitlines()[-2:] == [
        "m     gloo             1",
        "n     a long backend  timeout",
    ]
    rows = [{"tokens": 1024, "milliseconds": 7}, {"tokens": 2048, "status": "oom"}]
    assert format_table(["tokens", "milliseconds"], rows).splitlines()[-2:] == [
        "  1024             7",
        "  2048  oom",
    ]
