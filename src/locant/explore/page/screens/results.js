// Results: losses by length and by position of a report, and the pass keys that were recalled; or a comparison that runs,
// and its curves as they grow.

import { showCurves, showMap } from "../charts.js";
import { controlGroup, dropZone, split } from "../controls.js";
import { html } from "../dom.js";
import { number } from "../drawing/axes.js";
import { counted, Picture } from "../picture.js";

const EVERY = 1000; // milliseconds between looks at a comparison that runs here
const SELDOM = 5000; // and at the report of one that runs elsewhere
const SLOTS = 6;
const FEW = 20; // points that are drawn as dots, too

export function open(place, page) {
  const { side, pictures } = split(place);
  const group = (named) => controlGroup(side, page, named);
  const [which, report] = group({ report: { label: "Report" } });
  if (page.drop) which.prepend(dropZone(page, place, "Drop the folder of a report here, or choose its results.json or tuning.json", "results.json", (key) => page.change({ report: key }), "tuning.json"));
  const [about, options] = group({
    text: { label: "Text" }, encodings: { label: "Encodings", rows: 2 }, steps: { label: "Training steps" },
    train: { label: "Trained length", unit: "tokens" }, seeds: { label: "Seeds" },
  });
  const compare = async () => {
    const key = await page.compare();
    if (key) page.change({ report: key });
  };
  const go = html("button", { type: "button", class: "primary", onclick: compare }, "Compare");
  const stop = html("button", { type: "button", hidden: true, onclick: () => page.stop().then(page.refresh) }, "Stop");
  const progress = html("p", { class: "note last", role: "status" });
  if (page.compare) about.append(html("div", { class: "row last" }, go, stop), progress);
  const training = new Picture(pictures, page, { name: "training", height: 260 });
  const lengths = new Picture(pictures, page, { name: "loss-by-length", height: 320 });
  const places = new Picture(pictures, page, { name: "loss-by-position", height: 280 });
  const recalled = html("div", { class: "grid" });
  const keys = html("section", { class: "titled" }, html("h2", {}, "Pass keys, by depth"), html("p", { class: "note" }, "A number hidden in a text of each length: the share that was recalled. Depth 0 is the beginning, depth 1 the end."), recalled);
  const maps = [];
  pictures.append(keys);
  const said = html("div", { class: "said", "data-said": "sentences" });
  pictures.append(html("section", { "aria-label": "What follows" }, said));
  let timer = 0;

  function show({ controls, numbers }) {
    report.show(controls);
    options.show(controls);
    const running = numbers.state === "running";
    go.hidden = running;
    stop.hidden = !running;
    progress.textContent = told(numbers);
    clearTimeout(timer);
    const grows = running || numbers.missing > 0;
    if (grows && page.refresh) timer = setTimeout(() => place.isConnected && page.refresh(), running ? EVERY : SELDOM);
    showTraining(numbers);
    showLengths(numbers);
    showPlaces(numbers);
    showKeys(numbers);
    const sentences = numbers.said.length ? numbers.said : [numbers.folder ? "No model is measured yet." : "Open a folder with: locant explore FOLDER. Or compare encodings here."];
    said.replaceChildren(...sentences.map((sentence) => html("p", {}, sentence)));
  }

  function showTraining({ training: curves, python }) {
    const names = Object.keys(curves);
    training.figure.hidden = !names.length;
    if (!names.length) return;
    const longest = names.reduce((most, name) => (curves[name].steps.length > curves[most].steps.length ? name : most), names[0]);
    const steps = { values: curves[longest].steps, label: "step", low: Math.min(...names.map((name) => curves[name].steps[0])), high: Math.max(2, curves[longest].steps.at(-1)) };
    showCurves(training, {
      title: "Training", python, x: steps, y: { label: "loss" },
      table: () => ({ columns: ["encoding", "step", "loss"], rows: names.flatMap((name) => Array.from(curves[name].steps, (step, at) => [name, step, curves[name].losses[at]])) }),
      series: names.map((name, at) => ({ name, values: curves[name].losses, at: curves[name].steps, slot: slotOf(at), dots: curves[name].steps.length <= FEW })),
    });
  }

  function showLengths({ lengths: at, rows, trained, note, python }) {
    lengths.figure.hidden = !rows.length;
    if (!rows.length) return;
    showCurves(lengths, {
      title: "Held-out loss by length", note, python,
      x: { values: at, label: "length (tokens)", log: true, ticks: at }, y: { label: "loss" },
      series: rows.map(({ name, by_length: values, low, high }, slot) => ({ name, values, low, high, slot: slotOf(slot), dots: true })),
      marks: [{ at: trained, label: "trained" }], words: withInterval,
    });
  }

  function showPlaces({ rows, trained, python }) {
    const longest = Math.max(0, ...rows.map((row) => row.by_position.length));
    places.figure.hidden = !longest;
    if (!longest) return;
    showCurves(places, {
      title: "Held-out loss by position", note: "In windows of the longest length; means of 16 neighbours.", python,
      x: { values: counted(longest), label: "position (tokens)" }, y: { label: "loss" },
      series: rows.map(({ name, by_position: values }, slot) => ({ name, values, slot: slotOf(slot) })),
      marks: [{ at: trained, label: "trained" }],
    });
  }

  function showKeys({ pass_keys: all, python }) {
    keys.hidden = !all.length;
    while (maps.length > all.length) maps.pop().figure.remove();
    while (maps.length < all.length) maps.push(new Picture(recalled, page, { name: `pass-keys-${maps.length}`, height: 240 }));
    maps.forEach((picture, at) => {
      const { name, lengths: across, depths, share } = all[at];
      showMap(picture, {
        title: name, python, corner: "depth", columns: across.map((length) => `${number(length)} tokens`), rows: depths,
        values: share, x: { label: "length (tokens)", every: true, format: (column) => number(across[column]) },
        y: { label: "depth", every: true, format: (row) => number(depths[row]) }, color: { map: "one", low: 0, high: 1, label: "share recalled" },
        words: (_, row, column) => wordsOf(all[at], row, column),
        hover: (row, column) => maps.forEach((each) => each.tell(row, column)),
      });
    });
  }

  return { show, keys: {} };
}

// The colours in turn; each time around, curves are dotted in another way.
function slotOf(at) {
  return `${(at % SLOTS) + 1} round-${Math.floor(at / SLOTS)}`;
}

function withInterval(value, at, { low, high }) {
  return Number.isNaN(low[at]) ? number(value) : `${number(value)} (${number(low[at])} to ${number(high[at])})`;
}

function wordsOf({ lengths, depths, recalled, asked }, row, column) {
  const at = row * lengths.length + column;
  return `${number(recalled[at])} of ${number(asked[at])} at ${number(lengths[column])} tokens, depth ${number(depths[row])}`;
}

function told({ state, done, total, folder, missing }) {
  if (state === null) return missing ? `${number(missing)} more to be measured; this page shows them as they come.` : "";
  if (state === "running") return total ? `Step ${number(done)} of ${number(total)}` : "Reading the text …";
  return state === "finished" || state === "stopped" ? `${state[0].toUpperCase()}${state.slice(1)}; the report is in ${folder}.` : state;
}
