/* The codes of largest x·c - half for rows of x, in one pass: a product whose results stay in registers.

   Codes are in panels, [d][PANEL], and six rows of x are multiplied with one at a time. A lane of each row keeps its
   best score and the number of the vector that it came from. A transpose brings the lanes of LANES rows together, so
   the best of them is found without a loop within a vector. For more than one code a row, the scores stay in scratch:
   the best is removed, and its lane is searched again. */

/* Keep s, of vector j, where it is larger than the best so far; so of equal ones the first. */
INLINE void NAME(keep)(Lanes s, uint32_t j, Lanes *best, Bits *at) {
#if defined(LANES_AVX512)
    __mmask16 larger = _mm512_cmp_ps_mask((__m512)s, (__m512)*best, _CMP_GT_OQ);
    *best = (Lanes)_mm512_mask_mov_ps((__m512)*best, larger, (__m512)s);
    *at = (Bits)_mm512_mask_mov_epi32((__m512i)*at, larger, _mm512_set1_epi32((int)j));
#elif defined(LANES_AVX2)
    __m256 larger = _mm256_cmp_ps((__m256)s, (__m256)*best, _CMP_GT_OQ), number = (__m256)_mm256_set1_epi32((int)j);
    *best = (Lanes)_mm256_blendv_ps((__m256)*best, (__m256)s, larger);
    *at = (Bits)_mm256_blendv_ps((__m256)*at, number, larger);
#else
    Bits larger = (Bits)(s > *best);
    *best = NAME(either)(larger, s, *best);
    *at = (Bits)NAME(either)(larger, (Lanes)((Bits){0} + j), (Lanes)*at);
#endif
}

/* Multiply SIX rows of x [d] with panels from j to `stop`, and keep the best of each lane; also store the scores, if not
   NULL. d is a constant for 8 and 16, those of additive quantisation. */
INLINE void NAME(best_of)(const Table *t, const float *x, int64_t d, int64_t j, int64_t stop, Lanes *best, Bits *at,
                          float *scores) {
    for (; j < stop; j++) {
        const Lanes *panel = (const Lanes *)(t->panels + j * PANEL * d), *half = (const Lanes *)(t->half + j * PANEL);
        Lanes part[SIX][VECS];
        UNROLLED(r, SIX) UNROLLED(v, VECS) part[r][v] = -half[v];
        for (int64_t k = 0; k < d; k++) {
            Lanes w[VECS];
            UNROLLED(v, VECS) w[v] = panel[k * VECS + v];
            UNROLLED(r, SIX) {
                Lanes by = x[r * d + k] - (Lanes){0};
                UNROLLED(v, VECS) part[r][v] = FMA(w[v], by, part[r][v]);
            }
        }
        UNROLLED(r, SIX) {
            Lanes top = best[r];
            Bits from = at[r];
            UNROLLED(v, VECS) NAME(keep)(part[r][v], (uint32_t)(j * VECS + v), &top, &from);
            best[r] = top, at[r] = from;
            if (scores) UNROLLED(v, VECS) memcpy(scores + r * t->padded + j * PANEL + v * LANES, &part[r][v], sizeof(Lanes));
        }
    }
}

/* Find the best of the lanes of each of LANES rows: its score and its index. */
INLINE void NAME(best_lane)(const Lanes *best, const Bits *at, float *score, int32_t *index) {
    Bits scores[LANES], places[LANES];
    NAME(transpose)((const uint32_t *)best, LANES, scores);
    NAME(transpose)((const uint32_t *)at, LANES, places);
    Lanes top = (Lanes)scores[0];
    Ints from = (Ints)(places[0] * LANES);
    UNROLLED(i, LANES) {
        Lanes s = (Lanes)scores[i];
        Ints place = (Ints)(places[i] * LANES + (uint32_t)i);
        Bits better = (Bits)((s > top) | ((s == top) & (place < from)));
        top = NAME(either)(better, s, top);
        from = (Ints)NAME(either)(better, (Lanes)place, (Lanes)from);
    }
    memcpy(score, &top, sizeof top);
    memcpy(index, &from, sizeof from);
}

/* Find the `top` best codes of n rows x [n d], n up to NEAR, best first: index and score [top][NEAR]. `scores` has room
   for [NEAR][padded] if top is above one, and `spare` for [NEAR][d]. */
static void NAME(best_codes)(const Table *t, const float *x, int64_t n, int top, float *spare, float *scores,
                             int32_t *index, float *score) {
    Lanes best[NEAR];
    Bits at[NEAR];
    int64_t d = t->d, whole = padded_to(n, SIX);
    if (whole > n) {
        memcpy(spare, x, (size_t)(n * d) * 4);
        memset(spare + n * d, 0, (size_t)((whole - n) * d) * 4);
        x = spare;
    }
    for (int64_t r = 0; r < padded_to(whole, LANES); r++) best[r] = (Lanes){0} - INFINITY, at[r] = (Bits){0};
    for (int64_t j = 0, stop, panels = t->padded / PANEL; j < panels; j = stop) { /* panels that fit the first cache */
        stop = MIN(panels, j + MAX(1, SLICE / (PANEL * d)));
        for (int64_t r = 0; r < whole; r += SIX)
            if (d == 8) NAME(best_of)(t, x + r * d, 8, j, stop, best + r, at + r, top > 1 ? scores + r * t->padded : NULL);
            else if (d == 16) NAME(best_of)(t, x + r * d, 16, j, stop, best + r, at + r, top > 1 ? scores + r * t->padded : NULL);
            else NAME(best_of)(t, x + r * d, d, j, stop, best + r, at + r, top > 1 ? scores + r * t->padded : NULL);
    }
    for (int place = 0; place < top; place++, index += NEAR, score += NEAR) {
        for (int64_t r = 0; r < n; r += LANES) NAME(best_lane)(best + r, at + r, score + r, index + r);
        for (int64_t r = 0; r < n && place + 1 < top; r++) {
            int lane = index[r] % LANES;
            float *row = scores + r * t->padded, most = -INFINITY;
            uint32_t from = 0;
            row[index[r]] = -INFINITY;
            for (int64_t j = 0; j < t->padded / LANES; j++)
                if (row[j * LANES + lane] > most) most = row[j * LANES + lane], from = (uint32_t)j;
            best[r][lane] = most, at[r][lane] = from;
        }
    }
}

UNIT(nearest) {
    const Nearest *p = work;
    int64_t units = (p->n + p->rows - 1) / p->rows, i = unit / units, row = unit % units * p->rows;
    int64_t n = MIN(p->rows, p->n - row), first = i * p->n + row;
    Table t = p->table;
    t.panels += i * t.padded * t.d, t.half += i * t.padded;
    float *score = scratch, *spare = score + p->top * NEAR, *scores = spare + NEAR * t.d;
    int32_t *index = (int32_t *)(scores + (p->top > 1 ? p->rows * t.padded : 0));
    NAME(best_codes)(&t, p->x + first * t.d, n, p->top, spare, scores, index, score);
    for (int64_t r = 0; r < n; r++) {
        int lost = !(score[r] - score[r] == 0.0f); /* not finite */
        for (int place = 0; place < p->top; place++) {
            p->index[(first + r) * p->top + place] = lost ? -1 : index[place * NEAR + r];
            p->score[(first + r) * p->top + place] = lost ? -INFINITY : score[place * NEAR + r];
        }
    }
}
