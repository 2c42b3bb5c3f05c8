// SPDX-License-Identifier: Apache-2.0
// Ends a process at the first byte that is read or written outside an aligned allocation (tensors, oneDNN's scratch).
//   cc -O2 -shared -fPIC -o heap_guard.so heap_guard.c; LD_PRELOAD=./heap_guard.so python ...
// Every block of posix_memalign ends at a page that may not be touched and begins after one; the few bytes that the
// alignment leaves before the end are filled with a pattern and looked at when the block is freed. New memory holds NaN
// (all bits set), so that what is read before it is written shows in the numbers.
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define ARENA (1ull << 36)
#define PAGE 4096ull
#define MARK 0xa5

extern void __libc_free(void *);
extern void *__libc_realloc(void *, size_t);

static char *arena, *next;
static size_t *sizes;  // by page of the block's start
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int ours(const void *p) { return arena && (const char *)p >= arena && (const char *)p < arena + ARENA; }
static size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }
static size_t *size_of(const void *p) { return sizes + ((const char *)p - arena) / PAGE; }

int posix_memalign(void **out, size_t alignment, size_t size) {
    if (alignment > PAGE) return EINVAL;
    pthread_mutex_lock(&lock);
    if (!arena) {
        int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        arena = next = mmap(NULL, ARENA, PROT_NONE, how, -1, 0);
        sizes = mmap(NULL, ARENA / PAGE * sizeof *sizes, PROT_READ | PROT_WRITE, how, -1, 0);
        if (arena == MAP_FAILED || sizes == MAP_FAILED) abort();
    }
    size_t inner = round_up(size ? size : 1, alignment), whole = round_up(inner, PAGE);
    char *pages = next + PAGE;
    next = pages + whole;
    pthread_mutex_unlock(&lock);
    if (next + PAGE > arena + ARENA || mprotect(pages, whole, PROT_READ | PROT_WRITE)) abort();
    char *block = pages + whole - inner;
    memset(block, 0xff, size);
    memset(block + size, MARK, inner - size);
    *size_of(block) = size;
    *out = block;
    return 0;
}

void free(void *p) {
    if (!ours(p)) {
        __libc_free(p);
        return;
    }
    size_t size = *size_of(p);
    char *end = (char *)round_up((uintptr_t)p + (size ? size : 1), PAGE), *start = (char *)((uintptr_t)p / PAGE * PAGE);
    for (unsigned char *at = (unsigned char *)p + size; (char *)at < end; at++)
        if (*at != MARK) abort();
    mprotect(start, end - start, PROT_NONE);
    madvise(start, end - start, MADV_DONTNEED);
}

void *realloc(void *p, size_t size) {
    if (!ours(p)) return __libc_realloc(p, size);
    abort();  // nothing that is watched here is ever resized
}
