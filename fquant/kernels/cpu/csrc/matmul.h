/* The plan of a product: gemv.h, gemm.h or stripes.h, chunks of x, and room. */

/* x [m, in] · wᵀ for few m, with a copy of x in the form of gemv.h. */
static int gemv(int isa, int threads, const Packed *w, const void *x, int64_t m, void *y, int dtype, int form) {
    const Kernels *k = &available[isa].kernels;
    int64_t padded = padded_to(w->width, 64);
    size_t from = (size_t)size_of(dtype), to = form ? 2 : 4;
    int64_t apart = padded + 64 / (int64_t)to; /* one cache line of padding, lest all rows use the same cache sets */
    char *copy;
    if (posix_memalign((void **)&copy, 64, (size_t)(m * apart) * to)) return -1;
    for (int64_t i = 0; i < m; i++) {
        char *row = copy + (size_t)(i * apart) * to;
        k->load((const char *)x + (size_t)(i * w->width) * from, dtype, w->width, form, row);
        memset(row + (size_t)w->width * to, 0, (size_t)(padded - w->width) * to);
    }
    Gemv work = {*w, copy, m, padded, apart, y, dtype, form};
    int failed = run(k->gemv, &work, (w->rows + GROUP - 1) / GROUP, (size_t)apart * to * 4, NULL, threads);
    free(copy);
    return failed;
}

/* Rows of the weight in a unit, so that the threads finish together. */
static int64_t group_of(const Kernels *k, int64_t rows, int threads) {
    int64_t best = k->least_rows, least = INT64_MAX;
    for (int64_t group = k->least_rows; group <= k->most_rows; group += k->least_rows) {
        int64_t full = rows / group, rest = full % threads ? group : padded_to(rows % group, k->least_rows);
        int64_t time = full / threads * group + rest;
        if (time <= least) best = group, least = time;
    }
    return best;
}

/* Columns of a stripe, so that the threads finish together. */
static int64_t stripe_of(int64_t columns, int threads) {
    int64_t wide = (columns + STRIPE - 1) / STRIPE, narrow = (columns + NARROW - 1) / NARROW;
    return (narrow + threads - 1) / threads * NARROW < (wide + threads - 1) / threads * STRIPE ? NARROW : STRIPE;
}

/* x · wᵀ, or w · xᵀ if turned, or x · w if transposed: x in chunks, whose copies take at most COPY bytes unless x is
   wide. Without a needed `room`, return its bytes and do nothing. */
