// Images and video: frames of a grid, the index of every token, and which pair turns with which axis.

import { showCurves, showMap, showStrip } from "../charts.js";
import { controlGroup, move, split } from "../controls.js";
import { html } from "../dom.js";
import { number } from "../drawing/axes.js";
import { counted, Picture } from "../picture.js";

const SCHEMES = {
  contiguous: "in sections (Qwen2-VL)", stride: "every third pair (Qwen3-VL)",
  turns: "rows and columns alternate (ERNIE)", axial: "own frequencies for each axis (vision encoders)", heads: "heads in groups (MHRoPE)",
};
const AFTER = { largest: "after the largest index", sides: "after rows and columns" };
const SLOTS = [2, 1, 3]; // of the axes
const FRAMES = 6; // that are drawn

export function open(place, page) {
  const { side, pictures } = split(place);
  const controls = [
    { frames: { label: "Frames" }, step: { label: "From frame to frame", unit: "indices" }, rows: { label: "Rows" }, columns: { label: "Columns" } },
    { before: { label: "Text before", unit: "tokens" }, after: { label: "Text after", unit: "tokens" }, continue_from: { label: "Text continues", titles: AFTER }, at: { label: "Token" } },
    {
      scheme: { label: "Frequencies", titles: SCHEMES }, pairs: { label: "Pairs", also: { frame_pairs: null, row_pairs: null } },
      group: { label: "Heads for the" }, frame_pairs: { label: "Pairs for frames" }, row_pairs: { label: "Pairs for rows" }, base: { label: "Base" },
    },
  ].map((named) => controlGroup(side, page, named)[1]);
  const told = html("p", { class: "note" });
  const frames = html("div", { class: "grid" });
  pictures.append(html("section", { class: "titled" }, html("h2", {}, "Similarity of every position to the chosen token"), told, frames));
  const shown = [];
  const index = new Picture(pictures, page, { name: "index", height: 260 });
  const pairs = new Picture(pictures, page, { name: "pairs", height: 70 });
  const waves = new Picture(pictures, page, { name: "wavelengths", height: 260 });
  let last = null;

  function show(answer) {
    last = answer;
    for (const each of controls) each.show(answer.controls);
    const { numbers } = answer;
    showFrames(numbers);
    showIndex(numbers);
    showPairs(numbers);
    tell(numbers.at);
  }

  function showFrames({ grid: [count, rows, columns], image: [begin], alike: values, python }) {
    const drawn = Math.min(count, FRAMES);
    const least = Math.min(0.999, ...values.slice(begin, begin + count * rows * columns));
    while (shown.length > drawn) shown.pop().figure.remove();
    while (shown.length < drawn) shown.push(new Picture(frames, page, { name: `frame-${shown.length}`, height: 270 }));
    shown.forEach((picture, frame) => {
      const from = begin + frame * rows * columns;
      const cells = Object.assign(values.slice(from, from + rows * columns), { shape: [rows, columns] });
      showMap(picture, {
        title: `Frame ${frame}`, python, corner: "row", columns: counted(columns).map((at) => `column ${at}`), rows: counted(rows),
        values: cells, x: { label: "column" }, y: { label: "row" }, color: { map: "one", low: least, high: 1, label: "cosine" },
        hover: (row, column) => tell(row === undefined ? last.numbers.at : from + row * columns + column),
        press: (row, column) => page.change({ at: from + row * columns + column }),
      });
    });
  }

  function showIndex({ axes, index: values, image: [begin, end], python }) {
    const count = values.shape[0];
    const tokens = counted(count);
    const series = axes.map((name, axis) => ({ name, slot: SLOTS[axis], values: tokens.map((at) => values[3 * at + axis]), steps: true }));
    showCurves(index, {
      title: "The index of every token on every axis", note: noteOf(last.numbers), python, series,
      x: { values: count > 1 ? tokens : [0, 1], label: "token in the row" }, y: { label: "index" },
      marks: [{ at: begin, label: "image" }, ...(end < count ? [{ at: end, label: "text" }] : [])],
      hover: (at) => tell(at ?? last.numbers.at),
    });
  }

  function showPairs({ axes, axis_of_pair: owner, wavelengths, python }) {
    const table = () => ({ columns: ["pair", "axis", "wavelength"], rows: wavelengths.map((wavelength, pair) => [pair, axes[owner[pair]], wavelength]) });
    showStrip(pairs, {
      title: "The axis of each pair", note: "From the first pair to the last.", table, python,
      legend: axes.map((name, axis) => ({ name, slot: SLOTS[axis], box: true, more: `${owner.filter((each) => each === axis).length} pairs` })),
      boxes: wavelengths.map((wavelength, pair) => ({ slot: SLOTS[owner[pair]], words: `Pair ${pair} turns with the ${axes[owner[pair]]}, wavelength ${number(wavelength, 3)}.` })),
    });
    showCurves(waves, {
      title: "Wavelengths, by axis", python,
      note: "The number of positions in one full turn of a pair. An axis without fast pairs cannot tell neighbours apart well.",
      x: { values: counted(wavelengths.length), label: "pair of dimensions" }, y: { label: "wavelength (places)", log: true },
      series: axes.map((name, axis) => ({ name, slot: SLOTS[axis], dots: true, values: wavelengths.map((wavelength, pair) => (owner[pair] === axis ? wavelength : null)) })),
      words: (wavelength) => (wavelength === null ? "" : `${number(wavelength, 3)} places`),
    });
  }

  // One token in all pictures.
  function tell(token) {
    const { axes, index: values, image: [begin, end], grid: [, rows, columns], alike: likeness, at } = last.numbers;
    index.point(token);
    index.read(axes.map((_, axis) => number(values[3 * token + axis])));
    const inside = token >= begin && token < end;
    const within = token - begin;
    shown.forEach((picture, frame) => {
      const isThere = inside && Math.floor(within / (rows * columns)) === frame;
      picture.point(...(isThere ? [Math.floor(within / columns) % rows, within % columns] : []));
    });
    const place = inside ? `row ${Math.floor(within / columns) % rows}, column ${within % columns} of frame ${Math.floor(within / (rows * columns))}` : "text";
    const indices = axes.map((name, axis) => `${values[3 * token + axis]} (${name})`).join(", "); // which count the text before, too
    told.textContent = `Token ${token} (${place}) has the index ${indices}. Its mean cosine to token ${at} over all pairs is ${number(likeness[token], 3)}.`;
  }

  const keys = {
    position: (step) => move(page, "at", { now: last.controls.at.value, step, high: last.controls.at.high, settled: false }, "Token"),
  };
  return { show, keys };
}

function noteOf({ image: [begin, end], index, next }) {
  const after = index.shape[0] > end ? `, and text continues at ${next}` : "";
  return `The ${number(end - begin)} tokens of the image take up ${next - begin} indices, from ${begin} on${after}.`;
}
