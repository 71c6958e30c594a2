/* The vector vocabulary of one instruction set, for what plain C cannot express. Included once for each.

   Lanes, Bits        a vector of LANES floats, and one of as many u32
   COLUMNS            rows of x whose sums with four rows of the weight fit the registers (gemv.h)
   VECS, SUMS         vectors of a panel, and vectors of sums that fit the registers (gemm.h)
   FMA(a, b, c)       a * b + c, fused if the instruction set can
   DOT(a, b, c)       the same over pairs of bf16, two to a lane; only with LANES_BF16
   larger, either     the larger of two, the second if one is NaN; a where the mask is set and b elsewhere
   to_f16, from_f16   conversions, to nearest even
   halve              stores the lower halves of Bits
   integers, gather   LANES bytes as signed integers in float, and their values in a table of 256
   smaller, root      the smaller of two, the second if one is NaN; square roots
   greater            the larger of two signed integers
   narrow4            stores four vectors of signed integers as bytes, limited to 0 and 255
   high_half          the upper half of (u - from) * by for u < 2^16, with 0 for u < from
   entry8             the entries of a table of eight floats by the lower three bits
   sum4, transpose    the sums of four vectors; LANES rows of LANES words, with stride `apart`, as columns
   Table16/32         a table of 16 values of 16 or 32 bits, in registers
   lookup16/32        the values of the 32 codes of 16 bytes, two codes a byte, the first in the high half

   A look-up is one permutation of the table by the codes (AVX-512), or one byte shuffle for each byte of the value
   (AVX2, NEON). The compiler vectorises everything else. */

#if defined(LANES_AVX512)
enum { LANES = 16, NAME(COLUMNS) = 6, VECS = 4, SUMS = 24 };
#define FMA(a, b, c) ((Lanes)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
#elif defined(LANES_AVX2)
enum { LANES = 8, NAME(COLUMNS) = 3, VECS = 2, SUMS = 12 };
#define FMA(a, b, c) ((Lanes)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#elif defined(LANES_NEON)
enum { LANES = 4, NAME(COLUMNS) = 4, VECS = 4, SUMS = 24 };
#define FMA(a, b, c) ((Lanes)vfmaq_f32((float32x4_t)(c), (float32x4_t)(a), (float32x4_t)(b)))
#else
enum { LANES = 4, NAME(COLUMNS) = 2, VECS = 2, SUMS = 12 };
#define FMA(a, b, c) ((Lanes)((a) * (b) + (c)))
#endif

typedef float Lanes __attribute__((vector_size(LANES * 4), may_alias));
typedef uint32_t Bits __attribute__((vector_size(LANES * 4), may_alias));
typedef int32_t Ints __attribute__((vector_size(LANES * 4), may_alias));
typedef uint16_t NAME(Halves) __attribute__((vector_size(LANES * 2), may_alias));

#ifdef LANES_BF16
#define DOT(a, b, c) ((Lanes)_mm512_dpbf16_ps((__m512)(c), (__m512bh)(a), (__m512bh)(b)))
#define BY_HALF(half, f, ...) if (half) f(__VA_ARGS__, 1); else f(__VA_ARGS__, 0); /* `half` as a constant */
#else
#define DOT(a, b, c) (c)
#define BY_HALF(half, f, ...) f(__VA_ARGS__, 0);
#endif

INLINE Lanes NAME(either)(Bits mask, Lanes a, Lanes b) { return (Lanes)((mask & (Bits)a) | (~mask & (Bits)b)); }

#if !defined(LANES_AVX512) && !defined(LANES_AVX2)

INLINE Lanes NAME(larger)(Lanes a, Lanes b) { return NAME(either)((Bits)(a > b), a, b); }
INLINE Bits NAME(to_f16)(Lanes x) { /* as to_f16 of floats.h */
    Bits u = (Bits)x, doubled = u + u, bias = doubled & 0xff000000;
    Bits low = (Bits)(bias < 0x71000000), nan = (Bits)(doubled > 0xff000000);
    Lanes base = ((Lanes)(u & 0x7fffffff) * 0x1p+112f) * 0x1p-110f;
    bias = (low & 0x71000000) | (~low & bias);
    u = u >> 16 & 0x8000;
    bias = (Bits)((Lanes)((bias >> 1) + 0x07800000) + base);
    bias = (bias >> 13 & 0x7c00) + (bias & 0x0fff);
    return u | (nan & 0x7e00) | (~nan & bias);
}