static int64_t product(int isa, int threads, int transposed, int turned, const Packed *w, const void *x, int64_t m, void *y,
                       int dtype, void *room) {
    const Kernels *k = &available[isa].kernels;
    Gemm work = {.w = *w, .dtype = dtype, .inner = transposed ? w->rows : w->width, .half = k->bf16 && dtype == BF16,
                 .turned = turned ? m : 0};
    if (w->dtype == F32) work.w.dtype = dtype; /* the weight is rounded to x's dtype, and multiplied in float32 */
    work.interleaved = work.half && w->bits == 4 && w->block % 64 == 0 && w->width % 128 == 0 && !w->offset &&
                       w->dtype != F16; /* the fastest kind: all bf16, 4-bit codes in whole vectors */
    if (w->bits && !transposed && m <= (work.interleaved ? 2 * FUSED : k->columns))
        return gemv(isa, threads, &work.w, x, m, y, dtype, work.interleaved ? 2 : work.half);
    work.words = work.half ? (work.inner + 1) / 2 : work.inner;
    work.columns = transposed ? w->width : w->rows;
    work.stripe = stripe_of(work.columns, threads);
    int64_t stripes = (work.columns + work.stripe - 1) / work.stripe;
    work.of_rows = !transposed && !turned && !work.half && k->lanes >= STRIPED_LANES && m >= STRIPED_ROWS &&
                   stripes >= threads && work.words > STEPS;
    const int striped = transposed || work.of_rows;
    work.group = !w->bits && m <= k->panel ? k->least_rows : group_of(k, w->rows, threads);
    work.apart = MIN(padded_to(work.words, 16) + 16, APART);
    int64_t row = (striped ? slabs_of(work.words) * work.apart : work.words) * 4;
    int64_t most = MIN(MOST_X, MAX(COPY / row, k->lanes));
    if (striped && are_words(x, dtype, work.half, work.inner) && !k->tiles && COPY / row < m) most = MOST_X, row = 0; /* no copy */
    int64_t chunks = (m + most - 1) / most;
    int64_t chunk = MIN(most, padded_to((m + chunks - 1) / chunks, striped ? 1 : k->panel));
    int64_t padded = padded_to(chunk, k->lanes), copied = (striped ? chunk : padded) * row; /* bytes */
    int64_t units = striped ? stripes : (w->rows + work.group - 1) / work.group, parts = (threads + stripes - 1) / stripes;
    if (transposed && work.words <= STEPS) {
        units = (work.columns + STRIPE - 1) / STRIPE;
        work.stripes = MIN(STEPS / work.words, units);
        units = (units + work.stripes - 1) / work.stripes;
        parts = (chunk + MANY_ROWS - 1) / MANY_ROWS;
    }
    if (striped) work.group = padded_to((chunk + parts - 1) / parts, SIX); /* so that the threads finish together */
    int64_t scratch = 4 * (work.stripes ? STRIPE * STEPS + FEW_ROWS * k->panel
                           : striped ? work.stripe * (STEPS + work.group) + k->lanes * ROW_APART
                                      : MAX(work.group, k->lanes) * APART + padded_to(work.group, k->lanes) * padded);
    if (!room) return 64 + padded_to(copied, 64) + scratch * threads;
    char *copy = (char *)padded_to((intptr_t)room, 64), *rest = copy + padded_to(copied, 64);
    work.copy = copied ? copy : NULL;
    for (int64_t start = 0; start < m; start += chunk) {
        work.m = MIN(chunk, m - start);
        work.x = (const char *)x + start * work.inner * size_of(dtype);
        work.y = (char *)y + start * (transposed ? w->width : turned ? 1 : w->rows) * size_of(dtype);
        int64_t packs = !copied ? 0 : striped ? work.m : (work.m + k->panel - 1) / k->panel * slabs_of(work.words);
        if (packs) run(striped ? k->pack_slivers : k->pack, &work, packs, (size_t)scratch, rest, threads);
        run(striped ? k->in_stripes : k->in_groups, &work, units * (striped ? (work.m + work.group - 1) / work.group : 1),
            (size_t)scratch, rest, threads);
    }
    return 0;
}

/* One of a batch of products with dense weights. */
static void one_of_batch(void *work, int64_t unit, void *room) {
    const Batch *b = work;
    Packed w = b->w;
    w.codes += unit * b->next[1];
    product(b->isa, b->threads, b->transposed, b->turned, &w, b->x + unit * b->next[0], b->m, b->y + unit * b->next[2], b->dtype, room);
}

/* All products of a batch: a thread for each, or if there are fewer than threads, all threads for one after another.
   Without `room`, return its bytes. */
static int64_t batch_product(Batch b, int64_t batch, int threads, void *room) {
    b.threads = batch < threads ? threads : 1;
    int64_t size = padded_to(product(b.isa, b.threads, b.transposed, b.turned, &b.w, b.x, b.m, b.y, b.dtype, NULL), 64);
    if (!room) return size * (b.threads > 1 ? 1 : threads);
    if (b.threads == 1) return run(one_of_batch, &b, batch, (size_t)size, room, threads);
    for (int64_t i = 0; i < batch; i++) one_of_batch(&b, i, room);
    return 0;
}

static int fit_bytes(const int16_t *levels, int count) {
    for (int i = 0; i < count; i++) if (levels[i] < -128 || levels[i] > 127) return 0;
    return 1;
}

