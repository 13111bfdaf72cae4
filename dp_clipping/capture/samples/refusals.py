"""Explains errors of the search for samples in arguments with bags or packed sequences."""

UNEQUAL_BAGS = (
    "the network cannot run with other numbers of samples than the batch has, as it is to see "
    "where they are ({error}): give nn.EmbeddingBag one bag for each sample, and several bags of a "
    "sample as arguments of their own, as def forward(self, ids, offsets, others, starts)"
)
BESIDE_BAGS = (
    "{error} (ids with offsets are for nn.EmbeddingBag alone: a module that has parameters of its "
    "own and is given them too runs under torch.vmap, where each tensor needs a row for each "
    "sample; let those parameters be in a module that is given what nn.EmbeddingBag returns)"
)
SORTED = (
    "the network packs sequences that must be sorted by length, and batches with other samples in "
    "some places are run to find samples that depend on each other: call "
    "pack_padded_sequence(x, lengths, enforce_sorted=False)"
)
PACKED = (
    "{error} (sequences that were packed are padded to the longest one of the batch: if outputs of "
    "the network or arguments of a layer have that length, call "
    "pad_packed_sequence(y, batch_first=True, total_length=x.shape[1]))"
)


def meaning_of(error: Exception, has_bags: bool, packs: bool) -> str | None:
    """Returns what an error says of bags or sequences among the arguments, if anything.

    Args:
        has_bags: some arguments are ids with offsets.
        packs: the network packs sequences, for a recurrent layer.
    """
    is_refusal = isinstance(error, ValueError)
    if has_bags:
        return BESIDE_BAGS if is_refusal else UNEQUAL_BAGS
    if is_refusal:
        return PACKED if packs else None
    return SORTED if "enforce_sorted" in str(error) else None
