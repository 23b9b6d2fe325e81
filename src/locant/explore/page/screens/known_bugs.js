// Known bugs: what is right and what a mistake makes of it, as two curves or two maps; and all bugs, to be searched.

import { showCurves, showMap } from "../charts.js";
import { controlGroup, move, split } from "../controls.js";
import { html } from "../dom.js";
import { number } from "../drawing/axes.js";
import { counted, Picture } from "../picture.js";

const SIDES = { right: { name: "right", slot: 1 }, wrong: { name: "wrong", slot: 2 } };

export function open(place, page) {
  const { side, pictures } = split(place);
  const controls = [{ bug: { label: "Mistake", also: { position: null } }, position: { label: "From position" } }, { find: { label: "Find among all bugs", placeholder: "cache, bfloat16, Llama" } }]
    .map((named) => controlGroup(side, page, named)[1]);
  const story = html("p", { class: "said" });
  const source = html("p", { class: "note", "data-said": "source" });
  const title = html("h2");
  pictures.append(html("section", { "aria-label": "The mistake" }, title, story, source));
  const places = html("div", { class: "grid" });
  pictures.append(places);
  const curves = new Picture(pictures, page, { name: "curves", height: 340 });
  const maps = Object.keys(SIDES).map((name) => new Picture(places, page, { name: `map-${name}`, height: 330, square: true }));
  const heading = html("h2");
  const list = html("ol", { class: "bugs" });
  pictures.append(html("section", { "aria-label": "All known bugs" }, heading, html("p", { class: "note" }, "Each entry states what happened, how to see it in other code, and where it was reported. Its test fails on code that has the bug."), list));
  let last = null;

  function show(answer) {
    const { numbers } = answer;
    for (const each of controls) each.show(answer.controls);
    title.textContent = numbers.title;
    story.textContent = numbers.story;
    source.replaceChildren(`Entry ${numbers.entry}, found in `, ...links(numbers.sources), ".");
    const isMap = numbers.right.shape.length === 2;
    places.hidden = !isMap;
    curves.figure.hidden = isMap;
    if (isMap) Object.keys(SIDES).forEach((name, at) => showSide(maps[at], name, numbers));
    else showBoth(numbers);
    if (last?.controls.find.value !== answer.controls.find.value) showAll(numbers);
    last = answer;
  }

  function showBoth({ places: values, right, wrong, axes: [x, y], python }) {
    const series = [{ ...SIDES.right, values: right }, { ...SIDES.wrong, values: wrong }];
    showCurves(curves, { title: "What is right, and what comes out", note: "Both on one axis.", python, x: { values, label: x }, y: { label: y }, series });
  }

  function showSide(picture, name, numbers) {
    const [rows, columns] = numbers[name].shape;
    const high = Math.max(...[numbers.right, numbers.wrong].map((each) => each.reduce((most, value) => (value > most ? value : most), 0)));
    showMap(picture, {
      title: SIDES[name].name, note: "A row for each query. A cell is empty if the query does not attend to that key.", python: numbers.python,
      corner: "query \\ key", columns: counted(columns), rows: counted(rows),
      values: numbers[name], x: { label: numbers.axes[0] }, y: { label: numbers.axes[1] }, color: { map: "one", low: 0, high, label: "distance" },
      hover: (query, key) => maps.forEach((each) => each.tell(query, key)),
    });
  }

  function showAll({ entries, total }) {
    heading.textContent = entries.length < total ? `${entries.length} of ${total} known bugs` : `All ${total} known bugs`;
    list.replaceChildren(...entries.map(({ entry, title: name, story: words, sources, check, drawn }) => {
      const see = drawn && html("button", { type: "button", class: "quiet", "aria-label": `See it: ${name}` }, "See it");
      see?.addEventListener("click", () => {
        page.change({ bug: drawn, position: null });
        title.scrollIntoView({ block: "center" });
      });
      return html("li", {}, html("h3", {}, `${entry}. ${name}`, see), html("p", {}, words), html("p", {}, `Check yours: ${check}.`), html("p", { class: "note" }, ...links(sources)));
    }));
  }

  const keys = {
    position(step) {
      const control = last?.controls.position;
      if (control) move(page, "position", { now: control.value, step, high: control.high, settled: false }, "Position");
    },
    encoding(slot) {
      const name = last.controls.bug.choices[slot - 1];
      if (name) page.change({ bug: name });
    },
  };
  return { show, keys };
}

// Threads by their names, with commas between them.
function links(sources) {
  return sources.flatMap(([name, address], at) => [at ? ", " : "", address ? html("a", { href: address, target: "_blank", rel: "noreferrer" }, name) : name]);
}
