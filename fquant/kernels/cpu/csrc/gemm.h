/* Products of more rows by Goto's algorithm (Goto & van de Geijn 2008, "Anatomy of high-performance matrix
   multiplication"), which decodes the weight where it would pack it.

   The inner dimension is in words of 32 bits: a float32, or two bf16. One operand is in panels, [words][PANEL], which
   are loaded as vectors. The other is in slivers, rows whose words are broadcast. SUMS vectors of sums stay in
   registers for STEPS words, while a panel stays in the first cache. x · wᵀ has x in panels and rows of the weight as
   slivers. g · w has g's rows as slivers and stripes of the weight's columns in panels. */

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

/* sums [rows][vecs] += (= if fresh) a sliver of rows times a panel, for n words that are `next` apart. The ints are
   constants. */
INLINE void NAME(micro_apart)(const uint32_t *sliver, int64_t apart, const uint32_t *panel, int64_t next, int64_t n, int rows,
                              int vecs, int half, int fresh, float *sums) {
    Lanes part[SUMS][VECS], *total = (Lanes *)sums;
    UNROLLED(r, rows) UNROLLED(v, vecs) part[r][v] = fresh ? (Lanes){0} : total[r * vecs + v];
    for (int64_t k = 0; k < n; k++) {
        Lanes w[VECS];
        UNROLLED(v, vecs) memcpy(&w[v], panel + k * next + v * LANES, sizeof w[v]);
        UNROLLED(r, rows) {
            Lanes by = (Lanes)(sliver[r * apart + k] - (Bits){0});
            UNROLLED(v, vecs) part[r][v] = half ? DOT(w[v], by, part[r][v]) : FMA(w[v], by, part[r][v]);
        }
    }
    UNROLLED(r, rows) UNROLLED(v, vecs) total[r * vecs + v] = part[r][v];
}

/* The same for a panel that is packed. */
INLINE void NAME(micro)(const uint32_t *sliver, int64_t apart, const uint32_t *panel, int64_t n, int rows, int vecs,
                        int half, int fresh, float *sums) {
    NAME(micro_apart)(sliver, apart, panel, vecs * LANES, n, rows, vecs, half, fresh, sums);
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

UNIT(matmul) { TILED(BY_HALF(((const Gemm *)work)->half, NAME(by_rows), work, unit, scratch)); }

/* Pack a row of g as words, in slabs. */
UNIT(pack_t) {
    const Gemm *p = work;
    int64_t slab = p->half ? 2 * SLAB : SLAB;
    uint32_t *out = (uint32_t *)p->copy + unit * p->apart;
    for (int64_t at = 0; at < p->inner; at += slab, out += p->m * p->apart)
        NAME(words)(p->x, p->dtype, unit * p->inner + at, MIN(slab, p->inner - at), p->half, out);
}

/* Decode words k of a stripe's panels: a row of the weight, or in bf16 a row interleaved with the next. */
INLINE void NAME(stripe)(const Gemm *p, int64_t row, int64_t k, int64_t column, int64_t width, int64_t depth,
                         int half, uint32_t *out) {
    uint32_t words[STRIPE];
    const uint8_t *codes = p->w.bits ? NULL : p->w.codes + (row * p->w.width + column) * size_of(p->dtype);
    if (codes && width == STRIPE && p->dtype == F32) {
        for (int64_t j = 0; j < STRIPE; j += PANEL) memcpy(out + j * depth + k * PANEL, codes + 4 * j, PANEL * 4);
        return;
    }
#ifdef LANES_BF16
    if (codes && width == STRIPE && half && row + 1 < p->w.rows) {
        const __m512i first = _mm512_load_si512(BESIDE), last = _mm512_load_si512(BESIDE + 32);
        for (int64_t j = 0; j < STRIPE; j += 32) {
            __m512i a = _mm512_loadu_si512(codes + 2 * j), b = _mm512_loadu_si512(codes + 2 * (p->w.width + j));
            __m512i *to = (__m512i *)(out + (j / PANEL * depth + k) * PANEL + j % PANEL);
            _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, first, b));
            _mm512_storeu_si512(to + 1, _mm512_permutex2var_epi16(a, last, b));
        }
        return;
    }
#endif
    if (half) {
        uint16_t first[STRIPE], second[STRIPE] = {0};
        NAME(factors)(&p->w, row, column, width, p->dtype, 1, first);
        if (row + 1 < p->w.rows) NAME(factors)(&p->w, row + 1, column, width, p->dtype, 1, second);
        for (int i = 0; i < width; i++) words[i] = first[i] | (uint32_t)second[i] << 16;
    } else NAME(factors)(&p->w, row, column, width, p->dtype, 0, words);
    if (width < STRIPE) memset(words + width, 0, (size_t)(STRIPE - width) * 4);
    for (int64_t j = 0; j < STRIPE; j += PANEL) memcpy(out + j * depth + k * PANEL, words + j, PANEL * 4);
}

