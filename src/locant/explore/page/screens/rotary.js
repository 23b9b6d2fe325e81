// Rotary: clocks at a position, the wavelengths, scalings side by side, cached keys, and the rounding of angles.

import { showCurves, showMap } from "../charts.js";
import { controlGroup, move, split } from "../controls.js";
import { html } from "../dom.js";
import { number } from "../drawing/axes.js";
import { dials, largeDial } from "../drawing/dials.js";
import { counted, Picture } from "../picture.js";

const BANDS = {
  kept: { name: "unchanged by the scaling", slot: 3 },
  between: { name: "in between", slot: 5 },
  stretched: { name: "slowed by the most", slot: 2 },
  still: { name: "not rotated", slot: 8 },
};

export function open(place, page) {
  const { side, pictures } = split(place);
  const controls = [
    { position: { label: "Position" }, pair: { label: "Pair" } },
    {
      head_dim: { label: "Dimensions of a head" }, base: { label: "Base" },
      trained: { label: "Trained length", unit: "tokens" }, scaling: { label: "Scaling" }, factor: { label: "Factor" },
    },
  ].map((named) => controlGroup(side, page, named)[1]);
  const clocks = html("div", { class: "beside" });
  pictures.append(clocks);
  const one = new Picture(clocks, page, { name: "clock", height: 260 });
  const all = new Picture(clocks, page, { name: "clocks", height: 260 });
  const waves = new Picture(pictures, page, { name: "wavelengths", height: 300 });
  const methods = new Picture(pictures, page, { name: "methods", height: 230 });
  const lost = html("div", { class: "grid" });
  pictures.append(lost);
  const cache = new Picture(lost, page, { name: "cached-keys", height: 280 });
  const precision = new Picture(lost, page, { name: "precision", height: 280 });
  let last = null;

  // One pair in all pictures.
  function point(at) {
    const { numbers } = last;
    const pair = at ?? numbers.pair;
    all.point(pair);
    waves.point(pair);
    methods.point(numbers.methods.names.indexOf(numbers.scaling), pair);
    all.note.textContent = `pair ${pair}: ${told(numbers, pair)}`;
    waves.read([tokens(numbers.plain[pair]), numbers.scaling === "none" ? "" : tokens(numbers.wavelengths[pair])]);
    const { names, stretch } = numbers.methods;
    methods.note.textContent = `Pair ${pair}: ${names.map((name, row) => `${name} ×${number(stretch[row * numbers.cos.length + pair], 3)}`).join(", ")}.`;
  }

  function show(answer) {
    last = answer;
    for (const each of controls) each.show(answer.controls);
    const { numbers } = answer;
    showClocks(numbers);
    showWavelengths(numbers);
    showMethods(numbers);
    showCache(numbers);
    showPrecision(numbers);
    point();
  }

  function showClocks(numbers) {
    const { cos, sin, bands, pair, position, python, rotations, wavelengths } = numbers;
    const table = () => ({
      columns: ["pair", "cosine", "sine", "rotations", "wavelength", "band"],
      rows: Array.from(cos, (_, at) => [at, cos[at], sin[at], rotations[at], wavelengths[at] ?? "endless", BANDS[bands[at]].name]),
    });
    const shown = Object.entries(BANDS).filter(([band]) => bands.includes(band) && numbers.scaling !== "none");
    one.show({
      title: `Pair ${pair} at position ${number(position)}`,
      note: told(numbers, pair),
      table, python,
      draw: (plot) => largeDial(plot, {
        cos: cos[pair], sin: sin[pair], kind: kindOf(numbers, pair), words: `${number(rotations[pair])} rotations`,
        turn: (radians, settled) => turn(radians, settled),
      }),
    });
    all.show({
      title: "All pairs, the fastest first",
      legend: shown.map(([, { name, slot }]) => ({ name, slot, box: true })),
      table, python,
      draw: (plot) => dials(plot, {
        cos, sin, kinds: bands.map((_, at) => kindOf(numbers, at)), chosen: pair,
        choose: (at) => page.change({ pair: at }), hover: point,
      }),
    });
  }

  // Dragging the hand moves the position by as many tokens as that turn takes.
  let moved = 0;
  function turn(radians, settled) {
    const { numbers } = last;
    const wavelength = numbers.wavelengths[numbers.pair];
    if (!wavelength) return;
    moved += (radians / (2 * Math.PI)) * wavelength;
    const step = Math.trunc(moved);
    if (!step && !settled) return;
    moved -= step;
    if (settled) moved = 0;
    move(page, "position", { now: numbers.position, step, high: last.controls.position.high, settled });
  }

  function showWavelengths({ plain, wavelengths, trained, length, scaling, python }) {
    const scaled = scaling !== "none";
    const { titles } = last.controls.scaling;
    showCurves(waves, {
      title: "Wavelength of each pair", python,
      note: "The number of tokens in one full turn of a pair. A pair above the trained length did not complete a turn in training: at farther positions it has angles that the model has not seen.",
      x: { values: counted(plain.length), label: "pair of dimensions" }, y: { label: "wavelength (tokens)", log: true },
      series: [{ name: "without a scaling", values: plain, slot: 1 }, ...(scaled ? [{ name: titles[scaling] ?? scaling, values: wavelengths, slot: 2 }] : [])],
      levels: [{ at: trained, label: `trained: ${number(trained)}` }, ...(scaled ? [{ at: length, label: `scaled to: ${number(length)}` }] : [])],
      hover: point,
    });
  }

  function showMethods({ methods: { names, stretch, most }, python }) {
    showMap(methods, {
      title: "How much each scaling slows each pair", note: " ", python,
      corner: "scaling", columns: counted(stretch.shape[1]).map((at) => `pair ${at}`), rows: names,
      values: stretch, x: { label: "pair of dimensions" }, y: { label: "", format: (row) => names[row], every: true, wide: 74 },
      color: { map: "one", low: 1, high: most, label: "times", log: true },
      hover: (row, column) => point(column),
    });
  }

  function showCache({ cache: { positions, curves, kept }, trained, length, python }) {
    const { titles } = last.controls.scaling;
    showCurves(cache, {
      title: "Keys cached before the sequence grew", python,
      note: `Keys cached at ${number(trained)} tokens, compared with keys that are rotated for ${number(length)}: 1 if equal, 0 without any position. ${kept.join(", ")} keep cached keys correct, and Rotary.rerotate corrects them for the others.`,
      x: { values: positions, label: "position of the key (tokens)" }, y: { label: "fit of the key", high: 1.05 },
      series: Object.entries(curves).map(([name, values], at) => ({ name: titles[name] ?? name, values, slot: at + 1 })),
    });
  }

  function showPrecision({ precision: { position, positions, curves, pairs }, python }) {
    const names = Object.keys(curves);
    const read = (at) => {
      precision.point(at);
      precision.note.textContent = `The largest error of a cosine, by position. At position ${number(at === null ? position : Math.round(positions[at]))}:`;
      precision.read(names.map((name) => number(at === null ? Math.max(...pairs[name]) : curves[name][at], 3)));
    };
    showCurves(precision, {
      title: `Error of rounded angles${python.precision ? "" : ", as saved"}`, note: " ", python,
      x: { values: positions, label: "position", log: true }, y: { label: "error of a cosine", log: true, low: 1e-8, high: 2.5 },
      series: names.map((name, at) => ({ name, values: curves[name], slot: at + 1 })),
      marks: position > 0 ? [{ at: position, label: "" }] : [],
      hover: read,
    });
    read(null);
  }

  const keys = Object.fromEntries([["position", "Position", false], ["pair", "Pair", true]].map(([name, words, settled]) =>
    [name, (step) => move(page, name, { now: last.numbers[name], step, high: last.controls[name].high, settled }, words)]));
  return { show, keys };
}

function kindOf({ bands, scaling }, pair) {
  return scaling === "none" ? "slot-1" : `slot-${BANDS[bands[pair]].slot}`;
}

function told({ wavelengths, plain, rotations }, pair) {
  const wavelength = wavelengths[pair];
  if (!wavelength) return "not rotated: it carries no position";
  const slowed = wavelength / plain[pair];
  return `wavelength ${tokens(wavelength)}, ${number(rotations[pair])} rotations so far${slowed > 1.000001 ? `, slowed ×${number(slowed, 3)}` : ""}`;
}

function tokens(wavelength) {
  return wavelength ? `${number(wavelength, 3)} tokens` : "endless";
}
