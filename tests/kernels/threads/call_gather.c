/* One call of four threads, for the thread sanitizer; with a negative id, which all of them tell. */
#include "gather.c"
int main(void) {
    enum { N = 9000, LENGTH = 257, SLICES = 4000 };
    static int16_t ids[N];
    static int64_t inputs[SLICES * LENGTH], targets[SLICES * LENGTH], first[SLICES];
    static const int64_t starts[] = {0, 4000, N}, shift[] = {0, 0};
    for (int64_t i = 0; i < N; i++) ids[i] = (int16_t)(i % 100 - 1);
    for (int64_t i = 0; i < SLICES; i++) first[i] = i;
    Text text = {.ids = (char *)ids, .size = 2, .is_signed = 1, .shards = 2, .starts = starts, .shift = shift};
    Batch batch = {.threads = 4, .count = SLICES, .step = 2, .length = LENGTH, .inputs = inputs, .targets = targets};
    return !NAMED(locant_gather, VARIANT)((char *)&text, (char *)&batch, (char *)first, 0);
}
