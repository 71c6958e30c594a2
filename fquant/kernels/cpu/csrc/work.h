/* What the kernels are given: packed arrays and how to encode, as cpu_library.py has them too, and the work of one call,
   which is done in units of rows, of pieces of rows, or of tiles. `dtype` is one of F32, BF16 and F16. */

typedef struct { /* cpu_library.py has the same */
    const uint8_t *codes;      /* [rows, bytes] */
    const void *scale;         /* f32[rows, blocks], or their u8 codes if nested */
    const float *nested;       /* f32: the absmax of the scales' own blocks, which run over all of them; or NULL */
    const float *nested_table; /* f32[256] */
    const uint8_t *nested_bytes; /* u8[4, 256]: the same, byte by byte */
    const float *nested_offset;/* f32[], or NULL */
    const float *offset;       /* f32[], or NULL */
    const float *table;        /* f32[1 << bits]; NULL: the codes are int8 */
    int64_t rows, width, block, nested_block;
    int32_t bits, dtype;
    float least;               /* scales from which no value is denormal: 2^-126 over the least of the table beside 0 */
} Packed;

typedef struct { /* how to encode; cpu_library.py has the same */
    const float *middles;  /* f32[15]: 4 bits, between the sorted values */
    const uint8_t *order;  /* u8[16]: 4 bits, the code of every sorted value */
    const uint8_t *grid;   /* u8[65536]: 8 bits, the code at every point of [-1, 1]; NULL, and no middles: int8 */
    int64_t block;
    int32_t bits, sorted;  /* sorted: order is 0 .. 15 */
} Encoding;

typedef struct { const void *x; int dtype; int64_t rows, width; Encoding how; uint8_t *codes; float *absmax; } Encode;
typedef struct { Packed w; int64_t row, rows, column, width; int dtype; void *out; int64_t stride; int past; } Decode;
typedef struct { Packed w; const void *x; int64_t m, padded, apart; void *y; int dtype, form; } Few;
typedef struct { /* x [m, inner], each row of which is so many words; copy: of x, or NULL; group: rows of w in a unit */
    Packed w;
    const void *x;
    void *copy, *y;
    int64_t m, inner, words, group;
    int dtype, half, deals;
} Product;

typedef struct { /* n words of each key, of which those up to `most` are counted; or data for each of n keys */
    const uint64_t *keys, *data;
    void *out;
    int64_t n;
    uint32_t most;
} Draw;

typedef struct { /* rows of logits [width], `apart` elements from each other */
    const void *logits;
    const int64_t *targets;
    const float *factor; /* what is multiplied into the slope of every row; or NULL */
    float *nll;
    void *slope; /* or NULL */
    int64_t width, apart, ignore;
    int dtype;
} Loss;

enum { ABREAST = 64, SUMMED = 16 * ABREAST }; /* sums that a row is added up in, and elements until they are added */
enum { MOST_GROUPED = 64 };                   /* rows that are a unit, if they are short */
typedef struct { /* rows [width], those of x and of g so many elements from each other */
    const void *g, *x, *weight; /* g: the gradient of y, whose slope then is `out`; or NULL, and `out` is y */
    void *out;
    float *scale; /* of every row: written with y, read for the slope */
    double eps;
    int64_t rows, width, apart, apart_g, group; /* group: rows that are a unit */
    int dtype;
} Norm;

/* Attention of q [b heads t e] to k and v [b kv t e], to y and lse f32[b heads t]; of a slope, g is there, y and lse are
   given, and dq, dk and dv [like q, k, k] are made. Strides are those of b, of heads and of tokens, in elements. Of
   several documents `labels` i32[b labelled] is the first token of each token's, with room for a panel behind them.
   cpu_library.py has the same. */
enum { KEYS = 96, SIX = 6 }; /* keys of a tile, a multiple of six and of all vectors; rows that are multiplied at a time */
typedef struct {
    const void *q, *k, *v, *g;
    void *y, *dq, *dk, *dv;
    float *lse;
    const int32_t *labels;
    int64_t qs[3], ks[3], vs[3], gs[3], ys[3], dqs[3], dks[3];
    int64_t batch, heads, kv, t, e, labelled, parts;
    float scale;
    int32_t dtype, half;
} Attention;

/* An elementwise program; cpu_pointwise.py has the same, and numbers the operations so. */
enum { READ, WRITE, CONSTANT, ADD, SUB, MUL, DIV, NEG, RECIPROCAL, TO, WHERE, TURN, DECAY, SILU, SILU_SLOPE, OPS };
enum { TILE = 512, MAX_DIMS = 6 }; /* program.py has the TILE as PIECE */
enum { ALONE = 8192 }; /* elements up to which another thread is not worth waking */
typedef struct { int32_t op, dtype, to, a, b, c; float value; } Step; /* registers, and of READ and WRITE what of `at` */
typedef struct { int64_t stride[MAX_DIMS]; int32_t dtype, whole; } Read; /* whole: as the result lies in memory */
typedef struct {
    const Step *steps;
    const Read *reads;
    void *const *at;
    int64_t count, total, dims, registers, size[MAX_DIMS];
} Pointwise;
