/* One call of four threads, for the thread sanitizer. */
#include "cope.c"
int main(void) {
    enum { ROWS = 40, QUERIES = 5, KEYS = 4000, EMBEDDINGS = 3 };
    static double decays[ROWS * KEYS], products[ROWS * EMBEDDINGS];
    static uint8_t mask[QUERIES * KEYS];
    static float out[ROWS * KEYS];
    for (int64_t i = 0; i < QUERIES * KEYS; i++) mask[i] = i % 3 != 0;
    Task task = {4, ROWS, 0, QUERIES, KEYS, EMBEDDINGS, 0x1p-30, EMBEDDINGS - 1, decays, products, mask, out};
    NAMED(locant_cope, VARIANT)((char *)&task);
    return 0;
}
