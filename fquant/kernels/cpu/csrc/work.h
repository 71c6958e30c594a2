/* The arguments of a call, in units of rows, pieces of rows, or tiles. library.py has the same Packed, Encoding,
   Attention, Step, Read and Pointwise. `dtype` is F32, BF16 or F16. */

enum { CODES = 256, MOST_DIM = 64 }; /* vectors of a stage, and their elements */
typedef struct { /* a packed array */
    const uint8_t *codes;      /* [rows, bytes] */
    const void *scale;         /* f32[rows, blocks], or their u8 codes if nested */
    const float *nested;       /* f32: the absmax of blocks of scales, over the flat array of all scales; or NULL */
    const float *nested_table; /* f32[256] */
    const uint8_t *nested_bytes; /* u8[4, 256]: nested_table, byte by byte */
    const float *nested_offset;/* f32[], or NULL */
    const float *offset;       /* f32[], or NULL */
    const float *table;        /* f32[1 << bits], at least 16; NULL: the codes are int8 */
    const float *zero;         /* f32[rows, blocks]: subtracted from values of the table; or NULL */
    const float *vectors;      /* f32[stages, 256, dim]: a group of `dim` elements is a sum of one of each stage; or NULL */
    int64_t rows, width, block, nested_block;
    int32_t stages, dim;       /* of vectors: dim up to MOST_DIM */
    int32_t bits, dtype;       /* bits: 0 if the codes are elements of a dense weight, of the dtype of x; 16 for the
                                  integers of one, which integers.h reads */
    float least;               /* scale from which no value is denormal: 2^-125 / the least magnitude but 0, with zero
                                  points that are tame (dequantize.h) */
    int32_t plain;             /* 8 bits: the value of a code is code + table[0], integers that float32 has */
} Packed;

typedef struct { /* how to encode */
    const float *middles;  /* f32[15]: 4 bits, between the sorted values */
    const uint8_t *order;  /* u8[16]: 4 bits, the code of every sorted value */
    const uint8_t *grid;   /* u8[65536]: 8 bits, the code at every point of [-1, 1]; NULL, and no middles: int8 */
    int64_t block;
    int32_t bits, sorted;  /* sorted: order is 0 .. 15 */
} Encoding;

typedef struct { const void *x; int dtype; int64_t rows, width; Encoding how; uint8_t *codes; float *absmax; } Encode;
typedef struct { Packed w; int64_t row, rows, column, width; int dtype; void *out; int64_t stride; int past; } Decode;
typedef struct { Packed w; const void *x; int64_t m, padded, apart; void *y; int dtype, form; } Gemv;
typedef struct { /* x [m, inner] in `words` words a row; copy: of x, packed, or NULL; group: rows in a unit, of w or, in
                    stripes.h, of x */
    Packed w;
    const void *x;
    void *copy, *y;
    int64_t m, inner, words, group;
    int64_t turned;         /* of gemm.h: 0, or elements from a row of the result to the next, if that is w · xᵀ */
    int64_t columns, apart; /* of stripes.h: columns of y; words from a row of `copy` to the next */
    int64_t stripe, stripes; /* columns of a stripe; stripes in a unit if sums are short, else 0 */
    int of_rows;            /* true if columns of y are rows of w, in float32 */
    int dtype, half, interleaved;
} Gemm;

typedef struct { /* products of dense x [m, inner] and w; next: bytes from one of x, of w and of y to the next */
    Packed w;
    const char *x;
    char *y;
    int64_t m, next[3];
    int isa, threads, transposed, turned, dtype; /* threads: of one product */
} Batch;

/* How rows of x are quantised: to integers from `first` to `last` in units of absmax / unit, or with a zero point; or
   as LLM.int8(), after rounding to float16. */
typedef struct { float first, last, unit; int32_t zero, halves; } Rounding;

/* How codes of w are integers: levels [1 << bits], or int8 codes if NULL; plain: code + levels[0], levels of step 1. */
typedef struct { const int16_t *levels; int32_t plain, unit; } Levels; /* unit: 1 if the step is 1, else 127 */

/* x [m, inner] to quantise; across: the stride of its elements if it is stored transposed, else 0. */
typedef struct { const void *x; const Rounding *how; int64_t across, m; } Operand;

