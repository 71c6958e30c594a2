/* Random bits: Threefry-2x32-20, equal to reference/random_bits.py. Only the result is written. The compiler
   vectorises the loops: a counter, or a key, is a lane. */

/* Replace the counter x0, x1 by its two words. */
INLINE void NAME(threefry)(uint32_t k0, uint32_t k1, uint32_t *x0, uint32_t *x1) {
    uint32_t a = *x0 + k0, b = *x1 + k1, k2 = k0 ^ k1 ^ 0x1BD11BDA;
#define ROUND(r) a += b, b = (b << r | b >> (32 - r)) ^ a
#define EVEN(p, q, i) ROUND(13), ROUND(15), ROUND(26), ROUND(6), a += p, b += q + i
#define ODD(p, q, i) ROUND(17), ROUND(29), ROUND(16), ROUND(24), a += p, b += q + i
    EVEN(k1, k2, 1), ODD(k2, k0, 2), EVEN(k0, k1, 3), ODD(k1, k2, 4), EVEN(k2, k0, 5);
#undef ODD
#undef EVEN
#undef ROUND
    *x0 = a, *x1 = b;
}

/* Fold a PIECE of keys with data. */
static void NAME(fold)(void *work, int64_t unit, void *scratch) {
    const Draw *d = work;
    int64_t start = unit * PIECE, n = MIN(PIECE, d->n - start);
    const uint64_t *keys = d->keys + start, *data = d->data + start;
    uint64_t *restrict out = (uint64_t *)d->out + start;
    (void)scratch;
    for (int64_t i = 0; i < n; i++) {
        uint64_t key = keys[i] ^ FOLDED;
        uint32_t x0 = (uint32_t)data[i], x1 = (uint32_t)(data[i] >> 32);
        NAME(threefry)((uint32_t)key, (uint32_t)(key >> 32), &x0, &x1);
        out[i] = (uint64_t)x0 << 32 | x1;
    }
}

/* The unit of a draw: the words of PIECE counters of one key, fewer at the end. */
typedef struct { uint32_t k0, k1, low, high; int64_t at, n; } NAME(Part);

INLINE NAME(Part) NAME(part)(const Draw *d, int64_t unit) {
    int64_t pieces = pieces_of((d->n + 1) / 2), row = unit / pieces, counter = unit % pieces * PIECE;
    uint64_t key = d->keys[row];
    return (NAME(Part)){(uint32_t)key, (uint32_t)(key >> 32), (uint32_t)counter, (uint32_t)(counter >> 32),
                        row * d->n + 2 * counter, MIN(2 * PIECE, d->n - 2 * counter)};
}

/* Store TO(x) for the words x of each counter i, at out[2i] and out[2i + 1]. */
#define DRAW(TO)                                                   \
    for (int64_t i = 0; i < p.n / 2; i++) {                        \
        uint32_t x0 = p.low + (uint32_t)i, x1 = p.high;            \
        NAME(threefry)(p.k0, p.k1, &x0, &x1);                      \
        out[2 * i] = TO(x0), out[2 * i + 1] = TO(x1);              \
    }                                                              \
    if (p.n % 2) {                                                 \
        uint32_t x0 = p.low + (uint32_t)(p.n / 2), x1 = p.high;    \
        NAME(threefry)(p.k0, p.k1, &x0, &x1);                      \
        out[p.n - 1] = TO(x0);                                     \
    }

static void NAME(bits)(void *work, int64_t unit, void *scratch) {
    const NAME(Part) p = NAME(part)(work, unit);
    uint64_t *restrict out = (uint64_t *)((const Draw *)work)->out + p.at;
    (void)scratch;
#define WHOLE(x) (x)
    DRAW(WHOLE)
#undef WHOLE
}

static void NAME(bernoulli)(void *work, int64_t unit, void *scratch) {
    const NAME(Part) p = NAME(part)(work, unit);
    const uint32_t most = ((const Draw *)work)->most;
    uint8_t *restrict out = (uint8_t *)((const Draw *)work)->out + p.at;
    (void)scratch;
#define BELOW(x) (uint8_t)((x) <= most)
    DRAW(BELOW)
#undef BELOW
}

#undef DRAW
