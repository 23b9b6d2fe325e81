// Controls for the settings of a screen. Python says what each may be (`answer.controls`); a screen says how it is
// called. One that Python did not ask for is hidden.

import { html } from "./dom.js";
import { number } from "./drawing/axes.js";

const STEPS = 1000;
const WIDE = "(min-width: 861px)";
let made = 0;

// Settings at the side, pictures beside them; where there is little room, the settings are above and can be folded.
export function split(place) {
  const side = html("div", { class: "groups" });
  const pictures = html("div", { class: "pictures" });
  const settings = html("details", { class: "settings" }, html("summary", {}, "Settings"), side);
  const wide = matchMedia(WIDE);
  const fold = () => (settings.open = wide.matches);
  wide.addEventListener("change", fold);
  fold();
  place.append(html("div", { class: "split" }, html("section", { "aria-label": "Settings", class: "side" }, settings), pictures));
  return { side, pictures };
}

// A place for a file: chosen, or dropped anywhere on the screen, also in a folder in which it is called `inside`, or by
// the second name there. `then`
// gets the key by which an address names it.
export function dropZone(page, screen, label, inside, then, second = inside) {
  const input = html("input", { type: "file", class: "unseen" });
  const zone = html("label", { class: "drop" }, label, input);
  const take = async (file) => {
    const key = file && (await page.drop(file));
    if (key) then(key);
  };
  input.addEventListener("change", () => take(input.files[0]));
  screen.addEventListener("dragover", (event) => {
    event.preventDefault();
    zone.classList.add("over");
  });
  screen.addEventListener("dragleave", () => zone.classList.remove("over"));
  screen.addEventListener("drop", (event) => {
    event.preventDefault();
    zone.classList.remove("over");
    const entry = event.dataTransfer.items[0]?.webkitGetAsEntry();
    if (!entry?.isDirectory) return take(event.dataTransfer.files[0]);
    const missing = () => page.say(`The folder ${entry.name} holds no ${inside || "text to show: drop a file"}.`);
    const found = (file) => file.file(take);
    entry.getFile(inside, {}, found, () => entry.getFile(second, {}, found, missing));
  });
  return zone;
}

// A setting some steps further, within its limits, by a key; `now` is what is shown of it, and `words` say what it is then.
export function move(page, name, { now, step, low = 0, high, settled = true }, words) {
  const next = Math.min(high, Math.max(low, Number(page.settings()[name] ?? now) + step)); // of what was asked for last
  page.change({ [name]: next }, { settled });
  if (words) page.announce(`${words} ${next}`);
  return next;
}

// Controls that belong together: the box they stand in, and what shows them; `slot`: of the curve whose colour it has.
export function controlGroup(side, page, named, slot) {
  const box = html("div", { class: slot ? `group slot slot-${slot}` : "group" });
  side.append(box);
  return [box, new Controls(box, page, named)];
}

// `named`: {setting: {label, unit, titles, also}}; those of a choice may have `titles`, words to show for its names;
// `also`: other settings that change with it.
class Controls {
  constructor(place, page, named) {
    Object.assign(this, { place, page, named, fields: {} });
  }

  show(controls) {
    let next = null; // from the last to the first, each before the one after it
    for (const name of Object.keys(this.named).reverse()) {
      const control = controls[name];
      if (this.fields[name]?.kind !== kindOf(control)) {
        this.fields[name]?.element.remove();
        this.fields[name] = control && this.field(name, kindOf(control));
        if (control) this.place.insertBefore(this.fields[name].element, next);
      }
      if (!control) continue;
      this.fields[name].show(control);
      next = this.fields[name].element;
    }
  }

  field(name, kind) {
    const named = this.named[name];
    const change = (value, settled) => this.page.change({ ...named.also, [name]: value }, { settled });
    return { kind, ...FIELDS[kind](name, named, change) };
  }
}

// The value of every setting and its control, from texts. What cannot be is the default, what lies beyond a limit the limit.
// A limit may be a function of the settings whose limits are numbers; `when`, of all, says whether there is the setting.
export function settled(groups, given) {
  const values = {};
  const controls = {};
  const follows = ({ low, high }) => typeof low === "function" || typeof high === "function";
  const all = Object.entries(Object.assign({}, ...groups));
  for (const [name, written] of [...all.filter(([, each]) => !follows(each)), ...all.filter(([, each]) => follows(each))]) {
    const [low, high] = [written.low, written.high].map((limit) => (typeof limit === "function" ? limit(values) : limit));
    const control = { ...written, name, low, high };
    values[name] = control.value = valueOf(control, given[name]);
    if (written.when?.(values) ?? true) controls[name] = control;
  }
  return { values, controls };
}

