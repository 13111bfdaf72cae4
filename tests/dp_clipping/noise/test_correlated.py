"""Correlated noise: against the dense matrices that define it, and jax_privacy's sensitivities."""

import math

import numpy
import pytest
import scipy.optimize
import torch

from dp_clipping import CorrelatedNoise
from dp_clipping.distributed.placement import spans_of
from dp_clipping.noise.add_noise import AddressedNoise, source_of
from dp_clipping.noise.gaussian import NoiseStream, standard_normal

KEY = bytes(range(32))
SHAPES = {"weight": (33, 35), "bias": (7,)}


def dense(bands: int, steps: int, rest: float | None = None) -> torch.Tensor:
    """W [n, n]: coefficient j of √(1 - x) is (-1)^j · binomial(1/2, j).

    With `rest` the last one is what all add up to `rest` with.
    """
    values = [
        (-1) ** j * math.prod((0.5 - i) / (i + 1) for i in range(j)) for j in range(bands)
    ]  # fmt: skip
    if rest is not None:
        values[-1] = rest - sum(values[:-1])
    matrix = torch.zeros(steps, steps, dtype=torch.float64)
    for j, value in enumerate(values[:steps]):
        matrix += torch.diag(torch.full((steps - j,), value, dtype=torch.float64), -j)
    return matrix


def kept(matrix: torch.Tensor, batches: int) -> float:
    """Returns the root mean square of what prefix sums keep of the noise, at equal ε."""
    used = torch.zeros(len(matrix), dtype=torch.float64)
    used[::batches] = 1
    moved = torch.linalg.solve_triangular(matrix, used[:, None], upper=False).norm()
    return float(moved * matrix.cumsum(0).norm() / len(matrix) ** 0.5)


def noises(bands: int, steps: int, name: str) -> torch.Tensor:
    """W z, [steps, numel], from the z of independent noise."""
    streams = [NoiseStream.derive(KEY, step=step, parameter=name, share=0) for step in range(steps)]
    numel = math.prod(SHAPES[name])
    z = [standard_normal(numel, stream, device="cpu").double() for stream in streams]
    return dense(bands, steps) @ torch.stack(z)


def added(bands: int, step: int, totals: list, names: list[str], **options) -> list:
    defaults = {"std": 3.0, "divisor": 7.0, "dtypes": [total.dtype for total in totals]}
    return source_of(CorrelatedNoise(bands)).add(
        totals, names, key=KEY, step=step, **(defaults | options)
    )


@pytest.mark.parametrize("bands", [1, 2, 8, 40])
def test_a_step_adds_its_row_of_the_dense_matrix(bands):
    steps = 12
    for name, shape in SHAPES.items():
        expected = noises(bands, steps, name)
        total = torch.linspace(-9, 9, math.prod(shape)).view(shape)
        for step in range(steps):
            exact = (total.double() + 3 * expected[step].view(shape)) / 7
            for dtype, error in ((torch.float32, 2e-6), (torch.float64, 1e-12)):
                (found,) = added(bands, step, [total.to(dtype, copy=True)], [name])
                assert found.dtype == dtype
                torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=error)


