"""Integers with a Gaussian distribution, from the words of ChaCha20: the plain reference.

`round(s·x)` for x ~ N(0, 1): the Gaussian, rounded to the nearest integer. A sum that is a multiple
of the grid, plus such an integer in units of the grid, is the sum with continuous Gaussian noise,
rounded afterwards. So it is post-processing of the Gaussian mechanism, and every account of that
one holds as it is, also under Poisson sampling. That is why it is taken and not the discrete
Gaussian with weights exp(−k²/2s²) (C. Canonne, G. Kamath and T. Steinke, The discrete Gaussian for
differential privacy, 2020), whose privacy under sampling is not known to be that of the continuous
one. The two differ by less than 1/s² in total variation.

x and y are a pair of Box and Muller, x + iy = √(−2 ln u)·exp(2πi t), where u and t are exact
fractions of 128 and 64 bits, and everything between is an unevaluated sum of two float64: about 105
bits, of which 64 are needed (`certificate`). Additions, multiplications and moves of bits alone are
used: no branch, table, division or library function depends on a secret, and each operation
rounds as IEEE 754 says, so the result is the same to the last bit on every device.

Errors, relative to the exact function of the same u and t: each kept product or sum of two parts is
off by less than 2⁻¹⁰⁰. Larger errors come from the series, whose last terms are float64:

| of | float64 from | its share of the whole | so the error is below |
| --- | --- | --- | --- |
| ln u, as 2 Σ z^(2k+1)/(2k+1), z² ≤ 1/25 | k = 2 | 5⁻⁴/5 = 2⁻¹¹·⁶ | 2⁻⁶³, its root's 2⁻⁶⁴ |
| sine of at most π/4 | φ⁷/7! | 2⁻¹⁴·⁴ | 2⁻⁶⁵ |
| cosine of at most π/4 | φ⁸/8! | 2⁻¹⁷·⁵ | 2⁻⁶⁵ |

Terms left out are below 2⁻⁶⁸. Where 1 − u is below 2⁻⁵³ the two parts no longer hold all of it; the
radius, then below 2⁻²⁶, is off by at most 2⁻⁷⁹.

Sources: G. Box and M. Muller, A note on the generation of random normal deviates (1958); T. Dekker,
A floating-point technique for extending the available precision (1971).
"""

from typing import Any

import numpy as np

from dp_clipping.sampling.words import blocks

GROUP = 16  # values that are made together
BLOCKS = 3  # of ChaCha20 for a group: six words for a pair of values
PAIR_WORDS = 6
CHUNK = 1 << 14  # values made at once: what they need fits the second-level cache
ROUND = 1.5 * 2.0**52  # adding and subtracting it rounds to an integer, ties to even
SPLIT = 2.0**27 + 1
RECIPROCAL_ROOT = 0x5FE6EB50C7B537A9  # minus half the bits: those of about 1/√x
TWO_THIRDS = 0x3FE5555555555556  # the bits of ⅔, rounded up
ONE_BITS = 1023 << 52
MANTISSA = 52

# Pairs are a number's leading and following 53 bits.
LN2 = 0.6931471805592082, 7.371002565167799e-13  # of the first: 40, so that its multiples are exact
TWO_PI = 6.283185307179586, 2.4492935982947064e-16
THIRD = 0.3333333333333333, 1.850371707708594e-17
SIN_3 = -0.16666666666666666, -9.25185853854297e-18
SIN_5 = 0.008333333333333333, 1.1564823173178714e-19
COS_4 = 0.041666666666666664, 2.3129646346357427e-18
COS_6 = -0.001388888888888889, 5.300543954373577e-20
ATANH_TAIL = tuple(1 / (2 * k + 1) for k in range(2, 14))
SIN_TAIL = (
    -1.984126984126984e-4, 2.7557319223985893e-6, -2.505210838544172e-8, 1.6059043836821613e-10,
    -7.647163731819816e-13, 2.8114572543455206e-15, -8.22063524662433e-18,
)  # fmt: skip
COS_TAIL = (
    2.48015873015873e-5, -2.755731922398589e-7, 2.08767569878681e-9, -1.1470745597729725e-11,
    4.779477332387385e-14, -1.5619206968586225e-16, 4.110317623312165e-19,
)  # fmt: skip

