/* x · wᵀ of integers: rows of x are quantised, the codes of both are multiplied and summed as integers, and the sum of
   each block is scaled. The inner dimension is in words of two 16-bit integers, or of four bytes where the machine has
   an instruction for them and both sides fit (`byte_product`); so gemm.h packs x. Codes minus their zero point are at
   most 255, and int32 holds 2^15 products of them with 8-bit codes.

   Bytes of x are signed, and those of the weight unsigned: integers minus p->low, which is multiplied with the sum of x
   when a block ends. Elements of weights of fewer than 8 bits are in the order of their codes: of each 64 the even ones,
   then the odd ones. */

typedef int32_t NAME(Sums) __attribute__((vector_size(LANES * 4), may_alias));

enum { /* 1 if bytes of codes of 4 bits are multiplied, 2 if all bytes are */
#if defined(LANES_BF16)
    NAME(BYTES) = 2
#elif defined(LANES_AVX2) || defined(LANES_AVX512)
    NAME(BYTES) = 1
#else
    NAME(BYTES) = 0
#endif
};

/* c + the products of pairs of 16-bit integers */
INLINE NAME(Sums) NAME(dot16)(Bits a, Bits b, NAME(Sums) c) {
#if defined(LANES_BF16)
    return (NAME(Sums))_mm512_dpwssd_epi32((__m512i)c, (__m512i)a, (__m512i)b);
#elif defined(LANES_AVX512)
    return c + (NAME(Sums))_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(LANES_AVX2)
    return c + (NAME(Sums))_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    NAME(Sums) low_a = ((NAME(Sums))a << 16) >> 16, low_b = ((NAME(Sums))b << 16) >> 16;
    return c + low_a * low_b + ((NAME(Sums))a >> 16) * ((NAME(Sums))b >> 16);
#endif
}

/* The products of four unsigned bytes u and signed bytes s: all added to c (VNNI), or as sums of two that fit int16. */
#define DOT8(u, s, c) (c)
#if defined(LANES_BF16)
#undef DOT8
#define DOT8(u, s, c) ((NAME(Sums))_mm512_dpbusd_epi32((__m512i)(c), (__m512i)(u), (__m512i)(s)))
#elif defined(LANES_AVX512) || defined(LANES_AVX2)
typedef int16_t NAME(Pairs) __attribute__((vector_size(LANES * 4), may_alias));
#ifdef LANES_AVX512
#define PAIRS8(u, s) ((NAME(Pairs))_mm512_maddubs_epi16((__m512i)(u), (__m512i)(s)))
#else
#define PAIRS8(u, s) ((NAME(Pairs))_mm256_maddubs_epi16((__m256i)(u), (__m256i)(s)))
#endif
#endif

/* The integers of n elements of a row of the weight from `column`, both multiples of 8 unless the row ends. */
INLINE void NAME(integers16)(const Integers *p, int64_t row, int64_t column, int64_t n, int16_t *restrict out) {
    const Packed *w = &p->w;
    const uint8_t *codes = w->codes + row * bytes_of(w) + column * w->bits / 8;
    const int16_t *levels = p->levels.levels;
    uint8_t wide[2 * SLAB / 2 + 4];
    if (w->bits == 16) {
        memcpy(out, codes, (size_t)n * 2);
        return;
    }
    if (w->bits == 8 && !w->table) {
        for (int64_t i = 0; i < n; i++) out[i] = (int8_t)codes[i];
        return;
    }
    if (w->bits == 8 && p->levels.plain) {
        for (int64_t i = 0; i < n; i++) out[i] = (int16_t)(codes[i] + levels[0]);
        return;
    }
    if (w->bits == 8) {
        for (int64_t i = 0; i < n; i++) out[i] = levels[codes[i]];
        return;
    }
    if (w->bits < 4) NAME(widen)(codes, w->bits, n, wide), codes = wide;
    int64_t i = 0;
    Table16 t = NAME(table16)((const uint16_t *)levels);
    for (; i + 32 <= n; i += 32) NAME(lookup16)(codes + i / 2, t, (uint16_t *)out + i);
    for (; i < n; i++) out[i] = levels[i % 2 ? codes[i / 2] & 15 : codes[i / 2] >> 4];
}

