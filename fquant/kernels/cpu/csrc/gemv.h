/* x · wᵀ for few rows of x, bound by the time of one read of the packed bytes. Some rows of the weight are decoded
   into scratch in the first cache, or into registers, and multiplied with all of x. gemm.h has more rows of x, and g ·
   w. */

/* y[columns][rows] = x · wᵀ for n elements a row (a multiple of 64), with row stride `apart`; all sums are in
   registers. Elements are floats, or bf16 if `half`. rows, columns and half are constants where this is inlined. */
INLINE void NAME(tile)(const void *w, const void *x, int64_t n, int64_t apart, int rows, int columns, int half, void *y,
                       int dtype, int64_t stride) {
    Lanes sums[6][4] = {0};
    const int step = half ? 2 * LANES : LANES, size = half ? 2 : 4;
    for (int64_t k = 0; k < n; k += step) {
        UNROLLED(c, columns) {
            Lanes b = *(const Lanes *)((const char *)x + (c * apart + k) * size);
            UNROLLED(r, rows) {
                Lanes a = *(const Lanes *)((const char *)w + (r * apart + k) * size);
                sums[c][r] = half ? DOT(a, b, sums[c][r]) : FMA(a, b, sums[c][r]);
            }
        }
    }
    UNROLLED(c, columns) {
        float totals[4];
        NAME(sum4)(sums[c], totals);
        NAME(halves)(totals, rows, dtype, y, c * stride);
    }
}

#define TILE(R, C) case C: NAME(tile)(w, p->x, n, apart, R, C, half, to, p->dtype, p->w.rows); break
#define TILES(R) switch (p->m) { TILE(R, 1); TILE(R, 2); TILE(R, 3); TILE(R, 4); TILE(R, 5); TILE(R, 6); }

#ifdef LANES_BF16
/* Decode 128 4-bit codes of two blocks, whose values are the 32 of `t`, to bf16. The four codes of a word
   look up in four vectors. x is interleaved likewise (load, form 2), so no element is moved to its place. */
INLINE void NAME(deal)(const uint8_t *codes, __m512i t, __m512i *v) {
    __m512i half = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(0x1010), 1), four = _mm512_set1_epi16(0x0f0f);
    __m512i c = _mm512_loadu_si512(codes);
    __m512i low = _mm512_ternarylogic_epi32(c, four, half, 0xea); /* (c & four) | half */
    __m512i high = _mm512_ternarylogic_epi32(_mm512_srli_epi16(c, 4), four, half, 0xea);
    v[0] = _mm512_permutexvar_epi16(high, t);
    v[1] = _mm512_permutexvar_epi16(low, t);
    v[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(high, 8), t);
    v[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(low, 8), t);
    __builtin_prefetch(codes + 2 * AHEAD, 0, 2); /* to the second cache: reads to the first are limited in number */
    __builtin_prefetch(codes + 512);             /* from there to the first */
}

/* One number for each 64 of n elements from `column`, of `count` numbers `from` its block on, one for each block of
   2^shift elements. `to` may be `from`: the last come first. */
INLINE void NAME(each64)(const float *from, int64_t count, int64_t column, int64_t n, int64_t shift, float *to) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const int64_t first = column >> shift;
    for (int64_t i = (n / 64 - 1) & ~15; i >= 0; i -= 16) {
        int64_t at = (column / 64 + i) >> (shift - 6), left = MIN(16, count - (at - first));
        __m512i places = _mm512_add_epi32(lane, _mm512_set1_epi32((int)(column / 64 + i - (at << (shift - 6)))));
        __m512 v = _mm512_maskz_loadu_ps((__mmask16)((1 << left) - 1), from + at - first);
        __mmask16 there = (__mmask16)((1 << MIN(16, n / 64 - i)) - 1);
        _mm512_mask_storeu_ps(to + i, there, _mm512_permutexvar_ps(_mm512_srl_epi32(places, _mm_cvtsi64_si128(shift - 6)), v));
    }
}

/* The scales of n elements of a row from `column`, both multiples of 64: one for each 64 elements; room for 63 more. */
INLINE void NAME(scales64)(const Packed *w, int64_t row, int64_t column, int64_t n, float *scales) {
    int64_t shift = __builtin_ctzll((uint64_t)w->block), first = column >> shift, count = ((column + n - 1) >> shift) - first + 1;
    NAME(scales)(w, row * blocks_of(w) + first, count, scales);
    if (shift > 6) NAME(each64)(scales, count, column, n, shift, scales);
}

/* The zero points of n elements likewise. */
INLINE void NAME(zeros64)(const Packed *w, int64_t row, int64_t column, int64_t n, float *zeros) {
    int64_t shift = __builtin_ctzll((uint64_t)w->block), first = column >> shift, count = ((column + n - 1) >> shift) - first + 1;
    NAME(each64)(w->zero + row * blocks_of(w) + first, count, column, n, shift, zeros);
}

/* Multiply `rows` rows of the weight with `columns` rows of x from `at`; all sums are in registers. `rows`, `columns`,
   `zeroed`, true if there are zero points, and `wide`, true if two blocks of 64 share a scale, are constants. */
