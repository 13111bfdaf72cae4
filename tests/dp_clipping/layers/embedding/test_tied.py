"""A weight that looks up and multiplies: norms and sums beside those of G in float64."""

from itertools import product
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dp_clipping.clipping.norms import Norm, Norms
from dp_clipping.layers import projection
from dp_clipping.layers.embedding import tied
from dp_clipping.layers.embedding.module import EmbeddingFactors
from dp_clipping.layers.embedding.tied import TiedFactors, TiedTokens, cross_terms
from dp_clipping.layers.projection import LinearFactors
from tests.dp_clipping.conftest import clipped_sums, trained, unchecked
from tests.support import zoo
from tests.support.kernel_cases import Place, on_kernels
from tests.support.turns import in_turn


def factors_of(y: Tensor, a: Tensor, ids: Tensor, e: Tensor) -> TiedFactors:
    products = LinearFactors(a, y, transposed=False)
    return TiedFactors(products, EmbeddingFactors(ids, e, y.shape[2]))


def tokens_of(*operands: Tensor) -> TiedTokens:
    return factors_of(*operands).on_kernels()


def drawn(
    place: Place, shape: tuple[int, int, int, int], length: int, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y [B, T, V], a [B, T, d], ids [B, S], of which some repeat, and e [B, S, d]."""
    batch_size, tokens, outputs, inputs = shape
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(outputs, (batch_size, length), generator=draw)
    ids[:, length // 2 + 1 :] = ids[:, : length - length // 2 - 1]
    y, a = place.normal(batch_size, tokens, outputs), place.normal(batch_size, tokens, inputs)
    return y, a, ids.to(place.device), place.normal(batch_size, length, inputs, seed=9)


def cancelling(
    place: Place, shape: tuple[int, int, int, int], epsilon: float, seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Look-ups that undo all but a part of the products, up to rounding."""
    batch_size, tokens, outputs, inputs = shape
    y, a = place.normal(*shape[:3], seed=seed), place.normal(batch_size, tokens, inputs, seed=seed)
    ids = torch.arange(outputs, device=place.device).expand(batch_size, -1)
    e = -(y.double().mT @ a.double()) * (1 + epsilon)
    return y, a, ids, e.to(place.dtype)


def dense(y: Tensor, a: Tensor, ids: Tensor, e: Tensor) -> Tensor:
    """G [B, V, d] in float64."""
    y, a, e = y.double(), a.double(), e.double()
    rows = nn.functional.one_hot(ids, y.shape[2]).double()
    return y.mT @ a + rows.mT @ e


def bound_of(norm: Norm) -> Tensor:
    """The upper bound of norms that clips [B]."""
    norms = Norms(1, torch.zeros(len(norm.squared), device=norm.squared.device))
    norms.add(trained(Parameter(torch.zeros(1))), norm)
    return norms.bounds()[0].double().sqrt()


@on_kernels()
def test_norms_and_sums(place: Place) -> None:
    """Beside G, for one look-up and many; with Gram matrices and without, where G is smaller."""
    shapes = [shape for shape in place.shapes if shape[0]]
    for n, shape in enumerate([*shapes, (2, 3, 40, 32), (2, 5, 7, 3)]):
        y, a, ids, e = operands = drawn(place, shape, (1, shape[1] + 3, 6)[n % 3], n)
        tokens, gradients = tokens_of(*operands), dense(*operands)
        norm, expected = tokens.norm(), gradients.square().sum((1, 2)).sqrt()
        found, error = norm.squared.double().clamp_min(0).sqrt(), norm.scale.double()
        assert (norm.gram_error, norm.sum_error) == (0, 1)
        assert ((found - expected).abs() <= error + 1e-6 * expected).all()
        assert (error <= 0.01 * expected).all()
        c = place.coefficients(len(y))
        total, weights = tokens.weighted_sum(c).double(), c.double()[:, None, None]
        magnitudes = (weights * dense(y.abs(), a.abs(), ids, e.abs())).sum(0)
        assert ((total - (weights * gradients).sum(0)).abs() <= 2e-5 * magnitudes).all()
        again = tokens_of(*operands)  # as in a second backward
        assert torch.equal(again.weighted_sum(c).double(), total)


@on_kernels()
def test_a_sample_that_is_left_out_is_not_read(place: Place) -> None:
    clean = drawn(place, (4, 5, 24, 16), 6)
    c = torch.tensor([0.5, 0.0, 0.0, 1.0], device=place.device)
    expected = tokens_of(*clean).weighted_sum(c)
    y, a, ids, e = clean
    for x, sample, value in ((y, 1, torch.nan), (a, 1, torch.inf), (e, 2, -torch.inf)):
        x[sample] = value
    tokens = tokens_of(y, a, ids, e)
    norm = tokens.norm()
    assert bound_of(norm).isfinite().tolist() == [True, False, False, True]
    assert torch.equal(tokens.weighted_sum(c), expected)


@on_kernels()
def test_products_and_look_ups_that_cancel(place: Place) -> None:
    """Holds each sample to its bound, however little the terms of the norm leave."""
    below = 0
    shapes = [(3, 6, 7, 5), (3, 3, 40, 32), (2, 70, 9, 33)]
    shapes += [(2, 300, 500, 256), (2, 1500, 64, 640)] if place.tile is None else []
    cases = [*product(shapes, enumerate((0, 2.0**-20, 2.0**-12, 2.0**-6)))]
    if place.tile is not None:  # the interpreter has half of them, others in each dtype
        cases = cases[place.dtype == torch.float16 :: 2]
    for shape, (seed, epsilon) in cases:
        factors = tokens_of(*cancelling(place, shape, epsilon, seed))
        norm = factors.norm()
        bounds = bound_of(norm)
        for i, only in enumerate(torch.eye(shape[0], device=place.device)):
            found = factors.weighted_sum(only).double().norm()
            assert found <= bounds[i] * (1 + 1e-6)
            below += int(norm.squared[i].double() < found.square() * (1 - 1e-3))
    assert below, "the terms by themselves would do"


@on_kernels()
def test_cross_terms_in_pieces(place: Place) -> None:
    """Takes some samples at a time, and some look-ups of one sample."""
    y, a, ids, e = drawn(place, (3, 5, 24, 16), 7)
    rows = torch.stack([one[:, own] for one, own in zip(y, ids, strict=True)]).double()
    products, sizes = a.double() @ e.double().mT, a.double().norm(dim=2)[:, :, None]
    magnitudes = (rows.abs() * sizes * e.double().norm(dim=2)[:, None]).sum((1, 2))
    before = tied.PAIRS
    for tied.PAIRS in (1, 10, 71, before):
        across, found = cross_terms(y, a, ids, e)
        assert ((across - (rows * products).sum((1, 2))).abs() <= 1e-6 * magnitudes).all()
        torch.testing.assert_close(found, magnitudes, rtol=1e-6, atol=0)


class Translator(nn.Module):
    """An encoder's and a decoder's embedding and a head, which share one weight."""

    def __init__(self, vocabulary: int = 97, width: int = 8, padding_idx: int | None = None):
        super().__init__()
        self.encoder = nn.Embedding(vocabulary, width, padding_idx=padding_idx)
        self.decoder = nn.Embedding(vocabulary, width, padding_idx=padding_idx)
        self.between = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.decoder.weight = self.head.weight = self.encoder.weight

    def forward(self, ids: Tensor) -> Tensor:
        known = self.encoder(ids.repeat(1, 2)).tanh().mean(1, keepdim=True)
        return self.head(self.between(known + self.decoder(ids)).tanh())


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randint(97, (4, 3), generator=draw), torch.randn(4, 3, 97, generator=draw)


class Largest(TorchDispatchMode):
    """The most numbers in a tensor that an operator has made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **kwargs or {})
        tensors = [x for x in tree_leaves(found) if isinstance(x, Tensor)]
        own = [x.untyped_storage().nbytes() // x.element_size()
               for x in tensors if x.is_floating_point()]  # fmt: skip
        self.numel = max(self.numel, *own, 0)
        return found


def check_no_tensor_of_all_gradients(mode: str, clipping: str) -> None:
    ids, targets = batch()
    model = unchecked(zoo.seeded(Translator), mode, clipping=clipping)
    with patch.object(projection, "PIECE_ELEMENTS", 1):
        clipped_sums(model, (ids, targets))
        with Largest() as made:
            clipped_sums(model, (ids, targets))
    assert made.numel < 4 * 97 * 8


@pytest.mark.parametrize(
    ("mode", "clipping"),
    in_turn(["ghost", "bookkeeping", "flash", "flash_bookkeeping"], ["flat", "per_layer"]),
)
def test_no_tensor_has_the_size_of_all_gradients(mode, clipping, interpreter):
    interpreter.run(check_no_tensor_of_all_gradients, mode, clipping)
