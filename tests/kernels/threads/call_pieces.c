/* Calls of four threads, for the thread sanitizer: the bias of two heads, then the gradient of one. */
#include "pieces.c"
int main(void) {
    enum { H = 2, R = 64, C = 2000, N = R + C - 1, P = 3, ITEMS = (N + DIAGONALS - 1) / DIAGONALS };
    static float table[N], reach[R], scores[H * R * C], skewed[R * (R + C)], along[N];
    static double sums[ITEMS * (2 * P + R)];
    static const float kinks[P - 1] = {0.2f, 0.7f}, slopes[H * P] = {1, 2, 3, 4, 5, 6}, offsets[H * P] = {1, 2, 3, 4, 5, 6};
    for (int i = 0; i < N; i++) table[i] = 1 - (float)i / N;
    for (int i = 0; i < R; i++) reach[i] = 1;
    Task task = {.threads = 4, .rows = R, .columns = C, .high = N, .heads = H, .pieces = P, .table = table, .reach = reach,
                 .kinks = kinks, .slopes = slopes, .offsets = offsets, .scores = scores};
    NAMED(locant_pieces, VARIANT)((const char *)&task);
    task.heads = 1, task.scores = skewed, task.along = along, task.sums = sums;
    NAMED(locant_pieces_gradient, VARIANT)((const char *)&task);
    return 0;
}
