"""Copies of trained models whose configuration, metadata or weights tell a lie about positions.

A lie is put into a folder that `transformers` reads. Weights that do not change are links to the true ones. A lie in
the metadata of a GGUF file is what `transformers` reads from a changed copy of the file.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["LIES", "Lie", "edit_gguf", "write"]

Config = dict[str, Any]
State = dict[str, Tensor]
TRUTH = "the configuration"
SHORT, MIDDLE, USUAL, LONG = 128, 256, 512, 768
"""The numbers of tokens per window. What every window of a length hides is not looked for at this length."""


class Lie(NamedTuple):
    """A lie about positions.

    Args:
        model: the model of `weights.MODELS`.
        sentence: what the copy claims.
        truth: the name of the reading that undoes the lie, as `locant audit` gives it.
        config: changes the configuration in place.
        state: returns the changed weights, given the true ones and the true configuration.
        gguf: the key of the metadata and its value. ``None`` means that the key is missing.
        lengths: the numbers of tokens per window, in the order in which they are tried until the lie is found.
    """

    model: str
    sentence: str
    truth: str
    config: Callable[[Config], object] | None = None
    state: Callable[[State, Config], State] | None = None
    gguf: tuple[str, float | None] | None = None
    lengths: Sequence[int] = (SHORT, USUAL)


def _rope(**values: Any) -> Callable[[Config], object]:
    return lambda config: config["rope_parameters"].update(values)


def _ropes(**by_type: Config) -> Callable[[Config], object]:
    def edit(config: Config) -> None:
        for layer_type, values in by_type.items():
            config["rope_parameters"][layer_type].update(values)

    return edit


def _types(every: int, first: int) -> Callable[[Config], object]:
    """Give full attention to some layers, as a list of types in the configuration does."""

    def edit(config: Config) -> None:
        full = [bool(every) and layer % every == first for layer in range(config["num_hidden_layers"])]
        config["layer_types"] = ["full_attention" if each else "sliding_attention" for each in full]

    return edit


def _of_heads(state: State, head_dim: int, change: Callable[[Tensor], Tensor]) -> State:
    """Change the order of the rows ``heads head_dim ...`` of queries, keys and their norms."""
    names = ("q_proj.weight", "k_proj.weight", "q_norm.weight", "k_norm.weight")
    changed = {name: each.unflatten(0, (-1, head_dim)) for name, each in state.items() if name.endswith(names)}
    return state | {name: change(heads).flatten(0, 1).contiguous() for name, heads in changed.items()}


def interleaved(state: State, config: Config) -> State:
    """Put the two members of each pair side by side, as files for llama.cpp and Meta's own have them."""
    return _of_heads(state, config["head_dim"], lambda heads: heads.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2))


def exchanged(state: State, config: Config) -> State:
    """Exchange the two members of each pair, so that all pairs rotate in the other direction."""
    return _of_heads(state, config["head_dim"], lambda heads: heads.unflatten(1, (2, -1)).flip(1).flatten(1, 2))


def fused(state: State, config: Config) -> State:
    """Join weights as Phi-3 has them."""
    joined = dict[str, Tensor]()
    for name, each in state.items():
        layer, _, part = name.rpartition("layers.")[2].partition(".")
        prefix = f"model.layers.{layer}"
        if part == "self_attn.q_proj.weight":
            rows = [state[f"{prefix}.self_attn.{letter}_proj.weight"] for letter in "qkv"]
            joined[f"{prefix}.self_attn.qkv_proj.weight"] = torch.cat(rows)
        elif part == "mlp.gate_proj.weight":
            joined[f"{prefix}.mlp.gate_up_proj.weight"] = torch.cat([each, state[f"{prefix}.mlp.up_proj.weight"]])
        elif not part.endswith(("k_proj.weight", "v_proj.weight", "up_proj.weight")):
            joined[name] = each
    return joined


def as_phi3(config: Config) -> None:
    """Describe a Llama as a Phi-3 that rotates half of each head. Both compute the same otherwise."""
    config |= {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "sliding_window": None}
    config |= {"original_max_position_embeddings": config["max_position_embeddings"]}
    config["rope_parameters"] |= {"partial_rotary_factor": 0.5}


def _yarn(factor: float, trained: int) -> Config:
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": trained}


def _llama3(factor: float, trained: int) -> Config:
    rope = {"rope_type": "llama3", "factor": factor, "original_max_position_embeddings": trained}
    return rope | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


LOCAL, GLOBAL = "sliding_attention", "full_attention"

