/* Decoding, for one instruction set. Of 4 bits the 16 values of a block are made first (scaled, rounded to the dtype of
   the array, then to that of the result), so that an element costs a look-up and no arithmetic. */

/* The scales of n blocks, the first of which is number `first` of the whole array. */
static void NAME(scales)(const Packed *w, int64_t first, int64_t n, float *restrict out) {
    if (!w->nested) {
        memcpy(out, (const float *)w->scale + first, (size_t)n * 4);
        return;
    }
    const uint8_t *codes = (const uint8_t *)w->scale;
    float offset = w->nested_offset ? *w->nested_offset : 0.0f;
    for (int64_t i = 0; i < n;) {
        int64_t block = (first + i) / w->nested_block, end = MIN(n, (block + 1) * w->nested_block - first);
        float absmax = w->nested[block];
        for (; i + NAME(LANES) <= end; i += NAME(LANES)) {
            NAME(Lanes) v = NAME(gather)(w->nested_table, codes + first + i) * absmax;
            memcpy(out + i, &v, sizeof v);
        }
        for (; i < end; i++) out[i] = w->nested_table[codes[first + i]] * absmax;
    }
    if (w->nested_offset) for (int64_t i = 0; i < n; i++) out[i] += offset;
}

INLINE NAME(Bits) NAME(to_bf16)(NAME(Lanes) x) {
    NAME(Bits) u = (NAME(Bits))x, nan = (NAME(Bits))((u & 0x7fffffff) > 0x7f800000);
    return ((u + 0x7fff + (u >> 16 & 1)) >> 16 & ~nan) | (nan & 0x7fc0);
}

/* LANES values to `out`, in the dtype of the array and then in that of the result. */
INLINE void NAME(finish)(NAME(Lanes) v, int own, int dtype, void *out) {
    if (own == BF16 && dtype != BF16) v = (NAME(Lanes))(NAME(to_bf16)(v) << 16);
    if (own == F16 && dtype != F16) v = NAME(from_f16)(NAME(to_f16)(v));
    if (dtype == F32) {
        memcpy(out, &v, sizeof v);
    } else {
        NAME(halve)(dtype == BF16 ? NAME(to_bf16)(v) : NAME(to_f16)(v), out);
    }
}

/* A block of n 4-bit codes: its 16 values first, then a look-up an element. */
INLINE void NAME(block4)(const Packed *w, const uint8_t *restrict codes, int64_t n, float scale, int dtype,
                         void *restrict out) {
    uint32_t values[16];
    int64_t i = 0;
#pragma GCC unroll 4
    for (int k = 0; k < 16; k += NAME(LANES)) {
        NAME(Lanes) v;
        memcpy(&v, w->table + k, sizeof v);
        v = v * scale;
        if (w->offset) v = v + *w->offset;
        NAME(finish)(v, w->dtype, dtype, (char *)values + k * (dtype == F32 ? 4 : 2));
    }
    if (dtype == F32) {
        uint32_t *o = out;
        NAME(Table32) t = NAME(table32)(values);
        for (; i + 32 <= n; i += 32) NAME(lookup32)(codes + i / 2, t, o + i);
        for (; i < n; i++) o[i] = values[i % 2 ? codes[i / 2] & 15 : codes[i / 2] >> 4];
    } else {
        const uint16_t *v = (const uint16_t *)values;
        uint16_t *o = out;
        NAME(Table16) t = NAME(table16)(v);
        for (; i + 32 <= n; i += 32) NAME(lookup16)(codes + i / 2, t, o + i);
        for (; i < n; i++) o[i] = v[i % 2 ? codes[i / 2] & 15 : codes[i / 2] >> 4];
    }
}

#ifdef LANES_BF16
/* Two blocks of 64 to bf16 at once, which one instruction rounds. It would flush what is denormal, and NaN is not its
   to make: 0 if there is any, for block4 to do. */
INLINE int NAME(pair4)(const uint8_t *codes, __m512 table, float first, float second, int past, void *out) {
    __m512 a = _mm512_mul_ps(table, _mm512_set1_ps(first)), b = _mm512_mul_ps(table, _mm512_set1_ps(second));
    if (_mm512_fpclass_ps_mask(a, 0xa1) | _mm512_fpclass_ps_mask(b, 0xa1)) return 0;
    __m512i t = (__m512i)_mm512_cvtne2ps_pbh(b, a), swapped = _mm512_shuffle_i64x2(t, t, 0x4e);
    __m512i four = _mm512_set1_epi16(15);
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        __m512i c = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes + k));
        c = _mm512_ternarylogic_epi32(_mm512_srli_epi32(c, 4), _mm512_slli_epi32(c, 16), four, 0xa8); /* (a | b) & four */
        c = _mm512_permutexvar_epi16(c, k < 2 ? t : swapped);
        if (past) _mm512_stream_si512((__m512i *)out + k, c);
        else _mm512_storeu_si512((__m512i *)out + k, c);
    }
    __builtin_prefetch(codes + AHEAD);
    return 1;
}
#endif

