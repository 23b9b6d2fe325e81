/* One call of four threads forward and one backward, for the thread sanitizer. */
#include "embedding.c"
int main(void) {
    enum { B = 3, N = 200, D = 384, ROWS_OF_TOKENS = 500, ROWS_OF_SEGMENTS = 2, SLOTS = 5, THREADS = 4, ALL = B * N };
    static float token[ROWS_OF_TOKENS * D], position[N * D], segment[ROWS_OF_SEGMENTS * D], gamma[D], beta[D];
    static float of_token[ROWS_OF_TOKENS * D], of_position[N * D], of_segment[ROWS_OF_SEGMENTS * D];
    static float of_gamma[D], of_beta[D];
    static float out[ALL * D], mean[ALL], rstd[ALL], buffers[THREADS * BUFFERS * D], along[2 * ALL];
    static float partial[(N / SLOTS) * (2 + ROWS_OF_SEGMENTS) * D];
    static int64_t ids[ALL], places[N], segments[ALL], sorted[ROWS_OF_TOKENS + ALL];
    for (int64_t i = 0; i < ALL; i++) ids[i] = i * i % ROWS_OF_TOKENS, segments[i] = i % ROWS_OF_SEGMENTS;
    for (int64_t i = 0; i < N; i++) places[i] = i;
    for (int64_t i = 0; i < ROWS_OF_TOKENS * D; i++) token[i] = (float)(i % 7);
    Task task = {.threads = THREADS, .batch = B, .seq = N, .width = D, .dtype = FLOAT32,
                 .token = {(char *)token, 4 * D, FLOAT32, ROWS_OF_TOKENS, ids, (char *)of_token, sorted},
                 .position = {(char *)position, 4 * D, FLOAT32, N, places, (char *)of_position, 0},
                 .segment = {(char *)segment, 4 * D, FLOAT32, ROWS_OF_SEGMENTS, segments, (char *)of_segment, 0},
                 .shared = 1, .run = 0, .slots = SLOTS, .padding = -1, .normed = 1, .scale = 1, .eps = 1e-5,
                 .gamma = gamma, .beta = beta, .mean = mean, .rstd = rstd, .out = (char *)out, .out_dtype = FLOAT32,
                 .out_step = {4 * N * D, 4 * D}, .factor = 1, .buffers = buffers, .along = along, .partial = partial,
                 .grad_gamma = (char *)of_gamma, .grad_beta = (char *)of_beta};
    const char *packed = (const char *)&task;
    return !NAMED(locant_embed, VARIANT)(packed) || !NAMED(locant_embed_backward, VARIANT)(packed);
}
