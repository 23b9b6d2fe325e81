/* Queries and keys rotated by their positions in one pass over memory, q and k in one parallel region.

   What `locant/kernels/rotary/reference.py` says, bit for bit: angles are products of complex numbers in float64, one
   for each byte of a position, rounded once to float32 (float64 for float64); then a cos - b sin and b cos + a sin,
   every product rounded. So this must be compiled with -ffp-contract=off, and without -ffast-math.

   Threads take blocks of tokens. The cosines of a block are made in the thread's own stack and serve all its heads and
   sequences, so that nothing of the size of the whole sequence is stored. A thread has a share of blocks that lie
   together, and then takes what is left of others': on a busy machine, one that is not scheduled holds nobody up.

   It is compiled once for each instruction set, with VARIANT in the name of its function, and linked without an OpenMP
   library: its symbols are those of the one that torch has loaded. */

#include <stdint.h>
#include <string.h>

#ifdef __F16C__
#include <immintrin.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "two halves of 16 bits are taken from 32 in the order of a little-endian machine"
#endif

int omp_get_thread_num(void);

#define JOIN(a, b) a##_##b
#define NAMED(a, b) JOIN(a, b)

enum { BLOCK_TOKENS = 64, BLOCK_ANGLES = 8192, ELEMENTS_PER_THREAD = 32768, BYTES_AHEAD = 4096 };
enum { FLOAT64, FLOAT32, FLOAT16, BFLOAT16 };
enum { BATCH, HEAD, SEQ };

/* One of q and k: its heads, and its steps in bytes along batch, heads and seq, where it is read and written. */
typedef struct {
    int64_t heads, in_step[3], out_step[3];
} Tensor;

typedef struct {
    char *in, *out;
} Place;

/* As `rotary/native.py` packs it. `rows` is 1 or `batch`: positions may be shared. Where each pair takes the position of
   its own axis, `axis_of_pair` says which. Where `cos` and `sin` are given (rows x seq x pairs, contiguous, in the
   working precision), `table` is not read. Addresses of q and k come last: the rest is packed once for all layers. */
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

/* ---------------------------------------------------------------- numbers of 16 bits */

static inline float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t as_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float from_bfloat16(uint32_t half) { return as_float(half << 16); }

static inline uint32_t to_bfloat16(float value) {
    uint32_t bits = as_bits(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
    return value != value ? 0x7fc0u : rounded;
}

/* Both ways of float16 are those of torch (c10/util/Half.h): float arithmetic instead of branches, so that they can be
   vectorised. Numbers below 2^-14, where float16 has fewer bits, are rounded by adding a power of two. */
static inline float from_float16(uint32_t half) {
    uint32_t high = half << 16, twice = high + high;
    float normal = as_float((twice >> 4) + (0xe0u << 23)) * 0x1.0p-112f;
    float small = as_float((twice >> 17) | (126u << 23)) - 0.5f;
    return as_float((high & 0x80000000u) | (twice < (1u << 27) ? as_bits(small) : as_bits(normal)));
}

static inline uint32_t to_float16(float value) {
    uint32_t bits = as_bits(value), twice = bits + bits, exponent = twice & 0xff000000u;
    float size = as_float(bits & 0x7fffffffu) * 0x1.0p+112f * 0x1.0p-110f; /* too large becomes infinite */
    exponent = exponent < 0x71000000u ? 0x71000000u : exponent;
    uint32_t sum = as_bits(as_float((exponent >> 1) + 0x07800000u) + size);
    uint32_t rounded = ((sum >> 13) & 0x7c00u) + (sum & 0x0fffu);
    return ((bits >> 16) & 0x8000u) | (twice > 0xff000000u ? 0x7e00u : rounded);
}

/* ---------------------------------------------------------------- some rows of one head, or of one token */

/* `count` rows of `2 * pairs` elements; the angles of the next row are `angle_step` numbers on. */
typedef void Rotate(const char *in, char *out, int64_t in_step, int64_t out_step, const void *cos, const void *sin,
                    int64_t angle_step, int64_t count, int64_t pairs);

/* What a block has of a head is too short for the machine to foresee what is read next: without asking for it, bfloat16
   takes 2.2 times as long, float32 1.6. Asking for memory that is not there does nothing. */
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
#define NEIGHBOURS_IN_ONE_WORD(READ, WRITE)                                       \
    EACH_PAIR {                                                                             \
        float a = READ(x[i] & 0xffffu), b = READ(x[i] >> 16);                     \
        y[i] = WRITE(a * c[i] - b * s[i]) | WRITE(b * c[i] + a * s[i]) << 16;     \
    }
#define AS_IT_IS(value) (value)

typedef uint32_t __attribute__((aligned(2), may_alias)) Word; /* two numbers of 16 bits, at any address of one */

ROWS(half_float64, double, double, 16, HALF(double, AS_IT_IS, AS_IT_IS))
ROWS(half_float32, float, float, 8, HALF(float, AS_IT_IS, AS_IT_IS))
ROWS(half_bfloat16, uint16_t, float, 4, HALF(float, from_bfloat16, to_bfloat16))
ROWS(interleaved_float64, double, double, 16, NEIGHBOURS(double))
ROWS(interleaved_float32, float, float, 8, NEIGHBOURS(float))
ROWS(interleaved_bfloat16, Word, float, 4, NEIGHBOURS_IN_ONE_WORD(from_bfloat16, to_bfloat16))

/* A row of float16 is widened first, and narrowed last, by the instructions for that, which gcc 12 does not find itself. */
static inline void widen(const uint16_t *x, float *y, int64_t n) {
    int64_t i = 0;
#ifdef __AVX512F__
    for (; i + 16 <= n; i += 16) _mm512_storeu_ps(y + i, _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(x + i))));
