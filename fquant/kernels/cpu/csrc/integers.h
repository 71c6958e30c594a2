/* x · wᵀ of integers: rows of x are quantised, the codes of both are multiplied and summed as integers, and the sum of
   each block is scaled. The inner dimension is in words of two 16-bit integers, so that gemm.h packs x. Codes minus
   their zero point are at most 255, and int32 holds 2^15 products of them with 8-bit codes. */

typedef int32_t NAME(Sums) __attribute__((vector_size(LANES * 4), may_alias));

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

/* Quantise row `unit` of x: integers to q [inner, padded to words], its scale, and the sums of its blocks. */
UNIT(quantize_row) {
    const Integers *p = work;
    int64_t k = p->inner, padded = p->words * 2, blocks = blocks_of(&p->w);
    float *row = scratch, low = 0.0f, high = 0.0f;
    uint32_t largest = 0; /* magnitudes as bits: NaN exceeds infinity and infinity all else */
    int16_t *q = p->q + unit * padded;
    NAME(floats)(p->x, p->dtype, unit * k, k, row);
    if (p->how.halves) for (int64_t i = 0; i < k; i++) row[i] = from_f16(to_f16(row[i]));
    for (int64_t i = 0; i < k; i++) largest = MAX(largest, bits_of(row[i]) & 0x7fffffff);
    if (p->how.zero) for (int64_t i = 0; i < k; i++) low = MIN(low, row[i]), high = MAX(high, row[i]);
    float top = float_of(largest), scale = top / p->how.unit, by, zero = 0.0f;
    if (p->how.zero && largest < 0x7f800000) scale = (high - low) / (p->how.last - p->how.first);
    if (p->how.halves) {
        by = top > 0.0f ? 1.0f / top * 127.0f : 0.0f;
        scale = top * (float)(1.0 / 127.0);
    } else {
        if (scale > 0.0f && scale < 0x1p-126f) scale = 0x1p-126f;
        by = 1.0f / (scale < 0x1p-126f ? 0x1p-126f : scale);
        if (p->how.zero) {
            zero = p->how.first - rintf(low / (scale < 0x1p-126f ? 0x1p-126f : scale));
            zero = MIN(MAX(zero, p->how.first), p->how.last);
        }
    }
    p->scale[unit] = scale;
    for (int64_t i = 0; i < k; i++) {
        float y = rintf(row[i] * by) + zero;
        y = y > p->how.first ? y : p->how.first; /* also for NaN, whose row is NaN by its scale */
        y = y < p->how.last ? y : p->how.last;
        q[i] = (int16_t)(y - zero);
    }
    for (int64_t i = k; i < padded; i++) q[i] = 0;
    if (!p->w.zero) return;
    for (int64_t b = 0; b < blocks; b++) {
        int32_t sum = 0;
        for (int64_t i = b * p->w.block; i < MIN(k, (b + 1) * p->w.block); i++) sum += q[i];
        p->sums[b * p->tall + unit] = (float)sum;
    }
}

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

/* A sliver of rows times a panel of x, n words. Integer sums are read from `open` unless they begin here, and written
   there unless the block ends here; then they are scaled and added to `totals`. The ints are constants. */
INLINE void NAME(micro16)(const uint32_t *sliver, int64_t apart, const uint32_t *panel, int64_t n, int rows, int vecs,
                          int begins, int ends, int32_t *open, float *totals, const float *scale, const float *zero,
                          int64_t next, const float *sums) {
    NAME(Sums) part[SUMS][VECS], *kept = (NAME(Sums) *)open;
    UNROLLED(r, rows) UNROLLED(v, vecs) part[r][v] = begins ? (NAME(Sums)){0} : kept[r * vecs + v];
    for (int64_t k = 0; k < n; k++) {
        Bits x[VECS];
        UNROLLED(v, vecs) x[v] = ((const Bits *)panel)[k * vecs + v];
        UNROLLED(r, rows) {
            Bits by = sliver[r * apart + k] - (Bits){0};
            UNROLLED(v, vecs) part[r][v] = NAME(dot16)(x[v], by, part[r][v]);
        }
    }
    if (!ends) {
        UNROLLED(r, rows) UNROLLED(v, vecs) kept[r * vecs + v] = part[r][v];
        return;
    }
    UNROLLED(r, rows)
        UNROLLED(v, vecs) {
            Lanes t = __builtin_convertvector(part[r][v], Lanes), *to = (Lanes *)totals + r * vecs + v;
            if (zero) t = t - zero[r * next] * ((const Lanes *)sums)[v];
            *to = *to + t * scale[r * next];
        }
}

