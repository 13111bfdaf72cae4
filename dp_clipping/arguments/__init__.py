"""Checks and gathers the arguments of `make_private`.

Files:

    settings              all of them in one frozen object, checked once
    thresholds            C, as it is set, and C_k of each clipping group
    checks                what each may be
    accounted             noise and sampling together, and the account that covers them
    opacus_names          names of Opacus that mean something else here
    numbers               what σ, C and the divisor may be, also in each step
"""