LIES: dict[str, Lie] = {
    "smollm2-truth": Lie("smollm2", "nothing is changed", TRUTH, lengths=(SHORT, USUAL)),
    "base-10000": Lie("smollm2", "base 10,000", "base 100,000", _rope(rope_theta=1e4)),
    "base-150000": Lie("smollm2", "base 150,000", "base 100,000", _rope(rope_theta=1.5e5)),
    "base-1000000": Lie("smollm2", "base 1,000,000", "base 100,000", _rope(rope_theta=1e6)),
    "linear-4": Lie("smollm2", "linear scaling by 4", "scaling none", _rope(rope_type="linear", factor=4.0)),
    "yarn-4": Lie("smollm2", "YaRN by 4", "scaling none", _rope(**_yarn(4.0, 2048))),
    "llama3-8": Lie("smollm2", "the scaling of Llama 3 by 8", "scaling none", _rope(**_llama3(8.0, 1024))),
    "share-50": Lie("smollm2", "half of each head is rotated", "100% of each head rotated", as_phi3, fused),
    "interleaved": Lie("smollm2", "the rows of an interleaved file", "interleaved layout", state=interleaved),
    "reversed": Lie("smollm2", "the members of pairs exchanged", "reversed direction", state=exchanged),
    "interleaved-and-base": Lie(
        "smollm2", "the rows of an interleaved file, and base 10,000", "interleaved layout, base 100,000",
        _rope(rope_theta=1e4), interleaved,
    ),
    "gguf-no-base": Lie(
        "smollm2", "a GGUF without `llama.rope.freq_base`", "base 100,000", gguf=("llama.rope.freq_base", None)
    ),
    "gemma3-truth": Lie("gemma3", "nothing is changed", TRUTH, lengths=(SHORT,)),
    "local-base": Lie(
        "gemma3", "base 1,000,000 in all layers", f"base 10,000 in {LOCAL} layers",
        _ropes(**{LOCAL: {"rope_theta": 1e6}}),
    ),
    "global-base": Lie(
        "gemma3", "base 10,000 in all layers", f"base 1,000,000 in {GLOBAL} layers",
        _ropes(**{GLOBAL: {"rope_theta": 1e4}}),
    ),
    "bases-exchanged": Lie(
        "gemma3", "the two bases exchanged", f"base 1,000,000 in {GLOBAL} layers, base 10,000 in {LOCAL} layers",
        _ropes(**{LOCAL: {"rope_theta": 1e6}, GLOBAL: {"rope_theta": 1e4}}),
    ),
    "global-linear-8": Lie(
        "gemma3", "linear scaling by 8 in layers with full attention, as the larger models have", "scaling none",
        _ropes(**{GLOBAL: {"rope_type": "linear", "factor": 8.0}}),
    ),
    "full-layers-first": Lie(
        "gemma3", "full attention in layers 0, 6, ...", "full attention in layers 5, 11, ...", _types(6, 0)
    ),
    "full-layers-none": Lie("gemma3", "a window in every layer", "full attention in layers 5, 11, ...", _types(0, 0)),
    "gguf-window-128": Lie(
        "gemma3", "a GGUF with `gemma3.attention.sliding_window` 128", "sliding window 512",
        gguf=("gemma3.attention.sliding_window", 128), lengths=(MIDDLE, USUAL),
    ),
    "window-lost": Lie(
        "gemma3", "a window of 32,768, so no layer has one", "sliding window 512",
        lambda config: config.update(sliding_window=32_768), lengths=(LONG,),
    ),
    "gemma3-interleaved": Lie("gemma3", "the rows of an interleaved file", "interleaved layout", state=interleaved),
}  # fmt: skip
"""The truth and the lies of both models. Lies that a shorter window shows are not read with a longer one."""


def edit_gguf(source: Path, target: Path, key: str, value: float | None) -> None:
    """Copy a GGUF file with another number in its metadata, or without it."""
    import gguf

    shutil.copyfile(source, target)
    field = gguf.GGUFReader(target, "r+").get_field(key)
    assert field is not None, f"{source.name} has no {key}"
    if value is None:
        name = field.parts[1]  # the bytes of the key, which no program looks for from now on
        name[-1] = ord("_")
    else:
        field.parts[field.data[0]][0] = value


def _gguf_config(source: Path, folder: Path, key: str, value: float | None) -> Config:
    """Return the configuration that `transformers` reads from a changed copy of a GGUF file."""
    import transformers

    copied = folder / source.name
    edit_gguf(source, copied, key, value)
    config = transformers.AutoConfig.from_pretrained(folder, gguf_file=copied.name).to_dict()
    copied.unlink()
    config.pop("quantization_config", None)
    return config


def write(lie: Lie, true: Path, folder: Path, gguf: Path | None = None) -> None:
    """Write a copy of a true model that tells a lie.

    Args:
        true: a folder with weights in safetensors.
        folder: an empty folder.
        gguf: the GGUF file of the model, for lies in its metadata.
    """
    from safetensors.torch import load_file, save_file

    config = json.loads((true / "config.json").read_text(encoding="utf-8"))
    if lie.state is None:
        (folder / "model.safetensors").symlink_to((true / "model.safetensors").resolve())
    else:
        state = lie.state(load_file(true / "model.safetensors"), config)
        save_file(state, folder / "model.safetensors", {"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (true / name).is_file():
            shutil.copyfile(true / name, folder / name)
    if lie.gguf is not None:
        assert gguf is not None, "a lie in the metadata needs the GGUF file"
        config |= _gguf_config(gguf, folder, *lie.gguf)
    if lie.config is not None:
        lie.config(config)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
