"""The definition of clipping: norms, coefficients, statistics.

Files:

    norms                 per-sample squared norms of a step, and what rounding may add
    coefficients          norms to coefficients: `abadi` and `automatic`
    statistics            clipped fraction and histogram
"""
