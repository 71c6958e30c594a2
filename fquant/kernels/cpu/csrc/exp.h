/* What IEEE 754 does not define, of vectors of float32, for one instruction set: the exponential, silu and its slope.

   All is additions, products and quotients, so that an element's bits depend on that element only, and are the same on
   every instruction set that has fused multiply-adds; without them a float32 may be a few units another. What is
   infinite or not a number comes out as of torch's own: silu(-inf) and the slopes at both infinities are NaN. */

/* exp(x) for x that is not above 0, or NaN: within 1.1 units in the last place, denormals included, and 0 from -104 on.
   (Cody and Waite's reduction; the polynomial is that of Moshier's Cephes.) */
INLINE NAME(Lanes) NAME(exponential)(NAME(Lanes) x) {
    const NAME(Lanes) zero = {0.0f};
    x = NAME(larger)(zero - 104.0f, x);
    NAME(Lanes) shifted = FMA(x, zero + 0x1.715476p+0f, zero + 0x1.8p+23f), k = shifted - 0x1.8p+23f; /* whole */
    NAME(Lanes) r = FMA(k, zero + 2.12194440e-4f, FMA(k, zero - 0.693359375f, x));
    NAME(Lanes) p = FMA(r, zero + 1.9875691500e-4f, zero + 1.3981999507e-3f);
    p = FMA(p, r, zero + 8.3334519073e-3f);
    p = FMA(p, r, zero + 4.1665795894e-2f);
    p = FMA(p, r, zero + 1.6666665459e-1f);
    p = FMA(p, r, zero + 5.0000001201e-1f);
    p = FMA(p, r * r, r) + 1.0f;
    /* 2^(k + 32) and 2^-32, for 2^k may be denormal: so it is rounded once. */
    return p * (NAME(Lanes))(((NAME(Bits))shifted + 127 + 32) << 23) * 0x1p-32f;
}

/* Of s, the logistic function of x: x * s, and its derivative s + x * s * (1 - s). Where s or 1 - s is small it is made
   of e = exp(-|x|), so that no digits are lost. */
INLINE NAME(Lanes) NAME(decay)(NAME(Lanes) x) {
    return NAME(exponential)((NAME(Lanes))((NAME(Bits))x | 0x80000000));
}
INLINE NAME(Lanes) NAME(either)(NAME(Bits) mask, NAME(Lanes) a, NAME(Lanes) b) {
    return (NAME(Lanes))((mask & (NAME(Bits))a) | (~mask & (NAME(Bits))b));
}
INLINE NAME(Lanes) NAME(silu)(NAME(Lanes) x, NAME(Lanes) e) {
    return NAME(either)(-((NAME(Bits))x >> 31), x * e, x) / (1.0f + e);
}
INLINE NAME(Lanes) NAME(silu_derivative)(NAME(Lanes) x, NAME(Lanes) e) {
    NAME(Bits) below = -((NAME(Bits))x >> 31);
    NAME(Lanes) large = 1.0f / (1.0f + e), small = e * large;
    return NAME(either)(below, small, large) * (1.0f + x * NAME(either)(below, large, small));
}
