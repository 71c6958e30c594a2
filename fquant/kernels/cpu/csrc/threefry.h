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
UNIT(fold) {
    const Draw *d = work;
    int64_t start = unit * PIECE, n = MIN(PIECE, d->n - start);
    const uint64_t *keys = d->keys + start, *data = d->data + start;
    uint64_t *restrict out = (uint64_t *)d->out + start;
    for (int64_t i = 0; i < n; i++) {
        uint64_t key = keys[i] ^ FOLDED;
        uint32_t x0 = (uint32_t)data[i], x1 = (uint32_t)(data[i] >> 32);
        NAME(threefry)((uint32_t)key, (uint32_t)(key >> 32), &x0, &x1);
        out[i] = (uint64_t)x0 << 32 | x1;
    }
}

/* Store the words of each counter as numbers of TYPE: the words, or how they compare. */
#define DRAW(TYPE, COMPARED)                                                    \
    TYPE *restrict out = (TYPE *)d->out + row * d->n + 2 * counter;             \
    for (int64_t i = 0; i < n / 2; i++) {                                       \
        uint32_t x0 = low + (uint32_t)i, x1 = high;                             \
        NAME(threefry)(k0, k1, &x0, &x1);                                       \
        out[2 * i] = (TYPE)(x0 COMPARED), out[2 * i + 1] = (TYPE)(x1 COMPARED); \
    }                                                                           \
    uint32_t x0 = low + (uint32_t)(n / 2), x1 = high;                           \
    NAME(threefry)(k0, k1, &x0, &x1);                                           \
    if (n % 2) out[n - 1] = (TYPE)(x0 COMPARED);

/* Draw the words of PIECE counters of one key, fewer at the end. */
UNIT(draw) {
    const Draw *d = work;
    int64_t pieces = pieces_of((d->n + 1) / 2), row = unit / pieces, counter = unit % pieces * PIECE;
    const int64_t n = MIN(2 * PIECE, d->n - 2 * counter);
    const uint32_t k0 = (uint32_t)d->keys[row], k1 = (uint32_t)(d->keys[row] >> 32), most = d->most;
    const uint32_t low = (uint32_t)counter, high = (uint32_t)(counter >> 32);
    if (d->bytes) { DRAW(uint8_t, <= most) } else { DRAW(uint64_t, ) }
}

#undef DRAW
