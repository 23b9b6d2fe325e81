/* The input of a transformer in one pass, and back: rows of tables added, normed, dropped; float32 and 16 bits.

   What `locant/kernels/input_embedding/cpu.py` says in torch's operators, bit for bit, for any number of threads:

   - rows are added in float32 in the order token (times scale), segment, position, and rounded once at the end;
   - a sum over the width of a token is formed in 32 lanes, each added up from left to right, and then by halves;
   - backward, everything is added in the order of the slots: all sequences of slot 0, then of slot 1. The sums for
     gamma, beta and few segments are those of chunks of slots, and then of the chunks. The rows of a table are written
     one after another, each once: zeros are not written first.

   The gradient of a token's row is computed twice, once for its slot and once for its id, rather than kept.

   It must be compiled with -ffp-contract=off, and without -ffast-math. */

#include <math.h>
#include <sys/mman.h>

#include "numbers.h"
#include "sharing.h"

enum { LANES = 32, TOKENS = 32, ROWS = 32, BUFFERS = 3, LARGE = 1 << 22, PAGE = 1 << 12 };

/* Where a table lies, with the row of every token; without `ids`, it is row 0, without `rows` there is none. For the
   backward pass: where its gradient goes, contiguous, and room for `height + tokens` numbers where it is gathered. */
typedef struct {
    const char *rows;
    int64_t step, dtype, height;
    const int64_t *ids;
    char *gradient;
    int64_t *sorted;
} Table;

/* As `input_embedding/native.py` packs it. `out` is the result, or the gradient on it, with its steps in bytes along
   batch and seq. */
typedef struct {
    int64_t threads, batch, seq, width, dtype;
    Table token, position, segment;
    int64_t shared; /* positions have one row for all sequences */
    int64_t run;    /* where positions begin that are shared and go up by one; or -1 */
    int64_t slots;  /* of a chunk */
    int64_t padding;
    int64_t normed;
    double scale, eps;
    const float *gamma, *beta;
    float *mean, *rstd;
    char *out;
    int64_t out_dtype, out_step[2];
    const int16_t *bits, *limits; /* dropped: bits < limit of the token */
    int64_t of_group, of_part, group_step, part_step;
    double factor;
    float *buffers, *along, *partial;
    char *grad_gamma, *grad_beta;
} Task;

/* ---------------------------------------------------------------- rows */

#define EACH _Pragma("omp simd") for (int64_t i = 0; i < n; i++)

static inline void read_row(float *x, const char *row, int64_t dtype, float scale, int64_t n) {
    const float *full = (const float *)row;
    const uint16_t *half = (const uint16_t *)row;
    if (dtype == FLOAT32) {
        EACH x[i] = full[i] * scale;
    } else if (dtype == BFLOAT16) {
        EACH x[i] = from_bfloat16(half[i]) * scale;
    } else {
        widen(half, x, n);
        EACH x[i] *= scale;
    }
}

static inline void add_row(float *x, const char *row, int64_t dtype, int64_t n) {
    const float *full = (const float *)row;
    const uint16_t *half = (const uint16_t *)row;
    if (dtype == FLOAT32) {
        EACH x[i] += full[i];
    } else if (dtype == BFLOAT16) {
        EACH x[i] += from_bfloat16(half[i]);
    } else {
        float wide[256];
        for (int64_t at = 0; at < n; at += 256) {
            int64_t count = n - at < 256 ? n - at : 256;
            widen(half + at, wide, count);
            for (int64_t i = 0; i < count; i++) x[at + i] += wide[i];
        }
    }
}

static inline void write_row(char *row, const float *x, int64_t dtype, int64_t n) {
    uint16_t *half = (uint16_t *)row;
    if (dtype == FLOAT32) {
        memmove(row, x, (size_t)n * 4);
    } else if (dtype == BFLOAT16) {
        EACH half[i] = (uint16_t)to_bfloat16(x[i]);
    } else {
        narrow(x, half, n);
    }
}

/* Memory that is written for the first time comes in pages of 2 MiB, where the system has them for who asks: touching
   it in pages of 4 KiB takes longer than all that is computed here. NumPy asks for arrays of the same sizes. */
static void ask_for_large_pages(char *memory, int64_t size) {
#ifdef MADV_HUGEPAGE
    uintptr_t begin = ((uintptr_t)memory + PAGE - 1) / PAGE * PAGE;
    if (memory && size >= LARGE) madvise((void *)begin, (size_t)((uintptr_t)memory + (uintptr_t)size - begin), MADV_HUGEPAGE);
#endif
}

