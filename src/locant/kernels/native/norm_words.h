/* The norm and rotation of rows of bfloat16 as words of two numbers, with the bits of `norm_rows.h`. Rows are not stored in
   float32 between their steps. Weights and, in the layout "half", angles have the numbers at even places first. */

#ifndef LOCANT_NORM_WORDS_H
#define LOCANT_NORM_WORDS_H

/* Return whether rows are words that begin with a number at an even place, and pairs are not apart from their words. */
static inline int has_words(const Task *task) {
    int is_neighbours = task->interleaved && task->dtype == BFLOAT16 && task->head_dim % 2 == 0;
    return is_neighbours || has_half_words(task);
}

/* The number of float32 numbers in a register. The compiler would keep longer vectors in memory. */
#ifdef __AVX512F__
enum { REGISTER = 16 };
#elif defined __AVX__
enum { REGISTER = 8 };
#else
enum { REGISTER = 4 };
#endif

/* The sum of squares for rows of whole steps of torch's sum, below its first cascade. PARTS vectors of WIDTH words hold one
   step: the numbers at even places of each stream, and those at odd places. */
#define SUM_OF_SQUARED_WORDS(LANES)                                                                                  \
    enum { WIDTH##LANES = REGISTER < 2 * LANES ? REGISTER : 2 * LANES, PARTS##LANES = 2 * LANES / WIDTH##LANES };    \
    typedef uint32_t words##LANES __attribute__((vector_size(4 * WIDTH##LANES), aligned(2), may_alias));             \
    typedef float floats##LANES __attribute__((vector_size(4 * WIDTH##LANES)));                                      \
    typedef float stream##LANES __attribute__((vector_size(2 * LANES)));                                             \
    typedef union { floats##LANES part[PARTS##LANES]; stream##LANES stream[STREAMS]; } Step##LANES;                  \
    static inline float sum_words##LANES(const Word *row, int64_t n) {                                               \
        floats##LANES even[PARTS##LANES] = {{0}}, odd[PARTS##LANES] = {{0}};                                         \
        for (int64_t i = 0; i < n / 2; i += 2 * LANES)                                                               \
            for (int part = 0; part < PARTS##LANES; part++) {                                                        \
                words##LANES words = *(const words##LANES *)(row + i + part * WIDTH##LANES);                         \
                floats##LANES first = (floats##LANES)(words << 16), second = (floats##LANES)(words & 0xffff0000u);   \
                even[part] += first * first;                                                                         \
                odd[part] += second * second;                                                                        \
            }                                                                                                        \
        Step##LANES a, b;                                                                                            \
        for (int part = 0; part < PARTS##LANES; part++) {                                                            \
            a.part[part] = even[part];                                                                               \
            b.part[part] = odd[part];                                                                                \
        }                                                                                                            \
        a.stream[0] = a.stream[0] + a.stream[1] + a.stream[2] + a.stream[3];                                         \
        b.stream[0] = b.stream[0] + b.stream[1] + b.stream[2] + b.stream[3];                                         \
        float total = 0;                                                                                             \
        for (int i = 0; i < LANES / 2; i++) {                                                                        \
            total += a.stream[0][i];                                                                                 \
            total += b.stream[0][i];                                                                                 \
        }                                                                                                            \
        return total;                                                                                                \
    }

SUM_OF_SQUARED_WORDS(16)
SUM_OF_SQUARED_WORDS(8)
SUM_OF_SQUARED_WORDS(4)

static inline float inverse_rms_of_words(const Norm *norm, const Word *row, int64_t n, float *wide) {
    int64_t step = STREAMS * norm->lanes;
    if (n % step || n / step >= CASCADE) {
        const float *x = wide_row_bfloat16((const uint16_t *)row, wide, n, 1);
        return inverse_rms_bfloat16(norm, x, n);
    }
    float sum = norm->lanes == 16 ? sum_words16(row, n) : norm->lanes == 8 ? sum_words8(row, n) : sum_words4(row, n);
    return 1 / sqrtf(sum / (float)n + (float)norm->eps);
}

/* How a number is scaled: without a weight, by a weight after a rounding, or by a weight before the only rounding. */
enum { NO_WEIGHT, ROUNDED_TWICE, ROUNDED_ONCE };

#define SCALED(value, factor)                                                                          \
    (scaling == NO_WEIGHT       ? round_bfloat16((value)*r)                                            \
     : scaling == ROUNDED_TWICE ? round_bfloat16(round_bfloat16((value)*r) * (factor))                 \
                                : round_bfloat16((value)*r * (factor)))
#define INLINED static inline __attribute__((always_inline))
enum { WORDS_AT_ONCE = 16 };

/* The weights of numbers at even and at odd places, the inverse norm of the row, and its angles. */
typedef struct {
    const float *weight, *weight2;
    float r;
    const float *c, *s;
} Factors;

/* Scale and rotate the words of pairs of neighbours from `begin` to `end`. */
INLINED void rotate_neighbours(int scaling, int64_t begin, int64_t end, const Word *x, Word *y, Factors by) {
    float r = by.r;
#pragma omp simd
    for (int64_t i = begin; i < end; i++) {
        float a = SCALED(first_of(x[i]), by.weight[i]), b = SCALED(second_of(x[i]), by.weight2[i]);
        y[i] = to_word(a * by.c[i] - b * by.s[i], b * by.c[i] + a * by.s[i]);
    }
}

/* Scale and rotate words from `begin` to `end`, and those which are `apart` words later. */
INLINED void rotate_halves(int scaling, int64_t begin, int64_t end, int64_t apart, const Word *x, Word *y, Factors by) {
    const float *c = by.c, *s = by.s, *c2 = c + apart, *s2 = s + apart;
    float r = by.r;
#pragma omp simd
    for (int64_t i = begin; i < end; i++) {
        int64_t j = apart + i;
        float a = SCALED(first_of(x[i]), by.weight[i]), a2 = SCALED(second_of(x[i]), by.weight2[i]);
        float b = SCALED(first_of(x[j]), by.weight[j]), b2 = SCALED(second_of(x[j]), by.weight2[j]);
        y[i] = to_word(a * c[i] - b * s[i], a2 * c2[i] - b2 * s2[i]);
        y[j] = to_word(b * c[i] + a * s[i], b2 * c2[i] + a2 * s2[i]);
    }
}

/* Scale and rotate a row. The rows may be the same memory. It is inlined with a constant scaling, so that loops have no
   branches, and most words are in loops of a constant length, which need no code for a remainder. */
INLINED void scale_and_rotate(int scaling, const Task *task, const Word *x, Word *y, Factors by) {
    int64_t pairs = task->pairs, half = pairs / 2, i = 0;
    float r = by.r;
    if (task->interleaved) {
        for (; i + WORDS_AT_ONCE <= pairs; i += WORDS_AT_ONCE) rotate_neighbours(scaling, i, i + WORDS_AT_ONCE, x, y, by);
        if (i < pairs) rotate_neighbours(scaling, i, pairs, x, y, by);
    } else {
        for (; i + WORDS_AT_ONCE <= half; i += WORDS_AT_ONCE) rotate_halves(scaling, i, i + WORDS_AT_ONCE, half, x, y, by);
        if (i < half) rotate_halves(scaling, i, half, half, x, y, by);
    }
    if (2 * pairs == task->head_dim) return;
#pragma omp simd
    for (int64_t j = pairs; j < task->head_dim / 2; j++)
        y[j] = to_word(SCALED(first_of(x[j]), by.weight[j]), SCALED(second_of(x[j]), by.weight2[j]));
}
#undef SCALED

/* Rows with their angles, inverse norms and steps in bytes. `weight_step` is the number of weights from row to row. */
typedef struct {
    const char *in;
    char *out;
    int64_t in_step, out_step, count;
    const float *weight, *inverse, *cos, *sin;
    int64_t weight_step, inverse_step, angle_step;
} Rows;

INLINED void scale_and_rotate_each(int scaling, const Task *task, const Rows *rows) {
    int64_t width = task->head_dim / 2;
    for (int64_t i = 0; i < rows->count; i++) {
        const char *in = rows->in + i * rows->in_step;
        const float *weight = scaling == NO_WEIGHT ? NULL : rows->weight + i * rows->weight_step;
        Factors by = {weight, scaling == NO_WEIGHT ? NULL : weight + width, rows->inverse[i * rows->inverse_step],
                      rows->cos + i * rows->angle_step, rows->sin + i * rows->angle_step};
        ask_ahead(in, rows->in_step, 4 * width);
        scale_and_rotate(scaling, task, (const Word *)in, (Word *)(rows->out + i * rows->out_step), by);
    }
}

static void scale_and_rotate_rows(const NormTask *all, const Rows *rows) {
    if (!rows->weight)
        scale_and_rotate_each(NO_WEIGHT, &all->task, rows);
    else if (all->norm.round_before_weight)
        scale_and_rotate_each(ROUNDED_TWICE, &all->task, rows);
    else
        scale_and_rotate_each(ROUNDED_ONCE, &all->task, rows);
}

/* As `norm_rows` in `norm_rows.h`. */
static void norm_rows_words(const NormTask *all, const void *weight, const char *in, char *out, int64_t in_step,
                            int64_t out_step, const void *cos, const void *sin, int64_t angle_step, int64_t count,
                            void *scratch) {
    const float *c = cos, *s = sin;
    float inverse[GROUP];
    for (int64_t first = 0; first < count; first += GROUP) {
        int64_t size = count - first < GROUP ? count - first : GROUP;
        Rows rows = {in + first * in_step, out + first * out_step, in_step, out_step, size, weight, inverse,
                     c + first * angle_step, s + first * angle_step, 0, 1, angle_step};
        for (int64_t i = 0; i < size; i++)
            inverse[i] = inverse_rms_of_words(&all->norm, (const Word *)(rows.in + i * in_step), all->task.head_dim, scratch);
        scale_and_rotate_rows(all, &rows);
    }
}

/* As `norm_token` in `norm_rows.h`. */
static void norm_token_words(const NormTask *all, const void *weight, const char *in, char *out, int64_t heads,
                             int64_t in_step, int64_t out_step, const void *cos, const void *sin, void *scratch) {
    int64_t n = all->task.head_dim;
    float *wide = scratch;
    for (int64_t head = 0; head < heads; head++)
        wide_row_bfloat16((const uint16_t *)(in + head * in_step), wide + head * n, n, 1);
    float inverse = inverse_rms_bfloat16(&all->norm, wide, heads * n);
    Rows rows = {in, out, in_step, out_step, heads, weight, &inverse, cos, sin, n, 0, 0};
    scale_and_rotate_rows(all, &rows);
}

#endif
