"""Triton kernels, one idea per file; each has a reference implementation beside it.

Files:

    gradient              per-sample gradients of a linear layer and their norms, in one pass
    gram                  norms of linear layers from Gram matrices of tokens
    group_norm            the backward of GroupNorm and InstanceNorm, per-sample gradients in it
    embedding             rows of equal tokens, and their norms
    small_table           per-sample gradients of an embedding with few rows
    norm_layer_gradients  per-sample gradients of RMSNorm, LayerNorm and biases
    squared_norms         norms of per-sample gradients that another operator has formed
    coefficients          squared norms to clipping coefficients, and these in the order in which
                          `weighted_product` takes samples
    weighted_product      clipped sum of a linear layer from its factors
    weighted_sum          clipped sum of kept per-sample gradients
    signed_sums           sums of a sample's numbers under random signs, by which checks compare
    convolution/          per-sample gradients, norms and clipped sums of convolutions
    launch/               tiles, their tuning, and one launch for many layers
"""
