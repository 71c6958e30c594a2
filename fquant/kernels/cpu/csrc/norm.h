/* Root mean square norms of rows, and their gradient.

   A unit is a group of rows that stay in the nearest cache, because each is read twice. Many short rows are one group,
   so that the sum of a row overlaps with the next.

   A row is summed SUMMED elements at a time, in ABREAST partial sums in float32, which are added in pairs; these results
   are added in double. So an element takes part in at most 22 additions in float32. Nothing is fused: all instruction
   sets give the same bits. */

enum { NAME(VECTORS) = ABREAST / LANES }; /* of the partial sums */

/* Add the terms of ABREAST elements from `at` to the partial sums: x * x, or for the gradient g * w * (x * scale). */
INLINE void NAME(add)(Lanes *v, const char *g, const char *x, const char *w, int64_t at, float scale,
                      const int dtype, const int slope) {
    const int64_t left = LANES;
    UNROLLED(k, NAME(VECTORS)) {
        const int64_t i = at + k * LANES;
        Lanes a = AT(x, 0.0f);
        v[k] += slope ? AT(g, 0.0f) * AT(w, 0.0f) * (a * scale) : a * a;
    }
}

/* Add the partial sums in pairs, in the same order for vectors of any length. */
INLINE float NAME(total)(Lanes *v) {
    float one[LANES];
#pragma GCC unroll 4
    for (int half = NAME(VECTORS) / 2; half; half /= 2) UNROLLED(k, half) v[k] += v[k + half];
    memcpy(one, v, sizeof one);
#pragma GCC unroll 4
    for (int half = LANES / 2; half; half /= 2) UNROLLED(k, half) one[k] += one[k + half];
    return one[0];
}

/* The sum of the terms of a row of n elements. */
INLINE double NAME(sum)(const char *g, const char *x, const char *w, int64_t n, float scale, const int dtype,
                        const int slope) {
    const int64_t size = size_of(dtype), last = n % ABREAST;
    double total = 0.0;
    for (int64_t i = 0; i < n;) {
        Lanes v[NAME(VECTORS)] = {{0.0f}};
        const int64_t stop = MIN(n, i + SUMMED);
        for (; i + ABREAST <= stop; i += ABREAST) NAME(add)(v, g, x, w, i, scale, dtype, slope);
        if (i < stop) { /* the last ones, padded with zeros */
            char room[3][ABREAST * 4] = {{0}};
            memcpy(room[1], x + i * size, (size_t)(last * size));
            if (slope) memcpy(room[0], g + i * size, (size_t)(last * size));
            if (slope) memcpy(room[2], w + i * size, (size_t)(last * size));
            NAME(add)(v, room[0], room[1], room[2], 0, scale, dtype, slope);
            i = stop;
        }
        total += NAME(total)(v);
    }
    return total;
}

/* Round v to its dtype. A NaN has a zero lower half here, so it stays NaN without a test. */
INLINE Lanes NAME(rounded_to)(Lanes v, const int dtype) {
    Bits u = (Bits)v;
    if (dtype == F32) return v;
    return dtype == BF16 ? (Lanes)((u + 0x7fff + (u >> 16 & 1)) & 0xffff0000) : NAME(from_f16)(NAME(to_f16)(v));
}

/* y = round(x * scale) * w for n elements. */
INLINE void NAME(normed)(const char *x, const char *w, int64_t n, float scale, const int dtype, char *to) {
    EVERY(NAME(rounded_to)(AT(x, 0.0f) * scale, dtype) * AT(w, 0.0f))
}

/* dx = (g * w - x * scale * mean) * scale for n elements. */
INLINE void NAME(sloped)(const char *g, const char *x, const char *w, int64_t n, float scale, float mean,
                         const int dtype, char *to) {
    EVERY((AT(g, 0.0f) * AT(w, 0.0f) - AT(x, 0.0f) * scale * mean) * scale)
}

INLINE void NAME(norms)(const Norm *w, int64_t unit, const int slope, const int dtype) {
    const int64_t size = size_of(dtype), n = w->width, first = unit * w->group;
    const int64_t rows = MIN(w->group, w->rows - first);
    const int64_t next_x = w->apart * size, next_g = slope ? w->apart_g * size : next_x;
    const char *x = (const char *)w->x + first * next_x, *weight = w->weight;
    const char *g = slope ? (const char *)w->g + first * next_g : x;
    char *out = (char *)w->out + first * n * size;
    float *scale = w->scale + first, mean[MOST_GROUPED];
    double sums[MOST_GROUPED];
    for (int64_t r = 0; r < rows; r++)
        sums[r] = NAME(sum)(g + r * next_g, x + r * next_x, weight, n, slope ? scale[r] : 1.0f, dtype, slope);
    for (int64_t r = 0; r < rows; r++)
        if (slope) mean[r] = (float)(sums[r] / (double)n);
        else scale[r] = (float)(1.0 / sqrt(sums[r] / (double)n + w->eps));
    for (int64_t r = 0; r < rows; r++, out += n * size)
        if (slope) NAME(sloped)(g + r * next_g, x + r * next_x, weight, n, scale[r], mean[r], dtype, out);
        else NAME(normed)(x + r * next_x, weight, n, scale[r], dtype, out);
}

UNIT(norm) {
    if (((const Norm *)work)->g) { BY_DTYPE(((const Norm *)work)->dtype, NAME(norms), work, unit, 1) }
    else { BY_DTYPE(((const Norm *)work)->dtype, NAME(norms), work, unit, 0) }
}
