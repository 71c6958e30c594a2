/* Dequantisation. For 4 bits the 16 values of a block are computed first: scaled, rounded to the dtype of the array,
   then to that of the result. An element then costs a look-up and no arithmetic. */

#ifdef LANES_BF16
/* The entries of a table of 256 for 64 codes, n of them valid, by a look-up of each of the four bytes of a value. */
INLINE void NAME(entries64)(const uint8_t *planes, const uint8_t *codes, int64_t n, __m512 *v) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512i c = _mm512_permutexvar_epi32(order, _mm512_maskz_loadu_epi8(~0ull >> (64 - n), codes)), bytes[4];
    __mmask64 high = _mm512_movepi8_mask(c);
    UNROLLED(i, 4) {
        const __m512i *t = (const __m512i *)(planes + 256 * i);
        __m512i a = _mm512_permutex2var_epi8(_mm512_loadu_si512(t), c, _mm512_loadu_si512(t + 1));
        __m512i b = _mm512_permutex2var_epi8(_mm512_loadu_si512(t + 2), c, _mm512_loadu_si512(t + 3));
        bytes[i] = _mm512_mask_blend_epi8(high, a, b);
    }
    __m512i low[2] = {_mm512_unpacklo_epi8(bytes[0], bytes[1]), _mm512_unpackhi_epi8(bytes[0], bytes[1])};
    __m512i top[2] = {_mm512_unpacklo_epi8(bytes[2], bytes[3]), _mm512_unpackhi_epi8(bytes[2], bytes[3])};
    UNROLLED(i, 4)
        v[i] = (__m512)(i % 2 ? _mm512_unpackhi_epi16(low[i / 2], top[i / 2]) : _mm512_unpacklo_epi16(low[i / 2], top[i / 2]));
}

/* Decode 64 scales, n of them valid. */
INLINE void NAME(nested64)(const Packed *w, const uint8_t *codes, int64_t n, float absmax, float offset, float *out) {
    __m512 v[4];
    NAME(entries64)(w->nested_bytes, codes, n, v);
    UNROLLED(i, 4) {
        __m512 scale = _mm512_mul_ps(v[i], _mm512_set1_ps(absmax));
        _mm512_storeu_ps(out + 16 * i, w->nested_offset ? _mm512_add_ps(scale, _mm512_set1_ps(offset)) : scale);
    }
}
#endif

/* Decode the scales of n blocks from number `first` of the whole array; out has room for 63 more. Scales are
   prefetched twice as far ahead as codes, because they are few, and a miss stops everything. */
static void NAME(scales)(const Packed *w, int64_t first, int64_t n, float *restrict out) {
    int64_t size = w->nested ? 1 : 4, ahead = 2 * AHEAD * 8 / w->bits / w->block;
    for (int64_t i = 0; i < n * size; i += 64) __builtin_prefetch((const char *)w->scale + (first + ahead) * size + i);
    if (!w->nested) { memcpy(out, (const float *)w->scale + first, (size_t)n * 4); return; }
    const uint8_t *codes = (const uint8_t *)w->scale;
    float offset = w->nested_offset ? *w->nested_offset : 0.0f;
    int64_t block = first >> __builtin_ctzll((uint64_t)w->nested_block), end = (block + 1) * w->nested_block - first;
    for (int64_t i = 0; i < n; block++, end += w->nested_block) {
        int64_t stop = MIN(n, end);
        float absmax = w->nested[block];
#ifdef LANES_BF16
        for (; i + 12 <= stop; i += MIN(64, stop - i))
            NAME(nested64)(w, codes + first + i, MIN(64, stop - i), absmax, offset, out + i);
#else
        for (; i + LANES <= stop; i += LANES) {
            Lanes v = NAME(gather)(w->nested_table, codes + first + i) * absmax;
            if (w->nested_offset) v = v + offset;
            memcpy(out + i, &v, sizeof v);
        }
#endif
        for (; i < stop; i++) {
            float scale = w->nested_table[codes[first + i]] * absmax;
            out[i] = w->nested_offset ? scale + offset : scale;
        }
    }
}

INLINE Bits NAME(to_bf16)(Lanes x) {
    Bits u = (Bits)x, nan = (Bits)((u & 0x7fffffff) > 0x7f800000);
    return ((u + 0x7fff + (u >> 16 & 1)) >> 16 & ~nan) | (nan & 0x7fc0);
}

/* Round LANES values to the dtype of the array, then to that of the result, and store them. */
INLINE void NAME(finish)(Lanes v, int own, int dtype, void *out) {
    if (own == BF16 && dtype != BF16) v = (Lanes)(NAME(to_bf16)(v) << 16);
    if (own == F16 && dtype != F16) v = NAME(from_f16)(NAME(to_f16)(v));
    if (dtype == F32) memcpy(out, &v, sizeof v);
    else NAME(halve)(dtype == BF16 ? NAME(to_bf16)(v) : NAME(to_f16)(v), out);
}

