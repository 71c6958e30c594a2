/* Steps of optimisers, equal to reference/moments.py. A unit is a PIECE of a flattened parameter. Chunks of the larger
   block of packed moments are decoded, updated, and encoded in a loop of its own, because a scale depends on the whole
   block. In between they stay in the nearest cache. Moments that are floats are read and written by the update.

   Gradients of low-rank products come as transposes of matrices. A unit is then a part of one, which is turned in the
   nearest cache. */

#ifdef LANES_BF16
enum { NAME(GATHERS) = 0 }; /* entries64 is faster */
#else
enum { NAME(GATHERS) = 1 };
#endif

/* The n values at `at`, in units of their scale and filled up to whole vectors; x has room for 64 more. */
static void NAME(decode_moment)(const Moment *m, const State *s, int64_t at, int64_t n, float *restrict x) {
    const uint8_t *codes = s->codes + at * m->bits / 8;
    int64_t i = 0;
    if (m->bits == 4) {
        Table32 t = NAME(table32)((const uint32_t *)m->table);
        for (; i + 32 <= n; i += 32) NAME(lookup32)(codes + i / 2, t, (uint32_t *)x + i);
        for (; i < n; i++) x[i] = m->table[i % 2 ? codes[i / 2] & 15 : codes[i / 2] >> 4];
    } else {
#ifdef LANES_BF16
        for (; i < n; i += 64) {
            __m512 v[4];
            NAME(entries64)(m->planes, codes + i, MIN(64, n - i), v);
            UNROLLED(k, 4) _mm512_storeu_ps(x + i + 16 * k, v[k]);
        }
#else
        for (; i + LANES <= n; i += LANES) {
            Lanes v = NAME(gather)(m->table, codes + i);
            memcpy(x + i, &v, sizeof v);
        }
        for (; i < n; i++) x[i] = m->table[codes[i]];
#endif
    }
    memset(x + n, 0, (size_t)(padded_to(n, LANES) - n) * 4);
}

/* The 8-bit codes of numbers in units of their scale, by the formula of a dynamic map; -1 means 0. */
INLINE Bits NAME(by_segment)(const Moment *m, Lanes v, const int has_sign) {
    const float *edges = m->segments, *slopes = edges + 8, *starts = edges + 16, *lasts = edges + 24;
    Bits size = (Bits)v & 0x7fffffff, segment = NAME(high_half)(size >> 16, m->low, m->high);
    segment = segment - (Bits)((Ints)size >= (Ints)NAME(entry8)(edges, segment));
    Lanes at = (Lanes)size * NAME(entry8)(slopes, segment) + NAME(entry8)(starts, segment);
    at = NAME(smaller)(at, NAME(entry8)(lasts, segment));
    if (has_sign) return (Bits)__builtin_convertvector((Lanes)((Bits)at | ((Bits)v & 0x80000000)), Ints) + 127;
    return (Bits)__builtin_convertvector(at, Ints);
}

/* The same by upper bits. */
INLINE Bits NAME(by_cell)(const Moment *m, Lanes v, const int has_sign) {
    uint32_t bits[LANES];
    Bits codes;
    memcpy(bits, &v, sizeof v);
    for (int k = 0; k < LANES; k++) {
        uint32_t key = (bits[k] & 0x7fffffff) >> 16;
        key = MIN(MAX(key, m->low), m->high) - m->low;
        if (has_sign) key += (bits[k] >> 31) * (m->high - m->low + 1);
        uint32_t cell = m->cells[key];
        bits[k] = (bits[k] & 0xffff) >= cell >> 16 ? cell >> 8 & 255 : cell & 255;
    }
    memcpy(&codes, bits, sizeof codes);
    return codes;
}

/* E4M3 of numbers in units of their scale, to nearest even and at most 448. A zero has no sign. */
INLINE Bits NAME(e4m3)(Lanes v) {
    Ints size = (Ints)v & 0x7fffffff, most = (Ints){0} + 0x43e00000;
    Bits u = (Bits)NAME(either)((Bits)(size > most), (Lanes)most, (Lanes)size), is_small = (Bits)((Ints)u < 0x3c800000);
    Bits normal = ((u + 0x7ffff + (u >> 20 & 1)) >> 20) - 960;
    Bits small = (Bits)((Lanes)u + 0x1p14f) - 0x46800000; /* steps of 2^-9, which are those of 2^14 */
    Bits code = (is_small & small) | (~is_small & normal);
    return code | (((Bits)v >> 24 & 0x80) & (Bits)((Ints)code > 0));
}

