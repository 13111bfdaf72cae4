"""The integers of secure noise against their definition, in 400 bits."""

import math

import mpmath
import numpy as np
import pytest

from dp_clipping.noise.secure import rounded_gaussian as made
from dp_clipping.sampling.words import blocks

KEY = bytes(range(32))


@pytest.fixture(autouse=True)
def precision():
    with mpmath.workprec(400):
        yield


def words(n: int) -> np.ndarray:
    """Returns [6, n] words: drawn ones, and those near which a formula changes or is weakest."""
    found = blocks(KEY, np.arange(n, dtype=np.uint64))[:6].copy()
    part = n // 10
    high, low = np.uint32(0xFFFFFFFF), np.uint32(0)
    shifts = np.arange(part, dtype=np.uint32) % 32
    near = np.arange(part) - part // 2
    found[0, :part], found[1, : part // 2], found[2, : part // 4] = low, low, low  # u near 0
    found[0, part : 2 * part] = high  # u near 1
    found[1, part : 3 * part // 2] = high
    found[2, part : 5 * part // 4] = high
    found[0, 2 * part : 3 * part] >>= shifts
    found[0, 3 * part : 4 * part] = (0xAAAAAAAA + near).astype(np.uint32)  # u near ⅔
    found[0, 4 * part : 5 * part] = (0x55555555 + near).astype(np.uint32)
    turns = (near % 8 * 2**29 + near // 8 % 5 - 2) % 2**32  # t near multiples of an eighth
    found[4, : 2 * part : 2] = turns.astype(np.uint32)
    found[5, :part:4] = low
    found[:4, -1], found[4:, -1] = low, high
    found[:4, -2], found[4:, -2] = high, low
    return found


def exact(w: list[int]) -> tuple:
    """Returns radius, cosine and sine of six words."""
    u = (mpmath.mpf(w[0] << 96 | w[1] << 64 | w[2] << 32 | w[3]) + 0.5) / 2**128
    t = 2 * mpmath.pi * (mpmath.mpf(w[4] << 32 | w[5]) + 0.5) / 2**64
    return mpmath.sqrt(-2 * mpmath.log(u)), mpmath.cos(t), mpmath.sin(t)


def of(two: made.Two, i: int):
    return mpmath.mpf(float(two[0][i])) + mpmath.mpf(float(two[1][i]))


def test_errors_are_below_those_of_the_certificate():
    """Radius within 2⁻⁶⁴ of itself and 2⁻⁷⁹, cosine and sine within 2⁻⁶⁵ of themselves."""
    w = words(6000)
    r, (cosine, sine) = made.radius(*w[:4]), made.cos_sin(w[4], w[5])
    worst = [0.0, 0.0, 0.0]
    for i in range(w.shape[1]):
        expected = exact([int(x) for x in w[:, i]])
        error = abs(of(r, i) - expected[0])
        worst[0] = max(worst[0], float((error - mpmath.mpf(2) ** -79) / expected[0]))
        worst[1] = max(worst[1], float(abs(of(cosine, i) / expected[1] - 1)))
        worst[2] = max(worst[2], float(abs(of(sine, i) / expected[2] - 1)))
    assert worst[0] < 2**-64
    assert max(worst[1:]) < 2**-65
    assert min(worst) > 2**-70, "the errors of all terms in float64 are there, and are measured"


@pytest.mark.parametrize("scale", [1024.0, 3.7 * 2**20, 1.9 * 2**38])
def test_integers_are_the_exact_ones_but_next_to_a_half(scale):
    w = words(3000)
    r, (cosine, sine) = made.radius(*w[:4]), made.cos_sin(w[4], w[5])
    both = made.scaled(made.times(r, cosine), scale), made.scaled(made.times(r, sine), scale)
    for i in range(w.shape[1]):
        radius, *directions = exact([int(x) for x in w[:, i]])
        for found, direction in zip(both, directions, strict=True):
            x = radius * direction * mpmath.mpf(scale)
            allowed = 0.5 + abs(x) * mpmath.mpf(2) ** -63 + mpmath.mpf(2) ** -52
            assert found[i] == round(found[i])
            assert abs(mpmath.mpf(float(found[i])) - x) <= allowed


def test_constants_are_the_nearest_ones():
    def two(x) -> tuple[float, float]:
        return float(x), float(x - mpmath.mpf(float(x)))

    assert two(2 * mpmath.pi) == made.TWO_PI
    assert two(mpmath.mpf(1) / 3) == made.THIRD
    assert two(-mpmath.mpf(1) / 6) == made.SIN_3
    assert two(mpmath.mpf(1) / 120) == made.SIN_5
    assert two(mpmath.mpf(1) / 24) == made.COS_4
    assert two(-mpmath.mpf(1) / 720) == made.COS_6
    first = mpmath.floor(mpmath.log(2) * 2**40) / 2**40
    assert (float(first), float(mpmath.log(2) - first)) == made.LN2
    assert tuple((-1) ** k / math.factorial(2 * k + 1) for k in range(3, 10)) == made.SIN_TAIL
    assert tuple((-1) ** k / math.factorial(2 * k) for k in range(4, 11)) == made.COS_TAIL


def test_values_have_the_rounded_gaussian_distribution():
    """Mean, deviation, fourth moment, and the shares of ten equally likely parts."""
    n, scale = 400_000, 5000.0
    x = made.values_at(KEY, np.arange(n), scale) / scale
    assert abs(x.mean()) < 4 / n**0.5
    assert abs((x**2).mean() - 1) < 4 * (2 / n) ** 0.5
    assert abs((x**4).mean() - 3) < 4 * (96 / n) ** 0.5
    deciles = [float(mpmath.sqrt(2) * mpmath.erfinv(2 * p / 10 - 1)) for p in range(1, 10)]
    counts = np.histogram(x, [-np.inf, *deciles, np.inf])[0]
    assert ((counts - n / 10) ** 2 / (n / 10)).sum() < 30  # of chi-square with 9: once in 2000
    lag = np.corrcoef(x[:-1], x[1:])[0, 1]
    assert abs(lag) < 4 / n**0.5


def test_a_small_scale_has_the_probabilities_of_rounding():
    """At s = 1 the chance of 0 is erf(½/√2) = 0.3829; of a discrete Gaussian it is 0.3989."""
    n = 200_000
    x = made.values_at(KEY, np.arange(n), 1.0)
    zero = math.erf(0.5 / 2**0.5)
    assert abs((x == 0).mean() - zero) < 4 * (zero * (1 - zero) / n) ** 0.5


def test_a_value_depends_on_key_and_place_alone():
    everything = made.values_at(KEY, np.arange(1000), 2.0**20)
    some = np.array([999, 3, 3, 17, 500, 0])
    assert (made.values_at(KEY, some, 2.0**20) == everything[some]).all()
    assert (made.values_at(bytes(32), some, 2.0**20) != everything[some]).all()
    far = made.values_at(KEY, np.array([2**61, 2**61 + 16, 2**34 * 16 // 3]), 2.0**20)
    assert len(set(far.tolist())) == 3


def test_a_group_takes_each_word_once():
    """Pair p of group g has words 6p to 6p + 5 of blocks 3g to 3g + 2."""
    stream = blocks(KEY, np.arange(6, 9, dtype=np.uint64)).T.reshape(-1)
    x = made.values_at(KEY, np.arange(32, 48), 2.0**24)
    for p in range(8):
        w = stream[6 * p : 6 * p + 6]
        radius, cosine, sine = exact([int(i) for i in w])
        assert abs(x[2 * p] - float(radius * cosine * 2**24)) <= 0.51
        assert abs(x[2 * p + 1] - float(radius * sine * 2**24)) <= 0.51


def test_a_radius_has_the_first_four_words_of_a_pair(monkeypatch):
    """Compares words and not values: the fourth changes u too little for any value to show it."""
    given = []
    monkeypatch.setattr(made, "radius", lambda *w: given.extend(w) or (w[0] * 0.0, w[0] * 0.0))
    made.values_at(KEY, np.arange(16), 2.0**24)
    stream = blocks(KEY, np.arange(3, dtype=np.uint64)).T.reshape(8, 6)
    assert np.array_equal(np.stack(given), stream[:, :4].T)
