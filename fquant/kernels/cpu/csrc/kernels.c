/* The CPU kernels: plain C without headers of torch or Python, called through ctypes (library.py).

   Every kernel is written once, over the vector vocabulary of simd.h, and compiled here once for each instruction set;
   an argument selects one. work.h has their arguments.

   A value is table[code] * absmax in float32, (table[code] - zero) * absmax with zero points, or code * absmax * (1 /
   127) without a table; plus the offset if there is one. It is rounded to the dtype of the array, then to that of the
   result. This file is compiled without contraction to fused multiply-adds, so these bits are those of the reference;
   the dot products ask for them explicitly. */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <math.h>
#include <pthread.h>
#ifdef __linux__
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline, unused))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
#define UNROLLED(i, n) _Pragma("GCC unroll 24") for (int i = 0; i < (n); i++) /* n <= 24: a constant once inlined */

enum { F32, BF16, F16, BOOL };    /* the dtypes, as Python numbers them */
enum { PIECE = 4096 };            /* elements, or counters, of a unit; a multiple of every block size */
enum { MAX_SCALES = PIECE / 16 }; /* of a piece */

#include "floats.h"
#include "threads.h"
#include "work.h"

/* A unit of work. */
#define UNIT(name) static __attribute__((unused)) void NAME(name)(void *work, int64_t unit, __attribute__((unused)) void *scratch)

/* Call f with a constant dtype as its last argument. */
#define BY_DTYPE(dtype, f, ...)                           \
    if ((dtype) == F32) f(__VA_ARGS__, F32);              \
    else if ((dtype) == BF16) f(__VA_ARGS__, BF16);       \
    else f(__VA_ARGS__, F16);

typedef struct { /* what an instruction set provides */
    Unit encode, decode, gemv, pack, in_groups, pack_slivers, in_stripes, fold, draw, loss, norm, pointwise, attention, cached,
        dense_matmul, update, quantize_rows, integer_rows, few_integers, nearest, beam_search, stage_sums, sums_by_code;
    void (*load)(const void *x, int dtype, int64_t n, int form, void *out); /* x in the form of `gemv` */
    size_t (*attention_room)(const Attention *a); /* bytes of scratch */
    void (*sha256)(const Hashed *p);
    int columns;      /* rows of x up to which `gemv` is used */
    int lanes, panel; /* words of a vector, and of a panel */
    int least_rows, most_rows; /* of a weight in a unit of `in_groups`: multiples of all slivers */
    int tiles;        /* true if those of AMX are multiplied, whose rows should not lie a power of two apart */
    int bf16, bytes;  /* true if bf16 is multiplied as it is, not in float32; bytes: 1 if those below 16 are, 2 if all */
} Kernels;

enum { AHEAD = 8192 };  /* bytes of codes to prefetch ahead: the best measured */
enum { PAST = 8 << 20 }; /* bytes of a result from which stores are non-temporal */
enum { GROUP = 16 };     /* rows of a weight in a unit of `gemv` */
enum { FEW_INTEGERS = 4 }; /* rows of x up to which their bytes are multiplied with rows of the weight */
enum { MOST_PAIRS = 8 }; /* sums of two products of codes and bytes that int16 holds, 8 * 2 * 15 * 128 < 2^15 */
enum { FUSED = 4 };      /* rows of x up to which the sums of a product may stay in registers */

/* In words of 32 bits: the inner dimension that gemm.h decodes at a time, and multiplies at a time; the row stride of a
   sliver, a cache line more than a slab lest rows use the same cache sets. */
