/* Conversions between elements of a row and vectors of floats; `dtype` is a constant where they are inlined. Rounding
   to bf16 is by integers (`finish`), because AVX-512's own conversion flushes denormals. */

/* Load LANES elements, or n if these are fewer, and fill up with `fill`. */
INLINE Lanes NAME(wide)(const char *x, const int dtype, int64_t n, const float fill) {
    uint32_t room[LANES];
    uint16_t *few = (uint16_t *)room;
    Lanes v;
    NAME(Halves) h;
    if (n < LANES) {
        for (int i = 0; i < LANES; i++)
            if (dtype == F32) room[i] = bits_of(fill);
            else few[i] = dtype == BF16 ? to_bf16(fill) : to_f16(fill);
        x = memcpy(room, x, (size_t)(n * size_of(dtype)));
    }
    if (dtype == F32) return memcpy(&v, x, sizeof v), v;
    memcpy(&h, x, sizeof h);
    Bits u = __builtin_convertvector(h, Bits);
    return dtype == BF16 ? (Lanes)(u << 16) : NAME(from_f16)(u);
}

/* Store v, or its first n elements if these are fewer, in their dtype. */
INLINE void NAME(put)(Lanes v, const int dtype, int64_t n, char *to) {
    uint32_t room[LANES];
    NAME(finish)(v, F32, dtype, n < LANES ? (void *)room : to);
    if (n < LANES) memcpy(to, room, (size_t)(n * size_of(dtype)));
}

/* Store `value` for each vector of n elements to `to`. AT(x, fill) is that vector of x. */
#define AT(x, fill) NAME(wide)((x) + i * size_of(dtype), dtype, left, fill)
#define EVERY(value)                                                                                                    \
    int64_t i = 0, left = LANES;                                                                                        \
    _Pragma("GCC unroll 4") for (; i + LANES <= n; i += LANES) NAME(put)(value, dtype, LANES, to + i * size_of(dtype)); \
    left = n - i;                                                                                                       \
    if (left) NAME(put)(value, dtype, left, to + i * size_of(dtype));
