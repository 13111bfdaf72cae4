"""What HolisticTraceAnalysis says of the same trace: see tests/support/hta_figures.py."""

import json
from pathlib import Path

import pytest

from ddp_by_hand.tracing import load_trace, overlap

FIXTURES = Path(__file__).parent / "fixtures"


def test_times_of_three_streams_are_those_of_hta():
    found = overlap(load_trace(FIXTURES / "gpu_streams.json"))
    expected = json.loads((FIXTURES / "gpu_streams_by_hta.json").read_text())
    percent = expected.pop("overlap_percent")
    assert {name: getattr(found, name) for name in expected} == expected
    assert 100 * found.overlap_fraction == pytest.approx(percent, abs=0.01)
