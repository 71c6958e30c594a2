/* All kernels for the instruction set ISA. kernels.c includes this file once for each. */

#include "simd.h"

/* Convert n elements from x + at to floats. */
static void NAME(floats)(const void *x, int dtype, int64_t at, int64_t n, float *restrict out) {
    const uint16_t *h = (const uint16_t *)x + at;
    if (dtype == F32) memcpy(out, (const float *)x + at, (size_t)n * 4);
    else if (dtype == BF16) for (int64_t i = 0; i < n; i++) out[i] = from_bf16(h[i]);
    else for (int64_t i = 0; i < n; i++) out[i] = from_f16(h[i]);
}

/* Round n floats and store them from out + at. */
static void NAME(halves)(const float *restrict x, int64_t n, int dtype, void *restrict out, int64_t at) {
    uint16_t *h = (uint16_t *)out + at;
    if (dtype == F32) memcpy((float *)out + at, x, (size_t)n * 4);
    else if (dtype == BF16) for (int64_t i = 0; i < n; i++) h[i] = to_bf16(x[i]);
    else for (int64_t i = 0; i < n; i++) h[i] = to_f16(x[i]);
}

#include "quantize.h"
#include "dequantize.h"
#include "additive.h"
#include "gemv.h"
#include "amx.h"
#include "gemm.h"
#include "stripes.h"
#include "quantized_rows.h"
#include "integers.h"
#include "few_integers.h"
#include "threefry.h"
#include "exp.h"
#include "rows.h"
#include "loss.h"
#include "norm.h"
#include "tiles.h"
#include "attention.h"
#include "decoding.h"
#include "pointwise.h"
#include "moments.h"
#include "nearest.h"
#include "beam_search.h"
#include "sums_by_code.h"
#include "sha256.h"

#undef BY_HALF
#undef FMA
#undef DOT
#undef ISA
