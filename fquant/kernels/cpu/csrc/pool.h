/* A pool for the large tensors that torch allocates during a replay (compile/memory/allocator.py).

   glibc cuts an aligned block from a larger one and keeps the rest, so a freed block is too small for the next request of
   its size. Here a request gets the lowest bytes that are free in one range of addresses, or a place that the caller has
   set aside for a request of its size. Freed bytes stay in the process, until fquant_pool_release.

   Only C++ can replace torch's allocator. This library is built without torch's headers, so it copies the virtual table
   of torch's allocator and replaces two functions. fquant_pool_install checks the positions on which it relies: those of
   the table by a function whose address is known, and those of a c10::DataPtr by the contents of one. */

typedef void (*Deleter)(void *);
typedef struct { void *words[4]; } DataPtr; /* c10::DataPtr: an address, a deleter and its argument, a device */
typedef struct { void **table; } Allocator; /* c10::Allocator */
typedef DataPtr (*Allocate)(Allocator *, size_t);
typedef Deleter (*DeleterOf)(Allocator *);
typedef struct { int64_t size; char *at; } Place; /* for a request of `size` bytes */
typedef struct { char *at, *end; } Block;
enum { ALLOCATE = 2, IS_SIMPLE = 3, RAW_DELETER = 4, TABLE = 6 }; /* positions in the table, after two destructors */
enum { LINE = 64 }; /* bytes at whose multiples torch's tensors start */

static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER;
static char *pool_start, *pool_end; /* the range of addresses */
static int64_t pool_least;          /* bytes of a request from which it is served here */
static Block *blocks;               /* all that are in use, by address */
static size_t num_blocks, most_blocks;
static __thread int pool_is_open;   /* true while this thread replays */
static __thread const Place *pool_places;
static __thread int64_t num_places;
static struct { Allocator allocator, *torch; Allocate allocate; Deleter deleter; DataPtr example; int is_address[4]; } pool;

/* The index of the first block that ends behind p. */
static size_t block_behind(const char *p) {
    size_t low = 0, high = num_blocks;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (blocks[middle].end > p) high = middle;
        else low = middle + 1;
    }
    return low;
}

/* Insert a block at index i; NULL without memory for that. */
static void *insert_block(size_t i, char *at, size_t n) {
    if (num_blocks == most_blocks) {
        Block *more = realloc(blocks, (2 * most_blocks + 64) * sizeof *blocks);
        if (!more) return NULL;
        blocks = more, most_blocks = 2 * most_blocks + 64;
    }
    memmove(blocks + i + 1, blocks + i, (num_blocks++ - i) * sizeof *blocks);
    blocks[i] = (Block){at, at + n};
    return at;
}

/* n bytes that are free: a place for a request of this size, or the lowest of the range; NULL if there are none. */
static void *take_block(size_t n) {
    for (int64_t p = 0; p < num_places; p++) {
        char *at = pool_places[p].at;
        size_t i = block_behind(at);
        if ((size_t)pool_places[p].size == n && (i == num_blocks || blocks[i].at >= at + n)) return insert_block(i, at, n);
    }
    size_t room = (n + LINE - 1) / LINE * LINE, i = block_behind(pool_start);
    char *at = pool_start;
    while (i < num_blocks && blocks[i].at < at + room && blocks[i].at < pool_end) at = blocks[i++].end;
    return at + room <= pool_end ? insert_block(i, at, room) : NULL;
}

static void give_back(void *p) {
    pthread_mutex_lock(&pool_lock);
    size_t i = block_behind(p);
    int ours = i < num_blocks && blocks[i].at == p;
    if (ours) memmove(blocks + i, blocks + i + 1, (--num_blocks - i) * sizeof *blocks);
    pthread_mutex_unlock(&pool_lock);
    if (!ours) pool.deleter(p);
}

