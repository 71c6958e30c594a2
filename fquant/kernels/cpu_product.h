/* Products of few rows, for one instruction set. Some rows of the weight, or a stripe of its columns, are decoded into
   scratch that stays in the first cache, and all rows of x are multiplied with them. */

/* Four sums to y[0 .. 3], of which `rows` are wanted. */
INLINE void NAME(store)(const NAME(Lanes) *sums, int rows, void *y, int dtype) {
    float totals[4];
    NAME(sum4)(sums, totals);
    for (int r = 0; r < rows; r++) {
        if (dtype == F32) ((float *)y)[r] = totals[r];
        else ((uint16_t *)y)[r] = dtype == BF16 ? to_bf16(totals[r]) : to_f16(totals[r]);
    }
}

/* y[columns][rows] = x · wᵀ for n elements a row (a multiple of 64), rows of both `apart`: every sum stays in a register.
   The elements are floats, or bf16 if `half`; rows, columns and half are constants where this is inlined. */
INLINE void NAME(tile)(const void *w, const void *x, int64_t n, int64_t apart, int rows, int columns, int half, void *y,
                       int dtype, int64_t stride) {
    NAME(Lanes) sums[6][4] = {0};
    int step = half ? 2 * NAME(LANES) : NAME(LANES);
    int64_t size = half ? 2 : 4;
    for (int64_t k = 0; k < n; k += step) {
#pragma GCC unroll 6
        for (int c = 0; c < columns; c++) {
            NAME(Lanes) b = *(const NAME(Lanes) *)((const char *)x + (c * apart + k) * size);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                NAME(Lanes) a = *(const NAME(Lanes) *)((const char *)w + (r * apart + k) * size);
                if (half) sums[c][r] = DOT(a, b, sums[c][r]);
                else sums[c][r] = FMA(a, b, sums[c][r]);
            }
        }
    }
#pragma GCC unroll 6
    for (int c = 0; c < columns; c++) NAME(store)(sums[c], rows, (char *)y + c * stride * (dtype == F32 ? 4 : 2), dtype);
}

#define TILE(R, C) case C: NAME(tile)(w, from, n, apart, R, C, half, to, p->dtype, p->w.rows); break
#define TILES(R) switch (columns) { TILE(R, 1); TILE(R, 2); TILE(R, 3); TILE(R, 4); TILE(R, 5); TILE(R, 6); }

#ifdef LANES_BF16
/* 4-bit codes in blocks of 64 or more as bf16, dealt out: a vector of codes is 128 elements in two blocks, whose two
   tables of 16 values are one table of 32, and the four codes of its words look up four vectors. x is dealt out to match
   (load, form 2), so that no element is ever moved to its place. */
INLINE void NAME(deal)(const uint8_t *codes, __m512 table, float first, float second, __m512i *v) {
    __m512i half = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(0x1010), 1), four = _mm512_set1_epi16(0x0f0f);
    __m512 a = _mm512_mul_ps(table, _mm512_set1_ps(first)), b = _mm512_mul_ps(table, _mm512_set1_ps(second));
    __m512i t = (__m512i)_mm512_cvtne2ps_pbh(b, a), c = _mm512_loadu_si512(codes);
    __m512i low = _mm512_ternarylogic_epi32(c, four, half, 0xea); /* (c & four) | half */
    __m512i high = _mm512_ternarylogic_epi32(_mm512_srli_epi16(c, 4), four, half, 0xea);
    v[0] = _mm512_permutexvar_epi16(high, t);
    v[1] = _mm512_permutexvar_epi16(low, t);
    v[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(high, 8), t);
    v[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(low, 8), t);
    __builtin_prefetch(codes + AHEAD);
}

/* The scales of n elements of a row from `column`, both multiples of 64, one for each 64 elements. */
INLINE void NAME(scales64)(const Packed *w, int64_t row, int64_t column, int64_t n, float *scales) {
    int64_t shift = __builtin_ctzll((uint64_t)w->block), first = column >> shift, each = w->block / 64;
    NAME(scales)(w, row * blocks_of(w) + first, ((column + n - 1) >> shift) - first + 1, scales);
    if (each > 1) for (int64_t i = n / 64 - 1; i >= 0; i--) scales[i] = scales[(column / 64 + i) / each - first];
}

