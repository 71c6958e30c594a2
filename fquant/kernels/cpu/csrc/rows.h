/* Conversions between elements of a row and vectors of floats; `dtype` is a constant where they are inlined. Rounding
   to bf16 is by integers (`finish`), because AVX-512's own conversion flushes denormals. */

/* Load LANES elements. */
INLINE Lanes NAME(wide)(const char *x, const int dtype) {
    Lanes v;
    Halves h;
    if (dtype == F32) return memcpy(&v, x, sizeof v), v;
    memcpy(&h, x, sizeof h);
    Bits u = __builtin_convertvector(h, Bits);
    return dtype == BF16 ? (Lanes)(u << 16) : NAME(from_f16)(u);
}

/* Load the last n elements, fewer than LANES, and fill up with `fill`. */
INLINE Lanes NAME(last)(const char *x, const int dtype, int64_t n, const float fill) {
    uint32_t room[LANES];
    uint16_t *h = (uint16_t *)room;
    for (int i = 0; i < LANES; i++)
        if (dtype == F32) room[i] = bits_of(fill);
        else h[i] = dtype == BF16 ? to_bf16(fill) : to_f16(fill);
    memcpy(room, x, (size_t)(dtype == F32 ? 4 * n : 2 * n));
    return NAME(wide)((const char *)room, dtype);
}

/* Store the first n of v, fewer than LANES, in their dtype. */
INLINE void NAME(put)(Lanes v, const int dtype, int64_t n, char *to) {
    uint32_t room[LANES];
    NAME(finish)(v, F32, dtype, room);
    memcpy(to, room, (size_t)(dtype == F32 ? 4 * n : 2 * n));
}
