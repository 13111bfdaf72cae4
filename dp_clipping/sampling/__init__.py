"""Poisson sampling, other sampling schemes, and the loaders around them.

Files:

    poisson               the batch of each step, dealt out to ranks
    schemes               other ways to choose it
    words                 the random words that batches are made of
    units                 which examples are one unit of privacy
    loader                the user's DataLoader with Poisson batches
    given_loader          what the user's loader says, and which cannot be replaced
    collate               batches without samples
    collate_check         refuses a collate function whose rows are not one sample each
    alone                 samples that are collated alone, beside their batch
    memory_manager        one Poisson batch in several physical ones
    parts                 whether parts of a batch have rows in common
    usage                 ensures that each sample is in exactly one optimizer step
"""
