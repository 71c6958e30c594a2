/* Elementwise programs (fquant/kernels/ops/pointwise.py). A unit is a TILE of the result; a register is a tile of
   floats. Elements of a step after the end of the last tile are never stored. */

/* Read n elements of a tensor, numbered as in the result from `start` on, as floats. */
static void NAME(read)(const Pointwise *p, int which, int64_t start, int64_t n, float *restrict out) {
    const Read *r = p->reads + which;
    const void *x = p->at[which];
    int64_t index[MAX_DIMS], offset = 0, last = p->dims - 1;
    if (r->whole && r->dtype != BOOL) {
        int64_t size = size_of(r->dtype); /* hardware prefetch misses several tensors in turn */
        const char *next = (const char *)x + (start + n) * size;
        for (int64_t i = 0; i < n * size; i += 64) __builtin_prefetch(next + i);
        NAME(floats)(x, r->dtype, start, n, out);
        return;
    }
    for (int64_t d = last, rest = start; d >= 0; rest /= p->size[d--]) {
        index[d] = rest % p->size[d];
        offset += index[d] * r->stride[d];
    }
    for (int64_t k; n; n -= k, out += k) {
        int64_t stride = r->stride[last];
        k = MIN(n, p->size[last] - index[last]);
        if (r->dtype == BOOL) {
            const uint8_t *b = (const uint8_t *)x + offset;
            for (int64_t i = 0; i < k; i++) out[i] = b[i * stride];
        } else if (stride == 1) {
            NAME(floats)(x, r->dtype, offset, k, out);
        } else {
            float one;
            if (!stride) NAME(floats)(x, r->dtype, offset, 1, &one);
            for (int64_t i = 0; i < k; i++) {
                if (stride) NAME(floats)(x, r->dtype, offset + i * stride, 1, &one);
                out[i] = one;
            }
        }
        if (last && !r->stride[last - 1] && k == p->size[last]) /* broadcast along a dim: copy */
            for (; n >= 2 * k && index[last - 1] + 1 < p->size[last - 1]; n -= k, out += k, index[last - 1]++)
                _Pragma("GCC ivdep") for (int64_t i = 0; i < k; i++) out[k + i] = out[i];
        offset += (k - 1) * stride;
        index[last] += k - 1;
        for (int64_t d = last; d >= 0; d--) { /* advance to the next element, with carries */
            offset += r->stride[d];
            if (++index[d] < p->size[d]) break;
            offset -= p->size[d] * r->stride[d], index[d] = 0;
        }
    }
}

/* Store n floats, already rounded, from x + at. */
static void NAME(write)(const float *restrict a, int64_t n, int dtype, void *x, int64_t at) {
    uint16_t *restrict h = (uint16_t *)x + at;
    if (dtype == BF16) for (int64_t i = 0; i < n; i++) h[i] = (uint16_t)(bits_of(a[i]) >> 16);
    else NAME(halves)(a, n, dtype, x, at);
}

/* TURN: [-second, first] of each 2 `half` elements, or for half < 0 [second, -first]. */
static void NAME(turn_halves)(const float *restrict a, int half, float *restrict to) {
    int h = abs(half);
    for (int i = 0; i < TILE; i += 2 * h)
        if (half > 0) for (int k = i; k < i + h; k++) to[k] = -a[k + h], to[k + h] = a[k];
        else for (int k = i; k < i + h; k++) to[k] = a[k + h], to[k + h] = -a[k];
}

#define EACH(VALUE, DTYPE) _Pragma("GCC ivdep") for (int i = 0; i < TILE; i++) to[i] = rounded_to(VALUE, DTYPE)
#define ROUNDED(VALUE) BY_DTYPE(s->dtype, EACH, VALUE) break;
#define BY_LANES(...)                       \
    for (int i = 0; i < TILE; i += LANES) { \
        Lanes x, e;                         \
        memcpy(&x, a + i, sizeof x);        \
        memcpy(&e, b + i, sizeof e);        \
        x = __VA_ARGS__;                    \
        memcpy(to + i, &x, sizeof x);       \
    }

UNIT(pointwise) {
    const Pointwise *p = work;
    int64_t start = unit * TILE, n = MIN(TILE, p->total - start);
    float *registers = scratch;
    for (const Step *s = p->steps; s < p->steps + p->count; s++) {
        float *to = registers + s->to * TILE;
        const float *a = registers + s->a * TILE, *b = registers + s->b * TILE, *c = registers + s->c * TILE;
        switch (s->op) {
        case READ: NAME(read)(p, s->a, start, n, to); break;
        case WRITE: NAME(write)(a, n, s->dtype, p->at[s->b], start); break;
        case CONSTANT: for (int i = 0; i < TILE; i++) to[i] = s->value; break;
        case ADD: ROUNDED(a[i] + b[i])
        case SUB: ROUNDED(a[i] - b[i])
        case MUL: ROUNDED(a[i] * b[i])
        case DIV: ROUNDED(a[i] / b[i])
        case NEG: ROUNDED(-a[i])
        case RECIPROCAL: ROUNDED(1.0f / a[i])
        case TO: ROUNDED(a[i])
        case TURN: NAME(turn_halves)(a, (int)s->value, to); break;
        case DECAY: BY_LANES(NAME(decay)(x)) break;
        case SILU: BY_LANES(NAME(silu)(x, e)) ROUNDED(to[i])
        case SILU_DERIVATIVE: BY_LANES(NAME(silu_derivative)(x, e)) ROUNDED(to[i])
        case ROOT: BY_LANES(NAME(root)(x)) ROUNDED(to[i])
        case WHERE: ROUNDED(a[i] != 0.0f ? b[i] : c[i])
        }
    }
}

#undef BY_LANES
#undef ROUNDED
#undef EACH
