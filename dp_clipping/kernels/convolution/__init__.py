"""Per-sample gradients of convolutions, their norms and their clipped sum, without patches.

    G_i[o, c, k] = Σ_l y_i[l, o] · x_i[l·stride + k·dilation, c]

x is the padded input, y the output gradient; l runs over output positions, k over the kernel's
taps. Files:

    geometry    how the taps lie, and the reference implementation
    packing     operands with the channels last, padded
    gradients   G and its norm, and the clipped sum, on matrix units
    gram        norms from Gram matrices of positions, where those are few
    narrow      G of depthwise convolutions
"""