/* The integers minus p->low of n elements of a row from `column` likewise, as bytes. */
INLINE void NAME(integers8)(const Integers *p, int64_t row, int64_t column, int64_t n, uint8_t *restrict out) {
    const Packed *w = &p->w;
    const uint8_t *codes = w->codes + row * bytes_of(w) + column * w->bits / 8;
    uint8_t table[16], wide[4 * SLAB / 2 + 4];
    if (w->bits == 8) {
        for (int64_t i = 0; i < n; i += 64) __builtin_prefetch(codes + 4 * w->width + i); /* rows are short */
        for (int64_t i = 0; i < n; i++) out[i] = codes[i] ^ (w->table ? 0 : 0x80);
        return;
    }
    for (int i = 0; i < 16; i++) table[i] = (uint8_t)(p->levels.plain ? i : p->levels.levels[i] + 128);
    if (w->bits < 4) NAME(widen)(codes, w->bits, n, wide), codes = wide;
    for (int64_t i = 0; i < n; i += 64, codes += 32)
        if (p->levels.plain) for (int k = 0; k < 32; k++) out[i + k] = codes[k] >> 4, out[i + 32 + k] = codes[k] & 15;
        else for (int k = 0; k < 32; k++) out[i + k] = table[codes[k] >> 4], out[i + 32 + k] = table[codes[k] & 15];
}

#ifdef PAIRS8
/* sums [rows][vecs] += a sliver of bytes times a panel of x, for n words, a multiple of MOST_PAIRS because blocks of codes
   are of 64 elements. rows and vecs are constants. */
INLINE void NAME(add_pairs)(const uint32_t *sliver, const uint32_t *panel, int64_t n, int rows, int vecs, NAME(Sums) *sums) {
    for (int64_t k = 0; k < n; k += MOST_PAIRS) {
        NAME(Pairs) pairs[SUMS][VECS];
        UNROLLED(r, rows) UNROLLED(v, vecs) pairs[r][v] = (NAME(Pairs)){0};
        for (int64_t i = k; i < k + MOST_PAIRS; i++) {
            Bits x[VECS];
            UNROLLED(v, vecs) x[v] = ((const Bits *)panel)[i * vecs + v];
            UNROLLED(r, rows) {
                Bits by = sliver[r * APART + i] - (Bits){0};
                UNROLLED(v, vecs) pairs[r][v] += PAIRS8(by, x[v]);
            }
        }
        UNROLLED(r, rows)
            UNROLLED(v, vecs) sums[r * vecs + v] = NAME(dot16)((Bits)pairs[r][v], (Bits){0} + 0x00010001, sums[r * vecs + v]);
        __asm__ volatile("" ::: "memory"); /* `sums` stay there: the registers are for `pairs` */
    }
}

/* Functions of their own, in which `pairs` have all registers. */
#define ADD_PAIRS(N)                                                                                                  \
    static __attribute__((noinline)) void NAME(add_pairs##N)(const uint32_t *sliver, const uint32_t *panel, int64_t n, \
                                                             NAME(Sums) *sums) {                                      \
        NAME(add_pairs)(sliver, panel, n, SUMS / MIN(N, VECS), MIN(N, VECS), sums);                                   \
    }
ADD_PAIRS(1) ADD_PAIRS(2) ADD_PAIRS(3) ADD_PAIRS(4)
#undef ADD_PAIRS
#endif

/* A sliver of rows times a panel of x, n words. Integer sums are read from `open` unless they begin here, and written
   there unless the block ends here; then they are scaled and added to `totals`, of which the first block reads nothing.
   The ints are constants but `low` and `first`. */
