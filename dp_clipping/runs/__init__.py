"""What an engine does with the runs that its `make_private` has made.

    accounts     counts their steps, and says what they have spent
    checkpoints  saves and continues them

`PrivacyEngine` inherits both.
"""
