// A saved page has no Python: its numbers are those that it was saved with, and of what has a closed form those of other
// settings, too. Each screen in `FORMS` says, of the answer that was saved, which controls stay, and what follows from
// their values; `tests/explore/test_saved.py` holds both against locant.

import { alibiSlopes, angles, attends, matrix, METHODS, packed, scaled, scoreByDistance, wavelengths } from "./closed_forms.js";
import { settled } from "./controls.js";
import { number } from "./drawing/axes.js";
import { decoded } from "./numbers.js";
import { counted } from "./picture.js";
import { sampled, scoresOf } from "./scores.js";

const [SMALLEST, NEAR] = [1e-6, 128]; // the least change of a frequency, and the most positions of a curve
const LONGEST = 192; // tokens of a row
const [POINTS, SIDE, VISIBLE] = [256, 128, 16]; // of a curve, of a map, and the scores below the highest that are drawn

export class Saved {
  constructor(answer) {
    this.held = decoded(answer);
    this.forms = FORMS[this.held.screen]?.(this.held) || { controls: {} };
  }

  // Of settings that are asked for, those that there is an answer to.
  taken(values) {
    return Object.fromEntries(Object.entries(values).filter(([name]) => name === "theme" || name in this.forms.controls));
  }

  async ask(_, given) {
    const { values, controls } = settled([this.forms.controls], this.taken(given));
    const still = Object.entries(this.held.controls).filter(([name]) => !(name in this.forms.controls)).map(([name, control]) => [name, { ...control, kind: "still" }]);
    const texts = Object.keys(controls).map((name) => [name, String(values[name])]);
    const state = { ...this.held.state, ...Object.fromEntries(texts) };
    const isHeld = texts.every(([name]) => values[name] === (this.held.controls[name]?.value ?? values[name]));
    const numbers = isHeld ? this.held.numbers : { ...this.held.numbers, python: {}, ...this.forms.numbers(values) };
    return { ...this.held, state, controls: { ...controls, ...Object.fromEntries(still) }, numbers };
  }
}

const of = (controls, names) => Object.fromEntries(names.filter((name) => name in controls).map((name) => [name, controls[name]]));

const FORMS = {
  rotary: ({ controls }) => METHODS.includes(controls.scaling.value) && {
    controls: { ...controls, scaling: { ...controls.scaling, choices: METHODS }, pair: { ...controls.pair, high: ({ head_dim: dim }) => dim / 2 - 1 } },
    numbers: clocks,
  },

  rows: ({ controls, numbers }) => {
    const isPacked = controls.indices.value === "counted" && controls.side.value === "right" && !numbers.cached && numbers.work.length === 1;
    return { controls: of(controls, ["at", "direction", "window", ...(isPacked ? ["documents", "padding"] : [])]), numbers: (values) => row(values, numbers, isPacked) };
  },

  compare: ({ controls, numbers }) => {
    const drawn = numbers.encodings.filter(({ mean }) => mean);
    const closed = drawn.filter(({ name, slot }) => CLOSED.includes(name) && METHODS.includes(controls[`${slot}.scaling`]?.value ?? "none"));
    const own = closed.map(({ name, slot }) => ({ ...of(controls, [`${slot}.base`, `${slot}.slope`]), ...(name === "rotary" && scalingOf(controls, slot)) }));
    const shared = of(controls, drawn.length === closed.length ? ["length", "alike", "head", "at"] : ["at"]);
    return { controls: Object.assign(shared, ...own), numbers: (values) => scores({ ...defaults(controls), ...values }, numbers, closed) };
  },
};

function clocks({ head_dim: dim, base, trained, scaling, factor, position, pair }) {
  const sizes = { dim, base, factor, trained };
  const usual = Math.round(trained * factor);
  const length = ["dynamic", "longrope"].includes(scaling) ? Math.max(usual, position + 1) : usual;
  const plain = scaled("none", sizes).frequencies;
  const { frequencies } = scaled(scaling, { ...sizes, length });
  const slowed = (method) => scaled(method, sizes).frequencies.map((each, at) => plain[at] / each);
  const names = METHODS.filter((name) => name !== "none");
  const stretch = matrix(names.length, plain.length, (at, one) => slowed(names[at])[one]);
  const positions = sampled(trained, NEAR);
  const moved = (method) => {
    const now = scaled(method, sizes).frequencies;
    return scoreByDistance(scaled(method, { ...sizes, length: trained }).frequencies.map((each, at) => each - now[at]), positions);
  };
  return {
    position, pair, trained, length, scaling, plain: wavelengths(plain), ...angles(frequencies, position), wavelengths: wavelengths(frequencies),
    rotations: frequencies.map((each) => (position * each) / (2 * Math.PI)), bands: bandsOf(frequencies.map((each, at) => plain[at] / each)),
    methods: { names, stretch, most: Math.max(1.001, ...stretch) },
    cache: { positions, curves: { dynamic: moved("dynamic"), longrope: moved("longrope") }, kept: names.filter((name) => !["dynamic", "longrope"].includes(name)) },
  };
}

