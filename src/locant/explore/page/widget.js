// In a notebook: one screen. Its settings and Python's answer to them are the widget's, so a notebook that is opened
// without Python shows what was shown last.

import { html } from "./dom.js";
import { decoded } from "./numbers.js";
import { changed } from "./router.js";
import { Keyboard } from "./tools.js";

export async function render({ model, el }) {
  const root = el.attachShadow({ mode: "open" }); // the page's rules stay inside, and the notebook's outside
  const notice = html("p", { class: "notice", role: "status", hidden: true });
  const announced = html("p", { class: "unseen", "aria-live": "polite" });
  const place = html("div", { id: "screen" });
  const main = html("main", {}, notice, html("div", { class: "heading" }, html("h1", {}, model.get("title")), html("p", {}, model.get("about"))), place, announced);
  root.append(html("style", {}, model.get("style")), main);
  el.dataset.theme = model.get("settings").theme ?? (isDark() ? "dark" : "light");
  let settled = true;
  let shown = model.get("settings");
  const taken = () => (model.get("refused") ? shown : model.get("settings")); // what was refused once would be again
  const page = {
    settings: taken,
    settled: () => settled,
    announce: (text) => (announced.textContent = text),
    change(values, options = {}) {
      settled = options.settled ?? true;
      model.set("settings", changed(taken(), values));
      model.save_changes();
    },
  };
  const { open } = await import(model.get("module"));
  const view = open(place, page);
  const keyboard = new Keyboard(page, main);
  keyboard.keys = view.keys ?? {};
  main.addEventListener("keydown", (event) => event.stopPropagation()); // or the notebook takes keys for commands
  const show = () => {
    const answer = decoded(JSON.parse(model.get("answer")));
    view.show(answer);
    shown = model.get("settings");
    place.dataset.shown = JSON.stringify(answer.state);
  };
  const refuse = () => {
    notice.textContent = model.get("refused");
    notice.hidden = !notice.textContent;
  };
  model.on("change:answer", show);
  model.on("change:refused", refuse);
  show();
  return () => {
    model.off("change:answer", show);
    model.off("change:refused", refuse);
  };
}

// What JupyterLab, VS Code and Colab say of their own page; elsewhere what the reader's system says.
function isDark() {
  const { dataset } = document.body;
  if (dataset.jpThemeLight) return dataset.jpThemeLight === "false";
  if (dataset.vscodeThemeKind) return dataset.vscodeThemeKind !== "vscode-light";
  return document.documentElement.getAttribute("theme") === "dark" || matchMedia("(prefers-color-scheme: dark)").matches;
}