/* Rows lie anywhere; what comes next is asked for while this one is worked on. */
static inline void ask_for(const char *row, int64_t size) {
    for (int64_t i = 0; i < size; i += 64) __builtin_prefetch(row + i);
}

static inline int64_t id_of(const Table *table, int64_t token) { return table->ids ? table->ids[token] : 0; }

static inline const char *row_of(const Table *table, int64_t token) {
    return table->rows + id_of(table, token) * table->step;
}

static inline int64_t place_of(const Task *task, int64_t token) { return task->shared ? token % task->seq : token; }

static inline char *out_of(const Task *task, int64_t token) {
    return task->out + token / task->seq * task->out_step[0] + token % task->seq * task->out_step[1];
}

static inline void read_sum(const Task *task, int64_t token, float *x) {
    int64_t n = task->width;
    read_row(x, row_of(&task->token, token), task->token.dtype, (float)task->scale, n);
    if (task->segment.rows) add_row(x, row_of(&task->segment, token), task->segment.dtype, n);
    if (task->position.rows) add_row(x, row_of(&task->position, place_of(task, token)), task->position.dtype, n);
}

static inline void drop(const Task *task, int64_t token, float *x) {
    if (!task->bits) return;
    int64_t n = task->width, in_group = token % task->of_group;
    int64_t part = token / task->of_group * task->group_step + in_group / task->of_part * task->part_step;
    const int16_t *bits = task->bits + part + in_group % task->of_part * n;
    int limit = task->limits[token];
    float factor = (float)task->factor;
    EACH x[i] = x[i] * (bits[i] >= limit ? 1.0f : 0.0f) * factor;
}

/* ---------------------------------------------------------------- sums over the width */

#define OVER_LANES(ADD)                                                  \
    int64_t at = 0;                                                      \
    for (; at + LANES <= n; at += LANES) {                               \
        _Pragma("omp simd") for (int64_t lane = 0; lane < LANES; lane++) { \
            int64_t i = at + lane;                                       \
            ADD                                                          \
        }                                                                \
    }                                                                    \
    for (int64_t lane = 0; at + lane < n; lane++) {                      \
        int64_t i = at + lane;                                           \
        ADD                                                              \
    }

