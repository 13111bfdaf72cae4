"""Products and sums whose rounding is part of the guarantee."""

import pytest
import torch
from torch import nn

from dp_clipping.clipping import accumulation
from dp_clipping.clipping.accumulation import (
    PIECE,
    SUM_ROUNDING,
    Weights,
    accumulation_dtype,
    full_float32,
    network_in_float64,
    product_squares,
    round_down,
    squared_norms,
    sum_of_one_token,
    thirds,
    weighted_sum,
    wide_product,
)

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def normal(*shape: int, dtype=torch.float64, seed=0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@every_dtype
def test_products_are_accumulated_in_float32_or_float64(dtype):
    left, right = normal(3, 4, 50, dtype=dtype), normal(3, 50, 5, dtype=dtype, seed=1)
    expected = left.double() @ right.double()
    for found, exact in (
        (wide_product(left, right), expected),
        (wide_product(left[0], right[0]), expected[0]),
    ):
        assert found.dtype == accumulation_dtype(dtype)
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-5)


@every_dtype
@pytest.mark.parametrize("count", [0, 1, PIECE - 1, PIECE, 2 * PIECE + 3])
def test_squared_norms(dtype, count):
    gradients = normal(3, count, dtype=dtype)
    found = squared_norms(gradients)
    assert found.dtype == accumulation_dtype(dtype)
    expected = gradients.double().square().sum(1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)


def test_product_squares_multiplies_norms_before_it_squares_them():
    """A square of 1e-30 is no float32 number, and with one of 1e30 the product is."""
    left, right = torch.tensor([[3e-30, 4e-30]]), torch.tensor([[1e18]])
    assert product_squares(left, right).item() == pytest.approx(25e-24, rel=1e-6)
    assert product_squares(torch.tensor([[1e20]]), torch.tensor([[1e-30]])).item() == float("inf")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_down_never_makes_larger_and_is_the_next_number(dtype):
    values = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    found = round_down(values, dtype)
    assert (found.float() <= values).all()
    above = torch.nextafter(found, torch.full_like(found, 2.0))
    assert (above.float() > values).all()
    exact = torch.tensor([0.0, 0.5, 1.0])
    assert torch.equal(round_down(exact, dtype).float(), exact)


def test_coefficients_by_blocks():
    values = torch.tensor([0.5, 0.25])
    block, factor = Weights(values).block(torch.bfloat16, 2)
    assert factor == 1
    assert block.tolist() == [[0.5, 0, 0.25, 0], [0, 0.5, 0, 0.25]]


def test_float16_coefficients_are_scaled_into_range():
    values = torch.tensor([3e-9, 1e-9])
    block, factor = Weights(values).block(torch.float16, 1)
    assert 0.5 <= block.max() <= 1
    found = block[0].double() * factor
    assert (found <= values.double()).all()
    torch.testing.assert_close(found, values.double(), rtol=2e-3, atol=0)


@every_dtype
def test_weighted_sums(dtype):
    values = torch.tensor([0.5, 0.0, 2.0], dtype=accumulation_dtype(dtype))
    gradients = normal(3, 4, 5, dtype=dtype)
    found = weighted_sum(Weights(values), gradients)
    assert found.dtype == accumulation_dtype(dtype)
    expected = torch.einsum("b,bij->ij", values.double(), gradients.double())
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)


def test_wide_sums_are_formed_a_piece_at_a_time(monkeypatch):
    """Bounds the float32 copies by `CHUNK_ELEMENTS`."""
    values, gradients = torch.tensor([0.5, 0.0, 2.0]), normal(3, 10, dtype=torch.float16)
    whole, sizes, multiply = weighted_sum(Weights(values), gradients), [], torch.mv
    monkeypatch.setattr(accumulation, "CHUNK_ELEMENTS", 12)
    monkeypatch.setattr(
        torch, "mv", lambda x, *a, **k: sizes.append(x.numel()) or multiply(x, *a, **k)
    )
    torch.testing.assert_close(weighted_sum(Weights(values), gradients), whole)
    assert sizes == [12, 12, 6]


