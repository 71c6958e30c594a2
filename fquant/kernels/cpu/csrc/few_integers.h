/* x · wᵀ of integers for few rows of x, bound by the read of the weight: bytes are multiplied as they are, 32 at a time,
   a row of the weight after the other, because one sequence of addresses is what the machine reads ahead best; machines
   without AVX-512 do so without prefetches of ours. x, already quantised (quantized_rows.h), lies in the order of the codes. */

#if defined(LANES_AVX2) || defined(LANES_AVX512)
/* c + the products of unsigned and signed bytes, whose sums in pairs fit int16. */
INLINE __m256i NAME(dot8)(__m256i u, __m256i s, __m256i c) {
#ifdef LANES_BF16
    return _mm256_dpbusd_epi32(c, u, s);
#else
    return _mm256_add_epi32(c, _mm256_madd_epi16(_mm256_maddubs_epi16(u, s), _mm256_set1_epi16(1)));
#endif
}

/* The same of signed bytes; those of x begin at -127, because -128 has no negative. */
INLINE __m256i NAME(dot8_signed)(__m256i w, __m256i x, __m256i c) {
    return NAME(dot8)(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w), c);
}

INLINE __m256i NAME(load32)(const void *from) { return _mm256_loadu_si256(from); }

/* c + the products of `vectors` of codes, 1 or 2. kind, a constant: 0 for 4-bit codes as they are, 1 for their levels,
   2 for 8 bits, of which the highest is flipped by `flip`. */
INLINE __m256i NAME(dot_codes)(const uint8_t *codes, const int8_t *x, __m256i levels, __m256i flip, int kind, int vectors,
                               __m256i c) {
    __m256i four = _mm256_set1_epi8(15);
    __attribute__((unused)) __m256i pairs = _mm256_setzero_si256(); /* of kind 0, whose sums fit int16 */
#ifdef LANES_BF16
    __builtin_prefetch(codes + 2 * AHEAD, 0, 2); /* to the second cache, and from there to the first, as in gemv.h */
    __builtin_prefetch(codes + 512);
#endif
    UNROLLED(i, vectors) {
        __m256i v = NAME(load32)(codes + 32 * i), high, low;
        if (kind == 2) {
            c = NAME(dot8_signed)(_mm256_xor_si256(v, flip), NAME(load32)(x + 32 * i), c);
            continue;
        }
        __m256i first = NAME(load32)(x + 64 * i), second = NAME(load32)(x + 64 * i + 32);
        high = _mm256_and_si256(_mm256_srli_epi16(v, 4), four), low = _mm256_and_si256(v, four);
        if (kind == 1) {
            c = NAME(dot8_signed)(_mm256_shuffle_epi8(levels, high), first, c);
            c = NAME(dot8_signed)(_mm256_shuffle_epi8(levels, low), second, c);
            continue;
        }
#ifdef LANES_BF16
        c = _mm256_dpbusd_epi32(_mm256_dpbusd_epi32(c, high, first), low, second);
#else
        v = _mm256_add_epi16(_mm256_maddubs_epi16(high, first), _mm256_maddubs_epi16(low, second));
        pairs = _mm256_add_epi16(pairs, v);
#endif
    }
#ifndef LANES_BF16
    if (kind == 0) c = _mm256_add_epi32(c, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
    return c;
}

/* The products of n bytes of codes, a multiple of 32. */
INLINE __m256i NAME(dot_block)(const uint8_t *codes, const int8_t *x, int64_t n, __m256i levels, __m256i flip, int kind) {
    __m256i sum = _mm256_setzero_si256();
    int64_t i = 0, step = kind == 2 ? 1 : 2;
    for (; i + 64 <= n; i += 64) sum = NAME(dot_codes)(codes + i, x + i * step, levels, flip, kind, 2, sum);
    return i == n ? sum : NAME(dot_codes)(codes + i, x + i * step, levels, flip, kind, 1, sum);
}

/* The sums of four vectors of integers. */
INLINE __m128i NAME(sums4)(const __m256i *v) {
    __m256i ab = _mm256_hadd_epi32(v[0], v[1]), cd = _mm256_hadd_epi32(v[2], v[3]), all = _mm256_hadd_epi32(ab, cd);
    return _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
}

/* The sums of products of each block of a row, `each` bytes of codes; kind, and each if it is 64, are constants. */
INLINE void NAME(row_sums)(const Integers *p, const uint8_t *codes, const int8_t *x, int64_t each, int kind, int32_t *sums) {
    int64_t blocks = blocks_of(&p->w), bytes = bytes_of(&p->w), step = kind == 2 ? 1 : 2, b = 0;
    int8_t table[16];
    for (int i = 0; i < 16; i++) table[i] = kind == 1 ? (int8_t)p->levels.levels[i] : 0;
    __m256i levels = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table)), part[4];
    __m256i flip = _mm256_set1_epi8(p->w.table ? (char)0x80 : 0);
    for (; b + 4 < blocks; b += 4) {
        UNROLLED(i, 4)
            part[i] = NAME(dot_block)(codes + (b + i) * each, x + (b + i) * each * step, each, levels, flip, kind);
        _mm_storeu_si128((__m128i *)(sums + b), NAME(sums4)(part));
    }
    for (int i = 0; i < 4; i++) {
        int64_t from = MIN((b + i) * each, bytes), n = MIN(each, bytes - from);
        part[i] = NAME(dot_block)(codes + from, x + from * step, n, levels, flip, kind);
    }
    _mm_storeu_si128((__m128i *)(sums + b), NAME(sums4)(part));
}

