// The frame of a picture: scales from numbers to places, a grid, ticks with numbers, and what they count.

import { svg } from "../dom.js";

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

// From numbers to places and back, with ticks at round numbers.
export function linear(low, high, from, to) {
  const span = high - low || 1;
  const scale = (value) => from + ((value - low) / span) * (to - from);
  scale.invert = (place) => low + ((place - from) / (to - from)) * span;
  scale.ticks = (most = 6) => round(low, high, most);
  return scale;
}

export function logarithmic(low, high, from, to) {
  const inner = linear(Math.log10(low), Math.log10(high), from, to);
  const scale = (value) => inner(Math.log10(value));
  scale.invert = (place) => 10 ** inner.invert(place);
  scale.ticks = (most = 6) => decades(low, high, most);
  return scale;
}

function round(low, high, most) {
  const rough = (high - low) / most || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const ticks = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++) ticks.push(Number((at * step).toPrecision(12)));
  return ticks;
}

function decades(low, high, most) {
  const [first, last] = [Math.ceil(Math.log10(low) - 1e-9), Math.floor(Math.log10(high) + 1e-9)];
  const every = Math.max(1, Math.ceil((last - first + 1) / most));
  const ticks = [];
  for (let power = first; power <= last; power += every) ticks.push(10 ** power);
  if (ticks.length > 1) return ticks;
  const between = [1, 2, 3, 5, 7, 10, 20, 30, 50].map((factor) => factor * 10 ** Math.floor(Math.log10(low)));
  const inside = between.filter((value) => value >= low * 0.999 && value <= high * 1.001);
  return inside.length > 1 ? inside : round(low, high, most);
}

// A number beside an axis: far powers of ten as such.
export function tick(value) {
  const power = Math.log10(Math.abs(value));
  const far = value !== 0 && (power >= 6 || power <= -4) && Math.abs(power - Math.round(power)) < 1e-9;
  return far ? `${value < 0 ? "−" : ""}10${[...String(Math.round(power))].map((digit) => RAISED[digit]).join("")}` : number(value);
}

const RAISED = { ...Object.fromEntries([..."⁰¹²³⁴⁵⁶⁷⁸⁹"].map((digit, at) => [at, digit])), "-": "⁻" };

// A number with at most `digits` digits, grouped by thousands; far ones as powers of ten.
export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  const whole = Number.isInteger(value) && size < 1e12; // also -0, which + 0 makes 0
  if (!whole && (size >= 1e7 || size < 1e-3)) return value.toExponential(digits - 2).replace(/\.?0*e\+?/, "e").replaceAll("-", "−");
  return (value + 0).toLocaleString("en-US", { maximumSignificantDigits: whole ? 12 : digits }).replace("-", "−");
}
