/* Rows of x as integers, equal to quantize_rows of reference/integers.py: each row is divided by a scale of its own and
   rounded. A unit is a row, or TURNED rows of an x that is stored transposed, which are transposed first: then a cache
   line holds one element of each of these rows, and is read once. */

/* Copy n bytes in the order of codes of fewer than 8 bits. */
INLINE void NAME(reordered)(const int8_t *q, int64_t n, int8_t *restrict out) {
    for (int64_t i = 0; i < n; i += 64)
        for (int64_t k = 0; k < 32; k++) out[i + k] = q[i + 2 * k], out[i + 32 + k] = q[i + 2 * k + 1];
}

/* q = x · by + zero, rounded, between the limits, minus zero. NaN is the first, and its row is NaN by its scale. */
#define ROUNDED(type)                                     \
    for (int64_t i = 0; i < k; i++) {                     \
        float y = rintf(row[i] * by) + zero;              \
        y = y > first ? y : first;                        \
        y = y < last ? y : last;                          \
        ((type *)q)[i] = (type)(int32_t)(y - zero);       \
    }
#define SUMMED(type)                                                                                \
    for (int64_t b = 0; b < blocks_of(&p->w); b++) {                                                \
        int32_t sum = 0;                                                                            \
        for (int64_t i = b * p->w.block; i < MIN(k, (b + 1) * p->w.block); i++) sum += ((type *)q)[i]; \
        p->sums[r * p->sums_apart[0] + b * p->sums_apart[1]] = sum;                                 \
    }

/* Quantise row r, of which `row` are the elements and `q` is room for as many bytes: integers to p->q or p->bytes,
   padded to words, its scale, and the sums of its blocks. */
static void NAME(quantize_row)(const Integers *p, int64_t r, float *restrict row, int8_t *restrict q) {
    const int64_t k = p->inner, each = p->bytes ? 1 : 2, words = 4 * p->words;
    const float first = p->how.first, last = p->how.last;
    const int in_order = p->bytes && p->w.bits == 8;
    float low = 0.0f, high = 0.0f;
    uint32_t largest = 0; /* magnitudes as bits: NaN exceeds infinity and infinity all else */
    if (p->how.halves) for (int64_t i = 0; i < k; i++) row[i] = from_f16(to_f16(row[i]));
    for (int64_t i = 0; i < k; i++) largest = MAX(largest, bits_of(row[i]) & 0x7fffffff);
    if (p->how.zero) for (int64_t i = 0; i < k; i++) low = MIN(low, row[i]), high = MAX(high, row[i]);
    float top = float_of(largest), scale = top / p->how.unit, by, zero = 0.0f;
    if (p->how.zero && largest < 0x7f800000) scale = (high - low) / (last - first);
    if (p->how.halves) {
        by = top > 0.0f ? 1.0f / top * 127.0f : 0.0f;
        scale = top * (float)(1.0 / 127.0);
    } else {
        if (scale > 0.0f && scale < 0x1p-126f) scale = 0x1p-126f;
        by = 1.0f / (scale < 0x1p-126f ? 0x1p-126f : scale);
        if (p->how.zero) {
            zero = first - rintf(low / (scale < 0x1p-126f ? 0x1p-126f : scale));
            zero = MIN(MAX(zero, first), last);
        }
    }
    p->scale[r] = scale;
    int8_t *out = p->bytes ? p->bytes + r * words : (int8_t *)(p->q + r * 2 * p->words);
    if (in_order || !p->bytes) q = out;
    if (p->bytes) ROUNDED(int8_t) else ROUNDED(int16_t)
    if (p->sums && p->bytes) SUMMED(int8_t) else if (p->sums) SUMMED(int16_t)
    if (q != out) NAME(reordered)(q, k, out);
    memset(out + k * each, 0, (size_t)(words - k * each));
}
#undef ROUNDED
#undef SUMMED

/* The floats of TURNED rows from `first` on, of which `count` are there, at out, `apart` from row to row. */
INLINE void NAME(turned_rows)(const Integers *p, int64_t first, int64_t count, int64_t apart, float *out) {
    float lines[LANES][TURNED] = {{0}};
    const int64_t line = p->across * size_of(p->dtype);
    const char *from = (const char *)p->x + first * size_of(p->dtype);
    for (int64_t k = 0; k < p->inner; k += LANES) {
        for (int64_t i = 0; i < LANES; i++) {
            if (k + i >= p->inner) break;
            for (int64_t b = 0; b < TURNED * size_of(p->dtype); b += 64)
                __builtin_prefetch(from + (k + i + TURN_AHEAD) * line + b);
            if (count == TURNED) NAME(floats)(from + (k + i) * line, p->dtype, 0, TURNED, lines[i]);
            else NAME(floats)(from + (k + i) * line, p->dtype, 0, count, lines[i]);
        }
        for (int64_t r = 0; r < TURNED; r += LANES)
            NAME(turn)((const uint32_t *)lines[0] + r, TURNED, LANES, (uint32_t *)out + r * apart + k, apart);
    }
}

UNIT(quantize_rows) {
    const Integers *p = work;
    float *rows = scratch;
    if (!p->across) {
        NAME(floats)(p->x, p->dtype, unit * p->inner, p->inner, rows);
        NAME(quantize_row)(p, unit, rows, (int8_t *)(rows + p->inner));
        return;
    }
    int64_t first = unit * TURNED, count = MIN(TURNED, p->m - first), apart = turned_apart(p->inner);
    NAME(turned_rows)(p, first, count, apart, rows);
    for (int64_t r = 0; r < count; r++)
        NAME(quantize_row)(p, first + r, rows + r * apart, (int8_t *)(rows + TURNED * apart));
}