INLINE Lanes NAME(from_f16)(Bits h) {
    Bits u = h << 16, doubled = u + u, small = (Bits)(doubled < 0x08000000);
    Bits normal = (Bits)((Lanes)((doubled >> 4) + 0x70000000) * 0x1p-112f);
    Bits tiny = (Bits)((Lanes)(doubled >> 17 | 0x3f000000) - 0.5f);
    return (Lanes)((u & 0x80000000) | (small & tiny) | (~small & normal));
}

INLINE Lanes NAME(smaller)(Lanes a, Lanes b) { return NAME(either)((Bits)(a < b), a, b); }
INLINE Lanes NAME(root)(Lanes x) {
    for (int i = 0; i < LANES; i++) x[i] = sqrtf(x[i]);
    return x;
}
INLINE Ints NAME(greater)(Ints a, Ints b) { return (Ints)NAME(either)((Bits)(a > b), (Lanes)a, (Lanes)b); }
INLINE void NAME(narrow4)(const Bits *v, uint8_t *out) {
    for (int i = 0; i < 4 * LANES; i++) out[i] = (uint8_t)MIN(MAX((int32_t)v[i / LANES][i % LANES], 0), 255);
}
INLINE Bits NAME(high_half)(Bits u, uint32_t from, uint32_t by) {
    return (((u - from) & (Bits)((Ints)u > (Ints)((Bits){0} + from))) * by) >> 16;
}
INLINE Lanes NAME(entry8)(const float *table, Bits at) {
    Lanes v;
    for (int i = 0; i < LANES; i++) v[i] = table[at[i] & 7];
    return v;
}
INLINE void NAME(halve)(Bits v, void *out) {
    for (int i = 0; i < LANES; i++) ((uint16_t *)out)[i] = (uint16_t)v[i];
}
INLINE Lanes NAME(integers)(const uint8_t *c) {
    Lanes v;
    for (int i = 0; i < LANES; i++) v[i] = (float)(int8_t)c[i];
    return v;
}
INLINE Lanes NAME(gather)(const float *table, const uint8_t *c) {
    Lanes v;
    for (int i = 0; i < LANES; i++) v[i] = table[c[i]];
    return v;
}
INLINE void NAME(sum4)(const Lanes *v, float *totals) {
    for (int i = 0; i < 4; i++) {
        totals[i] = 0.0f;
        for (int k = 0; k < LANES; k++) totals[i] += v[i][k];
    }
}

#endif

#ifndef LANES_AVX512
INLINE void NAME(transpose)(const uint32_t *in, int64_t apart, Bits *out) {
    for (int k = 0; k < LANES; k++) {
        Bits column = {0};
        for (int i = 0; i < LANES; i++) column[i] = in[i * apart + k];
        out[k] = column;
    }
}
#endif

#if defined(LANES_AVX512)

INLINE void NAME(transpose)(const uint32_t *in, int64_t apart, Bits *out) {
    __m512i a[16], b[16];
    UNROLLED(i, 16) a[i] = _mm512_loadu_si512(in + i * apart);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]), b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4)
        UNROLLED(k, 2) { /* columns 2k and 2k + 1 of each quarter of rows i .. i + 3 */
            a[i + 2 * k] = _mm512_unpacklo_epi64(b[i + k], b[i + k + 2]);
            a[i + 2 * k + 1] = _mm512_unpackhi_epi64(b[i + k], b[i + k + 2]);
        }
    UNROLLED(k, 4) { /* column k of each quarter, quarters 0 and 2 of all rows, then 1 and 3 */
        __m512i even = _mm512_shuffle_i32x4(a[k], a[k + 4], 0x88), odd = _mm512_shuffle_i32x4(a[k], a[k + 4], 0xdd);
        __m512i even8 = _mm512_shuffle_i32x4(a[k + 8], a[k + 12], 0x88), odd8 = _mm512_shuffle_i32x4(a[k + 8], a[k + 12], 0xdd);
        out[k] = (Bits)_mm512_shuffle_i32x4(even, even8, 0x88);
        out[k + 4] = (Bits)_mm512_shuffle_i32x4(odd, odd8, 0x88);
        out[k + 8] = (Bits)_mm512_shuffle_i32x4(even, even8, 0xdd);
        out[k + 12] = (Bits)_mm512_shuffle_i32x4(odd, odd8, 0xdd);
    }
}

