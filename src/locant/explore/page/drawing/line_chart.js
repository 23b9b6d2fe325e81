// Curves over one axis, with bands around them, and a line where the pointer is.

import { svg } from "../dom.js";
import { axes, leftFor, linear, logarithmic, MARGIN, tick } from "./axes.js";

// x: {values, label, log}; y: {label, low, high, log}; series: [{name, values, low, high, slot, faint, steps, dots, at}],
// where `at` are places of its own in the place of those of x;
// marks: [{at, label}] are places on the x axis, levels: [{at, label}] on the y axis. Of more than `MOST` series one has its
// colour, and the others are grey: `choose(number)`, or the one next to the pointer. Returns {point(index), choose}.
export const MOST = 6; // as many colours as there are

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
  const groups = series.map(() => svg("g", { class: "series" }));
  inside.append(...groups);
  series.forEach((one, number) => {
    const [name, shape] = one.dots ? ["whiskers", whiskers] : ["band", band]; // many bands make one grey
    if (one.low) groups[number].append(svg("path", { class: `${name} slot-${one.slot}`, d: shape(x.values, one, across, up) }));
    const places = one.at ?? x.values;
    const d = path(places, one.values, across, up, one.steps);
    groups[number].append(svg("path", { class: `curve slot-${one.slot}${one.faint ? " faint" : ""}`, d }));
    if (one.dots) groups[number].append(...Array.from(places, (value, at) => one.values[at] && svg("circle", { class: `dot slot-${one.slot}`, r: 3, cx: across(value), cy: up(one.values[at]) })).filter(Boolean));
  });
  const isMany = series.filter((one) => !one.faint).length > MOST;
  let chosen = null;
  const choose = (number) => {
    if (!isMany || number === chosen) return;
    chosen = number;
    groups.forEach((group, at) => group.classList.toggle("grey", at !== chosen && !series[at].faint));
    cross.before(groups[chosen]); // above the others
  };
  const cross = svg("g", { class: "cross", visibility: "hidden" }, svg("line", { class: "cursor", y1: area.y, y2: area.y + area.height }));
  const dots = series.filter((one) => !one.faint).map((one) => [one, svg("circle", { class: `dot slot-${one.slot}`, r: 3.5 })]);
  cross.append(...dots.map(([, dot]) => dot));
  inside.append(cross);
  choose(0);
  const glass = svg("rect", { ...area, fill: "transparent", class: "glass" });
  glass.addEventListener("pointermove", (event) => {
    const place = event.clientX - plot.svg.getBoundingClientRect().left;
    const index = nearest(x.values, across.invert(place));
    if (isMany) choose(closest(series, index, up.invert(event.clientY - plot.svg.getBoundingClientRect().top), x.values));
    hover(index);
  });
  glass.addEventListener("pointerleave", () => hover(null));
  plot.svg.append(glass);
  return {
    choose,
    point(index) {
      const isThere = Number.isInteger(index);
      cross.setAttribute("visibility", isThere ? "visible" : "hidden");
      if (!isThere) return;
      for (const end of ["x1", "x2"]) cross.firstChild.setAttribute(end, across(x.values[index]));
      for (const [{ at: places, values }, dot] of dots) {
        const own = places ? nearest(places, x.values[index]) : index;
        const seen = Number.isFinite(values[own]) && (!isMany || series[chosen].values === values);
        dot.setAttribute("visibility", seen ? "inherit" : "hidden");
        if (!seen) continue;
        dot.setAttribute("cx", across((places ?? x.values)[own]));
        dot.setAttribute("cy", up(values[own]));
      }
    },
  };
}

// The number of the curve that is nearest to a height at a place.
function closest(series, index, height, values) {
  const away = series.map((one) => {
    const value = one.values[one.at ? nearest(one.at, values[index]) : index];
    return one.faint || !Number.isFinite(value) ? Infinity : Math.abs(value - height);
  });
  return away.indexOf(Math.min(...away));
}

function bounds(y, series) {
  const all = series.flatMap(({ values, low: from = [], high: to = [] }) => [...values, ...from, ...to]);
  const drawn = all.filter((value) => Number.isFinite(value) && !(y.log && value <= 0));
  let [low, high] = [Math.min(...drawn), Math.max(...drawn)];
  if (low > high) [low, high] = [y.log ? 1 : 0, y.log ? 10 : 1];
  const pad = y.log ? 0 : (high - low || 1) * 0.04;
  return [y.low ?? low - pad, y.high ?? high + pad];
}

function path(across, values, x, y, steps) {
  let open = false;
  return Array.from(values, (value, at) => {
    const place = value === null ? NaN : y(value);
    const isOpen = open;
    open = Number.isFinite(place);
    if (!open) return "";
    const [right, up] = [x(across[at]).toFixed(1), Math.min(1e5, Math.max(-1e5, place)).toFixed(1)];
    return isOpen && steps ? `H${right}V${up}` : `${isOpen ? "L" : "M"}${right} ${up}`;
  }).join("");
}

function band(across, { low, high }, x, y) {
  const places = Array.from(low.keys()).filter((at) => !Number.isNaN(low[at]));
  const edge = (values, order) => order.map((at) => `${x(across[at]).toFixed(1)} ${y(values[at]).toFixed(1)}`).join("L");
  return places.length ? `M${edge(high, places)}L${edge(low, places.toReversed())}Z` : "";
}

function whiskers(across, { low, high }, x, y) {
  return Array.from(low, (from, at) => (Number.isNaN(from) ? "" : `M${x(across[at]).toFixed(1)} ${y(from).toFixed(1)}V${y(high[at]).toFixed(1)}`)).join("");
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