/* True if x and w are multiplied as bytes: of x signed, of w unsigned after `low_of` is subtracted. */
static int byte_product(const Kernels *k, const Packed *w, const Levels *levels, const Rounding *how) {
    if (how->zero || how->first < -128 || how->last > 127 || w->bits > 8) return 0;
    if (w->bits == 8) return k->bytes == 2 && (!levels->levels || levels->plain) && (w->block % 4 == 0 || w->block >= w->width);
    if (!(levels->plain ? k->bytes : k->bytes == 2 && w->bits == 4 && fit_bytes(levels->levels, 16))) return 0;
    return w->width % 64 == 0 && (w->block % 64 == 0 || w->block >= w->width);
}

static int32_t low_of(const Levels *levels) { return levels->plain ? levels->levels[0] : -128; }

/* True if few rows of x are multiplied as bytes with rows of the weight: of x without -128. */
static int few_product(const Kernels *k, const Packed *w, const Levels *levels, const Rounding *how, int64_t m) {
    int64_t step = 256 / MAX(w->bits, 1);
    if (m > FEW_INTEGERS || !k->bytes || how->zero || how->unit > 127.0f || (w->bits != 4 && w->bits != 8)) return 0;
    if (levels->levels && !levels->plain && (w->bits == 8 || !fit_bytes(levels->levels, 16))) return 0;
    return w->width % step == 0 && (w->block % step == 0 || w->block >= w->width);
}

/* Bytes of scratch, and units, in which rows of x are quantised. */
static int64_t quantize_room(const Integers *p) {
    return padded_to(4 * (p->across ? TURNED * turned_apart(p->inner) : p->inner) + p->inner, 64);
}
static int64_t quantize_units(const Integers *p) { return p->across ? (p->m + TURNED - 1) / TURNED : p->m; }

/* x · wᵀ of integers with few_integers. */
static int64_t few_integer_product(Integers work, int threads, const Kernels *k, void *room) {
    int64_t blocks = padded_to(blocks_of(&work.w), 4);
    int64_t bytes = padded_to(work.m * 4 * work.words, 64), sums = padded_to(work.m * blocks * 4, 64);
    int64_t scratch = (1 + work.m) * GROUP * (blocks + 64) * 4, row = quantize_room(&work);
    if (!room) return 128 + bytes + sums + MAX(scratch * threads, row);
    char *at = (char *)padded_to((intptr_t)room, 64);
    work.scale = (float *)at, at += 64;
    work.bytes = (int8_t *)at, at += bytes;
    work.sums = (int32_t *)at, at += sums, work.sums_apart[0] = blocks, work.sums_apart[1] = 1;
    memset(work.sums, 0, (size_t)sums);
    run(k->quantize_rows, &work, quantize_units(&work), (size_t)row, at, 1);
    return run(k->few_integers, &work, (work.w.rows + GROUP - 1) / GROUP, (size_t)scratch, at, threads);
}

