/* The kernels of packed arrays for CPUs: plain C, no headers of torch or Python, reached by ctypes
   (cpu_library.py).

   Every kernel is written once, in cpu_encode.h, cpu_decode.h and cpu_product.h over the vector vocabulary of
   cpu_lanes.h, and compiled here once for each instruction set; which one runs is an argument. This file has what they
   share: the descriptor of a packed array, the conversions between float types, the threads, and the functions that
   Python calls.

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

enum { F32, BF16, F16 };          /* the dtypes, as Python numbers them */
enum { PIECE = 4096 };            /* elements handled at a time; every block size divides it */
enum { MAX_SCALES = PIECE / 32 }; /* of a piece */

typedef struct { /* cpu_library.py has the same */
    const uint8_t *codes;      /* [rows, bytes] */
    const void *scale;         /* f32[rows, blocks], or their u8 codes if nested */
    const float *nested;       /* f32: the absmax of the scales' own blocks, which run over all of them; or NULL */
    const float *nested_table; /* f32[256] */
    const float *nested_offset;/* f32[], or NULL */
    const float *offset;       /* f32[], or NULL */
    const float *table;        /* f32[1 << bits]; NULL: the codes are int8 */
    int64_t rows, width, block, nested_block;
    int32_t bits, dtype;
} Packed;

typedef struct { /* how to encode; cpu_library.py has the same */
    const float *middles;  /* f32[15]: 4 bits, between the sorted values */
    const uint8_t *order;  /* u8[16]: 4 bits, the code of every sorted value */
    const uint8_t *grid;   /* u8[65536]: 8 bits, the code at every point of [-1, 1]; NULL, and no middles: int8 */
    int64_t block;
    int32_t bits, sorted;  /* sorted: order is 0 .. 15 */
} Encoding;

/* --- float types ------------------------------------------------------------------------------------------------- */

