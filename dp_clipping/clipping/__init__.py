"""The definition of clipping: norms, coefficients, statistics, and what rounding may do to them.

Files:

    accumulation          products and sums whose rounding is part of the guarantee
    norms                 per-sample squared norms of a step, and what rounding may add
    coefficients          norms to coefficients: `abadi` and `automatic`
    statistics            clipped fraction and histogram
"""
