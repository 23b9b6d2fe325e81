// The figures of the essay "From integers to RoPE", by their names in its text. The vectors of words are made up: sines of
// squares, which are as good as random, and which the test of the essay computes again.

import { angles, inverseFrequencies, matrix, rotated, scaled, scoreByDistance, sinusoidal } from "../closed_forms.js";
import { number } from "../drawing/axes.js";
import { dials } from "../drawing/dials.js";
import { heatMap } from "../drawing/heat_map.js";
import { lineChart } from "../drawing/line_chart.js";
import { counted, mapTable } from "../picture.js";
import { plane, seenClocks } from "./drawing.js";
import { choice, real, whole } from "./figure.js";
import { SCREENS, TITLES } from "./screens.js";

const WORDS = { the: 3, dog: 1, bit: 5, man: 2 };
const BASE = 10_000;
const dot = (x, y) => x.reduce((sum, each, at) => sum + each * y[at], 0);
const add = (x, y) => x.map((each, at) => each + y[at]);
const cosine = (x, y) => dot(x, y) / Math.sqrt(dot(x, x) * dot(y, y));
const word = (name, dim) => counted(dim).map((at) => Math.SQRT2 * Math.sin(WORDS[name] * (at + 1) ** 2));

// A chart with its table and its legend, which reads the values under the pointer.
function chart(picture, { title, note, x, y, series, marks, levels }) {
  picture.show({
    title, note, legend: series.length > 1 ? series : [],
    table: () => ({ columns: [x.label, ...series.map(({ name }) => name)], rows: x.values.map((each, at) => [each, ...series.map(({ values }) => values[at])]) }),
    draw: (plot) => lineChart(plot, {
      x, y, series, marks, levels,
      hover(at) {
        picture.drawn?.point(at);
        picture.read(at === null ? [] : series.map(({ values }) => number(values[at], 3)));
      },
    }),
  });
}

// A map with its table; `read` says what is under the pointer.
function map(picture, { title, note, values, x, y, color, rows, columns, read }) {
  picture.show({
    title, note, table: () => mapTable(`${y.label} \\ ${x.label}`, columns, rows, values),
    draw: (plot) => heatMap(plot, {
      values, x, y, color,
      hover(row, column) {
        picture.drawn?.point(row, column);
        picture.note.textContent = row === undefined ? note : read(row, column, number(values[row * columns.length + column], 3));
      },
    }),
  });
}

const shuffle = {
  groups: [{
    order: choice("Sentence", "the dog bit the man", Object.fromEntries(["the dog bit the man", "the man bit the dog", "dog man the bit the"].map((each) => [each, each]))),
    positions: choice("Positions", "none", { none: "none", rotated: "rotated (RoPE)" }),
  }],
  pictures: { weights: { height: 260 }, outputs: { height: 260 } },
  rows: [["weights", "outputs"]],
  show({ order, positions }, pictures) {
    const names = order.split(" ");
    const dim = 8;
    const values = names.map((name) => word(name, dim));
    const vectors = values.map((each, at) => (positions === "none" ? each : rotated(each, inverseFrequencies(dim, BASE), at)));
    const weights = vectors.map((query) => {
      const powers = vectors.map((key) => Math.exp(dot(query, key) / Math.sqrt(dim)));
      return powers.map((each) => each / powers.reduce((sum, one) => sum + one));
    });
    const outputs = weights.map((row) => counted(dim).map((at) => row.reduce((sum, weight, key) => sum + weight * values[key][at], 0)));
    const y = { label: "", format: (at) => names[at], every: true };
    const rows = names.map((name, at) => `${name} (${at})`);
    const alike = outputs[names.indexOf("the")].every((each, at) => Math.abs(each - outputs[names.lastIndexOf("the")][at]) < 1e-9);
    map(pictures.weights, {
      title: "Attention weights", note: "Each row shows a word's attention to every word.", values: matrix(5, 5, (row, column) => weights[row][column]),
      x: { label: "key", format: (at) => names[at], every: true }, y, rows, columns: rows, color: { map: "one", low: 0, high: 1, label: "weight" },
      read: (row, column, value) => `${rows[row]} takes ${value} of ${rows[column]}.`,
    });
    map(pictures.outputs, {
      title: "What each word gets", note: alike ? "The two rows of “the” are equal." : "The two rows of “the” differ.", values: matrix(5, dim, (row, column) => outputs[row][column]),
      x: { label: "dimension" }, y, rows, columns: counted(dim).map(String), color: { map: "signed", low: -2, high: 2, label: "value" },
      read: (row, column, value) => `${rows[row]}, dimension ${column}: ${value}.`,
    });
  },
};

