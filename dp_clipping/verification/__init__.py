"""`PrivacyEngine.check`, and the reference of all tests.

Files:

    check                 a private step beside one ordinary backward per sample
    report                the verdict as a table
    reference             clipping from its definition, in float64, sharing nothing
"""
