// The tokens of a text as boxes that follow one another like words on a page.

import { svg } from "../dom.js";

const LETTER = 7.4; // of the monospaced letters in a box
const HEIGHT = 24;
const GAP = 4;

// `pieces`: how each token reads; `titles`: what a pointer is told. hover gets a number or null. Returns {point(number)}.
export function words(plot, { pieces, titles, hover = () => {}, choose = () => {} }) {
  let [x, y] = [0, 2];
  const boxes = pieces.map((piece, at) => {
    const shown = piece.length > 40 ? `${piece.slice(0, 39)}…` : piece;
    const wide = Math.min(plot.width - 2, Math.max(16, shown.length * LETTER + 10));
    if (x && x + wide > plot.width) [x, y] = [0, y + HEIGHT + GAP];
    const box = svg("g", { class: `word slot-${(at % 4) + 1}` },
      svg("rect", { class: "box", x: x + 1, y, width: wide, height: HEIGHT, rx: 4 }),
      svg("text", { x: x + 1 + wide / 2, y: y + 16.5, "text-anchor": "middle" }, shown),
      svg("title", {}, titles[at]));
    x += wide + GAP;
    box.addEventListener("pointerenter", () => hover(at));
    box.addEventListener("pointerleave", () => hover(null));
    box.addEventListener("click", () => choose(at));
    return box;
  });
  plot.svg.append(...boxes);
  const height = y + HEIGHT + 4;
  plot.svg.setAttribute("height", height);
  plot.svg.setAttribute("viewBox", `0 0 ${plot.width} ${height}`);
  plot.svg.parentElement.style.height = `${height}px`;
  return { point: (number) => boxes.forEach((box, at) => box.classList.toggle("pointed", at === number)) };
}
