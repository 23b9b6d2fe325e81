// Clocks: one hand for each pair of dimensions, at its angle.

import { svg } from "../dom.js";
import { watched } from "./boxes.js";

const GAP = 6;

// A face with a hand at (cos, sin); mathematical angles: 0 is to the right, and the hand turns against the clock.
export function dial(x, y, radius, cos, sin, { kind, chosen = false }) {
  const length = radius * 0.84;
  return svg("g", { class: `dial ${kind}${chosen ? " chosen" : ""}` },
    svg("circle", { class: "face", cx: x, cy: y, r: radius }),
    svg("line", { class: "hand", x1: x, y1: y, x2: x + length * cos, y2: y - length * sin }),
    svg("circle", { class: "tip", cx: x + length * cos, cy: y - length * sin, r: Math.max(1.6, radius * 0.1) }));
}

// All pairs in rows; `choose` gets the number of the one that is pressed, `hover` of the one under the pointer.
export function dials(plot, { cos, sin, kinds, chosen, choose, hover }) {
  const { columns, size } = grid(cos.length, plot.width, plot.height);
  const left = (plot.width - columns * (size + GAP)) / 2;
  const place = (pair) => [left + (pair % columns) * (size + GAP), Math.floor(pair / columns) * (size + GAP) + 2];
  const groups = Array.from(cos, (_, pair) => {
    const [x, y] = place(pair);
    const made = dial(x + size / 2, y + size / 2, size / 2 - 1, cos[pair], sin[pair], { kind: kinds[pair], chosen: pair === chosen });
    made.append(svg("title", {}, `pair ${pair}`));
    return watched(made, pair, hover, choose);
  });
  plot.svg.append(...groups);
  return { point: (pair) => groups.forEach((group, number) => group.classList.toggle("pointed", number === pair)) };
}

// The largest size at which all fit.
function grid(count, width, height) {
  for (let columns = 1; columns <= count; columns++) {
    const size = Math.floor(width / columns) - GAP;
    if (Math.ceil(count / columns) * (size + GAP) <= height) return { columns, size: Math.min(size, 64) };
  }
  return { columns: count, size: 8 };
}

// One large clock whose hand can be dragged: `turn` gets by how many radians it was moved.
export function largeDial(plot, { cos, sin, kind, words, turn }) {
  const radius = Math.min(plot.width, plot.height) / 2 - 22;
  const [x, y] = [plot.width / 2, plot.height / 2];
  for (const [text, dx, dy, anchor] of [["0", 1, 0, "start"], ["π/2", 0, -1, "middle"], ["π", -1, 0, "end"], ["3π/2", 0, 1, "middle"]]) {
    plot.svg.append(svg("text", { class: "tick", x: x + dx * (radius + 6), y: y + dy * (radius + 11) + 4, "text-anchor": anchor }, text));
  }
  const made = dial(x, y, radius, cos, sin, { kind, chosen: true });
  made.classList.add("large");
  plot.svg.append(made, svg("text", { class: "label", x, y: y + radius * 0.45, "text-anchor": "middle" }, words));
  let before = null;
  const angle = (event) => {
    const box = plot.svg.getBoundingClientRect();
    return Math.atan2(y - (event.clientY - box.top), event.clientX - box.left - x);
  };
  made.addEventListener("pointerdown", (event) => {
    event.preventDefault();
    before = angle(event);
    const moved = (each) => {
      const now = angle(each);
      const step = Math.atan2(Math.sin(now - before), Math.cos(now - before));
      before = now;
      turn(step, false);
    };
    window.addEventListener("pointermove", moved);
    window.addEventListener("pointerup", () => {
      window.removeEventListener("pointermove", moved);
      turn(0, true);
    }, { once: true });
  });
}