/* A block, or as much as a piece of one, of n 8-bit codes. */
INLINE void NAME(block8)(const Packed *w, const uint8_t *restrict codes, int64_t n, float scale, int dtype,
                         char *restrict out) {
    int64_t size = dtype == F32 ? 4 : 2, i = 0;
#ifdef LANES_BF16
    if (dtype == BF16 && w->dtype != F16 && !w->table && !w->offset && (scale == 0.0f || (scale > 1e-30f && scale < 1e37f)))
        for (; i + 32 <= n; i += 32) { /* nothing is denormal or NaN, and one instruction rounds */
            __m512 a = (__m512)(NAME(integers)(codes + i) * scale * (float)(1.0 / 127.0));
            __m512 b = (__m512)(NAME(integers)(codes + i + 16) * scale * (float)(1.0 / 127.0));
            _mm512_storeu_si512(out + 2 * i, (__m512i)_mm512_cvtne2ps_pbh(b, a));
            __builtin_prefetch(codes + i + AHEAD);
        }
#endif
    for (; i < n; i += NAME(LANES)) {
        int64_t left = MIN(n - i, NAME(LANES));
        uint8_t some[NAME(LANES)] = {0};
        char last[NAME(LANES) * 4];
        const uint8_t *c = codes + i;
        NAME(Lanes) v;
        if (left < NAME(LANES)) c = memcpy(some, c, (size_t)left);
        if (w->table) v = NAME(gather)(w->table, c) * scale;
        else v = NAME(integers)(c) * scale * (float)(1.0 / 127.0);
        if (w->offset) v = v + *w->offset;
        NAME(finish)(v, w->dtype, dtype, left == NAME(LANES) ? out + i * size : last);
        if (left < NAME(LANES)) memcpy(out + i * size, last, (size_t)(left * size));
    }
}

/* n elements of a row from `column`, a multiple of 32, to out, past the caches if asked (and if it is aligned). The dtypes are constants where this is inlined. */
INLINE void NAME(span_as)(const Packed *w, int64_t row, int64_t column, int64_t n, int past, int dtype, char *out) {
    int64_t size = dtype == F32 ? 4 : 2, blocks = blocks_of(w), block = column / w->block;
    const uint8_t *codes = w->codes + row * bytes_of(w);
    float scales[MAX_SCALES + 1];
    (void)past;
#ifdef LANES_BF16
    int pairs = dtype == BF16 && w->dtype != F16 && w->bits == 4 && w->block % 64 == 0 && column % 128 == 0 && !w->offset;
    int64_t shift = __builtin_ctzll((uint64_t)w->block);
    __m512 table = pairs ? _mm512_loadu_ps(w->table) : _mm512_setzero_ps();
#endif
    for (int64_t stop = column + n; column < stop;) {
        int64_t end = MIN(column + PIECE, stop), first = block, i = 0;
        NAME(scales)(w, row * blocks + first, (end - 1) / w->block - first + 1, scales);
        for (int64_t next; column < end; column = next, i++) {
#ifdef LANES_BF16
            if (pairs) {
                for (; column + 128 <= end; column += 128, out += 256)
                    if (!NAME(pair4)(codes + column / 2, table, scales[(column >> shift) - first],
                                     scales[((column + 64) >> shift) - first], past, out)) break;
                block = column >> shift, i = block - first;
                if (column == end) break;
            }
#endif
            next = MIN((block + 1) * w->block, end);
            __builtin_prefetch(codes + column * w->bits / 8 + AHEAD);
            if (w->bits == 4) NAME(block4)(w, codes + column / 2, next - column, scales[i], dtype, out);
            else NAME(block8)(w, codes + column, next - column, scales[i], dtype, out);
            out += (next - column) * size;
            block += next == (block + 1) * w->block;
        }
    }
}

static void NAME(span)(const Packed *given, int64_t row, int64_t column, int64_t n, int past, int dtype, void *out) {
    Packed w = *given;
#define AS(OWN, DTYPE) if (w.dtype == OWN && dtype == DTYPE) { w.dtype = OWN; NAME(span_as)(&w, row, column, n, past, DTYPE, out); }
    AS(F32, F32) else AS(BF16, F32) else AS(F16, F32)
    else AS(F32, BF16) else AS(BF16, BF16) else AS(F16, BF16)
    else AS(F32, F16) else AS(BF16, F16) else AS(F16, F16)
#undef AS
}

static void NAME(decode)(void *data, int64_t unit, void *scratch) {
    const Decode *d = data;
    int64_t pieces = pieces_of(d->width), row = unit / pieces, at = unit % pieces * PIECE;
    size_t size = d->dtype == F32 ? 4 : 2;
    (void)scratch;
    NAME(span)(&d->w, d->row + row, d->column + at, MIN(PIECE, d->width - at), d->past, d->dtype,
               (char *)d->out + (size_t)(row * d->stride + at) * size);
#ifdef LANES_BF16
    if (d->past) _mm_sfence(); /* such writes are not ordered by themselves with what tells others that they are done */
#endif
}
