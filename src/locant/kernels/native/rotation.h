/* What kernels that rotate have in common: the task, the angles of a block of tokens, and the rotation of some rows. */

#ifndef LOCANT_ROTATION_H
#define LOCANT_ROTATION_H

#include "numbers.h"
#include "sharing.h"

enum { BLOCK_TOKENS = 64, BLOCK_ANGLES = 8192, BYTES_AHEAD = 4096 };
enum { BATCH, HEAD, SEQ };

/* q or k: the number of heads, and the steps in bytes along batch, heads and seq, for reading and for writing. */
typedef struct {
    int64_t heads, in_step[3], out_step[3];
} Tensor;

typedef struct {
    char *in, *out;
} Place;

/* `rotary/cpu.py` packs this struct. `rows` is 1, for shared positions, or `batch`. If pairs use different axes of the
   positions, `axis_of_pair` is the axis of each pair. If `cos` and `sin` are given (rows x seq x pairs, contiguous, in the
   working precision), `table` is not read. Addresses of q and k come last. */
typedef struct {
    int64_t threads, dtype, interleaved, inverse, batch, seq, head_dim, pairs;
    const int64_t *positions;
    int64_t rows, position_step[3];
    const int64_t *axis_of_pair;
    const double *table;
    int64_t levels;
    double attention_factor;
    const void *cos, *sin;
    Tensor q, k;
    Place q_at, k_at;
} Task;

/* ---------------------------------------------------------------- angles */

/* Aligned, so that no vector is on two lines of the cache. */
typedef struct __attribute__((aligned(CACHE_LINE))) {
    union { double wide[BLOCK_ANGLES]; float narrow[BLOCK_ANGLES]; } cos, sin;
} Angles;

static inline void make_angles(const Task *task, int64_t row, int64_t first, int64_t tokens, int wide, Angles *angles) {
    int64_t pairs = task->pairs, level_size = 256 * pairs * 2;
    double factor = task->attention_factor, sign = task->inverse ? -1.0 : 1.0;
    for (int64_t token = 0; token < tokens; token++) {
        const int64_t *at = task->positions + row * task->position_step[0] + (first + token) * task->position_step[1];
        double *cos = angles->cos.wide + token * pairs, *sin = angles->sin.wide + token * pairs;
        float *cos32 = angles->cos.narrow + token * pairs, *sin32 = angles->sin.narrow + token * pairs;
        double product_cos[256], product_sin[256];
        for (int64_t begin = 0; begin < pairs; begin += 256) {
            int64_t count = pairs - begin < 256 ? pairs - begin : 256;
            for (int64_t level = 0; level < task->levels; level++) {
                const double *rows = task->table + level * level_size + begin * 2;
                if (task->axis_of_pair) {
                    for (int64_t i = 0; i < count; i++) {
                        int64_t position = at[task->axis_of_pair[begin + i] * task->position_step[2]];
                        const double *step = rows + (position >> 8 * level & 255) * pairs * 2 + 2 * i;
                        double c = product_cos[i], s = product_sin[i];
                        product_cos[i] = level ? c * step[0] - s * step[1] : step[0];
                        product_sin[i] = level ? s * step[0] + c * step[1] : step[1];
                    }
                    continue;
                }
                const double *step = rows + (*at >> 8 * level & 255) * pairs * 2;
                if (!level) {
#pragma omp simd
                    for (int64_t i = 0; i < count; i++) {
                        product_cos[i] = step[2 * i];
                        product_sin[i] = step[2 * i + 1];
                    }
                    continue;
                }
#pragma omp simd
                for (int64_t i = 0; i < count; i++) {
                    double c = product_cos[i], s = product_sin[i];
                    product_cos[i] = c * step[2 * i] - s * step[2 * i + 1];
                    product_sin[i] = s * step[2 * i] + c * step[2 * i + 1];
                }
            }
            /* A factor of 1 and a sign of 1 do not change any bit. */
#pragma omp simd
            for (int64_t i = 0; i < count; i++) {
                double c = product_cos[i] * factor, s = product_sin[i] * factor * sign;
                if (wide) {
                    cos[begin + i] = c;
                    sin[begin + i] = s;
                } else {
                    cos32[begin + i] = (float)c;
                    sin32[begin + i] = (float)s;
                }
            }
        }
    }
}

/* Return whether rows are words of which each has numbers of two pairs. */
static inline int has_half_words(const Task *task) {
    return task->dtype == BFLOAT16 && !task->interleaved && task->pairs % 2 == 0 && task->head_dim % 2 == 0;
}

/* Write a row with the numbers at even places first. */
static inline void put_even_first(const float *row, float *to, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n / 2; i++) {
        to[i] = row[2 * i];
        to[n / 2 + i] = row[2 * i + 1];
    }
}

