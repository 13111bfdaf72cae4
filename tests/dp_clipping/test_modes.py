"""What each mode's policy is, and that a mode without its kernels says so once."""

import logging

import pytest

from dp_clipping import modes
from dp_clipping.modes import MODES, REFERENCE_MODE, policy_of, say_plain


@pytest.mark.parametrize(
    ("mode", "two_passes", "dense_always", "fused"),
    [
        ("per_sample", False, True, False),
        ("ghost", True, False, False),
        ("flash", True, False, True),
        ("bookkeeping", False, False, False),
        ("flash_bookkeeping", False, False, True),
    ],
)
def test_policies(mode, two_passes, dense_always, fused):
    policy = policy_of(mode)
    assert (policy.two_passes, policy.dense_always, policy.fused) == (
        two_passes,
        dense_always,
        fused,
    )


def test_no_dp_has_none_by_either_name():
    assert policy_of("no_dp") is policy_of("none") is None


def test_options_are_the_policys():
    policy = policy_of("ghost", gamma=0.5, per_layer=True, clipping_function="automatic")
    assert (policy.gamma, policy.per_layer, policy.clipping_function) == (0.5, True, "automatic")


def test_a_second_backward_may_come_of_the_mode_or_of_a_budget():
    assert policy_of("ghost").may_run_twice
    assert not policy_of("flash_bookkeeping").may_run_twice
    assert policy_of("flash_bookkeeping", memory_budget=0).may_run_twice


def test_each_twin_is_the_same_mode_without_kernels():
    for mode, twin in REFERENCE_MODE.items():
        assert {mode, twin} <= set(MODES)
        assert policy_of(mode).two_passes == policy_of(twin).two_passes


def test_a_mode_without_kernels_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr(modes, "_said", set())
    with caplog.at_level(logging.INFO, "dp_clipping.modes"):
        for mode in ("flash", "flash", "flash_bookkeeping"):
            say_plain(mode)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert all(record.levelno == logging.INFO for record in caplog.records)  # no warning
    assert said[0].startswith("flash runs as ghost, in plain PyTorch")
