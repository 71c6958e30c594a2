/* Values of additive quantisation: the sum of a vector of each stage, the first stage first, times the scale. A part of
   a row is summed into the first cache, then scaled and rounded. The vectors, 8 KiB a stage, stay in that cache. */

enum { NAME(PART) = 256 }; /* elements */
typedef float NAME(Eight) __attribute__((vector_size(32), aligned(4), may_alias));

/* Sum the vectors of groups of eight elements. `stages` is a constant where this is inlined. */
INLINE void NAME(sum_eights)(const float *vectors, const uint8_t *codes, int64_t groups, int stages, float *out) {
    for (int64_t g = 0; g < groups; g++, codes += stages) {
        NAME(Eight) sum = *(const NAME(Eight) *)(vectors + codes[0] * 8);
        for (int s = 1; s < stages; s++) sum += *(const NAME(Eight) *)(vectors + (s * CODES + codes[s]) * 8);
        *(NAME(Eight) *)(out + 8 * g) = sum;
    }
}

/* Sum the vectors of groups of `dim` elements. */
INLINE void NAME(sum_groups)(const Packed *w, const uint8_t *codes, int64_t groups, float *out) {
    const int64_t dim = w->dim;
    for (int64_t g = 0; g < groups; g++, codes += w->stages, out += dim)
        for (int s = 0; s < w->stages; s++) {
            const float *vector = w->vectors + (s * CODES + codes[s]) * dim;
            for (int64_t k = 0; k < dim; k++) out[k] = s ? out[k] + vector[k] : vector[k];
        }
}

/* Decode n elements of a row from `column`. `own` and `dtype` are constants where this is inlined. */
INLINE void NAME(sum_as)(const Packed *w, int own, int64_t row, int64_t column, int64_t n, int dtype, char *out) {
    const int64_t dim = w->dim, size = size_of(dtype), block = w->block;
    const uint8_t *codes = w->codes + row * bytes_of(w);
    const float *scales = (const float *)w->scale + row * blocks_of(w);
    float values[NAME(PART) + 2 * MOST_DIM + LANES];
    for (int64_t stop = column + n, count; column < stop; column += count, out += count * size) {
        count = MIN(stop - column, NAME(PART));
        int64_t first = column / dim, groups = (column + count - 1) / dim + 1 - first;
        const uint8_t *from = codes + first * w->stages;
        if (dim == 8 && w->stages == 2) NAME(sum_eights)(w->vectors, from, groups, 2, values);
        else if (dim == 8 && w->stages == 3) NAME(sum_eights)(w->vectors, from, groups, 3, values);
        else NAME(sum_groups)(w, from, groups, values);
        float *v = values + (column - first * dim);
        for (int64_t i = 0, end; i < count; i = end) { /* the part of a block, whose end may be that of a vector */
            int64_t at = (column + i) / block;
            end = MIN(count, (at + 1) * block - column);
            for (; i + LANES <= end; i += LANES) {
                Lanes some;
                memcpy(&some, v + i, sizeof some);
                NAME(finish)(some * scales[at], own, dtype, out + i * size);
            }
            if (i < end) {
                char last[LANES * 4];
                Lanes some;
                memcpy(&some, v + i, sizeof some);
                NAME(finish)(some * scales[at], own, dtype, last);
                memcpy(out + i * size, last, (size_t)((end - i) * size));
            }
        }
    }
}

static void NAME(sum_vectors)(const Packed *w, int64_t row, int64_t column, int64_t n, int dtype, void *out) {
#define AS(OWN, DTYPE) if (w->dtype == OWN && dtype == DTYPE) NAME(sum_as)(w, OWN, row, column, n, DTYPE, out);
    AS(F32, F32) else AS(BF16, F32) else AS(F16, F32)
    else AS(F32, BF16) else AS(BF16, BF16) else AS(F16, BF16)
    else AS(F32, F16) else AS(BF16, F16) else AS(F16, F16)
#undef AS
}

#ifdef LANES_BF16
/* The same in bf16 for a product: 32 elements, four vectors of each stage, are rounded by one instruction, which flushes
   denormals. `stages` is a constant where this is inlined. */
INLINE void NAME(sum_halves_of)(const Packed *w, int64_t row, int64_t column, int64_t n, int stages, uint16_t *out) {
    const uint8_t *codes = w->codes + row * bytes_of(w) + column / 8 * stages;
    const float *scales = (const float *)w->scale + row * blocks_of(w), *v = w->vectors;
    int64_t block = column / w->block, end = (block + 1) * w->block - column;
    for (int64_t i = 0; i < n; i += 32, codes += 4 * stages) {
        if (i == end) block++, end += w->block;
        __m512 sum[2];
        UNROLLED(h, 2) UNROLLED(s, stages) {
            const float *table = v + s * CODES * 8;
            const uint8_t *at = codes + 2 * h * stages + s;
            __m512 low = _mm512_castps256_ps512(_mm256_loadu_ps(table + at[0] * 8));
            __m512 both = _mm512_insertf32x8(low, _mm256_loadu_ps(table + at[stages] * 8), 1);
            sum[h] = s ? _mm512_add_ps(sum[h], both) : both;
        }
        __m512 scale = _mm512_set1_ps(scales[block]);
        __m512bh halves = _mm512_cvtne2ps_pbh(_mm512_mul_ps(sum[1], scale), _mm512_mul_ps(sum[0], scale));
        _mm512_storeu_si512(out + i, (__m512i)halves);
        __builtin_prefetch(codes + 1024);
    }
}
#endif

/* The same for a product in bf16: a part in whole vectors, and the rest. */
static void NAME(sum_halves)(const Packed *w, int64_t row, int64_t column, int64_t n, uint16_t *out) {
    int64_t whole = 0;
#ifdef LANES_BF16
    int plain = w->dtype == BF16 && w->dim == 8 && (w->block % 32 == 0 || w->block >= w->width);
    if (plain && (w->stages == 2 || w->stages == 3)) {
        whole = n / 32 * 32;
        if (w->stages == 2) NAME(sum_halves_of)(w, row, column, whole, 2, out);
        else NAME(sum_halves_of)(w, row, column, whole, 3, out);
    }
#endif
    NAME(sum_vectors)(w, row, column + whole, n - whole, BF16, out + whole);
}