enum { SLAB = 512, STEPS = 128, APART = SLAB + 16 };
enum { TILED_ROWS = 96 };                  /* rows whose integer sums stay near: a multiple of slivers and of tiles */
enum { STRIPE = 256, NARROW = 128 };       /* columns of a stripe, at most and at least */
enum { ROW_APART = STEPS + 16 };           /* words from a row of a weight that is transposed to the next */
enum { IN_PLACE = 8 };                     /* rows of a sliver that is no copy, lest they compete for a cache set */
enum { FEW_ROWS = 32, MANY_ROWS = 192 };   /* its rows of x, at a time and at most in a unit, if sums are short */
enum { STRIPED_ROWS = 192, STRIPED_LANES = 16 }; /* from which x · wᵀ is computed in stripes in float32: in stripes
                                                   it takes 0.89 to 0.95 of the time with 16 lanes, and 1.02 with 8 */
enum { MOST_X = 512, COPY = 6 << 20 };     /* rows of x that are copied at a time, and bytes */

#define FOLDED 0x243F6A8885A308D3u /* xor'ed to keys that are folded, lest they equal keys of draws */

enum { TURNED = 64, TURN_AHEAD = 16 }; /* rows of x that are transposed at a time, and elements to prefetch ahead */

/* Interleave the 16-bit elements i and 32 + i. */
#define BESIDE4(i) i, i + 32, i + 1, i + 33, i + 2, i + 34, i + 3, i + 35
static const uint16_t BESIDE[64] __attribute__((aligned(64), unused)) = {
    BESIDE4(0), BESIDE4(4), BESIDE4(8), BESIDE4(12), BESIDE4(16), BESIDE4(20), BESIDE4(24), BESIDE4(28)};

INLINE int64_t blocks_of(const Packed *w) { return (w->width + w->block - 1) / w->block; }
INLINE int64_t bytes_of(const Packed *w) {
    return w->vectors ? (w->width + w->dim - 1) / w->dim * w->stages : (w->width * w->bits + 7) / 8;
}
INLINE int64_t pieces_of(int64_t width) { return (width + PIECE - 1) / PIECE; }
/* How many pieces an update is. If its gradient is transposed, they are high x wide parts of its matrices, `beside` of
   them beside each other. */
