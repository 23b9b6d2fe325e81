// Your text: tokens, their vectors, keys before and after rotation, and who attends to whom, all linked by one token.

import { showMap } from "../charts.js";
import { controlGroup, dropZone, move, split } from "../controls.js";
import { html } from "../dom.js";
import { number } from "../drawing/axes.js";
import { words } from "../drawing/boxes.js";
import { counted, Picture } from "../picture.js";

const WINDOWS = 6; // shown on the page
const ANEW = { encoding: null, layer: null, head: null }; // settings of another model

export function open(place, page) {
  const { side, pictures } = split(place);
  const [which, source] = controlGroup(side, page, { typed: { label: "Your words", rows: 3, placeholder: "Type a sentence" }, file: { label: "Or a text", also: { typed: null, start: null } } });
  if (page.drop) which.append(dropZone(page, place, "Drop a text file here, or choose one", "", (key) => page.change({ file: key, typed: null, start: null })));
  const controls = [source, ...[
    { model: { label: "Read by a model", also: ANEW }, attention: { label: "Its layers" }, encoding: { label: "Positions" }, layer: { label: "Layer" }, head: { label: "Head" } },
    { tokenizer: { label: "Tokenizer" }, vocabulary: { label: "Entries" }, start: { label: "From token" }, count: { label: "Tokens shown" }, at: { label: "Chosen token" } },
    { length: { label: "Window", unit: "tokens" }, stride: { label: "Stride", unit: "tokens" } },
  ].map((named) => controlGroup(side, page, named)[1])];
  const tokens = new Picture(pictures, page, { name: "tokens", height: 100 });
  const near = html("section", { "aria-label": "Nearest tokens", hidden: true });
  pictures.append(near);
  const vectors = new Picture(pictures, page, { name: "vectors", height: 260 });
  const told = html("p", { class: "said", "data-said": "model" });
  pictures.append(html("section", { "aria-label": "Attention" }, html("h2", {}, "Into attention"), told));
  const grid = () => pictures.appendChild(html("div", { class: "grid" }));
  const [turned, seen] = [grid(), grid()];
  const map = (where, name) => new Picture(where, page, { name, height: 330, square: true });
  const maps = { keys: map(turned, "keys"), rotated: map(turned, "rotated"), added: map(turned, "added"), weights: map(seen, "weights"), far: map(seen, "far") };
  const attended = new Picture(pictures, page, { name: "attended", height: 100 });
  pictures.insertBefore(attended.figure, seen);
  const windows = html("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Windows" });
  const amount = html("p", { class: "note" });
  pictures.append(html("section", { "aria-label": "Sliding windows" }, html("h2", {}, "Sliding windows"), amount, windows));
  let last = null;

  // One token in all pictures.
  function point(token) {
    const at = token ?? last.numbers.at;
    const { ids, pieces, bytes, attention: { weights } } = last.numbers;
    tokens.point(at);
    tokens.note.textContent = `${pieces[at]}: token ${ids[at]}, bytes ${bytes[at]}, at position ${at}.`;
    vectors.point(at, null);
    if (!weights) return;
    const row = Array.from(weights.slice(at * ids.length, (at + 1) * ids.length), (weight) => weight || 0); // NaN: not attended to
    attended.point(at, row);
    attended.title.textContent = `What ${pieces[at]} at position ${at} attends to`;
    const best = row.map((weight, key) => [weight, key]).sort(([a], [b]) => b - a).slice(0, 3);
    attended.note.textContent = `The stronger the colour, the more: ${best.map(([weight, key]) => `${pieces[key]} at ${key} (${number(100 * weight, 2)} %)`).join(", ")}.`;
    maps.weights.point(at, best[0][1]);
  }

  function show(answer) {
    last = answer;
    for (const each of controls) each.show(answer.controls);
    const { numbers } = answer;
    showTokens(numbers);
    showNear(numbers);
    showVectors(numbers);
    told.textContent = numbers.told;
    showAttention(numbers);
    showWindows(numbers);
    point();
  }

  function showTokens({ name, characters, tokens: all, vocab_size, ids, pieces, bytes, python }) {
    const table = () => ({ columns: ["position", "token", "id", "bytes"], rows: pieces.map((piece, at) => [at, piece, ids[at], bytes[at]]) });
    tokens.show({ title: `${name}: ${number(characters)} characters, ${number(all)} tokens of ${number(vocab_size)}`, note: " ", table, python, draw: boxes });
  }

  function boxes(plot) {
    const { pieces, ids, bytes } = last.numbers;
    const titles = pieces.map((piece, at) => `${piece}: id ${ids[at]}, bytes ${bytes[at]}`);
    return words(plot, { pieces, titles, hover: point, choose: (at) => page.change({ at }) });
  }

  // The token of a row that is pointed at, and what stands there.
  function linked(picture, row, column) {
    picture.tell();
    point(row);
    if (row !== undefined) picture.tell(row, column);
  }

  function showNear({ neighbours, pieces, at }) {
    near.hidden = !neighbours.length;
    near.replaceChildren(
      html("h2", {}, `Nearest to ${pieces[at]} in the model's table`),
      html("p", { class: "note" }, "By the cosine between rows. Choose another token above."),
      html("ul", { class: "legend" }, neighbours.map(([piece, , cosine]) => html("li", {}, html("span", {}, piece), html("output", { class: "read" }, number(cosine, 3))))));
  }

  function showVectors({ vectors: all, alone, width, pieces, python }) {
    const [, count] = all.shape;
    showMap(vectors, {
      title: "Embeddings, with what is added for the position",
      note: `A row for each token, a column for ${width > count ? `the first ${count} of ${width}` : `each of ${width}`} dimensions.`,
      python, corner: "token", columns: counted(count), rows: pieces,
      values: all, x: { label: "dimension" }, y: { label: "position" }, color: { map: "signed", ...around(all), label: "value" },
      words: (value, row, column) => `${number(value)}; the token's own row: ${number(alone[row * count + column])}`,
      hover: (row, column) => linked(vectors, row, column),
    });
  }

  function showAttention({ attention, pieces, encoding, python }) {
    const { layer, head, weights, keys, rotated, added, far } = attention;
    for (const [name, picture] of Object.entries({ ...maps, attended })) picture.figure.hidden = !(attention[name] ?? (name === "attended" && weights));
    if (!weights) return;
    const which = `layer ${layer}, head ${head}`;
    const tokenMap = (name, title, note, values, color, x) => showMap(maps[name], {
      title, note, python, corner: "token", columns: x ? counted(values.shape[1]) : pieces, rows: pieces,
      values, x: { label: x ?? "key" }, y: { label: x ? "position" : "query" }, color,
      words: (value, row, column) => `${number(value, 3)}: ${x ? `${pieces[row]}, dimension ${column}` : `${pieces[row]} at ${row}, ${pieces[column]} at ${column}`}`,
      hover: (row, column) => linked(maps[name], row, column),
    });
    const [signed, dimension] = [{ map: "signed", ...around(keys ?? weights), label: "value" }, "dimension"];
    if (keys) tokenMap("keys", `Keys of ${which}`, rotated ? "As the layer projects them." : `As the layer projects them, and as attention gets them: ${encoding} does not rotate.`, keys, signed, dimension);
    if (rotated) tokenMap("rotated", "The same, rotated", "Pairs of dimensions turned by angles that grow with the position.", rotated, signed, dimension);
    if (added) tokenMap("added", `What ${encoding} adds to the scores`, "Before the softmax.", added, { map: "signed", ...around(added), label: "score" });
    tokenMap("weights", `Attention of ${which}`, "A row for each token: the weight of each token that it attends to. Every row sums to 1.", weights, { map: "one", low: 0.001, high: 1, label: "weight", log: true });
    attended.show({ title: "What each token attends to", note: " ", python, draw: boxes, table: () => ({ columns: ["token", "weight"], rows: pieces.map((piece, at) => [piece, weights[last.numbers.at * pieces.length + at]]) }) });
    showMap(maps.far, {
      title: "How far back every head looks", note: "The mean distance to the tokens that a head attends to. Press a head to see its weights.",
      python, corner: "layer", columns: counted(far.shape[1]), rows: counted(far.shape[0]),
      values: far, x: { label: "head" }, y: { label: "layer" }, color: { map: "one", low: 0, high: far.reduce((most, each) => Math.max(most, each), 1), label: "tokens" },
      words: (value, row, column) => `${number(value, 3)} tokens: layer ${row}, head ${column}`,
      hover: (row, column) => {
        maps.far.tell(row, column);
        if (row === undefined) maps.far.point(layer, head);
      },
      press: (row, column) => page.change({ layer: row, head: column }),
    });
    maps.far.point(layer, head);
  }

  function showWindows({ windows: { inputs, targets, starts } }) {
    amount.textContent = starts.length ? `${number(starts.length)} windows over the tokens above; the target of each token is the next one. The first ${Math.min(WINDOWS, starts.length)}:` : "Two tokens or more make a window.";
    const cells = (row) => row.map((piece) => html("td", {}, piece));
    windows.replaceChildren(html("table", { class: "windows" }, html("tbody", {}, starts.slice(0, WINDOWS).flatMap((start, at) => [
      html("tr", {}, html("th", { scope: "row" }, `from ${start}`), cells(inputs[at])),
      html("tr", { class: "targets" }, html("th", { scope: "row" }, "targets"), cells(targets[at])),
    ]))));
  }

  const keys = {
    position(step) {
      const next = move(page, "at", { now: last.numbers.at, step, high: last.numbers.ids.length - 1, settled: false });
      page.announce(`Token ${next}: ${last.numbers.pieces[next]}`);
    },
  };
  return { show, keys };
}

// The limits of colours for numbers of both signs.
function around(values) {
  const most = values.reduce((high, value) => (Math.abs(value) > high ? Math.abs(value) : high), 0) || 1;
  return { low: -most, high: most };
}
