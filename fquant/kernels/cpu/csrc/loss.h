/* The negative log likelihood of rows of logits, and its gradient.

   A row is read once for its maximum and its sum of exponentials, a PIECE after the other. If a piece exceeds all
   before it, the sum so far is scaled down. For the gradient the row is read again, from the second cache. Elements are
   float32. Partial sums, and the values of a row, are added in double, so the error does not grow with the vocabulary. */

/* OVER: run `each` for every vector x of n logits at `from`; k counts four accumulators in turn. */
#define OVER(each)                                                                             \
    int64_t i = 0;                                                                             \
    for (; i + 4 * LANES <= n; i += 4 * LANES)                                                 \
        UNROLLED(k, 4) {                                                                       \
            Lanes x = NAME(wide)(from + (i + k * LANES) * size_of(dtype), dtype, LANES, 0.0f); \
            each                                                                               \
        }                                                                                      \
    for (int k = 0; i < n; i += LANES, k = (k + 1) % 4) {                                      \
        Lanes x = NAME(wide)(from + i * size_of(dtype), dtype, n - i, -INFINITY);              \
        each                                                                                   \
    }

/* The largest logit that is not NaN. */
INLINE float NAME(largest)(const char *from, const int dtype, int64_t n) {
    const Lanes zero = {0.0f};
    Lanes v[4] = {zero - INFINITY, zero - INFINITY, zero - INFINITY, zero - INFINITY};
    OVER(v[k] = NAME(larger)(x, v[k]);)
    v[0] = NAME(larger)(NAME(larger)(v[0], v[1]), NAME(larger)(v[2], v[3]));
    float most = v[0][0];
    for (int k = 1; k < LANES; k++) most = MAX(most, v[0][k]);
    return most;
}

/* The sum of exp(x - base) <= 1 for at most SUMMED logits: 16 roundings in a lane. */
enum { NAME(SUMMED) = 64 * LANES };
INLINE double NAME(exponentials)(const char *from, const int dtype, int64_t n, float base) {
    Lanes v[4] = {{0.0f}};
    OVER(v[k] += NAME(exponential)(x - base);)
    v[0] = (v[0] + v[1]) + (v[2] + v[3]);
    double total = 0.0;
    for (int k = 0; k < LANES; k++) total += v[0][k];
    return total;
}

static int NAME(has_nan)(const char *from, const int dtype, int64_t n) {
    Bits v[4] = {{0}};
    int found = 0;
    OVER(v[k] |= (Bits)(x != x);)
    for (int k = 0; k < 4 * LANES; k++) found |= v[k / LANES][k % LANES] != 0;
    return found;
}

/* Store scale * exp(x - base) for n logits in their dtype. */
INLINE void NAME(scaled)(const char *from, const int dtype, int64_t n, float base, float scale, char *to) {
    EVERY(NAME(exponential)(AT(from, -INFINITY) - base) * scale)
}

#undef OVER

INLINE void NAME(row)(const Loss *w, int64_t i, const int dtype) {
    const int64_t size = size_of(dtype), n = w->width, target = w->targets[i];
    const char *x = (const char *)w->logits + i * w->apart * size;
    char *slope = w->slope ? (char *)w->slope + i * n * size : NULL;
    if (target == w->ignore) {
        w->nll[i] = 0.0f;
        if (slope) memset(slope, 0, (size_t)(n * size));
        return;
    }
    float most = -INFINITY, chosen;
    double total = 0.0, factor = w->factor ? w->factor[i] : 1.0;
    for (int64_t at = 0; at < n && most < INFINITY; at += PIECE) {
        int64_t some = MIN(PIECE, n - at);
        float here = NAME(largest)(x + at * size, dtype, some);
        if (here > most) total *= exp((double)most - here), most = here;
        const float base = isinf(most) ? 0.0f : most;
        for (int64_t k = at; k < at + some; k += NAME(SUMMED))
            total += NAME(exponentials)(x + k * size, dtype, MIN(NAME(SUMMED), at + some - k), base);
    }
    /* As in torch, a row whose largest logit is infinite has an infinite or NaN loss, and a NaN gradient. */
    const float base = isinf(most) ? 0.0f : most;
    if (most == INFINITY) total = NAME(has_nan)(x, dtype, n) ? NAN : INFINITY;
    NAME(floats)(x, dtype, target, 1, &chosen);
    w->nll[i] = (float)(log(total) + ((double)base - chosen));
    if (!slope) return;
    NAME(scaled)(x, dtype, n, base, isinf(most) ? NAN : (float)(factor / total), slope);
    const Lanes zero = {0.0f};
    double own = isinf(most) ? NAN : NAME(exponential)(zero + (chosen - base))[0] / total;
    float less = (float)((own - 1.0) * factor);
    NAME(halves)(&less, 1, dtype, slope, target);
}

UNIT(loss) { BY_DTYPE(((const Loss *)work)->dtype, NAME(row), work, unit) }