typedef struct { int64_t each, high, wide, beside; } Pieces;
INLINE Pieces pieces_in(const Update *u) {
    if (!u->rows) return (Pieces){.each = pieces_of(u->n)};
    int64_t wide = MIN(u->columns, PIECE / MIN(u->rows, 16)), high = MIN(u->rows, PIECE / wide); /* lines of 16 floats */
    int64_t beside = (u->columns + wide - 1) / wide, below = (u->rows + high - 1) / high;
    return (Pieces){beside * below * (u->n / (u->rows * u->columns)), high, wide, beside};
}
INLINE int64_t slabs_of(int64_t words) { return (words + SLAB - 1) / SLAB; }
INLINE int64_t padded_to(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
/* True if rows of n elements consist of whole words. */
INLINE int are_words(const void *x, int dtype, int half, int64_t n) {
    return (uintptr_t)x % 4 == 0 && (half ? n % 2 == 0 : dtype == F32);
}
INLINE int64_t turned_apart(int64_t n) { return padded_to(n, 16) + 16; } /* floats of a row that was transposed */

/* The instruction sets; `isa` below is an index into `available`. What has no tiles is that of BASE, and not compiled
   again. */
#define KERNELS_OF(ISA, BASE, BF16)                                                                                    \
    {encode_##BASE, decode_##BASE, gemv_##BASE, pack_##BASE, in_groups_##ISA, pack_slivers_##BASE, in_stripes_##ISA,   \
     fold_##BASE, draw_##BASE, loss_##BASE, norm_##BASE, pointwise_##BASE, attention_##ISA, cached_##BASE,             \
     dense_matmul_##BASE, update_##BASE, quantize_rows_##BASE, integer_rows_##ISA, few_integers_##BASE, nearest_##BASE,\
     beam_search_##BASE, stage_sums_##BASE, sums_by_code_##BASE, load_##BASE, attention_room_##ISA, sha256_##BASE,     \
     COLUMNS_##BASE, LANES_##BASE, PANEL_##BASE, LEAST_ROWS_##ISA, MOST_ROWS_##ISA, TILES_##ISA, BF16, BYTES_##BASE}
#define PASTE(a, b) a##_##b
#define EXPANDED(a, b) PASTE(a, b)
#define NAME(x) EXPANDED(x, ISA)

/* The types and sizes of the instruction set that is compiled. */
#define Lanes NAME(Lanes)
#define Bits NAME(Bits)
#define Ints NAME(Ints)
#define Table16 NAME(Table16)
#define Table32 NAME(Table32)
#define Sizes NAME(Sizes)
#define Room NAME(Room)
#define LANES NAME(LANES)
#define VECS NAME(VECS)
#define SUMS NAME(SUMS)
#define PANEL NAME(PANEL)
#define QUERIES NAME(QUERIES)

/* Functions between TARGET and TARGET_END are compiled for these features as well. */
#define QUOTE(...) #__VA_ARGS__
#define PRAGMA(...) _Pragma(QUOTE(__VA_ARGS__))
#ifdef __clang__
#define TARGET(features) PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define TARGET_END PRAGMA(clang attribute pop)
#define WIDE
#else
#define TARGET(features) PRAGMA(GCC push_options) PRAGMA(GCC target(features))
#define TARGET_END PRAGMA(GCC pop_options)
#define WIDE ",prefer-vector-width=512"
#endif
#define AVX2 "avx2,fma,f16c"
#define AVX512 AVX2 ",avx512f,avx512bw,avx512vl,avx512dq" WIDE

#define ISA portable
#include "isa.h"

#if defined(__x86_64__)
TARGET(AVX2)
#define ISA avx2
#define LANES_AVX2
#include "isa.h"
#undef LANES_AVX2
TARGET_END

TARGET(AVX512)
#define ISA avx512
#define LANES_AVX512
#include "isa.h"
TARGET_END

TARGET(AVX512 ",avx512vbmi,avx512bf16,avx512vnni")
#define LANES_BF16
#define ISA avx512_bf16
#include "isa.h"
TARGET_END

TARGET(AVX512 ",avx512vbmi,avx512bf16,avx512vnni,amx-tile,amx-int8,amx-bf16")
#define LANES_AMX
#define ISA amx
#include "isa.h"
#undef LANES_AMX
#undef LANES_BF16
#undef LANES_AVX512
TARGET_END
#elif defined(__aarch64__)
#define ISA neon
#define LANES_NEON
#include "isa.h"
#undef LANES_NEON
#endif

static const struct { const char *name; Kernels kernels; } available[] = {
    {"portable", KERNELS_OF(portable, portable, 0)},
#if defined(__x86_64__)
    {"avx2", KERNELS_OF(avx2, avx2, 0)},
    {"avx512", KERNELS_OF(avx512, avx512, 0)},
    {"avx512_bf16", KERNELS_OF(avx512_bf16, avx512_bf16, 1)},
    {"amx", KERNELS_OF(amx, avx512_bf16, 1)},
#elif defined(__aarch64__)
    {"neon", KERNELS_OF(neon, neon, 0)},
#endif
};

/* --- what Python calls ------------------------------------------------------------------------------------------- */

/* Constants that library.py has as well: sizes of structures, the number of operations, TILE and MOST_DIM. */
EXPORT int fquant_sizes(int which) {
    const size_t sizes[] = {sizeof(Packed), sizeof(Encoding), sizeof(Pointwise), sizeof(Step), sizeof(Read),
                            sizeof(Attention), sizeof(Rounding), sizeof(Moment), sizeof(Update), OPS, TILE, MOST_DIM};
    return (int)sizes[which];
}

#if defined(__x86_64__)
/* True if there are tiles of bf16 and of bytes, and Linux lets this process use them, which it has to ask for. */
static int has_amx(void) {
#ifdef __linux__
    enum { PERMIT = 0x1023, TILE_DATA = 18, FEATURES = 7 << 22 & ~(1 << 23) }; /* ARCH_REQ_XCOMP_PERM; bf16, tiles, int8 */
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & FEATURES) != FEATURES) return 0;
    return !syscall(SYS_arch_prctl, PERMIT, TILE_DATA);
#else
    return 0;
#endif
}
#endif

