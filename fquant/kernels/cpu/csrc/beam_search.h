/* Codes of groups x [n, d] of elements, whose vectors of all stages add up to x, by a beam of candidates; and the sums of
   residuals by code, which move the vectors. A unit is NEAR groups. Their residuals after each candidate lie beside each
   other, [candidate][NEAR][d], so that nearest.h finds the next vectors of NEAR rows at a time. */

/* Sum the weighted squares of a residual less a vector, and store it if `out` is not NULL. d is a constant for 8. */
INLINE float NAME(error_of)(const float *left, const float *near, const float *vector, int64_t d, float *out) {
    float sum = 0.0f;
    for (int64_t k = 0; k < d; k++) {
        float after = left[k] - vector[k];
        sum += near ? after * after * near[k] : after * after;
        if (out) out[k] = after;
    }
    return sum;
}
INLINE float NAME(error)(const float *left, const float *near, const float *vector, int64_t d, float *out) {
    if (d != 8) return NAME(error_of)(left, near, vector, d, out);
    return near ? NAME(error_of)(left, near, vector, 8, out) : NAME(error_of)(left, NULL, vector, 8, out);
}

UNIT(beam_search) {
    const Beam *p = work;
    const int64_t d = p->d, e = p->table.d, row = unit * NEAR, n = MIN(NEAR, p->n - row), stages = p->stages;
    const int beam = p->beam;
    const float *near = p->near ? p->near + row * d : NULL, *x = p->x + row * d;
    float *rows = scratch, *spare = rows + NEAR * e, *scores = spare + NEAR * e;
    float *score = scores + (beam > 1 ? NEAR * p->table.padded : 0), *errors = score + beam * NEAR;
    float *left = errors + beam * beam * NEAR, *after = left + beam * NEAR * d; /* [beam][NEAR][d] */
    int32_t *found = (int32_t *)(after + beam * NEAR * d);                      /* [from a candidate][beam][NEAR] */
    uint8_t *path = (uint8_t *)(found + beam * beam * NEAR), *longer = path + beam * NEAR * stages;
    memcpy(left, x, (size_t)(n * d) * 4);
    for (int64_t stage = 0, kept = 1; stage < stages; stage++) {
        int next = stage == stages - 1 ? 1 : beam;
        const float *vectors = p->vectors + stage * CODES * d;
        Table table = p->table;
        table.panels += stage * table.padded * e, table.half += stage * table.padded;
        for (int64_t b = 0; b < kept; b++) {
            const float *from = left + b * NEAR * d;
            for (int64_t r = 0; near && r < n; r++)
                for (int64_t k = 0; k < d; k++) {
                    rows[r * e + k] = near[r * d + k] * from[r * d + k];
                    rows[r * e + d + k] = near[r * d + k];
                }
            int32_t *codes = found + b * next * NEAR;
            NAME(best_codes)(&table, near ? rows : from, n, next, spare, scores, codes, score);
            for (int64_t i = 0; i < next * n; i++) {
                int64_t r = i % n, at = i / n * NEAR + r;
                errors[b * next * NEAR + at] =
                    NAME(error)(from + r * d, near ? near + r * d : NULL, vectors + codes[at] * d, d, NULL);
            }
        }
        for (int64_t r = 0; r < n; r++)
            for (int place = 0; place < next; place++) { /* the best of the candidates that remain */
                int64_t best = 0;
                for (int64_t c = 1; c < kept * next; c++)
                    if (errors[c * NEAR + r] < errors[best * NEAR + r]) best = c;
                const uint8_t *before = path + (best / next * NEAR + r) * stages;
                uint8_t *to = longer + (place * NEAR + r) * stages;
                int32_t code = found[best * NEAR + r];
                memcpy(to, before, (size_t)stage);
                to[stage] = (uint8_t)code;
                errors[best * NEAR + r] = INFINITY;
                if (stage < stages - 1)
                    NAME(error)(left + (best / next * NEAR + r) * d, NULL, vectors + code * d, d, after + (place * NEAR + r) * d);
            }
        float *swapped = left;
        left = after, after = swapped;
        uint8_t *other = path;
        path = longer, longer = other, kept = next;
    }
    memcpy(p->codes + row * stages, path, (size_t)(n * stages));
}

/* Add the residuals of a part of the groups to sums of its own, which are added in a fixed order later. */
UNIT(stage_sums) {
    const Sums *p = work;
    const int64_t d = p->d, m = p->m, row = unit * SUMMED_ROWS, stop = MIN(p->n, row + SUMMED_ROWS);
    double *sums = p->parts + unit * CODES * (d + m);
    float *rest = scratch;
    memset(sums, 0, (size_t)(CODES * (d + m)) * 8);
    for (int64_t r = row; r < stop; r++) {
        const uint8_t *codes = p->codes + r * p->stages;
        const float *mass = p->mass + r * m;
        double *to = sums + codes[p->stage] * (d + m);
        memcpy(rest, p->x + r * d, (size_t)d * 4);
        for (int64_t i = 0; i < p->stages; i++) {
            const float *vector = p->vectors + (i * CODES + codes[i]) * d;
            for (int64_t k = 0; i != p->stage && k < d; k++) rest[k] -= vector[k];
        }
        for (int64_t k = 0; k < d; k++) to[k] += (double)rest[k] * (double)mass[m == 1 ? 0 : k];
        for (int64_t k = 0; k < m; k++) to[d + k] += mass[k];
    }
}
