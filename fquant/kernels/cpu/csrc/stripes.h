/* Products by stripes of the columns of the result: x · w, and in float32 x · wᵀ of many rows. gemm.h has the words, and
   x · wᵀ otherwise. Rows of x are slivers. A stripe of the weight is decoded to panels: columns of w, or rows of it, which
   are transposed. In gemm.h x and the result are transposed, and the weight is not. Sums begin with the first STEPS words.
   Behind the last words they are rounded and stored from registers. */

/* Pack a row of x as words, in slabs. */
UNIT(pack_slivers) {
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
    const int64_t padded = padded_to(width, PANEL);
    if (codes && width == padded && p->dtype == F32) {
        for (int64_t j = 0; j < width; j += PANEL) memcpy(out + j * depth + k * PANEL, codes + 4 * j, PANEL * 4);
        return;
    }
#ifdef LANES_BF16
    if (codes && width % 64 == 0 && half && row + 1 < p->w.rows) {
        const __m512i first = _mm512_load_si512(BESIDE), last = _mm512_load_si512(BESIDE + 32);
        for (int64_t j = 0; j < width; j += 32) {
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
    memset(words + width, 0, (size_t)(padded - width) * 4);
    for (int64_t j = 0; j < padded; j += PANEL) memcpy(out + j * depth + k * PANEL, words + j, PANEL * 4);
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

/* Decode n floats from `start` of `width` rows of the weight from `row` to panels of STEPS words; `rows` is scratch. */
INLINE void NAME(turned_panels)(const Gemm *p, int64_t start, int64_t n, int64_t row, int64_t width, uint32_t *rows,
                                uint32_t *w) {
    for (int64_t j = 0; j < padded_to(width, PANEL); j += LANES) {
        for (int64_t i = 0; i < LANES; i++) {
            uint32_t *to = rows + i * ROW_APART;
            if (j + i < width) NAME(factors)(&p->w, row + j + i, start, n, p->dtype, 0, to);
            else memset(to, 0, (size_t)n * 4);
        }
        for (int64_t k = 0; k < n; k += LANES)
            NAME(turn)(rows + k, ROW_APART, MIN(LANES, n - k), w + (j / PANEL * STEPS + k) * PANEL + j % PANEL, PANEL);
    }
}

/* y [rows][PANEL] from `at` with stride `across` = before (0 if NULL) + a sliver times a panel, for n words that are
   `next` apart. rows and half are constants. */
INLINE void NAME(micro_to)(const uint32_t *x, int64_t apart, const uint32_t *panel, int64_t next, int64_t n, int rows,
                           int half, const float *before, int dtype, void *y, int64_t at, int64_t across) {
    Lanes part[SUMS][VECS];
    const Lanes *total = (const Lanes *)before;
    UNROLLED(r, rows) UNROLLED(v, VECS) part[r][v] = total ? total[r * VECS + v] : (Lanes){0};
    NAME(multiply)(x, apart, panel, next, n, rows, VECS, half, part);
    if (dtype == F32) UNROLLED(r, rows) UNROLLED(v, VECS)
        memcpy((float *)y + at + r * across + v * LANES, &part[r][v], sizeof part[r][v]);
    else if (dtype == BF16) UNROLLED(r, rows) UNROLLED(v, VECS / 2)
        NAME(store_bf16)(part[r][2 * v], part[r][2 * v + 1], (uint16_t *)y + at + r * across + 2 * v * LANES);
    else UNROLLED(r, rows) {
        float sums[PANEL]; /* the address of `part` would keep it out of registers */
        UNROLLED(v, VECS) memcpy(sums + v * LANES, &part[r][v], sizeof part[r][v]);
        NAME(halves)(sums, PANEL, dtype, y, at + r * across);
    }
}

/* The same for `count` rows. Not inlined: it would be long. */
#define PANEL_TO(name, half)                                                                                            \
    static __attribute__((noinline, unused)) void NAME(name)(                                                           \
        const uint32_t *x, int64_t apart, int64_t count, const uint32_t *panel, int64_t next, int64_t n,                \
        const float *before, int dtype, void *y, int64_t at, int64_t across) {                                          \
        for (int64_t m = 0, rows; m < count; m += rows) {                                                               \
            rows = MIN(SUMS / VECS, count - m);                                                                         \
            switch (rows) { ROWS(1, half) ROWS(2, half) ROWS(3, half) ROWS(4, half) ROWS(5, half) ROWS(6, half) }       \
        }                                                                                                               \
    }
#define ROWS(N, half)                                                                                                   \
    case N: NAME(micro_to)(x + m * apart, apart, panel, next, n, N, half, before ? before + m * PANEL : NULL, dtype, y, \
                           at + m * across, across); break;
PANEL_TO(floats_to, 0)
PANEL_TO(pairs_to, 1)
#undef ROWS
#undef PANEL_TO

/* Round and store sums [count][PANEL], of which `there` columns are in y, from `at`. */
INLINE void NAME(store_panel)(const float *sums, int64_t count, int64_t there, int dtype, void *y, int64_t at, int64_t across) {
    for (int64_t m = 0; m < count; m++) NAME(store)(sums + m * PANEL, there, dtype, y, at + m * across);
}

/* Multiply `group` rows of x with a stripe. Few rows read a weight in float32 where it is. Lines of x that is not packed
   are in other pages, so they are asked for two slivers ahead, while the first panel is multiplied. */
INLINE void NAME(by_columns)(const Gemm *p, int64_t unit, uint32_t *scratch, int half) {
    enum { HIGH = SUMS / VECS }; /* of a sliver */
    const int64_t stripes = (p->columns + p->stripe - 1) / p->stripe, column = unit % stripes * p->stripe;
    const int64_t begin = unit / stripes * p->group, count = MIN(p->group, p->m - begin);
    const int64_t width = MIN(p->stripe, p->columns - column), apart = p->copy ? p->apart : p->words;
    const int in_place = !p->of_rows && !p->w.bits && !half && p->dtype == F32 && width % PANEL == 0 && count <= 4 * HIGH;
    uint32_t *w = scratch, *rows = scratch + p->stripe * STEPS;
    float *sums = (float *)(rows + LANES * ROW_APART);
    for (int64_t start = 0; start < p->words; start += STEPS) {
        const int64_t n = MIN(STEPS, p->words - start), lines = (n * 4 + 63) / 64;
        const uint32_t *dense = (const uint32_t *)p->w.codes + start * p->w.width + column;
        const uint32_t *x = (const uint32_t *)p->x + begin * apart + start;
        if (p->copy) x = (const uint32_t *)p->copy + (start / SLAB * p->m + begin) * apart + start % SLAB;
        NAME(Ahead) ahead = {(const uint8_t *)x, p->words * 4, lines, p->copy ? 0 : count * lines, 0};
        if (p->of_rows && !half) NAME(turned_panels)(p, start, n, column, width, rows, w);
        else if (!in_place) NAME(panels)(p, start, n, column, width, STEPS, half, w);
        for (int64_t j = 0; j * PANEL < width; j++) {
            const uint32_t *panel = in_place ? dense + j * PANEL : w + j * STEPS * PANEL;
            const int64_t next = in_place ? p->w.width : PANEL, there = MIN(PANEL, width - j * PANEL);
            const int64_t at = begin * p->columns + column + j * PANEL;
            const int last = start + n == p->words, to_y = last && there == PANEL && !(NAME(TILES) && half);
            float *to = sums + j * p->group * PANEL;
            if (NAME(TILES) && half) NAME(add_half_tiles)(x, apart, count, panel, VECS, n, !start, to);
            else for (int64_t m = 0, high; m < count; m += high) {
                high = ahead.next < ahead.all ? MIN(HIGH, count - m) : count - m;
                NAME(fetch)(&ahead, (m ? 1 : 2) * HIGH * lines);
                float *part = to + m * PANEL;
                (half ? NAME(pairs_to) : NAME(floats_to))(
                    x + m * apart, apart, high, panel, next, n, start ? part : NULL, to_y ? p->dtype : F32,
                    to_y ? p->y : (void *)part, to_y ? at + m * p->columns : 0, to_y ? p->columns : PANEL);
            }
            if (last && !to_y) NAME(store_panel)(to, count, there, p->dtype, p->y, at, p->columns);
        }
    }
}

/* Multiply `group` rows of x with some stripes, if a sum is of up to STEPS words. The panels of these stripes
   are as many words as a stripe of STEPS. Sums are stored while they are in the first cache, or in registers. */
INLINE void NAME(by_short_columns)(const Gemm *p, int64_t unit, uint32_t *scratch, int half) {
    const int64_t wide = p->stripes * STRIPE, across = (p->columns + wide - 1) / wide, n = p->words;
    const int64_t column = unit % across * wide, stop = MIN(column + wide, p->columns);
    const int64_t begin = unit / across * p->group, end = MIN(begin + p->group, p->m);
    const int64_t apart = p->copy ? p->apart : p->words;
    const uint32_t *x = p->copy ? p->copy : p->x;
    float *sums = (float *)(scratch + STRIPE * STEPS);
    for (int64_t at = column; at < stop; at += STRIPE)
        NAME(panels)(p, 0, n, at, MIN(STRIPE, stop - at), n, half, scratch + (at - column) * n);
    for (int64_t first = begin; first < end; first += FEW_ROWS)
        for (int64_t at = column; at < stop; at += PANEL) {
            const uint32_t *panel = scratch + (at - column) * n, *from = x + first * apart;
            const int64_t count = MIN(FEW_ROWS, end - first), there = MIN(PANEL, stop - at), to = first * p->columns + at;
            const int to_y = there == PANEL && !(NAME(TILES) && half);
            if (NAME(TILES) && half) NAME(add_half_tiles)(from, apart, count, panel, VECS, n, 1, sums);
            else (half ? NAME(pairs_to) : NAME(floats_to))(
                from, apart, count, panel, PANEL, n, NULL, to_y ? p->dtype : F32, to_y ? p->y : (void *)sums, to_y ? to : 0,
                to_y ? p->columns : PANEL);
            if (!to_y) NAME(store_panel)(sums, count, there, p->dtype, p->y, to, p->columns);
        }
}

UNIT(in_stripes) {
    const Gemm *p = work;
    if (p->stripes) TILED(BY_HALF(p->half, NAME(by_short_columns), p, unit, scratch));
    else TILED(BY_HALF(p->half, NAME(by_columns), p, unit, scratch));
}
