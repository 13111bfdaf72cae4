"""`nn.Embedding` and `nn.EmbeddingBag`.

Files:

    module                embeddings: an output for each id
    bag                   bags: sums and means over ids, [batch, tokens] or with offsets
    factors               norms and sums from each sample's ids
    tied                  the same on kernels of a weight that takes part in products too, a head's
"""
