/* A bias of straight pieces, as FIRE's is, and its gradient: the entry of a distance over the reach of a query goes
   through a function of straight pieces, one for each head, whose kinks are the same for all heads.

   A tile has its queries in reverse order, and row r and column c have entry r + c of `table`, which falls from far
   distances to near ones. So along a row each piece is a run of columns, the last piece first: a bias is a product and
   a sum, and no piece is looked up. */

#include <math.h>

#include "sharing.h"

enum { DIAGONALS = 512, MOST_PIECES = 1025 };

/* As `kernels/distance_pieces.py` packs it. Entries before `low` and from `high` on are hidden. */
typedef struct {
    int64_t threads, rows, columns, low, high, heads, pieces;
    double factor; /* what the bias is added to is multiplied by it; 0 where there is nothing yet */
    const float *table, *reach, *kinks;
    const float *slopes, *offsets; /* heads x pieces */
    float *scores;                 /* heads x rows x columns; or the gradient of one head's, rows x (rows + columns) */
    float *along;                  /* the gradient of the table */
    double *sums;                  /* for each item, the gradients of slopes, of offsets, and of every row's reach */
} Task;

static inline int64_t between(int64_t x, int64_t least, int64_t most) { return x < least ? least : x > most ? most : x; }

/* Where pieces end: piece p has the columns from `ends[p + 1]` to `ends[p]`, of those from `begin` to `end`. */
static void find_pieces(const Task *task, int64_t row, int64_t begin, int64_t end, int64_t *ends) {
    const float *numbers = task->table + row;
    const float reach = task->reach[row]; /* entries are divided, as elsewhere: one may be just at a kink */
    ends[0] = end;
    for (int64_t p = 1; p < task->pieces; p++) {
        float kink = task->kinks[p - 1];
        int64_t low = begin, high = ends[p - 1];
        if (low < high && numbers[high - 1] / reach > kink) low = high; /* most kinks are beyond either end */
        if (low < high && !(numbers[low] / reach > kink)) high = low;
        while (low < high) {
            int64_t middle = (low + high) / 2;
            if (numbers[middle] / reach > kink) low = middle + 1;
            else high = middle;
        }
        ends[p] = low;
    }
    ends[task->pieces] = begin;
}

/* ---------------------------------------------------------------- the bias */

static void write_row(const void *given, int64_t row, int64_t thread) {
    (void)thread;
    const Task *task = given;
    int64_t ends[MOST_PIECES + 1];
    int64_t begin = between(task->low - row, 0, task->columns), end = between(task->high - row, begin, task->columns);
    float factor = (float)task->factor;
    find_pieces(task, row, begin, end, ends);
    for (int64_t head = 0; head < task->heads; head++) {
        float *out = task->scores + (head * task->rows + row) * task->columns;
        for (int64_t c = 0; c < begin; c++) out[c] = -INFINITY;
        for (int64_t c = end; c < task->columns; c++) out[c] = -INFINITY;
        for (int64_t p = 0; p < task->pieces; p++) {
            const float *numbers = task->table + row;
            float slope = task->slopes[head * task->pieces + p] / task->reach[row];
            float offset = task->offsets[head * task->pieces + p];
            if (factor == 0)
#pragma omp simd
                for (int64_t c = ends[p + 1]; c < ends[p]; c++) out[c] = slope * numbers[c] + offset;
            else
#pragma omp simd
                for (int64_t c = ends[p + 1]; c < ends[p]; c++) out[c] = factor * out[c] + (slope * numbers[c] + offset);
        }
    }
}

void NAMED(locant_pieces, VARIANT)(const char *packed) {
    Task task;
    memcpy(&task, packed, sizeof task);
    share_out(task.rows, threads_for(task.heads * task.rows * task.columns, task.threads), write_row, &task);
}

/* ---------------------------------------------------------------- its gradient */

/* Some diagonals of one head's scores, which belong to one entry of the table each. */
static void add_diagonals(const void *given, int64_t item, int64_t thread) {
    (void)thread;
    const Task *task = given;
    int64_t ends[MOST_PIECES + 1], first = item * DIAGONALS;
    int64_t last = between(first + DIAGONALS, 0, task->rows + task->columns - 1);
    double *slopes = task->sums + item * (2 * task->pieces + task->rows), *offsets = slopes + task->pieces;
    double *reach = offsets + task->pieces;
    memset(task->along + first, 0, (size_t)(last - first) * sizeof *task->along);
    memset(slopes, 0, (size_t)(2 * task->pieces + task->rows) * sizeof *slopes);
    first = first > task->low ? first : task->low;
    last = last < task->high ? last : task->high;
    for (int64_t row = 0; row < task->rows; row++) {
        int64_t begin = between(first - row, 0, task->columns), end = between(last - row, begin, task->columns);
        if (begin == end) continue;
        find_pieces(task, row, begin, end, ends);
        const float *numbers = task->table + row, *gradient = task->scores + row * (task->rows + task->columns);
        float *along = task->along + row;
        for (int64_t p = 0; p < task->pieces; p++) {
            float slope = task->slopes[p] / task->reach[row], sum = 0, product = 0;
#pragma omp simd reduction(+ : sum, product)
            for (int64_t c = ends[p + 1]; c < ends[p]; c++) {
                sum += gradient[c];
                product += gradient[c] * numbers[c];
                along[c] += slope * gradient[c];
            }
            double share = (double)product / task->reach[row];
            slopes[p] += share;
            offsets[p] += sum;
            reach[row] -= share * slope;
        }
    }
}

void NAMED(locant_pieces_gradient, VARIANT)(const char *packed) {
    Task task;
    memcpy(&task, packed, sizeof task);
    int64_t items = (task.rows + task.columns - 1 + DIAGONALS - 1) / DIAGONALS;
    share_out(items, threads_for(task.rows * task.columns, task.threads), add_diagonals, &task);
}
