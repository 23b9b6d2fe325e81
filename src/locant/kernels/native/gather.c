/* Copy slices of token ids to int64 inputs and targets. The targets are the same slices shifted by one token.

   This does in one call and one pass over memory what `locant/text/windows/tokens.py` does with NumPy. The ids are in one
   array, which contains the shards in order, with gaps between them. A slice may continue in the next shard, or in
   several. Every slice is checked against the number of tokens before it is read.

   Like `rotary.c`, it is compiled once for each instruction set, and linked without an OpenMP library. */

#include "sharing.h"

/* Copying this many tokens counts as much work as one element of other kernels, for the number of threads. */
enum { TOKENS_PER_ELEMENT = 8, TOKENS_AT_ONCE = 1 << 14, IGNORED_TARGET = -100 };

/* `Memory` in `text/windows/tokens.py` packs this struct. Token t of shard s is id t + shift[s] of the array. */
typedef struct {
    const char *ids;
    int64_t size, is_signed; /* the size of one id in bytes, and whether ids are signed */
    int64_t shards;
    const int64_t *starts; /* the starts of the shards, and the end of the last */
    const int64_t *shift;
} Text;

/* Slice i begins at token `step * starts[i]` and has `sizes[i]` inputs (without `sizes`: `length`) and as many targets.
   They go to row i of the outputs, which is then padded. With `sizes`, `index` and `document` get the positions: indices
   count from 0, and padding has the last index and document -1. */
typedef struct {
    int64_t threads, count, step, length, pad_id;
    int64_t *inputs, *targets, *index, *document;
} Batch;

/* ---------------------------------------------------------------- ids as int64 */

/* Return a negative number if one of the ids is negative. */
typedef int64_t Widen(const char *from, int64_t *to, int64_t count);

#define WIDEN(NAME, TYPE)                                                    \
    typedef TYPE __attribute__((aligned(1), may_alias)) NAME##_id;           \
    static int64_t NAME(const char *from, int64_t *to, int64_t count) {      \
        const NAME##_id *ids = (const NAME##_id *)from;                      \
        int64_t all = 0;                                                     \
        for (int64_t i = 0; i < count; i++) all |= to[i] = (int64_t)ids[i];  \
        return all;                                                          \
    }

WIDEN(unsigned_8, uint8_t)
WIDEN(unsigned_16, uint16_t)
WIDEN(unsigned_32, uint32_t)
WIDEN(unsigned_64, uint64_t)
WIDEN(signed_8, int8_t)
WIDEN(signed_16, int16_t)
WIDEN(signed_32, int32_t)
WIDEN(signed_64, int64_t)

static Widen *widen_of(const Text *text) {
    switch (text->size) {
        case 1: return text->is_signed ? signed_8 : unsigned_8;
        case 2: return text->is_signed ? signed_16 : unsigned_16;
        case 4: return text->is_signed ? signed_32 : unsigned_32;
        default: return text->is_signed ? signed_64 : unsigned_64;
    }
}

/* ---------------------------------------------------------------- slices */

/* Return the shard of a token: the last shard that does not begin after it. */
static int64_t shard_of(const Text *text, int64_t token) {
    int64_t low = 0, count = text->shards;
    while (count > 1) {
        int64_t half = count / 2;
        low = text->starts[low + half] <= token ? low + half : low;
        count -= half;
    }
    return low;
}

static int64_t read(const Text *text, Widen *widen, int64_t shard, int64_t first, int64_t count, int64_t *to) {
    int64_t all = 0;
    for (; count > 0; shard++) {
        int64_t here = text->starts[shard + 1] - first;
        here = here < count ? here : count;
        all |= widen(text->ids + (first + text->shift[shard]) * text->size, to, here);
        first += here, to += here, count -= here;
    }
    return all;
}

static int64_t at(const char *numbers, int64_t i) {
    int64_t number;
    memcpy(&number, numbers + 8 * i, sizeof number);
    return number;
}

/* Return whether the slice could be read. */
static int slice(const Text *text, const Batch *batch, int64_t i, const char *starts, const char *sizes) {
    Widen *widen = widen_of(text);
    int64_t tokens = text->starts[text->shards], number = at(starts, i), size = sizes ? at(sizes, i) : batch->length;
    if (number < 0 || number > tokens / batch->step || size < 1 || size > batch->length) return 0;
    int64_t start = batch->step * number;
    if (start >= tokens - size) return 0;
    int64_t shard = shard_of(text, start), row = i * batch->length;
    int64_t *inputs = batch->inputs + row, *targets = batch->targets + row;
    int64_t all = read(text, widen, shard, start, size, inputs) | read(text, widen, shard, start + 1, size, targets);
    for (int64_t slot = size; slot < batch->length; slot++) {
        inputs[slot] = batch->pad_id;
        targets[slot] = IGNORED_TARGET;
    }
    for (int64_t slot = 0; sizes && slot < batch->length; slot++) {
        batch->index[row + slot] = slot < size ? slot : size - 1;
        batch->document[row + slot] = slot < size ? 0 : -1;
    }
    return all >= 0;
}

typedef struct {
    Text text;
    Batch batch;
    const char *starts, *sizes;
    int64_t together;
    int *refused;
} Work;

static void read_slices(const void *given, int64_t item, int64_t thread) {
    const Work *work = given;
    int64_t end = (item + 1) * work->together;
    for (int64_t i = item * work->together; i < end && i < work->batch.count; i++)
        if (!slice(&work->text, &work->batch, i, work->starts, work->sizes))
            __atomic_store_n(work->refused, 1, __ATOMIC_RELAXED);
    (void)thread;
}

/* The only function that Python calls. `text` and `batch` are packed structs. `starts`, and `sizes` if given, are int64.
   Return 1 if a slice is outside of the text, or an id is negative. The outputs are then undefined. */
int NAMED(locant_gather, VARIANT)(const char *text, const char *batch, const char *starts, const char *sizes) {
    int refused = 0;
    Work work = {.starts = starts, .sizes = sizes, .refused = &refused};
    memcpy(&work.text, text, sizeof work.text);
    memcpy(&work.batch, batch, sizeof work.batch);
    int64_t count = work.batch.count, length = work.batch.length;
    int64_t threads = threads_for(count * length / TOKENS_PER_ELEMENT, work.batch.threads);
    work.together = 1 + TOKENS_AT_ONCE / length;
    share_out((count + work.together - 1) / work.together, threads, read_slices, &work);
    return refused;
}
