// What stands at the right of the header: the link, the page as a file, light or dark, the keys. And the keys themselves: a
// screen says what arrows, brackets and digits do in it.

import { html } from "./dom.js";
import { addressOf, linkButton } from "./router.js";

const HELP = [
  ["←  →", "one position (with Shift: ten)"],
  ["[  ]", "the pair of dimensions before, after"],
  ["1 – 4", "an encoding"],
  ["t", "light or dark"],
  ["?", "this list"],
  ["Tab", "every control, in order; arrows move a slider"],
];

const STEPS = { ArrowLeft: -1, ArrowRight: 1 };
const PAIRS = { "[": -1, "]": 1 };

export function tools(page, keyboard, router) {
  keyboard.themed = () => page.change({ theme: getComputedStyle(document.documentElement).colorScheme === "dark" ? "light" : "dark" });
  const theme = html("button", { type: "button", title: "Light or dark ( t )", "aria-label": "Light or dark", onclick: keyboard.themed }, "◐");
  const keys = html("button", { type: "button", title: "Keys ( ? )", "aria-label": "Keys", onclick: () => keyboard.help() }, "?");
  if (page.exported) return [theme, keys];
  // With every setting as it is shown, so that it shows the same where defaults are others.
  const link = linkButton(() => addressOf(router.screen, { ...router.kept(), ...page.shown() }), (copied, isCopied) => {
    const elsewhere = `On another machine: locant explore --show '${copied.split("#")[1]}'`;
    page.say(isCopied ? `The link is copied. It works on this machine while the explorer runs. ${elsewhere}` : elsewhere, "note");
  });
  const save = html("a", { href: "export", download: "locant.html", title: "This page, as one file" }, "Save page");
  save.addEventListener("click", () => {
    save.href = `export?${new URLSearchParams({ screen: router.screen, ...router.settings })}`;
  });
  return [link, save, theme, keys];
}

// `keys` of a screen: {position(step), pair(step), encoding(number)}, each where it has a meaning.
export class Keyboard {
  // Of the whole page, or of what has the focus inside a part of it.
  constructor(page, target = document) {
    this.page = page;
    this.keys = {};
    target.addEventListener("keydown", (event) => this.press(event));
  }

  press(event) {
    // A dialog that was closed a moment ago can still have the focus: only an open one keeps its keys.
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("dialog[open]")) return;
    if (event.target.matches?.("input:not([type=range]), textarea, select")) return;
    const onSlider = event.target.matches?.("input");
    const { position, pair, encoding } = this.keys;
    if (event.key in STEPS && position && !onSlider) position(STEPS[event.key] * (event.shiftKey ? 10 : 1));
    else if (event.key in PAIRS && pair) pair(PAIRS[event.key]);
    else if (/^[1-4]$/.test(event.key) && encoding) encoding(Number(event.key));
    else if (event.key === "t" && this.themed) this.themed();
    else if (event.key === "?") this.help();
    else return;
    event.preventDefault();
  }

  help() {
    this.dialog ??= document.body.appendChild(html("dialog", { "aria-label": "Keys", onclick: (event) => event.target === this.dialog && this.dialog.close() },
      html("form", { method: "dialog", class: "row" }, html("h2", {}, "Keys"), html("button", { class: "quiet", "aria-label": "Close" }, "✕")),
      html("table", { class: "keys" }, HELP.map(([keys, what]) => html("tr", {}, html("th", { scope: "row" }, keys), html("td", {}, what))))));
    this.dialog.showModal();
  }
}
