/* Attention of a few queries over many keys, as in decoding. Every key and value is read once for all query heads that
   share it, and the bias of a pair depends on the distance of its tokens.

   A unit of work is some keys of one key head, with all its query rows: the scores of KEYS keys, their softmax so far,
   and the weighted sum of their values, in float32. The thread that finishes the last part of CHUNK keys joins all parts
   in their order, so that results do not depend on the number of threads.

   Unlike in rotary.c, products may be fused with sums. */

#include <math.h>
#include <stdlib.h>

#include "numbers.h"
#include "sharing.h"

#ifdef __clang__
#pragma clang fp contract(fast)
#else
#pragma GCC optimize("fp-contract=fast")
#endif

#define INLINE static inline __attribute__((always_inline))

#ifdef __AVX512F__
#define LANES 16
#elif defined __AVX__
#define LANES 8
#else
#define LANES 4
#endif

enum { KEYS = 32, CHUNK = 1024, QUERY_NUMBERS = 16384, MOST_ROWS = 64 };
enum { BATCH, HEAD, SEQ };

typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

/* `kernels/distance_attention.py` packs this struct. Steps are torch's strides, which `lay_out` converts to bytes.
   The pair of query i and key j has entry i - j + keys - 1 of the table. Only entries `first` to `last` are allowed.
   `softcap` is 0 if there is none. */
typedef struct {
    int64_t threads, dtype, batch, kv_heads, group, queries, keys, head_dim, value_dim;
    int64_t q_step[4], k_step[4], v_step[4], out_step[4];
    int64_t table_step, first, last;
    double scale, softcap;
    const char *q, *k, *v;
    char *out;
    const float *table;
    float *sums;
} Task;

/* ---------------------------------------------------------------- vectors */

INLINE Vector load(const char *at, int dtype) {
    if (dtype == FLOAT32) return *(const Vector *)at;
    if (dtype == BFLOAT16) return (Vector)(__builtin_convertvector(*(const Halves *)at, Words) << 16);
#ifdef __AVX512F__
    return (Vector)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)at));
#elif defined __F16C__
    return (Vector)_mm256_cvtph_ps(_mm_loadu_si128((const void *)at));
#else
    const Halves halves = *(const Halves *)at;
    Vector wide;
    for (int i = 0; i < LANES; i++) wide[i] = from_float16(halves[i]);
    return wide;
#endif
}

/* Load the first `count` numbers, and zeros after them. */
INLINE Vector load_some(const char *at, int dtype, int64_t count) {
    char whole[4 * LANES] = {0};
    memcpy(whole, at, (size_t)(count * (dtype == FLOAT32 ? 4 : 2)));
    return load(whole, dtype);
}

#ifdef __clang__
#define SHUFFLED(x, ...) __builtin_shufflevector(x, x, __VA_ARGS__)
#else /* gcc has __builtin_shufflevector only since version 12 */
#define SHUFFLED(x, ...) __builtin_shuffle(x, (Words){__VA_ARGS__})
#endif

