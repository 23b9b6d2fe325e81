// A figure is written down as {title, about, groups, pictures, show}: its settings in groups, its pictures by name, and what
// draws them all from the values of the settings. Here it gets its controls and is shown, on a page that keeps the values.

import { controlGroup, settled, split } from "../controls.js";
import { html } from "../dom.js";
import { Picture } from "../picture.js";

const MOST_SECONDS = 0.1; // between two frames of an animation: a hidden tab stands still

export const whole = (label, value, low, high, more = {}) => ({ kind: "whole", label, value, low, high, log: false, step: 1, ...more });
export const real = (label, value, low, high, more = {}) => ({ kind: "real", label, value, low, high, log: false, ...more });
export const choice = (label, value, titles, more = {}) => ({ kind: "choice", label, value, choices: Object.keys(titles), titles, ...more });
export const text = (label, value, more = {}) => ({ kind: "text", label, value, ...more });

export class Figure {
  // `page`: {settings(), change(values, options), announce(text)}; `beside`: settings at the side, or above.
  constructor(place, written, page, { beside = false } = {}) {
    Object.assign(this, { written, page, place, moved: {} });
    const { side, pictures } = beside ? split(place) : above(place);
    this.groups = written.groups.map((named) => controlGroup(side, { ...page, change: (...what) => this.change(...what) }, named)[1]);
    if (written.plays) this.groups[written.groups.findIndex((named) => written.plays.by in named)].place.append(this.player());
    const rows = Object.assign({}, ...(written.rows ?? []).map((names) => {
      const row = html("div", { class: "grid" });
      return Object.fromEntries(names.map((name) => [name, row]));
    }));
    this.pictures = Object.fromEntries(Object.entries(written.pictures).map(([name, sizes]) => {
      if (rows[name]) pictures.append(rows[name]);
      return [name, new Picture(rows[name] ?? pictures, page, { name, ...sizes })];
    }));
  }

  // Draws all pictures for these texts.
  show(given = this.page.settings()) {
    const { values, controls } = settled(this.written.groups, { ...given, ...this.moved });
    for (const group of this.groups) group.show(controls);
    this.values = values;
    this.controls = controls;
    this.written.show(values, this.pictures, (...what) => this.change(...what));
    this.place.dataset.shown = JSON.stringify(values);
  }

  change(values, options) {
    this.pause();
    this.page.change(values, options);
  }

  // While it plays, `plays.by` moves from its lowest to its highest value, `plays.speed` steps a second, again and again.
  player() {
    this.button = html("button", { type: "button", class: "play", "aria-pressed": "false" }, "▶ Play");
    this.button.addEventListener("click", () => (this.frame ? this.pause() : this.play()));
    return this.button;
  }

  play() {
    const { by, speed } = this.written.plays;
    let before = performance.now();
    let at = this.values[by];
    this.told("❚❚ Pause");
    const step = (now) => {
      const { low, high } = this.controls[by];
      at += speed * Math.min(MOST_SECONDS, (now - before) / 1000);
      before = now;
      if (at > high) at = low;
      this.moved = { [by]: at };
      this.show();
      this.frame = requestAnimationFrame(step);
    };
    this.frame = requestAnimationFrame(step);
  }

  pause() {
    if (!this.frame) return;
    cancelAnimationFrame(this.frame);
    const values = Object.fromEntries(Object.keys(this.moved).map((name) => [name, this.values[name]]));
    Object.assign(this, { frame: null, moved: {} });
    this.told("▶ Play");
    this.page.change(values);
  }

  told(words) {
    this.button.textContent = words;
    this.button.setAttribute("aria-pressed", String(words.endsWith("Pause")));
  }
}

function above(place) {
  const side = html("div", { class: "groups" });
  const pictures = html("div", { class: "pictures" });
  place.append(html("div", { class: "above" }, side), pictures);
  return { side, pictures };
}
