/* A team of threads in the place of OpenMP's, made of what the thread sanitizer understands. */
#include <pthread.h>
#include <stdlib.h>

static __thread int number;

typedef struct {
    void (*work)(void *);
    void *data;
    int number;
} Member;

static void *run(void *given) {
    Member *member = given;
    number = member->number;
    member->work(member->data);
    return 0;
}

void GOMP_parallel(void (*work)(void *), void *data, unsigned threads, unsigned flags) {
    (void)flags;
    pthread_t others[64];
    Member members[64];
    for (unsigned i = 1; i < threads; i++) {
        members[i] = (Member){work, data, (int)i};
        pthread_create(&others[i], 0, run, &members[i]);
    }
    number = 0;
    work(data);
    for (unsigned i = 1; i < threads; i++) pthread_join(others[i], 0);
}

int omp_get_thread_num(void) { return number; }
