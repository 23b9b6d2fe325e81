// The figure of each lesson: one of the essay's, or a screen of the live page, some of which begin with other settings.

import { ESSAY } from "../live/essay.js";
import { SCREENS } from "../live/screens.js";

const LESSONS = {
  embeddings: begun(ESSAY.integers, { position: 0 }),
  windows: SCREENS.packing,
  addition: ESSAY.added,
  rotation: ESSAY.turn,
  biases: begun(SCREENS.biases, { tokens: 32 }),
  segments: begun(SCREENS.packing, { lengths: "9, 6", padding: 3, causal: "no" }),
  gpt: begun(SCREENS.distance, { length: 64, head_dim: 16, scaling: "none" }),
  extrapolation: ESSAY.beyond,
  stretching: SCREENS.scalings,
  meaning: ESSAY.waves,
};

function begun(figure, values) {
  const settings = (named) => Object.entries(named).map(([name, each]) => [name, name in values ? { ...each, value: values[name] } : each]);
  return { ...figure, groups: figure.groups.map((named) => Object.fromEntries(settings(named))) };
}

Object.assign(ESSAY, Object.fromEntries(Object.entries(LESSONS).map(([name, figure]) => [`lesson-${name}`, figure])));