const integers = {
  groups: [{ position: whole("Position", 10, 0, 100) }],
  plays: { by: "position", speed: 15 },
  pictures: { vectors: { height: 260 }, alike: { height: 260 } },
  rows: [["vectors", "alike"]],
  show({ position }, pictures) {
    const dim = 64;
    const [dog, man] = ["dog", "man"].map((name) => word(name, dim));
    const moved = (vector, by) => vector.map((each) => each + by);
    const at = counted(101);
    const alike = at.map((by) => cosine(moved(dog, by), moved(man, by)));
    chart(pictures.vectors, {
      title: `“dog” and “man” at position ${position}`, note: "The first 16 of 64 numbers of each vector.",
      x: { values: counted(16), label: "dimension" }, y: { label: "value", low: -3, high: position + 3 },
      series: [dog, man].map((vector, index) => ({ name: ["dog", "man"][index], slot: index + 1, values: moved(vector, position).slice(0, 16) })),
    });
    chart(pictures.alike, {
      title: "How alike the two are", note: `The cosine between the two vectors: ${number(alike[position], 4)} at position ${position}.`,
      x: { values: at, label: "position" }, y: { label: "cosine", high: 1.05 }, marks: [{ at: position, label: "" }], series: [{ name: "cosine", slot: 1, values: alike }],
    });
  },
};

const fractions = {
  groups: [{ tokens: whole("Tokens in the longer text", 100, 10, 1000, { log: true }) }],
  pictures: { codes: { height: 280 } },
  show({ tokens }, { codes }) {
    const at = counted(10);
    const code = (length) => at.map((position) => position / (length - 1));
    chart(codes, {
      title: "The first ten tokens of two texts", note: `One step is ${number(1 / 9, 3)} in a text of 10 tokens, and ${number(1 / (tokens - 1), 3)} in one of ${number(tokens)}.`,
      x: { values: at, label: "position" }, y: { label: "code", high: 1.04 },
      series: [10, tokens].map((length, index) => ({ name: `a text of ${number(length)} tokens`, slot: index + 1, values: code(length), dots: true })),
    });
  },
};

const SHOWN = 64; // positions

// How alike the code of a position is to all others, as a chart.
function likeness(picture, codes, position, words) {
  const size = dot(codes[0], codes[0]);
  const values = codes.map((code) => dot(code, codes[position]) / size);
  chart(picture, {
    title: `How alike position ${position} is to all others`, note: words(values), marks: [{ at: position, label: "" }],
    x: { values: counted(SHOWN), label: "position" }, y: { label: "likeness", low: -1.05, high: 1.08 }, series: [{ name: "likeness", slot: 1, values }],
  });
}

const bits = {
  groups: [{ position: whole("Position", 31, 0, SHOWN - 1), smooth: real("From bits to waves", 0, 0, 1) }],
  plays: { by: "smooth", speed: 0.25 },
  pictures: { codes: { height: 210 }, alike: { height: 240 } },
  show({ position, smooth }, pictures) {
    const width = 6;
    const wave = (bit, at) => -Math.sin((2 * Math.PI * (at + 0.5)) / 2 ** (bit + 1));
    const code = (at) => counted(width).map((bit) => (1 - smooth) * Math.sign(wave(bit, at)) + smooth * wave(bit, at));
    const codes = counted(SHOWN).map(code);
    map(pictures.codes, {
      title: smooth ? "Bits on the way to waves" : "Positions in binary",
      note: "A column for each position, a row for each bit: −1 for 0, and 1 for 1.", values: matrix(width, SHOWN, (bit, at) => codes[at][bit]),
      x: { label: "position" }, y: { label: "", format: (bit) => `${2 ** bit}s`, every: true }, rows: counted(width).map((bit) => `${2 ** bit}s`), columns: counted(SHOWN).map(String),
      color: { map: "signed", low: -1, high: 1, label: "value" }, read: (row, column, value) => `Position ${column}, the ${2 ** row}s: ${value}.`,
    });
    likeness(pictures.alike, codes, position, (values) => {
      const next = Math.min(SHOWN - 1, position + 1);
      return `To its neighbour ${next}: ${number(values[next] / (dot(codes[next], codes[next]) / dot(codes[0], codes[0])), 3)}.`;
    });
  },
};