INLINE void NAME(fused)(const Gemv *p, int64_t row, int64_t at, int rows, int columns, int zeroed, int wide) {
    const Packed *w = &p->w;
    __m512 table = _mm512_loadu_ps(w->table), sums[4][FUSED][2];
    for (int r = 0; r < rows; r++)
        for (int m = 0; m < columns; m++) sums[r][m][0] = sums[r][m][1] = _mm512_setzero_ps();
    for (int64_t column = 0; column < w->width; column += PIECE) {
        float scales[4 * PIECE / 64 + 64], zeros[4 * PIECE / 64];
        int64_t n = MIN(PIECE, w->width - column), next = w->width / 2, shift = wide ? __builtin_ctzll((uint64_t)w->block) : 6;
        int64_t first = column >> shift, apart = ((column + n - 1) >> shift) - first + 1; /* scales of a row */
        if (w->width == n && w->block == 1ll << shift && n % w->block == 0) /* those of all rows at once */
            NAME(scales)(w, row * apart, rows * apart, scales);
        else if (wide) for (int r = 0; r < rows; r++) NAME(scales)(w, (row + r) * blocks_of(w) + first, apart, scales + r * apart);
        else for (int r = 0; r < rows; r++) NAME(scales64)(w, row + r, column, n, scales + r * apart);
        for (int r = 0; zeroed && r < rows; r++)
            if (wide) memcpy(zeros + r * apart, w->zero + (row + r) * blocks_of(w) + first, (size_t)apart * 4);
            else NAME(zeros64)(w, row + r, column, n, zeros + r * apart);
        const uint8_t *codes = w->codes + row * next + column / 2;
        const uint16_t *x = (const uint16_t *)p->x + at * p->apart + column;
        for (int64_t i = 0; i < n; i += 128) {
            __m512i v[4][4];
            UNROLLED(r, rows) {
                int64_t block = r * apart + ((column + i) >> shift) - first;
                __m512i both = NAME(values2)(table, scales + block, zeros + block, !wide, zeroed);
                NAME(deal)(codes + i / 2 + r * next, both, v[r]);
            }
            UNROLLED(m, columns)
                UNROLLED(j, 4) {
                    __m512i b = _mm512_load_si512(x + m * p->apart + i + 32 * j);
                    UNROLLED(r, rows) sums[r][m][j % 2] = DOT(v[r][j], b, sums[r][m][j % 2]);
                }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int m = 0; m < columns; m++) {
            __m512 sum = _mm512_add_ps(sums[r][m][0], sums[r][m][1]);
            ((uint16_t *)p->y)[(at + m) * w->rows + row + r] = to_bf16(_mm512_reduce_add_ps(sum));
        }
}

INLINE void NAME(fused_group)(const Gemv *p, int64_t unit, int64_t at, int columns, int zeroed) {
    int64_t row = unit * GROUP, stop = MIN(row + GROUP, p->w.rows);
    if (columns == 1 && p->w.block > 64)
        for (; row + 4 <= stop; row += 4) NAME(fused)(p, row, at, 4, 1, zeroed, 1);
    else if (columns == 1)
        for (; row + 4 <= stop; row += 4) NAME(fused)(p, row, at, 4, 1, zeroed, 0);
    for (; row + 2 <= stop; row += 2) NAME(fused)(p, row, at, 2, columns, zeroed, 0);
    if (row < stop) NAME(fused)(p, row, at, 1, columns, zeroed, 0);
}
#endif

/* Multiply GROUP rows of the weight, four at a time, with all rows of x. */
INLINE void NAME(group)(const Gemv *p, int64_t unit, void *w, int half) {
    int64_t stop = MIN((unit + 1) * GROUP, p->w.rows), n = p->padded, apart = p->apart, size = half ? 2 : 4;
    for (int r = 0; r < 4; r++) memset((char *)w + (r * apart + p->w.width) * size, 0, (size_t)((n - p->w.width) * size));
    for (int64_t row = unit * GROUP, rows; row < stop; row += rows) {
        rows = stop - row >= 4 ? 4 : 1;
        for (int64_t r = 0; r < rows; r++)
            NAME(factors)(&p->w, row + r, 0, p->w.width, p->dtype, half, (char *)w + r * apart * size);
        void *to = (char *)p->y + row * size_of(p->dtype);
        if (rows == 4) TILES(4) else TILES(1)
    }
}
#undef TILES
#undef TILE

UNIT(gemv) {
    const Gemv *p = work;
#ifdef LANES_BF16
    if (p->form == 2)
        for (int64_t at = 0; at < p->m; at += FUSED)
#define CASE(N)                                                  \
    case N:                                                      \
        if (p->w.zero) NAME(fused_group)(p, unit, at, N, 1);     \
        else NAME(fused_group)(p, unit, at, N, 0);               \
        break;
            switch (MIN(p->m - at, FUSED)) { CASE(1) CASE(2) CASE(3) CASE(4) }
#undef CASE
    else if (p->form) NAME(group)(p, unit, scratch, 1);
    else
#endif
        NAME(group)(p, unit, scratch, 0);
}

/* Copy n elements of x: in float32 (form 0), as they are (1), or each 128 as four times each fourth element (2). */
static __attribute__((unused)) void NAME(load)(const void *x, int dtype, int64_t n, int form, void *out) {
    const uint16_t *from = x;
    uint16_t *to = out;
    if (form == 0) NAME(floats)(x, dtype, 0, n, out);
    else if (form == 1) memcpy(out, x, (size_t)n * 2);
    else for (int64_t i = 0; i < n; i += 128)
        for (int k = 0; k < 4; k++)
            for (int j = 0; j < 32; j++) to[i + 32 * k + j] = from[i + 4 * j + k];
}