/* The name of instruction set i, from plain to best; NULL from the first one that this machine lacks. */
EXPORT const char *fquant_isa(int i) {
    if (i < 0 || i >= (int)(sizeof available / sizeof *available)) return NULL;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (i >= 1 && !(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))) return NULL;
    if (i >= 2 && !(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))) return NULL;
    if (i >= 3 && !(__builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16") &&
                    __builtin_cpu_supports("avx512vnni"))) return NULL;
    if (i >= 4 && !has_amx()) return NULL;
#endif
    return available[i].name;
}

/* Quantise rows x [rows, width] of dtype to codes and absmax f32. Every function returns 0, or -1 if memory ran out. */
EXPORT int64_t fquant_encode(int isa, int threads, const void *x, int dtype, int64_t rows, int64_t width,
                         const Encoding *how, uint8_t *codes, float *absmax) {
    Encode work = {x, dtype, rows, width, *how, codes, absmax};
    int64_t pieces = how->block > PIECE ? 1 : pieces_of(width);
    return run(available[isa].kernels.encode, &work, rows * pieces, 0, NULL, threads);
}

/* Ask for pages of 2 MiB under n untouched bytes at p: to zero pages of 4 KiB takes several times as long as to decode. */
EXPORT void fquant_large_pages(void *p, size_t n) {
#ifdef __linux__
    uintptr_t start = ((uintptr_t)p + 4095) / 4096 * 4096, end = ((uintptr_t)p + n) / 4096 * 4096;
    if (end > start) madvise((void *)start, end - start, MADV_HUGEPAGE);
#else
    (void)p, (void)n;
#endif
}

/* Decode the part rows x width of w from (row, column), a multiple of 32, to out of dtype with row stride `stride`. */
EXPORT int64_t fquant_decode(int isa, int threads, const Packed *w, int64_t row, int64_t rows, int64_t column,
                         int64_t width, int dtype, void *out, int64_t stride) {
    int64_t size = size_of(dtype), aligned = ((uintptr_t)out | (uintptr_t)(stride * size)) % 64 == 0;
    Decode work = {*w, row, rows, column, width, dtype, out, stride, aligned && rows * width * size > PAST};
    return run(available[isa].kernels.decode, &work, rows * pieces_of(width), 0, NULL, threads);
}

#include "pool.h"
#include "matmul.h"

/* x [m, in] · wᵀ to y [m, out], or x [m, out] · w to y [m, in]. If `room` is NULL but needed, return its bytes only. */
EXPORT int64_t fquant_matmul(int isa, int threads, const Packed *w, const void *x, int64_t m, void *y, int dtype,
                             void *room) {
    return product(isa, threads, 0, 0, w, x, m, y, dtype, room);
}
EXPORT int64_t fquant_matmul_t(int isa, int threads, const Packed *w, const void *x, int64_t m, void *y, int dtype,
                               void *room) {
    return product(isa, threads, 1, 0, w, x, m, y, dtype, room);
}

/* A batch of products x [m, inner] · wᵀ for w [rows, width], or w · xᵀ if turned, or x · w if transposed, with `next`
   bytes from one x, w and y to the next. An element is a sum in the order of the inner dimension: it depends on its own row of x and row (or
   column) of w alone. If `room` is NULL, return its bytes only. */
EXPORT int64_t fquant_ordered_matmul(int isa, int threads, int transposed, int turned, int64_t batch, const void *x,
                                     int64_t m, int64_t next_x, const void *w, int64_t rows, int64_t width, int64_t next_w,
                                     void *y, int64_t next_y, int dtype, void *room) {
    Batch work = {.w = {.codes = w, .rows = rows, .width = width, .block = width, .dtype = dtype}, .x = x, .y = y, .m = m,
                  .next = {next_x, next_w, next_y}, .isa = isa, .transposed = transposed, .turned = turned, .dtype = dtype};
    return batch_product(work, batch, threads, room);
}

