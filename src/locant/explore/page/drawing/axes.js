// The frame of a picture: a grid, ticks with numbers, and what they count.

import { svg } from "../dom.js";
import { tick } from "./scales.js";

export const MARGIN = { left: 52, right: 14, top: 10, bottom: 42 };

// The margin at the left that these words need, beside the label.
export function leftFor(texts) {
  return 24 + 6.7 * Math.max(2, ...texts.map((text) => text.length));
}

// `x` and `y`: {scale, label, ticks}; the scales run over the inner width and height.
export function axes(plot, x, y, { grid = true, margin = MARGIN } = {}) {
  const { width, height } = plot;
  const [left, right] = [margin.left, width - margin.right];
  const [top, bottom] = [margin.top, height - margin.bottom];
  const frame = svg("g", { class: "axes" });
  for (const value of y.ticks ?? y.scale.ticks(Math.max(2, Math.floor((bottom - top) / 42)))) {
    const place = y.scale(value);
    if (grid) frame.append(svg("line", { class: "grid", x1: left, x2: right, y1: place, y2: place }));
    frame.append(svg("text", { class: "tick", x: left - 7, y: place + 3.5, "text-anchor": "end" }, y.format?.(value) ?? tick(value)));
  }
  for (const value of x.ticks ?? x.scale.ticks(Math.max(2, Math.floor((right - left) / 76)))) {
    const place = x.scale(value);
    if (grid) frame.append(svg("line", { class: "grid", x1: place, x2: place, y1: top, y2: bottom }));
    frame.append(svg("text", { class: "tick", x: place, y: bottom + 16, "text-anchor": "middle" }, x.format?.(value) ?? tick(value)));
  }
  frame.append(svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }));
  frame.append(svg("text", { class: "label", x: (left + right) / 2, y: height - 5, "text-anchor": "middle" }, x.label));
  const middle = (top + bottom) / 2;
  frame.append(svg("text", { class: "label", x: 12, y: middle, "text-anchor": "middle", transform: `rotate(-90 12 ${middle})` }, y.label));
  plot.svg.append(frame);
  return frame;
}
