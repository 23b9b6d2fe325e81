/* Norm the heads of queries and keys, rotate them, and copy the values, in one pass over memory and one parallel region.
   Or the same backwards.

   Results of the forward have the same bits as `locant/kernels/norm_rotary/reference.py` on the same machine. Squares are
   added in the order of torch's `sum` over contiguous rows: LANES partial sums in each of four streams, a cascade of 16
   for long rows, then the streams, the elements after the last whole vector, and the lanes one after the other. torch's
   LANES depend on the instruction set that it runs with, so they are a number in the task, and the bits do not depend on
   the instruction set of this code. The order does not depend on strides, blocks or threads.

   The backward adds the gradients of weights in float32 (float64 for float64) over a few tokens, and these sums in
   float64, in an order that does not depend on the number of threads. */

#include <math.h>
#include <stdlib.h>

#include "rotation.h"

enum { GROUP = 8, STREAMS = 4, CASCADE = 16, LEVELS = 4, SEGMENT = 64, CHUNKS = 512 };

/* The weights of q or k. A width of 0 means no weights. If the width is not that of a head, the norm is over all heads. */
typedef struct {
    const char *data;
    int64_t dtype, step, width;
} Weight;

typedef struct {
    int64_t lanes, round_before_weight, plus_one;
    double eps;
    Weight q, k;
} Norm;

/* `norm_rotary/cpu.py` packs these structs. `size` is the number of bytes of a row of v. */
typedef struct {
    int64_t size;
    Tensor steps;
    Place at;
} Copy;

typedef struct {
    int64_t is_normed;
    Norm norm;
    Copy v;
    Task task;
} NormTask;

/* The task rotates gradients back, into the gradients of q and k. The steps and addresses of q and k are here. */
typedef struct {
    Norm norm;
    int64_t q_step[3], k_step[3];
    const char *q, *k;
    double *q_weight, *k_weight;
    Task task;
} BackTask;

/* ---------------------------------------------------------------- sums in torch's order */