/* The integers of x [m, width], quantised by rows, times the levels of w, to y [m, rows]. If `room`
   is NULL, return its bytes only. */
EXPORT int64_t fquant_integer_matmul(int isa, int threads, const Packed *w, const int16_t *levels, int plain, int unit,
                                     const Rounding *how, const void *x, int64_t m, void *y, int dtype, void *room) {
    Levels of = {levels, plain, unit};
    Operand rows = {x, how, 0, m};
    return integer_product(isa, threads, w, of, &rows, w->width, y, dtype, room);
}

/* a [m, inner] · b [n, inner]ᵀ to y [m, n], both quantised by rows. An operand whose stride `across` is not 0 is stored
   transposed. If `room` is NULL, return its bytes only. */
EXPORT int64_t fquant_integer_mm(int isa, int threads, const void *a, int64_t across_a, int64_t m, const Rounding *how_a,
                                 const void *b, int64_t across_b, int64_t n, const Rounding *how_b, int64_t inner, void *y,
                                 int dtype, void *room) {
    Operand x = {a, how_a, across_a, m}, w = {b, how_b, across_b, n};
    return dense_integer_product(isa, threads, &x, &w, inner, y, dtype, room);
}

/* Fold keys with data [n] to new keys [n]. */
EXPORT int64_t fquant_fold(int isa, int threads, const uint64_t *keys, const uint64_t *data, int64_t n, uint64_t *out) {
    Draw work = {keys, data, out, n, 0, 0};
    return run(available[isa].kernels.fold, &work, pieces_of(n), 0, NULL, threads);
}

/* Draw the first n words of each of `num` keys, to out [num, n]. */
EXPORT int64_t fquant_bits(int isa, int threads, const uint64_t *keys, int64_t num, int64_t n, uint64_t *out) {
    Draw work = {keys, NULL, out, n, 0, 0};
    return run(available[isa].kernels.draw, &work, num * pieces_of((n + 1) / 2), 0, NULL, threads);
}

/* The same, 1 for words below the threshold <= 2^32 and else 0. */
EXPORT int64_t fquant_bernoulli(int isa, int threads, const uint64_t *keys, int64_t num, int64_t threshold, int64_t n,
                                uint8_t *out) {
    Draw work = {keys, NULL, out, n, (uint32_t)(threshold - 1), 1};
    if (!threshold) return memset(out, 0, (size_t)(num * n)), 0;
    return run(available[isa].kernels.draw, &work, num * pieces_of((n + 1) / 2), 0, NULL, threads);
}

/* The negative log likelihoods of targets [rows], in [0, width) or `ignore`, to nll [rows]; and their gradient with
   respect to the logits, times factor [rows], to slope [rows, width]. */
EXPORT int64_t fquant_nll(int isa, int threads, const void *logits, int dtype, int64_t rows, int64_t width,
                          int64_t apart, const int64_t *targets, int64_t ignore, const float *factor, float *nll,
                          void *slope) {
    Loss work = {logits, targets, factor, nll, slope, width, apart, ignore, dtype};
    return run(available[isa].kernels.loss, &work, rows, 0, NULL, threads);
}

/* Attention, or its gradient if g is not NULL. */
EXPORT int64_t fquant_attention(int isa, int threads, const Attention *a) {
    const Kernels *k = &available[isa].kernels;
    Attention work = *a;
    int64_t panels = (a->t + k->panel - 1) / k->panel, heads = a->batch * a->kv;
    work.half = k->bf16 && a->dtype == BF16;
    work.parts = a->g ? 1 : MAX(1, MIN(panels, 2 * threads / heads));
    return run(k->attention, &work, heads * work.parts, k->attention_room(&work), NULL, threads);
}

