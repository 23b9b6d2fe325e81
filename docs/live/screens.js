// The screens that need no Python: each is a figure with its settings, drawn from closed forms.

import { alibi, alibiSlopes, angles, attends, inverseFrequencies, matrix, METHODS, packed, scaled, scoreByDistance, t5Bucket, wavelengths } from "../closed_forms.js";
import { number } from "../drawing/axes.js";
import { tokens } from "../drawing/boxes.js";
import { dials, largeDial } from "../drawing/dials.js";
import { heatMap } from "../drawing/heat_map.js";
import { lineChart } from "../drawing/line_chart.js";
import { counted, mapTable } from "../picture.js";
import { choice, real, text, whole } from "./figure.js";

export const TITLES = {
  none: "none", linear: "linear (position interpolation)", ntk: "NTK-aware", dynamic: "dynamic NTK", yarn: "YaRN",
  longrope: "LongRoPE (unsearched)", llama3: "Llama 3",
};
const LENGTHS = 8; // documents that are shown
const LONGEST = 32; // tokens of one

const SHAPE = {
  head_dim: whole("Dimensions of a head", 64, 4, 256, { step: 2 }),
  base: real("Base", 10_000, 2, 1e9, { log: true }),
};
const scaling = (first) => ({
  scaling: choice("Scaling", first, TITLES),
  trained: whole("Trained length", 4096, 16, 2 ** 20, { log: true, unit: "tokens", when: isScaled }),
  factor: real("Factor", 8, 1, 64, { log: true, when: isScaled }),
});
const isScaled = (values) => values.scaling !== "none";

const sizesOf = ({ head_dim: dim, base, factor, trained }) => ({ dim, base, factor, trained });
const inWords = ({ scaling: method, factor }) => (method === "none" ? "none" : `${TITLES[method]}, factor ${number(factor, 3)}`);

// The Python that makes the same encoding.
function made({ head_dim: dim, base, scaling: method, factor, trained }) {
  const head = "from locant import Positions, Rotary\n";
  if (method === "none") return `${head}\nrotary = Rotary(${dim}, base=${base})\n`;
  return `${head}from locant.positions.scaling import scaling_by_name\n
scaling = scaling_by_name("${method}:${factor}", ${trained}, ${dim}, ${base})
rotary = Rotary(${dim}, base=${base}, scaling=scaling).for_length(${Math.round(trained * factor)})\n`;
}

