/* How threads share items of work: each has a share of items that lie together, and then takes what is left of others'.
   On a busy machine, one that is not scheduled holds nobody up. */

#ifndef LOCANT_SHARING_H
#define LOCANT_SHARING_H

#include <stdint.h>
#include <string.h>

int omp_get_thread_num(void);

#define JOIN(a, b) a##_##b
#define NAMED(a, b) JOIN(a, b)

enum { ELEMENTS_PER_THREAD = 32768 };

/* So few that each has something to do; one token starts none. */
static inline int64_t threads_for(int64_t elements, int64_t most) {
    int64_t threads = 1 + elements / ELEMENTS_PER_THREAD;
    return threads < most ? threads : most;
}

static inline void share_out(int64_t items, int64_t threads, void (*work)(const void *task, int64_t item, int64_t thread),
                             const void *task) {
    int64_t taken[threads]; /* of each thread's share */
    memset(taken, 0, sizeof taken);
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    for (int64_t me = omp_get_thread_num(), turn = 0; turn < threads; turn++) {
        int64_t whose = (me + turn) % threads, begin = items * whose / threads, end = items * (whose + 1) / threads;
        for (int64_t i; (i = begin + __atomic_fetch_add(&taken[whose], 1, __ATOMIC_RELAXED)) < end;) work(task, i, me);
    }
}

#endif
