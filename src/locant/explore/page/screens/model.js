// Model: the facts of a configuration, its layers, its wavelengths now and for a longer context, the new file.

import { showCurves, showStrip } from "../charts.js";
import { controlGroup, dropZone, move, split } from "../controls.js";
import { html } from "../dom.js";
import { number } from "../drawing/axes.js";
import { counted, download, Picture } from "../picture.js";

const SLOTS = { Rotary: 1, NoPE: 8 };
const OTHERS = [3, 2, 4, 5, 6];
const ANEW = { to: null, pair: null }; // settings of another model

export function open(place, page) {
  const { side, pictures } = split(place);
  const [which, model] = controlGroup(side, page, { model: { label: "Model", also: ANEW } });
  const [, longer] = controlGroup(side, page, { to: { label: "Extend it to", unit: "tokens" }, method: { label: "By" }, pair: { label: "Pair" } });
  if (page.drop) which.prepend(dropZone(page, place, "Drop a config.json or its folder here, or choose one", "config.json", (key) => page.change({ ...ANEW, model: key })));
  const facts = html("section", { class: "facts", "aria-label": "Facts" });
  const beware = html("section", { class: "beware", "aria-label": "Warnings" });
  const layers = new Picture(pictures, page, { name: "layers", height: 78 });
  const waves = new Picture(pictures, page, { name: "pairs", height: 300 });
  const written = html("section", { class: "written", "aria-label": "The new configuration" });
  pictures.append(layers.figure, facts, beware, waves.figure, written);
  let last = null;

  function show(answer) {
    last = answer;
    for (const each of [model, longer]) each.show(answer.controls);
    const { numbers } = answer;
    showFacts(numbers);
    showLayers(numbers);
    showPairs(numbers);
    showWritten(numbers);
  }

  function showFacts({ facts: rows, kinds }) {
    facts.replaceChildren(html("h2", {}, "In words"), list(rows), ...kinds.map((kind) => html("div", {}, html("h3", {}, titleOf(kind)), list(kind.facts.filter(([name]) => name !== "layers")))));
    const warnings = kinds.flatMap((kind) => kind.warnings.map((text) => (kinds.length > 1 ? `${titleOf(kind)}: ${text}` : text)));
    beware.hidden = !warnings.length;
    beware.replaceChildren(html("h2", {}, "Beware"), html("ul", {}, warnings.map((text) => html("li", {}, text))));
  }

  function showLayers({ layers: all, kinds, python }) {
    layers.figure.hidden = !all.length;
    if (!all.length) return;
    const words = ({ kind, window }, at) => `Layer ${at}: ${kinds[kind].kind}${kinds[kind].base ? `, base ${number(kinds[kind].base)}` : ""}${window ? `, sees ${number(window)} tokens` : ", sees everything"}`;
    showStrip(layers, {
      title: `${all.length} layers`, python,
      note: all.some(({ window }) => window) ? "Low layers see a window of tokens only." : "Every layer sees all tokens.",
      legend: kinds.map((kind, at) => ({ name: titleOf(kind), slot: slotOf(kinds, at), box: true })),
      table: () => ({ columns: ["layer", "encoding", "base", "window"], rows: all.map((layer, at) => [at, kinds[layer.kind].kind, kinds[layer.kind].base ?? "", layer.window ?? "all"]) }),
      boxes: all.map((layer, at) => ({ slot: slotOf(kinds, layer.kind), low: Boolean(layer.window), words: words(layer, at) })),
    });
  }

  function showPairs({ extension, wavelengths, refused, python }) {
    waves.figure.hidden = !wavelengths.length;
    if (!wavelengths.length) return;
    const { series, levels, title, note } = extension ? extended(extension) : asItIs(wavelengths, refused);
    waves.series = series;
    showCurves(waves, {
      title, note, python, series, levels,
      x: { values: counted(series[0].values.length), label: "pair of dimensions" }, y: { label: "wavelength (tokens)", log: true },
      hover: (at) => point(at ?? last.numbers.pair),
    });
    point(last.numbers.pair);
  }

  function point(pair) {
    waves.point(pair);
    waves.read(waves.series.map(({ values }) => (values[pair] ? `${number(values[pair], 3)} tokens` : "not rotated")));
    if (last.numbers.extension) waves.note.textContent = noteOf(last.numbers.extension, pair);
  }

  function showWritten({ extension, refused, model }) {
    written.replaceChildren(html("h2", {}, "The new configuration"));
    if (!extension) return written.append(html("p", { class: "note" }, `This model is not extended: ${refused}.`));
    const copied = async () => {
      await navigator.clipboard.writeText(extension.config);
      copy.textContent = "Copied";
      page.announce("The configuration is copied");
    };
    const copy = html("button", { type: "button", class: "primary", onclick: copied }, "Copy config.json");
    const saved = () => download("config.json", new Blob([extension.config], { type: "application/json" }));
    const save = html("button", { type: "button", onclick: saved }, "Save it");
    written.append(
      html("p", { class: "note" }, `${model}: what changes for ${number(extension.to)} tokens.`),
      html("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Changes" }, html("table", { class: "changes" },
        html("thead", {}, html("tr", {}, ["key", "before", "after"].map((name) => html("th", { scope: "col" }, name)))),
        html("tbody", {}, extension.changed.map(([key, before, after]) => html("tr", {}, html("th", { scope: "row" }, key), html("td", {}, before), html("td", {}, after)))))),
      html("ul", { class: "note" }, extension.notes.map((text) => html("li", {}, text))),
      html("div", { class: "buttons" }, copy, save),
      html("pre", { tabindex: 0, "aria-label": "The whole configuration" }, extension.config));
  }

  const keys = { pair: (step) => move(page, "pair", { now: last.numbers.pair, step, high: last.controls.pair.high }, "Pair") };
  return { show, keys };
}

