/* The norm and rotation of rows, for one dtype. `norm_rotary.c` includes this file once for each dtype, with

   ELEMENT, REAL    the types in memory and in registers
   READ, WRITE      the conversions between them
   ROUND            the value of a REAL after WRITE and READ
   FOR(name)        the name of a function for this dtype
   SUM              the sum of products of two rows of REAL, in one order
   ROTATE_WIDE      `rotate_row` for rows of REAL
   CONVERTS_ROWS    defined if `wide_row`, `scale` and `rotate_row` exist already */

#ifndef CONVERTS_ROWS
/* Return the row in the working precision: `x` itself if it has this precision, unless `to_copy`. */
static inline const REAL *FOR(wide_row)(const ELEMENT *x, REAL *wide, int64_t n, int to_copy) {
    if (!to_copy && sizeof *x == sizeof *wide) return (const REAL *)x;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) wide[i] = READ(x[i]);
    return wide;
}

/* Write the row times `r` and its weights, rounded as the reference rounds, to `h`. */
static inline void FOR(scale)(const Norm *norm, const REAL *x, const REAL *weight, REAL *h, int64_t n, REAL r) {
    if (!weight) {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) h[i] = ROUND(x[i] * r);
    } else if (norm->round_before_weight) {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) h[i] = ROUND(ROUND(x[i] * r) * weight[i]);
    } else {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) h[i] = ROUND(x[i] * r * weight[i]);
    }
}

/* Rotate a wide row into a row of the dtype. The rows may be the same memory if they have the same type. */
static inline void FOR(rotate_row)(const Task *task, REAL *x, ELEMENT *y, const REAL *c, const REAL *s) {
    int64_t pairs = task->pairs;
    if (task->interleaved) {
        EACH_PAIR {
            REAL a = x[2 * i], b = x[2 * i + 1];
            y[2 * i] = WRITE(a * c[i] - b * s[i]);
            y[2 * i + 1] = WRITE(b * c[i] + a * s[i]);
        }
    } else {
        HALF(REAL, AS_IT_IS, WRITE)
    }
#pragma omp simd
    for (int64_t i = 2 * pairs; i < task->head_dim; i++) y[i] = WRITE(x[i]);
}

#endif

static inline REAL FOR(inverse_rms)(const Norm *norm, const REAL *x, int64_t n) {
    return (REAL)1 / SQRT(SUM(norm->lanes, x, x, n) / (REAL)n + (REAL)norm->eps);
}

/* Norm and rotate `count` rows with one weight. All inverses come first, because each waits for a long chain of sums. */
static void FOR(norm_rows)(const NormTask *all, const void *weight, const char *in, char *out, int64_t in_step,
                           int64_t out_step, const void *cos, const void *sin, int64_t angle_step, int64_t count,
                           void *scratch) {
    const Task *task = &all->task;
    int64_t n = task->head_dim;
    REAL *wide = scratch, *h = wide + GROUP * n, inverse[GROUP];
    const REAL *rows[GROUP];
    for (int64_t first = 0; first < count; first += GROUP) {
        int64_t size = count - first < GROUP ? count - first : GROUP;
        for (int64_t i = 0; i < size; i++) {
            rows[i] = FOR(wide_row)((const ELEMENT *)(in + (first + i) * in_step), wide + i * n, n, 0);
            inverse[i] = FOR(inverse_rms)(&all->norm, rows[i], n);
        }
        for (int64_t i = 0; i < size; i++) {
            const REAL *c = (const REAL *)cos + (first + i) * angle_step, *s = (const REAL *)sin + (first + i) * angle_step;
            ask_ahead(in + (first + i) * in_step, in_step, n * (int64_t)sizeof(ELEMENT));
            FOR(scale)(&all->norm, rows[i], weight, h, n, inverse[i]);
            FOR(rotate_row)(task, h, (ELEMENT *)(out + (first + i) * out_step), c, s);
        }
    }
}

/* Norm all heads of a token together, and rotate them. */
static void FOR(norm_token)(const NormTask *all, const void *weight, const char *in, char *out, int64_t heads,
                            int64_t in_step, int64_t out_step, const void *cos, const void *sin, void *scratch) {
    int64_t n = all->task.head_dim;
    REAL *wide = scratch, *h = wide + heads * n;
    for (int64_t head = 0; head < heads; head++)
        FOR(wide_row)((const ELEMENT *)(in + head * in_step), wide + head * n, n, 1);
    REAL inverse = FOR(inverse_rms)(&all->norm, wide, heads * n);
    FOR(scale)(&all->norm, wide, weight, h, heads * n, inverse);
    for (int64_t head = 0; head < heads; head++)
        FOR(rotate_row)(&all->task, h + head * n, (ELEMENT *)(out + head * out_step), cos, sin);
}

/* Write the gradient of a row (one or several heads of a token), and add the gradient of its weights to `sums`. */
static void FOR(norm_back)(const BackTask *all, const void *weights, const char *grad, char *out, const char *in,
                           const Tensor *steps, int64_t in_step, int64_t heads, const void *cos, const void *sin,
                           void *given_sums, void *scratch) {
    const Task *task = &all->task;
    const REAL *weight = weights;
    int64_t n = task->head_dim, width = heads * n;
    REAL *g = scratch, *unit = g + width, *sums = given_sums;
    for (int64_t head = 0; head < heads; head++) {
        const ELEMENT *row = (const ELEMENT *)(grad + head * steps->in_step[HEAD]);
        FOR(wide_row)(row, g + head * n, n, 1);
        ROTATE_WIDE(task, g + head * n, g + head * n, cos, sin);
        FOR(wide_row)((const ELEMENT *)(in + head * in_step), unit + head * n, n, 1);
    }
    REAL inverse = FOR(inverse_rms)(&all->norm, unit, width);
#pragma omp simd
    for (int64_t i = 0; i < width; i++) unit[i] *= inverse;
    if (weight && all->norm.round_before_weight) {
#pragma omp simd
        for (int64_t i = 0; i < width; i++) sums[i] += g[i] * ROUND(unit[i]);
    } else if (weight) {
#pragma omp simd
        for (int64_t i = 0; i < width; i++) sums[i] += g[i] * unit[i];
    }
    if (weight) {
#pragma omp simd
        for (int64_t i = 0; i < width; i++) g[i] *= weight[i];
    }
    REAL mean = SUM(all->norm.lanes, g, unit, width) / (REAL)width;
    for (int64_t head = 0; head < heads; head++) {
        ELEMENT *y = (ELEMENT *)(out + head * steps->out_step[HEAD]);
        const REAL *m = g + head * n, *u = unit + head * n;
#pragma omp simd
        for (int64_t i = 0; i < n; i++) y[i] = WRITE(inverse * (m[i] - u[i] * mean));
    }
}