typedef struct { /* x [m, inner] in `words` of two integers, or four bytes, a row; tall: m, padded */
    Packed w;
    Rounding how;
    const void *x;
    void *y, *copy; /* copy: q or bytes, packed in panels */
    int64_t across; /* the stride of x's elements if x is stored transposed, else 0 */
    int16_t *q;     /* [m, 2 words]; or */
    int8_t *bytes;  /* [m, 4 words] */
    float *scale;   /* f32[tall]: of rows of x */
    int32_t *sums;  /* of the integers of each row and block, strides `sums_apart`; NULL if not needed */
    int64_t sums_apart[2], m, inner, words, tall, group;
    Levels levels;
    int32_t low, dtype; /* low: integers of the weight minus their bytes */
} Integers;

typedef struct { /* n words of each key, or bytes that are 1 for words up to `most`; or data for each of n keys */
    const uint64_t *keys, *data;
    void *out;
    int64_t n;
    uint32_t most;
    int bytes;
} Draw;

typedef struct { /* rows of logits [width] with stride `apart` */
    const void *logits;
    const int64_t *targets;
    const float *factor; /* of the gradient of each row; or NULL */
    float *nll;
    void *slope; /* gradient of the logits; or NULL */
    int64_t width, apart, ignore;
    int dtype;
} Loss;

enum { ABREAST = 64, SUMMED = 16 * ABREAST }; /* partial sums of a row, and elements after which they are added */
enum { MOST_GROUPED = 64 };                   /* short rows in a unit */
typedef struct { /* rows [width] with strides `apart` in x and `apart_g` in g */
    const void *g, *x, *weight; /* g: the gradient of y, and `out` is that of x; or NULL, and `out` is y */
    void *out;
    float *scale; /* of each row: written with y, read for the gradient */
    double eps;
    int64_t rows, width, apart, apart_g, group; /* group: rows in a unit */
    int dtype;
} Norm;

/* Attention of q [b heads t e] to k and v [b kv t e]: y and lse f32[b heads t]; or if g is not NULL, the gradients dq,
   dk and dv. Strides are those of b, heads and tokens, in elements. `labels` i32[b labelled], or NULL, is the first
   token of each token's document, with a panel of padding. A causal token sees `window` tokens, itself included; 0:
   all. `sinks` f32[b heads], or NULL, are scores of one more key of value 0; the gradient finds them in lse. */
enum { KEYS = 96, SIX = 6 }; /* keys of a tile, a multiple of six and of all vectors; rows of a micro-kernel */
typedef struct {
    const void *q, *k, *v, *g;
    void *y, *dq, *dk, *dv;
    float *lse;
    const float *sinks;
    const int32_t *labels;
    int64_t qs[3], ks[3], vs[3], gs[3], ys[3], dqs[3], dks[3];
    int64_t batch, heads, kv, t, e, labelled, window, parts;
    float scale;
    int32_t dtype, half, causal;
} Attention;

/* Attention of one token of each sequence, q [batch heads e], to the slots up to its position in k and v
   [batch slots kv e]: y [batch heads e]. Scores are limited to cap * tanh(score / cap) if `cap` is above 0. `sinks`
   f32[batch heads], or NULL, as in Attention. */
enum { ABREAST_HEADS = 4 }; /* heads of queries that read a slot together */
typedef struct {
    const void *q, *k, *v;
    void *y;
    const int64_t *position;
    const float *sinks;
    int64_t slots, kv, heads, e;
    float scale, cap;
    int dtype;
} Cached;

typedef struct { const void *x, *w; void *y; int64_t m, rows, width; int dtype; } Dense; /* y [m rows] = x · wᵀ */

/* An elementwise program. library.py numbers the operations like this. */
enum {
    READ, WRITE, CONSTANT, ADD, SUB, MUL, DIV, NEG, RECIPROCAL, TO, WHERE, TURN, DECAY, SILU, SILU_DERIVATIVE, ROOT, OPS
};
enum { TILE = 512, MAX_DIMS = 6 }; /* PIECE of pointwise_program.py, and DIMS of library.py */
enum { ALONE = 8192 };             /* elements of a thread, below which another is not worth waking */
typedef struct { int32_t op, dtype, to, a, b, c; float value; } Step; /* a, b, c: registers; or places in `at` */
typedef struct { int64_t stride[MAX_DIMS]; int32_t dtype, whole; } Read; /* whole: strides of the result */
typedef struct {
    const Step *steps;
    const Read *reads;
    void *const *at;
    int64_t count, total, dims, registers, size[MAX_DIMS];
} Pointwise;

