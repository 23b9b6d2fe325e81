// Where a page of the documentation has a place for something live, it is drawn there, apart from the rules of the page
// around it: the screens that need no Python, or a figure of the essay in the place of its still picture.

import { html } from "../dom.js";
import { addressOf, linkButton, Router } from "../router.js";
import { ESSAY } from "./essay.js";
import { Figure } from "./figure.js";
import { SCREENS } from "./screens.js";
import { STYLE } from "./style.js";

const ESSAYS = "essay-"; // what the names of the essay's figures begin with on the site
const theme = () => document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");

// A place of its own on the page, in the theme of the page.
function apart(host, ...content) {
  const root = host.attachShadow({ mode: "open" });
  const follow = () => {
    host.dataset.theme = theme();
    window.dispatchEvent(new Event("themed"));
  };
  new MutationObserver(follow).observe(document.documentElement, { attributeFilter: ["data-theme"] });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", follow);
  host.dataset.theme = theme();
  root.append(html("style", {}, STYLE), html("div", { class: "live" }, content));
}

// A figure in a text: its values are its own.
function drawn(figure) {
  const written = ESSAY[figure.id.replace(ESSAYS, "")];
  const still = figure.querySelector("img");
  const host = html("div", { role: "group", "aria-label": still.alt });
  const place = html("div", { id: "screen" });
  let settings = {};
  const live = new Figure(place, written, {
    settings: () => settings,
    change(values) {
      settings = { ...settings, ...values };
      live.show();
    },
    announce() {},
  });
  apart(host, place);
  (still.closest("a") ?? still).replaceWith(host);
  live.show();
}

// The screens: which one, and its settings, are in the address.
function screens(host) {
  const place = html("div", { id: "screen" });
  const links = Object.entries(SCREENS).map(([name, { title }]) => [name, html("a", { href: addressOf(name, {}) }, title)]);
  const about = html("p");
  const told = html("p", { class: "unseen", role: "status" });
  const copy = linkButton(() => addressOf(open.name, open.figure.values), (link, isCopied) => {
    if (!isCopied) return prompt("Link to this page with all settings:", link);
    copy.textContent = "Copied";
    told.textContent = "The link is copied. It contains all settings.";
    setTimeout(() => (copy.textContent = "Copy link"), 1500);
  });
  let open = null;
  const router = new Router(() => {
    const known = router.screen in SCREENS;
    if (!known && open) return; // an anchor on the page around it
    const name = known ? router.screen : Object.keys(SCREENS)[0];
    if (open?.name !== name) {
      place.replaceChildren();
      open?.figure.pause();
      open = { name, figure: new Figure(place, SCREENS[name], page, { beside: true }) };
      about.textContent = SCREENS[name].about;
      for (const [each, link] of links) link.toggleAttribute("aria-current", each === name);
    }
    open.figure.show();
  });
  const page = {
    settings: () => router.settings,
    change: (values, options) => router.change({ ...open.figure.values, ...values }, { ...options, screen: open.name }),
    announce: (words) => (told.textContent = words),
  };
  apart(host, html("div", { class: "tabs" }, html("nav", { "aria-label": "Screens" }, html("ul", {}, links.map(([, link]) => html("li", {}, link)))), copy), html("div", { class: "heading" }, about), place, told);
  router.read();
}

const figure = document.getElementById("live-screens");
if (figure) {
  const host = html("div");
  figure.replaceWith(host);
  screens(host);
}
for (const each of document.querySelectorAll("figure.live")) drawn(each);
