"""Poisson sampling and the loaders around it.

Files:

    poisson               the batch of each step
    units                 which examples are one unit of privacy
    loader                the user's DataLoader with Poisson batches
    collate               batches without samples
    memory_manager        one Poisson batch in several physical ones
    usage                 ensures that each sample is in exactly one optimizer step
"""
