/* Threads share items of work. Each thread has a contiguous share of items, and then takes remaining items of other
   threads. On a busy machine, no thread waits for a thread that the system does not run. */

#ifndef LOCANT_SHARING_H
#define LOCANT_SHARING_H

#include <stdint.h>
#include <string.h>

/* The threads come from the OpenMP library that torch has loaded. The libraries of GNU, LLVM (torch's on macOS) and Intel
   all have this GNU function, and any compiler can call it. `#pragma omp parallel` differs between compilers. */
void GOMP_parallel(void (*work)(void *), void *data, unsigned threads, unsigned flags);
int omp_get_thread_num(void);

#define JOIN(a, b) a##_##b
#define NAMED(a, b) JOIN(a, b)

enum { ELEMENTS_PER_THREAD = 32768, CACHE_LINE = 64 };

/* The number of threads, so few that each has work. A single token does not start threads. */
static inline int64_t threads_for(int64_t elements, int64_t most) {
    int64_t threads = 1 + elements / ELEMENTS_PER_THREAD;
    return threads < most ? threads : most;
}

typedef void OneItem(const void *task, int64_t item, int64_t thread);
typedef struct {
    int64_t items, threads, *taken; /* the number of items taken from each thread's share */
    OneItem *work;
    const void *task;
} Shares;

static inline void take(const Shares *all, int64_t me) {
    for (int64_t turn = 0; turn < all->threads; turn++) {
        int64_t whose = (me + turn) % all->threads;
        int64_t begin = all->items * whose / all->threads, end = all->items * (whose + 1) / all->threads;
        for (int64_t i; (i = begin + __atomic_fetch_add(&all->taken[whose], 1, __ATOMIC_RELAXED)) < end;)
            all->work(all->task, i, me);
    }
}

static void take_in_thread(void *all) { take(all, omp_get_thread_num()); }

static inline void share_out(int64_t items, int64_t threads, OneItem *work, const void *task) {
    int64_t taken[threads];
    memset(taken, 0, sizeof taken);
    Shares all = {items, threads, taken, work, task};
    if (threads > 1)
        GOMP_parallel(take_in_thread, &all, (unsigned)threads, 0);
    else
        take(&all, 0);
}

#endif
