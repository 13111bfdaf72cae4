"""Refuses networks and losses in which a sample's gradient depends on other samples.

Files:

    sample_independence   refuses networks that mix the samples of a batch
    losses                refuses losses that depend on other samples
    kept                  refuses changes of what a backward keeps for its norms and sums
    terms                 what a loss is made of, in its autograd graph
    lengths               refuses networks and losses for which a sample depends on its padding
    carried               refuses state that carries data from one batch to the next
    observation           what each layer sees of each sample, forward and backward
    summaries             a sample's part of a tensor in a few numbers, to be compared
    state                 what a network holds at one moment, and what has changed since
    places                where it holds values
    writes                values of tensors from before they are written to
"""