#ifdef LANES_BF16
/* The same with one rounding instruction: 4 bits in blocks of 64 or more, no offset, widths of whole vectors. `zeroed`,
   true if there are zero points, is a constant. */
INLINE void NAME(stripe_pairs)(const Gemm *p, int64_t row, int64_t k, int64_t column, int64_t width,
                               int64_t depth, int zeroed, uint32_t *out) {
    const Packed *w = &p->w;
    int64_t next = w->width / 2;
    int there = row + 1 < w->rows;
    const uint8_t *codes = w->codes + row * next + column / 2;
    float scales[2][STRIPE / 64 + 64], zeros[2][STRIPE / 64];
    __m512 table = _mm512_loadu_ps(w->table);
    __m512i first = _mm512_load_si512(BESIDE), last = _mm512_load_si512(BESIDE + 32);
    for (int r = 0; r <= there; r++) {
        NAME(scales64)(w, row + r, column, width, scales[r]);
        if (zeroed) NAME(zeros64)(w, row + r, column, width, zeros[r]);
    }
    for (int64_t i = 0; i < width; i += 128) {
        __m512i a[4], b[4] = {0};
        int64_t at = i / 64;
        NAME(pair4)(codes + i / 2, NAME(values2)(table, scales[0] + at, zeros[0] + at, 1, zeroed), a);
        if (there)
            NAME(pair4)(codes + next + i / 2, NAME(values2)(table, scales[1] + at, zeros[1] + at, 1, zeroed), b);
        __builtin_prefetch(codes + 16 * next + i / 2);
        __builtin_prefetch(codes + 17 * next + i / 2);
        UNROLLED(j, 4) {
            int64_t at = i + 32 * j, panel = at / PANEL;
            __m512i *to = (__m512i *)(out + (panel * depth + k) * PANEL + at % PANEL);
            to[0] = _mm512_permutex2var_epi16(a[j], first, b[j]);
            to[1] = _mm512_permutex2var_epi16(a[j], last, b[j]);
        }
    }
}
#endif

/* sums [count][PANEL] += (= if fresh) `count` rows of g times a panel, for n words. fresh is a constant. A panel whose
   words are `next` apart is a part of a weight that is not packed. */
INLINE void NAME(add_panel)(const uint32_t *x, int64_t apart, int64_t count, const uint32_t *panel, int64_t next, int64_t n,
                            int half, int fresh, float *sums) {
    if (NAME(TILES) && half) NAME(add_half_tiles)(x, apart, count, panel, VECS, n, fresh, sums); /* packed */
    else for (int64_t m = 0, rows; m < count; m += rows) {
        rows = MIN(SUMS / VECS, count - m);
#define ROWS(N) case N: NAME(micro_apart)(x + m * apart, apart, panel, next, n, N, VECS, half, fresh, sums + m * PANEL); break;
        switch (rows) { ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) }
#undef ROWS
    }
}

/* Decode n words from `start` of a stripe from `column` to panels of `depth` words. */
INLINE void NAME(panels)(const Gemm *p, int64_t start, int64_t n, int64_t column, int64_t width, int64_t depth, int half,
                         uint32_t *w) {
    const int64_t each = half ? 2 : 1;
    for (int64_t k = 0; k < n; k++)
#ifdef LANES_BF16
        if (half && p->interleaved && p->w.zero)
            NAME(stripe_pairs)(p, (start + k) * each, k, column, width, depth, 1, w);
        else if (half && p->interleaved) NAME(stripe_pairs)(p, (start + k) * each, k, column, width, depth, 0, w);
        else
#endif
            NAME(stripe)(p, (start + k) * each, k, column, width, depth, half, w);
}

/* Multiply all of g with a stripe of the weight's columns. Few rows read a weight in float32 where it is. Lines of g that
   is not packed are in other pages, so they are asked for two slivers ahead, while the first panel is multiplied. */
