/* Products of more rows by Goto's algorithm (Goto & van de Geijn 2008, "Anatomy of high-performance matrix
   multiplication"), which decodes the weight where it would pack it.

   The inner dimension is in words of 32 bits: a float32, or two bf16. One operand is in panels, [words][PANEL], which
   are loaded as vectors. The other is in slivers, rows whose words are broadcast. SUMS vectors of sums stay in
   registers for STEPS words, while a panel stays in the first cache. x · wᵀ has x in panels and rows of the weight as
   slivers. Products by stripes (stripes.h) have rows of x as slivers and the weight in panels. */

enum { PANEL = VECS * LANES };

/* Round two vectors to bf16. The instruction for it takes a denormal number for zero and keeps bits of a NaN. */
INLINE void NAME(store_bf16)(Lanes a, Lanes b, uint16_t *out) {
#ifdef LANES_BF16
    const int others = 0xa1; /* NaNs, quiet and signaling, and denormal numbers */
    if (!(_mm512_fpclass_ps_mask((__m512)a, others) | _mm512_fpclass_ps_mask((__m512)b, others))) {
        _mm512_storeu_si512(out, (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
        return;
    }
#endif
    NAME(halve)(NAME(to_bf16)(a), out);
    NAME(halve)(NAME(to_bf16)(b), out + LANES);
}

/* Round n floats and store them from y + at: two vectors at a time, then one by one. */
INLINE void NAME(store)(const float *sums, int64_t n, int dtype, void *y, int64_t at) {
    Lanes pair[2];
    for (; dtype == BF16 && n >= 2 * LANES; n -= 2 * LANES, sums += 2 * LANES, at += 2 * LANES) {
        memcpy(pair, sums, sizeof pair);
        NAME(store_bf16)(pair[0], pair[1], (uint16_t *)y + at);
    }
    NAME(halves)(sums, n, dtype, y, at);
}

/* part [rows][vecs] += a sliver of rows times a panel, for n words that are `next` apart. The ints are constants. */
INLINE void NAME(multiply)(const uint32_t *sliver, int64_t apart, const uint32_t *panel, int64_t next, int64_t n, int rows,
                           int vecs, int half, Lanes part[SUMS][VECS]) {
    for (int64_t k = 0; k < n; k++) {
        Lanes w[VECS];
        UNROLLED(v, vecs) memcpy(&w[v], panel + k * next + v * LANES, sizeof w[v]);
        UNROLLED(r, rows) {
            Lanes by = (Lanes)(sliver[r * apart + k] - (Bits){0});
            UNROLLED(v, vecs) part[r][v] = half ? DOT(w[v], by, part[r][v]) : FMA(w[v], by, part[r][v]);
        }
    }
}

/* sums [rows][vecs] += (= if fresh) a sliver times a panel that is packed. The ints are constants. */
INLINE void NAME(micro)(const uint32_t *sliver, int64_t apart, const uint32_t *panel, int64_t n, int rows, int vecs,
                        int half, int fresh, float *sums) {
    Lanes part[SUMS][VECS], *total = (Lanes *)sums;
    UNROLLED(r, rows) UNROLLED(v, vecs) part[r][v] = fresh ? (Lanes){0} : total[r * vecs + v];
    NAME(multiply)(sliver, apart, panel, vecs * LANES, n, rows, vecs, half, part);
    UNROLLED(r, rows) UNROLLED(v, vecs) total[r * vecs + v] = part[r][v];
}

/* Transpose LANES rows of LANES words, and store the first `count` columns as rows of `out`. */
INLINE void NAME(turn)(const uint32_t *in, int64_t apart, int64_t count, uint32_t *out, int64_t next) {
    Bits columns[LANES];
    NAME(transpose)(in, apart, columns);
    for (int i = 0; i < count; i++) memcpy(out + i * next, &columns[i], sizeof *columns);
}

/* Copy n elements from x + at as words, padded with zeros to a multiple of LANES words. */
INLINE void NAME(words)(const void *x, int dtype, int64_t at, int64_t n, int half, uint32_t *out) {
    int64_t size = half ? 2 : 4, padded = padded_to(n * size, 4 * LANES);
    if (half) memcpy(out, (const uint16_t *)x + at, (size_t)n * 2);
    else NAME(floats)(x, dtype, at, n, (float *)out);
    memset((char *)out + n * size, 0, (size_t)(padded - n * size));
}

/* The number of vectors of panel `j` of m columns. */
INLINE int NAME(vecs)(int64_t m, int64_t j) { return (int)MIN((m - j * PANEL + LANES - 1) / LANES, VECS); }

/* Pack a slab of a panel of x: transpose LANES rows at a time. */
UNIT(pack) {
    const Gemm *p = work;
    int64_t slabs = slabs_of(p->words), j = unit / slabs, start = unit % slabs * SLAB, n = MIN(SLAB, p->words - start);
    int64_t each = p->half ? 2 : 1, vecs = NAME(vecs)(p->m, j), width = vecs * LANES;
    uint32_t *rows = scratch, *out = (uint32_t *)p->copy + j * PANEL * p->words + start * width;
    for (int64_t v = 0; v < vecs; v++) {
        for (int64_t i = 0; i < LANES; i++) {
            int64_t m = j * PANEL + v * LANES + i, at = m * p->inner + start * each;
            int64_t there = MIN(n * each, p->inner - start * each);
            if (m < p->m) NAME(words)(p->x, p->dtype, at, there, p->half, rows + i * APART);
            else memset(rows + i * APART, 0, SLAB * 4);
        }
        for (int64_t k = 0; k < n; k += LANES)
            NAME(turn)(rows + k, APART, MIN(LANES, n - k), out + k * width + v * LANES, width);
    }
}

/* What a dense weight is read for next: the slab behind this one, of the same rows or of the next group. Its lines are
   asked for a few at a time, between slivers, and arrive while these are multiplied. */
typedef struct { const uint8_t *from; int64_t apart, lines, all, next; } NAME(Ahead);

INLINE NAME(Ahead) NAME(ahead_of)(const Gemm *p, int64_t row, int64_t slab, int64_t each) {
    const int64_t size = size_of(p->dtype), last = slab + SLAB >= p->words, at = last ? 0 : (slab + SLAB) * each;
    const int64_t next = last ? row + p->group : row, lines = (MIN(SLAB * each, p->inner - at) * size + 63) / 64;
    const int64_t rows = MAX(MIN(p->group, p->w.rows - next), 0);
    return (NAME(Ahead)){p->w.codes + (next * p->inner + at) * size, p->inner * size, lines, rows * lines, 0};
}

INLINE void NAME(fetch)(NAME(Ahead) *a, int64_t count) {
    for (count = MIN(a->next + count, a->all); a->next < count; a->next++)
        __builtin_prefetch(a->from + a->next / a->lines * a->apart + a->next % a->lines * 64, 0, 2);
}

/* Multiply `group` rows of the weight with all of x. */
INLINE void NAME(by_rows)(const Gemm *p, int64_t unit, uint32_t *scratch, int half) {
    int64_t group = p->group, row = unit * group, rows = MIN(group, p->w.rows - row), each = half ? 2 : 1;
    int64_t panels = (p->m + PANEL - 1) / PANEL, tall = padded_to(group, LANES);
    float *sums = (float *)(scratch + group * APART), turned[LANES][NAME(MOST_ROWS)];
    int in_place = !p->w.bits && panels == 1 && are_words(p->w.codes, p->dtype, half, p->w.width) &&
                   (rows == group || (NAME(TILES) && half)); /* a dense weight that few rows of x read, all slivers whole */
    memset(sums, 0, (size_t)(tall * padded_to(p->m, LANES) * 4));
    if (rows < group) memset(scratch + rows * APART, 0, (size_t)((group - rows) * APART * 4));
    for (int64_t slab = 0; slab < p->words; slab += SLAB) {
        int64_t words = MIN(SLAB, p->words - slab), n = MIN(words * each, p->inner - slab * each);
        const uint32_t *from = in_place ? (const uint32_t *)p->w.codes + row * p->words + slab : scratch;
        const int64_t apart = in_place ? p->words : APART;
        for (int64_t r = 0; r < rows && !in_place; r++) {
            scratch[r * APART + words - 1] = 0; /* of which n may fill one half */
            NAME(factors)(&p->w, row + r, slab * each, n, p->dtype, half, scratch + r * APART);
        }
        const int64_t at_once = in_place || (NAME(TILES) && half) ? SLAB : STEPS;
        NAME(Ahead) ahead = {0};
        if (!p->w.bits && !in_place) ahead = NAME(ahead_of)(p, row, slab, each);
        const int64_t share = ahead.all * SUMS / (((words + at_once - 1) / at_once) * p->m * group / LANES) + 1;
        for (int64_t k = 0; k < words; k += at_once)
            for (int64_t j = 0; j < panels; j++) {
                int vecs = NAME(vecs)(p->m, j), width = vecs * LANES;
                int most = in_place ? IN_PLACE / MIN(vecs, 2) : SUMS / vecs;
                int64_t steps = MIN(at_once, words - k);
                const uint32_t *x = (const uint32_t *)p->copy + j * PANEL * p->words + (slab + k) * width;
                float *block = sums + j * PANEL * tall;
                if (NAME(TILES) && half) NAME(add_half_tiles)(from + k, apart, rows, x, vecs, steps, 0, block);
                else for (int64_t r = 0; r < rows; r += most) {
                    const uint32_t *w = from + r * apart + k;
                    float *to = block + r * width;
                    NAME(fetch)(&ahead, share);
#define CASE(N)                                                                                                        \
    case N:                                                                                                            \
        if (N > VECS) break;                                                                                           \
        if (in_place) NAME(micro)(w, apart, x, steps, IN_PLACE / MIN(N, 2), MIN(N, VECS), half, 0, to);                \
        else NAME(micro)(w, APART, x, steps, SUMS / N, MIN(N, VECS), half, 0, to);                                     \
        break;
                    switch (vecs) { CASE(1) CASE(2) CASE(3) CASE(4) }
#undef CASE
                }
            }
    }
    if (p->turned) for (int64_t j = 0; j < panels; j++)
        for (int64_t r = 0; r < rows; r++)
            NAME(store)(sums + j * PANEL * tall + r * NAME(vecs)(p->m, j) * LANES, MIN(PANEL, p->m - j * PANEL), p->dtype,
                        p->y, (row + r) * p->turned + j * PANEL);
    else for (int64_t m = 0; m < p->m; m += LANES) {
        int64_t j = m / PANEL, width = NAME(vecs)(p->m, j) * LANES;
        const uint32_t *from = (const uint32_t *)(sums + j * PANEL * tall + m % PANEL);
        for (int64_t r = 0; r < rows; r += LANES)
            NAME(turn)(from + r * width, width, LANES, (uint32_t *)turned[0] + r, NAME(MOST_ROWS));
        for (int64_t i = 0; i < MIN(LANES, p->m - m); i++)
            NAME(store)(turned[i], rows, p->dtype, p->y, (m + i) * p->w.rows + row);
    }
}

UNIT(in_groups) { TILED(BY_HALF(((const Gemm *)work)->half, NAME(by_rows), work, unit, scratch)); }
