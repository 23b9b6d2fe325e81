// A map of numbers on a canvas, row 0 at the top, with its scale of colours beside it.

import { svg } from "../dom.js";
import { axes, leftFor, linear, logarithmic, number } from "./axes.js";
import { nearest } from "./line_chart.js";

const BAR = 10; // wide
const MARGIN = { left: 52, right: 66, top: 10, bottom: 42 };

// values: rows x columns, NaN where there is nothing; x and y: {label, values, format, every, wide}: `every` for a tick
// at every row, `wide` for a margin that their words need; color: {map, low, high, label, log}.
// hover gets (row, column) or nothing, press the place that is clicked. Returns {point(row, column)}.
export function heatMap(plot, { values, x, y, color, hover = () => {}, press }) {
  const [rows, columns] = values.shape;
  const { width, height } = plot;
  const [ticksAcross, ticksDown] = [ticksOf(x, columns, Math.max(2, plot.width / 80)), ticksOf(y, rows, Math.max(2, height / 46))];
  const margin = { ...MARGIN, left: y.wide ?? Math.max(MARGIN.left, leftFor(ticksDown.map(({ text }) => text))) };
  const area = { x: margin.left, y: margin.top, width: Math.max(1, width - margin.left - margin.right), height: height - margin.top - margin.bottom };
  plot.paint(area, rows, columns, pixels(values, color, plot.svg));
  const across = linear(-0.5, columns - 0.5, area.x, area.x + area.width);
  const down = linear(-0.5, rows - 0.5, area.y, area.y + area.height);
  const frame = (scale, { label }, ticks) => ({
    scale, label, ticks: ticks.map(({ index }) => index), format: (index) => ticks.find((tick) => tick.index === index).text,
  });
  axes(plot, frame(across, x, ticksAcross), frame(down, y, ticksDown), { grid: false, margin });
  bar(plot, color, area);
  const cell = svg("rect", { class: "cell", visibility: "hidden", width: Math.max(3, area.width / columns), height: Math.max(3, area.height / rows) });
  const glass = svg("rect", { ...area, fill: "transparent", class: "glass" });
  const within = (value, count) => Math.min(count - 1, Math.max(0, Math.round(value)));
  const placeOf = (event) => {
    const box = plot.svg.getBoundingClientRect();
    return [within(down.invert(event.clientY - box.top), rows), within(across.invert(event.clientX - box.left), columns)];
  };
  glass.addEventListener("pointermove", (event) => hover(...placeOf(event)));
  if (press) glass.addEventListener("click", (event) => press(...placeOf(event)));
  glass.addEventListener("pointerleave", () => hover());
  plot.svg.append(cell, glass);
  return {
    point(row, column) {
      const seen = Number.isInteger(row) && Number.isInteger(column);
      cell.setAttribute("visibility", seen ? "visible" : "hidden");
      if (!seen) return;
      cell.setAttribute("x", across(column) - cell.getAttribute("width") / 2);
      cell.setAttribute("y", down(row) - cell.getAttribute("height") / 2);
    },
  };
}

// Round numbers along an axis: of its values, where it has some, else of its indices.
function ticksOf({ values, format, every }, count, most) {
  if (every) return Array.from({ length: count }, (_, index) => ({ index, text: format?.(index) ?? number(index) }));
  if (!values) return linear(0, count - 1, 0, 1).ticks(most).filter(Number.isInteger).map((index) => ({ index, text: format?.(index) ?? number(index) }));
  const whole = values.every(Number.isInteger);
  const round = linear(values[0], values.at(-1), 0, 1).ticks(most).filter((value) => !whole || Number.isInteger(value));
  return round.map((value) => ({ index: nearest(values, value), text: format?.(nearest(values, value)) ?? number(value) }));
}

function pixels(values, { map, low, high, log }, element) {
  const colors = table(anchors(map, element));
  const bytes = new Uint8ClampedArray(4 * values.length);
  const shade = (log ? logarithmic : linear)(low, high, 0, 255);
  values.forEach((value, at) => {
    if (Number.isNaN(value)) return; // transparent
    const entry = 4 * Math.min(255, Math.max(0, Math.round(shade(value))));
    bytes.set(colors.subarray(entry, entry + 4), 4 * at);
  });
  return bytes;
}

function bar(plot, { map, low, high, label, log }, area) {
  const id = `bar-${(bar.made = (bar.made ?? 0) + 1)}`;
  const stops = anchors(map, plot.svg).map((color, at, all) => svg("stop", { offset: at / (all.length - 1), "stop-color": color }));
  const left = area.x + area.width + 12;
  plot.svg.append(svg("linearGradient", { id, x1: 0, x2: 0, y1: 1, y2: 0 }, stops));
  plot.svg.append(svg("rect", { x: left, y: area.y, width: BAR, height: area.height, fill: `url(#${id})` }));
  const up = (log ? logarithmic : linear)(low, high, area.y + area.height, area.y);
  for (const value of up.ticks(Math.max(2, Math.floor(area.height / 55)))) {
    plot.svg.append(svg("text", { class: "tick", x: left + BAR + 5, y: up(value) + 3.5 }, number(value)));
  }
  plot.svg.append(svg("text", { class: "label", x: left + BAR, y: plot.height - 5, "text-anchor": "middle" }, label ?? ""));
}

// Scales of colours that a colour-blind reader can tell apart. One sign: cividis (Nuñez, Anderton and Renslow 2018).
// Signed: blue, paper, orange.
const CIVIDIS = ["#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838"];
const ANCHORS = {
  one: { light: CIVIDIS, dark: CIVIDIS },
  signed: {
    light: ["#0a3a6b", "#1f6fb0", "#6fb1dd", "#cfe3f1", "#f8f8f6", "#fbdcb8", "#f3a04f", "#cf5a05", "#7a2d04"],
    dark: ["#b8e0ff", "#5db0ee", "#2b77ad", "#1c3f5c", "#20252b", "#573415", "#a8581a", "#ee8f3c", "#ffd6a6"],
  },
};

// `element`: what is drawn on.
function anchors(name, element) {
  return ANCHORS[name][getComputedStyle(element).colorScheme.trim() === "dark" ? "dark" : "light"];
}

// 256 colours, four bytes each: between two anchors they are mixed.
function table(colors) {
  const canvas = new OffscreenCanvas(256, 1).getContext("2d");
  const mixed = canvas.createLinearGradient(0.5, 0, 255.5, 0);
  colors.forEach((color, at) => mixed.addColorStop(at / (colors.length - 1), color));
  canvas.fillStyle = mixed;
  canvas.fillRect(0, 0, 256, 1);
  return canvas.getImageData(0, 0, 256, 1).data;
}
