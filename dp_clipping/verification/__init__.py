"""`PrivacyEngine.check`: a private step beside its definition.

Files:

    check                 a private step beside one ordinary backward per sample
    one_by_one            those backwards, on the user's own network
    report                the verdict as a table
    user_loss             the loss of a batch, as the user computes it
    contributions         what a sample may contribute under a clipping function
"""
