/* What attention is made of, for one instruction set: operands of its products, and these.

   Tokens lie somewhere, and are prepared for a product in one of three ways:

     rows      [rows][words]       the inner dimension in words, broadcast one after another
     across    [words][PANEL]      the transpose: the same words, of PANEL rows beside each other
     down      [words][columns]    rows as words: in bf16 two rows beside each other; in panels of columns

   The products are those of gemm.h: rows of words by panels, six rows at a time. In float32 a word is an element,
   and `half`, a constant where a function is inlined, is 0 throughout. */

enum { NAME(QUERIES) = (NAME(PANEL) + SIX - 1) / SIX * SIX }; /* rows of a panel's results */

typedef struct { /* sizes of an attention, in elements and words */
    int64_t words, inner, columns, tokens, each; /* of e; of e in whole vectors; e and t as they are padded; a word */
} NAME(Sizes);

INLINE NAME(Sizes) NAME(sizes)(const Attention *a) {
    int64_t each = a->half ? 2 : 1, words = (a->e + each - 1) / each;
    return (NAME(Sizes)){words, padded_to(words, NAME(LANES)), padded_to(a->e, NAME(LANES)), padded_to(a->t, KEYS), each};
}

/* sums [count][vecs] +=, or = where they are fresh, `count` rows of words by a panel; `count` is a multiple of SIX. Not
   inlined: every call would be so many products of the compiler's. */
#define PRODUCT(name, half, fresh)                                                                                     \
    static __attribute__((noinline, unused)) void NAME(name)(const uint32_t *rows, int64_t apart, int64_t count,       \
                                                             const uint32_t *panel, int vecs, int64_t n, float *sums) { \
        for (int64_t r = 0; r < count; r += SIX, rows += SIX * apart, sums += SIX * vecs * NAME(LANES))                \
            switch (vecs) { VECS(1, half, fresh) VECS(2, half, fresh) VECS(3, half, fresh) VECS(4, half, fresh) }      \
    }
#define VECS(N, half, fresh)                                                                                           \
    case N:                                                                                                            \
        if (N <= NAME(VECS)) NAME(micro)(rows, apart, panel, n, SIX, MIN(N, NAME(VECS)), half, fresh, sums);           \
        break;
PRODUCT(add_floats, 0, 0)
PRODUCT(set_floats, 0, 1)
PRODUCT(add_halves, 1, 0)
PRODUCT(set_halves, 1, 1)
#undef VECS
#undef PRODUCT

/* Scores, or the like: rows of tokens by a panel of others. */
INLINE void NAME(scores)(const uint32_t *rows, int64_t apart, int64_t count, const uint32_t *across, int64_t n, int half,
                         float *sums) {
    (half ? NAME(set_halves) : NAME(set_floats))(rows, apart, count, across, NAME(VECS), n, sums);
}

/* sums [high][columns] from `row` on += rows by [tall][columns] words of tokens, down, from `from` on: a panel of columns
   after the other. */
INLINE void NAME(columns)(const uint32_t *rows, int64_t apart, int64_t count, const uint32_t *down, int64_t tall,
                          int64_t from, int64_t n, int64_t columns, int half, float *sums, int64_t high, int64_t row) {
    for (int64_t c = 0; c < columns; c += NAME(PANEL)) {
        int64_t width = MIN(columns - c, NAME(PANEL));
        (half ? NAME(add_halves) : NAME(add_floats))(rows, apart, count, down + c * tall + from * width,
                                                     (int)(width / NAME(LANES)), n, sums + c * high + row * width);
    }
}

/* Token i as words, and zeros up to whole vectors; of tokens behind the last all zeros. */
INLINE void NAME(token)(const Attention *a, const void *x, const int64_t *stride, int64_t i, int half, uint32_t *out) {
    NAME(Sizes) s = NAME(sizes)(a);
    if (i < a->t) NAME(words)(x, a->dtype, i * stride[2], a->e, half, out);
    else memset(out, 0, (size_t)s.inner * 4);
}

/* n tokens from `start` as rows. */
INLINE void NAME(rows)(const Attention *a, const void *x, const int64_t *stride, int64_t start, int64_t n, int half,
                       uint32_t *out) {
    for (int64_t i = 0; i < n; i++) NAME(token)(a, x, stride, start + i, half, out + i * NAME(sizes)(a).inner);
}

