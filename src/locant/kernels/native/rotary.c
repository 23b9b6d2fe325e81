/* Rotate queries and keys by their positions in one pass over memory, with q and k in one parallel region.

   Results have the same bits as `locant/kernels/rotary/reference.py`. Angles are products of complex numbers in float64,
   one for each byte of a position, rounded once to float32 (float64 for float64). The results are a cos - b sin and
   b cos + a sin, and every product is rounded. So compile this with -ffp-contract=off and without -ffast-math.

   Threads take blocks of tokens. The cosines of a block are on the stack of the thread and are used for all heads and
   sequences, so that nothing of the size of the whole sequence is stored.

   It is compiled once for each instruction set, with VARIANT in the name of its function, and linked without an OpenMP
   library. It uses the OpenMP library that torch has loaded. */

#include "rotation.h"

static void rotate_block(const void *given, int64_t item, int64_t thread) {
    const Work *work = given;
    const Task *task = &work->task;
    Block block = block_of(work, item);
    Angles angles;
    const void *cos, *sin;
    find_angles(task, &block, &angles, &cos, &sin);
    order_angles(task, block.tokens, &angles, &cos, &sin);
    for (int64_t i = block.sequence; i < block.sequence + block.sequences; i++) {
        rotate_tensor(task, &task->q, &task->q_at, i, block.first, block.tokens, cos, sin);
        rotate_tensor(task, &task->k, &task->k_at, i, block.first, block.tokens, cos, sin);
    }
    (void)thread;
}

/* The only function that Python calls. `packed` is a Task. */
void NAMED(locant_rotate, VARIANT)(const char *packed) {
    Work work;
    memcpy(&work.task, packed, sizeof work.task);
    const Task *task = &work.task;
    int64_t elements = task->batch * task->seq * (task->q.heads + task->k.heads) * task->head_dim;
    if (!elements) return;
    int64_t threads = threads_for(elements, task->threads);
    share_out(divide(&work, threads), threads, rotate_block, &work);
}