INLINE uint32_t bits_of(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
INLINE float float_of(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }

INLINE uint16_t to_bf16(float x) { /* to nearest even */
    uint32_t u = bits_of(x), rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16;
    return (u & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded;
}
INLINE float from_bf16(uint16_t h) { return float_of((uint32_t)h << 16); }

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

/* --- threads ----------------------------------------------------------------------------------------------------- */

typedef void (*Body)(void *);
typedef void (*Team)(Body, void *, unsigned, unsigned);

/* GOMP_parallel of the OpenMP runtime that torch has loaded: its threads are then ours, and two pools never spin
   against each other. Without one, threads are made for each call. */
static Team team;
EXPORT void fquant_team(Team t) { team = t; }

typedef struct {
    void (*unit)(void *work, int64_t i, void *scratch);
    void *work;
    size_t scratch;
    int64_t units, share, next; /* share: units taken at a time, or the counter would cost more than they */
    int failed;
} Loop;

static void run_units(void *data) {
    Loop *loop = data;
    void *scratch = NULL;
    if (loop->scratch && posix_memalign(&scratch, 64, loop->scratch)) {
        __atomic_store_n(&loop->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    for (int64_t i; (i = __atomic_fetch_add(&loop->next, loop->share, __ATOMIC_RELAXED)) < loop->units;)
        for (int64_t end = MIN(i + loop->share, loop->units); i < end; i++) loop->unit(loop->work, i, scratch);
    free(scratch);
}

static void *run_thread(void *data) { run_units(data); return NULL; }

/* unit(work, i, scratch) for every i < units, shared out as threads become free; 1 if memory ran out. */
static int run(void (*unit)(void *, int64_t, void *), void *work, int64_t units, size_t scratch, int threads) {
    Loop loop = {unit, work, scratch, units, units / (threads * 32 + 1) + 1, 0, 0};
    threads = (int)MIN((int64_t)threads, units);
    if (threads <= 1) {
        run_units(&loop);
    } else if (team) {
        team(run_units, &loop, (unsigned)threads, 0);
    } else {
        pthread_t made[64];
        int n = 0;
        for (threads = MIN(threads, 64); n < threads - 1; n++)
            if (pthread_create(&made[n], NULL, run_thread, &loop)) break;
        run_units(&loop);
        while (n--) pthread_join(made[n], NULL);
    }
    return loop.next < units || loop.failed;
}

/* --- the work of one call, in units of rows or of pieces of rows ---------------------------------------------------- */

typedef struct { const void *x; int dtype; int64_t rows, width; Encoding how; uint8_t *codes; float *absmax; } Encode;
typedef struct { Packed w; int64_t row, rows, column, width; int dtype; void *out; int64_t stride; int past; } Decode;
typedef struct { Packed w; const void *x; int64_t m, padded, apart; void *y; int dtype, form; } Product;

typedef struct { /* what an instruction set provides */
    void (*encode)(void *, int64_t, void *), (*decode)(void *, int64_t, void *), (*matmul)(void *, int64_t, void *),
        (*matmul_t)(void *, int64_t, void *);
    void (*load)(const void *x, int dtype, int64_t n, int form, void *out); /* x as the products want it */
    int bf16; /* whether matmul wants x of bf16 as it is; all else is wanted in float32 */
} Kernels;

enum { AHEAD = 12288 };            /* bytes of codes between what is decoded and what is asked for: as measured best */
enum { PAST = 8 << 20 };           /* bytes of a result from which it is written past the caches, not read into them */
enum { GROUP = 16, STRIPE = 256 }; /* rows, or columns, of a weight that are one unit of a product */
enum { FUSED = 4 };                /* rows of x up to which a product may stay in registers */

INLINE int64_t blocks_of(const Packed *w) { return (w->width + w->block - 1) / w->block; }
INLINE int64_t bytes_of(const Packed *w) { return (w->width * w->bits + 7) / 8; }
INLINE int64_t pieces_of(int64_t width) { return (width + PIECE - 1) / PIECE; }
INLINE int64_t padded_to(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

/* The instruction sets. `isa` in the functions below is an index into `available`. */
#define KERNELS_OF(ISA, BF16) {encode_##ISA, decode_##ISA, matmul_##ISA, matmul_t_##ISA, load_##ISA, BF16}
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
#include "cpu_isa.h"
#undef ISA

#if defined(__x86_64__)
TARGET(AVX2)
#define ISA avx2
#define LANES_AVX2
#include "cpu_isa.h"
#undef LANES_AVX2
#undef ISA
TARGET_END

TARGET(AVX512)
#define ISA avx512
#define LANES_AVX512
#include "cpu_isa.h"
#undef ISA
TARGET_END

TARGET(AVX512 ",avx512bf16")
#define LANES_BF16
#define ISA avx512_bf16
#include "cpu_isa.h"
#undef LANES_BF16
#undef LANES_AVX512
#undef ISA
TARGET_END
#elif defined(__aarch64__)
#define ISA neon
#define LANES_NEON
#include "cpu_isa.h"
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

/* The sizes of Packed and Encoding, which Python has to agree with. */
EXPORT int fquant_size(int which) { return (int)(which ? sizeof(Encoding) : sizeof(Packed)); }

/* The name of instruction set i, from plain to best; NULL from the first that this machine lacks. */
EXPORT const char *fquant_isa(int i) {
    if (i < 0 || i >= (int)(sizeof available / sizeof *available)) return NULL;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (i >= 1 && !(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))) return NULL;
    if (i >= 2 && !(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))) return NULL;
    if (i >= 3 && !__builtin_cpu_supports("avx512bf16")) return NULL;
#endif
    return available[i].name;
}

/* rows x [rows, width] of dtype to codes and absmax f32. All of these return 0, or 1 if memory ran out. */
EXPORT int fquant_encode(int isa, int threads, const void *x, int dtype, int64_t rows, int64_t width,
                         const Encoding *how, uint8_t *codes, float *absmax) {
    Encode work = {x, dtype, rows, width, *how, codes, absmax};
    int64_t pieces = how->block > PIECE ? 1 : pieces_of(width);
    return run(available[isa].kernels.encode, &work, rows * pieces, 0, threads);
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
EXPORT int fquant_decode(int isa, int threads, const Packed *w, int64_t row, int64_t rows, int64_t column,
                         int64_t width, int dtype, void *out, int64_t stride) {
    int64_t size = dtype == F32 ? 4 : 2, aligned = ((uintptr_t)out | (uintptr_t)(stride * size)) % 64 == 0;
    Decode work = {*w, row, rows, column, width, dtype, out, stride, aligned && rows * width * size > PAST};
    return run(available[isa].kernels.decode, &work, rows * pieces_of(width), 0, threads);
}

/* Whether a product with x of dtype is of the fastest kind: bf16 throughout, and nothing moved to its place. */
EXPORT int fquant_deals(int isa, const Packed *w, int dtype) {
    return available[isa].kernels.bf16 && dtype == BF16 && w->bits == 4 && w->block % 64 == 0 && w->width % 128 == 0 &&
           !w->offset;
}

static int product(int isa, int threads, int transposed, const Packed *w, const void *x, int64_t m, void *y, int dtype) {
    const Kernels *k = &available[isa].kernels;
    int64_t inner = transposed ? w->rows : w->width, padded = padded_to(inner, 64);
    int deals = fquant_deals(isa, w, dtype), form = deals ? 2 - transposed : k->bf16 && dtype == BF16 && !transposed;
    size_t from = dtype == F32 ? 4 : 2, to = form ? 2 : 4;
    int64_t apart = padded + 64 / (int64_t)to; /* a line more, lest all rows fall on the same sets of the cache */
    char *copy;
    if (posix_memalign((void **)&copy, 64, (size_t)(m * apart) * to)) return 1;
    for (int64_t i = 0; i < m; i++) {
        char *row = copy + (size_t)(i * apart) * to;
        k->load((const char *)x + (size_t)(i * inner) * from, dtype, inner, form, row);
        memset(row + (size_t)inner * to, 0, (size_t)(padded - inner) * to);
    }
    Product work = {*w, copy, m, padded, apart, y, dtype, form};
    if (w->dtype == F32) work.w.dtype = dtype; /* the weight is rounded to x's dtype, and computed with in float32 */
    int64_t units = transposed ? (w->width + STRIPE - 1) / STRIPE : (w->rows + GROUP - 1) / GROUP;
    size_t scratch = transposed ? (size_t)STRIPE * 4 * (size_t)(GROUP + m) : (size_t)apart * to * 4;
    int failed = run(transposed ? k->matmul_t : k->matmul, &work, units, scratch, threads);
    free(copy);
    return failed;
}

/* x [m, in] · wᵀ to y [m, out], and x [m, out] · w to y [m, in]; x and y of dtype. w is float32, or of x's dtype, or x
   is float32: not one of 16 bits by another. */
EXPORT int fquant_matmul(int isa, int threads, const Packed *w, const void *x, int64_t m, void *y, int dtype) {
    return product(isa, threads, 0, w, x, m, y, dtype);
}
EXPORT int fquant_matmul_t(int isa, int threads, const Packed *w, const void *x, int64_t m, void *y, int dtype) {
    return product(isa, threads, 1, w, x, m, y, dtype);
}
