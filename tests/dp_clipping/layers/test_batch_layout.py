"""Where the samples are, from tensors of two and of three samples."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dp_clipping.layers.batch_layout import FEW, MORE, Layout, find_layout
from tests.dp_clipping.conftest import assert_step, clipped_sums, private
from tests.support import zoo

B, T, P = 4, 5, 6


def samples(count: int, *shape: int) -> Tensor:
    """The first ones are the same whatever the count."""
    draw = torch.Generator().manual_seed(0)
    return torch.stack([torch.randn(shape, generator=draw) for _ in range(count)])


def found(make) -> Layout:
    return find_layout(make(FEW), make(MORE), "input 0 of layer")


KINDS = {
    "batch_first": (lambda n: samples(n, T, P), Layout("dimension", 0)),
    "no_tokens": (lambda n: samples(n, P), Layout("dimension", 0)),
    "one_number_a_sample": (lambda n: samples(n), Layout("dimension", 0)),
    "time_major": (lambda n: samples(n, T, P).transpose(0, 1), Layout("dimension", 1)),
    "features_first": (lambda n: samples(n, T, P).movedim(0, 2), Layout("dimension", 2)),
    "flattened": (lambda n: samples(n, T, P).flatten(0, 1), Layout("sample_major")),
    "ids_flattened": (lambda n: samples(n, T).mul(100).long().flatten(), Layout("sample_major")),
    "time_major_flattened": (
        lambda n: samples(n, T, P).transpose(0, 1).flatten(0, 1),
        Layout("time_major"),
    ),
    "flattened_into_dimension_1": (
        lambda n: samples(n, T, P).flatten(0, 1).t(),
        Layout("sample_major", 1),
    ),
    "time_major_flattened_into_dimension_2": (
        lambda n: samples(n, T, P, 2).movedim(0, 1).flatten(0, 1).movedim(0, 2),
        Layout("time_major", 2),
    ),
    "positions": (lambda n: torch.arange(T), Layout("shared", 0)),
    "positions_of_batch_one": (lambda n: torch.arange(T)[None], Layout("shared", 1)),
    "table": (lambda n: torch.ones(T, P), Layout("shared", 0)),
    "scalar": (lambda n: torch.tensor(1.0), Layout("shared", 0)),
    "sizes_that_coincide": (lambda n: samples(n, FEW, FEW), Layout("dimension", 0)),
    "sizes_that_coincide_time_major": (
        lambda n: samples(n, MORE, MORE).transpose(0, 1),
        Layout("dimension", 1),
    ),
}
WITH_SAMPLES = [name for name, (_, layout) in KINDS.items() if layout.kind != "shared"]


@pytest.mark.parametrize("name", KINDS)
def test_each_kind(name):
    make, expected = KINDS[name]
    assert found(make) == expected


@pytest.mark.parametrize("name", WITH_SAMPLES)
def test_each_sample_is_found(name):
    """In front of the others, and as in a batch of one."""
    make, layout = KINDS[name]
    given = make(B)
    x, split = layout.batch_first(given, B), layout.split(given, B)
    assert len(x) == B
    assert split.data_ptr() == given.data_ptr()
    for i in range(B):  # sample i is the last one of a batch of i + 1
        alone = layout.batch_first(make(i + 1), i + 1)[i:]
        torch.testing.assert_close(x[i], alone[0])
        torch.testing.assert_close(split[i], layout.restore(alone))
    assert torch.equal(layout.restore(x), given)
    assert torch.equal(layout.joined(split), given)


def test_rounding_of_kernels_does_not_hide_an_order():
    def make(n: int) -> Tensor:
        return (samples(n, T, P) * (1 + 1e-6 * n)).flatten(0, 1)

    assert found(make) == Layout("sample_major")


REFUSED = {
    "two_dimensions_grow": (lambda n: torch.ones(n, n, P), "more than one dimension that grows"),
    "dimensions_come_and_go": (
        lambda n: torch.ones((n, P) if n == FEW else (n, 1, P)),
        "number of dimensions",
    ),
    "rows_that_belong_to_nobody": (lambda n: torch.ones(2 * n + 1, P), "rows"),
    "rows_that_do_not_divide": (lambda n: torch.ones(n + 1, P), "rows"),
    "flattened_elsewhere": (
        lambda n: samples(n, T, P).flatten(0, 1).t().to("meta"),
        "flattened into dimension 1",
    ),
    "mixed_samples": (lambda n: samples(n, T, P).flatten(0, 1).flip(0), "fits neither order"),
    "nothing_to_tell_them_apart": (lambda n: torch.ones(n * T, P), "fits both orders"),
    "nan": (lambda n: torch.full((n * T, P), float("nan")), "fits both orders"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=rf"input 0 of layer .*{message}"):
        found(make)


# In a network: a refusal names the layer, a size that does not fit is noticed later on.


def net_of(function) -> nn.Module:
    return zoo.seeded(lambda: zoo.Net(function, layer=nn.Linear(P, P)))


def test_some_samples_alone_are_refused_in_a_batch_of_which_no_check_is_due():
    net = net_of(lambda net, x: net.layer(x[: net.rows] if net.rows else x))
    net.rows = None
    model = private(net)
    inputs, targets = zoo.numbers(B, T, P, out=(T, P))
    for _ in range(2):
        clipped_sums(model, (inputs, targets))
    net.rows = 2
    with pytest.raises(ValueError, match="depends on the other samples of the batch, or on how"):
        model(inputs)


@pytest.mark.parametrize("batch_size", [1, 2, 3, B])
def test_expert_with_a_ragged_batch(batch_size):
    """Rows that a mask picks are as many as they happen to be: their number proves nothing.

    Each sample has two in the first batch; in the second they are shared out otherwise. So the
    layer's caller runs one sample after another.
    """

    def function(net, x):
        chosen = x[..., 0] > 0
        return x.masked_scatter(chosen[..., None], net.layer(x[chosen]))

    network = net_of(function).double()
    model = private(copy.deepcopy(network))
    inputs, targets = zoo.numbers(batch_size, T, P, out=(T, P))
    inputs[..., 0] = -1.0
    inputs[:, :2, 0] = 1.0
    ragged = inputs.clone()
    ragged[:, :2, 0] = torch.where(torch.rand(batch_size, 2) > 0.5, 1.0, -1.0)
    ragged[0, 2, 0] = 1.0
    for x in (inputs, ragged):
        assert_step(model, network, (x.double(), targets.double()))


@pytest.mark.parametrize("attention", [False, True])
def test_functional_dropout_before_a_flattened_layer(attention):
    """Values tell where samples are; dropout would make them others in each run."""

    def function(net, x):
        x = x.unflatten(1, (T, P))
        if attention:
            x = functional.scaled_dot_product_attention(x, x, x, None, 0.5, False)
        x = net.layer(functional.dropout(x, 0.5, training=net.training))
        return net.layer(functional.dropout(x, 0.5).flatten(0, 1)).unflatten(0, (-1, T))

    for seed in range(8):
        torch.manual_seed(seed)
        model = private(net_of(function))
        assert model(torch.randn(3, T * P)).shape == (3, T, P)
