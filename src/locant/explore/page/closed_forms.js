// What has a closed form is computed here, where no Python is: frequencies and scalings of RoPE, scores by distance,
// slopes of ALiBi, buckets of T5, and who attends to whom in packed rows. Pure functions in float64, which never touch the
// page; `tests/explore/test_closed_forms.py` holds each of them against locant.

// Radians per position of each pair of dimensions: base ** (-2 i / dim).
export function inverseFrequencies(dim, base) {
  return Array.from({ length: dim / 2 }, (_, pair) => base ** ((-2 * pair) / dim));
}

// Frequencies and attention factor under a scaling. `trained`: the trained length; `length`: that of the sequence,
// by default `factor` times as long. The attention factor acts on queries and on keys, so scores grow by its square.
export function scaled(method, { dim, base, factor, trained, length = Math.round(trained * factor) }) {
  const plain = inverseFrequencies(dim, base);
  const { frequencies, attention = 1 } = SCALINGS[method]({ dim, base, factor, trained, length, plain });
  return { frequencies, attention };
}

const SCALINGS = {
  none: ({ plain }) => ({ frequencies: plain }),
  linear: ({ plain, factor }) => ({ frequencies: plain.map((each) => each / factor) }),
  ntk: ({ dim, base, factor }) => ({ frequencies: ofLargerBase(dim, base, factor) }),
  dynamic: ({ dim, base, factor, trained, length }) => ({
    frequencies: ofLargerBase(dim, base, (factor * Math.max(length, trained)) / trained - (factor - 1)),
  }),
  yarn: ({ factor, ...sizes }) => ({ frequencies: byRamp({ factor, ...sizes }), attention: factor <= 1 ? 1 : 0.1 * Math.log(factor) + 1 }),
  // The paper's divisors are searched on data; without data, those of YaRN's ramp stand for them, in long sequences.
  longrope: ({ plain, factor, trained, length, ...sizes }) => ({
    frequencies: length > trained ? byRamp({ plain, factor, trained, ...sizes }) : plain,
    attention: Math.sqrt(1 + Math.log(Math.max(factor, 1)) / Math.log(trained)),
  }),
  llama3: ({ plain, factor, trained }) => ({ frequencies: plain.map((each) => byWavelength(each, factor, trained)) }),
};

// The names that `scaled` takes.
export const METHODS = Object.keys(SCALINGS);

// NTK: a base at which the slowest pair is slower by exactly `stretch`.
function ofLargerBase(dim, base, stretch) {
  return inverseFrequencies(dim, base * stretch ** (dim / (dim - 2)));
}

const [FAST, SLOW] = [32, 1]; // rotations within the trained length: YaRN keeps the first, and slows the others by all

// YaRN: from pairs that stay to pairs that are slowed by the factor goes a ramp, whose ends are whole pairs.
function byRamp({ plain, dim, base, factor, trained }) {
  const end = (rotations) => (dim * Math.log(trained / (rotations * 2 * Math.PI))) / (2 * Math.log(base));
  const low = Math.max(Math.floor(end(FAST)), 0);
  const high = Math.min(Math.ceil(end(SLOW)), dim - 1);
  return plain.map((each, pair) => {
    const slowed = Math.min(1, Math.max(0, (pair - low) / (high - low || 1)));
    return (each / factor) * slowed + each * (1 - slowed);
  });
}

// Llama 3: short waves stay, long ones are stretched, and those between are blended.
function byWavelength(frequency, factor, trained, { low = 1, high = 4 } = {}) {
  const rotations = (trained * frequency) / (2 * Math.PI);
  const share = Math.min(1, Math.max(0, (rotations - low) / (high - low)));
  return (1 - share) * (frequency / factor) + share * frequency;
}

// Tokens until each pair stands as before.
export function wavelengths(frequencies) {
  return frequencies.map((each) => (2 * Math.PI) / each);
}

