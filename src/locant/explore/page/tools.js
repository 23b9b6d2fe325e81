// What stands at the right of the header: search, light or dark, the page as a file, the keys.

import { html } from "./dom.js";
import { dialog } from "./keyboard.js";

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
  const save = html("a", { href: "export", download: "locant.html", title: "This page, as one file" }, "Save page");
  save.addEventListener("click", () => {
    save.href = `export?${new URLSearchParams({ screen: router.screen, ...router.settings })}`;
  });
  return [search, save, theme, keys];
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
