/* Products by AMX, in tiles of 16 rows of 64 bytes. Sixteen rows of a sliver and sixteen words of a panel are tiles as
   they lie in gemm.h, of pairs of bf16 or, unsigned by signed, of four bytes. Four tiles of sums, for 32 rows and 32 columns, stay in
   registers; two more hold rows, and two columns:

        0 1  <-  4  x  6 7
        2 3      5

   Tiles at the ends of rows and words are smaller, so a row has the same sums wherever it is. A unit begins with whole
   tiles, and gives back the shape it found, which may be that of torch's libraries. To set a shape takes about 1,000
   cycles, so a thread remembers the one it has. */

/* A unit of matmul has LEAST_ROWS to MOST_ROWS of a weight: multiples of all slivers, and of tiles. */

/* Do the work of a unit with tiles. */
#undef TILED
#define TILED(...)                \
    do {                          \
        NAME(Shape) found;        \
        NAME(begin_tiles)(&found); \
        __VA_ARGS__               \
        NAME(end_tiles)(&found);  \
    } while (0)

#ifdef LANES_AMX
enum { NAME(TILES) = 1, NAME(LEAST_ROWS) = 48, NAME(MOST_ROWS) = 192 };

typedef struct { uint8_t palette, start, none[14]; uint16_t bytes[16]; uint8_t rows[16]; } NAME(Shape);

typedef struct { int64_t first, second, words; } NAME(Size); /* rows of the upper and the lower tiles, each up to 16 */
static _Thread_local NAME(Size) NAME(size); /* of this thread's tiles */

static void NAME(resize)(NAME(Size) to) {
    const uint8_t first = to.first, second = to.second, n = to.words;
    const uint8_t rows[8] = {first, first, second, second, first, second, n, n};
    NAME(size) = to;
    NAME(Shape) shape = {.palette = 1};
    for (int i = 0; i < 8; i++) shape.rows[i] = rows[i], shape.bytes[i] = rows[i] ? (i == 4 || i == 5) ? 4 * n : 64 : 0;
    __asm__ volatile("" : : "r"(&shape) : "memory"); /* GCC's intrinsic reads the first 8 bytes only, to its knowledge */
    _tile_loadconfig(&shape);
}

INLINE void NAME(begin_tiles)(NAME(Shape) *found) {
    _tile_storeconfig(found);
    NAME(resize)((NAME(Size)){16, 16, 16});
}
INLINE void NAME(end_tiles)(const NAME(Shape) *found) {
    __asm__ volatile("" : : "r"(found) : "memory");
    if (found->palette) _tile_loadconfig(found);
    else _tile_release();
}

/* sums [..][width] += (= if fresh) a tile of rows, or two if `down` is 2, times one or two `across`. The ints are
   constants. */
INLINE void NAME(add_tile)(const uint32_t *rows, int64_t apart, const uint32_t *panel, int64_t width, int64_t n, int down,
                           int across, int fresh, int bytes, int32_t *sums) {
    const int64_t next = 4 * width, stride = 4 * apart;
#define MULTIPLY(c, a, b)                      \
    if (bytes) _tile_dpbusd(c, a, b); \
    else _tile_dpbf16ps(c, a, b)
#define BEGIN(c, from)            \
    if (fresh) _tile_zero(c);     \
    else _tile_loadd(c, from, next)
    BEGIN(0, sums);
    if (across > 1) { BEGIN(1, sums + 16); }
    if (down > 1) { BEGIN(2, sums + 16 * width); }
    if (down > 1 && across > 1) { BEGIN(3, sums + 16 * width + 16); }
    for (int64_t k = 0; k < n; k += 16) {
        _tile_loadd(6, panel + k * width, next);
        _tile_loadd(4, rows + k, stride);
        MULTIPLY(0, 4, 6);
        if (across > 1) {
            _tile_loadd(7, panel + k * width + 16, next);
            MULTIPLY(1, 4, 7);
        }
        if (down > 1) {
            _tile_loadd(5, rows + 16 * apart + k, stride);
            MULTIPLY(2, 5, 6);
            if (across > 1) { MULTIPLY(3, 5, 7); }
        }
    }
    _tile_stored(0, sums, next);
    if (across > 1) _tile_stored(1, sums + 16, next);
    if (down > 1) _tile_stored(2, sums + 16 * width, next);
    if (down > 1 && across > 1) _tile_stored(3, sums + 16 * width + 16, next);
#undef BEGIN
#undef MULTIPLY
}

