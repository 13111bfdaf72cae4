"""`nn.MultiheadAttention`, and with it the layers of `nn.Transformer`.

Files:

    module                projections of queries, keys and values, attention, output projection
    in_projections        projections that are parts of one weight
    core                  attention as PyTorch's module computes it, between its projections
"""