/* Multiply `group` rows of the weight with all of x. */
UNIT(integer_rows) {
    const Integers *p = work;
    const Packed *w = &p->w;
    int64_t group = p->group, row = unit * group, rows = MIN(group, w->rows - row), blocks = blocks_of(w);
    int64_t panels = (p->m + PANEL - 1) / PANEL, high = padded_to(group, LANES), tall = p->tall;
    uint32_t *sliver = scratch;
    int32_t *open = (int32_t *)(sliver + group * APART);
    float *totals = (float *)(open + high * tall), turned[LANES][MOST_ROWS];
    float *scales = totals + high * tall, *zeros = w->zero ? scales + group * (blocks + 64) : NULL;
    memset(totals, 0, (size_t)(high * tall * 4));
    memset(sliver + rows * APART, 0, (size_t)((group - rows) * APART * 4));
    memset(scales + rows * (blocks + 64), 0, (size_t)((group - rows) * (blocks + 64) * 4));
    for (int64_t r = 0; r < rows; r++) {
        float *to = scales + r * (blocks + 64);
        NAME(scales)(w, (row + r) * blocks, blocks, to);
        if (p->levels.unit != 1) for (int64_t b = 0; b < blocks; b++) to[b] *= (float)(1.0 / 127.0);
        if (zeros) memcpy(zeros + r * (blocks + 64), w->zero + (row + r) * blocks, (size_t)blocks * 4);
    }
    if (zeros) memset(zeros + rows * (blocks + 64), 0, (size_t)((group - rows) * (blocks + 64) * 4));
    int64_t each = MIN((w->block + 1) / 2, p->words); /* words of a block */
    for (int64_t slab = 0; slab < p->words; slab += SLAB) {
        int64_t words = MIN(SLAB, p->words - slab), n = MIN(2 * words, w->width - 2 * slab);
        for (int64_t r = 0; r < rows; r++) {
            sliver[r * APART + words - 1] = 0;
            NAME(integers16)(p, row + r, 2 * slab, n, (int16_t *)(sliver + r * APART));
        }
        for (int64_t k = 0; k < words;) {
            int64_t block = (slab + k) / each, end = MIN((block + 1) * each, p->words) - slab;
            int64_t steps = MIN(MIN(STEPS, words - k), end - k);
            int begins = (slab + k) % each == 0, ends = k + steps == end;
            for (int64_t j = 0; j < panels; j++) {
                int vecs = NAME(vecs)(p->m, j), width = vecs * LANES, most = SUMS / vecs;
                const uint32_t *x = (const uint32_t *)p->copy + j * PANEL * p->words + (slab + k) * width;
                const float *sums = p->sums + block * tall + j * PANEL;
                for (int64_t r = 0; r < rows; r += most) {
                    const uint32_t *from = sliver + r * APART + k;
                    int64_t at = j * PANEL * high + r * width;
                    const float *scale = scales + r * (blocks + 64) + block;
                    const float *zero = zeros ? zeros + r * (blocks + 64) + block : NULL;
#define KIND(N, B, E)                                                                                               \
    NAME(micro16)(from, APART, x, steps, SUMS / N, MIN(N, VECS), B, E, open + at, totals + at, scale, zero, blocks + 64, sums)
#define CASE(N)                                                         \
    case N:                                                             \
        if (N <= VECS) {                                                \
            if (begins && ends) KIND(N, 1, 1);                          \
            else if (begins) KIND(N, 1, 0);                             \
            else if (ends) KIND(N, 0, 1);                               \
            else KIND(N, 0, 0);                                         \
        }                                                               \
        break;
                    switch (vecs) { CASE(1) CASE(2) CASE(3) CASE(4) }
#undef CASE
#undef KIND
                }
            }
            k += steps;
        }
    }
    for (int64_t m = 0; m < p->m; m += LANES) {
        int64_t j = m / PANEL, width = NAME(vecs)(p->m, j) * LANES;
        float *from = totals + j * PANEL * high + m % PANEL;
        Lanes scale;
        memcpy(&scale, p->scale + m, sizeof scale);
        for (int64_t r = 0; r < rows; r++) *(Lanes *)(from + r * width) *= scale;
        for (int64_t r = 0; r < rows; r += LANES)
            NAME(turn)((uint32_t *)from + r * width, width, LANES, (uint32_t *)turned[0] + r, MOST_ROWS);
        for (int64_t i = 0; i < MIN(LANES, p->m - m); i++)
            NAME(halves)(turned[i], rows, p->dtype, p->y, (m + i) * w->rows + row);
    }
}