/* y of up to four rows of the weight, from their `sums` and `scales`, `apart` from row to row. */
INLINE void NAME(four_rows)(const Integers *p, int64_t row, int64_t m, const int32_t *sums, const float *scales,
                            int64_t apart, int64_t rows) {
    const Packed *w = &p->w;
    int64_t blocks = blocks_of(w);
    const int32_t *of_rows = p->sums + m * p->sums_apart[0];
    /* what the integers that are multiplied lack, times the sum of x; signed ones lack nothing */
    int32_t lacks = !w->table || !p->levels.plain ? 0 : p->levels.levels[0] + (w->bits == 8 ? 128 : 0);
    __m128 total = _mm_setzero_ps(), t[4];
    float y[4];
    for (int64_t b = 0; b < blocks; b += 4) {
        __m128i of_x = _mm_loadu_si128((const __m128i *)(of_rows + b)), more = _mm_mullo_epi32(of_x, _mm_set1_epi32(lacks));
        UNROLLED(r, 4) {
            t[r] = _mm_cvtepi32_ps(_mm_add_epi32(_mm_loadu_si128((const __m128i *)(sums + r * apart + b)), more));
            if (w->zero && r < rows) {
                float zero[4] = {0};
                memcpy(zero, w->zero + (row + r) * blocks + b, (size_t)MIN(4, blocks - b) * 4);
                t[r] = _mm_sub_ps(t[r], _mm_mul_ps(_mm_loadu_ps(zero), _mm_cvtepi32_ps(of_x)));
            }
            t[r] = _mm_mul_ps(t[r], _mm_loadu_ps(scales + r * apart + b));
        }
        _MM_TRANSPOSE4_PS(t[0], t[1], t[2], t[3]);
        for (int64_t i = 0; i < MIN(4, blocks - b); i++) total = _mm_add_ps(total, t[i]);
    }
    _mm_storeu_ps(y, _mm_mul_ps(total, _mm_set1_ps(p->scale[m])));
    NAME(halves)(y, rows, p->dtype, p->y, m * w->rows + row);
}

/* Multiply GROUP rows of the weight with each row of x. */
UNIT(few_integers) {
    const Integers *p = work;
    const Packed *w = &p->w;
    int64_t row = unit * GROUP, rows = MIN(GROUP, w->rows - row), blocks = blocks_of(w), bytes = bytes_of(w);
    int64_t apart = padded_to(blocks, 4) + 64, each = MIN(w->block * w->bits / 8, bytes);
    float *scales = scratch;
    int32_t *sums = (int32_t *)scales + GROUP * apart;
    memset(scratch, 0, (size_t)(GROUP * apart * 4));
    for (int64_t r = 0; r < rows; r++) {
        const uint8_t *codes = w->codes + (row + r) * bytes;
        NAME(scales)(w, (row + r) * blocks, blocks, scales + r * apart);
        if (p->levels.unit != 1) for (int64_t b = 0; b < blocks; b++) scales[r * apart + b] *= (float)(1.0 / 127.0);
        for (int64_t m = 0; m < p->m; m++) {
            const int8_t *x = p->bytes + m * 4 * p->words;
            int32_t *to = sums + (m * GROUP + r) * apart;
            if (w->bits == 8) NAME(row_sums)(p, codes, x, each, 2, to);
            else if (!p->levels.plain) NAME(row_sums)(p, codes, x, each, 1, to);
            else if (each == 64) NAME(row_sums)(p, codes, x, 64, 0, to);
            else NAME(row_sums)(p, codes, x, each, 0, to);
        }
    }
    for (int64_t m = 0; m < p->m; m++)
        for (int64_t r = 0; r < rows; r += 4)
            NAME(four_rows)(p, row + r, m, sums + (m * GROUP + r) * apart, scales + r * apart, apart, MIN(4, rows - r));
}
#else
UNIT(few_integers) { (void)work, (void)unit; }
#endif