INLINE Lanes NAME(larger)(Lanes a, Lanes b) { return (Lanes)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE Bits NAME(to_f16)(Lanes x) {
    return (Bits)_mm512_cvtepu16_epi32(_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
}
INLINE Lanes NAME(from_f16)(Bits h) { return (Lanes)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)h)); }

INLINE Lanes NAME(smaller)(Lanes a, Lanes b) { return (Lanes)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE Lanes NAME(root)(Lanes x) { return (Lanes)_mm512_sqrt_ps((__m512)x); }
INLINE Ints NAME(greater)(Ints a, Ints b) { return (Ints)_mm512_max_epi32((__m512i)a, (__m512i)b); }
INLINE void NAME(narrow4)(const Bits *v, uint8_t *out) {
    UNROLLED(i, 4) _mm_storeu_si128((__m128i *)(out + 16 * i), _mm512_cvtusepi32_epi8(_mm512_max_epi32((__m512i)v[i], _mm512_setzero_si512())));
}
INLINE Bits NAME(high_half)(Bits u, uint32_t from, uint32_t by) {
    __m512i above = _mm512_subs_epu16((__m512i)u, _mm512_set1_epi32((int)from));
    return (Bits)_mm512_mulhi_epu16(above, _mm512_set1_epi32((int)by));
}
INLINE Lanes NAME(entry8)(const float *table, Bits at) {
    return (Lanes)_mm512_permutexvar_ps((__m512i)(at & 7), _mm512_castps256_ps512(_mm256_loadu_ps(table)));
}
INLINE void NAME(halve)(Bits v, void *out) { _mm256_storeu_si256(out, _mm512_cvtepi32_epi16((__m512i)v)); }
INLINE Lanes NAME(integers)(const uint8_t *c) {
    return (Lanes)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)c)));
}
/* Permutations of 32 table entries at a time take half the time of a gather. */
INLINE Lanes NAME(gather)(const float *table, const uint8_t *codes) {
    __m512i c = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes));
    __mmask16 bit5 = _mm512_test_epi32_mask(c, _mm512_set1_epi32(32)), bit6 = _mm512_test_epi32_mask(c, _mm512_set1_epi32(64));
    __mmask16 bit7 = _mm512_test_epi32_mask(c, _mm512_set1_epi32(128));
    __m512 v[8];
    UNROLLED(i, 8)
        v[i] = _mm512_permutex2var_ps(_mm512_loadu_ps(table + 32 * i), c, _mm512_loadu_ps(table + 32 * i + 16));
    UNROLLED(i, 4) v[i] = _mm512_mask_blend_ps(bit5, v[2 * i], v[2 * i + 1]);
    v[0] = _mm512_mask_blend_ps(bit6, v[0], v[1]);
    v[1] = _mm512_mask_blend_ps(bit6, v[2], v[3]);
    return (Lanes)_mm512_mask_blend_ps(bit7, v[0], v[1]);
}

INLINE void NAME(sum4)(const Lanes *v, float *totals) {
    __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps((__m512)v[0], (__m512)v[1]), _mm512_unpackhi_ps((__m512)v[0], (__m512)v[1]));
    __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps((__m512)v[2], (__m512)v[3]), _mm512_unpackhi_ps((__m512)v[2], (__m512)v[3]));
    __m512d low = _mm512_unpacklo_pd((__m512d)ab, (__m512d)cd), high = _mm512_unpackhi_pd((__m512d)ab, (__m512d)cd);
    __m512 all = _mm512_add_ps((__m512)low, (__m512)high);
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    _mm_storeu_ps(totals, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}

typedef __m512i Table16, Table32;

INLINE __m512i NAME(table16)(const uint16_t *t) { return _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)t)); }
INLINE __m512i NAME(table32)(const uint32_t *t) { return _mm512_loadu_si512(t); }

