// Pictures as files. What the stylesheet says is written into the picture, since it leaves the page.

import { svg } from "./dom.js";

const STYLES = [
  "fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-linejoin", "stroke-linecap", "opacity",
  "font-family", "font-size", "font-weight", "text-anchor", "visibility",
];
const POINTERS = ".cross, .cell, .cursor, .glass, title";
const ABOVE = 56; // room for the title and the legend
const DOTS = 2; // of a PNG, for each of the page

// `words`: {title, legend}, which stand above the picture in the file.
export function pictureAsSvg(plot, words) {
  return new Blob([asText(plot, words)], { type: "image/svg+xml" });
}

export async function pictureAsPng(plot, words) {
  const image = new Image();
  const address = URL.createObjectURL(pictureAsSvg(plot, words));
  image.src = address;
  await image.decode();
  const canvas = document.createElement("canvas");
  canvas.width = DOTS * image.naturalWidth;
  canvas.height = DOTS * image.naturalHeight;
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  URL.revokeObjectURL(address);
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

export function download(name, blob) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

function asText(plot, words) {
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
  return new XMLSerializer().serializeToString(copy);
}

function heading({ title, legend }, width) {
  const made = svg("g", {}, svg("text", { class: "title", x: 4, y: 18 - ABOVE }, title));
  let x = 4;
  for (const { name, slot, box } of legend.filter((one) => one.slot)) {
    const y = 40 - ABOVE;
    const end = x + 34 + 6.6 * name.length;
    if (end > width) break;
    made.append(box ? svg("rect", { class: `layer slot-${slot}`, x, y: y - 9, width: 12, height: 10, rx: 2 }) : svg("line", { class: `curve slot-${slot}`, x1: x, x2: x + 24, y1: y - 4, y2: y - 4 }));
    made.append(svg("text", { class: "label", x: x + (box ? 18 : 30), y }, name));
    x = end + 18;
  }
  return made;
}