/* Order the angles of each token of a block for rows of words, if the rows are words. */
static inline void order_angles(const Task *task, int64_t tokens, Angles *angles, const void **cos, const void **sin) {
    if (!has_half_words(task)) return;
    int64_t pairs = task->pairs, size = pairs * (int64_t)sizeof(float);
    float row[pairs];
    for (int64_t token = 0; token < tokens; token++) {
        memcpy(row, (const char *)*cos + token * size, (size_t)size);
        put_even_first(row, angles->cos.narrow + token * pairs, pairs);
        memcpy(row, (const char *)*sin + token * size, (size_t)size);
        put_even_first(row, angles->sin.narrow + token * pairs, pairs);
    }
    *cos = &angles->cos;
    *sin = &angles->sin;
}

/* ---------------------------------------------------------------- some rows of one head, or of one token */

/* Rotate `count` rows of `2 * pairs` elements. The angles of the next row are `angle_step` numbers later. */
typedef void Rotate(const char *in, char *out, int64_t in_step, int64_t out_step, const void *cos, const void *sin,
                    int64_t angle_step, int64_t count, int64_t pairs);

/* A block's part of a head is too short for the hardware prefetcher. Without this prefetch, bfloat16 takes 2.2 times as
   long and float32 1.6 times. A prefetch of an invalid address does nothing. */
static inline void ask_ahead(const char *row, int64_t step, int64_t size) {
    const char *at = row + (BYTES_AHEAD + size - 1) / size * step;
    for (int64_t i = 0; i < size; i += 64) __builtin_prefetch(at + i, 1);
}

#define ROWS(NAME, ELEMENT, REAL, SIZE_OF_PAIR, ROW)                                                                 \
    static void NAME(const char *in, char *out, int64_t in_step, int64_t out_step, const void *cos, const void *sin, \
                     int64_t angle_step, int64_t count, int64_t pairs) {                                             \
        for (int64_t row = 0; row < count; row++) {                                                                  \
            const ELEMENT *x = (const ELEMENT *)(in + row * in_step);                                                \
            ELEMENT *y = (ELEMENT *)(out + row * out_step);                                                          \
            const REAL *c = (const REAL *)cos + row * angle_step, *s = (const REAL *)sin + row * angle_step;         \
            ask_ahead(in + row * in_step, in_step, pairs * SIZE_OF_PAIR);                                            \
            ROW                                                                                                      \
        }                                                                                                            \
    }
#define EACH_PAIR _Pragma("omp simd") for (int64_t i = 0; i < pairs; i++)

#define HALF(REAL, READ, WRITE)                         \
    EACH_PAIR {                                                   \
        REAL a = READ(x[i]), b = READ(x[pairs + i]);    \
        y[i] = WRITE(a * c[i] - b * s[i]);              \
        y[pairs + i] = WRITE(b * c[i] + a * s[i]);      \
    }
#define NEIGHBOURS(REAL)                        \
    EACH_PAIR {                                           \
        REAL a = x[2 * i], b = x[2 * i + 1];    \
        y[2 * i] = a * c[i] - b * s[i];         \
        y[2 * i + 1] = b * c[i] + a * s[i];     \
    }
/* Rows of bfloat16 as words of two numbers. In the layout "half", a pair is in the same half of two words, and the angles
   of first numbers come before the angles of second numbers, as `order_angles` leaves them. */
#define HALF_IN_WORDS                                                               \
    int64_t words = pairs / 2;                                                      \
    const float *c2 = c + words, *s2 = s + words;                                   \
    _Pragma("omp simd") for (int64_t i = 0; i < words; i++) {                       \
        float a = first_of(x[i]), b = first_of(x[words + i]);                       \
        float a2 = second_of(x[i]), b2 = second_of(x[words + i]);                   \
        y[i] = to_word(a * c[i] - b * s[i], a2 * c2[i] - b2 * s2[i]);               \
        y[words + i] = to_word(b * c[i] + a * s[i], b2 * c2[i] + a2 * s2[i]);       \
    }
#define NEIGHBOURS_IN_ONE_WORD                                                      \
    EACH_PAIR {                                                                     \
        float a = first_of(x[i]), b = second_of(x[i]);                              \
        y[i] = to_word(a * c[i] - b * s[i], b * c[i] + a * s[i]);                   \
    }
#define AS_IT_IS(value) (value)

ROWS(half_float64, double, double, 16, HALF(double, AS_IT_IS, AS_IT_IS))
ROWS(half_float32, float, float, 8, HALF(float, AS_IT_IS, AS_IT_IS))
ROWS(half_bfloat16, uint16_t, float, 4, HALF(float, from_bfloat16, to_bfloat16))
ROWS(half_words, Word, float, 4, HALF_IN_WORDS)
ROWS(interleaved_float64, double, double, 16, NEIGHBOURS(double))
ROWS(interleaved_float32, float, float, 8, NEIGHBOURS(float))
ROWS(interleaved_bfloat16, Word, float, 4, NEIGHBOURS_IN_ONE_WORD)

