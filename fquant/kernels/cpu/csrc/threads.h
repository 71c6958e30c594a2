/* Fork-join loops over units of work, on the threads of the OpenMP runtime that torch has loaded (GOMP_parallel),
   because two pools would spin against each other. Without that runtime, threads are created for each call.

   In a process that was forked the runtime would wait for threads of its parent. So before a fork it ends its threads,
   for torch too, and the parent makes them again when it needs them. Where it cannot, for example in the middle of a
   parallel region, the child leaves it and creates threads. */

typedef void (*Unit)(void *work, int64_t i, void *scratch);
typedef void (*Body)(void *);
typedef void (*Team)(Body, void *, unsigned, unsigned);
typedef int (*Pause)(int);

static Team team;        /* GOMP_parallel, or NULL */
static Pause pause_team; /* omp_pause_resource_all, or NULL */
static int has_ended;
static void end_team(void) { has_ended = pause_team && !pause_team(1); } /* 1: omp_pause_soft */
static void leave_team(void) { if (!has_ended) team = NULL; }
EXPORT void fquant_team(Team t, Pause p) {
    static int registered;
    pause_team = p;
    if (!registered) registered = !pthread_atfork(end_team, NULL, leave_team);
    team = registered ? t : NULL;
}

typedef struct {
    Unit unit;
    void *work;
    size_t scratch;
    int64_t units, least, next; /* least: units taken at a time, lest the counter cost more than they do */
    char *room;                 /* scratch for all threads; NULL: each allocates its own */
    int threads, entered, failed;
} Loop;

/* Take the next units, from *i: half of a thread's share of the rest, so that the threads finish together. */
static int64_t take(Loop *loop, int64_t *i) {
    int64_t start = __atomic_load_n(&loop->next, __ATOMIC_RELAXED), n;
    do {
        n = MIN(MAX((loop->units - start) / (2 * loop->threads), loop->least), loop->units - start);
        if (n <= 0) return 0;
    } while (!__atomic_compare_exchange_n(&loop->next, &start, start + n, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    *i = start;
    return n;
}

static void run_units(void *data) {
    Loop *loop = data;
    void *scratch = NULL;
    if (loop->room) {
        scratch = loop->room + loop->scratch * (size_t)__atomic_fetch_add(&loop->entered, 1, __ATOMIC_RELAXED);
    } else if (loop->scratch && posix_memalign(&scratch, 64, loop->scratch)) {
        __atomic_store_n(&loop->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    for (int64_t i, n; (n = take(loop, &i));)
        while (n--) loop->unit(loop->work, i++, scratch);
    if (!loop->room) free(scratch);
#if defined(__x86_64__)
    _mm_sfence(); /* orders non-temporal stores before the end of the loop */
#endif
}

static void *run_thread(void *data) { run_units(data); return NULL; }

/* Run unit(work, i, scratch) for every i < units, dynamically scheduled; -1 if memory ran out. */
static int run(Unit unit, void *work, int64_t units, size_t scratch, char *room, int threads) {
    threads = (int)MIN((int64_t)threads, units);
    Loop loop = {unit, work, scratch, units, units / (threads * 64 + 1) + 1, 0, room, threads, 0, 0};
    if (threads <= 1) {
        run_units(&loop);
    } else if (team) {
        team(run_units, &loop, (unsigned)threads, 0);
    } else {
        pthread_t created[64];
        int n = 0;
        for (threads = MIN(threads, 64); n < threads - 1; n++)
            if (pthread_create(&created[n], NULL, run_thread, &loop)) break;
        run_units(&loop);
        while (n--) pthread_join(created[n], NULL);
    }
    return -(loop.next < units || loop.failed);
}
