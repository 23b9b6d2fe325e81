/* One call of four threads forward and one backward, for the thread sanitizer. */
#include "norm_rotary.c"
int main(void) {
    enum { B = 2, H = 3, N = 300, D = 64 };
    static float q[B * H * N * D], k[B * H * N * D], v[B * H * N * D], copy[B * H * N * D], weight[H * D];
    static float dq[B * H * N * D], dk[B * H * N * D];
    static double table[4 * 256 * D], q_sums[D], k_sums[H * D];
    static int64_t positions[N];
    for (int i = 0; i < N; i++) positions[i] = i;
    Tensor x = {H, {4 * H * N * D, 4 * N * D, 4 * D}, {4 * H * N * D, 4 * N * D, 4 * D}};
    Task task = {.threads = 4, .dtype = FLOAT32, .batch = B, .seq = N, .head_dim = D, .pairs = D / 2,
                 .positions = positions, .rows = 1, .position_step = {0, 1, 0}, .table = table, .levels = 2,
                 .attention_factor = 1, .q = x, .k = x, .q_at = {(char *)q, (char *)q}, .k_at = {(char *)k, (char *)k}};
    Norm norm = {.lanes = 8, .eps = 1e-6, .q = {(char *)weight, FLOAT32, 4, D}, .k = {(char *)weight, FLOAT32, 4, H * D}};
    NormTask forward = {.is_normed = 1, .norm = norm, .v = {4 * D, x, {(char *)v, (char *)copy}}, .task = task};
    int failed = NAMED(locant_norm_rotate, VARIANT)((const char *)&forward);
    BackTask back = {.norm = norm, .q_step = {4 * H * N * D, 4 * N * D, 4 * D}, .k_step = {4 * H * N * D, 4 * N * D, 4 * D},
                     .q = (char *)q, .k = (char *)k, .q_weight = q_sums, .k_weight = k_sums, .task = task};
    back.task.q_at.out = (char *)dq;
    back.task.k_at.out = (char *)dk;
    return failed | NAMED(locant_norm_rotate_back, VARIANT)((const char *)&back);
}