#define WIDENED(ROTATE_ROW)                                                            \
    float wide[2 * BLOCK_ANGLES];                                                      \
    widen(x, wide, 2 * pairs);                                                         \
    ROTATE_ROW((const char *)wide, (char *)wide, 0, 0, c, s, 0, 1, pairs);             \
    narrow(wide, y, 2 * pairs);

ROWS(half_float16, uint16_t, float, 4, WIDENED(half_float32))
ROWS(interleaved_float16, uint16_t, float, 4, WIDENED(interleaved_float32))

static Rotate *const ROTATE[2][4] = {
    {half_float64, half_float32, half_float16, half_bfloat16},
    {interleaved_float64, interleaved_float32, interleaved_float16, interleaved_bfloat16},
};

static inline void rotate_tensor(const Task *task, const Tensor *x, const Place *at, int64_t sequence, int64_t first,
                          int64_t tokens, const void *cos, const void *sin) {
    Rotate *rotate = has_half_words(task) ? half_words : ROTATE[task->interleaved][task->dtype];
    int64_t pairs = task->pairs, rotated = 2 * pairs * SIZE[task->dtype];
    int64_t rest = task->head_dim * SIZE[task->dtype] - rotated;
    const char *in = at->in + sequence * x->in_step[BATCH] + first * x->in_step[SEQ];
    char *out = at->out + sequence * x->out_step[BATCH] + first * x->out_step[SEQ];
    if (x->in_step[HEAD] < x->in_step[SEQ]) { /* the heads of a token are contiguous */
        int64_t angle_size = pairs * (task->dtype == FLOAT64 ? 8 : 4);
        for (int64_t token = 0; token < tokens; token++)
            rotate(in + token * x->in_step[SEQ], out + token * x->out_step[SEQ], x->in_step[HEAD], x->out_step[HEAD],
                   (const char *)cos + token * angle_size, (const char *)sin + token * angle_size, 0, x->heads, pairs);
    } else {
        for (int64_t head = 0; head < x->heads; head++)
            rotate(in + head * x->in_step[HEAD], out + head * x->out_step[HEAD], x->in_step[SEQ], x->out_step[SEQ],
                   cos, sin, pairs, tokens, pairs);
    }
    if (!rest || at->in == at->out) return;
    for (int64_t head = 0; head < x->heads; head++)
        for (int64_t token = 0; token < tokens; token++)
            memcpy(out + head * x->out_step[HEAD] + token * x->out_step[SEQ] + rotated,
                   in + head * x->in_step[HEAD] + token * x->in_step[SEQ] + rotated, (size_t)rest);
}

/* ---------------------------------------------------------------- blocks of tokens */

/* Blocks of `block` tokens. With `together`, a block includes all sequences, and its angles are computed once. */
typedef struct {
    Task task;
    int64_t block, blocks, together;
} Work;

typedef struct {
    int64_t sequence, sequences, first, tokens;
} Block;

/* Divide the tokens into blocks, enough for all threads, unless there is one thread. Return their number. */
static inline int64_t divide(Work *work, int64_t threads) {
    const Task *task = &work->task;
    int64_t block = task->batch * task->seq / (4 * threads);
    block = threads == 1 || block > BLOCK_TOKENS ? BLOCK_TOKENS : block < 1 ? 1 : block;
    work->block = block * task->pairs > BLOCK_ANGLES ? BLOCK_ANGLES / task->pairs : block;
    work->blocks = (task->seq + work->block - 1) / work->block;
    work->together = task->rows == 1 && (threads == 1 || work->blocks >= 4 * threads);
    return work->together ? work->blocks : work->blocks * task->batch;
}

static inline Block block_of(const Work *work, int64_t item) {
    int64_t first = item % work->blocks * work->block, left = work->task.seq - first;
    int64_t tokens = left < work->block ? left : work->block;
    return work->together ? (Block){0, work->task.batch, first, tokens} : (Block){item / work->blocks, 1, first, tokens};
}

/* Find the given cosines and sines of a block, or make them in `angles`. */
static inline void find_angles(const Task *task, const Block *block, Angles *angles, const void **cos,
                               const void **sin) {
    int64_t row = task->rows == 1 ? 0 : block->sequence;
    int wide = task->dtype == FLOAT64;
    *cos = &angles->cos;
    *sin = &angles->sin;
    if (task->cos) {
        int64_t place = (row * task->seq + block->first) * task->pairs * (wide ? 8 : 4);
        *cos = (const char *)task->cos + place;
        *sin = (const char *)task->sin + place;
    } else if (wide) {
        make_angles(task, row, block->first, block->tokens, 1, angles);
    } else {
        make_angles(task, row, block->first, block->tokens, 0, angles);
    }
}

#endif