INLINE float total(Vector x) {
#if LANES == 16
    x += SHUFFLED(x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    x += SHUFFLED(x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    return x[0] + x[1] + (x[2] + x[3]);
#elif LANES == 8
    x += SHUFFLED(x, 4, 5, 6, 7, 0, 1, 2, 3);
    return x[0] + x[1] + (x[2] + x[3]);
#else
    return x[0] + x[1] + (x[2] + x[3]);
#endif
}

/* e^x for x <= 0, with a relative error below 2e-7, and 0 below -87. */
INLINE float exponential(float x) {
    float bounded = x < -87.0f ? -87.0f : x;
    float whole = (bounded * 0x1.715476p+0f + 0x1.8p+23f) - 0x1.8p+23f;
    float rest = bounded - whole * 0x1.62e400p-1f - whole * 0x1.7f7d1cp-20f;
    float power = 1.0f / 5040;
    power = power * rest + 1.0f / 720;
    power = power * rest + 1.0f / 120;
    power = power * rest + 1.0f / 24;
    power = power * rest + 1.0f / 6;
    power = power * rest + 0.5f;
    power = power * rest + 1.0f;
    power = power * rest + 1.0f;
    float found = power * as_float((uint32_t)((int32_t)whole + 127) << 23);
    return x < -87.0f ? 0.0f : found;
}

/* As in the Cephes library: a polynomial near zero. */
INLINE float hyperbolic_tangent(float x) {
    float size = x < 0 ? -x : x, square = x * x;
    float near = -5.70498872745e-3f;
    near = near * square + 2.06390887954e-2f;
    near = near * square - 5.37397155531e-2f;
    near = near * square + 1.33314422036e-1f;
    near = near * square - 3.33332819422e-1f;
    near = near * square * x + x;
    float decay = exponential(-2.0f * size), far = (1.0f - decay) / (1.0f + decay);
    return size < 0.625f ? near : x < 0 ? -far : far;
}

/* ---------------------------------------------------------------- some rows, some keys */

/* Compute q . k for `rows` rows of `padded` numbers each. */
INLINE void multiply(const float *q, int64_t padded, const char *k, int64_t k_step, int64_t head_dim, int64_t count,
                     int dtype, int rows, float *scores) {
    int64_t size = dtype == FLOAT32 ? 4 : 2, whole = head_dim / LANES * LANES;
    for (int64_t j = 0; j < count; j++) {
        const char *key = k + j * k_step;
        Vector sum[4] = {{0}, {0}, {0}, {0}};
        for (int64_t d = 0; d < whole; d += LANES) {
            Vector numbers = load(key + d * size, dtype);
            for (int r = 0; r < rows; r++) sum[r] += numbers * *(const Vector *)(q + r * padded + d);
        }
        if (whole < head_dim) {
            Vector numbers = load_some(key + whole * size, dtype, head_dim - whole);
            for (int r = 0; r < rows; r++) sum[r] += numbers * *(const Vector *)(q + r * padded + whole);
        }
        for (int r = 0; r < rows; r++) scores[r * KEYS + j] = total(sum[r]);
    }
}

/* Compute y += weights . v for `rows` rows of `padded` numbers each, `width` vectors at a time. */
INLINE void add_columns(const float *weights, const char *v, int64_t v_step, int64_t count, int64_t some, int dtype,
                        int rows, int width, float *y, int64_t padded) {
    Vector sum[4][2];
    for (int r = 0; r < rows; r++)
        for (int w = 0; w < width; w++) sum[r][w] = *(const Vector *)(y + r * padded + w * LANES);
    for (int64_t j = 0; j < count; j++) {
        for (int w = 0; w < width; w++) {
            const char *at = v + j * v_step + w * LANES * (dtype == FLOAT32 ? 4 : 2);
            Vector numbers = some == LANES ? load(at, dtype) : load_some(at, dtype, some);
            for (int r = 0; r < rows; r++) sum[r][w] += weights[r * KEYS + j] * numbers;
        }
    }
    for (int r = 0; r < rows; r++)
        for (int w = 0; w < width; w++) *(Vector *)(y + r * padded + w * LANES) = sum[r][w];
}

INLINE void add_values(const float *weights, const char *v, int64_t v_step, int64_t value_dim, int64_t count, int dtype,
                       int rows, float *y, int64_t padded) {
    int64_t size = dtype == FLOAT32 ? 4 : 2, d = 0;
    for (; d + 2 * LANES <= value_dim; d += 2 * LANES)
        add_columns(weights, v + d * size, v_step, count, LANES, dtype, rows, 2, y + d, padded);
    for (; d + LANES <= value_dim; d += LANES)
        add_columns(weights, v + d * size, v_step, count, LANES, dtype, rows, 1, y + d, padded);
    if (d < value_dim)
        add_columns(weights, v + d * size, v_step, count, value_dim - d, dtype, rows, 1, y + d, padded);
}

#define FOR_DTYPE(NAME, DTYPE)                                                                                       \
    static void multiply_##NAME(const float *q, int64_t padded, const char *k, int64_t k_step, int64_t head_dim,     \
                                int64_t count, int64_t rows, float *scores) {                                        \
        for (int64_t r = 0; r < rows; r += 4) {                                                                      \
            const float *some = q + r * padded;                                                                      \
            if (rows - r >= 4) multiply(some, padded, k, k_step, head_dim, count, DTYPE, 4, scores + r * KEYS);      \
            else if (rows - r == 3) multiply(some, padded, k, k_step, head_dim, count, DTYPE, 3, scores + r * KEYS); \
            else if (rows - r == 2) multiply(some, padded, k, k_step, head_dim, count, DTYPE, 2, scores + r * KEYS); \
            else multiply(some, padded, k, k_step, head_dim, count, DTYPE, 1, scores + r * KEYS);                    \
        }                                                                                                            \
    }                                                                                                                \
    static void add_##NAME(const float *weights, const char *v, int64_t v_step, int64_t value_dim, int64_t count,    \
                           int64_t rows, float *y, int64_t padded) {                                                 \
        for (int64_t r = 0; r < rows; r += 4) {                                                                      \
            const float *of = weights + r * KEYS;                                                                    \
            float *to = y + r * padded;                                                                              \
            if (rows - r >= 4) add_values(of, v, v_step, value_dim, count, DTYPE, 4, to, padded);                    \
            else if (rows - r == 3) add_values(of, v, v_step, value_dim, count, DTYPE, 3, to, padded);               \
            else if (rows - r == 2) add_values(of, v, v_step, value_dim, count, DTYPE, 2, to, padded);               \
            else add_values(of, v, v_step, value_dim, count, DTYPE, 1, to, padded);                                  \
        }                                                                                                            \
    }

