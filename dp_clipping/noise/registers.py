"""Generates noise, and updates parameters, in registers: device functions of the noise kernels."""

from dp_clipping.kernels.launch.tiles import triton

if triton is not None:
    import triton.language as tl

    @triton.jit
    def _words_of(o_counter, seed, c2, c3):
        """Returns the four words uint32 of int64 counters, by Philox4x32-10."""
        x0, x1 = o_counter.to(tl.uint32), (o_counter >> 32).to(tl.uint32)
        x2, x3 = c2.to(tl.uint32, bitcast=True), c3.to(tl.uint32, bitcast=True)
        seed = seed.to(tl.int64)  # the interpreter passes a small one as 32 bits
        k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
        for _ in tl.static_range(10):
            # One multiplication gives both halves; `tl.philox` multiplies once for each.
            p0, p1 = x0.to(tl.uint64) * 0xD2511F53, x2.to(tl.uint64) * 0xCD9E8D57
            x0 = (p1 >> 32).to(tl.uint32) ^ x1 ^ k0
            x2 = (p0 >> 32).to(tl.uint32) ^ x3 ^ k1
            x1, x3 = p1.to(tl.uint32), p0.to(tl.uint32)
            k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
            k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
        return x0, x1, x2, x3

    @triton.jit
    def _normals(w_radius, w_angle):
        """Computes Box-Muller on two words [BLOCK], without a library's special cases."""
        b_radius = _radius(w_radius)
        b_cos, b_sin = _cos_sin(w_angle)
        return b_radius * b_cos, b_radius * b_sin

    @triton.jit
    def _radius(w):
        """Computes √(−2 ln u), u = (w + ½)/2³² in (0, 1] rounded to float32 as in the reference.

        u = 2ᵉ(1 + f) with |f| ≤ 1/3, so that −2 ln u = −2 ln 2 · e + f·p(f). Over all words the
        root of this sum is off by less than 1.8e-7 (3.2e-7 where products are rounded before they
        are added), and a GPU's root adds 2⁻²³ of itself: less than 9.3e-7 together. The sum is not
        negative anywhere; it is zero where u rounds to 1.
        """
        b_u = w.to(tl.float32) * 2.0**-32 + 2.0**-33
        b_bits = b_u.to(tl.int32, bitcast=True)
        b_exponent = (b_bits - 0x3F2AAAAB) & -0x800000  # e · 2²³; the bits subtracted are 2/3's
        f = (b_bits - b_exponent).to(tl.float32, bitcast=True) - 1.0
        p = 0.32557014 * f - 0.34344143
        p = p * f + 0.32435727
        p = p * f - 0.39576316
        p = p * f + 0.5004274
        p = p * f - 0.66675776
        p = p * f + 0.99999326
        p = p * f - 2.0
        return tl.sqrt(tl.fma(b_exponent.to(tl.float32), -1.6525917e-07, p * f))

    @triton.jit
    def _cos_sin(w):
        """Computes cosine and sine of w·π/2³¹, off by less than 9e-8 each.

        The angle is q quarter turns and a rest πt of at most an eighth. The low 30 bits of w, read
        as a signed integer, are 2³¹t: exact, so that only their conversion to float32 rounds the
        angle. Both polynomials in t are within 7.2e-8 of their functions for every float32 in
        [−¼, ¼], of which the terms left out are 5e-9; the conversion is the rest.
        """
        t = (w << 2).to(tl.int32, bitcast=True).to(tl.float32) * 2.0**-33
        u = t * t
        b_sin = ((-0.5829332 * u + 2.5491157) * u - 5.1676884) * u + 3.1415925
        b_sin *= t
        b_cos = (((0.22875105 * u - 1.3347361) * u + 4.0586963) * u - 4.934802) * u + 1.0
        q = tl.add(w, 1 << 29, sanitize_overflow=False) >> 30  # wraps as a turn does
        m_odd = (q & 1) != 0
        b_first, b_second = tl.where(m_odd, b_sin, b_cos), tl.where(m_odd, b_cos, b_sin)
        b_first = tl.where(((q + 1) & 2) != 0, -b_first, b_first)
        return b_first, tl.where((q & 2) != 0, -b_second, b_second)

    @triton.jit
    def _four_normals(o_counter, seed, c2, c3):
        """Returns the four normal numbers of each counter."""
        w0, w1, w2, w3 = _words_of(o_counter, seed, c2, c3)
        z0, z1 = _normals(w0, w1)
        z2, z3 = _normals(w2, w3)
        return z0, z1, z2, z3

    @triton.jit
    def _noise_of(
        o_counter, seed, c2, c3, p_earlier, n_earlier, EARLIER_WORDS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Returns z + Σ w·z' over earlier streams, four values per counter side by side: [4·BLOCK].

        At `p_earlier` are a seed, two counter words and the bits of w for each earlier stream.
        EARLIER_WORDS is how many these are, 0 where there are no earlier streams.
        """
        z0, z1, z2, z3 = _four_normals(o_counter, seed, c2, c3)
        if EARLIER_WORDS:
            for i in range(n_earlier):
                p_stream = p_earlier + EARLIER_WORDS * i
                d2, d3 = tl.load(p_stream + 1).to(tl.int32), tl.load(p_stream + 2).to(tl.int32)
                y0, y1, y2, y3 = _four_normals(o_counter, tl.load(p_stream), d2, d3)
                weight = tl.load(p_stream + 3).to(tl.int32).to(tl.float32, bitcast=True)
                z0 += weight * y0
                z1 += weight * y1
                z2 += weight * y2
                z3 += weight * y3
        return tl.join(tl.join(z0, z2), tl.join(z1, z3)).reshape(4 * BLOCK)

    @triton.jit
    def _quotient(b_sum, divisor, inverse):
        """Computes b_sum / divisor from `inverse` = 1 / divisor, rounded by one Newton step.

        A library's division does the same, but looks at each value first, for those whose exponent
        could leave the range. Here an infinite sum gives NaN.
        """
        b_q = b_sum * inverse
        return tl.fma(tl.fma(-b_q, divisor, b_sum), inverse, b_q)

    @triton.jit
    def _number(p_word):
        """Loads the bits of a float64."""
        return tl.load(p_word).to(tl.float64, bitcast=True)

    @triton.jit
    def _number_at(p_words):
        """Loads a number: the float32 at an address, or the float64 behind an address of 0."""
        address = tl.load(p_words)
        p = address.to(tl.pointer_type(tl.float32))
        found = tl.load(p, mask=address != 0, other=0).to(tl.float64)
        return tl.where(address != 0, found, _number(p_words + 1))

    @triton.jit
    def _numbers_of_update(p_words, RULE: tl.constexpr):
        """Computes, in float64, what all elements of a row are updated with; see `_updated`.

        Returns step size, √(1 - β₂ᵗ), weight decay, share that is kept and share that is taken of
        the first state, and of the second, and ε.
        """
        step, lr = _number_at(p_words), _number_at(p_words + 2)
        decay, keep, other = _number(p_words + 4), _number(p_words + 5), _number(p_words + 6)
        epsilon, root = _number(p_words + 7), step
        take, keep_2, size = other, other, lr
        if RULE == "adam" or RULE == "adamw":
            take = 1 - keep
            size = lr / (1 - tl.exp(step * tl.log(keep)))
            root = tl.sqrt(1 - tl.exp(step * tl.log(other)))
        if RULE == "adamw":
            decay = lr * decay
        return (
            size.to(tl.float32), root.to(tl.float32), decay.to(tl.float32), keep.to(tl.float32),
            take.to(tl.float32), keep_2.to(tl.float32), (1 - keep_2).to(tl.float32),
            epsilon.to(tl.float32),
        )  # fmt: skip

    @triton.jit
    def _old(p_weight, p_first, p_second, mask, RULE: tl.constexpr):
        """Loads weights and states in float32; a weight stands for a state that there is not."""
        w = tl.load(p_weight, mask=mask, other=0).to(tl.float32)
        m, v = w, w
        if RULE != "sgd":
            m = tl.load(p_first, mask=mask, other=0).to(tl.float32)
        if RULE == "adam" or RULE == "adamw":
            v = tl.load(p_second, mask=mask, other=0).to(tl.float32)
        return w, m, v

    @triton.jit
    def _updated(
        w, m, v, g, size, root, decay, keep, take, keep_2, take_2, epsilon, RULE: tl.constexpr
    ):  # fmt: skip
        """Computes weights and states, by gradients g [N] float32.

        Adam: m ← β₁m + (1 - β₁)g, v ← β₂v + (1 - β₂)g², w ← w - lr/(1 - β₁ᵗ) · m / (√v / √(1 - β₂ᵗ)
        + ε). SGD: m ← μm + (1 - τ)g, w ← w - lr·m, or w - lr·(g + μm) with Nesterov's momentum.
        """
        if RULE == "adamw":
            w -= decay * w
        else:
            g += decay * w
        if RULE != "sgd":
            m = keep * m + take * g
        if RULE == "adam" or RULE == "adamw":
            v = keep_2 * v + take_2 * g * g
            g = m / (tl.sqrt(v) / root + epsilon)
        elif RULE == "momentum":
            g = m
        elif RULE == "nesterov":
            g += keep * m
        return w - size * g, m, v
