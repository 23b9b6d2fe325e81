// Known bugs: what is right and what a mistake makes of it: two curves on one axis, or two maps.

import { controlGroup, move, split } from "../controls.js";
import { html } from "../dom.js";
import { number } from "../drawing/axes.js";
import { heatMap } from "../drawing/heat_map.js";
import { lineChart } from "../drawing/line_chart.js";
import { counted, mapTable, Picture } from "../picture.js";

const SIDES = { right: { name: "right", slot: 1 }, wrong: { name: "wrong", slot: 2 } };

export function open(place, page) {
  const { side, pictures } = split(place);
  const named = { bug: { label: "Mistake" }, position: { label: "From position" } };
  const [, controls] = controlGroup(side, page, named);
  const story = html("p", { class: "said" });
  const source = html("p", { class: "note", "data-said": "source" });
  const title = html("h2");
  pictures.append(html("section", { "aria-label": "The mistake" }, title, story, source));
  const places = html("div", { class: "grid" });
  pictures.append(places);
  const curves = new Picture(pictures, page, { name: "curves", height: 340 });
  const maps = Object.keys(SIDES).map((name) => new Picture(places, page, { name: `map-${name}`, height: 330, square: true }));
  let last = null;

  function show(answer) {
    last = answer;
    const { numbers } = answer;
    named.bug.titles = numbers.titles;
    controls.show(answer.controls);
    title.textContent = numbers.title;
    story.textContent = numbers.story;
    source.textContent = `Found in ${numbers.source}; entry ${numbers.entry} of the known bugs, each of which has a test here.`;
    const isMap = numbers.right.shape.length === 2;
    places.hidden = !isMap;
    curves.figure.hidden = isMap;
    if (isMap) Object.keys(SIDES).forEach((name, at) => showMap(maps[at], name, numbers));
    else showCurves(numbers);
  }

  function showCurves({ places: at, right, wrong, axes, python }) {
    const read = (index) => {
      curves.drawn?.point(index);
      curves.read([right, wrong].map((values) => (index === null ? "" : number(values[index]))));
      curves.note.textContent = index === null ? "Both on one axis." : `At ${axes[0]} ${number(at[index])}:`;
    };
    curves.show({
      title: "What is right, and what comes out",
      note: "Both on one axis.",
      legend: Object.values(SIDES),
      table: () => ({ columns: [axes[0], "right", "wrong"], rows: Array.from(at, (each, index) => [each, right[index], wrong[index]]) }),
      python,
      draw: (plot) => lineChart(plot, {
        x: { values: at, label: axes[0] }, y: { label: axes[1] },
        series: [{ ...SIDES.right, values: right }, { ...SIDES.wrong, values: wrong }],
        hover: read,
      }),
    });
  }

  function showMap(picture, name, numbers) {
    const values = numbers[name];
    const [rows, columns] = values.shape;
    const high = Math.max(...[numbers.right, numbers.wrong].map((each) => each.reduce((most, value) => (value > most ? value : most), 0)));
    picture.show({
      title: SIDES[name].name,
      note: "A row for each query; empty where it does not attend.",
      legend: [{ name: "distance" }],
      table: () => mapTable("query \\ key", counted(columns), counted(rows), values),
      python: numbers.python,
      draw: (plot) => heatMap(plot, {
        values, x: { label: numbers.axes[0] }, y: { label: numbers.axes[1] }, color: { map: "one", low: 0, high, label: "distance" },
        hover: (query, key) => {
          for (const each of maps) each.drawn?.point(query, key);
          maps.forEach((each, at) => each.read([query === undefined ? "" : number(numbers[Object.keys(SIDES)[at]][query * columns + key])]));
        },
      }),
    });
  }

  const keys = {
    position(step) {
      const control = last?.controls.position;
      if (control) move(page, "position", { now: control.value, step, high: control.high, settled: false }, "Position");
    },
    encoding(slot) {
      const name = Object.keys(last.numbers.titles)[slot - 1];
      if (name) page.change({ bug: name });
    },
  };
  return { show, keys };
}
