// Rows: the tokens of a row, the mask, and who attends to whom, all linked by the query that is pointed at.

import { showMap } from "../charts.js";
import { controlGroup, move, split } from "../controls.js";
import { html } from "../dom.js";
import { number } from "../drawing/axes.js";
import { tokens } from "../drawing/boxes.js";
import { counted, Picture } from "../picture.js";

export function open(place, page) {
  const { side, pictures } = split(place);
  const groups = [
    {
      indices: { label: "Indices" }, sum: { label: "An equation" }, documents: { label: "Lengths of the documents" }, padding: { label: "Padding" }, side: { label: "Padding is at the" }, cache: { label: "Cached tokens" },
      below: { label: "Drawn below" }, seed: { label: "Seed" },
    },
    { direction: { label: "Attention" }, window: { label: "Sliding window (0: none)" } },
    { ranks: { label: "Ranks (context parallel)" }, split: { label: "Each document is split" } },
    { encoding: { label: "Encoding" }, times: { label: "For the backend: every length times" } },
  ].map((named) => controlGroup(side, page, named)[1]);
  const row = new Picture(pictures, page, { name: "row", height: 60 });
  const mask = new Picture(pictures, page, { name: "mask", height: 460, square: true });
  const backend = html("p", { class: "said", "data-said": "backend" });
  const work = html("p", { class: "said", "data-said": "work" });
  const chosen = html("h2", {}, "Which backend would run");
  pictures.append(html("section", { "aria-label": "Backend" }, chosen, backend, work));
  let last = null;

  // One query in both pictures.
  function point(query = last.numbers.at) {
    const { keys, cached, queries } = last.numbers;
    row.point(query + cached, (key) => attends(query, key));
    mask.point(query, query + cached);
    const seen = Array.from(keys.index.keys()).filter((key) => attends(query, key));
    row.note.textContent = queries.document[query] < 0
      ? `Slot ${query + cached} is padding: it attends to nothing, and nothing attends to it.`
      : `The token at index ${queries.index[query]} of document ${queries.document[query]} attends to ${seen.length} of ${keys.index.length} keys: ${ranges(seen)}.`;
  }

  function attends(query, key) {
    const { pairs } = last.numbers;
    return !Number.isNaN(pairs[query * pairs.shape[1] + key]);
  }

  function show(answer) {
    last = answer;
    for (const each of groups) each.show(answer.controls);
    const { numbers } = answer;
    showRow(numbers);
    showMask(numbers);
    chosen.hidden = backend.hidden = !numbers.backend; // a saved page does not know it of other settings
    const { name, reason, queries, keys, heads } = numbers.backend ?? {};
    backend.textContent = `On a CPU, for ${number(queries)} queries and ${number(keys)} keys with ${heads} heads in float32: ${name}, because ${reason}.`;
    const { work: pairs } = numbers;
    const filled = numbers.parts > 1 ? ` Documents and padding are filled up to a multiple of ${numbers.parts} tokens, so that every rank has an equal part of each.` : "";
    const all = pairs.reduce((sum, each) => sum + each, 0);
    work.textContent = pairs.length === 1 ? `${number(all)} pairs of a query and a key are computed.`
      : `Pairs of a query and a key, by rank: ${pairs.map((each, rank) => `r${rank} ${number(each)}`).join(", ")}.${filled}`;
    point();
  }

  function showRow({ queries, keys, cached, python, work, characters }) {
    const ranks = work.length > 1 && !cached ? Array.from(queries.rank, (rank) => `r${rank}`) : null;
    const under = ranks ?? (characters ? [...characters] : null);
    row.show({
      title: cached ? "The cached tokens, and the new ones after them" : "The row",
      note: " ",
      table: () => ({
        columns: ["slot", "index", "document", "order", "rank", "keys that it attends to"],
        rows: Array.from(keys.index, (index, slot) => {
          const query = slot - cached;
          return [slot, index, keys.document[slot] < 0 ? "padding" : keys.document[slot], keys.order[slot], query < 0 ? "cached" : queries.rank[query], query < 0 ? "" : last.numbers.seen[query]];
        }),
      }),
      python,
      draw: (plot) => tokens(plot, {
        index: keys.index, document: keys.document, under, cached,
        hover: (slot) => point(slot === null || slot < cached ? undefined : slot - cached),
        choose: (slot) => slot >= cached && page.change({ at: slot - cached }),
      }),
    });
  }

  function showMask({ pairs, python, cached }) {
    const highest = pairs.reduce((most, each) => (Number.isNaN(each) ? most : Math.max(most, Math.abs(each))), 1);
    const lowest = pairs.reduce((least, each) => (Number.isNaN(each) ? least : Math.min(least, each)), 0);
    showMap(mask, {
      title: "Who attends to whom", python,
      note: "A row for each query, a column for each key. A cell is empty if the query does not attend to the key.",
      corner: "query \\ key", columns: counted(pairs.shape[1]), rows: counted(pairs.shape[0]).map((query) => query + cached),
      values: pairs, x: { label: "slot of the key" }, y: { label: "slot of the query", format: (at) => String(at + cached) },
      color: { map: "one", low: lowest, high: highest, label: "distance" },
      words: (value, query, key) => `${Number.isNaN(value) ? "hidden" : number(value)}: query ${query + cached}, key ${key}`,
      hover: (query, key) => {
        mask.tell();
        point(query);
        if (query !== undefined) mask.tell(query, key);
      },
    });
  }

  const keys = {
    position: (step) => move(page, "at", { now: last.numbers.at, step, high: last.numbers.queries.index.length - 1, settled: false }, "Query"),
  };
  return { show, keys };
}

// 0, 1, 2, 5 as "0 to 2, 5".
function ranges(slots) {
  const found = [];
  for (const slot of slots) {
    const open = found.at(-1);
    if (open && open[1] === slot - 1) open[1] = slot;
    else found.push([slot, slot]);
  }
  return found.map(([from, to]) => (from === to ? `slot ${from}` : `slots ${from} to ${to}`)).join(", ") || "none";
}