/* Numbers x in units of their scale, v, raised to `floor` if x is above zero. */
INLINE Lanes NAME(raised)(Lanes x, Lanes v, float floor) {
    return NAME(either)((Bits)((x > 0) & (v < floor)), floor - (Lanes){0}, v);
}

/* Encode n numbers of a block, filled up to whole vectors. */
INLINE void NAME(encode8)(const Moment *m, const float *x, int64_t n, const Lanes by, const int divides,
                          uint8_t *codes, const int kind, const int has_sign, const int raises) {
    Bits four[4] = {{0}};
    uint8_t few[4 * LANES];
#define ENCODED(at, to)                                                                              \
    {                                                                                                \
        Lanes w, v;                                                                                  \
        memcpy(&w, at, sizeof w);                                                                    \
        v = divides ? w / by : w * by;                                                               \
        if (raises) v = NAME(raised)(w, v, m->floor);                                                \
        to = kind == SEGMENTS ? NAME(by_segment)(m, v, has_sign)                                     \
           : kind == FP8_CODES ? NAME(e4m3)(v) : NAME(by_cell)(m, v, has_sign);                      \
    }
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES) {
        UNROLLED(k, 4) ENCODED(x + i + k * LANES, four[k])
        NAME(narrow4)(four, codes + i);
    }
    for (int64_t k = 0; i + k * LANES < n; k++) ENCODED(x + i + k * LANES, four[k])
#undef ENCODED
    if (i < n) NAME(narrow4)(four, few), memcpy(codes + i, few, (size_t)(n - i));
}

/* Encode n numbers as four bits each: the number of thresholds that are reached. */
static void NAME(encode4)(const Moment *m, const float *x, int64_t n, const Lanes by, uint8_t *restrict codes) {
    uint8_t index[PIECE + 4 * LANES];
    for (int64_t i = 0; i < n; i += 4 * LANES) {
        Bits four[4] = {{0}};
        UNROLLED(k, 4) if (i + k * LANES < n) {
            Lanes w, v;
            memcpy(&w, x + i + k * LANES, sizeof w), v = w * by;
            if (m->floor > 0) v = NAME(raised)(w, v, m->floor);
            UNROLLED(j, 15) four[k] -= (Bits)(v >= m->thresholds[j]);
        }
        NAME(narrow4)(four, index + i);
    }
    if (m->order) for (int64_t i = 0; i < n; i++) index[i] = m->order[index[i]];
    for (int64_t i = 0; i < n / 2; i++) codes[i] = (uint8_t)(index[2 * i] << 4 | index[2 * i + 1]);
    if (n % 2) codes[n / 2] = (uint8_t)(index[n - 1] << 4);
}

/* Encode n numbers of a block whose largest magnitude is `absmax` as the codes and the scale at `at`. */
static void NAME(encode_block)(const Moment *m, const State *s, int64_t at, int64_t n, float *x, float absmax) {
    uint8_t *codes = s->new_codes + at * m->bits / 8;
    int divides = m->grid && n < m->block;
    float scale = (absmax < m->least ? m->least : absmax) / m->top, divisor = scale < 1e-38f ? 1e-38f : scale;
    Lanes by = (divides ? divisor : 1.0f / divisor) - (Lanes){0};
    s->new_scale[at / m->block] = scale;
    if (m->bits == 4) NAME(encode4)(m, x, n, by, codes);
    else if (m->segments && m->has_sign) NAME(encode8)(m, x, n, by, 0, codes, SEGMENTS, 1, m->floor > 0);
    else if (m->segments) NAME(encode8)(m, x, n, by, 0, codes, SEGMENTS, 0, 1);
    else if (!m->cells) NAME(encode8)(m, x, n, by, 0, codes, FP8_CODES, 1, m->floor > 0);
    else NAME(encode8)(m, x, n, by, divides, codes, CELLS, m->has_sign, m->floor > 0);
}

