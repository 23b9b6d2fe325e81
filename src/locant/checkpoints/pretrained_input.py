"""The input of a published model, read from its folder: token, position and segment tables, and the norm of their sum.

Nothing else of the model is read, and no code of the folder is run. Every shape and dtype has to be the one that the
configuration says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from locant.arguments import shown
from locant.checkpoints.checkpoint_folder import DTYPES, TensorFolder
from locant.checkpoints.config_source import CONFIG, read_json
from locant.errors import InputError, RangeError
from locant.models.architecture import UNKNOWN, Architecture
from locant.models.config_values import Config, flag, integer, number, required
from locant.models.encodings import encoding_from_config
from locant.models.registry import read, read_known
from locant.models.weights import InputTables, RowScale

__all__ = ["PretrainedInput", "read_pretrained_input", "read_pretrained_token"]

OLD_NAMES = {"weight": "gamma", "bias": "beta"}
"""Parts of norms in checkpoints that came from TensorFlow."""


@dataclass(frozen=True, kw_only=True)
class PretrainedInput:
    """What an embedding is built from (on the meta device), and the tensors of its state."""

    options: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


class _Source:
    """A folder, its configuration and the row of its architecture."""

    def __init__(self, folder: Path | str, dtype: torch.dtype | None) -> None:
        if dtype is not None and dtype not in DTYPES.values():
            known = ", ".join(map(str, DTYPES.values()))
            raise RangeError(f"got {shown(dtype)} for dtype, expected one of {known}", "dtype=torch.float32")
        self.tensors = TensorFolder(folder)
        self.folder = self.tensors.folder
        facts = read_json(self.folder / CONFIG)
        if facts.get("auto_map") and read(facts)[1].rotary is UNKNOWN:
            kind = shown(facts.get("model_type"))
            got = f"got {self.folder}, a model_type {kind} with code of its own, which is not run"
            raise InputError(got, "locant.register_architecture for it, as docs/extending.md says")
        self.config, self.row = read_known(facts)
        self.dtype = dtype
        self.stated = _stated_dtype(facts)

    def read(self, module: str, shape: tuple[int, ...], why: str, part: str = "weight") -> Tensor:
        """A tensor, which has to have this shape because of these keys."""
        name = self.tensors.find(module, part) or self.tensors.find(module, OLD_NAMES.get(part, part))
        if name is None:
            got = f"got {self.folder} without a tensor {module}.{part}, where {self.config['model_type']} has it"
            raise InputError(got, "the folder of the whole model, and its own config.json")
        entry = self.tensors.entry(name)
        if entry.shape != shape:
            got = f"got {name} of shape {entry.shape} in {self.folder}, where its {CONFIG} says {shape} ({why})"
            raise InputError(got, "the configuration and the weights of one model")
        tensor = self.tensors.tensor(name)
        if self.dtype is not None:
            return tensor.to(self.dtype)
        if self.stated is not None and tensor.dtype != self.stated:
            got = f"got {name} of {tensor.dtype} in {self.folder}, where its {CONFIG} says {self.stated}"
            raise InputError(got, f"dtype={tensor.dtype}, which is that of the file")
        return tensor


def read_pretrained_token(folder: Path | str, dtype: torch.dtype | None = None) -> PretrainedInput:
    """The token table alone, as a `TokenEmbedding` takes it."""
    return _token(_Source(folder, dtype))


def read_pretrained_input(folder: Path | str, dtype: torch.dtype | None = None) -> PretrainedInput:
    """Everything up to the first layer, as an `InputEmbedding` takes it."""
    source = _Source(folder, dtype)
    config, inputs = source.config, source.row.inputs
    if why := inputs.why_not(config) if callable(inputs.why_not) else inputs.why_not:
        got = f"got {folder}, a {config['model_type']}, whose input is no sum of tables: {why}"
        raise InputError(got, "TokenEmbedding.from_pretrained, which reads its token table")
    token = _token(source)
    options, tensors = {**token.options}, {"token.weight": token.tensors["weight"]}
    d_model = options["d_model"]
    if inputs.positions is not None:
        with torch.device("meta"):
            encoding = encoding_from_config(config)
        if "embed" in encoding.doors():
            shape = tuple(encoding.get_parameter("weight").shape)
            options["encoding"] = encoding
            tensors["encoding.weight"] = source.read(inputs.positions, shape, "its positions and its width")
    if inputs.segments is not None and (
        num_segments := integer("type_vocab_size", config.get("type_vocab_size", 0), 0)
    ):
        options["num_segments"] = num_segments
        shape = (num_segments, d_model)
        tensors["segment.weight"] = source.read(inputs.segments, shape, "type_vocab_size and its width")
    if inputs.norm is not None:
        has_bias = inputs.norm_bias_key is None or flag(inputs.norm_bias_key, config.get(inputs.norm_bias_key, True))
        options["norm"] = nn.LayerNorm(d_model, eps=_eps(config, source.row), bias=has_bias, device="meta")
        for part in ("weight", "bias")[: 1 + has_bias]:
            tensors[f"norm.{part}"] = source.read(inputs.norm, (d_model,), "its width", part)
    if inputs.dropout_key is not None:
        options["dropout"] = number(inputs.dropout_key, config.get(inputs.dropout_key, 0.0), low=0, below=1)
    return PretrainedInput(options=options, tensors=tensors)


def _token(source: _Source) -> PretrainedInput:
    config, inputs = source.config, source.row.inputs
    rows = required(config, "vocab_size")
    width_key = inputs.width_key(config)
    width = required(config, width_key)
    options: dict[str, Any] = {"vocab_size": rows, "d_model": width, "scale": _scale(config, inputs)}
    padding = config.get("pad_token_id")
    if inputs.padding and padding is not None:
        row = integer("pad_token_id", padding, -rows)
        if row >= rows:
            got = f"got pad_token_id={row} in {source.folder / CONFIG}, of a vocabulary of {rows}"
            raise InputError(got, f"'pad_token_id': null, or a row of the {rows}")
        options["padding_idx"] = row
    weight = source.read(inputs.tokens, (rows, width), f"vocab_size and {width_key}")
    return PretrainedInput(options=options, tensors={"weight": weight})


def _scale(config: Config, inputs: InputTables) -> RowScale | None:
    """What the rows are multiplied with; a factor of one is none."""
    if inputs.scale_key not in config:
        return inputs.scale(config) if callable(inputs.scale) else inputs.scale
    factor = number(inputs.scale_key, config[inputs.scale_key])
    return None if factor == 1 else factor


def _eps(config: Config, row: Architecture) -> float:
    key = row.inputs.norm_eps
    if not isinstance(key, str):
        return key
    if key not in config:
        raise row.lacks(key, config)
    return number(key, config[key], low=0)


def _stated_dtype(facts: Config) -> torch.dtype | None:
    """The dtype that a configuration says its weights have: ``dtype``, and ``torch_dtype`` up to transformers 4."""
    inner = facts.get("text_config")
    places = [facts, inner] if isinstance(inner, Mapping) else [facts]
    name = next((place[key] for place in places for key in ("dtype", "torch_dtype") if place.get(key)), None)
    if name in (None, "auto"):
        return None
    known = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
    if not isinstance(name, str) or name not in known:
        raise InputError(f"got dtype={shown(name)} in {CONFIG}, expected one of {', '.join(known)}", "'dtype': null")
    return known[name]