FOR_DTYPE(float32, FLOAT32)
FOR_DTYPE(float16, FLOAT16)
FOR_DTYPE(bfloat16, BFLOAT16)

typedef void Multiply(const float *, int64_t, const char *, int64_t, int64_t, int64_t, int64_t, float *);
typedef void Add(const float *, const char *, int64_t, int64_t, int64_t, int64_t, float *, int64_t);
static Multiply *const MULTIPLY[4] = {0, multiply_float32, multiply_float16, multiply_bfloat16};
static Add *const ADD[4] = {0, add_float32, add_float16, add_bfloat16};

/* Turn the scores of one row into weights, relative to its largest score so far. Return the factor of earlier sums. */
static float weigh(const Task *task, float *scores, int64_t head, int64_t query, int64_t begin, int64_t count,
                   float *maximum, float *sum) {
    const float *bias = task->table + head * task->table_step + query + task->keys - 1 - begin;
    float softcap = (float)task->softcap, largest = *maximum, added = 0;
    if (softcap != 0)
#pragma omp simd
        for (int64_t j = 0; j < count; j++) scores[j] = softcap * hyperbolic_tangent(scores[j]);
    int64_t hidden = query + task->keys - 1 - task->last - begin, end = query + task->keys - task->first - begin;
    for (int64_t j = 0; j < count; j++) {
        float score = scores[j] + bias[-j];
        scores[j] = score = j >= hidden && j < end ? score : -INFINITY;
        largest = score > largest ? score : largest;
    }
    float base = largest == -INFINITY ? 0 : largest;
#pragma omp simd reduction(+ : added)
    for (int64_t j = 0; j < count; j++) {
        scores[j] = exponential(scores[j] - base);
        added += scores[j];
    }
    float factor = exponential(*maximum - base);
    *sum = *sum * factor + added;
    *maximum = largest;
    return factor;
}

/* ---------------------------------------------------------------- units of work */

/* A part has `record` numbers for each of the `together` rows of a unit: `padded` numbers of output, maximum and sum. */
typedef struct {
    Task task;
    int64_t low, high, chunks, rows, together, groups, padded, record;
    float *parts;
    int64_t *left; /* the number of unfinished chunks of each unit */
} Plan;

/* The rows of a unit. */
typedef struct {
    int64_t batch, kv_head, first, rows;
} Unit;

static inline Unit unit_of(const Plan *plan, int64_t number) {
    int64_t first = number % plan->groups * plan->together, left = plan->rows - first, head = number / plan->groups;
    Unit unit = {head / plan->task.kv_heads, head % plan->task.kv_heads, first, 0};
    unit.rows = left < plan->together ? left : plan->together;
    return unit;
}

static inline int64_t head_of(const Task *task, const Unit *unit, int64_t row) {
    return unit->kv_head * task->group + (unit->first + row) / task->queries;
}

