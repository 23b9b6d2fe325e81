// Keys that work everywhere; a screen says what arrows, brackets and digits do in it.
//
// `keys` of a screen: {position(step), pair(step), encoding(number)}, each where it has a meaning.

import { html } from "./dom.js";

const HELP = [
  ["←  →", "one position (with Shift: ten)"],
  ["[  ]", "the pair of dimensions before, after"],
  ["1 – 4", "an encoding"],
  ["/", "search: screens and settings"],
  ["t", "light or dark"],
  ["?", "this list"],
  ["Tab", "every control, in order; arrows move a slider"],
];

const STEPS = { ArrowLeft: -1, ArrowRight: 1 };
const PAIRS = { "[": -1, "]": 1 };

export class Keyboard {
  // Of the whole page, or of what has the focus inside a part of it.
  constructor(page, target = document) {
    this.page = page;
    this.keys = {};
    this.dialog = null;
    this.searched = null;
    this.themed = null;
    target.addEventListener("keydown", (event) => this.press(event));
  }

  press(event) {
    // A dialog that was closed a moment ago can still have the focus: only an open one keeps its keys.
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("dialog[open]")) return;
    const typing = event.target.matches?.("input:not([type=range]), textarea, select");
    if (typing) return;
    const onSlider = event.target.matches?.("input, [role=tab], [role=radio]");
    const { position, pair, encoding } = this.keys;
    if (event.key in STEPS && position && !onSlider) position(STEPS[event.key] * (event.shiftKey ? 10 : 1));
    else if (event.key in PAIRS && pair) pair(PAIRS[event.key]);
    else if (/^[1-4]$/.test(event.key) && encoding) encoding(Number(event.key));
    else if (event.key === "/" && this.searched) this.searched();
    else if (event.key === "t" && this.themed) this.themed();
    else if (event.key === "?") this.help();
    else return;
    event.preventDefault();
  }

  help() {
    this.dialog ??= dialog("Keys", html("table", { class: "keys" }, HELP.map(([keys, what]) =>
      html("tr", {}, html("th", { scope: "row" }, keys), html("td", {}, what)))));
    this.dialog.showModal();
  }
}

export function dialog(title, ...content) {
  const close = html("button", { type: "button", class: "quiet", "aria-label": "Close" }, "✕");
  const made = html("dialog", { "aria-label": title }, html("div", { class: "row" }, html("h2", {}, title), close), content);
  close.addEventListener("click", () => made.close());
  made.addEventListener("click", (event) => event.target === made && made.close());
  document.body.append(made);
  return made;
}
