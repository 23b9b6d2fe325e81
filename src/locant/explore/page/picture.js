// A picture with all that belongs to it: a title, a legend that reads values, a table with the same numbers, and the
// picture as SVG, PNG, CSV and the Python that makes it.

import { html, svg } from "./dom.js";
import { number } from "./drawing/axes.js";

const ROWS = 200; // of the table on the page; the file has all
const STYLES = [
  "fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-linejoin", "stroke-linecap", "opacity",
  "font-family", "font-size", "font-weight", "text-anchor", "visibility",
];
const POINTERS = ".cross, .cell, .cursor, .glass, title";
const ABOVE = 56; // room for the title and the legend
const DOTS = 2; // of a PNG, for each of the page

export class Picture {
  constructor(place, page, { name, height = 300, square = false }) {
    Object.assign(this, { page, name, height, square, width: 0 });
    this.title = html("h2");
    this.note = html("p", { class: "note" });
    this.legend = html("ul", { class: "legend" });
    this.plot = html("div", { class: "plot" });
    this.table = html("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table" });
    this.details = html("details", {}, html("summary", {}, "Table"), this.table);
    this.details.addEventListener("toggle", () => this.fillTable());
    this.code = html("pre", { tabindex: 0 });
    this.codeBox = html("div", { class: "code", hidden: true }, this.code);
    const foot = html("div", { class: "foot" }, this.details, this.buttons());
    this.figure = html("figure", { class: "picture", "data-picture": name },
      html("figcaption", {}, this.title, this.note, this.legend), this.plot, foot, this.codeBox);
    place.append(this.figure);
    new ResizeObserver(([entry]) => this.resized(entry.contentRect.width)).observe(this.plot);
    window.addEventListener("themed", () => this.draw());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  // `table`: () => ({columns, rows}); `draw`: (plot) => whatever is kept as `this.drawn`; `legend`: [{name, slot}];
  // `python`: the code of this picture, or that of all pictures by their names.
  show({ title, note = "", legend = [], table, python: codes = "", draw }) {
    const python = typeof codes === "string" ? codes : (codes[this.name] ?? "");
    Object.assign(this, { toTable: table, python, toDraw: draw, told: title, words: { title, legend }, pointed: null });
    this.title.textContent = title;
    this.note.textContent = note;
    this.legend.replaceChildren(...legend.map(entry));
    this.legend.hidden = !legend.length;
    this.code.textContent = python;
    this.codeButton.hidden = !python;
    this.codeBox.hidden ||= !python;
    this.width ||= this.plot.clientWidth;
    this.draw();
    this.fillTable();
  }

  // A place in the drawing, which stays when it is drawn anew for another width or theme.
  point(...place) {
    this.pointed = place;
    this.drawn?.point(...place);
  }

  // Values beside the names of the legend, in its order.
  read(texts) {
    const places = this.legend.querySelectorAll(".read");
    places.forEach((place, number) => (place.textContent = texts?.[number] ?? ""));
  }

  resized(width) {
    if (Math.abs(width - this.width) < 1) return;
    this.width = width;
    this.draw();
  }

  draw() {
    if (!this.toDraw || !this.width) return;
    const width = Math.floor(this.width);
    const height = this.square ? Math.min(width, this.height) : this.height;
    const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": this.told });
    this.plot.replaceChildren(picture);
    this.plot.style.height = `${height}px`;
    const plot = { svg: picture, width, height, paint: (...what) => this.paint(picture, ...what) };
    this.drawn = this.toDraw(plot);
    if (this.pointed) this.point(...this.pointed);
  }

  // A canvas under the lines, whose every pixel is a number.
  paint(picture, area, rows, columns, bytes) {
    const canvas = html("canvas", { width: columns, height: rows, "aria-hidden": "true" });
    canvas.getContext("2d").putImageData(new ImageData(bytes, columns, rows), 0, 0);
    for (const [side, at] of [["left", "x"], ["top", "y"], ["width", "width"], ["height", "height"]]) canvas.style[side] = `${area[at]}px`;
    Object.assign(canvas.dataset, area);
    this.plot.insertBefore(canvas, picture);
  }

  fillTable() {
    if (!this.details.open || !this.toTable) return;
    const { columns, rows } = this.toTable();
    const every = Math.ceil(rows.length / ROWS);
    const shown = rows.filter((_, at) => at % every === 0);
    this.table.replaceChildren(html("table", {},
      html("caption", {}, every > 1 ? `${this.told}: one of every ${every} rows, ${shown.length} of ${rows.length}` : this.told),
      html("thead", {}, html("tr", {}, columns.map((name) => html("th", { scope: "col" }, name)))),
      html("tbody", {}, shown.map((row) => html("tr", {}, row.map((value, at) => html(at ? "td" : "th", at ? {} : { scope: "row" }, text(value))))))));
  }

