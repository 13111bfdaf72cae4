"""`nn.Embedding` and `nn.EmbeddingBag`.

Files:

    module                embeddings: an output for each id
    bag                   bags: sums and means over ids, [batch, tokens] or with offsets
    factors               norms and sums from as many ids of each sample
    ragged                the same where samples have different numbers of ids
"""