/* Rows of a panel's tokens [PANEL][inner] across. */
INLINE void NAME(across)(const uint32_t *rows, int64_t inner, uint32_t *out) {
    for (int64_t v = 0; v < NAME(PANEL); v += NAME(LANES))
        for (int64_t k = 0; k < inner; k += NAME(LANES)) {
            NAME(Bits) columns[NAME(LANES)];
            NAME(transpose)(rows + v * inner + k, inner, columns);
            for (int i = 0; i < NAME(LANES); i++) memcpy(out + (k + i) * NAME(PANEL) + v, &columns[i], sizeof *columns);
        }
}

/* Rows of n tokens [n][inner] down, n being even; panels are n words, or half as many, from each other. */
INLINE void NAME(down)(const uint32_t *rows, int64_t inner, int64_t n, int64_t columns, int half, uint32_t *out) {
    int64_t each = half ? 2 : 1, tall = n / each;
    for (int64_t c = 0; c < columns; c += NAME(PANEL), out += NAME(PANEL) * tall) {
        int64_t width = MIN(columns - c, NAME(PANEL));
        for (int64_t k = 0; k < tall; k++) {
            uint32_t *to = out + k * width;
            if (half) {
                const uint16_t *first = (const uint16_t *)(rows + 2 * k * inner) + c, *second = first + 2 * inner;
                for (int64_t i = 0; i < width; i++) to[i] = first[i] | (uint32_t)second[i] << 16;
            } else memcpy(to, rows + k * inner + c, (size_t)width * 4);
        }
    }
}

/* Which of a vector of queries from q on see key k: all bits, or none. */
INLINE NAME(Bits) NAME(seen)(const int32_t *labels, int64_t k, int64_t q) {
    NAME(Bits) place, label;
    for (int i = 0; i < NAME(LANES); i++) place[i] = (uint32_t)(q + i);
    NAME(Bits) seen = (NAME(Bits))(place >= (NAME(Bits)){0} + (uint32_t)k);
    if (!labels) return seen;
    memcpy(&label, labels + q, sizeof label);
    return seen & (NAME(Bits))(label == (NAME(Bits)){0} + (uint32_t)labels[k]);
}

/* Two vectors of queries as words: two keys beside each other. */
INLINE NAME(Bits) NAME(couple)(NAME(Lanes) first, NAME(Lanes) second) {
#ifdef LANES_BF16
    __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)first));
    __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)second));
    return (NAME(Bits))_mm512_or_si512(low, _mm512_slli_epi32(high, 16));
#else
    return (void)second, (NAME(Bits))first;
#endif
}

/* A vector of queries of one key as words of a row. */
INLINE void NAME(single)(NAME(Lanes) x, int half, uint32_t *out) {
#ifdef LANES_BF16
    if (half) { _mm256_storeu_si256((__m256i *)out, (__m256i)_mm512_cvtneps_pbh((__m512)x)); return; }
#endif
    (void)half, memcpy(out, &x, sizeof x);
}

/* Words [n][PANEL] turned to rows [PANEL][apart]. */
INLINE void NAME(turn)(const uint32_t *words, int64_t n, int64_t apart, uint32_t *out) {
    for (int64_t k = 0; k < n; k += NAME(LANES))
        for (int64_t q = 0; q < NAME(PANEL); q += NAME(LANES)) {
            NAME(Bits) columns[NAME(LANES)];
            NAME(transpose)(words + k * NAME(PANEL) + q, NAME(PANEL), columns);
            for (int i = 0; i < NAME(LANES); i++) memcpy(out + (q + i) * apart + k, &columns[i], sizeof *columns);
        }
}

/* Sums [high][columns], panel after panel, times a factor for every row, to tokens of x from `start` on. */
INLINE void NAME(results)(const Attention *a, const float *sums, int64_t high, const float *factor, int64_t n, void *x,
                        const int64_t *stride, int64_t start) {
    float row[NAME(PANEL)];
    int64_t columns = NAME(sizes)(a).columns;
    for (int64_t c = 0; c < columns; c += NAME(PANEL)) {
        int64_t width = MIN(columns - c, NAME(PANEL)), there = MIN(a->e - c, NAME(PANEL));
        for (int64_t i = 0; i < n; i++) {
            for (int64_t k = 0; k < width; k++) row[k] = sums[c * high + i * width + k] * (factor ? factor[i] : 1.0f);
            NAME(halves)(row, there, a->dtype, x, (start + i) * stride[2] + c);
        }
    }
}
