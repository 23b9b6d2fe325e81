// Curves over one axis, with bands around them, and a line where the pointer is.

import { svg } from "../dom.js";
import { axes, leftFor, linear, logarithmic, MARGIN, tick } from "./axes.js";

// x: {values, label, log}; y: {label, low, high, log}; series: [{name, values, low, high, slot, faint, steps, dots, at}],
// where `at` are places of its own in the place of those of x;
// marks: [{at, label}] are places on the x axis, levels: [{at, label}] on the y axis. Returns {point(index)}.
export function lineChart(plot, { x, y, series, marks = [], levels = [], hover = () => {} }) {
  const { width, height } = plot;
  const [low, high] = bounds(y, series);
  const up = (y.log ? logarithmic : linear)(low, high, height - MARGIN.bottom, MARGIN.top);
  const ticks = up.ticks(Math.max(2, Math.floor((height - MARGIN.top - MARGIN.bottom) / 42)));
  const margin = { ...MARGIN, left: leftFor(ticks.map(tick)) };
  const across = (x.log ? logarithmic : linear)(x.low ?? x.values[0], x.high ?? x.values.at(-1), margin.left, width - margin.right);
  axes(plot, { ...x, scale: across }, { ...y, scale: up, ticks }, { margin });
  const clip = `clip-${(lineChart.made = (lineChart.made ?? 0) + 1)}`;
  const area = { x: margin.left, y: margin.top, width: Math.max(1, width - margin.left - margin.right), height: height - margin.top - margin.bottom };
  plot.svg.append(svg("clipPath", { id: clip }, svg("rect", { ...area, y: area.y - 3, height: area.height + 6 })));
  const inside = svg("g", { "clip-path": `url(#${clip})` });
  plot.svg.append(inside);
  for (const { at, label } of levels) {
    inside.append(svg("line", { class: "level", x1: area.x, x2: area.x + area.width, y1: up(at), y2: up(at) }));
    const below = levels.some((other) => other.at > at && up(at) - up(other.at) < 16); // another line is in the way
    inside.append(svg("text", { class: "tick", x: area.x + 6, y: up(at) + (below ? 13 : -5) }, label));
  }
  for (const { at, label } of marks) {
    inside.append(svg("line", { class: "level", x1: across(at), x2: across(at), y1: area.y, y2: area.y + area.height }));
    const late = across(at) > area.x + area.width * 0.7;
    inside.append(svg("text", { class: "tick", x: across(at) + (late ? -5 : 5), y: area.y + 10, "text-anchor": late ? "end" : "start" }, label));
  }
  for (const one of series) {
    if (one.low) inside.append(svg("path", { class: `band slot-${one.slot}`, d: band(x.values, one, across, up) }));
  }
  for (const one of series) {
    const places = one.at ?? x.values;
    const d = path(places, one.values, across, up, one.steps);
    inside.append(svg("path", { class: `curve slot-${one.slot}${one.faint ? " faint" : ""}`, d }));
    if (one.dots) places.forEach((value, at) => one.values[at] && inside.append(svg("circle", { class: `dot slot-${one.slot}`, r: 3, cx: across(value), cy: up(one.values[at]) })));
  }
  const cross = svg("g", { class: "cross", visibility: "hidden" }, svg("line", { class: "cursor", y1: area.y, y2: area.y + area.height }));
  const dots = series.filter((one) => !one.faint).map((one) => [one, svg("circle", { class: `dot slot-${one.slot}`, r: 3.5 })]);
  cross.append(...dots.map(([, dot]) => dot));
  inside.append(cross);
  const glass = svg("rect", { ...area, fill: "transparent", class: "glass" });
  glass.addEventListener("pointermove", (event) => {
    const place = event.clientX - plot.svg.getBoundingClientRect().left;
    hover(nearest(x.values, across.invert(place)));
  });
  glass.addEventListener("pointerleave", () => hover(null));
  plot.svg.append(glass);
  return {
    point(index) {
      cross.setAttribute("visibility", index === null || index === undefined ? "hidden" : "visible");
      if (index === null || index === undefined) return;
      const place = across(x.values[index]);
      cross.firstChild.setAttribute("x1", place);
      cross.firstChild.setAttribute("x2", place);
      for (const [one, dot] of dots) {
        const own = one.at ? nearest(one.at, x.values[index]) : index;
        const value = one.values[own];
        const seen = Number.isFinite(value) && value !== null;
        dot.setAttribute("visibility", seen ? "inherit" : "hidden");
        if (!seen) continue;
        dot.setAttribute("cx", one.at ? across(one.at[own]) : place);
        dot.setAttribute("cy", up(value));
      }
    },
  };
}

function bounds(y, series) {
  let [low, high] = [Infinity, -Infinity];
  for (const { values, low: from = [], high: to = [] } of series) {
    for (const value of [...values, ...from, ...to]) {
      if (value === null || !Number.isFinite(value) || (y.log && value <= 0)) continue;
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
  }
  if (low > high) [low, high] = [y.log ? 1 : 0, y.log ? 10 : 1];
  const pad = y.log ? 0 : (high - low || 1) * 0.04;
  return [y.low ?? low - pad, y.high ?? high + pad];
}

function path(across, values, x, y, steps) {
  let d = "";
  let open = false;
  for (let at = 0; at < values.length; at++) {
    const value = values[at];
    const place = value === null || !Number.isFinite(value) ? NaN : y(value);
    if (!Number.isFinite(place)) {
      open = false;
      continue;
    }
    const [right, up] = [x(across[at]).toFixed(1), Math.min(1e5, Math.max(-1e5, place)).toFixed(1)];
    d += open && steps ? `H${right}V${up}` : `${open ? "L" : "M"}${right} ${up}`;
    open = true;
  }
  return d;
}

function band(across, { low, high }, x, y) {
  const there = [];
  const back = [];
  for (let at = 0; at < low.length; at++) {
    if (Number.isNaN(low[at])) continue;
    there.push(`${x(across[at]).toFixed(1)} ${y(high[at]).toFixed(1)}`);
    back.unshift(`${x(across[at]).toFixed(1)} ${y(low[at]).toFixed(1)}`);
  }
  return there.length ? `M${there.join("L")}L${back.join("L")}Z` : "";
}

export function nearest(values, wanted) {
  let [low, high] = [0, values.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (values[middle] <= wanted) low = middle;
    else high = middle;
  }
  return Math.abs(values[high] - wanted) < Math.abs(values[low] - wanted) ? high : low;
}