const waves = {
  groups: [{ position: whole("Position", 20, 0, SHOWN - 1), base: real("Base", 100, 4, BASE, { log: true }) }],
  plays: { by: "position", speed: 12 },
  pictures: { codes: { height: 260 }, alike: { height: 240 } },
  show({ position, base }, pictures) {
    const dim = 16;
    const codes = counted(SHOWN).map((at) => sinusoidal(dim, base, at));
    map(pictures.codes, {
      title: "Sines and cosines", note: "A column for each position, two rows for each frequency.", values: matrix(dim, SHOWN, (row, at) => codes[at][row]),
      x: { label: "position" }, y: { label: "dimension" }, rows: counted(dim).map(String), columns: counted(SHOWN).map(String),
      color: { map: "signed", low: -1, high: 1, label: "value" }, read: (row, column, value) => `Position ${column}, dimension ${row}: ${value}.`,
    });
    likeness(pictures.alike, codes, position, () => "The curve moves with the position, and keeps its shape: only the distance counts.");
  },
};

const LAST = 160;

const added = {
  groups: [{ distance: whole("Distance from key to query", 3, 0, 32) }],
  pictures: { scores: { height: 320 } },
  show({ distance }, { scores }) {
    const dim = 64;
    const [query, key] = ["dog", "bit"].map((name) => word(name, dim));
    const frequencies = inverseFrequencies(dim, BASE);
    const at = counted(LAST + 1).map((each) => each + 32);
    const score = (combine) => at.map((position) => dot(combine(query, position), combine(key, position - distance)) / Math.sqrt(dim));
    const sum = score((vector, position) => add(vector, sinusoidal(dim, BASE, position)));
    const turned = score((vector, position) => rotated(vector, frequencies, position));
    chart(scores, {
      title: `“dog” looks at “bit”, ${distance} tokens before it`,
      note: `Added: from ${number(Math.min(...sum), 3)} to ${number(Math.max(...sum), 3)}. Rotated: ${number(turned[0], 3)} wherever the two stand.`,
      x: { values: at, label: "position of the query" }, y: { label: "score" },
      series: [{ name: "sinusoids added", slot: 2, values: sum }, { name: "rotated", slot: 1, values: turned.map((each) => Number(each.toFixed(9))) }],
    });
  },
};

const turn = {
  groups: [{ position: whole("Position of the key", 0, 0, 60), distance: whole("Distance to the query", 4, 0, 15), frequency: real("Radians per token", 0.2, 0.02, 1, { log: true }) }],
  plays: { by: "position", speed: 8 },
  pictures: { plane: { height: 320, square: true } },
  show({ position, distance, frequency }, { plane: picture }) {
    const [key, query] = [{ angle: 0.5, length: 0.85 }, { angle: 0.9, length: 0.65 }];
    const arrows = [{ ...query, angle: query.angle + (position + distance) * frequency, slot: 1, name: "q" }, { ...key, angle: key.angle + position * frequency, slot: 2, name: "k" }];
    const between = query.angle - key.angle + distance * frequency;
    picture.show({
      title: `Query at ${position + distance}, key at ${position}`,
      note: `The angle from k to q: ${number((between * 180) / Math.PI, 3)}°. The score, q · k: ${number(query.length * key.length * Math.cos(between), 3)}.`,
      legend: [{ name: "query", slot: 1 }, { name: "key", slot: 2 }],
      table: () => ({ columns: ["arrow", "angle", "length"], rows: arrows.map(({ name, angle, length }) => [name, angle, length]) }),
      draw: (plot) => plane(plot, arrows),
    });
  },
};

