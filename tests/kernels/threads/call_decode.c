/* One call of four threads, for the thread sanitizer. */
#include "decode.c"
int main(void) {
    enum { B = 2, H = 2, G = 3, N = 5000, D = 48 };
    static float q[B * H * G * D], k[B * H * N * D], v[B * H * N * D], out[B * H * G * D], table[N], sums[B * H * G];
    for (int i = 0; i < B * H * N * D; i++) k[i] = v[i] = (float)(i % 7) / 7;
    for (int i = 0; i < B * H * G * D; i++) q[i] = (float)(i % 5) / 5;
    Task task = {.threads = 4, .dtype = FLOAT32, .batch = B, .kv_heads = H, .group = G, .queries = 1, .keys = N,
                 .head_dim = D, .value_dim = D, .last = N - 1, .scale = 0.1, .q = (char *)q, .k = (char *)k,
                 .v = (char *)v, .out = (char *)out, .table = table, .sums = sums,
                 .q_step = {H * G * D, D, D, 1}, .k_step = {H * N * D, N * D, D, 1},
                 .v_step = {H * N * D, N * D, D, 1}, .out_step = {H * G * D, D, D, 1}};
    return NAMED(locant_decode, VARIANT)((const char *)&task);
}
