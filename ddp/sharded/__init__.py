"""The course's second part: what every rank holds in common is divided among the ranks.

In the order of reading, with the memory of W ranks that each holds of a network in float32 with
Adam, in bytes per parameter (4 parameters, 4 gradients, 8 optimizer state):

    ddp_bucketed           4 + 4 + 8
    1. zero1.py            4 + 4 + 8/W    layout.py and optimizer.py belong to it
    2. zero2.py            4 + 4/W + 8/W
"""