function valueOf({ kind, value, choices, low, high, step }, written) {
  if (kind === "text") return written ?? value;
  if (kind === "choice") return choices.includes(written) ? written : value;
  const number = written === undefined || written === "" ? NaN : Number(written);
  const within = Math.min(high, Math.max(low, Number.isFinite(number) ? number : value));
  return kind === "whole" ? low + step * Math.round((within - low) / step) : within;
}

// On the page, or in the part of a notebook that it stands in.
function isFocused(element) {
  return element.getRootNode().activeElement === element;
}

function kindOf(control) {
  return control?.kind === "whole" ? "real" : control?.kind;
}

const FIELDS = { real: slider, choice, text, still };

function slider(name, { label, unit = "" }, change) {
  const id = `control-${++made}`;
  const moved = (settled) => change(valueAt(range.value / STEPS, control), settled);
  const range = html("input", { type: "range", min: 0, max: STEPS, step: "any", id, "data-setting": name, oninput: () => moved(false), onchange: () => moved(true) });
  const typed = () => change(exact.value.replaceAll(/[\s,]/g, ""), true);
  const exact = html("input", { type: "text", inputmode: "decimal", "aria-label": `${label}, as a number`, class: "exact", onchange: typed });
  const element = html("div", { class: "control" },
    html("div", { class: "row" }, html("label", { for: id }, label), html("span", { class: "value" }, exact, unit && html("small", {}, unit))),
    range);
  let control;
  range.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1 }[event.key];
    if (!step || control.kind !== "whole") return;
    event.preventDefault(); // of an integer, one step is the next that may be, or a twentieth where they are many
    const by = Math.max(control.step, control.log ? control.value / 20 : 0);
    change(Math.min(control.high, Math.max(control.low, control.value + step * by)), true);
  });
  const show = (next) => {
    control = next;
    if (!isFocused(range) || !range.matches(":active")) range.value = STEPS * shareOf(next.value, next);
    range.setAttribute("aria-valuetext", `${number(next.value)} ${unit}`.trim());
    if (!isFocused(exact)) exact.value = number(next.value);
  };
  return { element, show };
}

function shareOf(value, { low, high, log }) {
  if (!log) return (value - low) / (high - low);
  const [from, to, at] = [low, high, value].map((each) => (low > 0 ? Math.log(each) : Math.log1p(each)));
  return (at - from) / (to - from);
}

function valueAt(share, { kind, low, high, log, step }) {
  let value = low + share * (high - low);
  if (log && low > 0) value = low * (high / low) ** share;
  else if (log) value = Math.expm1(share * Math.log1p(high));
  if (kind === "whole") value = low + step * Math.round((value - low) / step);
  const digits = kind === "whole" && (share === 0 || share === 1 || value < 1000 || !log) ? 15 : 3;
  return Math.min(high, Math.max(low, Number(value.toPrecision(digits))));
}

// A field under its label.
function labelled(label, field) {
  field.id = `control-${++made}`;
  return html("div", { class: "control" }, html("label", { for: field.id }, label), field);
}

function choice(name, { label, titles = {} }, change) {
  const select = html("select", { "data-setting": name, onchange: () => change(select.value, true) });
  let shown = "";
  const show = ({ value, choices, titles: own }) => {
    if (shown !== choices.join("\n")) select.replaceChildren(...choices.map((each) => html("option", { value: each }, own[each] ?? titles[each] ?? each)));
    shown = choices.join("\n");
    select.value = value;
  };
  return { element: labelled(label, select), show };
}

function text(name, { label, rows = 1, placeholder = "" }, change) {
  const field = html(rows > 1 ? "textarea" : "input", {
    rows: rows > 1 ? rows : null, placeholder, "data-setting": name, spellcheck: "false",
    oninput: () => change(field.value, false), onchange: () => change(field.value, true),
  });
  const show = ({ value }) => {
    if (!isFocused(field)) field.value = value;
  };
  return { element: labelled(label, field), show };
}

// What a page cannot change, as it is.
function still(name, { label, unit = "", titles = {} }) {
  const value = html("output", { "data-setting": name });
  const show = ({ value: now, titles: own = {} }) => (value.textContent = `${own[now] ?? titles[now] ?? (typeof now === "number" ? number(now) : now)} ${unit}`.trim());
  return { element: html("div", { class: "row note" }, html("span", {}, label), value), show };
}
