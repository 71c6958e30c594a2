/* All kernels of one instruction set, ISA. Included by cpu.c once for each. */

#include "cpu_lanes.h"

/* n elements from x + at, as floats. */
static void NAME(floats)(const void *x, int dtype, int64_t at, int64_t n, float *restrict out) {
    const uint16_t *h = (const uint16_t *)x + at;
    if (dtype == F32) memcpy(out, (const float *)x + at, (size_t)n * 4);
    else if (dtype == BF16) for (int64_t i = 0; i < n; i++) out[i] = from_bf16(h[i]);
    else for (int64_t i = 0; i < n; i++) out[i] = from_f16(h[i]);
}

/* n floats to x + at. */
static void NAME(halves)(const float *restrict x, int64_t n, int dtype, void *restrict out, int64_t at) {
    uint16_t *h = (uint16_t *)out + at;
    if (dtype == F32) memcpy((float *)out + at, x, (size_t)n * 4);
    else if (dtype == BF16) for (int64_t i = 0; i < n; i++) h[i] = to_bf16(x[i]);
    else for (int64_t i = 0; i < n; i++) h[i] = to_f16(x[i]);
}

#include "cpu_encode.h"
#include "cpu_decode.h"
#include "cpu_few.h"
#include "cpu_panels.h"
#include "cpu_random.h"
#include "cpu_exp.h"
#include "cpu_rows.h"
#include "cpu_loss.h"
#include "cpu_norm.h"
#include "cpu_tiles.h"
#include "cpu_attention.h"
#include "cpu_pointwise.h"

#undef FMA
#undef DOT