Floats = Any  # float64 arrays, for mypy, which does not read numpy
Two = tuple[Floats, Floats]
"""An unevaluated sum of a number and a much smaller one."""


def values_at(key: bytes, offsets: np.ndarray, scale: float) -> Floats:
    """Returns the integers round(scale·x) at these places of the key's stream: [n], float64.

    Args:
        key: of ChaCha20, 32 bytes.
        offsets: [n], from 0 up to 2⁶².
        scale: the standard deviation s, from 2¹⁰ to 2⁴⁰.
    """
    groups, where = np.unique(offsets // GROUP, return_inverse=True)
    return _of_groups(key, groups, scale)[where, offsets % GROUP]


def _of_groups(key: bytes, groups: np.ndarray, scale: float) -> Floats:
    """Returns the 16 values of each group: [n, 16]."""
    counters = (BLOCKS * groups[:, None] + np.arange(BLOCKS)).astype(np.uint64)
    words = blocks(key, counters.reshape(-1)).T.reshape(len(groups), -1, PAIR_WORDS)
    pairs = np.ascontiguousarray(words.reshape(-1, PAIR_WORDS).T)
    r = radius(pairs[0], pairs[1], pairs[2], pairs[3])
    cosine, sine = cos_sin(pairs[4], pairs[5])
    both = scaled(times(r, cosine), scale), scaled(times(r, sine), scale)
    return np.stack(both, 1).reshape(len(groups), GROUP)


def radius(w0: Any, w1: Any, w2: Any, w3: Any) -> Two:
    """Returns √(−2 ln u) for u = (w + ½)/2¹²⁸, w the integer of four words [n], w0 the highest."""
    w0, w1, w2, w3 = (w.astype(np.float64) for w in (w0, w1, w2, w3))
    s, e = fast_two_sum(w0 * 2.0**-32, w1 * 2.0**-64)
    t, f = fast_two_sum(w2 * 2.0**-96, (w3 + 0.5) * 2.0**-128)
    a, b = two_sum(e, t)
    u, c = fast_two_sum(s, a)
    rest = c + (b + f)
    # u = 2^exponent·m with m in [⅔, 4/3).
    bits = u.view(np.int64)
    exponent = (bits - TWO_THIRDS) & -(1 << MANTISSA)
    m = (bits - exponent).view(np.float64)
    halvings = (-(exponent >> MANTISSA)).astype(np.float64)
    fh, fl = fast_two_sum(m - 1.0, rest * (ONE_BITS - exponent).view(np.float64))
    # z = f/(2 + f), so that ln(1 + f) = 2 artanh z.
    bh, bl = fast_two_sum(2.0, fh)
    bl = bl + fl
    x = 0.5 * fh
    y = 0.5 - 0.5 * (x * (1.0 - x * (1.0 - x)))
    for _ in range(2):
        y = y + y * (1.0 - bh * y)
    q = fh * y
    p, e = two_prod(q, bh)
    zh, zl = fast_two_sum(q, (((fh - p) - e) + (fl - q * bl)) * y)
    p, e = two_prod(zh, zh)
    wh, wl = fast_two_sum(p, e + 2.0 * zh * zl)
    # artanh z = z + z·w·(⅓ + w·tail), w = z².
    t = _polynomial(ATANH_TAIL, wh)
    p, e = two_prod(wh, t)
    sh, c = fast_two_sum(THIRD[0], p)
    sl = c + ((e + wl * t) + THIRD[1])
    p, e = two_prod(wh, sh)
    e = e + (wh * sl + wl * sh)
    p2, e2 = two_prod(zh, p)
    h, c = fast_two_sum(zh, p2)
    rest = c + ((e2 + (zh * e + zl * p)) + zl)
    h, c = fast_two_sum(halvings * LN2[0], -2.0 * h)
    h, rest = fast_two_sum(2.0 * h, 2.0 * (c + (halvings * LN2[1] - 2.0 * rest)))
    # The root of h + rest, from 1/√h.
    y = (RECIPROCAL_ROOT - (h.view(np.int64) >> 1)).view(np.float64)
    half = 0.5 * h
    for _ in range(3):
        y = y * (1.5 - (half * y) * y)
    r = h * y
    p, e = two_prod(r, r)
    return r, (((h - p) - e) + rest) * (0.5 * y)


def cos_sin(w0: Any, w1: Any) -> tuple[Two, Two]:
    """Returns cosine and sine of 2π(w + ½)/2⁶⁴, w the integer of two words [n], w0 the higher."""
    # Quarter turns, and a rest of at most an eighth: the low 62 bits, read as a signed integer.
    rest = (w0 << np.uint32(2)).view(np.int32).astype(np.float64) * 2.0**-34
    th, tl = fast_two_sum(rest, (w1.astype(np.float64) + 0.5) * 2.0**-64)
    p, e = two_prod(th, TWO_PI[0])
    ph, pl = fast_two_sum(p, e + (th * TWO_PI[1] + tl * TWO_PI[0]))
    p, e = two_prod(ph, ph)
    w = fast_two_sum(p, e + 2.0 * ph * pl)
    # sin φ = φ + φ·v, v = w(−1/3! + w(1/5! + w·tail)), w = φ².
    vh, vl = _series(w, SIN_3, SIN_5, SIN_TAIL)
    p, e = two_prod(ph, vh)
    sh, c = fast_two_sum(ph, p)
    sl = c + ((e + (ph * vl + pl * vh)) + pl)
    # cos φ = 1 + w(−½ + v), v = w(1/4! + w(−1/6! + w·tail)).
    vh, vl = _series(w, COS_4, COS_6, COS_TAIL)
    gh, c = fast_two_sum(-0.5, vh)
    gl = c + vl
    p, e = two_prod(w[0], gh)
    ch, c = fast_two_sum(1.0, p)
    cl = c + (e + (w[0] * gl + w[1] * gh))
    quarter = ((w0 + np.uint32(1 << 29)) >> np.uint32(30)).astype(np.int32)  # wraps as a turn does
    is_odd = (quarter & 1) != 0
    cosine = np.where(is_odd, sh, ch), np.where(is_odd, sl, cl)
    sine = np.where(is_odd, ch, sh), np.where(is_odd, cl, sl)
    return (
        _negated_where(((quarter + 1) & 2) != 0, *cosine),
        _negated_where((quarter & 2) != 0, *sine),
    )


def _series(w: Two, first: tuple, second: tuple, tail: tuple) -> Two:
    """Returns w·(first + w·(second + w·tail(w)))."""
    wh, wl = w
    th, c = fast_two_sum(second[0], wh * _polynomial(tail, wh))
    tl = c + second[1]
    p, e = two_prod(wh, th)
    h, c = fast_two_sum(first[0], p)
    rest = c + ((e + (wh * tl + wl * th)) + first[1])
    p, e = two_prod(wh, h)
    return p, e + (wh * rest + wl * h)


def _polynomial(coefficients: tuple[float, ...], x: Floats) -> Floats:
    """Returns Σ c_i x^i, by Horner's rule."""
    total = np.full_like(x, coefficients[-1])
    for c in coefficients[-2::-1]:
        total = total * x + c
    return total


def _negated_where(mask: Any, high: Floats, low: Floats) -> Two:
    return np.where(mask, -high, high), np.where(mask, -low, low)


def times(a: Two, b: Two) -> Two:
    """Returns a·b."""
    p, e = two_prod(a[0], b[0])
    return p, e + (a[0] * b[1] + a[1] * b[0])


def scaled(x: Two, scale: float) -> Floats:
    """Returns the integer nearest to scale·x, float64."""
    p, e = two_prod(x[0], np.full_like(x[0], scale))
    whole = rounded(p)
    return whole + rounded((p - whole) + (e + x[1] * scale))


def rounded(x: Floats) -> Floats:
    """Returns the nearest integer, ties to even, of numbers up to 2⁵¹."""
    return (x + ROUND) - ROUND


def fast_two_sum(a: Any, b: Floats) -> Two:
    """Returns a + b and its rounding error, if a is 0 or |a| ≥ |b|."""
    s = a + b
    return s, b - (s - a)


def two_sum(a: Floats, b: Floats) -> Two:
    """Returns a + b and its rounding error."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def two_prod(a: Floats, b: Any) -> Two:
    """Returns a·b and its rounding error, which a kernel gets from one fused multiply-add."""
    p = a * b
    c, d = SPLIT * a, SPLIT * b
    ah, bh = c - (c - a), d - (d - b)
    al, bl = a - ah, b - bh
    return p, ((ah * bh - p) + ah * bl + al * bh) + al * bl