/* Attention of one token of each of `batch` sequences to the slots of a cache. */
EXPORT int64_t fquant_cached_attention(int isa, int threads, const void *q, const void *k, const void *v,
                                       const int64_t *position, const float *sinks, void *y, int64_t batch,
                                       int64_t slots, int64_t kv, int64_t heads, int64_t e, double scale, double cap,
                                       int dtype) {
    const Kernels *kernels = &available[isa].kernels;
    Cached work = {q, k, v, y, position, sinks, slots, kv, heads, e, (float)scale, (float)cap, dtype};
    int64_t units = batch * kv * ((heads / kv + ABREAST_HEADS - 1) / ABREAST_HEADS), most = 0;
    for (int64_t b = 0; b < batch; b++) most = MAX(most, position[b] + 1);
    size_t room = (size_t)(ABREAST_HEADS * (padded_to(e, kernels->lanes) + padded_to(slots, kernels->lanes))) * 4;
    threads = (int)MIN((int64_t)threads, units * most * e / (8 * ALONE) + 1);
    return run(kernels->cached, &work, units, room, NULL, threads);
}

/* x [m, width] · wᵀ for few rows and a dense w [rows, width], whose width is a multiple of 64. */
EXPORT int64_t fquant_dense_matmul(int isa, int threads, const void *x, const void *w, void *y, int64_t m, int64_t rows,
                            int64_t width, int dtype) {
    Dense work = {x, w, y, m, rows, width, dtype};
    return run(available[isa].kernels.dense_matmul, &work, (rows + GROUP - 1) / GROUP, 0, NULL, threads);
}

/* x [rows, width] / sqrt(mean of squares + eps) * weight [width] to out [rows, width], of dtype, and 1 / that root to
   scale [rows]; or with g [rows, width], the gradient of that to out. Units are groups of rows of about a PIECE. */
EXPORT int64_t fquant_rms_norm(int isa, int threads, const void *x, int dtype, int64_t rows, int64_t width,
                               int64_t apart, const void *weight, double eps, const void *g, int64_t apart_g, void *out,
                               float *scale) {
    int64_t group = MAX(1, MIN(MOST_GROUPED, PIECE / MAX(1, width)));
    Norm work = {g, x, weight, out, scale, eps, rows, width, apart, apart_g, group, dtype};
    threads = (int)MIN((int64_t)threads, rows * width / ALONE + 1);
    return run(available[isa].kernels.norm, &work, (rows + group - 1) / group, 0, NULL, threads);
}

/* Run a program on the tensors at the addresses `at`: those that are read, then those that are written. */
EXPORT int64_t fquant_pointwise(int isa, int threads, const Pointwise *program, void *const *at) {
    Pointwise work = *program;
    work.at = at;
    int64_t units = (work.total + TILE - 1) / TILE;
    threads = (int)MIN((int64_t)threads, (work.total + ALONE - 1) / ALONE);
    return run(available[isa].kernels.pointwise, &work, units, (size_t)work.registers * TILE * 4, NULL, threads);
}

/* Steps of an optimiser on one parameter, or on many of one shape. */
EXPORT int64_t fquant_update(int isa, int threads, const Update *u) {
    Update work = *u;
    threads = (int)MIN((int64_t)threads, work.count * work.n / ALONE + 1);
    return run(available[isa].kernels.update, &work, work.count * pieces_in(&work).each, 0, NULL, threads);
}

#include "panels.h"

/* The `top` codes [sets, k, d] of largest x·c - half for rows x [sets, n, d], best first: index and score
   [sets, n, top]; -1 and -infinity for rows without a finite score. Returns 1, and computes nothing, if a code is not
   finite or a half is NaN: a score that is NaN would not be seen beside a finite one. */
