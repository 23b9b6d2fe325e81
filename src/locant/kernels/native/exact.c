/* Products of vectors whose bits depend only on the two vectors. Each vector is rounded to its own grid, so coarse that
   float64 holds every partial sum of a product without rounding. `kernels/exact_dot.py` describes the grid.

   Vectors are rounded where they are read. So the keys of a cache are read once in a step, and nothing is stored. */

#include "numbers.h"
#include "sharing.h"

#ifdef __clang__
#pragma clang fp contract(fast)
#else
#pragma GCC optimize("fp-contract=fast")
#endif

#define INLINE static inline __attribute__((always_inline))

#ifdef __AVX512F__
#define LANES 8
#elif defined __AVX__
#define LANES 4
#else
#define LANES 2
#endif

enum { CHUNK = 512, TOGETHER = 16, MOST_NUMBERS = 16384, MOST_WIDTH = 1024 };
enum { BATCH, HEAD, SEQ };

typedef double Vector __attribute__((vector_size(8 * LANES), aligned(8), may_alias));
typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* The number of doubles in a row of memory. Rows end with zeros. */
INLINE int64_t padded(int64_t dim) { return (dim + 4 * LANES - 1) / (4 * LANES) * (4 * LANES); }

/* Return 1.5 * 2^52 steps of the grid of a vector whose largest number has these bits. A sum with it is rounded to whole
   steps, and halves to even numbers. A vector that is not finite gets NaN. */
INLINE double rounder(uint64_t largest, int64_t bits) {
    if (largest >= 0x7ff0000000000000u) return __builtin_nan("");
    int64_t exponent = largest ? (int64_t)(largest >> 52) - 1022 : 0; /* as frexp. No float32 is subnormal in float64 */
    uint64_t pattern = (uint64_t)(1023 + 52 + exponent - bits) << 52 | 0x8000000000000u;
    double value;
    memcpy(&value, &pattern, sizeof value);
    return value;
}

