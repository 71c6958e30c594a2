/* What IEEE 754 does not define, for vectors of float32: the exponential, silu and its derivative.

   An element's bits depend on that element only. ops/silu.py states the errors. */

/* exp(x) for x <= 0 or NaN, within 1.1 units in the last place: Cody and Waite's reduction, Cephes' polynomial. */
INLINE Lanes NAME(exponential)(Lanes x) {
    const Lanes zero = {0.0f};
    x = NAME(larger)(zero - 104.0f, x);
    Lanes shifted = FMA(x, zero + 0x1.715476p+0f, zero + 0x1.8p+23f), k = shifted - 0x1.8p+23f; /* an integer */
    Lanes r = FMA(k, zero + 2.12194440e-4f, FMA(k, zero - 0.693359375f, x));
    Lanes p = FMA(r, zero + 1.9875691500e-4f, zero + 1.3981999507e-3f);
    p = FMA(p, r, zero + 8.3334519073e-3f);
    p = FMA(p, r, zero + 4.1665795894e-2f);
    p = FMA(p, r, zero + 1.6666665459e-1f);
    p = FMA(p, r, zero + 5.0000001201e-1f);
    p = FMA(p, r * r, r) + 1.0f;
    /* 2^(k + 32) * 2^-32, because 2^k may be denormal: the result is rounded once. */
    return p * (Lanes)(((Bits)shifted + 127 + 32) << 23) * 0x1p-32f;
}

/* x * s, s = 1 / (1 + exp(-x)), and its derivative s + x * s * (1 - s), by e = exp(-|x|), so that no digits cancel. */
INLINE Lanes NAME(decay)(Lanes x) { return NAME(exponential)((Lanes)((Bits)x | 0x80000000)); }
INLINE Lanes NAME(silu)(Lanes x, Lanes e) { return NAME(either)(-((Bits)x >> 31), x * e, x) / (1.0f + e); }
INLINE Lanes NAME(silu_derivative)(Lanes x, Lanes e) {
    Bits below = -((Bits)x >> 31);
    Lanes large = 1.0f / (1.0f + e), small = e * large;
    return NAME(either)(below, small, large) * (1.0f + x * NAME(either)(below, large, small));
}
