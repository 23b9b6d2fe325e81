// What stands at the right of the header: search, light or dark, the page as a file, the keys. And the keys themselves: a
// screen says what arrows, brackets and digits do in it.

import { html } from "./dom.js";
import { addressOf, linkButton } from "./router.js";

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
const NEXT = { dark: "light", light: "dark" };

export function tools(page, keyboard, router) {
  const search = html("button", { type: "button", title: "Search ( / )" }, "Search");
  const theme = html("button", { type: "button", title: "Light or dark ( t )" }, "◐");
  const keys = html("button", { type: "button", title: "Keys ( ? )" }, "?");
  theme.setAttribute("aria-label", "Light or dark");
  keys.setAttribute("aria-label", "Keys");
  keyboard.searched = finder(page);
  keyboard.themed = () => switchTheme(page);
  search.addEventListener("click", keyboard.searched);
  theme.addEventListener("click", keyboard.themed);
  keys.addEventListener("click", () => keyboard.help());
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
  return [search, link, save, theme, keys];
}

function switchTheme(page) {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  const next = NEXT[root.dataset.theme ?? dark];
  root.dataset.theme = next;
  page.change({ theme: next });
  window.dispatchEvent(new Event("themed"));
}

function reveal(control) {
  const folded = control.closest("details");
  if (folded) folded.open = true;
  control.focus();
}

// Screens by name, and the settings of the one that is open.
function finder(page) {
  const input = html("input", { type: "text", role: "searchbox", "aria-label": "Search", autofocus: true, placeholder: "A screen or a setting" });
  const list = html("ul", { class: "found" });
  const made = dialog("Search", input, list);

  const options = () => [
    ...page.screens.map((screen) => ({
      text: screen.title, more: screen.about, go: () => page.change({}, { screen: screen.name }),
    })),
    ...[...document.querySelectorAll("#screen label")].map((label) => ({
      text: label.textContent, more: "setting", go: () => reveal(label.control),
    })),
  ];
  const fill = () => {
    const words = input.value.toLowerCase();
    const fits = options().filter(({ text, more }) => `${text} ${more}`.toLowerCase().includes(words)).slice(0, 12);
    list.replaceChildren(...fits.map(({ text, more, go }) => {
      const button = html("button", { type: "button" }, html("span", {}, text), html("small", {}, more));
      button.addEventListener("click", () => {
        made.close();
        go();
      });
      return html("li", {}, button);
    }));
  };
  input.addEventListener("input", fill);
  input.addEventListener("keydown", (event) => event.key === "Enter" && list.querySelector("button")?.click());
  return () => {
    input.value = "";
    fill();
    made.showModal();
  };
}

// `keys` of a screen: {position(step), pair(step), encoding(number)}, each where it has a meaning.
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

function dialog(title, ...content) {
  const close = html("button", { type: "button", class: "quiet", "aria-label": "Close" }, "✕");
  const made = html("dialog", { "aria-label": title }, html("div", { class: "row" }, html("h2", {}, title), close), content);
  close.addEventListener("click", () => made.close());
  made.addEventListener("click", (event) => event.target === made && made.close());
  document.body.append(made);
  return made;
}