// What a scaling does to each pair.
function bandsOf(stretches) {
  const most = Math.max(...stretches);
  return stretches.map((each) => {
    if (Math.abs(each - 1) <= SMALLEST) return "kept";
    return most - 1 > SMALLEST && Math.abs(each / most - 1) <= SMALLEST ? "stretched" : "between";
  });
}

function row({ at, direction, window, documents, padding }, held, isPacked) {
  const lengths = isPacked ? lengthsOf(documents) : [];
  const packing = isPacked && packed(lengths, lengths.reduce((sum, each) => sum + each, padding));
  const [queries, keys] = isPacked ? Array(2).fill({ ...packing, order: packing.index, rank: packing.index.map(() => 0) }) : [held.queries, held.keys];
  const seenBy = (query, key) => attends({ index: keys.order, document: keys.document }, query + held.cached, key, { causal: direction === "causal", window });
  const [down, across] = [queries.index.length, keys.index.length];
  const pairs = matrix(down, across, (query, key) => (seenBy(query, key) ? queries.order[query] - keys.order[key] : NaN));
  const seen = counted(down).map((query) => pairs.slice(query * across, (query + 1) * across).filter((each) => !Number.isNaN(each)).length);
  const work = held.work.map((_, rank) => seen.reduce((sum, each, query) => sum + (queries.rank[query] === rank ? each : 0), 0));
  return { at: Math.min(at, down - 1), queries, keys, pairs, seen, work, backend: null };
}

function lengthsOf(text) {
  const lengths = text.split(/[\s,]+/).filter(Boolean).map(Number);
  const total = lengths.reduce((sum, each) => sum + each, 0);
  if (lengths.every((each) => Number.isInteger(each) && each > 0) && total > 0 && total <= LONGEST) return lengths;
  throw new Error(`got “${text}” for documents, expected lengths of 1 to ${LONGEST} tokens in all. Try: 5, 3, 8`);
}

const CLOSED = ["nope", "alibi", "t5", "sinusoidal", "rotary"];
const defaults = (controls) => Object.fromEntries(Object.entries(controls).map(([name, { value }]) => [name, value]));

function scalingOf(controls, slot) {
  const [name, isScaled] = [`${slot}.scaling`, (values) => values[`${slot}.scaling`] !== "none"];
  return {
    [name]: { ...controls[name], choices: METHODS },
    [`${slot}.factor`]: { kind: "real", value: 4, low: 1, high: 128, log: true, ...controls[`${slot}.factor`], when: isScaled },
    [`${slot}.trained`]: { kind: "whole", value: 4096, low: 1, high: 2 ** 17, log: true, step: 1, ...controls[`${slot}.trained`], when: isScaled },
  };
}

// The curve and the map of each encoding of a closed form, for the contents that the page was saved with.
function scores(values, held, closed) {
  const { length, alike, head, at } = values;
  const [distances, positions] = [sampled(length, POINTS), sampled(length, SIDE)];
  const encodings = held.encodings.map((one) => {
    if (!closed.includes(one)) return one;
    const own = (name) => values[`${one.slot}.${name}`];
    const options = { alike, length, head, base: own("base"), scaling: own("scaling"), factor: own("factor"), trained: own("trained"), slope: own("slope") };
    return { ...one, label: labelOf(one.name, options), ...scoresOf(one.name, options, held.contents, distances, positions) };
  });
  const means = encodings.flatMap(({ mean }) => Array.from(mean ?? []));
  const high = Math.max(...means);
  return { length, distances, positions, at: Math.min(at, length - 1), encodings, high, low: Math.max(Math.min(...means), high - VISIBLE) };
}

function labelOf(name, { base, scaling = "none", factor, slope }) {
  return [
    name, ...(base === undefined || base === 10_000 ? [] : [`base ${number(base, 6)}`]), ...(scaling === "none" ? [] : [`${scaling} ×${number(factor, 6)}`]),
    ...(slope === undefined ? [] : [`slope ${number(slope)}`]),
  ].join(", ");
}
