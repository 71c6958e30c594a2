/* Attention and its gradient (fquant/kernels/ops/attention.py). A unit is a head of keys and values of one
   sequence, with all heads of queries that read it; without gradient, a part of their panels.

   Scores are computed transposed, a tile of KEYS by a PANEL of queries at a time, and stay in the second cache (Dao et
   al. 2022, "FlashAttention"). So the maximum and the sum of a query belong to one lane, and no vector is summed up.
   Tiles that no query of a panel may see are skipped: those of later tokens, of other documents, and before the
   window. */

typedef struct { /* the scratch of a unit; the last three lines are for the gradient */
    uint32_t *rows, *k_rows, *down, *q_across, *words, *turned;
    float *scores, *sums, *most, *total;
    uint32_t *v_rows, *g_across, *q_down, *g_down, *p_rows, *s_rows;
    float *slopes, *dk, *dv;
} Room;

/* Lay out the scratch of a unit from `at` on, and return its bytes. */
INLINE size_t NAME(room)(const Attention *a, char *at, Room *r) {
    Sizes s = NAME(sizes)(a);
    int64_t panel = PANEL * s.inner, tile = KEYS * PANEL, all = s.tokens * s.inner, sums = s.tokens * s.columns;
    size_t used = 0;
#define TAKE(field, count) r->field = (void *)(at + used), used += (size_t)padded_to((count) * 4, 64)
    TAKE(rows, panel), TAKE(k_rows, all), TAKE(down, sums / s.each), TAKE(q_across, panel), TAKE(words, tile);
    TAKE(turned, QUERIES * KEYS), TAKE(scores, tile), TAKE(sums, QUERIES * s.columns), TAKE(most, PANEL);
    TAKE(total, PANEL);
    if (!a->g) return used;
    TAKE(v_rows, all), TAKE(g_across, panel), TAKE(q_down, PANEL / s.each * s.columns);
    TAKE(g_down, PANEL / s.each * s.columns), TAKE(p_rows, tile), TAKE(s_rows, tile), TAKE(slopes, tile);
    TAKE(dk, sums), TAKE(dv, sums);
#undef TAKE
    return used;
}

static size_t NAME(attention_room)(const Attention *a) {
    Room r;
    return NAME(room)(a, NULL, &r);
}

/* The keys that a panel of queries from q on sees: from *first up to the result. */
INLINE int64_t NAME(look)(const Attention *a, const int32_t *labels, int64_t q, int64_t *first) {
    int64_t last = MIN(a->t, q + PANEL);
    *first = labels ? q : 0;
    for (int64_t i = q; labels && i < last; i++) *first = MIN(*first, labels[i]);
    for (int64_t end = a->t; !a->causal; end--) /* a later document begins behind the panel */
        if (end == last || !labels || labels[end - 1] < last) return *first = *first / KEYS * KEYS, end;
    if (a->window) *first = MAX(*first, q - a->window + 1);
    *first = *first / KEYS * KEYS;
    return last;
}

/* Turn a tile of scores into weights, as words of two keys, and update the maxima and sums of the queries. */
INLINE void NAME(soften)(const Attention *a, Room *r, const int32_t *labels, int64_t k, int64_t n, int64_t q,
                         int half) {
    const Lanes none = (Lanes){0} - INFINITY, low = (Lanes){0} - 3e38f, one = (Lanes){0} + 1.0f;
    int masked = labels || a->window || k + n > (a->causal ? q : a->t), changed = 0, each = half ? 2 : 1;
    float by[PANEL];
    for (int64_t v = 0; v < PANEL; v += LANES) {
        Lanes *scores = (Lanes *)(r->scores + v), before, most, base, total, factor;
        memcpy(&before, r->most + v, sizeof before);
        memcpy(&total, r->total + v, sizeof total);
        most = before;
        for (int64_t i = 0; i < n; i++) {
            Lanes *at = scores + i * VECS, x = *at * a->scale;
            if (masked) x = NAME(either)(NAME(seen)(a, labels, k + i, q + v), x, none);
            *at = x;
            most = NAME(larger)(x, most);
        }
        base = NAME(larger)(most, low); /* finite, also before a query has seen a key */
        factor = NAME(exponential)(NAME(larger)(before, low) - base);
        total *= factor;
        for (int64_t i = 0; i < n; i += each) {
            Lanes first = NAME(exponential)(scores[i * VECS] - base), second = first;
            total += first;
            if (half) second = NAME(exponential)(scores[(i + 1) * VECS] - base), total += second;
            Bits word = half ? NAME(couple)(first, second) : (Bits)first;
            memcpy(r->words + i / each * PANEL + v, &word, sizeof word);
        }
        memcpy(r->most + v, &most, sizeof most);
        memcpy(r->total + v, &total, sizeof total);
        memcpy(by + v, &factor, sizeof factor);
        for (int i = 0; i < LANES; i++) changed |= factor[i] != one[i];
    }
    if (!changed) return;
    int64_t columns = NAME(sizes)(a).columns;
    for (int64_t c = 0; c < columns; c += PANEL) {
        int64_t width = MIN(columns - c, PANEL);
        for (int64_t i = 0; i < PANEL; i++)
            for (int64_t x = 0; x < width; x++) r->sums[c * QUERIES + i * width + x] *= by[i];
    }
}

