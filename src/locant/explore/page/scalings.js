// What the scalings of rotary positions are called in words.

export const SCALINGS = {
  none: "none", linear: "linear (position interpolation)", ntk: "NTK-aware", dynamic: "dynamic NTK", yarn: "YaRN",
  longrope: "LongRoPE", llama3: "Llama 3", proportional: "proportional (Gemma 4)",
};
