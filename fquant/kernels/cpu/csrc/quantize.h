/* Quantisation of blocks to codes and absmax, equal to reference/codec.py. The compiler vectorises the loops. */

/* The largest magnitude, compared as bits, so that NaN exceeds infinity and infinity all else. */
static float NAME(absmax)(const float *x, int64_t n, float least) {
    int32_t top = (int32_t)bits_of(least);
    for (int64_t i = 0; i < n; i++) {
        int32_t u = (int32_t)(bits_of(x[i]) & 0x7fffffff);
        top = u > top ? u : top;
    }
    return float_of((uint32_t)top);
}

/* Quantise values in [-1, 1] to 4-bit codes: the number of smaller midpoints. The last of an odd n is beside a zero. */
static void NAME(nearest4)(float *restrict x, int64_t n, const Encoding *how, uint8_t *restrict codes) {
    uint8_t index[PIECE];
    float m[15];
    memcpy(m, how->middles, sizeof m);
    if (n % 2) x[n++] = 0.0f;
    for (int64_t i = 0; i < n; i++) {
        int32_t below = 0;
        UNROLLED(k, 15) below += x[i] > m[k];
        index[i] = (uint8_t)below;
    }
    if (!how->sorted) for (int64_t i = 0; i < n; i++) index[i] = how->order[index[i]];
    for (int64_t i = 0; i < n / 2; i++) codes[i] = (uint8_t)(index[2 * i] << 4 | index[2 * i + 1]);
}

static void NAME(nearest8)(const float *restrict x, int64_t n, const Encoding *how, uint8_t *restrict codes) {
    for (int64_t i = 0; i < n; i++) {
        float at = (x[i] + 1.0f) * 0.5f * 65535.0f + 0.5f;
        codes[i] = how->grid[at >= 0.0f && at < 65536.0f ? (int32_t)at : 0]; /* NaN, refused later, to 0 */
    }
}

static void NAME(rounded)(const float *restrict x, int64_t n, float absmax, int8_t *restrict codes) {
    float by = 1.0f / absmax * 127.0f; /* in the order of torch's number / tensor */
    if (!(absmax > 0.0f)) memset(codes, 0, (size_t)n);
    else for (int64_t i = 0; i < n; i++) {
        float r = rintf(x[i] * by);
        codes[i] = (int8_t)(int32_t)(r <= 127.0f && r >= -127.0f ? r : 0.0f); /* else not finite: refused later */
    }
}

/* Copy n elements from `at` as floats, by way of float16 for codes that are integers. */
static void NAME(elements)(const Encode *e, int64_t at, int64_t n, int integer, float *x) {
    NAME(floats)(e->x, e->dtype, at, n, x);
    if (integer && e->dtype != F16) for (int64_t k = 0; k < n; k++) x[k] = from_f16(to_f16(x[k]));
}

/* Encode the blocks of one piece of a row, or of a whole row if its blocks are longer than a piece. */
UNIT(encode) {
    const Encode *e = work;
    const Encoding *how = &e->how;
    int64_t whole = how->block > PIECE, pieces = whole ? 1 : pieces_of(e->width);
    int64_t row = unit / pieces, start = unit % pieces * PIECE, stop = whole ? e->width : MIN(start + PIECE, e->width);
    int64_t bytes = (e->width * how->bits + 7) / 8, blocks = (e->width + how->block - 1) / how->block;
    int integer = how->bits == 8 && !how->grid;
    float x[PIECE];
    for (int64_t at = start; at < stop; at += how->block) {
        int64_t end = MIN(at + how->block, stop), from = row * e->width;
        int is_short = end - at < how->block;
        float absmax = integer || !is_short ? 0.0f : 1e-38f;
        for (int64_t i = at; i < end; i += PIECE) {
            int64_t n = MIN(end - i, PIECE);
            NAME(elements)(e, from + i, n, integer, x);
            absmax = NAME(absmax)(x, n, absmax);
        }
        e->absmax[row * blocks + at / how->block] = absmax;
        float by = 1.0f / (absmax < 1e-38f ? 1e-38f : absmax);
        for (int64_t i = at; i < end; i += PIECE) {
            int64_t n = MIN(end - i, PIECE);
            if (end - at > PIECE) NAME(elements)(e, from + i, n, integer, x);
            uint8_t *codes = e->codes + row * bytes + i * how->bits / 8;
            if (!integer) for (int64_t k = 0; k < n; k++) {
                float v = is_short ? x[k] / absmax : x[k] * by;
                v = v < -1.0f ? -1.0f : v;
                x[k] = v > 1.0f ? 1.0f : v;
            }
            if (integer) NAME(rounded)(x, n, absmax, (int8_t *)codes);
            else if (how->bits == 8) NAME(nearest8)(x, n, how, codes);
            else NAME(nearest4)(x, n, how, codes);
        }
    }
}
