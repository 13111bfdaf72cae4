"""`PrivacyEngine.check`, and the reference of all tests.

Files:

    check                 a private step beside one ordinary backward per sample
    one_by_one            those backwards, on the user's own network
    report                the verdict as a table
    reference             clipping from its definition, in float64, sharing nothing
"""
