/* Decoding a token at a time: attention of one token of each sequence to the slots of a cache, and products of few rows
   with a dense weight. Both are bound by one read of the slots, or of the weight. */

/* LANES elements of x from `at`; zeros behind the first n. */
INLINE Lanes NAME(widened)(const void *x, int64_t at, int64_t n, const int dtype) {
    if (dtype == F32) {
        Lanes v = {0};
        if (n >= LANES) memcpy(&v, (const float *)x + at, sizeof v);  /* a size that is no constant is a call */
        else memcpy(&v, (const float *)x + at, (size_t)MAX(n, 0) * 4);
        return v;
    }
    NAME(Halves) h = {0};
    if (n >= LANES) memcpy(&h, (const uint16_t *)x + at, sizeof h);
    else memcpy(&h, (const uint16_t *)x + at, (size_t)MAX(n, 0) * 2);
    Bits u = __builtin_convertvector(h, Bits);
    return dtype == BF16 ? (Lanes)(u << 16) : NAME(from_f16)(u);
}

/* Scores of n slots, of the queries q f32[ABREAST_HEADS][wide], to f32[ABREAST_HEADS][apart]. */
INLINE void NAME(slot_scores)(const Cached *c, int64_t start, int64_t n, const float *q, int64_t wide, float *scores,
                              int64_t apart, const int dtype) {
    for (int64_t s = 0; s < n; s++) {
        int64_t at = start + s * c->kv * c->e;
        Lanes sums[ABREAST_HEADS] = {0};
        for (int64_t i = 0; i < c->e * size_of(dtype); i += 64) { /* values are read next */
            __builtin_prefetch((const char *)c->k + (at + 16 * c->kv * c->e) * size_of(dtype) + i);
            __builtin_prefetch((const char *)c->v + at * size_of(dtype) + i);
        }
        for (int64_t i = 0; i < c->e; i += LANES) {
            Lanes k = NAME(widened)(c->k, at + i, c->e - i, dtype);
            UNROLLED(r, ABREAST_HEADS) sums[r] = FMA(k, *(const Lanes *)(q + r * wide + i), sums[r]);
        }
        float totals[4];
        NAME(sum4)(sums, totals);
        UNROLLED(r, ABREAST_HEADS) scores[r * apart + s] = totals[r];
    }
}

/* Turn n scores of a head into weights that sum to the result; zeros follow up to a whole vector. */
INLINE float NAME(slot_weights)(const Cached *c, float *x, int64_t n, const float *sink) {
    float most = sink ? *sink : -INFINITY, total = 0.0f, each[LANES];
    for (int64_t i = 0; i < n && c->cap > 0.0f; i++) x[i] = tanhf(x[i] / c->cap) * c->cap;
    for (int64_t i = 0; i < n; i++) most = x[i] > most ? x[i] : most;
    for (int64_t i = n; i % LANES; i++) x[i] = -INFINITY;
    Lanes sums = {0};
    for (int64_t i = 0; i < n; i += LANES) {
        Lanes p = NAME(exponential)(*(Lanes *)(x + i) - most);
        *(Lanes *)(x + i) = p;
        sums += p;
    }
    memcpy(each, &sums, sizeof each);
    for (int i = 0; i < LANES; i++) total += each[i];
    for (int64_t i = n; i % LANES; i++) x[i] = 0.0f;
    return sink ? total + expf(*sink - most) : total;
}

