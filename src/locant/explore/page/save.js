// Pictures as files. What the stylesheet says is written into the picture, since it leaves the page.

import { svg } from "./dom.js";

const STYLES = [
  "fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-linejoin", "stroke-linecap", "opacity",
  "font-family", "font-size", "font-weight", "text-anchor", "visibility",
];
const DOTS = 2; // of a PNG, for each of the page

export function pictureAsSvg(plot) {
  return new Blob([asText(plot)], { type: "image/svg+xml" });
}

export async function pictureAsPng(plot) {
  const image = new Image();
  const address = URL.createObjectURL(pictureAsSvg(plot));
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

function asText(plot) {
  const original = plot.querySelector("svg");
  const copy = original.cloneNode(true);
  const [from, to] = [original, copy].map((root) => [...root.querySelectorAll("*")]);
  from.forEach((element, number) => {
    const style = getComputedStyle(element);
    for (const name of STYLES) if (style[name]) to[number].setAttribute(name, style.getPropertyValue(name));
  });
  for (const canvas of plot.querySelectorAll("canvas")) {
    const { x, y, width, height } = canvas.dataset;
    copy.prepend(svg("image", { x, y, width, height, href: canvas.toDataURL(), preserveAspectRatio: "none", "image-rendering": "pixelated" }));
  }
  const paper = getComputedStyle(document.documentElement).getPropertyValue("--paper").trim();
  copy.prepend(svg("rect", { width: "100%", height: "100%", fill: paper }));
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  return new XMLSerializer().serializeToString(copy);
}
