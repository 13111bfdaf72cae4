"""One file per kind of layer: how its per-sample gradients are captured, normed and summed.

Each file says what a *use* of the layer leaves behind in backward. Two kinds of remains exist:

- *dense*: the per-sample gradients G [B, *parameter] themselves;
- *factors*: activations A [B, T, p] and output gradients Y [B, T, d] with G_i = Σ_t y_it a_itᵀ,
  which are smaller than G while T < p·d / (p + d).
"""
