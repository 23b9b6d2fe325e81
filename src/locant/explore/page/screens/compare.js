// Compare: curves by distance over maps of query and key, all linked by the distance that is pointed at.

import { showCurves, showMap } from "../charts.js";
import { controlGroup, split } from "../controls.js";
import { html } from "../dom.js";
import { number } from "../drawing/axes.js";
import { nearest } from "../drawing/line_chart.js";
import { Picture } from "../picture.js";

const SLOTS = [1, 2, 3, 4];
const TITLES = { none: "–" };

export function open(place, page) {
  const { side, pictures } = split(place);

  const shared = { length: { label: "Length", unit: "tokens" }, alike: { label: "Likeness of query and key" }, head: { label: "Head" } };
  const slots = SLOTS.map((slot) => [{
    [slot]: { label: `Encoding ${slot}`, titles: TITLES },
    [`${slot}.base`]: { label: `Base of ${slot}` },
    [`${slot}.scaling`]: { label: `Scaling of ${slot}`, titles: TITLES },
    [`${slot}.factor`]: { label: `Factor of ${slot}` },
    [`${slot}.trained`]: { label: `Trained length of ${slot}`, unit: "tokens" },
    [`${slot}.slope`]: { label: `Slope of ${slot}` },
  }, slot]);
  const groups = [[shared], ...slots].map(([named, slot]) => controlGroup(side, page, named, slot)[1]);

  const chart = new Picture(pictures, page, { name: "score-by-distance", height: 320 });
  const maps = html("div", { class: "grid" });
  pictures.append(maps);
  const mapOf = new Map();
  let last = null;
  let rested = null; // the answer before a slider began to move: its curves stay faintly on the chart

  // A distance, by its number, in the chart and in all maps: there of the last query, or of these.
  function point(at, query = last.numbers.positions.length - 1, key = null) {
    const { distances, positions, encodings } = last.numbers;
    chart.point(at);
    chart.read(encodings.map(({ mean }) => (mean ? number(mean[at]) : "")));
    chart.note.textContent = noteOf(last.numbers, distances[at]);
    for (const picture of mapOf.values()) picture.tell(query, key ?? nearest(positions, positions[query] - distances[at]));
  }

  const rest = () => point(nearest(last.numbers.distances, last.numbers.at));

  function show(answer) {
    last = answer;
    const { numbers, controls } = answer;
    for (const each of groups) each.show(controls);
    showChart(answer, rested);
    showMaps(answer);
    rest();
    if (page.settled()) rested = answer;
  }

  function showChart({ numbers }, before) {
    const { distances, encodings, low, high, python } = numbers;
    const curves = drawn(encodings).map(({ label, slot, mean: values, low: from, high: to }) => ({ name: label, slot, values, low: from, high: to }));
    showCurves(chart, {
      title: "Score by distance", python,
      x: { values: distances, label: "distance of key and query (tokens)" },
      y: { label: "score (before the softmax)", low: low - 1, high: Math.max(high, ...curves.map((one) => Math.max(...one.high))) + 0.3 },
      series: [...(before ? faint(before.numbers, numbers) : []), ...curves],
      legend: encodings.map(({ label, slot, note }) => ({ name: label, slot, more: note })),
      hover: (at) => (at === null ? rest() : point(at)),
    });
  }

  function showMaps({ numbers }) {
    const { distances, positions, encodings, low, high, python } = numbers;
    for (const [slot, picture] of mapOf) {
      if (drawn(encodings).some((one) => one.slot === slot)) continue;
      picture.figure.remove();
      mapOf.delete(slot);
    }
    for (const { slot, label, map, methods, name } of drawn(encodings)) {
      if (!mapOf.has(slot)) mapOf.set(slot, new Picture(maps, page, { name: `map-${slot}`, height: 330, square: true }));
      showMap(mapOf.get(slot), {
        title: label, python, corner: "query \\ key", columns: positions, rows: positions, values: map,
        note: [nature(methods), ...sampleOf(numbers)].join(" "),
        x: { label: "key", values: positions }, y: { label: "query", values: positions }, color: { map: "one", low, high, label: "score" },
        words: (value, query, key) => `${number(value)} at query ${number(positions[query])}, key ${number(positions[key])}`,
        hover: (query, key) => (query === undefined ? rest() : point(nearest(distances, Math.abs(positions[query] - positions[key])), query, key)),
      });
      mapOf.get(slot).figure.dataset.name = name;
    }
    for (const { slot } of drawn(encodings)) maps.append(mapOf.get(slot).figure); // in the order of the slots
  }

  const keys = {
    position(step) {
      const { distances } = last.numbers;
      const at = Number(page.settings().at ?? 0); // what was asked for last, whether or not it is shown yet
      const next = distances[Math.min(distances.length - 1, Math.max(0, nearest(distances, at) + step))];
      page.change({ at: next }, { settled: false });
      page.announce(`Distance ${next}`);
    },
    encoding(slot) {
      side.querySelector(`[data-setting="${slot}"]`)?.focus();
    },
  };
  return { show, keys };
}

function nature(methods) {
  const words = methods.filter((method) => method in METHODS).map((method) => METHODS[method]).join(", ");
  return words ? `${words[0].toUpperCase()}${words.slice(1)}.` : "Does nothing: every key has the same score.";
}

// What a map leaves out: it has no more rows than a screen has pixels for.
function sampleOf({ length, positions }) {
  return positions.length < length ? [`The map shows ${number(positions.length)} of ${number(length)} positions, evenly spaced.`] : [];
}

const METHODS = { embed: "added to the embeddings", rotate: "rotates queries and keys", bias: "added to the scores" };

function drawn(encodings) {
  return encodings.filter((one) => one.mean);
}

function noteOf({ length, distances }, distance) {
  const shown = distances.length < length ? `${number(distances.length)} of the keys` : "all keys";
  return `Scores of the query at position ${number(length - 1)} with ${shown} before it: the mean over random contents, and a band with the middle 80%. At distance ${number(distance)}:`;
}

// What the curves were, where only their numbers changed.
function faint(before, after) {
  if (before.distances.length !== after.distances.length || before.distances.at(-1) !== after.distances.at(-1)) return [];
  return drawn(before.encodings).flatMap((old) => {
    const now = drawn(after.encodings).find(({ slot, name }) => slot === old.slot && name === old.name);
    const same = !now || now.mean.every((value, at) => value === old.mean[at]);
    return same ? [] : [{ name: `${old.label}, before`, slot: old.slot, values: old.mean, faint: true }];
  });
}