#if defined(LANES_AVX2) || defined(LANES_AVX512)
enum { NAME(BYTES) = 1 };

/* Few rows of x: bound by the read of the weight. Bytes are multiplied, 32 at a time. */

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

/* Add the products of 64 codes of 4 bits, or of 32 of 8 bits. kind, a constant: 0 for 4-bit codes as they are, 1 for
   their levels, 2 for 8 bits, of which the highest is flipped by `flip`. */
INLINE __m256i NAME(dot_codes)(const uint8_t *codes, const int8_t *x, __m256i levels, __m256i flip, int kind, __m256i c) {
    __m256i v = _mm256_loadu_si256((const __m256i *)codes), four = _mm256_set1_epi8(15);
    __m256i first = _mm256_loadu_si256((const __m256i *)x);
    _mm_prefetch((const char *)codes + AHEAD, _MM_HINT_T0);
    if (kind == 2) return NAME(dot8_signed)(_mm256_xor_si256(v, flip), first, c);
    __m256i second = _mm256_loadu_si256((const __m256i *)(x + 32));
    __m256i high = _mm256_and_si256(_mm256_srli_epi16(v, 4), four), low = _mm256_and_si256(v, four);
    if (kind == 1) {
        c = NAME(dot8_signed)(_mm256_shuffle_epi8(levels, high), first, c);
        return NAME(dot8_signed)(_mm256_shuffle_epi8(levels, low), second, c);
    }
#ifdef LANES_BF16
    return _mm256_dpbusd_epi32(_mm256_dpbusd_epi32(c, high, first), low, second);
#else
    __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16(high, first), _mm256_maddubs_epi16(low, second));
    return _mm256_add_epi32(c, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}

/* The sums of four vectors of integers. */
INLINE __m128i NAME(sums4)(const __m256i *v) {
    __m256i ab = _mm256_hadd_epi32(v[0], v[1]), cd = _mm256_hadd_epi32(v[2], v[3]), all = _mm256_hadd_epi32(ab, cd);
    return _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
}