/* Turn tiles of scores and of gradients of weights into weights and gradients of scores, the latter also as words. */
INLINE void NAME(slopes)(const Attention *a, Room *r, const int32_t *labels, int64_t k, int64_t n, int64_t q,
                         int half) {
    int masked = labels || a->window || k + n > (a->causal ? q : a->t), each = half ? 2 : 1;
    for (int64_t v = 0; v < PANEL; v += LANES) {
        Lanes lse, mean, p[2], d[2];
        memcpy(&lse, r->most + v, sizeof lse);
        memcpy(&mean, r->total + v, sizeof mean);
        for (int64_t i = 0; i < n; i += each) {
            for (int64_t j = 0; j < each; j++) {
                int64_t at = (i + j) * PANEL + v;
                p[j] = NAME(exponential)(*(Lanes *)(r->scores + at) * a->scale - lse);
                d[j] = p[j] * (*(Lanes *)(r->slopes + at) - mean) * a->scale;
                if (masked) {
                    Bits seen = NAME(seen)(a, labels, k + i + j, q + v);
                    p[j] = (Lanes)(seen & (Bits)p[j]), d[j] = (Lanes)(seen & (Bits)d[j]);
                }
                NAME(single)(p[j], half, r->p_rows + at / each);
                NAME(single)(d[j], half, r->s_rows + at / each);
            }
            Bits word = half ? NAME(couple)(d[0], d[1]) : (Bits)d[0];
            memcpy(r->words + i / each * PANEL + v, &word, sizeof word);
        }
    }
}

/* Load the values of queries from q on: the log-sum-exp, and the mean gradient of the weights, g · y. */
INLINE void NAME(means)(const Attention *a, Room *r, int64_t b, int64_t h, int64_t q) {
    const float *lse = a->lse + (b * a->heads + h) * a->t;
    int64_t y = b * a->ys[0] + h * a->ys[1], g = b * a->gs[0] + h * a->gs[1];
    for (int64_t i = 0; i < PANEL; i++) {
        float ours[64], theirs[64];
        double total = 0.0;
        for (int64_t c = 0; q + i < a->t && c < a->e; c += 64) {
            int64_t n = MIN(64, a->e - c);
            NAME(floats)(a->y, a->dtype, y + (q + i) * a->ys[2] + c, n, ours);
            NAME(floats)(a->g, a->dtype, g + (q + i) * a->gs[2] + c, n, theirs);
            float some = 0.0f;
            for (int64_t k = 0; k < n; k++) some += ours[k] * theirs[k];
            total += some;
        }
        r->total[i] = (float)total;
        r->most[i] = q + i < a->t ? lse[q + i] : INFINITY; /* weights after the last token are 0 */
    }
}

