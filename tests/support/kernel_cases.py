"""Operands for the kernels' tests: shapes, layouts and memory that may not be read.

Without a GPU kernels run in Triton's interpreter, with small tiles, without bfloat16, whose
products the interpreter gets wrong. Memory that PyTorch does not initialise holds NaN in these
tests, and so does what lies beside an operand.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from dp_clipping.kernels import gram
from dp_clipping.kernels.launch.tiles import Tile

NORM_BOUND = 2e-5  # of squared norms, relative
STORED_BOUND = 2e-6  # the same, against the values that were stored
SUM_BOUND = {torch.float32: 2e-6, torch.float16: 2e-5, torch.bfloat16: 2e-5}  # of magnitudes
HALF_STEP = {torch.float32: 0.0, torch.bfloat16: 2.0**-8}
LAYOUTS = [
    ("contiguous", "contiguous"),
    ("time_major", "padded"),
    ("transposed", "shifted"),
    ("shared", "time_major"),
]

# B, T, d, p: one tile exactly, more than one with rests, with odd strides, one token, nothing.
SHAPES = [
    (1, 32, 32, 32),
    (2, 40, 40, 72),
    (2, 33, 35, 41),
    (3, 1, 33, 5),
    (1, 1, 1, 1),
    (0, 4, 8, 8),
    (2, 0, 8, 8),
]
FEATURES = [(16, 24), (33, 7), (40, 16), (1, 1), (64, 48), (24, 16)]  # d, p; more than one table's
TILE = Tile(32, 32, 32, 4, 2)  # of the interpreter
on_gpu = pytest.mark.gpu
LARGE = [(3, 1000, 768, 520), (2, 1024, 1024, 3072), (9, 257, 513, 129), (64, 1, 1024, 1000)]


@dataclass(frozen=True)
class Place:
    """Where a body runs, and on what.

    Attributes:
        dtype: of operands.
        tile: of the matrix kernels; None for their own choice.
        shapes: (B, T, d, p).
        layouts: of the two operands.
        tf32: whether products of float32 operands may be TF32.
    """

    device: str
    dtype: torch.dtype
    tile: Tile | None
    shapes: list[tuple[int, int, int, int]]
    layouts: list[tuple[str, str]]
    tf32: bool = False

    def normal(self, *shape: int, seed: int = 0, shift: float = 0.0, scale: float = 1.0) -> Tensor:
        """Values of `dtype`, the same on every device."""
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return ((values + shift) * scale).to(self.device, self.dtype)

    def coefficients(self, batch_size: int) -> Tensor:
        """c [B] over three orders of magnitude, in no order; every second one is zero if B > 1."""
        values = torch.rand(batch_size, generator=torch.Generator().manual_seed(7))
        values = 10 ** (3 * values - 2)
        values[1::2] = 0
        return values.to(self.device)


def lay_out(x: Tensor, how: str) -> Tensor:
    """x [B, T, n] with other strides; what lies between its values is NaN."""
    batch_size, tokens, n = x.shape
    if how == "time_major":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if how == "transposed":  # the last stride is not 1
        return x.mT.contiguous().mT
    if how == "shifted":  # neither the address nor the strides are multiples of 16 bytes
        return _within(x, (batch_size, tokens, n + 1), 0, 1)
    if how == "padded":  # strides are, and the address
        return _within(x, (batch_size, tokens + 3, n + 16 - n % 8), 0, 0)
    if how == "shared":  # the samples are one
        return x[:1].expand(batch_size, tokens, n)
    return x


def _within(x: Tensor, shape: tuple[int, ...], first_token: int, first: int) -> Tensor:
    around = x.new_full(shape, torch.nan)
    view = around[:, first_token : first_token + x.shape[1], first : first + x.shape[2]]
    return view.copy_(x)


def poison(x: Tensor, coefficients: Tensor) -> Tensor:
    """x [B, ...] with NaN, and with infinity, where a sample's coefficient is zero."""
    x = x.clone()
    rows = (coefficients == 0).nonzero().flatten().tolist()
    for n, row in enumerate(rows):
        x[row] = (torch.nan, torch.inf)[n % 2]
    return x


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Values that nobody has written are NaN: PyTorch's deterministic mode sees to it."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(1).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def assert_within(found: Tensor, expected: Tensor, bound: Tensor) -> None:
    assert found.shape == expected.shape
    error = (found.double() - expected.double()).abs()
    assert (error <= bound).all(), f"largest error {error.max().item()}"


def assert_squares(found: Tensor, expected: Tensor, relative: float = NORM_BOUND) -> None:
    assert found.dtype == torch.float32
    assert_within(found, expected, relative * expected.double())


def pairs_of(device: str, dtype: torch.dtype, batch_size: int, tokens: int, count: int):
    torch.manual_seed(0)
    found = []
    for number in range(count):
        d, p = FEATURES[number % len(FEATURES)]
        found.append(tuple(torch.randn(batch_size, tokens, n).to(device, dtype) for n in (d, p)))
    return found


def on_kernels(dtypes: Iterable[torch.dtype] = tuple(SUM_BOUND), tf32: bool = False) -> Callable:
    """Makes a test of a body, in Triton's interpreter here and compiled on a GPU.

    The body takes a `Place`. In the interpreter each dtype has half of the layouts, so that both
    ways of loading run; on a GPU there are large shapes too.

    Args:
        dtypes: of operands; bfloat16 on a GPU only.
        tf32: whether float32 operands in TF32 are another case.
    """
    cases = [(dtype, False) for dtype in dtypes]
    cases += [(torch.float32, True)] if tf32 else []

    def decorate(body: Callable[[Place], None]) -> Callable:
        places = []
        for dtype, is_tf32 in cases:
            name = "tf32" if is_tf32 else str(dtype).removeprefix("torch.")
            if dtype != torch.bfloat16:
                layouts = LAYOUTS[dtype == torch.float16 :: 2]
                place = Place("cpu", dtype, TILE, SHAPES, layouts, is_tf32)
                places.append(pytest.param(place, id=f"interpreted-{name}"))
            place = Place("cuda", dtype, None, SHAPES + LARGE, LAYOUTS, is_tf32)
            places.append(pytest.param(place, id=f"compiled-{name}", marks=pytest.mark.gpu))

        @pytest.mark.parametrize("place", places)
        def test(place: Place, request: pytest.FixtureRequest) -> None:
            __tracebackhide__ = True
            if place.device == "cuda":
                _run(body.__module__, body.__name__, place)
            else:
                interpreter = request.getfixturevalue("interpreter")
                interpreter.run(_run, body.__module__, body.__name__, place)

        test.__name__, test.__doc__, test.body = body.__name__, body.__doc__, body
        return test

    return decorate


def _run(module: str, name: str, place: Place) -> None:
    """Runs the body that a test was made of."""
    chunk = nullcontext() if place.device == "cuda" else patch.object(gram, "CHUNK", 64)
    with poisoned_memory(), chunk:
        getattr(import_module(module), name).body(place)