/* Four rows of the weight times a row of x. `scales` and `zeros` are f32[blocks, 4]. */
INLINE void NAME(four_rows)(const Integers *p, int64_t row, int64_t m, const float *scales, const float *zeros, int kind,
                            float *out) {
    const Packed *w = &p->w;
    int64_t blocks = blocks_of(w), bytes = bytes_of(w), each = MIN(w->block * w->bits / 8, bytes), step = kind == 2 ? 32 : 64;
    const uint8_t *codes = w->codes + row * bytes;
    const int8_t *x = p->bytes + m * p->inner;
    const int32_t *whole = p->whole + m * blocks;
    int8_t table[16];
    for (int i = 0; i < 16; i++) table[i] = kind == 1 ? (int8_t)p->levels.levels[i] : 0;
    __m256i levels = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
    __m256i flip = _mm256_set1_epi8(w->table ? (char)0x80 : 0);
    /* what the integers that are multiplied lack, times the sum of x */
    int32_t lacks = kind == 1 || !w->table ? 0 : p->levels.levels[0] + (kind == 2 ? 128 : 0);
    __m128 total = _mm_setzero_ps();
    for (int64_t b = 0; b < blocks; b++) {
        __m256i part[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
        for (int64_t i = b * each; i < MIN((b + 1) * each, bytes); i += 32)
            UNROLLED(r, 4) part[r] = NAME(dot_codes)(codes + r * bytes + i, x + i * step / 32, levels, flip, kind, part[r]);
        __m128i sums = _mm_add_epi32(NAME(sums4)(part), _mm_set1_epi32(lacks * whole[b]));
        __m128 t = _mm_cvtepi32_ps(sums);
        if (zeros) t = _mm_sub_ps(t, _mm_mul_ps(_mm_loadu_ps(zeros + 4 * b), _mm_set1_ps((float)whole[b])));
        total = _mm_add_ps(total, _mm_mul_ps(t, _mm_loadu_ps(scales + 4 * b)));
    }
    _mm_storeu_ps(out, _mm_mul_ps(total, _mm_set1_ps(p->scale[m])));
}

/* Multiply GROUP rows of the weight, four at a time, with each row of x. */
UNIT(few_integers) {
    const Integers *p = work;
    const Packed *w = &p->w;
    int64_t row = unit * GROUP, stop = MIN(row + GROUP, w->rows), blocks = blocks_of(w);
    float *one = scratch, *scales = one + blocks + 64, *zeros = w->zero ? scales + 4 * blocks : NULL, y[4];
    int kind = w->bits == 8 ? 2 : p->levels.plain ? 0 : 1;
    for (int64_t rows; row < stop; row += rows) {
        rows = MIN(4, stop - row); /* the last four rows are computed again if fewer are left */
        int64_t from = MIN(row, w->rows - 4);
        for (int64_t r = 0; r < 4; r++) {
            NAME(scales)(w, (from + r) * blocks, blocks, one);
            float by = p->levels.unit != 1 ? (float)(1.0 / 127.0) : 1.0f;
            for (int64_t b = 0; b < blocks; b++) scales[4 * b + r] = one[b] * by;
            if (zeros) for (int64_t b = 0; b < blocks; b++) zeros[4 * b + r] = w->zero[(from + r) * blocks + b];
        }
        for (int64_t m = 0; m < p->m; m++) {
            if (kind == 0) NAME(four_rows)(p, from, m, scales, zeros, 0, y);
            else if (kind == 1) NAME(four_rows)(p, from, m, scales, zeros, 1, y);
            else NAME(four_rows)(p, from, m, scales, zeros, 2, y);
            NAME(halves)(y + (row - from), rows, p->dtype, p->y, m * w->rows + row);
        }
    }
}

/* Rows of q as bytes, and the sums of their blocks. */
UNIT(load_bytes) {
    const Integers *p = work;
    const int16_t *q = p->q + unit * 2 * p->words;
    int8_t *out = p->bytes + unit * p->inner;
    int64_t blocks = blocks_of(&p->w);
    if (p->w.bits == 8) for (int64_t i = 0; i < p->inner; i++) out[i] = (int8_t)q[i];
    else for (int64_t i = 0; i < p->inner; i += 64)
        for (int64_t k = 0; k < 32; k++) out[i + k] = (int8_t)q[i + 2 * k], out[i + 32 + k] = (int8_t)q[i + 2 * k + 1];
    for (int64_t b = 0; b < blocks; b++) {
        int32_t sum = 0;
        for (int64_t i = b * p->w.block; i < MIN(p->inner, (b + 1) * p->w.block); i++) sum += q[i];
        p->whole[unit * blocks + b] = sum;
    }
}
#else
enum { NAME(BYTES) = 0 };
UNIT(few_integers) { (void)work, (void)unit; }
UNIT(load_bytes) { (void)work, (void)unit; }
#endif