const hands = {
  groups: [{ position: whole("Position", 44, 0, 400), which: choice("Hands", "all", { all: "all eight", fastest: "the fastest alone", slowest: "the slowest alone" }) }],
  plays: { by: "position", speed: 10 },
  pictures: { faces: { height: 240 }, alike: { height: 240 } },
  rows: [["faces", "alike"]],
  show({ position, which }, pictures) {
    const all = inverseFrequencies(16, BASE);
    const frequencies = { all, fastest: all.slice(0, 1), slowest: all.slice(-1) }[which];
    const { cos, sin } = angles(frequencies, position);
    const at = counted(401);
    const alike = scoreByDistance(frequencies, at);
    pictures.faces.show({
      title: `Position ${position}`, note: "A clock for each frequency; at position 0 all hands point to the right.",
      table: () => ({ columns: ["clock", "cosine", "sine"], rows: cos.map((each, clock) => [clock, each, sin[clock]]) }),
      draw: (plot) => dials(plot, { cos, sin, kinds: cos.map(() => "slot-1"), chosen: null, choose() {}, hover() {} }),
    });
    chart(pictures.alike, {
      title: "How alike it is to position 0", note: `${number(alike[position], 4)} at position ${position}.`, marks: [{ at: position, label: "" }],
      x: { values: at, label: "position" }, y: { label: "mean cosine", low: -1.05, high: 1.08 }, series: [{ name: "mean cosine", slot: 1, values: alike }],
    });
  },
};

const ladder = {
  groups: [{ pairs: whole("Pairs", 32, 4, 64), base: real("Base", BASE, 10, 1e6, { log: true }), length: whole("Farthest distance", 512, 64, 2048, { log: true }) }],
  pictures: { scores: { height: 320 } },
  show({ pairs, base, length }, { scores }) {
    const at = counted(length + 1);
    const equal = counted(pairs).map((pair) => (pairs - pair) / pairs);
    chart(scores, {
      title: "Two ways to choose frequencies", note: `With equal steps all hands meet again after ${number(2 * Math.PI * pairs, 3)} tokens, so that distance looks like distance 0.`,
      x: { values: at, label: "distance (tokens)" }, y: { label: "mean cosine", high: 1.04 },
      series: [{ name: "equal factors", slot: 1, values: scoreByDistance(inverseFrequencies(2 * pairs, base), at) }, { name: "equal steps", slot: 2, values: scoreByDistance(equal, at) }],
    });
  },
};

const [TRAINED, FACTOR] = [4096, 8];
const ROUNDED = 1 + 1e-9; // an angle that is the largest of training, but for its last bits

const beyond = {
  groups: [{
    position: whole("Position", 16_000, 0, TRAINED * FACTOR),
    scaling: choice("Scaling", "none", Object.fromEntries(["none", "linear", "ntk", "yarn", "llama3"].map((name) => [name, TITLES[name]]))),
  }],
  plays: { by: "position", speed: 3000 },
  pictures: { faces: { height: 400 } },
  show({ position, scaling }, { faces }) {
    const plain = inverseFrequencies(64, BASE);
    const { frequencies } = scaled(scaling, { dim: 64, base: BASE, factor: FACTOR, trained: TRAINED });
    const clocks = plain.map((each, pair) => {
      const [angle, seen] = [position * frequencies[pair], TRAINED * each];
      return { angle, seen, slot: seen < 2 * Math.PI && angle > seen * ROUNDED ? 2 : 1, name: `pair ${pair}` };
    });
    const strange = clocks.filter(({ slot }) => slot === 2).length;
    faces.show({
      title: `Position ${number(position)}, after training with ${number(TRAINED)} tokens`,
      note: `${strange} of 32 hands point where none pointed in training. One token turns the fastest hand by ${number(frequencies[0], 3)} radians.`,
      legend: [{ name: "seen in training", slot: 1 }, { name: "never seen", slot: 2 }],
      table: () => ({ columns: ["pair", "angle", "largest angle of training"], rows: clocks.map(({ angle, seen }, pair) => [pair, angle, seen]) }),
      draw: (plot) => seenClocks(plot, clocks),
    });
  },
};

export const ESSAY = { shuffle, integers, fractions, bits, waves, added, turn, hands, ladder, beyond, scalings: SCREENS.scalings };
