// Curves and maps with all that belongs to them: a legend, a table of the same numbers, and values under the pointer.

import { number } from "./drawing/axes.js";
import { strip } from "./drawing/boxes.js";
import { heatMap } from "./drawing/heat_map.js";
import { lineChart, MOST, nearest } from "./drawing/line_chart.js";
import { mapTable } from "./picture.js";

const CHOOSE = "Point at a curve or a name to see it in colour.";

// `series` and what else `lineChart` takes. `words` of a value, its place and its series stand in the legend where the
// pointer is, or else at `rest`: `picture.tell(place)` writes them. `hover`: instead of that. `legend` and `table`: default:
// of the series.
export function showCurves(picture, { title, note, python, legend, table, rest = null, words = (value) => number(value), hover, ...chart }) {
  const shown = chart.series.filter((one) => !one.faint);
  const isMany = shown.length > MOST;
  const columns = shown.flatMap(({ name, values, low, high }) => [[name, values], ...(low ? [[`${name}, from`, low], [`${name}, to`, high]] : [])]);
  picture.tell = (at) => {
    picture.point(at);
    const own = ({ at: places }) => (places ? nearest(places, chart.x.values[at]) : at);
    picture.read(shown.map((one) => (at === null ? "" : words(one.values[own(one)], at, one))));
  };
  picture.show({
    title, note: isMany ? [note, CHOOSE].filter(Boolean).join(" ") : note, legend: legend ?? shown, python,
    table: table ?? (() => ({
      columns: [chart.x.label, ...columns.map(([name]) => name)],
      rows: Array.from(chart.x.values, (place, at) => [place, ...columns.map(([, values]) => values[at])]),
    })),
    draw: (plot) => lineChart(plot, { ...chart, hover: hover ?? ((at) => picture.tell(at ?? rest)) }),
  });
  if (!hover) picture.tell(rest);
  if (!isMany || legend) return;
  [...picture.legend.children].forEach((entry, number) => {
    entry.tabIndex = 0;
    for (const event of ["pointerenter", "focus"]) entry.addEventListener(event, () => picture.drawn.choose(chart.series.indexOf(shown[number])));
  });
}

// `values`, `x`, `y`, `color`, `hover` and `press` as of `heatMap`; `corner`, `columns` and `rows` name those of the table.
// `words` of a value and its place stand in the legend where the pointer is: `picture.tell(row, column)` writes them.
export function showMap(picture, { title, note, python, corner = "", columns, rows, words = (value) => number(value), hover, ...map }) {
  picture.tell = (row, column) => {
    picture.point(row, column);
    picture.read([row === undefined ? "" : words(map.values[row * map.values.shape[1] + column], row, column)]);
  };
  picture.show({
    title, note, legend: [{ name: map.color.label }], python,
    table: () => mapTable(corner, Array.from(columns, String), rows, map.values),
    draw: (plot) => heatMap(plot, { ...map, hover: hover ?? picture.tell }),
  });
}

// Boxes in a row, as `strip` draws them: [{slot, low, words}]; the words of the one that is pointed at take the place of
// the note.
export function showStrip(picture, { note, boxes, ...words }) {
  const tell = (at) => (picture.note.textContent = at === null ? note : boxes[at].words);
  picture.show({ note, ...words, draw: (plot) => strip(plot, boxes, tell) });
}
