// The whole state of the page is in its address: #screen?name=value&... A change is a new address, so back and forward
// work, and an address that is kept or sent shows the same.

import { html } from "./dom.js";

export class Router {
  constructor(show) {
    this.show = show;
    this.moving = false; // a slider is being dragged: its steps share one entry in the history
    window.addEventListener("popstate", () => this.read());
    window.addEventListener("hashchange", () => this.read());
  }

  read() {
    const address = location.hash;
    if (address === this.address) return;
    const [, screen, settings] = address.match(/^#?([^?]*)\??(.*)$/s);
    Object.assign(this, { screen, address, settings: Object.fromEntries(new URLSearchParams(settings)) });
    this.show();
  }

  // `settled`: false while a slider is being dragged.
  change(values, { settled = true, screen = this.screen } = {}) {
    const address = addressOf(screen, changed(screen === this.screen ? this.settings : this.kept(), values));
    const go = this.moving ? "replaceState" : "pushState";
    this.moving = !settled;
    if (address !== location.hash) history[go](null, "", address);
    this.read();
  }

  // Instead of settings that were refused: they would be refused with every later change, too.
  take(screen, settings) {
    Object.assign(this, { screen, settings, address: addressOf(screen, settings) });
    history.replaceState(null, "", this.address);
  }

  // What goes along to another screen.
  kept() {
    return this.settings.theme ? { theme: this.settings.theme } : {};
  }

  link(screen) {
    return addressOf(screen, screen === this.screen ? this.settings : this.kept());
  }
}

// These settings with other values; one of null is taken out.
export function changed(settings, values) {
  const all = Object.entries({ ...settings, ...values }).filter(([, value]) => value !== null);
  return Object.fromEntries(all.map(([name, value]) => [name, String(value)]));
}

export function addressOf(screen, settings) {
  const text = new URLSearchParams(settings).toString();
  return `#${screen}${text && `?${text}`}`;
}

// A button that copies the link to the address of what is shown; `tell` hears whether a page may write there.
export function linkButton(address, tell) {
  const button = html("button", { type: "button", title: "The address, with all settings" }, "Copy link");
  button.addEventListener("click", async () => {
    const link = location.href.replace(/#.*|$/, address());
    tell(link, (await navigator.clipboard?.writeText(link).then(() => true, () => false)) ?? false);
  });
  return button;
}
