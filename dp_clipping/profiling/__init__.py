"""The profiling switch, `DP_CLIPPING_PROFILE=1`.

Files:

    profile               times of a step's phases and layers, and its norms
    metrics               metrics of each step, for a callback of the user's
"""