/* A step of an optimiser (moments.h). A packed moment has blocks of a power of two up to a PIECE. */
enum { ADAMW, ADAM, LION, SGD, NESTEROV, MEAN, NESTEROV_MEAN }; /* library.py numbers the rules like this */
enum { CELLS, SEGMENTS, FP8_CODES };       /* ways to 8-bit codes */
enum { AHEAD_OF = 1024 };                  /* elements to prefetch ahead */
typedef struct {
    const float *table;       /* f32[1 << bits] */
    const uint8_t *planes;    /* u8[4, 256]: the table byte by byte; NULL for 4 bits */
    const float *thresholds;  /* f32[15]: 4 bits */
    const uint8_t *order;     /* u8[16]: 4 bits; NULL if the order is that of the codes */
    const float *segments;    /* f32[4, 8]: edges, slopes, starts and lasts of a dynamic map; or NULL */
    const uint32_t *cells;    /* 8 bits, if there are no segments: codes by upper 16 bits; or NULL: E4M3 */
    int64_t block;
    uint32_t low, high;       /* of the cells; or ORIGIN and SLOPE of the segments */
    int32_t bits, has_sign, grid; /* has_sign: magnitude 0 of the segments is code 127; grid: bitsandbytes' scales */
    float least, top, floor;  /* of an absmax; the largest value of the table; to which numbers above zero are raised */
} Moment;
/* Of 32 bits codes are floats, and there are no scales. */
typedef struct { const uint8_t *codes; const float *scale; uint8_t *new_codes; float *new_scale; } State;
typedef struct { /* `count` updates of n elements each: changes f32[n], or if `apply` the new parameter */
    const void *grad, *param;
    void *out;
    const float *rates; /* [count, 3]: minus the learning rate, and for ADAMW and ADAM 1 / debias1 and
                           1 / sqrt(debias2), or both debiases if moments are floats */
    const uint64_t *key;   /* [count], of stochastic rounding to 16 bits; or NULL */
    const uint8_t *active; /* [count], 0 where all stays as it is; or NULL */
    Moment moments[2];
    State states[2];
    int64_t count, n, chunk, first; /* chunk: the larger block; first: the number of the first random word */
    int64_t rows, columns; /* of matrices, if the gradient is that of their transposes, and moments are floats; else 0 */
    float b1, rest1, b2, rest2, eps, decay; /* rest: 1 - b */
    int32_t rule, grad_dtype, param_dtype, apply;
} Update;

/* Codes to compare rows with, in panels (nearest.h): [padded / PANEL][d][PANEL], and half [padded], infinite for
   padding. */
enum { NEAR = 48 };        /* rows in a unit: a multiple of SIX and of all vectors */
enum { SLICE = 4096 };      /* floats of panels that a unit's rows are multiplied with in turn */
enum { SCORES = 1 << 18 }; /* scores of a unit that are kept for more than one code a row */
typedef struct { const float *panels, *half; int64_t padded, d; int unordered; } Table; /* if scores can be NaN */
typedef struct { Table table; const float *x; int64_t *index; float *score; int64_t n, rows; int top; } Nearest;

/* The search for codes u8[n, stages] of groups x [n, d], and the sums of residuals (beam_search.h). */
enum { SUMMED_ROWS = 8192 }; /* groups that are added in turn */
typedef struct { Table table; const float *x, *near, *vectors; uint8_t *codes; int64_t n, d, stages; int beam; } Beam;
typedef struct { const float *x, *mass, *vectors; const uint8_t *codes; double *parts; int64_t n, d, m, stages, stage; } Sums;

/* The number and the sum of the rows x [sets, n, d] of each of k codes [sets, n] (sums_by_code.h). */
enum { SUMMED_COLUMNS = 64 }; /* of a unit */
typedef struct { const float *x; const int64_t *codes; float *counts, *sums; int64_t n, d, k; int beyond; } ByCode;

/* The digests [n, 8] of n buffers (sha256.h). */
typedef struct { const uint8_t *const *data; const int64_t *bytes; uint32_t *digests; int64_t n; } Hashed;
