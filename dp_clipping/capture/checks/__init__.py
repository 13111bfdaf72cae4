"""Compares tensors, for steps and for checks.

Files:

    kept                  refuses changes of what a backward keeps for its norms and sums
    summaries             a sample's part of a tensor in a few numbers, to be compared
    terms                 what a loss is made of, in its autograd graph
"""
