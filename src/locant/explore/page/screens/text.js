// Your text: tokens, windows, and vectors with and without position, all linked by the token that is pointed at.

import { controlGroup, dropZone, move, split } from "../controls.js";
import { html } from "../dom.js";
import { number } from "../drawing/axes.js";
import { words } from "../drawing/boxes.js";
import { heatMap } from "../drawing/heat_map.js";
import { counted, Cursor, mapTable, Picture } from "../picture.js";

const WINDOWS = 6; // shown on the page; the table has all
const SCALES = { none: "none", sqrt_d_model: "√d_model" };

export function open(place, page) {
  const { side, pictures } = split(place);
  const group = (named) => controlGroup(side, page, named);
  const [which, source] = group({ file: { label: "Text" }, typed: { label: "Or type one", rows: 3, placeholder: "The cat sat on the mat." } });
  if (page.drop) which.append(dropZone(page, place, "Drop a text file here, or choose one", "", (key) => page.change({ file: key, typed: null, start: null })));
  const controls = [
    source,
    group({ model: { label: "Embeddings" }, tokenizer: { label: "Tokenizer" }, vocabulary: { label: "Entries" }, start: { label: "From token" }, count: { label: "Tokens shown" } })[1],
    group({ length: { label: "Window", unit: "tokens" }, stride: { label: "Stride", unit: "tokens" } })[1],
    group({ encoding: { label: "Position added" }, scale: { label: "Rows are scaled by", titles: SCALES } })[1],
  ];
  const tokens = new Picture(pictures, page, { name: "tokens", height: 100 });
  const near = html("section", { "aria-label": "Nearest tokens", hidden: true });
  pictures.append(near);
  const windows = html("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Windows" });
  const counted = html("p", { class: "note" });
  pictures.append(html("section", { "aria-label": "Sliding windows" }, html("h2", {}, "Sliding windows"), counted, windows));
  const vectors = new Picture(pictures, page, { name: "vectors", height: 340 });
  const grid = html("div", { class: "grid" });
  pictures.append(grid);
  const maps = {
    places: new Picture(grid, page, { name: "positions", height: 320, square: true }),
    nearest: new Picture(grid, page, { name: "tokens-and-positions", height: 320, square: true }),
  };

  const cursor = new Cursor();
  let last = null;

  cursor.watch((at) => {
    if (!last || at === null) return;
    const { ids, pieces, bytes, nearest, width, neighbours, vectors: all } = last.numbers;
    tokens.drawn?.point(at);
    tokens.note.textContent = `${pieces[at]}: token ${ids[at]}, bytes ${bytes[at]}, at position ${at}.`;
    vectors.drawn?.point(at, null);
    const row = Array.from(nearest.slice(at * ids.length, (at + 1) * ids.length)).map((value, other) => [value, other]).filter(([, other]) => other !== at);
    const best = row.sort(([a], [b]) => b - a).slice(0, 3);
    maps.nearest.note.textContent = `Most alike to ${pieces[at]} at ${at}: ${best.map(([value, other]) => `${pieces[other]} at ${other} (${number(value, 2)})`).join(", ")}.`;
    for (const picture of Object.values(maps)) picture.drawn?.point(at, at);
    vectors.note.textContent = `A row for each token, a column for ${width > all.shape[1] ? `the first ${all.shape[1]} of ${width}` : `each of ${width}`} dimensions: its row of the ${neighbours.length ? "model's" : "untrained"} table, and what is added.`;
  });

  function show(answer) {
    last = answer;
    for (const each of controls) each.show(answer.controls);
    const { numbers } = answer;
    showTokens(numbers);
    showNear(numbers);
    showWindows(numbers);
    showVectors(numbers);
    showMap("places", "How alike positions are", "The cosine between what is added at each two positions.", numbers);
    showMap("nearest", "How alike tokens are with their position", " ", numbers);
    cursor.rest(numbers.at);
  }

  function showTokens({ name, characters, tokens: all, vocab_size, ids, pieces, bytes, python }) {
    tokens.show({
      title: `${name}: ${number(characters)} characters, ${number(all)} tokens of ${number(vocab_size)}`,
      note: " ",
      table: () => ({ columns: ["position", "token", "id", "bytes"], rows: pieces.map((piece, at) => [at, piece, ids[at], bytes[at]]) }),
      python,
      draw: (plot) => words(plot, {
        pieces, titles: pieces.map((piece, at) => `${piece}: id ${ids[at]}, bytes ${bytes[at]}`),
        hover: (at) => cursor.set(at), choose: (at) => page.change({ at }),
      }),
    });
  }

  function showNear({ neighbours, pieces, at }) {
    near.hidden = !neighbours.length;
    near.replaceChildren(
      html("h2", {}, `Nearest to ${pieces[at]} in the model's table`),
      html("p", { class: "note" }, "By the cosine between rows. Choose another token above."),
      html("ul", { class: "legend" }, neighbours.map(([piece, , cosine]) => html("li", {}, html("span", {}, piece), html("output", { class: "read" }, number(cosine, 3))))));
  }

  function showWindows({ windows: { inputs, targets, starts } }) {
    counted.textContent = starts.length ? `${number(starts.length)} windows over the tokens above; the target of each token is the next one. The first ${Math.min(WINDOWS, starts.length)}:` : "Two tokens or more make a window.";
    const cells = (row) => row.map((piece) => html("td", {}, piece));
    windows.replaceChildren(html("table", { class: "windows" }, html("tbody", {}, starts.slice(0, WINDOWS).flatMap((start, at) => [
      html("tr", {}, html("th", { scope: "row" }, `from ${start}`), cells(inputs[at])),
      html("tr", { class: "targets" }, html("th", { scope: "row" }, "targets"), cells(targets[at])),
    ]))));
  }

  function showVectors({ vectors: all, alone, pieces, python }) {
    const most = Math.max(...[all, alone].map((each) => each.reduce((high, value) => Math.max(high, Math.abs(value)), 0))) || 1;
    vectors.show({
      title: "Embeddings with position added",
      legend: [{ name: "value" }],
      table: () => mapTable("token", counted(all.shape[1]).map((at) => `dimension ${at}`), pieces, all),
      python,
      draw: (plot) => heatMap(plot, {
        values: all, x: { label: "dimension" }, y: { label: "position" }, color: { map: "signed", low: -most, high: most, label: "value" },
        hover: (row, column) => {
          cursor.set(row ?? null);
          if (row === undefined) return vectors.read([""]);
          vectors.drawn?.point(row, column);
          const at = row * all.shape[1] + column;
          vectors.read([`${number(all[at])}; the token alone: ${number(alone[at])}`]);
        },
      }),
    });
  }

  function showMap(key, title, note, numbers) {
    const values = numbers[key];
    const size = values.shape[0];
    maps[key].show({
      title, note,
      legend: [{ name: "cosine" }],
      table: () => mapTable("", numbers.pieces, numbers.pieces, values),
      python: numbers.python,
      draw: (plot) => heatMap(plot, {
        values, x: { label: "position" }, y: { label: "position" }, color: { map: "signed", low: -1, high: 1, label: "cosine" },
        hover: (row, column) => {
          cursor.set(row ?? null);
          maps[key].drawn?.point(row, column);
          maps[key].read([row === undefined ? "" : `${number(values[row * size + column], 3)}: positions ${row} and ${column}`]);
        },
      }),
    });
  }

  const keys = {
    position(step) {
      const next = move(page, "at", { now: last.numbers.at, step, high: last.numbers.ids.length - 1, settled: false });
      page.announce(`Token ${next}: ${last.numbers.pieces[next]}`);
    },
  };
  return { show, keys };
}