/* x [m, inner] · wᵀ of integers, x in chunks of MOST_X rows. Without `room`, return its bytes and do nothing. */
static int64_t integer_product(int isa, int threads, const Packed *w, Levels levels, const Operand *x, int64_t inner,
                               void *y, int dtype, void *room) {
    const Kernels *k = &available[isa].kernels;
    const int64_t m = x->m;
    int bytes = byte_product(k, w, &levels, x->how);
    Integers work = {.w = *w, .how = *x->how, .x = x->x, .y = y, .m = m, .dtype = dtype, .levels = levels,
                     .inner = inner, .across = x->across};
    if (few_product(k, w, &levels, x->how, m)) {
        work.words = w->width / 4;
        return few_integer_product(work, threads, k, room);
    }
    work.words = bytes ? (w->width + 3) / 4 : (w->width + 1) / 2;
    work.low = bytes ? low_of(&levels) : 0;
    int64_t chunks = (m + MOST_X - 1) / MOST_X, chunk = padded_to((m + chunks - 1) / chunks, k->panel);
    int64_t blocks = blocks_of(w), tall = padded_to(chunk, k->lanes), summed = w->zero || work.low;
    work.group = group_of(k, w->rows, threads), work.tall = tall, work.sums_apart[0] = 1, work.sums_apart[1] = tall;
    int64_t parts[4] = {tall * work.words * 4, tall * work.words * 4, tall * 4, summed ? blocks * tall * 4 : 0};
    int64_t high = padded_to(work.group, k->lanes), more = work.group * (blocks + 64) * 4;
    int64_t scratch = work.group * APART * 4 + 2 * high * tall * 4 + (w->zero ? 2 : 1) * more;
    int64_t slabs = slabs_of(work.words), total = 64;
    scratch = padded_to(MAX(scratch, MAX(quantize_room(&work), (int64_t)k->lanes * APART * 4)), 64);
    for (int i = 0; i < 4; i++) total += padded_to(parts[i], 64);
    if (!room) return total + scratch * threads;
    char *at = (char *)padded_to((intptr_t)room, 64);
    void *rows = at;
    if (bytes) work.bytes = rows;
    else work.q = rows;
    work.copy = at += padded_to(parts[0], 64);
    work.scale = (float *)(at += padded_to(parts[1], 64));
    at += padded_to(parts[2], 64);
    work.sums = summed ? (int32_t *)at : NULL, at += padded_to(parts[3], 64);
    for (int64_t start = 0; start < m; start += chunk) {
        work.m = MIN(chunk, m - start);
        work.x = (const char *)x->x + start * (x->across ? 1 : inner) * size_of(dtype);
        work.y = (char *)y + start * w->rows * size_of(dtype);
        memset(work.scale, 0, (size_t)parts[2]);
        if (summed) memset(work.sums, 0, (size_t)parts[3]);
        run(k->quantize_rows, &work, quantize_units(&work), (size_t)scratch, at, threads);
        Gemm pack = {.x = rows, .copy = work.copy, .m = work.m, .inner = 2 * work.words, .words = work.words,
                     .dtype = BF16, .half = 1}; /* words of any kind, as pairs of 16 bits */
        run(k->pack, &pack, (work.m + k->panel - 1) / k->panel * slabs, (size_t)scratch, at, threads);
        run(k->integer_rows, &work, (w->rows + work.group - 1) / work.group, (size_t)scratch, at, threads);
    }
    return 0;
}

/* a [m, inner] · b [n, inner]ᵀ, both quantised by rows. Without `room`, return its bytes and do nothing. */
static int64_t dense_integer_product(int isa, int threads, const Operand *a, const Operand *b, int64_t inner, void *y,
                                     int dtype, void *room) {
    const Kernels *k = &available[isa].kernels;
    Levels dense = {NULL, 0, 1};
    float none = 0.0f;
    Packed w = {.rows = b->m, .width = padded_to(inner, 4), .block = padded_to(inner, 4), .bits = 8}; /* int8, if both fit */
    int bytes = byte_product(k, &w, &dense, a->how) && byte_product(k, &w, &dense, b->how);
    if (!bytes) w.bits = 16, w.table = &none;
    Integers quantised = {.how = *b->how, .x = b->x, .m = b->m, .inner = inner, .across = b->across,
                          .words = w.width / (bytes ? 4 : 2), .dtype = dtype};
    int64_t codes = padded_to(b->m * bytes_of(&w), 64), scales = padded_to(b->m * 4, 64), row = quantize_room(&quantised);
    int64_t rest = integer_product(isa, threads, &w, dense, a, inner, y, dtype, NULL);
    if (!room) return 64 + codes + scales + MAX(rest, row * threads);
    char *at = (char *)padded_to((intptr_t)room, 64);
    w.codes = (const uint8_t *)at, w.scale = at + codes;
    quantised.w = w, quantised.scale = (float *)(at + codes);
    if (bytes) quantised.bytes = (int8_t *)at;
    else quantised.q = (int16_t *)at;
    at += codes + scales;
    run(k->quantize_rows, &quantised, quantize_units(&quantised), (size_t)row, at, threads);
    return integer_product(isa, threads, &w, dense, a, inner, y, dtype, at);
}