const clocks = {
  title: "Clocks",
  about: "RoPE turns every pair of dimensions like the hand of a clock: fast hands tell neighbours apart, slow hands tell far tokens apart.",
  groups: [
    { position: whole("Position", 100, 0, 2 ** 20, { log: true }), pair: whole("Pair", 8, 0, ({ head_dim: dim }) => dim / 2 - 1) },
    { ...SHAPE, ...scaling("none") },
  ],
  plays: { by: "position", speed: 12 },
  pictures: { clock: { height: 260 }, clocks: { height: 260 }, wavelengths: { height: 300 } },
  rows: [["clock", "clocks"]],
  show(values, { clock, clocks: all, wavelengths: waves }, change) {
    const { position, pair, scaling: method, trained, factor } = values;
    const plain = wavelengths(inverseFrequencies(values.head_dim, values.base));
    const { frequencies } = scaled(method, sizesOf(values));
    const { cos, sin } = angles(frequencies, position);
    const turns = frequencies.map((each) => (position * each) / (2 * Math.PI));
    const lengths = wavelengths(frequencies);
    const slot = "slot-1";
    const told = (at) => `Pair ${at}: one turn in ${number(lengths[at], 3)} tokens, ${number(turns[at], 3)} turns so far.`;
    const table = () => ({ columns: ["pair", "cosine", "sine"], rows: cos.map((each, at) => [at, each, sin[at]]) });
    const python = `${made(values)}cos, sin = rotary.cos_sin(Positions.of([[${position}]]))\nvalues = zip(range(${cos.length}), (cos / rotary.scaling.effective_attention_factor)[0, 0], (sin / rotary.scaling.effective_attention_factor)[0, 0])\n`;
    clock.show({
      title: `Pair ${pair} at position ${number(position)}`, note: told(pair), table, python,
      draw: (plot) => largeDial(plot, {
        cos: cos[pair], sin: sin[pair], kind: slot, words: `${number(turns[pair], 3)} turns`,
        turn: (radians, isSettled) => change({ position: Math.round(Math.max(0, Math.min(2 ** 20, position + radians / frequencies[pair]))) }, { settled: isSettled }),
      }),
    });
    all.show({
      title: "All pairs, the fastest first", note: "Press one to see it large.", table, python,
      draw: (plot) => dials(plot, {
        cos, sin, kinds: cos.map(() => slot), chosen: pair, choose: (at) => change({ pair: at }),
        hover: (at) => (all.note.textContent = at === null ? "Press one to see it large." : told(at)),
      }),
    });
    const shape = JSON.stringify({ ...values, position: null, pair: null });
    if (waves.shape === shape) return; // so that a hand moves without it
    waves.shape = shape;
    waves.show({
      title: "Tokens in one turn",
      note: "The wavelength of each pair.",
      legend: [{ name: "without a scaling", slot: 1 }, ...(isScaled(values) ? [{ name: inWords(values), slot: 2 }] : [])],
      table: () => ({ columns: ["pair", "without", "with"], rows: plain.map((each, at) => [at, each, lengths[at]]) }),
      python: `${made(values)}from math import pi\n\nplain = Rotary(${values.head_dim}, base=${values.base})\nvalues = zip(range(${plain.length}), 2 * pi / plain.inv_freq, 2 * pi / rotary.inv_freq)\n`,
      draw: (plot) => lineChart(plot, {
        x: { values: counted(plain.length), label: "pair of dimensions" }, y: { label: "wavelength (tokens)", log: true },
        series: [{ values: plain, slot: 1 }, ...(isScaled(values) ? [{ values: lengths, slot: 2 }] : [])],
        levels: isScaled(values) ? [{ at: trained, label: `trained: ${number(trained)}` }, { at: trained * factor, label: `scaled to: ${number(Math.round(trained * factor))}` }] : [],
        hover: (at) => {
          waves.drawn?.point(at);
          waves.read(at === null ? [] : [plain[at], lengths[at]].map((each) => number(each)));
        },
      }),
    });
  },
};

const distance = {
  title: "Score by distance",
  about: "The score that RoPE gives two equal vectors, by their distance: the mean cosine over all pairs. The queries and keys of a model weight the pairs differently.",
  groups: [
    { length: whole("Farthest distance", 512, 16, 65_536, { log: true, unit: "tokens" }) },
    { ...SHAPE, ...scaling("linear") },
  ],
  pictures: { score: { height: 360 } },
  show(values, { score }) {
    const step = Math.max(1, Math.ceil(values.length / 1024));
    const at = counted(Math.floor(values.length / step) + 1).map((each) => each * step);
    const series = ["none", ...(isScaled(values) ? [values.scaling] : [])].map((method, index) => ({
      name: index ? inWords(values) : "RoPE", slot: index + 1, values: scoreByDistance(scaled(method, sizesOf(values)).frequencies, at),
    }));
    score.show({
      title: "Mean cosine by distance",
      note: "1 if both are at the same position. A scaling moves the curve to the right.",
      legend: series,
      table: () => ({ columns: ["distance", ...series.map(({ name }) => name)], rows: at.map((each, row) => [each, ...series.map((one) => one.values[row])]) }),
      python: `${made(values)}import torch

distances = torch.arange(${at.length}) * ${step}
each = [Rotary(${values.head_dim}, base=${values.base}), rotary][: ${series.length}]
values = zip(distances, *((distances[:, None] * one.inv_freq).cos().mean(-1) for one in each))
`,
      draw: (plot) => lineChart(plot, {
        x: { values: at, label: "distance of query and key (tokens)" }, y: { label: "mean cosine", high: 1.03 }, series,
        hover: (index) => {
          score.drawn?.point(index);
          score.read(index === null ? [] : series.map((one) => number(one.values[index], 3)));
        },
      }),
    });
  },
};