function extended({ before, after, trained, to, method }) {
  return {
    title: `Wavelengths for ${number(to)} tokens`,
    note: " ",
    series: [{ name: `trained with ${number(trained)}`, values: before, slot: 1 }, { name: method, values: after, slot: 2 }],
    levels: [{ at: trained, label: `trained: ${number(trained)}` }, { at: to, label: `wanted: ${number(to)}` }],
  };
}

function noteOf({ stretches }, pair) {
  const kept = stretches.filter((stretch) => stretch !== null && Math.abs(stretch - 1) < 1e-6).length;
  return `${kept} of ${stretches.length} pairs stay as they are. Pair ${pair} becomes ${number(stretches[pair], 4)} times as slow.`;
}

function asItIs(wavelengths, refused) {
  const series = wavelengths.flatMap(({ name, plain, now, scaling }) => {
    const words = name?.replaceAll("_", " ");
    const before = { name: `${words ? `${words}, ` : ""}without ${scaling}`, values: plain };
    return [...(scaling === "Unscaled" ? [] : [before]), { name: words ?? "as it is", values: now }];
  }).map((one, at) => ({ ...one, slot: at + 1 }));
  const [{ trained, longest }] = wavelengths;
  const levels = [{ at: trained, label: `trained: ${number(trained)}` }, ...(longest === trained ? [] : [{ at: longest, label: `longest: ${number(longest)}` }])];
  return { title: "Wavelength of each pair", note: `Shown without an extension: ${refused}.`, series, levels };
}

function titleOf({ name, kind }) {
  return name ? `${kind}: ${name.replaceAll("_", " ")}` : kind;
}

function slotOf(kinds, at) {
  const same = kinds.slice(0, at).filter(({ kind }) => kind === kinds[at].kind).length;
  const slot = SLOTS[kinds[at].kind] ?? OTHERS[at % OTHERS.length];
  return same ? OTHERS[(same - 1) % OTHERS.length] : slot;
}

function list(rows) {
  return html("dl", {}, rows.map(([name, values]) => [html("dt", {}, name), values.map((value) => html("dd", {}, value))]).flat(2));
}