/* Round n floats stochastically to bf16 or f16, and store them from out + at, as stochastic_rounding.py does. */
static void NAME(drawn)(const Update *u, const float *restrict x, int64_t n, int64_t at) {
    uint16_t *restrict h = (uint16_t *)u->out + at;
    uint32_t words[PIECE];
    const uint64_t key = *u->key ^ FOLDED, first = (uint64_t)(u->first + at);
    for (int64_t i = 0; i < n; i++) {
        uint32_t x0 = (uint32_t)(first + (uint64_t)i), x1 = (uint32_t)((first + (uint64_t)i) >> 32);
        NAME(threefry)((uint32_t)key, (uint32_t)(key >> 32), &x0, &x1);
        words[i] = x1;
    }
    if (u->param_dtype == BF16) for (int64_t i = 0; i < n; i++) {
        uint32_t bits = bits_of(x[i]), is_finite = (bits & 0x7f800000) != 0x7f800000;
        h[i] = is_finite ? (uint16_t)((bits + (words[i] & 0xffff)) >> 16) : to_bf16(x[i]);
    } else for (int64_t i = 0; i < n; i++) {
        uint32_t bits = bits_of(x[i]), is_finite = (bits & 0x7f800000) != 0x7f800000;
        float size = float_of(bits & 0x7fffffff);
        uint16_t near = to_f16(size), low = (uint16_t)(from_f16(near) > size ? near - 1 : near);
        float below = from_f16(low), above = from_f16((uint16_t)(low + 1));
        float up = (float)(words[i] & 0xffffff) * 0x1p-24f;
        uint16_t found = (uint16_t)(up < (size - below) / (above - below) ? low + 1 : low);
        h[i] = is_finite ? (uint16_t)(found | (bits >> 16 & 0x8000)) : to_f16(x[i]);
    }
}

/* Old and new moments; instead of old ones there may be codes of 8 bits, of which gathers wait beside divisions. */
typedef struct { const float *g, *p, *old[2]; const uint8_t *codes[2]; float *x[2], *out; } NAME(Chunk);

/* Update n elements of a chunk from `i` on, which share their scales; vectors are filled. Raise `top`, the largest
   magnitudes of the new moments as bits, among which NaN exceeds all. */
INLINE void NAME(updated)(const Update *u, NAME(Chunk) c, int64_t i, int64_t n, float scale, float scale2, Ints *top,
                          const int rule, const int apply, const int dense) {
    const int two = rule <= ADAM;
    const float factor = u->rates[0], by1 = two ? u->rates[1] : 0, by2 = two ? u->rates[2] : 0;
    const float b1 = u->b1, rest1 = u->rest1, b2 = u->b2, rest2 = u->rest2, eps = u->eps, decay = u->decay;
    Ints top1 = top[0], top2 = top[1];
#define MOMENT(to, k)                                                                            \
    if (NAME(GATHERS) && c.codes[k]) to = NAME(gather)(u->moments[k].table, c.codes[k] + i);     \
    else memcpy(&to, c.old[k] + i, sizeof to);
    for (n += i; i < n; i += LANES) {
        Lanes g, p, change, mean, square = {0};
        MOMENT(mean, 0)
        if (!dense) mean = mean * scale;
        memcpy(&g, c.g + i, sizeof g), memcpy(&p, c.p + i, sizeof p);
        if (rule != ADAMW && rule != LION) g = g + decay * p;
        if (two) {
            MOMENT(square, 1)
            if (!dense) square = square * scale2;
            mean = b1 * mean + rest1 * g;
            square = b2 * square + rest2 * (g * g);
            memcpy(c.x[1] + i, &square, sizeof square);
            if (!dense) top2 = NAME(greater)(top2, (Ints)square & 0x7fffffff);
            if (dense) change = (mean / by1) / (NAME(root)(square / by2) + eps);
            else change = (mean * by1) / (NAME(root)(square) * by2 + eps);
            if (rule == ADAMW) change = change + decay * p;
        } else if (rule == LION) {
            Lanes lean = b1 * mean + rest1 * g;
            Bits is_zero = (Bits)(lean == (Lanes){0}), is_nan = (Bits)(lean != lean);
            Bits sign = ((Bits)lean & 0x80000000) | bits_of(1.0f);
            change = NAME(either)(is_nan, lean, (Lanes)(sign & ~is_zero)) + decay * p;
            mean = b2 * mean + rest2 * g;
        } else if (rule == MEAN || rule == NESTEROV_MEAN) {
            change = mean = b1 * mean + rest1 * g;
            if (rule == NESTEROV_MEAN) change = rest1 * g + b1 * mean;
        } else {
            change = mean = b1 * mean + g;
            if (rule == NESTEROV) change = g + b1 * mean;
        }
        change = factor * change;
        if (apply) change = p + change;
        memcpy(c.x[0] + i, &mean, sizeof mean), memcpy(c.out + i, &change, sizeof change);
        if (!dense) top1 = NAME(greater)(top1, (Ints)mean & 0x7fffffff);
    }
#undef MOMENT
    top[0] = top1, top[1] = top2;
}

INLINE float NAME(highest)(Ints v) {
    int32_t top = 0;
    for (int i = 0; i < LANES; i++) top = MAX(top, v[i]);
    return float_of((uint32_t)top);
}

