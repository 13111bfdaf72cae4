"""Per-sample gradients of convolutions, their norms and their clipped sum, without patches.

    G_i[o, c, k] = Σ_l y_i[l, o] · x_i[l·stride + k·dilation, c]

y is the output gradient, x the padded input; l runs over output positions, k over the kernel's
taps. For each tap this is a linear layer on a view of x, so the kernels of linear layers serve.
Files:

    geometry    how the taps lie, and the reference implementation
    packing     operands with the channels last, at their places
    layout      views of them, as operands of linear layers; what a use leaves
    factors     packs it and takes its norms
    gram        norms from Gram matrices of positions, where those are few
    narrow      G of depthwise convolutions
"""
