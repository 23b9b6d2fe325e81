// Swap: which layer gets which positions, in the sentences of `locant.swap`; what is refused; frequencies before and
// after; and what to type.

import { showCurves, showStrip } from "../charts.js";
import { controlGroup, dropZone, move, split } from "../controls.js";
import { html } from "../dom.js";
import { number } from "../drawing/axes.js";
import { counted, Picture } from "../picture.js";

const OWN = { name: "its own", slot: 8, box: true };
const ANEW = { model: null, layers: null, every: null, pair: null };
const TITLES = { exact: "its own, in exact angles", nope: "none (NoPE)" };

export function open(place, page) {
  const { side, pictures } = split(place);
  const group = (named) => controlGroup(side, page, named);
  const { model, ...others } = ANEW;
  const [which, chosen] = group({ model: { label: "Model", also: others } });
  if (page.drop) which.prepend(dropZone(page, place, "Drop a config.json or its folder here, or choose one", "config.json", (key) => page.change({ ...others, model: key })));
  const [, what] = group({ with: { label: "Positions", titles: TITLES, also: { factor: null } }, factor: { label: "Factor" } });
  const [, where] = group({ layers: { label: "In which layers", titles: { all: "all", every: "every few" } }, every: { label: "Every" }, pair: { label: "Pair" } });
  const beware = html("section", { class: "beware", "aria-label": "Refused" });
  const said = html("section", { "aria-label": "Layers in words" });
  pictures.append(beware);
  const layers = new Picture(pictures, page, { name: "layers", height: 78 });
  pictures.append(said);
  const pairs = new Picture(pictures, page, { name: "pairs", height: 300 });
  const typed = html("section", { class: "written", "aria-label": "What to type" });
  pictures.append(typed);
  let last = null;

  function show(answer) {
    last = answer;
    for (const each of [chosen, what, where]) each.show(answer.controls);
    const { numbers } = answer;
    showRefused(numbers);
    showLayers(numbers);
    showPairs(numbers);
    showTyped(numbers);
  }

  function showRefused({ refused, way, model: name }) {
    beware.hidden = !refused;
    if (refused) beware.replaceChildren(html("h2", {}, `${way} is not put into ${name}`), html("p", {}, refused[0]), html("p", { class: "note" }, `Try: ${refused[1]}.`));
  }

  function showLayers({ layers: all, groups, way, python }) {
    layers.figure.hidden = said.hidden = !all.length;
    if (!all.length) return;
    const changed = all.filter((layer) => layer.changed).length;
    const given = { name: way, slot: 1, box: true };
    showStrip(layers, {
      title: `${way} in ${changed} of ${all.length} layers`, python,
      note: "A sentence for each layer, as the handle of locant.swap has them.",
      legend: changed < all.length ? [given, OWN] : [given],
      table: () => ({ columns: ["layer", "type", "sentence"], rows: all.map((layer, at) => [at, layer.type ?? "", layer.sentence]) }),
      boxes: all.map((layer, at) => ({ slot: layer.changed ? 1 : OWN.slot, words: `Layer ${at}: ${layer.sentence}` })),
    });
    said.replaceChildren(html("h2", {}, "In words"), html("dl", {}, groups.flatMap(([at, words]) => [html("dt", {}, `layers ${at}`), html("dd", {}, words)])));
  }

  function showPairs({ pairs: found, pair, way, python }) {
    pairs.figure.hidden = !found;
    if (!found) return;
    const [before, after] = found.factors.map((factor) => number(factor));
    showCurves(pairs, {
      title: "Inverse frequency of each pair", python, rest: pair,
      note: `Attention factor ${before} before, ${after} with ${way}: scores grow by its square.${found.to ? ` At ${number(found.to)} tokens; the frequencies depend on the length.` : ""}`,
      x: { values: counted(found.before.length), label: "pair of dimensions" }, y: { label: "radians per position", log: true },
      series: [{ name: "before", values: found.before, slot: 8 }, { name: way, values: found.after, slot: 1 }],
    });
  }

  function showTyped({ ways, python }) {
    typed.hidden = !python.layers;
    typed.replaceChildren(html("h2", {}, "What to type"), code("In Python", python.layers ?? ""), ...ways.map(([command, refused]) => (refused
      ? html("p", { class: "note" }, `${command.split(" ").slice(0, 2).join(" ")}: ${refused}.`)
      : code(command.includes("evaluate") ? "To measure it, without training" : "To train it a little more", command))));
  }

  function code(title, text) {
    return html("div", {}, html("h3", {}, title), html("pre", { tabindex: 0, "aria-label": title }, text));
  }

  const keys = {
    pair: (step) => last.controls.pair && move(page, "pair", { now: last.numbers.pair, step, high: last.controls.pair.high }, "Pair"),
  };
  return { show, keys };
}