/* A row of the weight, dealt out. */
static void NAME(dealt)(const Packed *w, int64_t row, uint16_t *out) {
    __m512 table = _mm512_loadu_ps(w->table);
    for (int64_t column = 0; column < w->width; column += PIECE) {
        float scales[PIECE / 64 + 1];
        int64_t n = MIN(PIECE, w->width - column);
        NAME(scales64)(w, row, column, n, scales);
        const uint8_t *codes = w->codes + (row * w->width + column) / 2;
        for (int64_t i = 0; i < n; i += 128) {
            __m512i v[4];
            NAME(deal)(codes + i / 2, table, scales[i / 64], scales[i / 64 + 1], v);
            for (int j = 0; j < 4; j++) _mm512_store_si512(out + column + i + 32 * j, v[j]);
        }
    }
}

/* `rows` rows of the weight by `columns` rows of x, so few that all stays in registers; both are constants. */
INLINE void NAME(fused)(const Product *p, int64_t row, int rows, int columns) {
    const Packed *w = &p->w;
    __m512 table = _mm512_loadu_ps(w->table), sums[2][FUSED][4];
    int chains = columns == 1 ? 4 : 2;
    for (int r = 0; r < rows; r++)
        for (int m = 0; m < columns; m++)
            for (int j = 0; j < chains; j++) sums[r][m][j] = _mm512_setzero_ps();
    for (int64_t column = 0; column < w->width; column += PIECE) {
        float scales[2][PIECE / 64 + 1];
        int64_t n = MIN(PIECE, w->width - column), next = w->width / 2;
        for (int r = 0; r < rows; r++) NAME(scales64)(w, row + r, column, n, scales[r]);
        const uint8_t *codes = w->codes + row * next + column / 2;
        const uint16_t *x = (const uint16_t *)p->x + column;
        for (int64_t i = 0; i < n; i += 128) {
#pragma GCC unroll 2
            for (int r = 0; r < rows; r++) {
                __m512i v[4];
                NAME(deal)(codes + i / 2 + r * next, table, scales[r][i / 64], scales[r][i / 64 + 1], v);
#pragma GCC unroll 4
                for (int m = 0; m < columns; m++)
#pragma GCC unroll 4
                    for (int j = 0; j < 4; j++)
                        sums[r][m][j % chains] =
                            DOT(v[j], _mm512_load_si512(x + m * p->apart + i + 32 * j), sums[r][m][j % chains]);
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int m = 0; m < columns; m++) {
            for (int j = 1; j < chains; j++) sums[r][m][0] = _mm512_add_ps(sums[r][m][0], sums[r][m][j]);
            ((uint16_t *)p->y)[m * w->rows + row + r] = to_bf16(_mm512_reduce_add_ps(sums[r][m][0]));
        }
}

INLINE void NAME(fused_group)(const Product *p, int64_t unit, int columns) {
    int64_t row = unit * GROUP, stop = MIN(row + GROUP, p->w.rows);
    for (; row + 2 <= stop; row += 2) NAME(fused)(p, row, 2, columns);
    if (row < stop) NAME(fused)(p, row, 1, columns);
}
#endif

/* GROUP rows of the weight, four at a time, by all rows of x. */
INLINE void NAME(group)(const Product *p, int64_t unit, void *w, int half) {
    int64_t stop = MIN((unit + 1) * GROUP, p->w.rows), n = p->padded, apart = p->apart, size = half ? 2 : 4;
    for (int r = 0; r < 4; r++) memset((char *)w + (r * apart + p->w.width) * size, 0, (size_t)((n - p->w.width) * size));
    for (int64_t row = unit * GROUP, rows; row < stop; row += rows) {
        rows = stop - row >= 4 ? 4 : 1;
        for (int64_t r = 0; r < rows; r++) {
            void *to = (char *)w + r * apart * size;
#ifdef LANES_BF16
            if (p->form == 2) NAME(dealt)(&p->w, row + r, to);
            else
#endif
                NAME(span)(&p->w, row + r, 0, p->w.width, 0, half ? BF16 : F32, to);
        }
        for (int64_t m = 0; m < p->m; m += NAME(COLUMNS)) {
            int64_t columns = MIN(p->m - m, NAME(COLUMNS));
            const void *from = (const char *)p->x + m * apart * size;
            void *to = (char *)p->y + (m * p->w.rows + row) * (p->dtype == F32 ? 4 : 2);
            if (rows == 4) TILES(4) else TILES(1)
        }
    }
}
#undef TILES
#undef TILE

static void NAME(matmul)(void *data, int64_t unit, void *scratch) {
    const Product *p = data;
#ifdef LANES_BF16
    if (p->form == 2 && p->m <= FUSED)
        switch (p->m) {
            case 1: NAME(fused_group)(p, unit, 1); break;
            case 2: NAME(fused_group)(p, unit, 2); break;
            case 3: NAME(fused_group)(p, unit, 3); break;
            case 4: NAME(fused_group)(p, unit, 4); break;
        }
    else if (p->form) NAME(group)(p, unit, scratch, 1);
    else
#endif
        NAME(group)(p, unit, scratch, 0);
}

/* A stripe of columns: sums [m][STRIPE] stay in the cache while GROUP rows at a time of the weight are added. */
INLINE void NAME(stripe)(const Product *p, int64_t unit, float *sums) {
    int64_t column = unit * STRIPE, width = MIN(STRIPE, p->w.width - column);
    float *w = sums + p->m * STRIPE;
    memset(sums, 0, (size_t)((p->m + GROUP) * STRIPE * 4));
    for (int64_t row = 0; row < p->w.rows; row += GROUP) {
        int64_t rows = MIN(GROUP, p->w.rows - row); /* x is padded with zeros beyond */
        for (int64_t r = 0; r < rows; r++) NAME(span)(&p->w, row + r, column, width, 0, F32, w + r * STRIPE);
        for (int64_t m = 0; m < p->m; m++) {
            const float *x = (const float *)p->x + m * p->apart + row;
            for (int64_t k = 0; k < STRIPE; k += 4 * NAME(LANES)) {
                NAME(Lanes) *to = (NAME(Lanes) *)(sums + m * STRIPE + k), part[4] = {to[0], to[1], to[2], to[3]};
#pragma GCC unroll 16
                for (int r = 0; r < GROUP; r++) {
                    NAME(Lanes) by = x[r] - (NAME(Lanes)){0};
#pragma GCC unroll 4
                    for (int v = 0; v < 4; v++)
                        part[v] = FMA(((const NAME(Lanes) *)(w + r * STRIPE + k))[v], by, part[v]);
                }
                for (int v = 0; v < 4; v++) to[v] = part[v];
            }
        }
    }
    for (int64_t m = 0; m < p->m; m++)
        NAME(halves)(sums + m * STRIPE, width, p->dtype, p->y, m * p->w.width + column);
}

#ifdef LANES_BF16
/* sums [rows of x][STRIPE] += x · w for GROUP rows of w in pairs, which lie beside each other as x's do. */
INLINE void NAME(add_pairs)(const uint16_t *x, int64_t apart, const uint32_t *w, int rows, float *sums) {
    for (int64_t k = 0; k < STRIPE; k += 64) {
        __m512 part[2][4];
#pragma GCC unroll 2
        for (int m = 0; m < rows; m++)
            for (int v = 0; v < 4; v++) part[m][v] = _mm512_load_ps(sums + m * STRIPE + k + 16 * v);
#pragma GCC unroll 8
        for (int r = 0; r < GROUP / 2; r++)
#pragma GCC unroll 4
            for (int v = 0; v < 4; v++)
#pragma GCC unroll 2
                for (int m = 0; m < rows; m++) {
                    int32_t pair;
                    memcpy(&pair, x + m * apart + 2 * r, 4);
                    part[m][v] = DOT(_mm512_load_si512(w + r * STRIPE + k + 16 * v), _mm512_set1_epi32(pair), part[m][v]);
                }
#pragma GCC unroll 2
        for (int m = 0; m < rows; m++)
            for (int v = 0; v < 4; v++) _mm512_store_ps(sums + m * STRIPE + k + 16 * v, part[m][v]);
    }
}

/* The same in bf16, for weights that can be dealt out: two rows of the weight at a time, interleaved. */
INLINE void NAME(stripe_pairs)(const Product *p, int64_t unit, float *sums) {
    const Packed *w = &p->w;
    int64_t column = unit * STRIPE, width = MIN(STRIPE, w->width - column);
    uint32_t *pairs = (uint32_t *)(sums + p->m * STRIPE);
    __m512 table = _mm512_loadu_ps(w->table);
    memset(sums, 0, (size_t)((p->m + GROUP) * STRIPE * 4));
    for (int64_t row = 0; row < w->rows; row += GROUP) {
        for (int64_t r = 0; r < GROUP; r += 2) {
            float scales[2][STRIPE / 64 + 1];
            int there = (row + r < w->rows) + (row + r + 1 < w->rows);
            if (!there) {
                memset(pairs + r / 2 * STRIPE, 0, STRIPE * 4);
                continue;
            }
            for (int i = 0; i < there; i++) NAME(scales64)(w, row + r + i, column, width, scales[i]);
            for (int64_t k = 0; k < width; k += 128) {
                const uint8_t *codes = w->codes + ((row + r) * w->width + column + k) / 2;
                int64_t i = k / 64;
                __m512i *to = (__m512i *)(pairs + r / 2 * STRIPE + k), upper[4], lower[4];
                NAME(deal)(codes, table, scales[0][i], scales[0][i + 1], upper);
                if (there == 2) NAME(deal)(codes + w->width / 2, table, scales[1][i], scales[1][i + 1], lower);
                else for (int j = 0; j < 4; j++) lower[j] = _mm512_setzero_si512();
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++) {
                    to[2 * j] = _mm512_unpacklo_epi16(upper[j], lower[j]);
                    to[2 * j + 1] = _mm512_unpackhi_epi16(upper[j], lower[j]);
                }
            }
        }
        const uint16_t *x = (const uint16_t *)p->x + row;
        for (int64_t m = 0; m + 2 <= p->m; m += 2)
            NAME(add_pairs)(x + m * p->apart, p->apart, pairs, 2, sums + m * STRIPE);
        if (p->m % 2) NAME(add_pairs)(x + (p->m - 1) * p->apart, p->apart, pairs, 1, sums + (p->m - 1) * STRIPE);
    }
    for (int64_t m = 0; m < p->m; m++)
        for (int64_t k = 0; k < width; k++) { /* back from where deal and the interleaving have put it */
            int64_t i = k % 128, at = k - i + i % 4 * 32 + i % 32 / 16 * 16 + i / 32 * 4 + i % 16 / 4;
            ((uint16_t *)p->y)[m * w->width + column + k] = to_bf16(sums[m * STRIPE + at]);
        }
}
#endif

static void NAME(matmul_t)(void *data, int64_t unit, void *scratch) {
    const Product *p = data;
#ifdef LANES_BF16
    if (p->form) NAME(stripe_pairs)(p, unit, scratch);
    else
#endif
        NAME(stripe)(p, unit, scratch);
}

/* n elements of x as the products want them: in float32 (form 0), as they are (1), or every 128 dealt out (2): each
   fourth from the first, each fourth from the second, and so on. */
static void NAME(load)(const void *x, int dtype, int64_t n, int form, void *out) {
    const uint16_t *from = x;
    uint16_t *to = out;
    if (form == 0) NAME(floats)(x, dtype, 0, n, out);
    else if (form == 1) memcpy(out, x, (size_t)n * 2);
    else for (int64_t i = 0; i < n; i += 128)
        for (int k = 0; k < 4; k++)
            for (int j = 0; j < 32; j++) to[i + 32 * k + j] = from[i + 4 * j + k];
}
#undef FMA
#undef DOT
