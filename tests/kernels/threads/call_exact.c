/* One call of four threads of each kernel, for the thread sanitizer. */
#include "exact.c"
int main(void) {
    enum { HEADS = 3, KEYS = 5000, FEW = 3, DIM = 30, WIDTH = 32 };
    static float a[HEADS * FEW * DIM], b[HEADS * KEYS * DIM];
    static double rounded[HEADS * KEYS * WIDTH], out[HEADS * FEW * KEYS];
    static int64_t entries[KEYS];
    for (int64_t i = 0; i < HEADS * KEYS * DIM; i++) b[i] = (float)(i % 17) - 8;
    for (int64_t i = 0; i < KEYS; i++) entries[i] = i % 7;
    Products products = {4, FLOAT32, FLOAT32, 1, HEADS, FEW, KEYS, DIM, 24, {0, 4 * FEW * DIM, 4 * DIM},
                         {0, 4 * KEYS * DIM, 4 * DIM}, (char *)a, (char *)b, out};
    NAMED(locant_exact_products, VARIANT)((char *)&products);
    Rounding rounding = {4, FLOAT32, 1, HEADS, KEYS, DIM, WIDTH, 24, {0, 4 * KEYS * DIM, 4 * DIM}, (char *)b, rounded};
    NAMED(locant_round_to_grid, VARIANT)((char *)&rounding);
    Entries each = {4, FLOAT32, 1, HEADS, 1, KEYS, DIM, 24, {0, 4 * KEYS * DIM, 4 * DIM}, {KEYS * WIDTH, WIDTH}, {0, KEYS},
                    (char *)b, rounded, entries, out};
    NAMED(locant_exact_entries, VARIANT)((char *)&each);
    return 0;
}
