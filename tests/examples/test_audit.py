"""`python -m ddp_by_hand.examples.audit`."""

import pytest

from ddp_by_hand.examples import audit
from ddp_by_hand.examples.audit_faults import FAULTS

QUICK = ["--seed", "0", "--canaries", "400"]


def test_nothing_is_found_in_what_is_right(capsys):
    assert audit.main([*QUICK, "--steps", "2"]) == 0
    printed = capsys.readouterr().out
    assert "epsilon is at least" in printed
    assert "ok: no unit moves the sum by more than C" in printed
    assert "FAIL" not in printed


def test_a_fault_is_found(capsys):
    assert audit.main([*QUICK, "--skip", "audit", "--fault", "divided-by-batch"]) == 1
    assert "FAIL: unit" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        audit.main(["--help"])
    printed = capsys.readouterr().out.replace("\n", "").replace(" ", "")
    assert all(name in printed for name in FAULTS)


@pytest.mark.slow
def test_the_command_of_the_documents():
    line = ["--seed", "0", "--skip", "record_sums"]
    assert audit.main([*line, "--fault", "half-noise"]) == 1
    assert audit.main(line) == 0