#define SUM_OF_PRODUCTS(NAME, REAL, LANES)                                                                           \
    typedef REAL NAME##_vector __attribute__((vector_size(LANES * sizeof(REAL)), aligned(sizeof(REAL)), may_alias)); \
    static inline REAL NAME(const REAL *x, const REAL *y, int64_t n) {                                               \
        const NAME##_vector *a = (const NAME##_vector *)x, *b = (const NAME##_vector *)y;                            \
        int64_t vectors = n / LANES, steps = vectors / STREAMS, step = 0;                                            \
        NAME##_vector sum[LEVELS][STREAMS] = {{{0}}};                                                                \
        while (step + CASCADE <= steps) {                                                                            \
            for (int64_t end = step + CASCADE; step < end; step++)                                                   \
                for (int i = 0; i < STREAMS; i++) sum[0][i] += a[step * STREAMS + i] * b[step * STREAMS + i];        \
            for (int level = 1; level < LEVELS; level++) {                                                           \
                for (int i = 0; i < STREAMS; i++) {                                                                  \
                    sum[level][i] += sum[level - 1][i];                                                              \
                    sum[level - 1][i] = (NAME##_vector){0};                                                          \
                }                                                                                                    \
                if (step & (CASCADE - 1ll) << 4 * level) break;                                                      \
            }                                                                                                        \
        }                                                                                                            \
        for (; step < steps; step++)                                                                                 \
            for (int i = 0; i < STREAMS; i++) sum[0][i] += a[step * STREAMS + i] * b[step * STREAMS + i];            \
        if (steps >= CASCADE)                                                                                        \
            for (int level = 1; level < LEVELS; level++)                                                             \
                for (int i = 0; i < STREAMS; i++) sum[0][i] += sum[level][i];                                        \
        for (int64_t i = steps * STREAMS; i < vectors; i++) sum[0][0] += a[i] * b[i];                                \
        NAME##_vector all = sum[0][0] + sum[0][1] + sum[0][2] + sum[0][3];                                           \
        REAL total = 0;                                                                                              \
        for (int64_t i = vectors * LANES; i < n; i++) total += x[i] * y[i];                                          \
        for (int i = 0; i < LANES; i++) total += all[i];                                                             \
        return total;                                                                                                \
    }

/* Rows that are shorter than a vector: the same with one lane. */
#define SUM_OF_FEW(NAME, REAL)                                                              \
    static inline REAL NAME(const REAL *x, const REAL *y, int64_t n) {                      \
        REAL sum[STREAMS] = {0};                                                            \
        int64_t whole = n / STREAMS * STREAMS;                                              \
        for (int64_t i = 0; i < n; i++) sum[i < whole ? i % STREAMS : 0] += x[i] * y[i];    \
        return sum[0] + sum[1] + sum[2] + sum[3];                                           \
    }

SUM_OF_PRODUCTS(sum16, float, 16)
SUM_OF_PRODUCTS(sum8, float, 8)
SUM_OF_PRODUCTS(sum4, float, 4)
SUM_OF_FEW(sum1, float)
SUM_OF_PRODUCTS(sum8_wide, double, 8)
SUM_OF_PRODUCTS(sum4_wide, double, 4)
SUM_OF_PRODUCTS(sum2_wide, double, 2)
SUM_OF_FEW(sum1_wide, double)

static inline float sum_float(int64_t lanes, const float *x, const float *y, int64_t n) {
    if (n < lanes) return sum1(x, y, n);
    return lanes == 16 ? sum16(x, y, n) : lanes == 8 ? sum8(x, y, n) : sum4(x, y, n);
}

/* A vector holds half as many numbers of twice the size. */
static inline double sum_double(int64_t lanes, const double *x, const double *y, int64_t n) {
    if (n < lanes / 2) return sum1_wide(x, y, n);
    return lanes == 16 ? sum8_wide(x, y, n) : lanes == 8 ? sum4_wide(x, y, n) : sum2_wide(x, y, n);
}

/* The sum of squares of a row, for `cpu.py`, which finds out the lanes of torch. */
float NAMED(locant_sum_of_squares, VARIANT)(const float *row, int64_t n, int64_t lanes) {
    return sum_float(lanes, row, row, n);
}

/* ---------------------------------------------------------------- rows of each dtype */

static inline float round_bfloat16(float value) { return as_float(to_high_half(value) & 0xffff0000u); }

#define SUM sum_double
#define SQRT sqrt
#define REAL double
#define ROTATE_WIDE rotate_row_float64
#define FOR(name) name##_float64
#define ELEMENT double
#define READ AS_IT_IS
#define WRITE AS_IT_IS
#define ROUND AS_IT_IS
#include "norm_rows.h"
#undef SUM
#undef SQRT
#undef REAL
#undef ROTATE_WIDE
#undef FOR
#undef ELEMENT

#define SUM sum_float
#define SQRT sqrtf
#define REAL float
#define ROTATE_WIDE rotate_row_float32
#define FOR(name) name##_float32
#define ELEMENT float
#include "norm_rows.h"
#undef FOR
#undef ELEMENT
#undef READ
#undef WRITE
#undef ROUND

#define ELEMENT uint16_t
#define FOR(name) name##_bfloat16
#define READ from_bfloat16
#define WRITE to_bfloat16
#define ROUND round_bfloat16
#include "norm_rows.h"
#undef FOR
#undef READ
#undef WRITE
#undef ROUND

/* Special instructions convert rows of float16, as in `numbers.h`. */
static inline const float *wide_row_float16(const uint16_t *x, float *wide, int64_t n, int to_copy) {
    (void)to_copy;
    widen(x, wide, n);
    return wide;
}

static inline void round_row(float *x, int64_t n) {
    uint16_t rounded[256];
    for (int64_t i = 0; i < n; i += 256) {
        int64_t count = n - i < 256 ? n - i : 256;
        narrow(x + i, rounded, count);
        widen(rounded, x + i, count);
    }
}

static inline void scale_float16(const Norm *norm, const float *x, const float *weight, float *h, int64_t n, float r) {
    scale_float32(norm, x, NULL, h, n, r);
    if (!weight || norm->round_before_weight) round_row(h, n);
    if (!weight) return;
    scale_float32(norm, h, weight, h, n, 1);
    round_row(h, n);
}

static inline void rotate_row_float16(const Task *task, float *x, uint16_t *y, const float *c, const float *s) {
    rotate_row_float32(task, x, x, c, s);
    narrow(x, y, task->head_dim);
}

#define FOR(name) name##_float16
#define CONVERTS_ROWS
#define READ from_float16
#define WRITE to_float16
#define ROUND(value) from_float16(to_float16(value))
#include "norm_rows.h"

#include "norm_words.h"

typedef void NormRows(const NormTask *, const void *, const char *, char *, int64_t, int64_t, const void *,
                      const void *, int64_t, int64_t, void *);
typedef void NormToken(const NormTask *, const void *, const char *, char *, int64_t, int64_t, int64_t, const void *,
                       const void *, void *);
typedef void NormBack(const BackTask *, const void *, const char *, char *, const char *, const Tensor *, int64_t,
                      int64_t, const void *, const void *, void *, void *);
static NormRows *const NORM_ROWS[4] = {norm_rows_float64, norm_rows_float32, norm_rows_float16, norm_rows_bfloat16};
static NormToken *const NORM_TOKEN[4] = {norm_token_float64, norm_token_float32, norm_token_float16,
                                         norm_token_bfloat16};
static NormBack *const NORM_BACK[4] = {norm_back_float64, norm_back_float32, norm_back_float16, norm_back_bfloat16};

/* ---------------------------------------------------------------- weights */

static inline double read_number(const char *at, int64_t dtype) {
    double wide;
    float narrow;
    uint16_t half;
    switch (dtype) {
    case FLOAT64: memcpy(&wide, at, sizeof wide); return wide;
    case FLOAT32: memcpy(&narrow, at, sizeof narrow); return narrow;
    default: memcpy(&half, at, sizeof half); return dtype == FLOAT16 ? from_float16(half) : from_bfloat16(half);
    }
}

/* Write the factors of a row in the working precision, and return their address, or NULL if there are no weights. For rows
   of words with `words` numbers of a head, the numbers at even places of each head come first. */
static const void *read_weight(const Norm *norm, const Weight *weight, int is_wide, int64_t words, char *to) {
    for (int64_t i = 0; i < weight->width; i++) {
        double value = read_number(weight->data + i * weight->step, weight->dtype);
        value = value != value ? NAN : value;
        if (is_wide)
            ((double *)to)[i] = norm->plus_one ? value + 1 : value;
        else
            ((float *)to)[i] = norm->plus_one ? (float)value + 1 : (float)value;
    }
    float row[words + 1];
    for (int64_t i = 0; words && i < weight->width; i += words) {
        memcpy(row, (float *)to + i, (size_t)words * sizeof *row);
        put_even_first(row, (float *)to + i, words);
    }
    return weight->width ? to : NULL;
}

/* Memory of one call: the factors of both weights, and `scratch` bytes for each thread, all from lines of the cache. */
typedef struct {
    void *all;
    char *scratch;
    const void *q_weight, *k_weight;
    int64_t size;
} Memory;

static inline int64_t whole_lines(int64_t bytes) { return (bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE; }

static int allocate(Memory *memory, const Norm *norm, int64_t size, int64_t threads, int is_wide, int64_t words) {
    int64_t q_bytes = whole_lines(norm->q.width * 8), k_bytes = whole_lines(norm->k.width * 8);
    memory->size = whole_lines(size);
    if (posix_memalign(&memory->all, CACHE_LINE, (size_t)(q_bytes + k_bytes + memory->size * threads + CACHE_LINE))) return 1;
    char *begin = memory->all;
    memory->q_weight = read_weight(norm, &norm->q, is_wide, words, begin);
    memory->k_weight = read_weight(norm, &norm->k, is_wide, words, begin + q_bytes);
    memory->scratch = begin + q_bytes + k_bytes;
    return 0;
}

/* ---------------------------------------------------------------- forward */

typedef struct {
    Work work; /* its task is the task of `norm` */
    NormTask norm;
    Memory memory;
} NormWork;

static void norm_tensor(const NormTask *all, const Weight *kind, const void *weight, const Tensor *x, const Place *at,
                        int64_t sequence, const Block *block, const void *cos, const void *sin, void *scratch) {
    const Task *task = &all->task;
    int64_t angle_size = task->pairs * (task->dtype == FLOAT64 ? 8 : 4);
    const char *in = at->in + sequence * x->in_step[BATCH] + block->first * x->in_step[SEQ];
    char *out = at->out + sequence * x->out_step[BATCH] + block->first * x->out_step[SEQ];
    int is_over_all_heads = kind->width && kind->width != task->head_dim;
    NormRows *norm_rows = has_words(task) ? norm_rows_words : NORM_ROWS[task->dtype];
    NormToken *norm_token = has_words(task) ? norm_token_words : NORM_TOKEN[task->dtype];
    if (!is_over_all_heads && block->tokens > 1 && x->in_step[HEAD] >= x->in_step[SEQ]) {
        for (int64_t head = 0; head < x->heads; head++)
            norm_rows(all, weight, in + head * x->in_step[HEAD], out + head * x->out_step[HEAD], x->in_step[SEQ],
                      x->out_step[SEQ], cos, sin, task->pairs, block->tokens, scratch);
        return;
    }
    for (int64_t token = 0; token < block->tokens; token++) {
        const char *from = in + token * x->in_step[SEQ];
        char *to = out + token * x->out_step[SEQ];
        const void *c = (const char *)cos + token * angle_size, *s = (const char *)sin + token * angle_size;
        if (is_over_all_heads)
            norm_token(all, weight, from, to, x->heads, x->in_step[HEAD], x->out_step[HEAD], c, s, scratch);
        else
            norm_rows(all, weight, from, to, x->in_step[HEAD], x->out_step[HEAD], c, s, 0, x->heads, scratch);
    }
}

/* Copy rows in the order in which they are read. */
static void copy_rows(const Copy *v, int64_t sequence, const Block *block) {
    const Tensor *x = &v->steps;
    int by_token = x->in_step[HEAD] < x->in_step[SEQ];
    int64_t outer = by_token ? block->tokens : x->heads, inner = by_token ? x->heads : block->tokens;
    int64_t in_outer = x->in_step[by_token ? SEQ : HEAD], in_inner = x->in_step[by_token ? HEAD : SEQ];
    int64_t out_outer = x->out_step[by_token ? SEQ : HEAD], out_inner = x->out_step[by_token ? HEAD : SEQ];
    const char *in = v->at.in + sequence * x->in_step[BATCH] + block->first * x->in_step[SEQ];
    char *out = v->at.out + sequence * x->out_step[BATCH] + block->first * x->out_step[SEQ];
    for (int64_t i = 0; i < outer; i++)
        for (int64_t j = 0; j < inner; j++) {
            const char *row = in + i * in_outer + j * in_inner;
            ask_ahead(row, in_inner, v->size);
            memcpy(out + i * out_outer + j * out_inner, row, (size_t)v->size);
        }
}

static void norm_block(const void *given, int64_t item, int64_t thread) {
    const NormWork *all = given;
    const Task *task = &all->work.task;
    const Norm *norm = &all->norm.norm;
    void *scratch = all->memory.scratch + thread * all->memory.size;
    Block block = block_of(&all->work, item);
    Angles angles;
    const void *cos, *sin;
    find_angles(task, &block, &angles, &cos, &sin);
    order_angles(task, block.tokens, &angles, &cos, &sin);
    for (int64_t i = block.sequence; i < block.sequence + block.sequences; i++) {
        if (all->norm.is_normed) {
            norm_tensor(&all->norm, &norm->q, all->memory.q_weight, &task->q, &task->q_at, i, &block, cos, sin, scratch);
            norm_tensor(&all->norm, &norm->k, all->memory.k_weight, &task->k, &task->k_at, i, &block, cos, sin, scratch);
        } else {
            rotate_tensor(task, &task->q, &task->q_at, i, block.first, block.tokens, cos, sin);
            rotate_tensor(task, &task->k, &task->k_at, i, block.first, block.tokens, cos, sin);
        }
        copy_rows(&all->norm.v, i, &block);
    }
}

/* The number of elements that a thread needs in the working precision, to keep `rows` rows of each kind. */
static int64_t scratch_size(const Norm *norm, const Task *task, int64_t rows) {
    int64_t widest = rows * task->head_dim, q_width = 2 * norm->q.width, k_width = 2 * norm->k.width;
    widest = q_width > widest ? q_width : widest;
    widest = k_width > widest ? k_width : widest;
    return (widest + 2 * task->head_dim) * (task->dtype == FLOAT64 ? 8 : 4);
}

/* `packed` is a NormTask. Return 1 if there is not enough memory. Nothing is written then. */
int NAMED(locant_norm_rotate, VARIANT)(const char *packed) {
    NormWork all;
    memcpy(&all.norm, packed, sizeof all.norm);
    all.work.task = all.norm.task;
    const Task *task = &all.norm.task;
    int64_t tokens = task->batch * task->seq, elements = tokens * (task->q.heads + task->k.heads) * task->head_dim;
    elements += tokens * all.norm.v.steps.heads * all.norm.v.size / SIZE[task->dtype];
    if (!elements) return 0;
    int64_t threads = threads_for(elements, task->threads), items = divide(&all.work, threads);
    int64_t size = scratch_size(&all.norm.norm, task, GROUP);
    int64_t words = has_words(task) ? task->head_dim : 0;
    if (allocate(&all.memory, &all.norm.norm, size, threads, task->dtype == FLOAT64, words)) return 1;
    share_out(items, threads, norm_block, &all);
    free(all.memory.all);
    return 0;
}

/* ---------------------------------------------------------------- backward */

/* A chunk of tokens, counted over the sequences, has its own sums of gradients of the weights. */
typedef struct {
    BackTask back;
    Memory memory;
    int64_t chunk;
    double *sums;
} BackWork;

static void back_tensor(const BackWork *all, const Weight *kind, const void *weight, const Tensor *x, const Place *at,
                        const char *given, const int64_t *step, const Block *block, const void *cos, const void *sin,
                        double *sums, char *scratch) {
    const Task *task = &all->back.task;
    int is_wide = task->dtype == FLOAT64, is_over_all_heads = kind->width && kind->width != task->head_dim;
    int64_t real = is_wide ? 8 : 4, angle_size = task->pairs * real;
    int64_t heads = is_over_all_heads ? x->heads : 1; /* of a row */
    char *rows = scratch + kind->width * real;
    memset(scratch, 0, (size_t)(kind->width * real));
    for (int64_t head = 0; head < x->heads; head += heads)
        for (int64_t token = 0; token < block->tokens; token++) {
            int64_t t = block->first + token;
            const char *grad = at->in + block->sequence * x->in_step[BATCH] + head * x->in_step[HEAD] + t * x->in_step[SEQ];
            char *out = at->out + block->sequence * x->out_step[BATCH] + head * x->out_step[HEAD] + t * x->out_step[SEQ];
            const char *in = given + block->sequence * step[BATCH] + head * step[HEAD] + t * step[SEQ];
            NORM_BACK[task->dtype](&all->back, weight, grad, out, in, x, step[HEAD], heads,
                                   (const char *)cos + token * angle_size, (const char *)sin + token * angle_size,
                                   scratch, rows);
        }
    for (int64_t i = 0; i < kind->width; i++) sums[i] += is_wide ? ((double *)scratch)[i] : ((float *)scratch)[i];
}

static void back_chunk(const void *given, int64_t item, int64_t thread) {
    const BackWork *all = given;
    const BackTask *back = &all->back;
    const Task *task = &back->task;
    const Norm *norm = &back->norm;
    char *scratch = all->memory.scratch + thread * all->memory.size;
    double *q_sums = all->sums + item * (norm->q.width + norm->k.width), *k_sums = q_sums + norm->q.width;
    int64_t token = item * all->chunk, end = token + all->chunk, tokens = task->batch * task->seq;
    int64_t most = SEGMENT * task->pairs > BLOCK_ANGLES ? BLOCK_ANGLES / task->pairs : SEGMENT;
    end = end < tokens ? end : tokens;
    Angles angles;
    while (token < end) {
        Block block = {token / task->seq, 1, token % task->seq, end - token};
        int64_t left = task->seq - block.first;
        block.tokens = block.tokens < left ? block.tokens : left;
        block.tokens = block.tokens < most ? block.tokens : most;
        const void *cos, *sin;
        find_angles(task, &block, &angles, &cos, &sin);
        back_tensor(all, &norm->q, all->memory.q_weight, &task->q, &task->q_at, back->q, back->q_step, &block, cos, sin,
                    q_sums, scratch);
        back_tensor(all, &norm->k, all->memory.k_weight, &task->k, &task->k_at, back->k, back->k_step, &block, cos, sin,
                    k_sums, scratch);
        token += block.tokens;
    }
}

/* `packed` is a BackTask. Return 1 if there is not enough memory. Nothing is written then. */
int NAMED(locant_norm_rotate_back, VARIANT)(const char *packed) {
    BackWork all;
    memcpy(&all.back, packed, sizeof all.back);
    const Task *task = &all.back.task;
    const Norm *norm = &all.back.norm;
    int64_t tokens = task->batch * task->seq, width = norm->q.width + norm->k.width;
    int64_t elements = tokens * (task->q.heads + task->k.heads) * task->head_dim;
    all.chunk = (tokens + CHUNKS - 1) / CHUNKS;
    all.chunk = all.chunk > SEGMENT ? all.chunk : SEGMENT;
    int64_t chunks = elements ? (tokens + all.chunk - 1) / all.chunk : 0;
    int64_t threads = threads_for(elements, task->threads);
    int64_t size = scratch_size(norm, task, 5) * 2;
    all.sums = calloc((size_t)(chunks * width + 1), sizeof *all.sums);
    if (!all.sums) return 1;
    if (allocate(&all.memory, norm, size, threads, task->dtype == FLOAT64, 0)) {
        free(all.sums);
        return 1;
    }
    share_out(chunks, threads, back_chunk, &all);
    for (int64_t i = 0; i < norm->q.width; i++) all.back.q_weight[i] = 0;
    for (int64_t i = 0; i < norm->k.width; i++) all.back.k_weight[i] = 0;
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        const double *q_sums = all.sums + chunk * width, *k_sums = q_sums + norm->q.width;
        for (int64_t i = 0; i < norm->q.width; i++) all.back.q_weight[i] += q_sums[i];
        for (int64_t i = 0; i < norm->k.width; i++) all.back.k_weight[i] += k_sums[i];
    }
    free(all.memory.all);
    free(all.sums);
    return 0;
}
