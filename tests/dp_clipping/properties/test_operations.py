"""Norms and clipped sums of drawn layers, beside one backward per sample.

Shapes, the strides of inputs, the dtype, the mode and the scale of gradients are drawn.
"""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ddp_by_hand.experiments.verify_correctness import reference as oracle
from tests.dp_clipping.conftest import MODES, gradients_of, private_loss, unchecked
from tests.support import zoo

SIZES = st.integers(1, 5)


@st.composite
def layers(draw):
    """Returns a layer, and the shape of a sample that it takes."""
    kind = draw(st.sampled_from(
        ["linear", "conv1d", "conv2d", "layer_norm", "group_norm", "embedding", "lstm", "scale"]
    ))  # fmt: skip
    width, more, tokens = draw(SIZES), draw(SIZES), draw(SIZES)
    bias = draw(st.booleans())
    if kind == "linear":
        return nn.Linear(width, more, bias=bias), (*[tokens] * draw(st.integers(0, 2)), width)
    if kind in ("conv1d", "conv2d"):
        dims, groups = int(kind[4]), draw(st.integers(1, 2))
        kernel, stride, padding = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(SIZES) % 3
        convolution = (nn.Conv1d, nn.Conv2d)[dims - 1](
            width * groups, more * groups, kernel, stride, padding, groups=groups, bias=bias
        )
        return convolution, (width * groups, *[tokens + kernel - 1] * dims)
    if kind == "layer_norm":
        return nn.LayerNorm(width + 1, bias=bias), (*[tokens] * draw(st.integers(0, 2)), width + 1)
    if kind == "group_norm":
        return nn.GroupNorm(more, more * width), (more * width, tokens + 1)
    if kind == "embedding":
        return nn.Embedding(more + 1, width, padding_idx=draw(st.sampled_from([None, 0]))), tokens
    if kind == "lstm":
        return zoo.Net(
            lambda net, x: net.layer(x)[0],
            layer=nn.LSTM(width, more, bias=bias, batch_first=True),
        ), (tokens, width)
    scale = nn.Parameter(torch.randn(width))  # of no layer
    return zoo.Net(lambda net, x: (x * net.scale).sin(), scale=scale), (tokens, width)


def with_strides(x: Tensor, layout: str) -> Tensor:
    """Returns the same values, otherwise in memory."""
    if layout == "gaps":
        return torch.stack([x, torch.zeros_like(x)], -1)[..., 0]
    if layout == "reversed":
        return x.permute(*range(x.dim())[::-1]).contiguous().permute(*range(x.dim())[::-1])
    if layout == "shifted":
        return torch.cat([x[:1], x])[1:]
    return x


@given(
    layers(), st.integers(1, 5), st.sampled_from(["plain", "gaps", "reversed", "shifted"]),
    st.sampled_from([torch.float64, torch.float32]), st.sampled_from(MODES),
    st.sampled_from(["flat", "per_layer"]), st.sampled_from([1e-3, 1.0, 1e4]),
    st.integers(0, 10**6),
)  # fmt: skip
def test_norms_and_sums_are_those_of_one_sample_at_a_time(
    layer, count, layout, dtype, mode, clipping, scale, seed
):
    module, shape = layer
    torch.manual_seed(seed)
    network = nn.Sequential(module).to(dtype)
    if isinstance(shape, int):
        x = torch.randint(module.num_embeddings, (count, shape))
    else:
        x = torch.randn(count, *shape, dtype=dtype)
    x = with_strides(x, layout)
    y = scale * torch.randn(network(x).shape, dtype=dtype)
    y[0] *= 100  # a sample that is clipped
    gradients = oracle.per_sample_gradients(network, (x, y), zoo.product)
    norms = oracle.norms(gradients).double()
    threshold = max(norms.median().item(), 1e-9)
    model = unchecked(network, mode, max_grad_norm=threshold, clipping=clipping)
    private_loss(model, (x, y), zoo.product).backward()
    tolerance = 1e-9 if dtype == torch.float64 else 5e-4
    found = model.per_sample_gradient_norms.double()
    assert ((found - norms).abs() <= tolerance * norms.max() + 1e-12).all()
    limits = threshold
    if clipping == "per_layer":
        groups = len(oracle.module_groups(list(gradients)))
        limits = [threshold / groups**0.5] * groups
    expected = oracle.clipped_sum(gradients, limits, clipping)
    for name, one in gradients_of(model).items():  # terms of C may cancel
        assert (one - expected[name]).norm() <= tolerance * count * threshold, name