/* Permutations ignore index bits above the table's, so no mask is needed. */
INLINE void NAME(lookup16)(const uint8_t *codes, __m512i t, uint16_t *out) {
    __m512i c = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes));
    c = _mm512_or_si512(_mm512_srli_epi32(c, 4), _mm512_slli_epi32(c, 16));
    _mm512_storeu_si512(out, _mm512_permutexvar_epi16(c, t));
}
INLINE void NAME(lookup32)(const uint8_t *codes, __m512i t, uint32_t *out) {
    for (int i = 0; i < 2; i++) {
        __m512i c = _mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i *)(codes + 8 * i)));
        c = _mm512_or_si512(_mm512_srli_epi64(c, 4), _mm512_slli_epi64(c, 32));
        _mm512_storeu_si512(out + 16 * i, _mm512_permutexvar_epi32(c, t));
    }
}

#elif defined(LANES_AVX2)

INLINE Lanes NAME(larger)(Lanes a, Lanes b) { return (Lanes)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE Bits NAME(to_f16)(Lanes x) {
    return (Bits)_mm256_cvtepu16_epi32(_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
}
INLINE Lanes NAME(from_f16)(Bits h) {
    __m128i low = _mm256_castsi256_si128((__m256i)h), high = _mm256_extracti128_si256((__m256i)h, 1);
    return (Lanes)_mm256_cvtph_ps(_mm_packus_epi32(low, high));
}

INLINE Lanes NAME(smaller)(Lanes a, Lanes b) { return (Lanes)_mm256_min_ps((__m256)a, (__m256)b); }
INLINE Lanes NAME(root)(Lanes x) { return (Lanes)_mm256_sqrt_ps((__m256)x); }
INLINE Ints NAME(greater)(Ints a, Ints b) { return (Ints)_mm256_max_epi32((__m256i)a, (__m256i)b); }
INLINE void NAME(narrow4)(const Bits *v, uint8_t *out) {
    __m256i low = _mm256_packus_epi32((__m256i)v[0], (__m256i)v[1]), high = _mm256_packus_epi32((__m256i)v[2], (__m256i)v[3]);
    __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256((__m256i *)out, _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order));
}
INLINE Bits NAME(high_half)(Bits u, uint32_t from, uint32_t by) {
    __m256i above = _mm256_subs_epu16((__m256i)u, _mm256_set1_epi32((int)from));
    return (Bits)_mm256_mulhi_epu16(above, _mm256_set1_epi32((int)by));
}
INLINE Lanes NAME(entry8)(const float *table, Bits at) {
    return (Lanes)_mm256_permutevar8x32_ps(_mm256_loadu_ps(table), (__m256i)at);
}
INLINE void NAME(halve)(Bits v, void *out) {
    __m128i low = _mm256_castsi256_si128((__m256i)v), high = _mm256_extracti128_si256((__m256i)v, 1);
    _mm_storeu_si128(out, _mm_packus_epi32(low, high));
}
INLINE Lanes NAME(integers)(const uint8_t *c) {
    return (Lanes)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)c)));
}
INLINE Lanes NAME(gather)(const float *table, const uint8_t *c) { /* single loads take half the time of a gather */
    uint64_t q;
    memcpy(&q, c, sizeof q);
    return (Lanes){table[q & 255], table[q >> 8 & 255], table[q >> 16 & 255], table[q >> 24 & 255],
                   table[q >> 32 & 255], table[q >> 40 & 255], table[q >> 48 & 255], table[q >> 56]};
}

