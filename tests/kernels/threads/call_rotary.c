/* One call of four threads, for the thread sanitizer. */
#include "rotary.c"
int main(void) {
    enum { B = 2, H = 3, N = 600, D = 64 };
    static float q[B * H * N * D], k[B * H * N * D];
    static double table[4 * 256 * D];
    static int64_t positions[N];
    for (int i = 0; i < N; i++) positions[i] = i;
    Tensor x = {H, {4 * H * N * D, 4 * N * D, 4 * D}, {4 * H * N * D, 4 * N * D, 4 * D}};
    Task task = {.threads = 4, .dtype = FLOAT32, .batch = B, .seq = N, .head_dim = D, .pairs = D / 2,
                 .positions = positions, .rows = 1, .position_step = {0, 1, 0}, .table = table, .levels = 2,
                 .attention_factor = 1, .q = x, .k = x, .q_at = {(char *)q, (char *)q}, .k_at = {(char *)k, (char *)k}};
    NAMED(locant_rotate, VARIANT)((const char *)&task);
    return 0;
}