const biases = {
  title: "ALiBi and T5",
  about: "Two encodings that add a number to every score. ALiBi computes it from the distance and the head. T5 learns one for each bucket of distances.",
  groups: [
    { tokens: whole("Tokens", 64, 8, 256, { log: true }), both: choice("Keys after the query", "no", { no: "hidden (causal)", yes: "seen (both directions)" }) },
    { heads: whole("Heads (ALiBi)", 8, 1, 64), head: whole("Head", 2, 0, ({ heads }) => heads - 1) },
    { buckets: whole("Buckets (T5)", 32, 4, 64, { step: 2 }), most: whole("Farthest distance (T5)", 128, ({ buckets }) => buckets, 1024, { log: true }) },
  ],
  pictures: { alibi: { height: 380, square: true }, t5: { height: 380, square: true } },
  rows: [["alibi", "t5"]],
  show({ tokens: count, both, heads, head, buckets, most }, pictures) {
    const bidirectional = both === "yes";
    const slope = alibiSlopes(heads)[head];
    const seen = (entry) => matrix(count, count, (query, key) => (!bidirectional && key > query ? NaN : entry(query - key)));
    const axis = { x: { label: "key" }, y: { label: "query" } };
    const show = (picture, title, note, values, color, python) => picture.show({
      title, note, python,
      table: () => mapTable("query \\ key", counted(count).map(String), counted(count), values),
      draw: (plot) => heatMap(plot, {
        values, ...axis, color: { map: "one", ...color },
        hover: (row, column) => {
          picture.drawn?.point(row, column);
          const value = values[row * count + column];
          picture.note.textContent = Number.isFinite(value) ? `Query ${row}, key ${column}: ${color.label} ${number(value)}.` : note;
        },
      }),
    });
    const after = (rows) => `values = ${rows}\n${bidirectional ? "" : `values = values.double().masked_fill(torch.ones(${count}, ${count}).triu(1).bool(), torch.nan)\n`}`;
    show(pictures.alibi, `ALiBi, head ${head} of ${heads}`, `Slope ${number(slope)}: each token of distance costs as much.`,
      seen((each) => alibi(slope, each)), { low: -slope * (count - 1), high: 0, label: "bias" },
      `import torch\n\nfrom locant import ALiBi\n\n${after(`ALiBi(${heads}).matrix(${count})[${head}]`)}`);
    show(pictures.t5, "T5's buckets", `Pairs in one bucket share one learned number for each head. From ${number(most)} tokens on, all distances are one.`,
      seen((each) => t5Bucket(each, { buckets, most, bidirectional })), { low: 0, high: buckets - 1, label: "bucket" },
      `import torch\n\nfrom locant import T5Bias\n\nbias = T5Bias(1, num_buckets=${buckets}, max_distance=${most}, bidirectional=${bidirectional ? "True" : "False"})\nindex = torch.arange(${count})\n${after("bias.buckets(index[:, None] - index)")}`);
  },
};

const scalings = {
  title: "Scalings",
  about: "To extend the context beyond the training length, every scaling slows some pairs down. Scalings differ in the pairs and in the factor.",
  groups: [{ ...SHAPE, trained: whole("Trained length", 4096, 16, 2 ** 20, { log: true, unit: "tokens" }), factor: real("Factor", 8, 1, 64, { log: true }) }],
  pictures: { methods: { height: 250 }, curves: { height: 320 } },
  show(values, { methods, curves }) {
    const { head_dim: dim, base, trained, factor } = values;
    const names = METHODS.filter((each) => each !== "none");
    const plain = inverseFrequencies(dim, base);
    const slowed = names.map((name) => scaled(name, sizesOf(values)).frequencies.map((each, at) => plain[at] / each));
    const map = matrix(names.length, plain.length, (row, column) => slowed[row][column]);
    const series = names.flatMap((name, at) => (name === "longrope" ? [] : [{ name: TITLES[name], slot: at + 1, values: slowed[at] }])); // which is YaRN's
    const once = plain.filter((each) => trained * each < 2 * Math.PI).length;
    const python = `import torch

from locant import Rotary
from locant.positions.scaling import scaling_by_name

plain = Rotary(${dim}, base=${base})
names = ${JSON.stringify(names)}
each = [Rotary(${dim}, base=${base}, scaling=scaling_by_name(f"{name}:${factor}", ${trained}, ${dim}, ${base})) for name in names]
values = torch.stack([plain.inv_freq / rotary.for_length(${Math.round(trained * factor)}).inv_freq for rotary in each])
`;
    const table = () => mapTable("scaling", counted(plain.length).map((at) => `pair ${at}`), names, map);
    const point = (column, row) => {
      methods.drawn?.point(column === null ? null : row ?? 0, column);
      curves.drawn?.point(column);
      curves.read(column === null ? [] : series.map((one) => `×${number(one.values[column], 3)}`));
      methods.note.textContent = column === null ? resting : `Pair ${column}, one turn in ${number((2 * Math.PI) / plain[column], 3)} tokens: ${names.map((name, at) => `${name} ×${number(slowed[at][column], 3)}`).join(", ")}.`;
    };
    const resting = `${once} of ${plain.length} pairs turn less than once within ${number(trained)} tokens.`;
    methods.show({
      title: "How much each scaling slows each pair", note: resting, table, python,
      draw: (plot) => heatMap(plot, {
        values: map, x: { label: "pair of dimensions, the fastest first" }, y: { label: "", format: (row) => names[row], every: true, wide: 74 },
        color: { map: "one", low: 1, high: Math.max(1.001, ...map), label: "times", log: true }, hover: (row, column) => point(column ?? null, row),
      }),
    });
    curves.show({
      title: "The same as curves", legend: series, table, python,
      draw: (plot) => lineChart(plot, {
        x: { values: counted(plain.length), label: "pair of dimensions, the fastest first" }, y: { label: "slowed by", log: true, low: 1, high: Math.max(1.001, ...map) * 1.1 },
        series, hover: (at) => point(at),
      }),
    });
  },
};

