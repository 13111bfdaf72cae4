"""Checks and gathers the arguments of `make_private`.

Files:

    settings    all of them in one frozen object, checked once
    given       the objects that it is handed
    sampled     those that say how the data are sampled; rates, units and account follow
    thresholds  C, as it is set, and C_k of each clipping group
    checks      the table: what each may be
"""
