"""`nn.Embedding` and `nn.EmbeddingBag`.

Files:

    module                embeddings: an output for each id; norms and sums from each sample's ids
    bag                   bags: sums and means over ids, [batch, tokens] or with offsets
    tied                  the same of a weight that takes part in products too, as a head's does
"""
