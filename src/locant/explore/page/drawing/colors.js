// Scales of colours that a colour-blind reader can tell apart, as tables of 256. One sign: cividis (Nuñez, Anderton and
// Renslow 2018). Signed: blue, paper, orange. Angles: a cycle.

const ANCHORS = {
  one: {
    light: ["#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838"],
  },
  signed: {
    light: ["#0a3a6b", "#1f6fb0", "#6fb1dd", "#cfe3f1", "#f8f8f6", "#fbdcb8", "#f3a04f", "#cf5a05", "#7a2d04"],
    dark: ["#b8e0ff", "#5db0ee", "#2b77ad", "#1c3f5c", "#20252b", "#573415", "#a8581a", "#ee8f3c", "#ffd6a6"],
  },
  angle: {
    light: ["#e2d9e2", "#8aadc3", "#5f6fbb", "#4c2c86", "#2f1436", "#6f1f52", "#b1556a", "#cf9d87", "#e2d9e2"],
  },
};

const tables = new Map();

// `element`: what is drawn on.
export function table(name, element) {
  const dark = getComputedStyle(element).colorScheme.trim() === "dark";
  const kind = dark && ANCHORS[name].dark ? "dark" : "light";
  const key = `${name} ${kind}`;
  if (!tables.has(key)) tables.set(key, spread(ANCHORS[name][kind]));
  return tables.get(key);
}

export function css(name, share, element) {
  const at = 3 * Math.round(255 * Math.min(1, Math.max(0, share)));
  return `rgb(${table(name, element).slice(at, at + 3).join(" ")})`;
}

function spread(anchors) {
  const colors = anchors.map((text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16)));
  const made = new Uint8ClampedArray(3 * 256);
  for (let entry = 0; entry < 256; entry++) {
    const place = (entry / 255) * (colors.length - 1);
    const before = Math.min(Math.floor(place), colors.length - 2);
    for (let part = 0; part < 3; part++) {
      made[3 * entry + part] = colors[before][part] + (place - before) * (colors[before + 1][part] - colors[before][part]);
    }
  }
  return made;
}
