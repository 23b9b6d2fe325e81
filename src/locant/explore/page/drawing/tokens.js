// The tokens of a row as boxes in lines: the colour is the document, the number the index; padding is empty.

import { svg } from "../dom.js";

const GAP = 3;
const SMALLEST = 22;
const LARGEST = 40;
const COLORS = 6;

// tokens: {index, document}; under: a text for each, such as its rank; the first `cached` are paler.
// hover gets the slot or null. Returns {point(slot, attended)}: the slot is framed, others than the attended ones fade.
export function tokens(plot, { index, document, under = null, cached = 0, hover = () => {}, choose = () => {} }) {
  const size = Math.max(SMALLEST, Math.min(LARGEST, Math.floor(plot.width / index.length) - GAP));
  const columns = Math.max(1, Math.floor(plot.width / (size + GAP)));
  const high = under ? size + 12 : size;
  const boxes = Array.from(index, (number, slot) => {
    const padding = document[slot] < 0;
    const [x, y] = [(slot % columns) * (size + GAP), Math.floor(slot / columns) * (high + GAP + 4) + 2];
    const box = svg("g", { class: `token slot-${(document[slot] % COLORS) + 1}${padding ? " padding" : ""}${slot < cached ? " cached" : ""}` },
      svg("rect", { class: "box", x: x + 1, y, width: size, height: size, rx: 4 }),
      svg("text", { x: x + 1 + size / 2, y: y + size / 2 + 4, "text-anchor": "middle" }, padding ? "" : String(number)),
      under && svg("text", { class: "tick", x: x + 1 + size / 2, y: y + size + 11, "text-anchor": "middle" }, under[slot]));
    box.append(svg("title", {}, told(number, document[slot], slot, slot < cached)));
    box.addEventListener("pointerenter", () => hover(slot));
    box.addEventListener("pointerleave", () => hover(null));
    box.addEventListener("click", () => choose(slot));
    return box;
  });
  plot.svg.append(...boxes);
  const lines = Math.ceil(index.length / columns);
  plot.svg.setAttribute("height", lines * (high + GAP + 4) + 4);
  plot.svg.parentElement.style.height = `${lines * (high + GAP + 4) + 4}px`;
  plot.svg.setAttribute("viewBox", `0 0 ${plot.width} ${lines * (high + GAP + 4) + 4}`);
  return {
    point(slot, attended) {
      boxes.forEach((box, at) => {
        box.classList.toggle("pointed", at === slot);
        box.classList.toggle("unseen-by", Boolean(attended) && !attended(at));
      });
    },
  };
}

function told(index, document, slot, cached) {
  if (document < 0) return `slot ${slot}: padding`;
  return `slot ${slot}: index ${index} of document ${document}${cached ? ", cached" : ""}`;
}