const packing = {
  title: "Packing",
  about: "Several documents in one row: every document counts from 0, and no token attends to another document.",
  groups: [
    { lengths: text("Lengths of the documents", "5, 8, 3"), padding: whole("Padding", 2, 0, 32) },
    { causal: choice("Attention", "yes", { yes: "causal", no: "both directions" }), window: whole("Sliding window (0: none)", 0, 0, 32) },
  ],
  pictures: { row: { height: 60 }, mask: { height: 460, square: true } },
  show({ lengths: written, padding, causal, window }, { row: boxes, mask }) {
    const lengths = written.split(/[\s,;+]+/).map(Number).filter((each) => Number.isInteger(each) && each >= 0 && each <= LONGEST).slice(0, LENGTHS);
    const total = lengths.reduce((sum, each) => sum + each, 0) + padding;
    const row = packed(lengths, total);
    const allowed = (query, key) => attends(row, query, key, { causal: causal === "yes", window });
    const values = matrix(total, total, (query, key) => (allowed(query, key) ? row.index[query] - row.index[key] : NaN));
    const pairs = values.reduce((sum, each) => sum + (Number.isNaN(each) ? 0 : 1), 0);
    const table = () => mapTable("query \\ key", counted(total).map(String), counted(total), values);
    const python = `from locant import Positions\n
positions = Positions.packed(${JSON.stringify(lengths)}, length=${total})
allowed = positions.mask(causal=${causal === "yes" ? "True" : "False"}, window=${window || "None"})[0, 0]
index = positions.index[0].double()
values = (index[:, None] - index).masked_fill(~allowed, float("nan"))
`;
    const point = (query, key) => {
      boxes.drawn?.point(query, query === null ? null : (at) => allowed(query, at));
      mask.drawn?.point(query, key ?? query);
      const many = query === null ? 0 : counted(total).filter((at) => allowed(query, at)).length;
      boxes.note.textContent = query === null ? "The number is the index in the document. Point at a token to see what it attends to."
        : row.document[query] < 0 ? `Slot ${query} is padding: it attends to nothing.`
        : `Token ${row.index[query]} of document ${row.document[query]} attends to ${many} ${many === 1 ? "token" : "tokens"}.`;
    };
    boxes.show({
      title: `${lengths.length} document${lengths.length === 1 ? "" : "s"} in a row of ${total} tokens`, note: " ", table, python,
      draw: (plot) => tokens(plot, { ...row, hover: (at) => point(at), choose: (at) => point(at) }),
    });
    mask.show({
      title: "The attention mask",
      note: `${number(pairs)} of ${number(total ** 2)} pairs are computed; one document of that length would have ${number(causal === "yes" ? (total * (total + 1)) / 2 : total ** 2)}.`,
      table, python,
      draw: (plot) => heatMap(plot, {
        values, x: { label: "key (slot)" }, y: { label: "query (slot)" },
        color: { map: "one", low: causal === "yes" ? 0 : 1 - Math.max(1, ...lengths), high: Math.max(1, ...lengths) - 1 || 1, label: "distance" },
        hover: (query, key) => point(query ?? null, key),
      }),
    });
    point(null);
  },
};

export const SCREENS = { clocks, distance, biases, scalings, packing };
