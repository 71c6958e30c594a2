/* The number and the sum of the rows of each code, for the means of k-means and of running averages. */

/* Add some columns of the rows of a set to the sums of their codes, in the order of the rows. */
UNIT(sums_by_code) {
    ByCode *p = work;
    const int64_t n = p->n, d = p->d, k = p->k, parts = MAX(1, (d + SUMMED_COLUMNS - 1) / SUMMED_COLUMNS);
    const int64_t set = unit / parts, first = unit % parts * SUMMED_COLUMNS, width = MIN(SUMMED_COLUMNS, d - first);
    const float *x = p->x + set * n * d + first;
    float *sums = p->sums + set * k * d + first;
    int64_t *counts = scratch;
    memset(counts, 0, (size_t)k * 8);
    for (int64_t c = 0; c < k; c++) memset(sums + c * d, 0, (size_t)width * 4);
    for (int64_t r = 0; r < n; r++) {
        const int64_t code = p->codes[set * n + r];
        if (code >= k) __atomic_store_n(&p->beyond, 1, __ATOMIC_RELAXED);
        if (code < 0 || code >= k) continue;
        const float *row = x + r * d;
        float *to = sums + code * d;
        counts[code]++;
        for (int64_t i = 0; i < width; i++) to[i] += row[i];
    }
    for (int64_t c = 0; first == 0 && c < k; c++) p->counts[set * k + c] = (float)counts[c];
}
