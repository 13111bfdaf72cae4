"""Aligned text tables."""

from dp_clipping.table import Remark, aligned


def test_columns_are_as_wide_as_their_widest_cell():
    assert aligned([["a", "b"], ["long", "1"], ["x", "23"]], [False, True]) == [
        "a      b",
        "----  --",
        "long   1",
        "x     23",
    ]


def test_a_remark_runs_on_and_widens_nothing():
    lines = aligned([["name", "n"], ["x", Remark("not measured: out of memory")]], [False, True])
    assert lines[1] == "----  -"
    assert lines[2] == "x     not measured: out of memory"


def test_no_line_ends_in_spaces():
    assert all(line == line.rstrip() for line in aligned([["a", "bbb"], ["x", ""]], [False, False]))