/* Attention, or if `slope` its gradient. */
INLINE void NAME(attend)(const Attention *a, int64_t unit, void *scratch, const int slope, const int half) {
    Sizes s = NAME(sizes)(a);
    Room r = {0};
    NAME(room)(a, scratch, &r);
    int64_t part = unit % a->parts, kv = unit / a->parts % a->kv, b = unit / a->parts / a->kv, group = a->heads / a->kv;
    int64_t all = s.tokens / s.each, apart = PANEL / s.each, wide = KEYS / s.each;
    const int32_t *labels = a->labels ? a->labels + b * a->labelled : NULL;
#define HEAD(stride, h) stride, b * stride[0] + (h) * stride[1]
    NAME(rows)(a, a->v, HEAD(a->vs, kv), 0, s.tokens, half, slope ? r.v_rows : r.k_rows);
    if (!slope) NAME(down)(r.k_rows, s.inner, s.tokens, s.columns, half, r.down);
    NAME(rows)(a, a->k, HEAD(a->ks, kv), 0, s.tokens, half, r.k_rows);
    if (slope) NAME(down)(r.k_rows, s.inner, s.tokens, s.columns, half, r.down);
    memset(r.turned, 0, (size_t)(QUERIES * KEYS * 4));
    if (slope) memset(r.dk, 0, (size_t)(s.tokens * s.columns * 4));
    if (slope) memset(r.dv, 0, (size_t)(s.tokens * s.columns * 4));
    for (int64_t h = kv * group; h < (kv + 1) * group; h++)
        for (int64_t q = part * PANEL, first; q < a->t; q += a->parts * PANEL) {
            int64_t last = NAME(look)(a, labels, q, &first), n = MIN(a->t - q, PANEL);
            NAME(rows)(a, a->q, HEAD(a->qs, h), q, PANEL, half, r.rows);
            NAME(across)(r.rows, PANEL, s.inner, PANEL, r.q_across);
            if (slope) {
                NAME(down)(r.rows, s.inner, PANEL, s.columns, half, r.q_down);
                NAME(rows)(a, a->g, HEAD(a->gs, h), q, PANEL, half, r.rows);
                NAME(across)(r.rows, PANEL, s.inner, PANEL, r.g_across);
                NAME(down)(r.rows, s.inner, PANEL, s.columns, half, r.g_down);
                NAME(means)(a, &r, b, h, q);
            } else
                for (int i = 0; i < PANEL; i++) {
                    r.most[i] = a->sinks ? a->sinks[b * a->heads + h] : -INFINITY;
                    r.total[i] = a->sinks ? 1.0f : 0.0f;
                }
            memset(r.sums, 0, (size_t)(QUERIES * s.columns * 4));
            for (int64_t k = first; k < last; k += KEYS) {
                int64_t keys = padded_to(MIN(KEYS, last - k), SIX), words = keys / s.each;
                NAME(scores)(r.k_rows + k * s.inner, s.inner, keys, r.q_across, s.words, half, r.scores);
                if (slope) NAME(scores)(r.v_rows + k * s.inner, s.inner, keys, r.g_across, s.words, half, r.slopes);
                (slope ? NAME(slopes) : NAME(soften))(a, &r, labels, k, keys, q, half);
                NAME(across)(r.words, words, PANEL, wide, r.turned);
                if (slope) {
                    NAME(columns)(r.p_rows, apart, keys, r.g_down, apart, 0, apart, s.columns, half, r.dv, s.tokens, k);
                    NAME(columns)(r.s_rows, apart, keys, r.q_down, apart, 0, apart, s.columns, half, r.dk, s.tokens, k);
                }
                NAME(columns)(r.turned, wide, QUERIES, r.down, all, k / s.each, words, s.columns, half, r.sums, QUERIES,
                              0);
            }
            float *lse = a->lse + (b * a->heads + h) * a->t + q;
            for (int64_t i = 0; i < n && !slope; i++)
                lse[i] = r.most[i] + logf(r.total[i]), r.total[i] = 1.0f / r.total[i];
            if (slope) NAME(results)(a, r.sums, QUERIES, NULL, n, a->dq, HEAD(a->dqs, h), q);
            else NAME(results)(a, r.sums, QUERIES, r.total, n, a->y, HEAD(a->ys, h), q);
        }
    if (slope) NAME(results)(a, r.dk, s.tokens, NULL, a->t, a->dk, HEAD(a->dks, kv), 0);
    if (slope) NAME(results)(a, r.dv, s.tokens, NULL, a->t, a->dv, HEAD(a->dks, kv), 0);
#undef HEAD
}

UNIT(attention) {
    const Attention *a = work;
    if (a->g) TILED(BY_HALF(a->half, NAME(attend), work, unit, scratch, 1));
    else TILED(BY_HALF(a->half, NAME(attend), work, unit, scratch, 0));
}