static inline float total(float *lanes) {
    for (int64_t half = LANES / 2; half; half /= 2)
        for (int64_t lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
    return lanes[0];
}

static inline float mean_of(const float *x, int64_t n) {
    float lanes[LANES] = {0};
    OVER_LANES(lanes[lane] += x[i];)
    return total(lanes) / (float)n;
}

static inline float mean_square(const float *x, float mean, int64_t n) {
    float lanes[LANES] = {0};
    OVER_LANES(float off = x[i] - mean; lanes[lane] += off * off;)
    return total(lanes) / (float)n;
}

/* ---------------------------------------------------------------- forward */

static void embed_tokens(const void *given, int64_t item, int64_t thread) {
    const Task *task = given;
    int64_t n = task->width, tokens = task->batch * task->seq, last = (item + 1) * TOKENS;
    for (int64_t token = item * TOKENS; token < last && token < tokens; token++) {
        char *out = out_of(task, token);
        float *x = task->out_dtype == FLOAT32 ? (float *)out : task->buffers + thread * BUFFERS * n;
        if (token + 1 < tokens) ask_for(row_of(&task->token, token + 1), n * SIZE[task->token.dtype]);
        read_sum(task, token, x);
        if (task->normed) {
            float mean = mean_of(x, n), rstd = 1.0f / sqrtf(mean_square(x, mean, n) + (float)task->eps);
            const float *gamma = task->gamma, *beta = task->beta;
            task->mean[token] = mean;
            task->rstd[token] = rstd;
            if (gamma && beta) {
                EACH x[i] = (x[i] - mean) * rstd * gamma[i] + beta[i];
            } else if (gamma) {
                EACH x[i] = (x[i] - mean) * rstd * gamma[i];
            } else {
                EACH x[i] = (x[i] - mean) * rstd;
            }
        }
        drop(task, token, x);
        if ((char *)x != out) write_row(out, x, task->out_dtype, n);
    }
}

/* ---------------------------------------------------------------- backward */

/* What a token means for its sum: `g` is the gradient on the result, dropped, and becomes that on the sum; `x` becomes
   the normed sum. `along` holds the two means over the width that the norm's derivative has. */
static inline void read_gradient(const Task *task, int64_t token, float *g) {
    read_row(g, out_of(task, token), task->out_dtype, 1.0f, task->width);
    drop(task, token, g);
}

static inline void normalise(const Task *task, int64_t token, float *x) {
    int64_t n = task->width;
    float mean = task->mean[token], rstd = task->rstd[token];
    read_sum(task, token, x);
    EACH x[i] = (x[i] - mean) * rstd;
}

static inline void means_along(const float *g, const float *x, float *along, int64_t n) {
    float lanes[LANES] = {0}, others[LANES] = {0};
    OVER_LANES(lanes[lane] += g[i]; others[lane] += g[i] * x[i];)
    along[0] = total(lanes) / (float)n;
    along[1] = total(others) / (float)n;
}

static inline void through_norm(float *g, const float *x, const float *along, float rstd, int64_t n) {
    float one = along[0], two = along[1];
    EACH g[i] = (g[i] - one - x[i] * two) * rstd;
}

static inline int few_segments(const Task *task) { return task->segment.gradient && !task->segment.sorted; }

/* Sums of a chunk: gamma, beta, and segments if they are few. */
static inline int64_t sums_of_chunk(const Task *task) { return 2 + (few_segments(task) ? task->segment.height : 0); }

static void sum_slots(const void *given, int64_t item, int64_t thread) {
    const Task *task = given;
    int64_t n = task->width, slots = task->slots, seq = task->seq, few = few_segments(task);
    float *g = task->buffers + thread * BUFFERS * n, *x = g + n, *row = x + n;
    float *gamma = task->partial + item * sums_of_chunk(task) * n, *beta = gamma + n, *segments = beta + n;
    memset(gamma, 0, (size_t)(sums_of_chunk(task) * n) * 4);
    for (int64_t slot = item * slots; slot < seq && slot < (item + 1) * slots; slot++) {
        if (task->run >= 0) memset(row, 0, (size_t)n * 4);
        for (int64_t sequence = 0; sequence < task->batch; sequence++) {
            int64_t token = sequence * seq + slot, next = sequence + 1 < task->batch ? token + seq : slot + 1;
            if (next < task->batch * seq) {
                ask_for(out_of(task, next), n * SIZE[task->out_dtype]);
                if (task->normed) ask_for(row_of(&task->token, next), n * SIZE[task->token.dtype]);
            }
            read_gradient(task, token, g);
            if (task->normed) {
                float *along = task->along + 2 * token;
                normalise(task, token, x);
                if (task->gamma) {
                    const float *by = task->gamma;
                    EACH {
                        beta[i] += g[i];
                        gamma[i] += g[i] * x[i];
                        g[i] *= by[i];
                    }
                }
                means_along(g, x, along, n);
                if (task->run >= 0 || few) through_norm(g, x, along, task->rstd[token], n);
            }
            if (task->run >= 0) EACH row[i] += g[i];
            if (few) {
                float *segment = segments + id_of(&task->segment, token) * n;
                EACH segment[i] += g[i];
            }
        }
        if (task->run >= 0) {
            const Table *position = &task->position;
            write_row(position->gradient + (task->run + slot) * n * SIZE[position->dtype], row, position->dtype, n);
        }
    }
}

/* The sums of all chunks, which follow each other in memory. */
static void sum_chunks(const Task *task, int64_t chunks, int64_t which, char *gradient, int64_t dtype) {
    int64_t n = task->width, step = sums_of_chunk(task) * n;
    float *sum = task->buffers;
    memset(sum, 0, (size_t)n * 4);
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        const float *part = task->partial + chunk * step + which * n;
        EACH sum[i] += part[i];
    }
    write_row(gradient, sum, dtype, n);
}

/* Tokens in the order of their ids, and then of slots: where those of each row end, and then the tokens. */
static void sort(const Task *task, Table *table) {
    int64_t *ends = table->sorted, *order = ends + table->height, tokens = task->batch * task->seq;
    memset(ends, 0, (size_t)table->height * 8);
    for (int64_t token = 0; token < tokens; token++) ends[table->ids[token]]++;
    int64_t begin = 0;
    for (int64_t row = 0; row < table->height; row++) {
        int64_t count = ends[row];
        ends[row] = begin;
        begin += count;
    }
    for (int64_t slot = 0; slot < task->seq; slot++)
        for (int64_t token = slot; token < tokens; token += task->seq) order[ends[table->ids[token]]++] = token;
}

typedef struct {
    const Task *task;
    const Table *table;
    float scale;
    int64_t padding;
} Gathered;