/* Update elements [start, stop), whose gradients as floats are `turned` if that is not NULL. */
INLINE void NAME(step)(const Update *u, const float *turned, int64_t start, int64_t stop, const int rule,
                       const int apply, const int dense) {
    float x[2][PIECE + 64] __attribute__((aligned(64)));
    float grads[PIECE + 64] __attribute__((aligned(64))), params[PIECE + 64] __attribute__((aligned(64)));
    const int moments = rule <= ADAM ? 2 : 1, to = apply ? u->param_dtype : F32;
    const int64_t least = moments == 2 ? MIN(u->moments[0].block, u->moments[1].block) : u->chunk;
    for (int64_t at = start, n; at < stop; at += n) {
        n = MIN(u->chunk, stop - at);
        NAME(Chunk) c = {(const float *)u->grad + at, (const float *)u->param + at, {x[0], x[1]}, {0}, {x[0], x[1]},
                         (float *)u->out + at};
        int fills = n % LANES == 0, direct = fills && to == F32;
        const char *next_g = (const char *)u->grad + (at + AHEAD_OF) * size_of(u->grad_dtype);
        const char *next_p = (const char *)u->param + (at + AHEAD_OF) * size_of(u->param_dtype);
        for (int64_t i = 0; i < n * 4; i += 64) __builtin_prefetch(next_g + i), __builtin_prefetch(next_p + i);
        if (turned) c.g = turned + at - start;
        else if (!fills || u->grad_dtype != F32) {
            NAME(floats)(u->grad, u->grad_dtype, at, n, grads), memset(grads + n, 0, LANES * 4);
            c.g = grads;
        }
        if (!fills || u->param_dtype != F32) {
            NAME(floats)(u->param, u->param_dtype, at, n, params), memset(params + n, 0, LANES * 4);
            c.p = params;
        }
        if (!direct) c.out = params; /* a vector is read before it is written */
        Ints top[2] = {{0}, {0}};
        for (int k = 0; k < moments && dense; k++) {
            const float *old = (const float *)u->states[k].codes + at;
            if (fills) c.old[k] = old, c.x[k] = (float *)u->states[k].new_codes + at;
            else memcpy(x[k], old, (size_t)n * 4), memset(x[k] + n, 0, LANES * 4);
        }
        if (dense) {
            NAME(updated)(u, c, 0, n, 1, 1, top, rule, apply, 1);
            for (int k = 0; k < moments && !fills; k++) memcpy(u->states[k].new_codes + at * 4, x[k], (size_t)n * 4);
        } else for (int k = 0; k < moments; k++) {
            if (NAME(GATHERS) && fills && u->moments[k].bits == 8) c.codes[k] = u->states[k].codes + at;
            else NAME(decode_moment)(u->moments + k, u->states + k, at, n, x[k]);
        }
        for (int64_t i = 0; i < n && !dense; i += least) {
            float scales[2] = {0, 0};
            for (int k = 0; k < moments; k++) scales[k] = u->states[k].scale[(at + i) / u->moments[k].block];
            NAME(updated)(u, c, i, MIN(least, n - i), scales[0], scales[1], top, rule, apply, 0);
            for (int k = 0; k < moments; k++) {
                int64_t block = u->moments[k].block, end = MIN(i + least, n), begin = i / block * block;
                if (end % block && end < n) continue; /* the block goes on */
                float most = NAME(highest)(top[k]);
                if (end % LANES) most = NAME(absmax)(x[k] + begin, end - begin, 0.0f); /* without what was filled up */
                NAME(encode_block)(u->moments + k, u->states + k, at + begin, end - begin, x[k] + begin, most);
                top[k] = (Ints){0};
            }
        }
        if (apply && u->key && to != F32) NAME(drawn)(u, params, n, at);
        else if (!direct) NAME(halves)(params, n, to, u->out, at);
    }
}

static void NAME(by_rule)(const Update *u, const float *turned, int64_t start, int64_t stop) {
    const int dense = u->moments[0].bits == 32;
#define RULE(R)                                                                 \
    case R:                                                                     \
        if (dense && u->apply) NAME(step)(u, turned, start, stop, R, 1, 1);     \
        else if (dense) NAME(step)(u, turned, start, stop, R, 0, 1);            \
        else if (u->apply) NAME(step)(u, turned, start, stop, R, 1, 0);         \
        else NAME(step)(u, turned, start, stop, R, 0, 0);                       \
        break;
    switch (u->rule) { RULE(ADAMW) RULE(ADAM) RULE(LION) RULE(SGD) RULE(NESTEROV) RULE(MEAN) RULE(NESTEROV_MEAN) }
#undef RULE
}

