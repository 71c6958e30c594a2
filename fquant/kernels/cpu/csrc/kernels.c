/* The kernels of packed arrays for CPUs: plain C, no headers of torch or Python, reached by ctypes
   (cpu_library.py).

   Every kernel is written once, in quantize.h, dequantize.h, gemv.h, gemm.h, threefry.h, loss.h,
   norm.h, attention.h and pointwise.h over the vector vocabulary of simd.h (and the functions of
   exp.h, rows.h and tiles.h), and compiled here once for each instruction set; which one runs is an argument.
   What they are given is in work.h; this file has what they share, the conversions between float types, and the
   functions that Python calls.

   A value is table[code] * absmax in float32 (or code * absmax * (1 / 127) without a table), plus an offset where there
   is one, rounded to the dtype of the array and then to that of the result. Contraction to fused multiply-adds is off
   for the whole file, so that these bits are those of the reference; the dot products ask for them explicitly. */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <math.h>
#include <pthread.h>
#ifdef __linux__
#include <sys/mman.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline, unused))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

enum { F32, BF16, F16, BOOL };    /* the dtypes, as Python numbers them */
enum { PIECE = 4096 };            /* elements, or counters, handled at a time; every block size divides it */
enum { MAX_SCALES = PIECE / 32 }; /* of a piece */

/* --- float types ------------------------------------------------------------------------------------------------- */

