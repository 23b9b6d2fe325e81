// Rows of boxes: layers, the tokens of a row, and the tokens of a text like words on a page.

import { svg } from "../dom.js";

const LOW = 0.5; // of the height of a layer
const SMALLEST = 22;
const LARGEST = 40;
const COLORS = 6;
const LETTER = 7.4; // of the monospaced letters in a box

// A box that says which it is while it is pointed at, and when it is pressed.
export function watched(box, number, hover, choose) {
  box.addEventListener("pointerenter", () => hover(number));
  box.addEventListener("pointerleave", () => hover(null));
  if (choose) box.addEventListener("click", () => choose(number));
  return box;
}

// The picture is as high as its boxes need.
function fill(plot, boxes, height) {
  plot.svg.append(...boxes);
  plot.svg.setAttribute("height", height);
  plot.svg.setAttribute("viewBox", `0 0 ${plot.width} ${height}`);
  plot.svg.parentElement.style.height = `${height}px`;
}

// Layers in a row, first to last, each in the colour of its kind; those that see a window only are lower.
// layers: [{slot, low, words}]; hover gets the number of one, or null.
export function strip(plot, layers, hover) {
  const step = plot.width / layers.length;
  const gap = Math.min(3, step / 4);
  const width = step - gap;
  const bottom = plot.height - 20;
  plot.svg.append(...layers.map(({ slot, low, words }, number) => {
    const height = bottom * (low ? LOW : 1);
    return watched(svg("rect", { class: `layer slot-${slot}`, x: number * step, y: bottom - height, width, height, rx: Math.min(3, width / 4) }, svg("title", {}, words)), number, hover);
  }));
  const every = [1, 2, 5, 10, 20, 50, 100, 1000].find((each) => layers.length / each <= plot.width / 34) ?? 1000;
  for (let number = 0; number < layers.length; number += every) {
    plot.svg.append(svg("text", { class: "tick", x: number * step + width / 2, y: plot.height - 4, "text-anchor": "middle" }, String(number)));
  }
}

// The tokens of a row in lines: the colour is the document, the number the index; padding is empty.
// tokens: {index, document}; under: a text for each, such as its rank; the first `cached` are paler.
// hover gets the slot or null. Returns {point(slot, attended)}: the slot is framed, others than the attended ones fade.
export function tokens(plot, { index, document, under = null, cached = 0, hover, choose }) {
  const size = Math.max(SMALLEST, Math.min(LARGEST, Math.floor(plot.width / index.length) - 3));
  const columns = Math.max(1, Math.floor(plot.width / (size + 3)));
  const line = (under ? size + 12 : size) + 7;
  const boxes = Array.from(index, (number, slot) => {
    const padding = document[slot] < 0;
    const [x, y] = [(slot % columns) * (size + 3) + 1, Math.floor(slot / columns) * line + 2];
    const told = padding ? "padding" : `index ${number} of document ${document[slot]}${slot < cached ? ", cached" : ""}`;
    return watched(svg("g", { class: `token slot-${(document[slot] % COLORS) + 1}${padding ? " padding" : ""}${slot < cached ? " cached" : ""}` },
      svg("rect", { class: "box", x, y, width: size, height: size, rx: 4 }),
      svg("text", { x: x + size / 2, y: y + size / 2 + 4, "text-anchor": "middle" }, padding ? "" : String(number)),
      under && svg("text", { class: "tick", x: x + size / 2, y: y + size + 11, "text-anchor": "middle" }, under[slot]),
      svg("title", {}, `slot ${slot}: ${told}`)), slot, hover, choose);
  });
  fill(plot, boxes, Math.ceil(index.length / columns) * line + 4);
  return {
    point: (slot, attended) => boxes.forEach((box, at) => {
      box.classList.toggle("pointed", at === slot);
      box.classList.toggle("unseen-by", Boolean(attended) && !attended(at));
    }),
  };
}

// `pieces`: how each token reads; `titles`: what a pointer is told. hover gets a number or null. Returns
// {point(number, weights)}: the token is framed, and where there are weights, each is as dark as its own.
export function words(plot, { pieces, titles, hover, choose }) {
  let [x, y] = [0, 2];
  const boxes = pieces.map((piece, at) => {
    const shown = piece.length > 40 ? `${piece.slice(0, 39)}…` : piece;
    const wide = Math.min(plot.width - 2, Math.max(16, shown.length * LETTER + 10));
    if (x && x + wide > plot.width) [x, y] = [0, y + 28];
    const box = svg("g", { class: `word slot-${(at % 4) + 1}` },
      svg("rect", { class: "box", x: x + 1, y, width: wide, height: 24, rx: 4 }),
      svg("text", { x: x + 1 + wide / 2, y: y + 16.5, "text-anchor": "middle" }, shown),
      svg("title", {}, titles[at]));
    x += wide + 4;
    return watched(box, at, hover, choose);
  });
  fill(plot, boxes, y + 28);
  return {
    point(number, weights) {
      const most = Math.max(...(weights ?? []));
      boxes.forEach((box, at) => {
        box.classList.toggle("pointed", at === number);
        if (!weights) return;
        box.setAttribute("class", `word slot-1${at === number ? " pointed" : ""}`);
        box.firstChild.style.fillOpacity = (0.75 * weights[at]) / most;
      });
    },
  };
}
