"""Accounts for, saves and restores the runs that an engine's `make_private` has made.

    accounts     says what they have spent
    steps        counts a step, by what it releases
    checkpoints  saves and continues them

`PrivacyEngine` inherits `Accounts` and `Checkpoints`.
"""