  buttons() {
    const button = (label, title, onclick) => html("button", { type: "button", class: "quiet", title, "aria-label": `${label} of this picture`, onclick }, label);
    this.codeButton = button("Python", "The Python that makes it", () => this.showCode());
    return html("div", { class: "save" },
      button("SVG", "The picture as SVG", () => download(`${this.name}.svg`, pictureAsSvg(this.plot, this.words))),
      button("PNG", "The picture as PNG", async () => download(`${this.name}.png`, await pictureAsPng(this.plot, this.words))),
      button("CSV", "Its numbers", () => download(`${this.name}.csv`, csv(this.toTable()))), this.codeButton);
  }

  showCode() {
    this.codeBox.hidden = !this.codeBox.hidden;
    if (this.codeBox.hidden) return;
    this.code.focus();
    navigator.clipboard?.writeText(this.python).then(() => this.page.announce("The Python is copied"), () => {});
  }
}

// The numbers of a map as a table: a row and a column for each of these names.
export function mapTable(corner, columns, rows, values) {
  return { columns: [corner, ...columns], rows: Array.from(rows, (name, row) => [name, ...values.slice(row * columns.length, (row + 1) * columns.length)]) };
}

// 0, 1, 2, ... as many.
export function counted(count) {
  return Array.from({ length: count }, (_, at) => at);
}

// Of an area, the legend shows a `box`; of a curve, a piece of it.
function entry({ name, slot, box, more }) {
  const line = slot && svg("svg", { width: box ? 12 : 26, height: 10, "aria-hidden": "true" }, sign(slot, box, box ? 0 : 1, 0));
  return html("li", {}, line || null, html("span", {}, name), more ? html("small", {}, more) : null, html("output", { class: "read" }));
}

// Of a colour, 10 high, at a place.
function sign(slot, box, x, y) {
  return box ? svg("rect", { class: `layer slot-${slot}`, x, y, width: 12, height: 10, rx: 2 })
    : svg("line", { class: `curve slot-${slot}`, x1: x, x2: x + 24, y1: y + 5, y2: y + 5 });
}

function text(value) {
  return typeof value === "string" ? value : number(value, 6);
}

function csv({ columns, rows }) {
  const cell = (value) => {
    if (value === null || value === undefined || Number.isNaN(value)) return "";
    const written = String(value);
    const safe = typeof value === "string" && /^[=+\-@\t\r]/.test(written) ? `'${written}` : written; // no formula for a spreadsheet
    return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  };
  const lines = [columns, ...rows].map((row) => Array.from(row, cell).join(","));
  return new Blob([`${lines.join("\r\n")}\r\n`], { type: "text/csv" });
}

async function pictureAsPng(plot, words) {
  const image = new Image();
  const address = URL.createObjectURL(pictureAsSvg(plot, words));
  image.src = address;
  await image.decode();
  const canvas = new OffscreenCanvas(DOTS * image.naturalWidth, DOTS * image.naturalHeight);
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  URL.revokeObjectURL(address);
  return canvas.convertToBlob();
}

export function download(name, blob) {
  const link = html("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

// A picture as a file. What the stylesheet says is written into it, since it leaves the page.
// `words`: {title, legend}, which stand above the picture in the file.
function pictureAsSvg(plot, words) {
  const original = plot.querySelector("svg");
  original.append(heading(words, original.clientWidth));
  const copy = original.cloneNode(true);
  const [from, to] = [original, copy].map((root) => [...root.querySelectorAll("*")]);
  from.forEach((element, number) => {
    const style = getComputedStyle(element);
    for (const name of STYLES) if (style[name]) to[number].setAttribute(name, style.getPropertyValue(name));
  });
  original.lastChild.remove();
  for (const pointer of copy.querySelectorAll(POINTERS)) pointer.remove();
  for (const canvas of plot.querySelectorAll("canvas")) {
    const { x, y, width, height } = canvas.dataset;
    copy.prepend(svg("image", { x, y, width, height, href: canvas.toDataURL(), preserveAspectRatio: "none", "image-rendering": "pixelated" }));
  }
  const paper = getComputedStyle(plot).getPropertyValue("--paper").trim();
  const [width, height] = [original.clientWidth, original.clientHeight];
  copy.setAttribute("viewBox", `0 ${-ABOVE} ${width} ${height + ABOVE}`);
  copy.setAttribute("height", height + ABOVE);
  copy.prepend(svg("rect", { y: -ABOVE, width, height: height + ABOVE, fill: paper }));
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  return new Blob([new XMLSerializer().serializeToString(copy)], { type: "image/svg+xml" });
}

function heading({ title, legend }, width) {
  const made = svg("g", {}, svg("text", { class: "title", x: 4, y: 18 - ABOVE }, title));
  let x = 4;
  for (const { name, slot, box } of legend.filter((one) => one.slot)) {
    const y = 40 - ABOVE;
    const end = x + 34 + 6.6 * name.length;
    if (end > width) break;
    made.append(sign(slot, box, x, y - 9), svg("text", { class: "label", x: x + (box ? 18 : 30), y }, name));
    x = end + 18;
  }
  return made;
}