static DataPtr allocate(Allocator *self, size_t n) {
    (void)self;
    void *at = NULL;
    if (pool_is_open && (int64_t)n >= pool_least) {
        pthread_mutex_lock(&pool_lock);
        at = take_block(n);
        pthread_mutex_unlock(&pool_lock);
    }
    DataPtr made = at ? pool.example : pool.allocate(pool.torch, n);
    for (int i = 0; i < 4; i++)
        if (at && pool.is_address[i]) made.words[i] = at;
    return made;
}

static Deleter deleter_of(Allocator *self) { return (void)self, give_back; }

static void lock_pool(void) { pthread_mutex_lock(&pool_lock); }
static void unlock_pool(void) { pthread_mutex_unlock(&pool_lock); }

/* Let torch allocate through the pool, in a range of n addresses, requests of `least` bytes or more of threads for which
   the pool is open. The arguments are c10::GetCPUAllocator, c10::SetCPUAllocator, the virtual table of
   c10::DefaultCPUAllocator and c10::Allocator::is_simple_data_ptr. Returns false if torch has another allocator or
   another layout, or the system has no such range. */
EXPORT int fquant_pool_install(Allocator *(*get)(void), void (*set)(Allocator *, uint8_t), void **table, void *is_simple,
                               size_t n, int64_t least) {
    static void *ours[2 + TABLE]; /* with what is before the first function: an offset and the type */
    if (pool_start) return 1;
#if defined(__linux__) && (defined(__x86_64__) || defined(__aarch64__)) /* where a DataPtr is returned as a struct of C */
    pool.torch = get();
    if (pool.torch->table != table + 2 || table[2 + IS_SIMPLE] != is_simple) return 0;
    pool.allocate = (Allocate)table[2 + ALLOCATE];
    pool.deleter = ((DeleterOf)table[2 + RAW_DELETER])(pool.torch);
    pool.example = pool.allocate(pool.torch, LINE);
    void *address = pool.example.words[0];
    int addresses = 0, deleters = 0;
    for (int i = 0; i < 4; i++) {
        addresses += pool.is_address[i] = pool.example.words[i] == address;
        if (pool.example.words[i] != (void *)pool.deleter) continue;
        pool.example.words[i] = (void *)give_back;
        deleters++;
    }
    if (addresses != 2 || deleters != 1) return 0;
    pool.deleter(address);
    void *range = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED || pthread_atfork(lock_pool, unlock_pool, unlock_pool)) return 0;
    fquant_large_pages(range, n);
    pool_start = range, pool_end = pool_start + n, pool_least = least;
    memcpy(ours, table, sizeof ours);
    ours[2 + ALLOCATE] = (void *)allocate, ours[2 + RAW_DELETER] = (void *)deleter_of;
    pool.allocator.table = ours + 2;
    set(&pool.allocator, 0);
    return get() == &pool.allocator;
#else
    return (void)get, (void)set, (void)table, (void)is_simple, (void)n, (void)least, (void)ours, 0;
#endif
}

/* Open the pool for this thread, or close it; return whether it was open. */
EXPORT int fquant_pool_open(int open) {
    int was = pool_is_open;
    return pool_is_open = open, was;
}

/* Set places aside for the next requests of this thread. */
EXPORT void fquant_pool_places(const Place *places, int64_t n) { pool_places = places, num_places = n; }

/* Return the pages of free bytes to the system. */
EXPORT void fquant_pool_release(void) {
#ifdef __linux__
    pthread_mutex_lock(&pool_lock);
    uintptr_t from = (uintptr_t)pool_start;
    for (size_t i = block_behind(pool_start); from < (uintptr_t)pool_end; i++) {
        int last = i == num_blocks || blocks[i].at >= pool_end;
        uintptr_t start = (from + 4095) / 4096 * 4096, end = (uintptr_t)(last ? pool_end : blocks[i].at) / 4096 * 4096;
        if (end > start) madvise((void *)start, end - start, MADV_DONTNEED);
        from = (uintptr_t)(last ? pool_end : blocks[i].end);
    }
    pthread_mutex_unlock(&pool_lock);
#endif
}