INLINE void NAME(micro_integers)(const uint32_t *sliver, int64_t apart, const uint32_t *panel, int64_t n, int rows,
                                 int vecs, int bytes, int begins, int ends, int32_t *open, float *totals,
                                 const float *scale, const float *zero, int64_t next, const int32_t *sums, int32_t low,
                                 int first) {
    NAME(Sums) part[SUMS][VECS], *kept = (NAME(Sums) *)open;
#ifdef PAIRS8
    if (bytes) {
        if (begins) UNROLLED(r, rows) UNROLLED(v, vecs) kept[r * vecs + v] = (NAME(Sums)){0};
        __asm__ volatile("" ::: "memory"); /* not by memset, which is slow to start */
        if (vecs == 1) NAME(add_pairs1)(sliver, panel, n, kept);
        else if (vecs == 2) NAME(add_pairs2)(sliver, panel, n, kept);
        else if (vecs == 3) NAME(add_pairs3)(sliver, panel, n, kept);
        else NAME(add_pairs4)(sliver, panel, n, kept);
        if (!ends) return;
        begins = 0, n = 0;
    }
#endif
    UNROLLED(r, rows) UNROLLED(v, vecs) part[r][v] = begins ? (NAME(Sums)){0} : kept[r * vecs + v];
    for (int64_t k = 0; k < n; k++) {
        Bits x[VECS];
        UNROLLED(v, vecs) x[v] = ((const Bits *)panel)[k * vecs + v];
        UNROLLED(r, rows) {
            Bits by = sliver[r * apart + k] - (Bits){0};
            UNROLLED(v, vecs) part[r][v] = bytes ? DOT8(by, x[v], part[r][v]) : NAME(dot16)(x[v], by, part[r][v]);
        }
    }
    if (!ends) {
        UNROLLED(r, rows) UNROLLED(v, vecs) kept[r * vecs + v] = part[r][v];
        return;
    }
    UNROLLED(r, rows)
        UNROLLED(v, vecs) {
            NAME(Sums) of_x = {0};
            if (sums) of_x = ((const NAME(Sums) *)sums)[v];
            Lanes t = __builtin_convertvector(part[r][v] + of_x * low, Lanes), *to = (Lanes *)totals + r * vecs + v;
            if (zero) t = t - zero[r * next] * __builtin_convertvector(of_x, Lanes);
            *to = (first ? (Lanes){0} : *to) + t * scale[r * next];
        }
}

/* Store n floats times `by` from y + at. */
INLINE void NAME(store_scaled)(const float *restrict x, int64_t n, float by, void *restrict y, int64_t at, const int dtype) {
    uint16_t *h = (uint16_t *)y + at;
    if (dtype == F32) for (int64_t i = 0; i < n; i++) ((float *)y)[at + i] = x[i] * by;
    else if (dtype == BF16) for (int64_t i = 0; i < n; i++) h[i] = to_bf16(x[i] * by);
    else for (int64_t i = 0; i < n; i++) h[i] = to_f16(x[i] * by);
}