INLINE void NAME(sum4)(const Lanes *v, float *totals) {
    __m256 ab = _mm256_hadd_ps((__m256)v[0], (__m256)v[1]), cd = _mm256_hadd_ps((__m256)v[2], (__m256)v[3]);
    __m256 all = _mm256_hadd_ps(ab, cd);
    _mm_storeu_ps(totals, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
}

typedef struct { __m256i low, high; } Table16, Table32;

INLINE Table16 NAME(table16)(const uint16_t *t) {
    __m256i both = _mm256_loadu_si256((const __m256i *)t), byte = _mm256_set1_epi16(0xff);
    __m256i low = _mm256_packus_epi16(_mm256_and_si256(both, byte), _mm256_and_si256(both, byte));
    __m256i high = _mm256_packus_epi16(_mm256_srli_epi16(both, 8), _mm256_srli_epi16(both, 8));
    return (Table16){_mm256_permute4x64_epi64(low, 0x88), _mm256_permute4x64_epi64(high, 0x88)};
}
INLINE Table32 NAME(table32)(const uint32_t *t) {
    return (Table32){_mm256_loadu_si256((const __m256i *)t), _mm256_loadu_si256((const __m256i *)(t + 8))};
}
INLINE void NAME(lookup16)(const uint8_t *codes, Table16 t, uint16_t *out) {
    __m128i c = _mm_loadu_si128((const __m128i *)codes), four = _mm_set1_epi8(15);
    __m128i first = _mm_and_si128(_mm_srli_epi16(c, 4), four), second = _mm_and_si128(c, four);
    __m256i i = _mm256_set_m128i(_mm_unpackhi_epi8(first, second), _mm_unpacklo_epi8(first, second));
    __m256i low = _mm256_shuffle_epi8(t.low, i), high = _mm256_shuffle_epi8(t.high, i);
    __m256i even = _mm256_unpacklo_epi8(low, high), odd = _mm256_unpackhi_epi8(low, high);
    _mm256_storeu_si256((__m256i *)out, _mm256_permute2x128_si256(even, odd, 0x20));
    _mm256_storeu_si256((__m256i *)(out + 16), _mm256_permute2x128_si256(even, odd, 0x31));
}
INLINE void NAME(lookup32)(const uint8_t *codes, Table32 t, uint32_t *out) {
    for (int i = 0; i < 4; i++) {
        int32_t four;
        memcpy(&four, codes + 4 * i, 4);
        __m256i c = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(four));
        c = _mm256_or_si256(_mm256_srli_epi64(c, 4), _mm256_slli_epi64(c, 32));
        __m256 low = _mm256_castsi256_ps(_mm256_permutevar8x32_epi32(t.low, c));
        __m256 high = _mm256_castsi256_ps(_mm256_permutevar8x32_epi32(t.high, c));
        __m256 fourth = _mm256_castsi256_ps(_mm256_slli_epi32(c, 28)); /* bit 3 of the code as a sign */
        _mm256_storeu_ps((float *)out + 8 * i, _mm256_blendv_ps(low, high, fourth));
    }
}

#elif defined(LANES_NEON)

#define LOOKUP(SIZE, BYTES)                                                                                        \
    typedef uint8x16x##BYTES##_t Table##SIZE;                                                                      \
    INLINE Table##SIZE NAME(table##SIZE)(const uint##SIZE##_t *t) { return vld##BYTES##q_u8((const uint8_t *)t); } \
    INLINE void NAME(lookup##SIZE)(const uint8_t *codes, Table##SIZE t, uint##SIZE##_t *out) {                     \
        const uint8x16_t c = vld1q_u8(codes);                                                                      \
        const uint8x16x2_t i = vzipq_u8(vshrq_n_u8(c, 4), vandq_u8(c, vdupq_n_u8(15)));                            \
        for (int k = 0; k < 2; k++) {                                                                              \
            Table##SIZE value;                                                                                     \
            UNROLLED(b, BYTES) value.val[b] = vqtbl1q_u8(t.val[b], i.val[k]);                                      \
            vst##BYTES##q_u8((uint8_t *)(out + 16 * k), value);                                                    \
        }                                                                                                          \
    }
LOOKUP(16, 2)
LOOKUP(32, 4)
#undef LOOKUP

#else

#define LOOKUP(SIZE)                                                                                   \
    typedef const uint##SIZE##_t *Table##SIZE;                                                         \
    INLINE Table##SIZE NAME(table##SIZE)(Table##SIZE t) { return t; }                                  \
    INLINE void NAME(lookup##SIZE)(const uint8_t *codes, Table##SIZE t, uint##SIZE##_t *out) {         \
        for (int i = 0; i < 16; i++) out[2 * i] = t[codes[i] >> 4], out[2 * i + 1] = t[codes[i] & 15]; \
    }
LOOKUP(16)
LOOKUP(32)
#undef LOOKUP

#endif