@pytest.mark.parametrize("count", [100, 128, 200])
def test_sums_of_samples_that_cannot_be_cut_evenly(count):
    gradients, values = normal(4, count, dtype=torch.float16), torch.tensor([0.5, 0.0, 1.0, 0.25])
    found = accumulation._sum_by_pieces(Weights(values), gradients)
    torch.testing.assert_close(found, values @ gradients.float(), rtol=0, atol=1e-5)


def test_thirds_of_float32():
    x = torch.cat((torch.randn(999), torch.randn(9) * 1e30, torch.randn(9) * 1e-20))
    low, middle, high = (part.double() for part in thirds(x))
    assert torch.equal(high + middle + low, x.double())


@pytest.mark.gpu
def test_a_wide_sum_of_bfloat16_is_as_exact_as_float32():
    left, right = (torch.randn(300, 1, n, device="cuda").bfloat16() for n in (70, 130))
    c = torch.rand(300, device="cuda")
    c[3], left[3], right[3] = 0, torch.nan, torch.inf
    good = [x[c > 0, 0].double() for x in (left, right)]
    expected = (good[0] * c[c > 0, None]).T @ good[1]
    found = sum_of_one_token(left, right, c)
    assert (found - expected).norm() < 1e-6 * expected.norm()


def test_a_sum_over_samples_of_one_token():
    left, right, c = normal(3, 1, 4), normal(3, 1, 5), torch.tensor([0.5, 0.0, 1.0])
    left[1], right[1] = torch.nan, torch.inf
    expected = sum(c[i] * left[i].T @ right[i] for i in (0, 2))
    torch.testing.assert_close(sum_of_one_token(left, right, c).double(), expected)


def test_rounding_is_half_of_the_distance_between_numbers():
    assert {d: torch.finfo(d).eps / 2 for d in SUM_ROUNDING} == SUM_ROUNDING


def test_a_network_in_float64_is_the_same_afterwards():
    network = nn.BatchNorm1d(2).half()
    before = {name: x.data_ptr() for name, x in network.state_dict().items()}
    with network_in_float64(network):
        assert {x.dtype for x in network.parameters()} == {torch.float64}
        assert network.num_batches_tracked.dtype == torch.int64
        network.weight.data.add_(1)
    assert {name: x.data_ptr() for name, x in network.state_dict().items()} == before
    assert torch.equal(network.weight, torch.ones(2).half())


@pytest.mark.parametrize("layers", [False, True])
def test_layers_are_computed_in_float32_where_it_is_said(layers):
    of = torch.backends.mkldnn.conv, torch.backends.cudnn.rnn
    before = [one.fp32_precision for one in of]
    assert "ieee" not in before
    with full_float32(), full_float32(layers):
        assert [one.fp32_precision for one in of] == (["ieee"] * 2 if layers else before)
    assert [one.fp32_precision for one in of] == before


@pytest.mark.parametrize("own", ["tf32", "ieee"])
def test_a_network_can_read_the_older_setting_of_layers_meanwhile(own):
    """Reads the older settings in full float32, as Hugging Face's CTC losses do."""
    cudnn = torch.backends.cudnn
    before, cudnn.conv.fp32_precision = cudnn.conv.fp32_precision, own
    try:
        for _ in range(2):
            with full_float32(layers=True):
                if own == before:
                    with cudnn.flags(enabled=False):
                        pass
                assert cudnn.conv.fp32_precision != "tf32"
            assert (cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision) == (own, before)
    finally:
        cudnn.conv.fp32_precision = before
    assert cudnn.allow_tf32


@pytest.mark.parametrize("own", ["tf32", "ieee"])
def test_products_are_float32_whatever_the_precision_settings(own):
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, own
    try:
        with full_float32():
            assert matmul.fp32_precision == "ieee"
        with pytest.raises(RuntimeError), full_float32():
            torch.mm(torch.ones(2, 3), torch.ones(2, 3))
        assert matmul.fp32_precision == own
    finally:
        matmul.fp32_precision = before