/* Multiply `group` rows of the weight with all of x. `bytes` is a constant. */
INLINE void NAME(by_integers)(const Integers *p, int64_t unit, uint32_t *scratch, int bytes) {
    const Packed *w = &p->w;
    const int64_t of_word = bytes ? 4 : 2;
    int64_t group = p->group, row = unit * group, rows = MIN(group, w->rows - row), blocks = blocks_of(w);
    int64_t panels = (p->m + PANEL - 1) / PANEL, high = padded_to(group, LANES), tall = p->tall;
    uint32_t *sliver = scratch;
    int32_t *open = (int32_t *)(sliver + group * APART);
    float *totals = (float *)(open + high * tall), turned[LANES][NAME(MOST_ROWS)];
    float *scales = totals + high * tall, *zeros = w->zero ? scales + group * (blocks + 64) : NULL;
    memset(sliver + rows * APART, 0, (size_t)((group - rows) * APART * 4));
    memset(scales + rows * (blocks + 64), 0, (size_t)((group - rows) * (blocks + 64) * 4));
    for (int64_t r = 0; r < rows; r++) {
        float *to = scales + r * (blocks + 64);
        NAME(scales)(w, (row + r) * blocks, blocks, to);
        if (p->levels.unit != 1) for (int64_t b = 0; b < blocks; b++) to[b] *= (float)(1.0 / 127.0);
        if (zeros) memcpy(zeros + r * (blocks + 64), w->zero + (row + r) * blocks, (size_t)blocks * 4);
    }
    if (zeros) memset(zeros + rows * (blocks + 64), 0, (size_t)((group - rows) * (blocks + 64) * 4));
    int64_t each = MIN((w->block + of_word - 1) / of_word, p->words); /* words of a block */
    for (int64_t slab = 0; slab < p->words; slab += SLAB) {
        int64_t words = MIN(SLAB, p->words - slab), n = MIN(of_word * words, w->width - of_word * slab);
        for (int64_t r = 0; r < rows; r++) {
            sliver[r * APART + words - 1] = 0;
            if (bytes) NAME(integers8)(p, row + r, of_word * slab, n, (uint8_t *)(sliver + r * APART));
            else NAME(integers16)(p, row + r, of_word * slab, n, (int16_t *)(sliver + r * APART));
        }
        for (int64_t k = 0; k < words;) {
            int64_t block = (slab + k) / each, end = MIN((block + 1) * each, p->words) - slab;
            int64_t steps = MIN(MIN(NAME(TILES) && bytes ? SLAB : STEPS, words - k), end - k);
            int begins = (slab + k) % each == 0, ends = k + steps == end;
            for (int64_t j = 0; j < panels; j++) {
                int vecs = NAME(vecs)(p->m, j), width = vecs * LANES, most = SUMS / vecs;
                const uint32_t *x = (const uint32_t *)p->copy + j * PANEL * p->words + (slab + k) * width;
                const int32_t *sums = p->sums ? p->sums + block * p->sums_apart[1] + j * PANEL : NULL;
                const int by_tiles = NAME(TILES) && bytes;
                for (int64_t top = 0; top < rows; top += TILED_ROWS) {
                    int64_t panel = j * PANEL * high, until = MIN(rows, top + TILED_ROWS);
                    int32_t *kept = open + (begins && ends ? 0 : panel + top * width); /* 0: in the first cache */
                    if (by_tiles) {
                        NAME(add_byte_tiles)(sliver + top * APART + k, APART, until - top, x, vecs, steps, begins, kept);
                        if (!ends) continue;
                    }
                    for (int64_t r = top; r < until; r += most, kept += most * width) {
                        const uint32_t *from = sliver + r * APART + k;
                        const float *scale = scales + r * (blocks + 64) + block;
                        const float *zero = zeros ? zeros + r * (blocks + 64) + block : NULL;
                        float *to = totals + panel + r * width;
#define KIND(N, B, E)                                                                                             \
    NAME(micro_integers)(from, APART, x, by_tiles ? 0 : steps, SUMS / N, MIN(N, VECS), bytes, B, E, kept, to, scale, \
                         zero, blocks + 64, sums, p->low, !block)
#define CASE(N)                                                         \
    case N:                                                             \
        if (N <= VECS) {                                                \
            if (begins && ends && !by_tiles) KIND(N, 1, 1);             \
            else if (begins && !by_tiles) KIND(N, 1, 0);                \
            else if (ends) KIND(N, 0, 1);                               \
            else KIND(N, 0, 0);                                         \
        }                                                               \
        break;
                        switch (vecs) { CASE(1) CASE(2) CASE(3) CASE(4) }
#undef CASE
#undef KIND
                    }
                }
            }
            k += steps;
        }
    }
    for (int64_t m = 0; m < p->m; m += LANES) {
        int64_t j = m / PANEL, width = NAME(vecs)(p->m, j) * LANES;
        float *from = totals + j * PANEL * high + m % PANEL;
        for (int64_t r = 0; r < rows; r += LANES)
            NAME(turn)((uint32_t *)from + r * width, width, LANES, (uint32_t *)turned[0] + r, NAME(MOST_ROWS));
        for (int64_t i = 0; i < MIN(LANES, p->m - m); i++) {
            BY_DTYPE(p->dtype, NAME(store_scaled), turned[i], rows, p->scale[m + i], p->y, (m + i) * w->rows + row);
        }
    }
}

UNIT(integer_rows) {
    if (NAME(BYTES) && ((const Integers *)work)->bytes) TILED(NAME(by_integers)(work, unit, scratch, 1););
    else NAME(by_integers)(work, unit, scratch, 0);
}
#undef DOT8
#undef PAIRS8