static void NAME(copied)(void *to, const void *from, int64_t start, int64_t stop) {
    if (to != from) memcpy((char *)to + start, (const char *)from + start, (size_t)(stop - start));
}

/* Leave elements [start, stop) as they are. */
static void NAME(kept)(const Update *u, int64_t start, int64_t stop) {
    const int64_t size = size_of(u->param_dtype);
    if (u->apply) NAME(copied)(u->out, u->param, start * size, stop * size);
    else memset((float *)u->out + start, 0, (size_t)(stop - start) * 4);
    for (int k = 0; k < (u->rule <= ADAM ? 2 : 1); k++) {
        const Moment *m = u->moments + k;
        const State *s = u->states + k;
        NAME(copied)(s->new_codes, s->codes, start * m->bits / 8, (stop * m->bits + 7) / 8);
        if (m->bits < 32)
            NAME(copied)(s->new_scale, s->scale, start / m->block * 4, (stop + m->block - 1) / m->block * 4);
    }
}

/* Update number i of all. */
INLINE Update NAME(numbered)(const Update *all, int64_t i) {
    Update u = *all;
    u.grad = (const char *)u.grad + i * u.n * size_of(u.grad_dtype);
    u.param = (const char *)u.param + i * u.n * size_of(u.param_dtype);
    u.out = (char *)u.out + i * u.n * (u.apply ? size_of(u.param_dtype) : 4);
    u.rates += 3 * i;
    if (u.key) u.key += i;
    for (int k = 0; k < (u.rule <= ADAM ? 2 : 1); k++) {
        const Moment *m = u.moments + k;
        State *s = u.states + k;
        int64_t bytes = i * ((u.n * m->bits + 7) / 8);
        int64_t scales = m->bits < 32 ? i * ((u.n + m->block - 1) / m->block) : 0;
        s->codes += bytes, s->new_codes += bytes, s->scale += scales, s->new_scale += scales;
    }
    return u;
}

/* Read gradients [high, wide] as floats, from row `i` and column `k` on of a matrix whose transpose begins at `first`. */
static void NAME(turned)(const Update *u, int64_t first, int64_t i, int64_t k, int64_t high, int64_t wide,
                         float *restrict to) {
    float column[PIECE];
    const int64_t apart = u->rows, at = first + k * apart + i;
    const int vectors = u->grad_dtype == F32 && high >= LANES && wide >= LANES;
    const int64_t tall = vectors ? high / LANES * LANES : 0, broad = vectors ? wide / LANES * LANES : 0;
    const uint32_t *words = (const uint32_t *)u->grad + at;
    for (int64_t c = 0; c < broad; c += LANES)
        for (int64_t r = 0; r < tall; r += LANES)
            NAME(turn)(words + c * apart + r, apart, LANES, (uint32_t *)to + r * wide + c, wide);
    for (int64_t c = 0; c < wide; c++) {
        int64_t rest = c < broad ? tall : 0;
        if (rest < high) NAME(floats)(u->grad, u->grad_dtype, at + c * apart + rest, high - rest, column);
        for (int64_t r = rest; r < high; r++) to[r * wide + c] = column[r - rest];
    }
    memset(to + high * wide, 0, LANES * 4);
}

UNIT(update) {
    const Pieces p = pieces_in(work);
    const int64_t number = unit / p.each;
    const Update *all = work, one = NAME(numbered)(all, number), *u = &one;
    const int is_active = !all->active || all->active[number];
    unit %= p.each;
    if (!u->rows) {
        int64_t start = unit * PIECE, stop = MIN(u->n, start + PIECE);
        if (is_active) NAME(by_rule)(u, NULL, start, stop);
        else NAME(kept)(u, start, stop);
        return;
    }
    float grads[PIECE + 64] __attribute__((aligned(64)));
    const int64_t below = (u->rows + p.high - 1) / p.high, first = unit / (below * p.beside) * u->rows * u->columns;
    const int64_t i = unit / p.beside % below * p.high, k = unit % p.beside * p.wide;
    const int64_t high = MIN(p.high, u->rows - i), wide = MIN(p.wide, u->columns - k);
    if (is_active) NAME(turned)(u, first, i, k, high, wide, grads);
    const int64_t whole = wide == u->columns, runs = whole ? 1 : high, n = whole ? high * wide : wide;
    for (int64_t r = 0; r < runs; r++) {
        int64_t start = first + (i + r) * u->columns + k;
        if (is_active) NAME(by_rule)(u, grads + r * wide, start, start + n);
        else NAME(kept)(u, start, start + n);
    }
}
