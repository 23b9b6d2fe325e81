// Attention scores as Compare draws them: the same random contents at every distance, and what an encoding of a closed
// form does to them.

import { alibi, angles, inverseFrequencies, matrix, scaled, scoreByDistance, sinusoidal, t5Bucket } from "./closed_forms.js";

const TAILS = [0.1, 0.9]; // between these shares of the scores is the band
const T5 = { buckets: 32, most: 128, bidirectional: false };

// Whole numbers from 0 to `count` - 1, all of them or so many, rounded as NumPy rounds: a half to the even one.
export function sampled(count, most) {
  const last = Math.min(count, most) - 1;
  const round = (value) => (value % 1 === 0.5 ? 2 * Math.round(value / 2) : Math.round(value));
  return Array.from({ length: last + 1 }, (_, at) => (last ? round(at * ((count - 1) / last)) : 0));
}

// By distance the mean and the band of the scores, and their mean at each query and key. `contents`: {q, other, table}:
// vectors of length 1 at right angles, a row for each draw, and T5's numbers.
export function scoresOf(name, options, { q: queries, other: others, table }, distances, positions) {
  const [draws, width] = queries.shape;
  const part = (all, draw) => Array.from(all.slice(draw * width, (draw + 1) * width));
  const across = Math.sqrt(1 - options.alike ** 2);
  const contents = Array.from({ length: draws }, (_, draw) => {
    const [q, other] = [part(queries, draw), part(others, draw)];
    return [q, q.map((each, at) => options.alike * each + across * other[at])];
  });
  const { mean, all } = KINDS[name]({ ...options, width, contents, table, product: options.alike * Math.sqrt(width) });
  const at = distances.map(all ?? ((distance) => [mean(distance)]));
  const [low, high] = TAILS.map((share) => at.map((scores) => quantile(scores, share)));
  const map = matrix(positions.length, positions.length, (query, key) => (key > query ? NaN : mean(positions[query] - positions[key])));
  return { mean: distances.map(mean), low, high, map };
}

// From a distance to the mean score and, where they differ, to those of all contents and of their opposites.
const KINDS = {
  nope: ({ product }) => ({ mean: () => product }),
  alibi: ({ product, slope }) => ({ mean: (distance) => product + alibi(slope, distance) }),
  t5: ({ product, table, head }) => ({ mean: (distance) => product + table[t5Bucket(distance, T5) * table.shape[1] + head] }),
  sinusoidal({ product, width, base, length, contents }) {
    const frequencies = inverseFrequencies(width, base);
    const mean = (distance) => product + (Math.sqrt(width) / 2) * scoreByDistance(frequencies, [distance])[0];
    const last = sinusoidal(width, base, length - 1);
    const all = (distance) => {
      const [here, before] = [mean(distance), sinusoidal(width, base, length - 1 - distance)];
      return contents.flatMap(([q, k]) => [1, -1].map((sign) => here + sign * (dot(q, before) + dot(k, last))));
    };
    return { mean, all };
  },
  rotary({ width, contents, ...sizes }) {
    const { frequencies, attention } = scaled(sizes.scaling, { ...sizes, dim: width });
    const parts = contents.map(([q, k]) => [product(q, k, 0), product(q, k, 1)]);
    const average = [0, 1].map((part) => frequencies.map((_, pair) => parts.reduce((sum, each) => sum + each[part][pair], 0) / parts.length));
    const score = ([even, odd], { cos, sin }) => attention ** 2 * Math.sqrt(width) * (dot(even, cos) + dot(odd, sin));
    return {
      mean: (distance) => score(average, angles(frequencies, distance)),
      all(distance) {
        const turned = angles(frequencies, distance);
        return parts.flatMap((each) => Array(2).fill(score(each, turned)));
      },
    };
  },
};

// What each pair of dimensions (i, i + d / 2) adds to a score, by the cosine of its angle, or by the sine.
function product(q, k, sine) {
  const half = q.length / 2;
  return Array.from({ length: half }, (_, at) => (sine ? q[at] * k[at + half] - q[at + half] * k[at] : q[at] * k[at] + q[at + half] * k[at + half]));
}

function dot(x, y) {
  let sum = 0;
  for (let at = 0; at < x.length; at++) sum += x[at] * y[at];
  return sum;
}

function quantile(values, share) {
  const sorted = [...values].sort((a, b) => a - b);
  const place = share * (sorted.length - 1);
  const [before, after] = [sorted[Math.floor(place)], sorted[Math.ceil(place)]];
  return before + (place % 1) * (after - before);
}