def test_parts_have_the_noise_of_their_places():
    box = ((5, 20), (4, 8))
    exact = noises(8, 10, "weight")[9].view(SHAPES["weight"])[5:25, 4:12] * 3 / 7
    whole = noises(8, 10, "bias")[9] * 3 / 7
    totals = [torch.zeros(20, 8), torch.zeros(7), torch.zeros(0)]
    places = [spans_of(box, SHAPES["weight"]), None, ()]
    part, bias, empty = added(8, 9, totals, ["weight", "bias", "weight"], places=places)
    torch.testing.assert_close(part.double(), exact, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(bias.double(), whole, rtol=1e-6, atol=1e-6)
    assert empty.numel() == 0


def test_one_band_is_independent_noise_and_no_noise_is_none():
    total = torch.linspace(-1, 1, 7)
    options = {"key": KEY, "step": 4, "divisor": 2.0, "dtypes": [torch.float32]}
    (one,) = source_of(CorrelatedNoise(1)).add([total.clone()], ["bias"], std=0.5, **options)
    (independent,) = AddressedNoise().add([total.clone()], ["bias"], std=0.5, **options)
    assert torch.equal(one, independent)
    (none,) = source_of(CorrelatedNoise(8)).add([total.clone()], ["bias"], std=0.0, **options)
    assert torch.equal(none, total / 2)


# bands, steps, batches, and the sensitivity that jax_privacy 2.0.0 gives, in 64 bits:
# coefficients = toeplitz.inverse_coef(w, n=steps), and then sqrt of toeplitz.
# minsep_sensitivity_squared(coefficients, min_sep=batches, max_participations=k, n=steps)
REFERENCE = [
    (1, 1, 1, 1.0), (1, 60, 20, 1.732050808), (2, 60, 20, 2.000001272), (8, 1, 20, 1.0),
    (8, 19, 20, 1.365194989), (8, 60, 20, 2.476540654), (8, 65, 20, 2.812705769),
    (8, 64, 1, 34.718774529), (4, 30, 7, 3.075881713), (64, 60, 20, 3.166867111),
    (16, 1000, 50, 6.740066731), (8, 40, 100, 1.369443266),
]  # fmt: skip


@pytest.mark.parametrize(("bands", "steps", "batches", "expected"), REFERENCE)
def test_sensitivity_is_that_of_jax_privacy(bands, steps, batches, expected):
    noise = CorrelatedNoise(bands)
    assert noise.sensitivity(steps, batches) == pytest.approx(expected, rel=1e-8)
    noise.sensitivity(steps + 9, batches)  # longer in between
    assert noise.sensitivity(steps, batches) == pytest.approx(expected, rel=1e-8)


PLANNED = [(2, 3, 20, 0.8), (4, 1, 64, 0.95), (3, 1, 200, 0.7), (5, 6, 9, 1.0)]


@pytest.mark.parametrize(("bands", "epochs", "batches", "gain"), PLANNED)
def test_planned_coefficients_keep_little(bands, epochs, batches, gain):
    """Less than the square root, and hardly more than the best of all coefficients."""
    steps, noise = epochs * batches, CorrelatedNoise(bands, epochs, batches)
    rest = sum(noise.weights(bands))
    found = kept(dense(bands, steps, rest), batches)
    for factor in (0.75, 1.25):
        assert found < kept(dense(bands, steps, factor * rest), batches)
    assert found <= gain * kept(dense(bands, steps), batches)

    def of(logits):
        shares = numpy.exp(logits) / numpy.exp(logits).sum()
        matrix = torch.eye(steps, dtype=torch.float64)
        for j, share in enumerate(shares[1:], 1):
            matrix -= torch.diag(torch.full((steps - j,), share, dtype=torch.float64), -j)
        return kept(matrix, batches)

    start = numpy.log([rest, *(-w for w in noise.weights(bands)[1:])])
    assert of(start) == pytest.approx(found, rel=1e-9)
    best = scipy.optimize.minimize(of, start, options={"maxiter": 20}).fun
    assert best <= found < 1.04 * best


@pytest.mark.parametrize("epochs", [None, 3])
@pytest.mark.parametrize(("bands", "batches"), [(2, 20), (8, 20), (100, 9)])
@pytest.mark.parametrize("steps", [7, 60, 99])
def test_planned_sensitivity_is_that_of_the_dense_inverse(bands, epochs, batches, steps):
    """Every place in the cycle has it; so have shorter and longer runs than planned."""
    noise = CorrelatedNoise(bands, epochs)
    planned = None if epochs is None else CorrelatedNoise(bands, epochs, batches)
    rest = planned and sum(planned.weights(bands))
    inverse = torch.linalg.inv(dense(bands, steps, rest))
    assert (inverse >= -1e-15).all()
    used = torch.zeros(batches, steps, dtype=torch.float64)
    for first in range(batches):
        used[first, first::batches] = 1
    most = (used @ inverse.T).norm(dim=1).max().item()
    assert noise.sensitivity(steps, batches) == pytest.approx(most, rel=1e-12)
    assert noise.in_epochs_of(batches).sensitivity(steps, batches) == pytest.approx(most, rel=1e-12)


def test_planned_weights_are_a_prefix_and_need_the_batches():
    noise = CorrelatedNoise(4, epochs=2, batches=80)
    assert noise.weights(3) == CorrelatedNoise(4).weights(3)
    assert noise.weights(9)[:3] == noise.weights(3)
    assert all(weight < 0 for weight in noise.weights(4)[1:])
    assert CorrelatedNoise(1, epochs=2, batches=80).weights(4) == (1.0,)
    assert CorrelatedNoise(4, epochs=2).in_epochs_of(80) == noise == noise.in_epochs_of(80)
    assert str(noise).startswith("correlated noise of 4 bands for 2 epochs of 80 batches (sum 0.")
    with pytest.raises(ValueError, match=r"as CorrelatedNoise\(bands=4, epochs=2, batch"):
        CorrelatedNoise(4, epochs=2).weights(3)
    with pytest.raises(ValueError, match="of 80 batches, and an epoch has 9: leave batch"):
        noise.in_epochs_of(9)
    with pytest.raises(ValueError, match="epochs is 0: give 1 or more"):
        CorrelatedNoise(4, epochs=0)


@pytest.mark.parametrize("bands", [0, -1, 2.0, True, "8", None])
def test_bands_that_are_none(bands):
    with pytest.raises(ValueError, match=r"bands .*CorrelatedNoise\(bands=8\), sampling="):
        CorrelatedNoise(bands)


def test_steps_that_are_none():
    for steps, batches in ((-1, 5), (5, 0)):
        with pytest.raises(ValueError, match=r"give a whole number, [01] or more, as sensitivity"):
            CorrelatedNoise(8).sensitivity(steps, batches)