static inline int64_t query_of(const Task *task, const Unit *unit, int64_t row) {
    return (unit->first + row) % task->queries;
}

static void read_queries(const Task *task, const Unit *unit, int64_t padded, float *q) {
    float factor = (float)(task->softcap != 0 ? task->scale / task->softcap : task->scale);
    int dtype = (int)task->dtype;
    for (int64_t r = 0; r < unit->rows; r++) {
        const char *at = task->q + unit->batch * task->q_step[BATCH] + head_of(task, unit, r) * task->q_step[HEAD] +
                         query_of(task, unit, r) * task->q_step[SEQ];
        for (int64_t d = 0; d < padded; d += LANES) {
            int64_t some = task->head_dim - d < LANES ? task->head_dim - d : LANES;
            const char *from = at + d * SIZE[dtype];
            Vector numbers = dtype == FLOAT32   ? load_some(from, FLOAT32, some)
                             : dtype == FLOAT16 ? load_some(from, FLOAT16, some)
                                                : load_some(from, BFLOAT16, some);
            *(Vector *)(q + r * padded + d) = numbers * factor;
        }
    }
}

/* Ask for rows that are read soon. Keys and values take turns, so the hardware prefetcher begins anew with every turn. */
static void ask_for_rows(const char *rows, int64_t step, int64_t count, int64_t size) {
    for (int64_t j = 0; j < count; j++)
        for (int64_t at = 0; at < size; at += CACHE_LINE) __builtin_prefetch(rows + j * step + at, 0, 2);
}

static void attend(const Plan *plan, const Unit *unit, int64_t chunk, float *part) {
    const Task *task = &plan->task;
    int64_t padded = (task->head_dim + LANES - 1) / LANES * LANES, rows = unit->rows;
    float q[QUERY_NUMBERS], scores[MOST_ROWS * KEYS];
    read_queries(task, unit, padded, q);
    const char *k = task->k + unit->batch * task->k_step[BATCH] + unit->kv_head * task->k_step[HEAD];
    const char *v = task->v + unit->batch * task->v_step[BATCH] + unit->kv_head * task->v_step[HEAD];
    memset(part, 0, (size_t)(rows * plan->record) * sizeof *part);
    float *maxima = part + rows * plan->padded, *sums = maxima + rows;
    for (int64_t r = 0; r < rows; r++) maxima[r] = -INFINITY;
    int64_t begin = plan->low + chunk * CHUNK, end = begin + CHUNK < plan->high ? begin + CHUNK : plan->high;
    for (; begin < end; begin += KEYS) {
        int64_t count = end - begin < KEYS ? end - begin : KEYS, next = begin + count;
        ask_for_rows(v + begin * task->v_step[SEQ], task->v_step[SEQ], count, task->value_dim * SIZE[task->dtype]);
        MULTIPLY[task->dtype](q, padded, k + begin * task->k_step[SEQ], task->k_step[SEQ], task->head_dim, count, rows,
                              scores);
        for (int64_t r = 0; r < rows; r++) {
            float factor = weigh(task, scores + r * KEYS, head_of(task, unit, r), query_of(task, unit, r), begin, count,
                                 maxima + r, sums + r);
            if (factor != 1.0f)
                for (int64_t d = 0; d < plan->padded; d++) part[r * plan->padded + d] *= factor;
        }
        int64_t more = end - next < KEYS ? end - next : KEYS;
        ask_for_rows(k + next * task->k_step[SEQ], task->k_step[SEQ], more, task->head_dim * SIZE[task->dtype]);
        ADD[task->dtype](scores, v + begin * task->v_step[SEQ], task->v_step[SEQ], task->value_dim, count, rows, part,
                         plan->padded);
    }
}

static void write_row(const Task *task, int64_t batch, int64_t head, int64_t query, const float *y, float maximum,
                      float sum) {
    char *at = task->out + batch * task->out_step[BATCH] + head * task->out_step[HEAD] + query * task->out_step[SEQ];
    float scale = sum == 0 ? 0 : 1 / sum;
    for (int64_t d = 0; d < task->value_dim; d++) {
        float number = y[d] * scale;
        if (task->dtype == FLOAT32) ((float *)at)[d] = number;
        else ((uint16_t *)at)[d] = (uint16_t)(task->dtype == FLOAT16 ? to_float16(number) : to_bfloat16(number));
    }
    task->sums[(batch * task->kv_heads * task->group + head) * task->queries + query] =
        sum == 0 ? -INFINITY : maximum + logf(sum);
}

