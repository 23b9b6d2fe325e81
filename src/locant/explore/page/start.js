// The frame of the page: opens the screen that the address names, and shows it every new answer.

import { html } from "./dom.js";
import { Gone, Numbers } from "./numbers.js";
import { Router } from "./router.js";
import { Saved } from "./saved.js";
import { Keyboard, tools } from "./tools.js";

const EVERY = 4000; // milliseconds between looks whether the server is there

const data = JSON.parse(document.getElementById("data").textContent);
const main = document.getElementById("main");
const place = document.getElementById("screen");
const notice = document.getElementById("notice");

const numbers = data.exported ? new Saved(data.exported) : new Numbers();
const router = new Router(() => show());
const page = {
  exported: data.exported,
  change: (values, options) => router.change(data.exported ? numbers.taken(values) : values, options),
  ...(data.exported ? {} : {
    drop: (file) => said(() => numbers.drop(file)),
    compare: () => said(() => numbers.compare(router.settings)),
    stop: () => said(() => numbers.stop()),
    refresh: () => show(),
  }),
  settings: () => router.settings,
  settled: () => !router.moving,
  shown: () => JSON.parse(place.dataset.shown),
  say,
  announce: (text) => (document.getElementById("announced").textContent = text),
};
const keyboard = new Keyboard(page);
const links = data.screens.map(({ name, title }) => [name, html("a", {}, title)]);
let open = null; // the screen that is shown
let asking = null; // the question that is to be answered: {screen, changed}

document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the part after the # is the state, not a place on the page
  main.focus();
});
document.getElementById("tools").append(...tools(page, keyboard, router));
document.getElementById("screens").append(...links.map(([, link]) => html("li", {}, link)));
if (!data.exported) setInterval(look, EVERY);
if (!location.hash) history.replaceState(null, "", `#${data.screens[0].name}`);
router.read();

// One question at a time: while a slider moves, every answer is drawn, and the newest value is asked for next.
async function show() {
  const screen = data.screens.find((each) => each.name === router.screen);
  const { theme = "" } = router.settings;
  document.documentElement.dataset.theme = theme;
  if (!screen) {
    asking = null;
    const words = `There is no screen “${router.screen}”. Choose one above.`;
    stay();
    if (!open) await show();
    return say(words);
  }
  for (const [name, link] of links) link.href = router.link(name);
  if (asking?.screen === screen) {
    asking.changed = true;
    return;
  }
  const own = (asking = { screen, changed: true });
  place.setAttribute("aria-busy", "true");
  try {
    while (own.changed) {
      own.changed = false;
      const asked = router.settings;
      const isNew = open?.name !== screen.name;
      const answer = await said(() => numbers.ask(screen.name, asked, isNew));
      if (own !== asking) return; // another screen was asked for meanwhile
      if (!answer) {
        if (!own.changed && open) stay();
        continue;
      }
      if (isNew) await change(screen);
      if (own !== asking) return;
      open.view.show(answer);
      const leftOut = answer.left_out ?? []; // what a link asks for and cannot be had
      open.settings = Object.fromEntries(Object.entries(asked).filter(([name]) => !leftOut.includes(name)));
      if (leftOut.length && !own.changed) stay();
      if (leftOut.length) say(answer.refused.join(" "));
      place.dataset.shown = JSON.stringify(answer.state);
    }
  } finally {
    if (own === asking) {
      asking = null;
      place.removeAttribute("aria-busy");
    }
  }
}

// After what was refused: the address, and with it the next change, is of what is shown; or of the first screen.
function stay() {
  router.take(open?.name ?? data.screens[0].name, open?.settings ?? router.kept());
}

async function change(screen) {
  const { open: build } = await import(screen.module);
  place.replaceChildren();
  document.title = `${screen.title} · locant explore`;
  document.getElementById("title").textContent = screen.title;
  document.getElementById("about").textContent = screen.about;
  for (const [name, link] of links) link.ariaCurrent = name === screen.name ? "page" : null;
  document.querySelector("[aria-current]").scrollIntoView({ block: "nearest", inline: "nearest" });
  open = { name: screen.name, view: build(place, page), settings: {} };
  keyboard.keys = open.view.keys ?? {};
}

// Runs what asks the server; what goes wrong is said, and what is on the screen stays.
async function said(task) {
  try {
    const result = await task();
    say("");
    return result;
  } catch (error) {
    if (error instanceof Gone) gone();
    else say(error.message);
    return null;
  }
}

async function look() {
  if (document.visibilityState === "hidden") return;
  if (!(await numbers.isAlive())) gone();
  else if (notice.dataset.kind === "gone") say("");
}

function gone() {
  say("The explorer has stopped. What you see stays; for more, run locant explore again and open its address.", "gone");
}

function say(text, kind = "problem") {
  notice.textContent = text;
  notice.dataset.kind = kind;
  notice.hidden = !text;
}

