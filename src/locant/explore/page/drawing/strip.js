// Layers in a row, first to last, each in the colour of its kind; those that see a window only are lower.

import { svg } from "../dom.js";

const LOW = 0.5; // of the height

// layers: [{slot, low, words}]; hover gets the number of one, or null.
export function strip(plot, layers, hover) {
  const step = plot.width / layers.length;
  const gap = Math.min(3, step / 4);
  const width = step - gap;
  const bottom = plot.height - 20;
  const boxes = layers.map(({ slot, low, words }, number) => {
    const height = bottom * (low ? LOW : 1);
    const box = svg("rect", { class: `layer slot-${slot}`, x: number * step, y: bottom - height, width, height, rx: Math.min(3, width / 4) }, svg("title", {}, words));
    box.addEventListener("pointerenter", () => hover(number));
    box.addEventListener("pointerleave", () => hover(null));
    return box;
  });
  plot.svg.append(...boxes);
  const every = [1, 2, 5, 10, 20, 50, 100, 1000].find((each) => layers.length / each <= plot.width / 34) ?? 1000;
  for (let number = 0; number < layers.length; number += every) {
    plot.svg.append(svg("text", { class: "tick", x: number * step + width / 2, y: plot.height - 4, "text-anchor": "middle" }, String(number)));
  }
}