/* sums [count][16 vecs] += (= if fresh) `count` rows times a panel, for n words. The last int is a constant. */
INLINE void NAME(add_tiles)(const uint32_t *rows, int64_t apart, int64_t count, const uint32_t *panel, int vecs, int64_t n,
                            int fresh, void *to, int bytes) {
    int64_t width = vecs * LANES;
    NAME(Size) now = NAME(size);
    for (int64_t k = 0, words; k < n; k += words, fresh = 0) {
        words = n - k < 16 ? n - k : (n - k) / 16 * 16;
        for (int64_t r = 0; r < count; r += 32) {
            int64_t high = MIN(count - r, 32), down = high > 16 ? 2 : 1;
            NAME(Size) wanted = {MIN(high, 16), MAX(high - 16, 0), MIN(words, 16)};
            if (now.first != wanted.first || now.second != wanted.second || now.words != wanted.words)
                NAME(resize)(now = wanted);
            for (int64_t v = 0; v < vecs; v += 2) {
                const uint32_t *from = rows + r * apart + k, *by = panel + k * width + v * 16;
                int32_t *sums = (int32_t *)to + r * width + v * 16;
#define CASE(D, A)                                                                              \
    if (down == D && MIN(vecs - v, 2) == A) {                                                   \
        if (fresh) NAME(add_tile)(from, apart, by, width, words, D, A, 1, bytes, sums);          \
        else NAME(add_tile)(from, apart, by, width, words, D, A, 0, bytes, sums);                \
    }
                CASE(2, 2) CASE(2, 1) CASE(1, 2) CASE(1, 1)
#undef CASE
            }
        }
    }
}

static __attribute__((noinline)) void NAME(add_half_tiles)(const uint32_t *rows, int64_t apart, int64_t count,
                                                           const uint32_t *panel, int vecs, int64_t n, int fresh,
                                                           float *sums) {
    NAME(add_tiles)(rows, apart, count, panel, vecs, n, fresh, sums, 0);
}
static __attribute__((noinline)) void NAME(add_byte_tiles)(const uint32_t *rows, int64_t apart, int64_t count,
                                                           const uint32_t *panel, int vecs, int64_t n, int fresh,
                                                           int32_t *sums) {
    NAME(add_tiles)(rows, apart, count, panel, vecs, n, fresh, sums, 1);
}
#else
enum { NAME(TILES) = 0, NAME(LEAST_ROWS) = 24, NAME(MOST_ROWS) = 144 };
typedef int NAME(Shape);
INLINE void NAME(begin_tiles)(NAME(Shape) *found) { (void)found; }
INLINE void NAME(end_tiles)(const NAME(Shape) *found) { (void)found; }
INLINE void NAME(add_half_tiles)(const uint32_t *rows, int64_t apart, int64_t count, const uint32_t *panel, int vecs,
                                 int64_t n, int fresh, float *sums) {
    (void)rows, (void)apart, (void)count, (void)panel, (void)vecs, (void)n, (void)fresh, (void)sums;
}
INLINE void NAME(add_byte_tiles)(const uint32_t *rows, int64_t apart, int64_t count, const uint32_t *panel, int vecs,
                                 int64_t n, int fresh, int32_t *sums) {
    (void)rows, (void)apart, (void)count, (void)panel, (void)vecs, (void)n, (void)fresh, (void)sums;
}
#endif
