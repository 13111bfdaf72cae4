"""Compares tensors, for steps and for checks.

Files:

    expansion             compares a run in which shared inputs have a row for each sample
    kept                  compares values of what a backward keeps for its norms and sums
    summaries             a sample's part of a tensor in a few numbers, to be compared
    terms                 what a loss is made of, in its autograd graph
"""