// Cosine and sine of each pair at a position.
export function angles(frequencies, position) {
  return { cos: frequencies.map((each) => Math.cos(position * each)), sin: frequencies.map((each) => Math.sin(position * each)) };
}

// A query or key, rotated. Layout "half" pairs dimension i with i + d/2, "interleaved" 2 i with 2 i + 1.
export function rotated(vector, frequencies, position, layout = "half") {
  const { cos, sin } = angles(frequencies, position);
  const pairs = frequencies.length;
  const result = [...vector];
  for (let pair = 0; pair < pairs; pair++) {
    const [first, second] = layout === "half" ? [pair, pair + pairs] : [2 * pair, 2 * pair + 1];
    result[first] = vector[first] * cos[pair] - vector[second] * sin[pair];
    result[second] = vector[first] * sin[pair] + vector[second] * cos[pair];
  }
  return result;
}

// The score of a query and a key that are all ones, for each distance, divided by that at distance 0: the mean cosine.
export function scoreByDistance(frequencies, distances) {
  return Array.from(distances, (distance) => {
    let sum = 0;
    for (const frequency of frequencies) sum += Math.cos(distance * frequency);
    return sum / frequencies.length;
  });
}

// The vector that is added at a position: sine and cosine of each pair in turns.
export function sinusoidal(dim, base, position) {
  const { cos, sin } = angles(inverseFrequencies(dim, base), position);
  return cos.flatMap((each, pair) => [sin[pair], each]);
}

// ALiBi's slope of each head; where their number is no power of two, two ladders are mixed, as by the paper's code.
export function alibiSlopes(heads) {
  const power = 2 ** Math.floor(Math.log2(heads));
  const slopes = Array.from({ length: power }, (_, head) => 2 ** ((-8 * (head + 1)) / power));
  const between = Array.from({ length: heads - power }, (_, head) => 2 ** ((-4 * (2 * head + 1)) / power));
  return [...slopes, ...between];
}

// What ALiBi adds to a score.
export function alibi(slope, distance) {
  return -slope * Math.abs(distance);
}

// T5's bucket of a distance (index of the query minus that of the key). Rounded as the reference rounds, in float32.
export function t5Bucket(distance, { buckets, most, bidirectional }) {
  if (!bidirectional) return bucketOf(Math.max(distance, 0), buckets, most);
  const side = Math.floor(buckets / 2);
  return (distance < 0 ? side : 0) + bucketOf(Math.abs(distance), side, most);
}

function bucketOf(distance, buckets, most) {
  const exact = Math.floor(buckets / 2);
  if (distance < exact) return distance;
  const ratio = Math.fround(Math.min(distance, most) / exact);
  const share = Math.fround(Math.fround(Math.log(ratio)) / Math.fround(Math.log(most / exact)));
  return Math.min(exact + Math.trunc(Math.fround(share * (buckets - exact))), buckets - 1);
}

// The index and the document of every token of a row in which documents of these lengths are packed; padding is -1.
export function packed(lengths, length = 0) {
  const index = lengths.flatMap((count) => Array.from({ length: count }, (_, at) => at));
  const document = lengths.flatMap((count, number) => Array(count).fill(number));
  while (index.length < length) {
    index.push(0);
    document.push(-1);
  }
  return { index, document };
}

// Whether the token in slot `query` attends to that in slot `key`; a window of 0 is none.
export function attends({ index, document }, query, key, { causal = true, window = 0 } = {}) {
  if (document[query] < 0 || document[query] !== document[key]) return false;
  const distance = index[query] - index[key];
  return !(causal && distance < 0) && !(window && Math.abs(distance) >= window);
}

// A matrix for `heatMap`: an entry for each row and column.
export function matrix(rows, columns, entry) {
  const values = Float64Array.from({ length: rows * columns }, (_, at) => entry(Math.floor(at / columns), at % columns));
  return Object.assign(values, { shape: [rows, columns] });
}
