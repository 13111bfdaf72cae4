"""Checks and gathers the arguments of `make_private`.

Files:

    settings    all of them in one frozen object, checked once
    given       the objects that it is handed
    sampled     those that say how the data are sampled; rates, units and account follow
    thresholds  C, and the noise that is scaled with it
    checks      the table: what each may be
"""
