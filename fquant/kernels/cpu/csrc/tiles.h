/* The operands and products of attention. Tokens are prepared for a product in one of three layouts:

     rows      [rows][words]       the inner dimension in words, which are broadcast
     across    [words][PANEL]      the transpose: the same words, of PANEL rows beside each other
     down      [words][columns]    tokens as words: in bf16 two tokens interleaved; in panels of columns

   The products are those of gemm.h, six rows at a time. `half` is a constant where a function is inlined. */

enum { QUERIES = (PANEL + SIX - 1) / SIX * SIX }; /* rows of results for a panel */

/* words: of e; inner: in whole vectors; columns, tokens: e and t, padded; each: elements of a word */
typedef struct { int64_t words, inner, columns, tokens, each; } Sizes;

INLINE Sizes NAME(sizes)(const Attention *a) {
    int64_t each = a->half ? 2 : 1, words = (a->e + each - 1) / each;
    return (Sizes){words, padded_to(words, LANES), padded_to(a->e, LANES), padded_to(a->t, KEYS), each};
}

/* sums [count][vecs] += (= if fresh) `count` rows, a multiple of SIX, times a panel. Not inlined: it would be long. */
#define PRODUCT(name, half, fresh)                                                                                      \
    static __attribute__((noinline, unused)) void NAME(name)(const uint32_t *rows, int64_t apart, int64_t count,        \
                                                             const uint32_t *panel, int vecs, int64_t n, float *sums) { \
        if (NAME(TILES) && half) {                                                                                      \
            NAME(add_half_tiles)(rows, apart, count, panel, vecs, n, fresh, sums);                                      \
            return;                                                                                                     \
        }                                                                                                               \
        for (int64_t r = 0; r < count; r += SIX, rows += SIX * apart, sums += SIX * vecs * LANES)                       \
            switch (vecs) { CASE(1, half, fresh) CASE(2, half, fresh) CASE(3, half, fresh) CASE(4, half, fresh) }       \
    }
#define CASE(N, half, fresh) \
    case N: if (N <= VECS) NAME(micro)(rows, apart, panel, n, SIX, MIN(N, VECS), half, fresh, sums); break;
PRODUCT(add_floats, 0, 0)
PRODUCT(set_floats, 0, 1)
PRODUCT(add_halves, 1, 0)
PRODUCT(set_halves, 1, 1)
#undef CASE
#undef PRODUCT

INLINE void NAME(scores)(const uint32_t *rows, int64_t apart, int64_t count, const uint32_t *across, int64_t n, int half,
                         float *sums) {
    (half ? NAME(set_halves) : NAME(set_floats))(rows, apart, count, across, VECS, n, sums);
}

/* sums [high][columns] from `row` on += rows times the words [tall][columns] of tokens, down, from `from` on. */
INLINE void NAME(columns)(const uint32_t *rows, int64_t apart, int64_t count, const uint32_t *down, int64_t tall,
                          int64_t from, int64_t n, int64_t columns, int half, float *sums, int64_t high, int64_t row) {
    for (int64_t c = 0; c < columns; c += PANEL) {
        int64_t width = MIN(columns - c, PANEL);
        (half ? NAME(add_halves) : NAME(add_floats))(rows, apart, count, down + c * tall + from * width,
                                                     (int)(width / LANES), n, sums + c * high + row * width);
    }
}

/* Copy n tokens of a head from `start` as rows, padded with zeros to whole vectors; those after the last are zeros. */
INLINE void NAME(rows)(const Attention *a, const void *x, const int64_t *stride, int64_t head, int64_t start, int64_t n,
                       int half, uint32_t *out) {
    const int64_t inner = NAME(sizes)(a).inner;
    for (int64_t i = start; i < start + n; i++, out += inner)
        if (i < a->t) NAME(words)(x, a->dtype, head + i * stride[2], a->e, half, out);
        else memset(out, 0, (size_t)inner * 4);
}

/* Transpose words [high][wide], both whole vectors, to rows with stride `apart`: for example, rows to across. */
INLINE void NAME(across)(const uint32_t *words, int64_t high, int64_t wide, int64_t apart, uint32_t *out) {
    for (int64_t i = 0; i < high; i += LANES)
        for (int64_t k = 0; k < wide; k += LANES)
            NAME(turn)(words + i * wide + k, wide, LANES, out + k * apart + i, apart);
}

/* Rearrange rows of n tokens [n][inner], n even, to down; panels have n rows of words, or half as many. */
INLINE void NAME(down)(const uint32_t *rows, int64_t inner, int64_t n, int64_t columns, int half, uint32_t *out) {
    int64_t each = half ? 2 : 1, tall = n / each;
    for (int64_t c = 0; c < columns; c += PANEL, out += PANEL * tall) {
        int64_t width = MIN(columns - c, PANEL);
        for (int64_t k = 0; k < tall; k++) {
            uint32_t *to = out + k * width;
            if (half) {
                const uint16_t *first = (const uint16_t *)(rows + 2 * k * inner) + c, *second = first + 2 * inner;
                for (int64_t i = 0; i < width; i++) to[i] = first[i] | (uint32_t)second[i] << 16;
            } else memcpy(to, rows + k * inner + c, (size_t)width * 4);
        }
    }
}

/* A mask of the vector of queries from q on that see key k. */
INLINE Bits NAME(seen)(const Attention *a, const int32_t *labels, int64_t k, int64_t q) {
    Bits place, label;
    for (int i = 0; i < LANES; i++) place[i] = (uint32_t)(q + i);
    Bits seen = (Bits)(place >= (Bits){0} + (uint32_t)(a->causal ? k : 0));
    if (k >= a->t) seen = (Bits){0}; /* behind the last key */
    if (a->window) seen &= (Bits)(place < (Bits){0} + (uint32_t)(k + a->window));
    if (!labels) return seen;
    memcpy(&label, labels + q, sizeof label);
    return seen & (Bits)(label == (Bits){0} + (uint32_t)labels[k]);
}

/* Combine the weights of two keys for a vector of queries to words. */
INLINE Bits NAME(couple)(Lanes first, Lanes second) {
#ifdef LANES_BF16
    __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)first));
    __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)second));
    return (Bits)_mm512_or_si512(low, _mm512_slli_epi32(high, 16));
#else
    return (void)second, (Bits)first;
#endif
}

/* Store a key's weights for a vector of queries as words of a row. */
INLINE void NAME(single)(Lanes x, int half, uint32_t *out) {
#ifdef LANES_BF16
    if (half) _mm256_storeu_si256((__m256i *)out, (__m256i)_mm512_cvtneps_pbh((__m512)x));
    else
#endif
        (void)half, memcpy(out, &x, sizeof x);
}

/* Store sums [high][columns], panel by panel, times a factor for each row, as n tokens of a head from `start` on. */
INLINE void NAME(results)(const Attention *a, const float *sums, int64_t high, const float *factor, int64_t n, void *x,
                          const int64_t *stride, int64_t head, int64_t start) {
    float row[PANEL];
    int64_t columns = NAME(sizes)(a).columns;
    for (int64_t c = 0; c < columns; c += PANEL) {
        int64_t width = MIN(columns - c, PANEL), there = MIN(a->e - c, PANEL);
        for (int64_t i = 0; i < n; i++) {
            for (int64_t k = 0; k < width; k++) row[k] = sums[c * high + i * width + k] * (factor ? factor[i] : 1.0f);
            NAME(halves)(row, there, a->dtype, x, head + (start + i) * stride[2] + c);
        }
    }
}
