"""What all checks share that run something again and compare.

Files:

    schedule              which calls are checked: 1, 2, 4, 8, ...
    perturb               which samples another run has in place of those of the first
    randomness            states of random generators, saved and restored; runs without dropout
    tolerances            the differences that may be rounding
"""
