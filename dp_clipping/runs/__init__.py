"""Accounts for, saves and restores the runs that an engine's `make_private` has made.

    accounts     counts their steps, and says what they have spent
    steps        what a step releases, and what is said of it before
    checkpoints  saves and continues them

`PrivacyEngine` inherits `Accounts` and `Checkpoints`.
"""