/* A unit is up to ABREAST_HEADS heads of queries that share a head of keys. */
INLINE void NAME(attend_slots)(const Cached *c, int64_t unit, float *scratch, const int dtype) {
    int64_t group = c->heads / c->kv, blocks = (group + ABREAST_HEADS - 1) / ABREAST_HEADS;
    int64_t kv = unit / blocks % c->kv, b = unit / blocks / c->kv, block = unit % blocks * ABREAST_HEADS;
    int64_t first = b * c->heads + kv * group + block, heads = MIN(ABREAST_HEADS, group - block);
    int64_t wide = padded_to(c->e, LANES), apart = padded_to(c->slots, LANES), n = MIN(c->position[b] + 1, c->slots);
    int64_t start = (b * c->slots * c->kv + kv) * c->e;
    float *q = scratch, *scores = q + ABREAST_HEADS * wide, shares[ABREAST_HEADS], out[LANES];
    memset(q, 0, (size_t)(ABREAST_HEADS * wide) * 4);
    for (int64_t r = 0; r < heads; r++) {
        NAME(floats)(c->q, dtype, (first + r) * c->e, c->e, q + r * wide);
        for (int64_t i = 0; i < c->e; i++) q[r * wide + i] *= c->scale;
    }
    NAME(slot_scores)(c, start, n, q, wide, scores, apart, dtype);
    for (int64_t r = 0; r < heads; r++)
        shares[r] = 1.0f / NAME(slot_weights)(c, scores + r * apart, n, c->sinks ? c->sinks + first + r : NULL);
    for (int64_t i = 0; i < c->e; i += LANES) {
        Lanes sums[ABREAST_HEADS] = {0};
        for (int64_t s = 0; s < n; s++) {
            Lanes v = NAME(widened)(c->v, start + s * c->kv * c->e + i, c->e - i, dtype);
            UNROLLED(r, ABREAST_HEADS) sums[r] = FMA(v, (Lanes){0} + scores[r * apart + s], sums[r]);
        }
        for (int64_t r = 0; r < heads; r++) {
            sums[r] *= shares[r];
            memcpy(out, &sums[r], sizeof out);
            NAME(halves)(out, MIN(LANES, c->e - i), dtype, c->y, (first + r) * c->e + i);
        }
    }
}

UNIT(cached) {
    const Cached *c = work;
    BY_DTYPE(c->dtype, NAME(attend_slots), c, unit, scratch)
}

/* Multiply `rows` rows of a dense weight with `columns` rows of x; all sums are in registers. */
INLINE void NAME(dense_tile)(const Dense *d, int64_t row, int64_t at, int rows, int columns, const int half, const int dtype) {
    Lanes sums[4][4] = {0};
    const int step = half ? 2 * LANES : LANES;
    const char *w = (const char *)d->w + row * d->width * size_of(dtype);
    const char *x = (const char *)d->x + at * d->width * size_of(dtype);
    for (int64_t i = 0; i < d->width; i += step) {
        Lanes a[4];
        UNROLLED(r, rows) {
            const char *from = w + (r * d->width + i) * size_of(dtype);
            __builtin_prefetch(from + 1024, 0, 2);
            if (half) memcpy(&a[r], from, sizeof a[r]);
            else a[r] = NAME(widened)(from, 0, LANES, dtype);
        }
        UNROLLED(m, columns) {
            const char *from = x + (m * d->width + i) * size_of(dtype);
            Lanes b;
            if (half) memcpy(&b, from, sizeof b);
            else b = NAME(widened)(from, 0, LANES, dtype);
            UNROLLED(r, rows) sums[m][r] = half ? DOT(a[r], b, sums[m][r]) : FMA(a[r], b, sums[m][r]);
        }
    }
    UNROLLED(m, columns) {
        float totals[4];
        NAME(sum4)(sums[m], totals);
        NAME(halves)(totals, rows, dtype, d->y, (at + m) * d->rows + row);
    }
}

INLINE void NAME(dense_group)(const Dense *d, int64_t unit, const int half, const int dtype) {
    int64_t stop = MIN((unit + 1) * GROUP, d->rows);
    for (int64_t row = unit * GROUP, rows; row < stop; row += rows) {
        rows = stop - row >= 4 ? 4 : 1;
        for (int64_t at = 0; at < d->m; at += 4)
#define CASE(C) \
    case C:                                                     \
        if (rows == 4) NAME(dense_tile)(d, row, at, 4, C, half, dtype);  \
        else NAME(dense_tile)(d, row, at, 1, C, half, dtype);           \
        break;
            switch (MIN(d->m - at, 4)) { CASE(1) CASE(2) CASE(3) CASE(4) }
#undef CASE
    }
}

UNIT(dense_matmul) {
    const Dense *d = work;
#ifdef LANES_BF16
    if (d->dtype == BF16) NAME(dense_group)(d, unit, 1, BF16);
    else
#endif
        if (d->dtype == F32) NAME(dense_group)(d, unit, 0, F32);
    else if (d->dtype == BF16) NAME(dense_group)(d, unit, 0, BF16);
    else NAME(dense_group)(d, unit, 0, F16);
}