/* Decode a block of n 4-bit codes: its 16 values first, then a look-up an element. */
INLINE void NAME(block4)(const Packed *w, int own, const uint8_t *restrict codes, int64_t n, float scale,
                         const float *zero, int dtype, void *restrict out) {
    uint32_t values[16];
    int64_t i = 0;
    UNROLLED(k, 16 / LANES) {
        Lanes v;
        memcpy(&v, w->table + k * LANES, sizeof v);
        if (zero) v = v - *zero;
        v = v * scale;
        if (w->offset) v = v + *w->offset;
        NAME(finish)(v, own, dtype, (char *)values + k * LANES * size_of(dtype));
    }
#define LOOK_UP(SIZE)                                                         \
    const uint##SIZE##_t *v = (const void *)values;                           \
    uint##SIZE##_t *o = out;                                                  \
    Table##SIZE t = NAME(table##SIZE)(v);                                     \
    for (; i + 32 <= n; i += 32) NAME(lookup##SIZE)(codes + i / 2, t, o + i); \
    for (; i < n; i++) o[i] = v[i % 2 ? codes[i / 2] & 15 : codes[i / 2] >> 4];
    if (dtype == F32) { LOOK_UP(32) } else { LOOK_UP(16) }
#undef LOOK_UP
}

#ifdef LANES_BF16
/* The values in bf16 of two blocks of 4-bit codes, from their scales, and their zero points if `zeroed`, a constant. */
INLINE __m512i NAME(values2)(__m512 table, const float *scales, const float *zeros, int64_t second, int zeroed) {
    __m512 a = table, b = table;
    if (zeroed) {
        a = _mm512_sub_ps(a, _mm512_set1_ps(zeros[0]));
        b = _mm512_sub_ps(b, _mm512_set1_ps(zeros[second]));
    }
    a = _mm512_mul_ps(a, _mm512_set1_ps(scales[0]));
    b = _mm512_mul_ps(b, _mm512_set1_ps(scales[second]));
    return (__m512i)_mm512_cvtne2ps_pbh(b, a);
}

/* Decode 128 4-bit codes of two blocks, whose values are `both`, to bf16: shift the four codes of each word to words of
   their own, and look up by the lowest bits. The fifth bit has no effect, because the values of a block are there
   twice. Denormals are flushed. */
INLINE void NAME(pair4)(const uint8_t *codes, __m512i both, __m512i *v) {
    const __m512i shifts = _mm512_set1_epi64(0x0008000c00000004);
    __m512i t[2] = {_mm512_shuffle_i64x2(both, both, 0x44), _mm512_shuffle_i64x2(both, both, 0xee)};
    UNROLLED(k, 4) {
        __m512i c = _mm512_cvtepu16_epi64(_mm_loadu_si128((const __m128i *)codes + k));
        v[k] = _mm512_permutexvar_epi16(_mm512_multishift_epi64_epi8(shifts, c), t[k / 2]);
    }
}

/* True if blocks of these scales have no NaN and no denormal value but zero, so that one instruction may round them. */
INLINE int NAME(plain)(const Packed *w, int64_t n, const float *scales) {
    const __m512 sign = _mm512_set1_ps(-0.0f), least = _mm512_set1_ps(w->least), most = _mm512_set1_ps(3e38f);
    __mmask16 bad = 0;
    for (int64_t i = 0; i < n; i += 16) {
        __mmask16 there = (__mmask16)(n - i < 16 ? (1 << (n - i)) - 1 : -1);
        __m512 s = _mm512_andnot_ps(sign, _mm512_maskz_loadu_ps(there, scales + i));
        bad |= _mm512_mask_cmp_ps_mask(_mm512_cmp_ps_mask(s, _mm512_setzero_ps(), _CMP_NEQ_UQ), s, least, _CMP_NGE_UQ);
        bad |= _mm512_cmp_ps_mask(s, most, _CMP_NLE_UQ);
    }
    return !bad;
}

/* True if zero points are tame: beside integers up to 255, no difference but 0 is below 2^-33, and none is NaN. A zero
   point that is 0 or at least 2^-10 is a multiple of 2^-33. */
INLINE int NAME(tame)(int64_t n, const float *zeros) {
    __mmask16 bad = 0;
    for (int64_t i = 0; i < n; i += 16) {
        __mmask16 there = (__mmask16)(n - i < 16 ? (1 << (n - i)) - 1 : -1);
        __m512 z = _mm512_andnot_ps(_mm512_set1_ps(-0.0f), _mm512_maskz_loadu_ps(there, zeros + i));
        bad |= _mm512_mask_cmp_ps_mask(_mm512_cmp_ps_mask(z, _mm512_setzero_ps(), _CMP_NEQ_UQ), z,
                                       _mm512_set1_ps(0x1p-10f), _CMP_NGE_UQ);
        bad |= _mm512_cmp_ps_mask(z, _mm512_set1_ps(0x1p20f), _CMP_NLE_UQ);
    }
    return !bad;
}

/* Decode pairs of blocks, or parts of them, of a row from `column` to `end`, both multiples of 128, to bf16. The first
   scale and zero point are those of `block`. `zeroed`, true if there are zero points, is a constant. */
INLINE void NAME(pairs)(const uint8_t *codes, __m512 table, const float *scales, const float *zeros, int64_t block,
                        int64_t shift, int64_t column, int64_t end, int past, int zeroed, char *out) {
    for (; column + 128 <= end; column += 128, out += 256) {
        __m512i v[4];
        int64_t at = (column >> shift) - block, next = ((column + 64) >> shift) - block;
        NAME(pair4)(codes + column / 2, NAME(values2)(table, scales + at, zeros + at, next - at, zeroed), v);
        __builtin_prefetch(codes + column / 2 + AHEAD);
        UNROLLED(k, 4)
            if (past) _mm512_stream_si512((__m512i *)out + k, v[k]);
            else _mm512_storeu_si512((__m512i *)out + k, v[k]);
    }
}
#endif

/* The values of LANES 8-bit codes before they are scaled. */
INLINE Lanes NAME(values8)(const Packed *w, const uint8_t *codes) {
    if (!w->table) return NAME(integers)(codes);
    if (!w->plain) return NAME(gather)(w->table, codes);
    Lanes v = NAME(integers)(codes); /* of signed bytes */
    return NAME(either)((Bits)(v < 0.0f), v + 256.0f, v) + *w->table;
}

/* Decode a block, or a piece of one, of n 8-bit codes. */
INLINE void NAME(block8)(const Packed *w, int own, const uint8_t *restrict codes, int64_t n, float scale,
                         const float *zero, int dtype, char *restrict out) {
    int64_t size = size_of(dtype), i = 0;
#ifdef LANES_BF16
    int whole = !w->table || (w->plain && !zero); /* values are integers */
    if (dtype == BF16 && own != F16 && whole && !w->offset && (scale == 0.0f || (scale > 1e-30f && scale < 1e37f)))
        for (; i + 32 <= n; i += 32) { /* no denormals or NaN: one instruction rounds */
            Lanes a = NAME(values8)(w, codes + i) * scale, b = NAME(values8)(w, codes + i + 16) * scale;
            if (!w->table) a *= (float)(1.0 / 127.0), b *= (float)(1.0 / 127.0);
            _mm512_storeu_si512(out + 2 * i, (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
            __builtin_prefetch(codes + i + AHEAD);
        }
#endif
    for (; i < n; i += LANES) {
        int64_t left = MIN(n - i, LANES);
        uint8_t some[LANES] = {0};
        char last[LANES * 4];
        const uint8_t *c = codes + i;
        if (left < LANES) c = memcpy(some, c, (size_t)left);
        Lanes v = NAME(values8)(w, c);
        if (zero) v = v - *zero;
        v = v * scale;
        if (!w->table) v *= (float)(1.0 / 127.0);
        if (w->offset) v = v + *w->offset;
        NAME(finish)(v, own, dtype, left == LANES ? out + i * size : last);
        if (left < LANES) memcpy(out + i * size, last, (size_t)(left * size));
    }
}

/* Widen n codes of 2 or 3 bits to 4 bits; n is the rest of a row, or a multiple of 8. */
INLINE void NAME(widen)(const uint8_t *restrict codes, int bits, int64_t n, uint8_t *restrict out) {
    int64_t i = 0;
    if (bits == 2) {
        for (; i < (n + 3) / 4; i++) {
            uint32_t c = codes[i];
            out[2 * i] = (uint8_t)((c >> 6) << 4 | (c >> 4 & 3)), out[2 * i + 1] = (uint8_t)((c >> 2 & 3) << 4 | (c & 3));
        }
    } else {
        int64_t bytes = (3 * n + 7) / 8;
        for (; i < (n + 7) / 8; i++) {
            uint32_t c = 0;
            for (int k = 0; k < 3; k++) c = c << 8 | (3 * i + k < bytes ? codes[3 * i + k] : 0);
            for (int k = 0; k < 4; k++) out[4 * i + k] = (uint8_t)((c >> (21 - 6 * k) & 7) << 4 | (c >> (18 - 6 * k) & 7));
        }
    }
}

/* Decode n elements of a row from `column`, a multiple of 32; `past`: with non-temporal stores, to an aligned out. */
INLINE void NAME(span_as)(const Packed *w, int own, int64_t row, int64_t column, int64_t n, int past, int dtype,
                          char *out) {
    int64_t size = size_of(dtype), blocks = blocks_of(w), block = column / w->block;
    const uint8_t *codes = w->codes + row * bytes_of(w);
    const float *zeros = w->zero ? w->zero + row * blocks : NULL;
    float scales[MAX_SCALES + 64];
    (void)past;
#ifdef LANES_BF16
    int pairs = dtype == BF16 && own != F16 && w->bits == 4 && w->block % 64 == 0 && column % 128 == 0 && !w->offset;
    int64_t shift = __builtin_ctzll((uint64_t)w->block);
    __m512 table = pairs ? _mm512_loadu_ps(w->table) : _mm512_setzero_ps();
#endif
    for (int64_t stop = column + n; column < stop;) {
        int64_t end = MIN(column + PIECE, stop), first = block, number = (end - 1) / w->block - first + 1;
        NAME(scales)(w, row * blocks + first, number, scales);
#ifdef LANES_BF16
        if (pairs && NAME(plain)(w, number, scales) && (!zeros || NAME(tame)(number, zeros + first))) {
            int64_t last = column + (end - column) / 128 * 128;
            if (zeros) NAME(pairs)(codes, table, scales, zeros + first, first, shift, column, last, past, 1, out);
            else NAME(pairs)(codes, table, scales, scales, first, shift, column, last, past, 0, out);
            out += 2 * (last - column);
            column = last;
            block = column >> shift;
        }
#endif
        uint8_t wide[PIECE / 2 + 4];
        int64_t start = column;
        if (w->bits < 4) NAME(widen)(codes + column * w->bits / 8, w->bits, end - column, wide);
        for (int64_t next; column < end; column = next) {
            float scale = scales[block - first];
            const float *zero = zeros ? zeros + block : NULL;
            next = MIN((block + 1) * w->block, end);
            __builtin_prefetch(codes + column * w->bits / 8 + AHEAD);
            if (w->bits == 4) NAME(block4)(w, own, codes + column / 2, next - column, scale, zero, dtype, out);
            else if (w->bits < 4) NAME(block4)(w, own, wide + (column - start) / 2, next - column, scale, zero, dtype, out);
            else NAME(block8)(w, own, codes + column, next - column, scale, zero, dtype, out);
            out += (next - column) * size;
            block += next == (block + 1) * w->block;
        }
    }
}

static void NAME(sum_vectors)(const Packed *w, int64_t row, int64_t column, int64_t n, int dtype, void *out);
static void NAME(sum_halves)(const Packed *w, int64_t row, int64_t column, int64_t n, uint16_t *out);

static void NAME(span)(const Packed *w, int64_t row, int64_t column, int64_t n, int past, int dtype, void *out) {
    if (w->vectors) { NAME(sum_vectors)(w, row, column, n, dtype, out); return; }
#define AS(OWN, DTYPE) if (w->dtype == OWN && dtype == DTYPE) NAME(span_as)(w, OWN, row, column, n, past, DTYPE, out);
    AS(F32, F32) else AS(BF16, F32) else AS(F16, F32)
    else AS(F32, BF16) else AS(BF16, BF16) else AS(F16, BF16)
    else AS(F32, F16) else AS(BF16, F16) else AS(F16, F16)
#undef AS
}

/* The same for a product with x of dtype: rounded to dtype, as bf16 if half, else as floats. */
static void NAME(factors)(const Packed *w, int64_t row, int64_t column, int64_t n, int dtype, int half, void *out) {
    uint16_t some[PIECE];
    if (!w->bits && half) memcpy(out, (const uint16_t *)w->codes + row * w->width + column, (size_t)n * 2);
    else if (!w->bits) NAME(floats)(w->codes, dtype, row * w->width + column, n, out);
    else if (half && w->vectors) NAME(sum_halves)(w, row, column, n, out);
    else if (half || dtype == F32 || dtype == w->dtype) NAME(span)(w, row, column, n, 0, half ? BF16 : F32, out);
    else for (int64_t i = 0; i < n; i += PIECE) {
        NAME(span)(w, row, column + i, MIN(PIECE, n - i), 0, dtype, some);
        NAME(floats)(some, dtype, 0, MIN(PIECE, n - i), (float *)out + i);
    }
}

UNIT(decode) {
    const Decode *d = work;
    int64_t pieces = pieces_of(d->width), row = unit / pieces, at = unit % pieces * PIECE;
    NAME(span)(&d->w, d->row + row, d->column + at, MIN(PIECE, d->width - at), d->past, d->dtype,
               (char *)d->out + (row * d->stride + at) * size_of(d->dtype));
}