EXPORT int64_t fquant_nearest(int isa, int threads, const float *x, const float *codes, const float *half, int64_t sets,
                              int64_t n, int64_t k, int64_t d, int64_t top, int64_t *index, float *score) {
    const Kernels *kernels = &available[isa].kernels;
    Table table;
    float *room = panels(codes, half, sets, k, d, kernels->panel, &table);
    if (!room) return -1;
    if (table.unordered) {
        free(room);
        return 1;
    }
    int64_t rows = top == 1 ? NEAR : MAX(SIX, MIN(NEAR, SCORES / table.padded / SIX * SIX));
    Nearest work = {table, x, index, score, n, rows, (int)top};
    size_t scratch = (size_t)(2 * top * NEAR + NEAR * d + (top > 1 ? rows * table.padded : 0)) * 4;
    int failed = run(kernels->nearest, &work, sets * ((n + rows - 1) / rows), scratch, NULL, threads);
    free(room);
    return failed;
}

/* The codes [n, stages] of the best sums of vectors [stages, 256, d] for x [n, d]; rows are compared with tables
   [stages, 256, d], or [stages, 256, 2 d] if near [n, d] weighs their elements, and half [stages, 256]. */
EXPORT int64_t fquant_beam_search(int isa, int threads, const float *x, const float *near, const float *vectors,
                                  const float *tables, const float *half, int64_t n, int64_t d, int64_t stages,
                                  int64_t beam, uint8_t *codes) {
    const Kernels *kernels = &available[isa].kernels;
    Table table;
    int64_t e = near ? 2 * d : d, most = stages > 1 ? beam : 1;
    float *room = panels(tables, half, stages, CODES, e, kernels->panel, &table);
    if (!room) return -1;
    Beam work = {table, x, near, vectors, codes, n, d, stages, (int)most};
    int64_t floats = 2 * e + (most > 1 ? table.padded : 0) + most * (1 + 2 * most + 2 * d);
    int failed = run(kernels->beam_search, &work, (n + NEAR - 1) / NEAR,
                     (size_t)padded_to(NEAR * (4 * floats + 2 * most * stages), 64), NULL, threads);
    free(room);
    return failed;
}

/* Add mass [n, m] times the residuals of x [n, d] of the stages other than `stage` to sums [256, d + m], and the masses. */
EXPORT int64_t fquant_stage_sums(int isa, int threads, const float *x, const float *mass, const uint8_t *codes,
                                 const float *vectors, int64_t n, int64_t d, int64_t m, int64_t stages, int64_t stage,
                                 double *sums) {
    int64_t parts = (n + SUMMED_ROWS - 1) / SUMMED_ROWS, size = CODES * (d + m);
    double *room = malloc((size_t)(parts * size) * 8);
    if (!room) return -1;
    Sums work = {x, mass, vectors, codes, room, n, d, m, stages, stage};
    int failed = run(available[isa].kernels.stage_sums, &work, parts, (size_t)padded_to(4 * d, 64), NULL, threads);
    for (int64_t i = 0; !failed && i < parts; i++)
        for (int64_t k = 0; k < size; k++) sums[k] += room[i * size + k];
    free(room);
    return failed;
}

/* The number [sets, k] and the sum [sets, k, d] of the rows x [sets, n, d] of each code [sets, n]; a row with a code
   below 0 is in none. Returns 1 if a code is k or more. */
EXPORT int64_t fquant_sums_by_code(int isa, int threads, const float *x, const int64_t *codes, int64_t sets, int64_t n,
                                   int64_t d, int64_t k, float *counts, float *sums) {
    ByCode work = {x, codes, counts, sums, n, d, k, 0};
    int64_t units = sets * MAX(1, (d + SUMMED_COLUMNS - 1) / SUMMED_COLUMNS);
    int failed = run(available[isa].kernels.sums_by_code, &work, units, (size_t)padded_to(8 * k, 64), NULL, threads);
    return failed ? failed : work.beyond;
}

/* The SHA-256 of n buffers as words [n, 8], computed by the thread that calls; the largest buffers come first. Returns the
   lanes of a vector. */
EXPORT int64_t fquant_sha256(int isa, int threads, const uint8_t *const *data, const int64_t *bytes, int64_t n,
                             uint32_t *digests) {
    Hashed work = {data, bytes, digests, n};
    (void)threads;
    available[isa].kernels.sha256(&work);
    return available[isa].kernels.lanes;
}
