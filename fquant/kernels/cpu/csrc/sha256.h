/* SHA-256 (FIPS 180-4) of many buffers, one in each lane of a vector. Lanes go on together for as many blocks of 64 bytes
   as the shortest has; then that lane takes the next buffer. The last blocks of a buffer are those of its padding. */

#ifndef SHA256
#define SHA256
static const uint32_t SHA256_ROUNDS[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01,
    0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc,
    0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147,
    0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08,
    0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
    0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
static const uint32_t SHA256_START[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                         0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

enum { BLOCK_BYTES = 64 };
/* A buffer that is hashed: `left` blocks from `at`, and then those of its padding, if they are not these already. */
typedef struct { const uint8_t *at; int64_t left, padded; int is_padding; uint8_t padding[2 * BLOCK_BYTES]; } Buffer;

/* Begin with buffer i: whole blocks of the data, then the rest of it, a bit that is set, zeros, and its length in bits. */
static void begin_buffer(const Hashed *w, int64_t i, Buffer *b) {
    const int64_t bytes = w->bytes[i], whole = bytes / BLOCK_BYTES, rest = bytes % BLOCK_BYTES;
    const int64_t end = rest < BLOCK_BYTES - 8 ? BLOCK_BYTES : 2 * BLOCK_BYTES;
    memset(b->padding, 0, sizeof b->padding);
    memcpy(b->padding, w->data[i] + whole * BLOCK_BYTES, (size_t)rest);
    b->padding[rest] = 0x80;
    for (int k = 0; k < 8; k++) b->padding[end - 1 - k] = (uint8_t)((uint64_t)bytes * 8 >> (8 * k));
    b->padded = end / BLOCK_BYTES;
    b->is_padding = !whole;
    b->at = whole ? w->data[i] : b->padding;
    b->left = whole ? whole : b->padded;
}
#endif

INLINE Bits NAME(rotated)(Bits x, int n) { return x >> n | x << (32 - n); }

/* 16 rounds with the words w of a block; all but the first 16 compute the next words in their place. */
INLINE void NAME(sha256_rounds)(Bits *restrict s, Bits *restrict w, const uint32_t *rounds, int is_first) {
    UNROLLED(i, 16) {
        Bits *a = &s[-i & 7], *b = &s[(1 - i) & 7], *c = &s[(2 - i) & 7], *d = &s[(3 - i) & 7];
        Bits *e = &s[(4 - i) & 7], *f = &s[(5 - i) & 7], *g = &s[(6 - i) & 7], *h = &s[(7 - i) & 7];
        if (!is_first) {
            Bits x = w[(i + 1) & 15], y = w[(i + 14) & 15];
            w[i] += (NAME(rotated)(x, 7) ^ NAME(rotated)(x, 18) ^ x >> 3) + w[(i + 9) & 15] +
                    (NAME(rotated)(y, 17) ^ NAME(rotated)(y, 19) ^ y >> 10);
        }
        *h += (NAME(rotated)(*e, 6) ^ NAME(rotated)(*e, 11) ^ NAME(rotated)(*e, 25)) + (*g ^ (*e & (*f ^ *g))) + (w[i] + rounds[i]);
        *d += *h;
        *h += (NAME(rotated)(*a, 2) ^ NAME(rotated)(*a, 13) ^ NAME(rotated)(*a, 22)) + ((*a & *b) | (*c & (*a | *b)));
    }
}

/* Hash n blocks from each of LANES places. */
static void NAME(sha256_blocks)(Bits *restrict state, const uint8_t *const *at, int64_t n) {
    uint32_t rows[LANES * 16] __attribute__((aligned(64)));
    Bits w[16], s[8];
    for (int64_t block = 0; block < n; block++) {
        for (int i = 0; i < LANES; i++) memcpy(rows + 16 * i, at[i] + block * BLOCK_BYTES, BLOCK_BYTES);
        for (int k = 0; k < 16; k += LANES) NAME(transpose)(rows + k, 16, w + k);
        UNROLLED(i, 16) w[i] = (NAME(rotated)(w[i], 8) & 0xff00ff00) | (NAME(rotated)(w[i], 24) & 0x00ff00ff); /* big-endian */
        UNROLLED(i, 8) s[i] = state[i];
        NAME(sha256_rounds)(s, w, SHA256_ROUNDS, 1);
        for (int from = 16; from < 64; from += 16) NAME(sha256_rounds)(s, w, SHA256_ROUNDS + from, 0);
        UNROLLED(i, 8) state[i] += s[i];
    }
}

/* The digests of all buffers, as words. */
static __attribute__((unused)) void NAME(sha256)(const Hashed *p) {
    Buffer buffers[LANES];
    int64_t of[LANES], next = 0; /* the buffer in each lane; -2 before the first, -1 behind the last */
    Bits state[8];
    const uint8_t *at[LANES];
    for (int i = 0; i < LANES; i++) of[i] = -2;
    for (;;) {
        int64_t n = INT64_MAX;
        for (int i = 0; i < LANES; i++) {
            Buffer *b = &buffers[i];
            if (of[i] >= 0 && !b->left && !b->is_padding) b->at = b->padding, b->left = b->padded, b->is_padding = 1;
            if (of[i] == -2 || (of[i] >= 0 && !b->left)) {
                for (int k = 0; of[i] >= 0 && k < 8; k++) p->digests[8 * of[i] + k] = state[k][i];
                of[i] = next < p->n ? next++ : -1;
                if (of[i] >= 0) begin_buffer(p, of[i], b);
                for (int k = 0; k < 8; k++) state[k][i] = SHA256_START[k];
            }
            if (of[i] >= 0) n = MIN(n, b->left);
        }
        if (n == INT64_MAX) return;
        int64_t any = 0;
        while (of[any] < 0) any++;
        for (int i = 0; i < LANES; i++) at[i] = buffers[of[i] < 0 ? any : i].at; /* an idle lane reads what another does */
        NAME(sha256_blocks)(state, at, n);
        for (int i = 0; i < LANES; i++)
            if (of[i] >= 0) buffers[i].at += n * BLOCK_BYTES, buffers[i].left -= n;
    }
}
