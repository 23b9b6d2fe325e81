// What only the essay draws: two arrows in a plane with the angle between them, and clocks with the part that was seen.

import { svg } from "../dom.js";
import { dial } from "../drawing/dials.js";

const GAP = 8;
const LARGEST = 84;

// arrows: [{angle, length, slot, name}]: of two, the angle from the second to the first is shaded.
export function plane(plot, arrows) {
  const radius = Math.min(plot.width, plot.height) / 2 - 24;
  const [x, y] = [plot.width / 2, plot.height / 2];
  const tip = (angle, length) => [x + length * radius * Math.cos(angle), y - length * radius * Math.sin(angle)];
  plot.svg.append(svg("circle", { class: "axis", cx: x, cy: y, r: radius, fill: "none" }));
  for (const [dx, dy] of [[1, 0], [0, 1]]) plot.svg.append(svg("line", { class: "axis", x1: x - dx * radius, x2: x + dx * radius, y1: y - dy * radius, y2: y + dy * radius }));
  const [to, from] = arrows.map(({ angle }) => angle);
  const turn = Math.atan2(Math.sin(to - from), Math.cos(to - from));
  plot.svg.append(svg("path", { class: "sector slot-3", d: `${arc(x, y, 0.42 * radius, from, turn)}L${x} ${y}Z` }));
  plot.svg.append(svg("path", { class: "between", d: arc(x, y, 0.42 * radius, from, turn) }));
  for (const { angle, length, slot, name } of arrows) {
    const [right, down] = tip(angle, length);
    const [beside, below] = tip(angle, length + 0.1);
    plot.svg.append(svg("line", { class: `arrow slot-${slot}`, x1: x, y1: y, x2: right, y2: down }), svg("circle", { class: `dot slot-${slot}`, cx: right, cy: down, r: 6 }));
    plot.svg.append(svg("text", { class: "title", x: beside, y: below + 5, "text-anchor": "middle" }, name));
  }
}

// Clocks in rows: a hand at each angle, and a ring as long as the angles of training, where they are not a whole turn.
// clocks: [{angle, seen, slot, name}].
export function seenClocks(plot, clocks) {
  const fits = (columns) => Math.min(LARGEST, Math.floor(plot.width / columns) - GAP, Math.floor(plot.height / Math.ceil(clocks.length / columns)) - GAP);
  const columns = clocks.map((_, at) => at + 1).reduce((best, each) => (fits(each) > fits(best) ? each : best));
  const size = fits(columns);
  const height = Math.ceil(clocks.length / columns) * (size + GAP) + 4; // no more than they need
  plot.svg.setAttribute("height", height);
  plot.svg.setAttribute("viewBox", `0 0 ${plot.width} ${height}`);
  plot.svg.parentElement.style.height = `${height}px`;
  clocks.forEach(({ angle, seen, slot, name }, at) => {
    const [x, y] = [(at % columns) * (size + GAP) + size / 2 + 2, Math.floor(at / columns) * (size + GAP) + size / 2 + 2];
    const drawn = dial(x, y, size / 2 - 3, Math.cos(angle), Math.sin(angle), { kind: `slot-${slot}` });
    const whole = seen >= 2 * Math.PI;
    drawn.append(svg("title", {}, name), whole ? svg("circle", { class: "seen", cx: x, cy: y, r: size / 2 - 3 }) : svg("path", { class: "seen", d: arc(x, y, size / 2 - 3, 0, seen) }));
    plot.svg.append(drawn);
  });
}

function arc(x, y, radius, from, turn) {
  const at = (angle) => `${(x + radius * Math.cos(angle)).toFixed(2)} ${(y - radius * Math.sin(angle)).toFixed(2)}`;
  return `M${at(from)}A${radius} ${radius} 0 ${Math.abs(turn) > Math.PI ? 1 : 0} ${turn > 0 ? 0 : 1} ${at(from + turn)}`;
}