/* Join the parts of a unit into its first part. */
static void join(const Plan *plan, const Unit *unit, float *parts) {
    int64_t step = plan->together * plan->record, rows = unit->rows;
    for (int64_t r = 0; r < rows; r++) {
        float maximum = -INFINITY, sum = 0, *y = parts + r * plan->padded;
        for (int64_t c = 0; c < plan->chunks; c++) {
            float other = parts[c * step + rows * plan->padded + r];
            maximum = other > maximum ? other : maximum;
        }
        for (int64_t c = 0; c < plan->chunks; c++) {
            const float *part = parts + c * step, *other = part + r * plan->padded;
            float factor = maximum == -INFINITY ? 0 : exponential(part[rows * plan->padded + r] - maximum);
            sum += part[rows * plan->padded + rows + r] * factor;
            for (int64_t d = 0; d < plan->padded; d++) y[d] = (c ? y[d] : 0) + other[d] * factor;
        }
        write_row(&plan->task, unit->batch, head_of(&plan->task, unit, r), query_of(&plan->task, unit, r), y, maximum,
                  sum);
    }
}

/* Compute one chunk of a unit. The thread that finishes the last chunk joins them. */
static void work(const void *given, int64_t item, int64_t thread) {
    (void)thread;
    const Plan *plan = given;
    int64_t number = item / plan->chunks, step = plan->together * plan->record;
    Unit unit = unit_of(plan, number);
    attend(plan, &unit, item % plan->chunks, plan->parts + item * step);
    if (__atomic_sub_fetch(&plan->left[number], 1, __ATOMIC_ACQ_REL) == 0)
        join(plan, &unit, plan->parts + number * plan->chunks * step);
}

static void lay_out(Plan *plan) {
    Task *task = &plan->task;
    for (int i = 0; i < 4; i++) {
        task->q_step[i] *= SIZE[task->dtype];
        task->k_step[i] *= SIZE[task->dtype];
        task->v_step[i] *= SIZE[task->dtype];
        task->out_step[i] *= SIZE[task->dtype];
    }
    int64_t low = task->keys - 1 - task->last, high = task->queries - 1 + task->keys - task->first;
    plan->low = low > 0 ? low : 0;
    plan->high = high < task->keys ? high : task->keys;
    plan->chunks = (plan->high - plan->low + CHUNK - 1) / CHUNK;
    plan->chunks = plan->chunks > 0 ? plan->chunks : 1; /* without keys, one chunk writes zeros */
    plan->rows = task->group * task->queries;
    plan->together = QUERY_NUMBERS / ((task->head_dim + LANES - 1) / LANES * LANES);
    plan->together = plan->together < MOST_ROWS ? plan->together : MOST_ROWS;
    plan->together = plan->together < plan->rows ? plan->together : plan->rows;
    plan->groups = (plan->rows + plan->together - 1) / plan->together;
    plan->padded = (task->value_dim + LANES - 1) / LANES * LANES;
    plan->record = plan->padded + 2;
}

/* Return 1 if there is not enough memory for the parts. */
int NAMED(locant_decode, VARIANT)(const char *packed) {
    Plan plan;
    memcpy(&plan.task, packed, sizeof plan.task);
    lay_out(&plan);
    int64_t units = plan.task.batch * plan.task.kv_heads * plan.groups, items = units * plan.chunks;
    if (!items) return 0;
    plan.parts = malloc((size_t)(items * plan.together * plan.record) * sizeof *plan.parts);
    plan.left = malloc((size_t)units * sizeof *plan.left);
    int failed = !plan.parts || !plan.left;
    if (!failed) {
        int64_t elements = units * plan.rows * (plan.high - plan.low) * (plan.task.head_dim + plan.task.value_dim);
        for (int64_t unit = 0; unit < units; unit++) plan.left[unit] = plan.chunks;
        share_out(items, threads_for(elements, plan.task.threads), work, &plan);
    }
    free(plan.parts);
    free(plan.left);
    return failed;
}
