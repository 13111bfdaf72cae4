"""The arguments of `make_private`.

Files:

    settings              all of them in one frozen object, checked once
    checks                what each may be; σ, C and the divisor also in each step
"""