#elif defined __F16C__
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(y + i, _mm256_cvtph_ps(_mm_loadu_si128((const void *)(x + i))));
#endif
    for (; i < n; i++) y[i] = from_float16(x[i]);
}

static inline void narrow(const float *x, uint16_t *y, int64_t n) {
    int64_t i = 0;
#ifdef __AVX512F__
    for (; i + 16 <= n; i += 16) _mm256_storeu_si256((void *)(y + i), _mm512_cvtps_ph(_mm512_loadu_ps(x + i), 0));
#elif defined __F16C__
    for (; i + 8 <= n; i += 8) _mm_storeu_si128((void *)(y + i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), 0));
#endif
    for (; i < n; i++) y[i] = (uint16_t)to_float16(x[i]);
}

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
static const int64_t SIZE[4] = {8, 4, 2, 2};

/* ---------------------------------------------------------------- angles */

typedef struct {
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
            /* A factor of 1 and a sign of 1 change no bit. */
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

/* ---------------------------------------------------------------- blocks of tokens */

static void rotate_tensor(const Task *task, const Tensor *x, const Place *at, int64_t sequence, int64_t first,
                          int64_t tokens, const void *cos, const void *sin) {
    Rotate *rotate = ROTATE[task->interleaved][task->dtype];
    int64_t pairs = task->pairs, rotated = 2 * pairs * SIZE[task->dtype];
    int64_t rest = task->head_dim * SIZE[task->dtype] - rotated;
    const char *in = at->in + sequence * x->in_step[BATCH] + first * x->in_step[SEQ];
    char *out = at->out + sequence * x->out_step[BATCH] + first * x->out_step[SEQ];
    if (x->in_step[HEAD] < x->in_step[SEQ]) { /* the heads of a token lie together */
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

static void rotate_block(const Task *task, int64_t sequence, int64_t sequences, int64_t first, int64_t tokens) {
    Angles angles;
    int64_t row = task->rows == 1 ? 0 : sequence;
    int wide = task->dtype == FLOAT64;
    const void *cos = &angles.cos, *sin = &angles.sin;
    if (task->cos) {
        int64_t place = (row * task->seq + first) * task->pairs * (wide ? 8 : 4);
        cos = (const char *)task->cos + place;
        sin = (const char *)task->sin + place;
    } else if (wide) {
        make_angles(task, row, first, tokens, 1, &angles);
    } else {
        make_angles(task, row, first, tokens, 0, &angles);
    }
    for (int64_t i = sequence; i < sequence + sequences; i++) {
        rotate_tensor(task, &task->q, &task->q_at, i, first, tokens, cos, sin);
        rotate_tensor(task, &task->k, &task->k_at, i, first, tokens, cos, sin);
    }
}

/* The one function that is called from Python; `packed` is a Task. */
void NAMED(locant_rotate, VARIANT)(const char *packed) {
    Task task;
    memcpy(&task, packed, sizeof task);
    int64_t tokens = task.batch * task.seq, seq = task.seq;
    int64_t elements = tokens * (task.q.heads + task.k.heads) * task.head_dim;
    if (!elements) return;
    int64_t threads = 1 + elements / ELEMENTS_PER_THREAD;
    threads = threads < task.threads ? threads : task.threads;
    int64_t block = tokens / (4 * threads); /* enough blocks for all threads, unless one does it all */
    block = threads == 1 || block > BLOCK_TOKENS ? BLOCK_TOKENS : block < 1 ? 1 : block;
    block = block * task.pairs > BLOCK_ANGLES ? BLOCK_ANGLES / task.pairs : block;
    int64_t blocks = (seq + block - 1) / block;
    int together = task.rows == 1 && blocks >= 4 * threads; /* angles made once for all sequences */
    int64_t sequences = together ? task.batch : 1, all = together ? blocks : blocks * task.batch;
    int64_t taken[threads]; /* of each thread's share */
    memset(taken, 0, sizeof taken);
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    for (int64_t me = omp_get_thread_num(), turn = 0; turn < threads; turn++) {
        int64_t whose = (me + turn) % threads, begin = all * whose / threads, end = all * (whose + 1) / threads;
        for (int64_t i; (i = begin + __atomic_fetch_add(&taken[whose], 1, __ATOMIC_RELAXED)) < end;) {
            int64_t first = i % blocks * block, count = seq - first < block ? seq - first : block;
            rotate_block(&task, together ? 0 : i / blocks, sequences, first, count);
        }
    }
}