INLINE uint64_t bits_of(double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE double float_rounder(const float *x, int64_t dim, int64_t bits) {
    int32_t largest = 0; /* positive floats are in the order of their bits, and NaN is the last */
    for (int64_t d = 0; d < dim; d++) {
        int32_t size = (int32_t)as_bits(x[d]) & 0x7fffffff;
        largest = size > largest ? size : largest;
    }
    return rounder(bits_of((double)as_float((uint32_t)largest)), bits);
}

/* Round a vector to its grid. Fill the row with zeros. */
INLINE void round_row(const char *at, int dtype, int64_t dim, int64_t bits, double *row) {
    float wide[MOST_WIDTH];
    int64_t end = padded(dim);
    if (dtype == FLOAT64) {
        const double *x = (const double *)at;
        uint64_t largest = 0;
        for (int64_t d = 0; d < dim; d++) {
            uint64_t size = bits_of(x[d]) & 0x7fffffffffffffffu;
            largest = size > largest ? size : largest;
        }
        double shift = rounder(largest, bits);
        for (int64_t d = 0; d < dim; d++) row[d] = (x[d] + shift) - shift;
    } else {
        const float *x = wide;
        if (dtype == FLOAT32) x = (const float *)at;
        else if (dtype == FLOAT16) widen((const uint16_t *)at, wide, dim);
        else
            for (int64_t d = 0; d < dim; d++) wide[d] = from_bfloat16(((const uint16_t *)at)[d]);
        double shift = float_rounder(x, dim, bits);
        for (int64_t d = 0; d < dim; d++) row[d] = ((double)x[d] + shift) - shift;
    }
    for (int64_t d = dim; d < end; d++) row[d] = 0;
}

INLINE double total(const Vector *sum) {
    Vector all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
#if LANES == 8
    return ((all[0] + all[1]) + (all[2] + all[3])) + ((all[4] + all[5]) + (all[6] + all[7]));
#elif LANES == 4
    return (all[0] + all[1]) + (all[2] + all[3]);
#else
    return all[0] + all[1];
#endif
}

INLINE double dot(const double *a, const double *b, int64_t end) {
    Vector sum[4] = {{0}, {0}, {0}, {0}};
    for (int64_t d = 0; d < end; d += 4 * LANES)
        for (int i = 0; i < 4; i++)
            sum[i] += *(const Vector *)(a + d + i * LANES) * *(const Vector *)(b + d + i * LANES);
    return total(sum);
}

/* Return the product of a rounded vector with a vector that is rounded while it is read. */
INLINE double rounded_dot(const double *a, const float *x, int64_t dim, double shift) {
    Vector sum[4] = {{0}, {0}, {0}, {0}};
    for (int64_t d = 0; d < dim; d += 4 * LANES)
        for (int i = 0; i < 4; i++) {
            Vector wide = __builtin_convertvector(*(const Floats *)(x + d + i * LANES), Vector);
            sum[i] += *(const Vector *)(a + d + i * LANES) * ((wide + shift) - shift);
        }
    return total(sum);
}

/* ---------------------------------------------------------------- a few vectors with all vectors */

/* `kernels/exact_dot.py` packs this struct. Steps are bytes along batch, heads and seq. */
typedef struct {
    int64_t threads, a_dtype, b_dtype, batch, heads, few, many, dim, bits;
    int64_t a_step[3], b_step[3];
    const char *a, *b;
    double *out; /* batch heads few many */
} Products;

INLINE void multiply(const Products *task, int64_t head, int64_t begin, int dtype, int64_t dim) {
    double few[MOST_NUMBERS], row[MOST_WIDTH + 4 * LANES];
    int64_t end = padded(dim), stop = begin + CHUNK < task->many ? begin + CHUNK : task->many;
    const char *a = task->a + head / task->heads * task->a_step[BATCH] + head % task->heads * task->a_step[HEAD];
    const char *b = task->b + head / task->heads * task->b_step[BATCH] + head % task->heads * task->b_step[HEAD];
    double *out = task->out + head * task->few * task->many;
    for (int64_t i = 0; i < task->few; i++)
        round_row(a + i * task->a_step[SEQ], (int)task->a_dtype, dim, task->bits, few + i * end);
    if (task->few == 1 && dtype == FLOAT32 && dim == end) {
        for (; begin < stop; begin += TOGETHER) {
            int64_t count = stop - begin < TOGETHER ? stop - begin : TOGETHER;
            double shifts[TOGETHER]; /* found first, because a processor waits for each but not for several */
            const char *at = b + begin * task->b_step[SEQ];
            for (int64_t j = 0; j < count; j++)
                shifts[j] = float_rounder((const float *)(at + j * task->b_step[SEQ]), dim, task->bits);
            for (int64_t j = 0; j < count; j++)
                out[begin + j] = rounded_dot(few, (const float *)(at + j * task->b_step[SEQ]), dim, shifts[j]);
        }
        return;
    }
    for (int64_t j = begin; j < stop; j++) {
        round_row(b + j * task->b_step[SEQ], dtype, dim, task->bits, row);
        for (int64_t i = 0; i < task->few; i++) out[i * task->many + j] = dot(few + i * end, row, end);
    }
}

static void products_of_chunk(const void *given, int64_t item, int64_t thread) {
    (void)thread;
    const Products *task = given;
    int64_t chunks = (task->many + CHUNK - 1) / CHUNK, head = item / chunks, begin = item % chunks * CHUNK;
    if (task->b_dtype == FLOAT32 && task->dim == 64) multiply(task, head, begin, FLOAT32, 64);
    else if (task->b_dtype == FLOAT32 && task->dim == 128) multiply(task, head, begin, FLOAT32, 128);
    else multiply(task, head, begin, (int)task->b_dtype, task->dim);
}

void NAMED(locant_exact_products, VARIANT)(const char *packed) {
    Products task;
    memcpy(&task, packed, sizeof task);
    int64_t items = task.batch * task.heads * ((task.many + CHUNK - 1) / CHUNK);
    share_out(items, threads_for(task.batch * task.heads * task.many * task.dim, task.threads), products_of_chunk, &task);
}

/* ---------------------------------------------------------------- each vector with the row of its entry */

typedef struct {
    int64_t threads, dtype, batch, heads, queries, keys, dim, bits;
    int64_t x_step[3], row_step[2], entry_step[2]; /* of heads and entries, in numbers; of batch and queries */
    const char *x;
    const double *rows; /* on their grids */
    const int64_t *entries;
    double *out; /* batch heads queries keys */
} Entries;

static void entries_of_chunk(const void *given, int64_t item, int64_t thread) {
    (void)thread;
    const Entries *task = given;
    int64_t chunks = (task->keys + CHUNK - 1) / CHUNK, head = item / chunks, begin = item % chunks * CHUNK;
    int64_t stop = begin + CHUNK < task->keys ? begin + CHUNK : task->keys, dim = task->dim;
    double vector[MOST_WIDTH + 4 * LANES];
    const char *x = task->x + head / task->heads * task->x_step[BATCH] + head % task->heads * task->x_step[HEAD];
    const int64_t *entries = task->entries + head / task->heads * task->entry_step[0];
    const double *rows = task->rows + head % task->heads * task->row_step[0];
    for (int64_t j = begin; j < stop; j++) {
        round_row(x + j * task->x_step[SEQ], (int)task->dtype, dim, task->bits, vector);
        for (int64_t i = 0; i < task->queries; i++) {
            const double *row = rows + entries[i * task->entry_step[1] + j] * task->row_step[1];
            task->out[(head * task->queries + i) * task->keys + j] = dot(row, vector, padded(dim));
        }
    }
}

void NAMED(locant_exact_entries, VARIANT)(const char *packed) {
    Entries task;
    memcpy(&task, packed, sizeof task);
    int64_t items = task.batch * task.heads * ((task.keys + CHUNK - 1) / CHUNK);
    share_out(items, threads_for(task.batch * task.heads * task.keys * task.dim, task.threads), entries_of_chunk, &task);
}

/* ---------------------------------------------------------------- vectors on their grids */

typedef struct {
    int64_t threads, dtype, batch, heads, seq, dim, width, bits;
    int64_t x_step[3];
    const char *x;
    double *out; /* batch heads seq width, and width is at least dim */
} Rounding;

static void round_chunk(const void *given, int64_t item, int64_t thread) {
    (void)thread;
    const Rounding *task = given;
    int64_t chunks = (task->seq + CHUNK - 1) / CHUNK, head = item / chunks, begin = item % chunks * CHUNK;
    int64_t stop = begin + CHUNK < task->seq ? begin + CHUNK : task->seq;
    double row[MOST_WIDTH + 4 * LANES];
    const char *x = task->x + head / task->heads * task->x_step[BATCH] + head % task->heads * task->x_step[HEAD];
    for (int64_t j = begin; j < stop; j++) {
        round_row(x + j * task->x_step[SEQ], (int)task->dtype, task->dim, task->bits, row);
        double *out = task->out + (head * task->seq + j) * task->width;
        memcpy(out, row, (size_t)task->dim * sizeof *row);
        for (int64_t d = task->dim; d < task->width; d++) out[d] = 0;
    }
}

void NAMED(locant_round_to_grid, VARIANT)(const char *packed) {
    Rounding task;
    memcpy(&task, packed, sizeof task);
    int64_t items = task.batch * task.heads * ((task.seq + CHUNK - 1) / CHUNK);
    share_out(items, threads_for(task.batch * task.heads * task.seq * task.dim, task.threads), round_chunk, &task);
}
