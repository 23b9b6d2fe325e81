/* CoPE's bias of some queries and all keys: gates, their sums from each key to the query, and the interpolation between a
   query's products with two neighbouring embeddings. `positions/encodings/cope.py` has the formula in plain operations,
   which return the same bits: products and sums are not fused, and all sums of rounded gates are exact. */

#include <stdint.h>

#include "numbers.h"
#include "sharing.h"

enum { BLOCK = 256 };

/* `kernels/cope.py` packs this struct. A row is a query of a head, and rows of all heads follow each other. `decays` are
   e^-x for the scaled products x of queries and keys. Heads share the mask. */
typedef struct {
    int64_t threads, rows, first, queries, keys, embeddings;
    double grid, largest;
    const double *decays, *products; /* rows keys, from the first row; all rows embeddings */
    const uint8_t *mask;             /* queries keys */
    float *out;                      /* all rows keys */
} Task;

static void bias_of_row(const void *given, int64_t item, int64_t thread) {
    (void)thread;
    const Task *task = given;
    int64_t row = task->first + item;
    const double *decays = task->decays + item * task->keys, *products = task->products + row * task->embeddings;
    const uint8_t *mask = task->mask + row % task->queries * task->keys;
    float *out = task->out + row * task->keys;
    double shift = 0x1.8p+52 * task->grid, largest = task->largest, sum = 0, gates[BLOCK], counts[BLOCK];
    for (int64_t end = task->keys; end > 0; end -= BLOCK) {
        int64_t begin = end > BLOCK ? end - BLOCK : 0, count = end - begin;
        for (int64_t j = 0; j < count; j++) {
            double gate = 1.0 / (1.0 + decays[begin + j]);
            gate = (gate + shift) - shift;
            gates[j] = mask[begin + j] ? gate : 0.0;
        }
        for (int64_t j = count - 1; j >= 0; j--) counts[j] = sum += gates[j];
        for (int64_t j = 0; j < count; j++) {
            double bounded = counts[j] > largest ? largest : counts[j]; /* NaN stays */
            int32_t below = bounded == bounded ? (int32_t)bounded : 0;
            double share = bounded - (double)below;
            double upper = products[below + (share > 0)] * share, lower = products[below] * (1.0 - share);
            out[begin + j] = (float)(upper + lower);
        }
    }
}

void NAMED(locant_cope, VARIANT)(const char *packed) {
    Task task;
    memcpy(&task, packed, sizeof task);
    share_out(task.rows, threads_for(task.rows * task.keys, task.threads), bias_of_row, &task);
}
