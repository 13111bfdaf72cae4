"""Modules without arithmetic of their own: every sample has a copy of their parameters.

Files:

    module                the ways in which such a module runs in a step
    samples               each sample in turn, or all under `torch.vmap`
    whole_batch           its own operators on the whole batch, beside the copies
    own                   its parameters and their copies, as its code is given them
    refusals              names what code under `torch.vmap` cannot do
"""