INLINE void NAME(by_columns)(const Gemm *p, int64_t unit, uint32_t *scratch, int half) {
    enum { HIGH = SUMS / VECS }; /* of a sliver */
    int64_t column = unit * STRIPE, width = MIN(STRIPE, p->w.width - column), apart = p->copy ? p->apart : p->words;
    int64_t panels = (width + PANEL - 1) / PANEL;
    uint32_t *w = scratch;
    float *sums = (float *)(scratch + STRIPE * STEPS);
    const int in_place = !p->w.bits && !half && p->dtype == F32 && width == STRIPE && p->m <= 4 * HIGH;
    memset(sums, 0, (size_t)(p->m * STRIPE * 4));
    for (int64_t start = 0; start < p->words; start += STEPS) {
        int64_t n = MIN(STEPS, p->words - start), lines = (n * 4 + 63) / 64;
        const uint32_t *dense = (const uint32_t *)p->w.codes + start * p->w.width + column;
        NAME(Ahead) ahead = {(const uint8_t *)p->x + start * 4, p->words * 4, lines, p->copy ? 0 : p->m * lines, 0};
        if (!in_place) NAME(panels)(p, start, n, column, width, STEPS, half, w);
        const uint32_t *x = (const uint32_t *)p->x + start;
        if (p->copy) x = (const uint32_t *)p->copy + start / SLAB * p->m * apart + start % SLAB;
        for (int64_t j = 0; j < panels; j++) {
            const uint32_t *panel = in_place ? dense + j * PANEL : w + j * STEPS * PANEL;
            int64_t next = in_place ? p->w.width : PANEL, m = 0;
            float *to = sums + j * p->m * PANEL;
            for (; j == 0 && ahead.next < ahead.all; m += HIGH) {
                NAME(fetch)(&ahead, (m ? 1 : 2) * HIGH * lines);
                NAME(add_panel)(x + m * apart, apart, MIN(HIGH, p->m - m), panel, next, n, half, 0, to + m * PANEL);
            }
            NAME(add_panel)(x + m * apart, apart, p->m - m, panel, next, n, half, 0, to + m * PANEL);
        }
    }
    for (int64_t m = 0; m < p->m; m++)
        for (int64_t j = 0; j < panels; j++)
            NAME(store)(sums + (j * p->m + m) * PANEL, MIN(PANEL, width - j * PANEL), p->dtype, p->y,
                        m * p->w.width + column + j * PANEL);
}

/* y [rows][..] from `at` with stride `next` = rows times a panel, for n words. rows, half and dtype are constants. */
INLINE void NAME(micro_to)(const uint32_t *x, int64_t apart, const uint32_t *panel, int64_t n, int rows, int half,
                           int dtype, void *y, int64_t at, int64_t next) {
    Lanes sums[SUMS / VECS][VECS];
    NAME(micro)(x, apart, panel, n, rows, VECS, half, 1, (float *)sums);
    UNROLLED(r, rows) {
        if (dtype == F32) memcpy((float *)y + at + r * next, sums[r], sizeof sums[r]);
        else UNROLLED(v, VECS / 2)
            NAME(store_bf16)(sums[r][2 * v], sums[r][2 * v + 1], (uint16_t *)y + at + r * next + 2 * v * LANES);
    }
}

/* Multiply `group` rows of g with some stripes, if a sum is of up to STEPS words. The panels of these stripes
   are as many words as a stripe of STEPS. Sums are stored while they are in the first cache, or in registers. */
INLINE void NAME(by_short_columns)(const Gemm *p, int64_t unit, uint32_t *scratch, int half) {
    const int64_t wide = p->stripes * STRIPE, across = (p->w.width + wide - 1) / wide, n = p->words;
    const int64_t column = unit % across * wide, stop = MIN(column + wide, p->w.width);
    const int64_t begin = unit / across * p->group, end = MIN(begin + p->group, p->m);
    const int64_t apart = p->copy ? p->apart : p->words;
    const uint32_t *x = p->copy ? p->copy : p->x;
    float *sums = (float *)(scratch + STRIPE * STEPS);
    for (int64_t at = column; at < stop; at += STRIPE)
        NAME(panels)(p, 0, n, at, MIN(STRIPE, stop - at), n, half, scratch + (at - column) * n);
    for (int64_t first = begin; first < end; first += FEW_ROWS)
        for (int64_t at = column; at < stop; at += PANEL) {
            const uint32_t *panel = scratch + (at - column) * n;
            int64_t count = MIN(FEW_ROWS, end - first), there = MIN(PANEL, stop - at);
            if (there == PANEL && p->dtype != F16 && !(NAME(TILES) && half)) {
                for (int64_t m = first, rows; m < first + count; m += rows) {
                    rows = MIN(SUMS / VECS, first + count - m);
#define TO(N, dtype) NAME(micro_to)(x + m * apart, apart, panel, n, N, half, dtype, p->y, m * p->w.width + at, p->w.width)
#define ROWS(N) case N: if (p->dtype == F32) TO(N, F32); else TO(N, BF16); break;
                    switch (rows) { ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) }
#undef ROWS
#undef TO
                }
                continue;
            }
            NAME(add_panel)(x + first * apart, apart, count, panel, PANEL, n, half, 1, sums);
            for (int64_t m = 0; m < count; m++)
                NAME(store)(sums + m * PANEL, there, p->dtype, p->y, (first + m) * p->w.width + at);
        }
}

UNIT(matmul_t) {
    const Gemm *p = work;
    if (p->stripes) TILED(BY_HALF(p->half, NAME(by_short_columns), p, unit, scratch));
    else TILED(BY_HALF(p->half, NAME(by_columns), p, unit, scratch));
}
