// Curves and maps with all that belongs to them: a legend, a table of the same numbers, and values under the pointer.

import { number } from "./drawing/axes.js";
import { strip } from "./drawing/boxes.js";
import { heatMap } from "./drawing/heat_map.js";
import { lineChart } from "./drawing/line_chart.js";
import { mapTable } from "./picture.js";

// `series` and what else `lineChart` takes. `words` of a value, its place and its series stand in the legend where the
// pointer is, or else at `rest`; `hover` takes the place of that. `legend`: default: the series.
export function showCurves(picture, { title, note, python, legend, rest = null, words = (value) => number(value), hover, ...chart }) {
  const shown = chart.series.filter((one) => !one.faint);
  const columns = shown.flatMap(({ name, values, low, high }) => [[name, values], ...(low ? [[`${name}, from`, low], [`${name}, to`, high]] : [])]);
  const read = (at) => {
    picture.drawn?.point(at);
    picture.read(shown.map((one) => (at === null ? "" : words(one.values[at], at, one))));
  };
  picture.show({
    title, note, legend: legend ?? shown, python,
    table: () => ({
      columns: [chart.x.label, ...columns.map(([name]) => name)],
      rows: Array.from(chart.x.values, (place, at) => [place, ...columns.map(([, values]) => values[at])]),
    }),
    draw: (plot) => lineChart(plot, { ...chart, hover: hover ?? ((at) => read(at ?? rest)) }),
  });
  if (hover) return;
  picture.again = () => read(rest); // when it had to be drawn anew
  read(rest);
}

// `values`, `x`, `y`, `color`, `hover` and `press` as of `heatMap`; `corner`, `columns` and `rows` name those of the table.
export function showMap(picture, { title, note, python, corner = "", columns, rows, ...map }) {
  picture.show({
    title, note, legend: [{ name: map.color.label }], python,
    table: () => mapTable(corner, Array.from(columns, String), rows, map.values),
    draw: (plot) => heatMap(plot, map),
  });
}

// Boxes in a row, as `strip` draws them: [{slot, low, words}]; the words of the one that is pointed at take the place of
// the note.
export function showStrip(picture, { note, boxes, ...words }) {
  const tell = (at) => (picture.note.textContent = at === null ? note : boxes[at].words);
  picture.show({ note, ...words, draw: (plot) => strip(plot, boxes, tell) });
}