INLINE uint32_t bits_of(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
INLINE float float_of(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }

INLINE uint16_t to_bf16(float x) { /* to nearest even */
    uint32_t u = bits_of(x), rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16;
    return (u & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded;
}
INLINE float from_bf16(uint16_t h) { return float_of((uint32_t)h << 16); }
INLINE float rounded_to_bf16(float x) { /* from_bf16(to_bf16(x)), in fewer instructions */
    uint32_t u = bits_of(x), rounded = (u + 0x7fff + (u >> 16 & 1)) & 0xffff0000;
    return x != x ? float_of(0x7fc00000) : float_of(rounded);
}

INLINE uint16_t to_f16(float x) { /* to nearest even, denormals and overflow included (the recipe of Maratyszcza's FP16) */
    uint32_t u = bits_of(x), doubled = u + u, bias = doubled & 0xff000000;
    float base = (float_of(u & 0x7fffffff) * 0x1p+112f) * 0x1p-110f;
    bias = bias < 0x71000000 ? 0x71000000 : bias;
    base = float_of((bias >> 1) + 0x07800000) + base;
    uint32_t v = bits_of(base), finite = (v >> 13 & 0x7c00) + (v & 0x0fff);
    return (u >> 16 & 0x8000) | (doubled > 0xff000000 ? 0x7e00 : finite);
}
INLINE float from_f16(uint16_t h) {
    uint32_t u = (uint32_t)h << 16, doubled = u + u;
    uint32_t normal = bits_of(float_of((doubled >> 4) + 0x70000000) * 0x1p-112f);
    uint32_t tiny = bits_of(float_of(doubled >> 17 | 0x3f000000) - 0.5f);
    return float_of((u & 0x80000000) | (doubled < 0x08000000 ? tiny : normal));
}

#include "threads.h"

#include "work.h"

typedef struct { /* what an instruction set provides */
    Unit encode, decode, few, pack, matmul, pack_t, matmul_t, fold, bits, bernoulli, loss, norm, norm_backward, pointwise;
    Unit attention, attention_backward;
    void (*load)(const void *x, int dtype, int64_t n, int form, void *out); /* x as `few` wants it */
    size_t (*attention_room)(const Attention *a); /* bytes of scratch */
    int columns; /* rows of x up to which `few` is for it */
    int lanes, panel; /* words of a vector, and of the vectors beside each other in a panel */
    int bf16;    /* whether x of bf16 is wanted as it is; all else is wanted in float32 */
} Kernels;

enum { AHEAD = 8192 };  /* bytes of codes between what is decoded and what is asked for: as measured best */
enum { PAST = 8 << 20 }; /* bytes of a result from which it is written past the caches, not read into them */
enum { GROUP = 16 };     /* rows of a weight that are a unit of `few` */
enum { FUSED = 4 };      /* rows of x up to which a product may stay in registers */

/* Of gemm.h, in words of 32 bits: the inner dimension of what is decoded at a time, of what is multiplied at a
   time, and from one row of a sliver to the next, a line more than a slab lest rows fall on the same sets of the cache. */
enum { SLAB = 512, STEPS = 128, APART = SLAB + 16 };
enum { LEAST_ROWS = 24, MOST_ROWS = 144 }; /* rows of a weight that are a unit of matmul: a multiple of all slivers */
enum { STRIPE = 256 };                     /* columns that are a unit of matmul_t */
enum { MOST_X = 512, COPY = 6 << 20 };     /* rows of x that are copied at a time, and bytes */

#define FOLDED 0x243F6A8885A308D3u /* set against a key to be folded, which so is another than one to be drawn from */

/* The 16-bit elements i and 32 + i of two vectors beside each other. */
#define BESIDE4(i) i, i + 32, i + 1, i + 33, i + 2, i + 34, i + 3, i + 35
static const uint16_t BESIDE[64] __attribute__((aligned(64), unused)) = {
    BESIDE4(0), BESIDE4(4), BESIDE4(8), BESIDE4(12), BESIDE4(16), BESIDE4(20), BESIDE4(24), BESIDE4(28)};

INLINE int64_t blocks_of(const Packed *w) { return (w->width + w->block - 1) / w->block; }
INLINE int64_t bytes_of(const Packed *w) { return (w->width * w->bits + 7) / 8; }
INLINE int64_t pieces_of(int64_t width) { return (width + PIECE - 1) / PIECE; }
INLINE int64_t slabs_of(int64_t words) { return (words + SLAB - 1) / SLAB; }
INLINE int64_t padded_to(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

/* The instruction sets. `isa` in the functions below is an index into `available`. */
#define KERNELS_OF(ISA, BF16) {encode_##ISA, decode_##ISA, few_##ISA, pack_##ISA, matmul_##ISA, pack_t_##ISA, \
                               matmul_t_##ISA, fold_##ISA, bits_##ISA, bernoulli_##ISA, loss_##ISA, \
                               norm_##ISA, norm_backward_##ISA, pointwise_##ISA, attention_##ISA, \
                               attention_backward_##ISA, load_##ISA, attention_room_##ISA, COLUMNS_##ISA, LANES_##ISA, \
                               PANEL_##ISA, BF16}
#define PASTE(a, b) a##_##b
#define EXPANDED(a, b) PASTE(a, b)
#define NAME(x) EXPANDED(x, ISA)

/* From TARGET to TARGET_END functions are compiled for these features as well. */
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
#undef ISA

#if defined(__x86_64__)
TARGET(AVX2)
#define ISA avx2
#define LANES_AVX2
#include "isa.h"
#undef LANES_AVX2
#undef ISA
TARGET_END

TARGET(AVX512)
#define ISA avx512
#define LANES_AVX512
#include "isa.h"
#undef ISA
TARGET_END

TARGET(AVX512 ",avx512vbmi,avx512bf16")
#define LANES_BF16
#define ISA avx512_bf16
#include "isa.h"
#undef LANES_BF16
#undef LANES_AVX512
#undef ISA
TARGET_END
#elif defined(__aarch64__)
#define ISA neon
#define LANES_NEON
#include "isa.h"
#undef LANES_NEON
#undef ISA
#endif

static const struct { const char *name; Kernels kernels; } available[] = {
    {"portable", KERNELS_OF(portable, 0)},
#if defined(__x86_64__)
    {"avx2", KERNELS_OF(avx2, 0)},
    {"avx512", KERNELS_OF(avx512, 0)},
    {"avx512_bf16", KERNELS_OF(avx512_bf16, 1)},
#elif defined(__aarch64__)
    {"neon", KERNELS_OF(neon, 0)},
#endif
};

/* --- what Python calls ------------------------------------------------------------------------------------------- */

/* The sizes of the structures that Python has as well, how many operations a step may be, and of how many elements a
   program handles a piece: all have to agree. */
EXPORT int fquant_sizes(int which) {
    const size_t sizes[] = {sizeof(Packed), sizeof(Encoding), sizeof(Pointwise), sizeof(Step), sizeof(Read),
                            sizeof(Attention), OPS, TILE};
    return (int)sizes[which];
}

/* The name of instruction set i, from plain to best; NULL from the first that this machine lacks. */
EXPORT const char *fquant_isa(int i) {
    if (i < 0 || i >= (int)(sizeof available / sizeof *available)) return NULL;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (i >= 1 && !(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))) return NULL;
    if (i >= 2 && !(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))) return NULL;
    if (i >= 3 && !(__builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16"))) return NULL;
#endif
    return available[i].name;
}

/* rows x [rows, width] of dtype to codes and absmax f32. All of these return 0, or -1 if memory ran out. */
EXPORT int64_t fquant_encode(int isa, int threads, const void *x, int dtype, int64_t rows, int64_t width,
                         const Encoding *how, uint8_t *codes, float *absmax) {
    Encode work = {x, dtype, rows, width, *how, codes, absmax};
    int64_t pieces = how->block > PIECE ? 1 : pieces_of(width);
    return run(available[isa].kernels.encode, &work, rows * pieces, 0, NULL, threads);
}

/* Ask for pages of 2 MiB under n bytes at p that were not touched yet: zeroing as many of 4 KiB takes several times as
   long as decoding into them. A hint: where it is not taken nothing changes. */
EXPORT void fquant_large_pages(void *p, size_t n) {
#ifdef __linux__
    uintptr_t start = ((uintptr_t)p + 4095) / 4096 * 4096, end = ((uintptr_t)p + n) / 4096 * 4096;
    if (end > start) madvise((void *)start, end - start, MADV_HUGEPAGE);
#else
    (void)p, (void)n;
#endif
}

/* The part of w from (row, column), rows x width, to out of dtype, whose rows are `stride` elements apart; column is a
   multiple of 32. */
EXPORT int64_t fquant_decode(int isa, int threads, const Packed *w, int64_t row, int64_t rows, int64_t column,
                         int64_t width, int dtype, void *out, int64_t stride) {
    int64_t size = dtype == F32 ? 4 : 2, aligned = ((uintptr_t)out | (uintptr_t)(stride * size)) % 64 == 0;
    Decode work = {*w, row, rows, column, width, dtype, out, stride, aligned && rows * width * size > PAST};
    return run(available[isa].kernels.decode, &work, rows * pieces_of(width), 0, NULL, threads);
}

#include "matmul.h"

/* x [m, in] · wᵀ to y [m, out], and x [m, out] · w to y [m, in]; x and y of dtype. Where `room` is NULL but needed they
   do nothing and return how many bytes it has to have. */
EXPORT int64_t fquant_matmul(int isa, int threads, const Packed *w, const void *x, int64_t m, void *y, int dtype,
                             void *room) {
    return product(isa, threads, 0, w, x, m, y, dtype, room);
}
EXPORT int64_t fquant_matmul_t(int isa, int threads, const Packed *w, const void *x, int64_t m, void *y, int dtype,
                               void *room) {
    return product(isa, threads, 1, w, x, m, y, dtype, room);
}

/* Keys and data [n] to new keys [n]. */
EXPORT int64_t fquant_fold(int isa, int threads, const uint64_t *keys, const uint64_t *data, int64_t n, uint64_t *out) {
    Draw work = {keys, data, out, n, 0};
    return run(available[isa].kernels.fold, &work, pieces_of(n), 0, NULL, threads);
}

/* The first n words of each of `num` keys, to out [num, n]. */
EXPORT int64_t fquant_bits(int isa, int threads, const uint64_t *keys, int64_t num, int64_t n, uint64_t *out) {
    Draw work = {keys, NULL, out, n, 0};
    return run(available[isa].kernels.bits, &work, num * pieces_of((n + 1) / 2), 0, NULL, threads);
}

/* Whether they are below the threshold, which is 2^32 at most, to out [num, n]: 0 or 1. */
EXPORT int64_t fquant_bernoulli(int isa, int threads, const uint64_t *keys, int64_t num, int64_t threshold, int64_t n,
                                uint8_t *out) {
    Draw work = {keys, NULL, out, n, (uint32_t)(threshold - 1)};
    if (!threshold) return memset(out, 0, (size_t)(num * n)), 0;
    return run(available[isa].kernels.bernoulli, &work, num * pieces_of((n + 1) / 2), 0, NULL, threads);
}

/* The negative log likelihoods of targets [rows], which are in [0, width) or `ignore`, to nll [rows]; and their slope
   with respect to the logits, times factor [rows], to slope [rows, width] of their dtype. */
EXPORT int64_t fquant_nll(int isa, int threads, const void *logits, int dtype, int64_t rows, int64_t width,
                          int64_t apart, const int64_t *targets, int64_t ignore, const float *factor, float *nll,
                          void *slope) {
    Loss work = {logits, targets, factor, nll, slope, width, apart, ignore, dtype};
    return run(available[isa].kernels.loss, &work, rows, 0, NULL, threads);
}

/* Attention, or where there is a g its slope. */
EXPORT int64_t fquant_attention(int isa, int threads, const Attention *a) {
    const Kernels *k = &available[isa].kernels;
    Attention work = *a;
    int64_t panels = (a->t + k->panel - 1) / k->panel, heads = a->batch * a->kv;
    work.half = k->bf16 && a->dtype == BF16;
    work.parts = a->g ? 1 : MAX(1, MIN(panels, 2 * threads / heads));
    Unit unit = a->g ? k->attention_backward : k->attention;
    return run(unit, &work, heads * work.parts, k->attention_room(&work), NULL, threads);
}

/* Groups of rows of about a PIECE. */
static int normalise(Unit unit, Norm work, int threads) {
    work.group = MAX(1, MIN(MOST_GROUPED, PIECE / MAX(1, work.width)));
    threads = (int)MIN((int64_t)threads, work.rows * work.width / ALONE + 1);
    return run(unit, &work, (work.rows + work.group - 1) / work.group, 0, NULL, threads);
}

/* Rows x [rows, width], each divided by the root of the mean of its squares plus eps, times the weight [width], to y
   [rows, width], all of dtype; and what each was multiplied by, to scale [rows]. */
EXPORT int64_t fquant_norm(int isa, int threads, const void *x, int dtype, int64_t rows, int64_t width, int64_t apart,
                           const void *weight, double eps, void *y, float *scale) {
    Norm work = {NULL, x, weight, y, scale, eps, rows, width, apart, 0, 1, dtype};
    return normalise(available[isa].kernels.norm, work, threads);
}

/* The slope of that: g [rows, width], of the same dtype, to dx [rows, width]. */
EXPORT int64_t fquant_norm_backward(int isa, int threads, const void *x, int dtype, int64_t rows, int64_t width,
                                 int64_t apart, const void *weight, float *scale, const void *g, int64_t apart_g,
                                 void *dx) {
    Norm work = {g, x, weight, dx, scale, 0.0, rows, width, apart, apart_g, 1, dtype};
    return normalise(available[isa].kernels.norm_backward, work, threads);
}

/* The steps of a program, on tensors whose memory begins at `at`: those that are read, then those that are written. */
EXPORT int64_t fquant_pointwise(int isa, int threads, const Pointwise *program, void *const *at) {
    Pointwise work = *program;
    work.at = at;
    int64_t units = (work.total + TILE - 1) / TILE;
    threads = (int)MIN((int64_t)threads, (work.total + ALONE - 1) / ALONE);
    return run(available[isa].kernels.pointwise, &work, units, (size_t)work.registers * TILE * 4, NULL, threads);
}