static void sum_rows(const void *given, int64_t item, int64_t thread) {
    const Gathered *gathered = given;
    const Task *task = gathered->task;
    const Table *table = gathered->table;
    int64_t n = task->width, size = n * SIZE[table->dtype], tokens = task->batch * task->seq;
    const int64_t *ends = table->sorted, *order = ends + table->height;
    float *g = task->buffers + thread * BUFFERS * n, *x = g + n, *sum = x + n, scale = gathered->scale;
    for (int64_t row = item * ROWS; row < table->height && row < (item + 1) * ROWS; row++) {
        char *gradient = table->gradient + row * size;
        int64_t begin = row ? ends[row - 1] : 0, end = ends[row];
        if (begin == end || row == gathered->padding) {
            memset(gradient, 0, (size_t)size);
            continue;
        }
        memset(sum, 0, (size_t)n * 4);
        for (int64_t i = begin; i < end; i++) {
            int64_t token = order[i];
            if (i + 1 < tokens) {
                ask_for(out_of(task, order[i + 1]), n * SIZE[task->out_dtype]);
                if (task->normed) ask_for(row_of(&task->token, order[i + 1]), n * SIZE[task->token.dtype]);
            }
            read_gradient(task, token, g);
            if (task->normed) {
                const float *by = task->gamma;
                normalise(task, token, x);
                if (by) EACH g[i] *= by[i];
                through_norm(g, x, task->along + 2 * token, task->rstd[token], n);
            }
            EACH sum[i] += g[i] * scale;
        }
        write_row(gradient, sum, table->dtype, n);
    }
}

static void gather_rows(const Task *task, Table *table, float scale, int64_t padding) {
    if (!table->sorted) return;
    int64_t threads = threads_for((table->height + task->batch * task->seq) * task->width, task->threads);
    Gathered gathered = {task, table, scale, padding};
    sort(task, table);
    ask_for_large_pages(table->gradient, table->height * task->width * SIZE[table->dtype]);
    share_out((table->height + ROWS - 1) / ROWS, threads, sum_rows, &gathered);
}

/* ---------------------------------------------------------------- what is called from Python; `packed` is a Task */

static int has_rows(const Table *table, int64_t count) {
    uint64_t most = 0;
    if (!table->rows || !table->ids) return 1;
    for (int64_t i = 0; i < count; i++) most = (uint64_t)table->ids[i] > most ? (uint64_t)table->ids[i] : most;
    return !count || most < (uint64_t)table->height;
}

/* Whether every id has its row; nothing is done otherwise. */
static int may_read(const Task *task) {
    int64_t tokens = task->batch * task->seq;
    return has_rows(&task->token, tokens) && has_rows(&task->segment, tokens) &&
           has_rows(&task->position, task->shared ? task->seq : tokens);
}

int NAMED(locant_embed, VARIANT)(const char *packed) {
    Task task;
    memcpy(&task, packed, sizeof task);
    if (!may_read(&task)) return 0;
    int64_t tokens = task.batch * task.seq, items = (tokens + TOKENS - 1) / TOKENS;
    ask_for_large_pages(task.out, tokens * task.width * SIZE[task.out_dtype]);
    share_out(items, threads_for(tokens * task.width, task.threads), embed_tokens, &task);
    return 1;
}

int NAMED(locant_embed_backward, VARIANT)(const char *packed) {
    Task task;
    memcpy(&task, packed, sizeof task);
    if (!may_read(&task)) return 0;
    int64_t n = task.width, tokens = task.batch * task.seq, threads = threads_for(tokens * n, task.threads);
    if (task.partial) { /* a norm's means, and sums in the order of the slots */
        int64_t chunks = (task.seq + task.slots - 1) / task.slots;
        Table *position = &task.position;
        if (task.run >= 0) { /* rows that have no slot */
            int64_t size = n * SIZE[position->dtype], end = task.run + task.seq;
            memset(position->gradient, 0, (size_t)(task.run * size));
            memset(position->gradient + end * size, 0, (size_t)((position->height - end) * size));
        }
        share_out(chunks, threads, sum_slots, &task);
        if (task.grad_gamma) sum_chunks(&task, chunks, 0, task.grad_gamma, task.dtype);
        if (task.grad_beta) sum_chunks(&task, chunks, 1, task.grad_beta, task.dtype);
        for (int64_t row = 0; few_segments(&task) && row < task.segment.height; row++)
            sum_chunks(&task, chunks, 2 + row, task.segment.gradient + row * n * SIZE[task.dtype], task.dtype);
    }
    gather_rows(&task, &task.token, (float)task.scale, task.padding);
    gather_rows(&task, &task.position, 1.0f, -1);
    gather_rows(&task, &task.segment, 1.0f, -1);
    return 1;
}
