"""The explanation of a model's position encoding in numbers: everything that `locant explain` prints."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from locant.checkpoints.explanation_warnings import encoding_warnings
from locant.checkpoints.layer_strip import Layer, layer_strip
from locant.checkpoints.pretrained import describe_layers
from locant.checkpoints.rotary_settings import RotarySettings, rotary_settings
from locant.checkpoints.vllm_support import SWAPPED, Serving, vllm_support
from locant.deprecation import Renamed
from locant.embedding.table import TableSize, table_sizes
from locant.errors import ConfigWarning
from locant.models.architecture import Architecture
from locant.models.config_values import (
    LENGTHS,
    WIDTHS,
    Config,
    flag,
    integer_at,
)
from locant.models.encodings import encoding_from_config, layer_types, read_measurable, table_length
from locant.models.ngram_tables import ngram_tables
from locant.models.per_layer_tables import per_layer_sizes
from locant.models.registry import with_defaults
from locant.models.rope_parameters import stated_trained_length
from locant.models.rotary_config import named_layout
from locant.positions.base import PositionEncoding
from locant.positions.encodings.learned import Learned
from locant.positions.encodings.rotary import Rotary
from locant.positions.scaling import Linear, Proportional

DEFAULT_LENGTH = 2048
"""The length to measure if a configuration has no length."""

TOKEN_WIDTHS = ("embedding_size", "word_embed_proj_dim", "dim", *WIDTHS)  # widths below the layers' come first


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The layers that share one encoding. `name` is their type, or ``None`` if all layers share one."""

    name: str | None
    kind: str
    encoding: str
    methods: tuple[str, ...]
    num_parameters: int
    rotary: RotarySettings | None
    warnings: tuple[str, ...]

    doors = Renamed("methods")


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The explanation of a configuration.

    Args:
        longest, trained: the longest sequence, and the longest sequence before any extension, if known. Rows of a
            table that are not positions do not count.
        layers: the layer types, with the encodings of the architecture.
        strip: every layer, from the first to the last. It is empty if the configuration does not state the number or
            order of the layers.
        swapped: the encoding that `locant.swap` put into each layer. ``None`` means that the layer has its own
            encoding. The tuple is empty if the model is not swapped.
        defaults: the defaults of the class in `transformers` for values that the configuration lacks.
    """

    model_type: str
    longest: int | None
    trained: int | None
    layers: tuple[Layers, ...]
    strip: tuple[Layer, ...]
    swapped: tuple[str | None, ...]
    tables: tuple[TableSize, ...]
    tied: bool | None
    vllm: Serving
    defaults: Mapping[str, Any]


def explain(config: Mapping[str, Any] | object) -> Explanation:
    """Explain the position encoding of a Hugging Face configuration. Long contexts are measured, which takes a second.

    Missing values are replaced by the defaults of the architecture in `transformers`. See `with_defaults`.

    >>> explained = explain({"model_type": "gpt2", "n_positions": 1024, "n_embd": 768, "vocab_size": 50257})
    >>> explained.layers[0].methods, explained.tables[1]
    (('embed',), TableSize(name='positions', shape=(1024, 768)))
    """
    stated, architecture = read_measurable(config)
    full = with_defaults(config)
    device = "meta" if architecture.rotary_keys.no_rotation is None else "cpu"  # where lengths are measured
    built = {name: _without_values(full, name, device) for name in layer_types(full) or (None,)}
    named = {name: encoding for name, (encoding, _) in built.items()}
    longest = table_length(named.values()) or _longest(full)
    rotaries = [encoding for encoding in named.values() if isinstance(encoding, Rotary)]
    swapped = describe_layers(stated)
    return Explanation(
        model_type=full["model_type"],
        longest=longest,
        trained=trained_length(full, rotaries[0]) if rotaries else longest,
        layers=tuple(_layers(full, architecture, name, *each, longest) for name, each in built.items()),
        strip=layer_strip(full),
        swapped=swapped,
        tables=(*_tables(full, named), *per_layer_sizes(config), *(table.size for table in ngram_tables(config))),
        tied=flag("tie_word_embeddings", full["tie_word_embeddings"]) if "tie_word_embeddings" in full else None,
        vllm=SWAPPED if any(swapped) else vllm_support(full, architecture, rotaries),
        defaults={key: value for key, value in full.items() if key not in stated},
    )


def trained_length(config: Config, rotary: Rotary) -> int | None:
    """Return the trained length of a model, or None if its configuration lacks it, as with linear scaling."""
    stated = getattr(rotary.scaling, "original_max_seq_len", None) or stated_trained_length(config)
    return stated or (None if isinstance(rotary.scaling, (Linear, Proportional)) else _longest(config))


def _layers(
    config: Config,
    architecture: Architecture,
    name: str | None,
    encoding: PositionEncoding,
    ignored: Sequence[str],
    longest: int | None,
) -> Layers:
    rotary = None
    if isinstance(encoding, Rotary):
        trained = trained_length(config, encoding) or longest or DEFAULT_LENGTH
        rotary = rotary_settings(encoding, longest or trained, trained)
    nope = type(encoding) is PositionEncoding
    return Layers(
        name=name,
        kind="none" if nope else type(encoding).__name__,
        encoding="no position encoding (NoPE)" if nope else repr(encoding),
        methods=tuple(method for method in encoding.methods() if method != "unrotate"),  # a warning covers `unrotate`
        num_parameters=sum(size.num_parameters for size in table_sizes(encoding)),
        rotary=rotary,
        warnings=(*ignored, *encoding_warnings(config, architecture, encoding, rotary, longest)),
    )


def _without_values(config: Config, name: str | None, device: str) -> tuple[PositionEncoding, list[str]]:
    """Build the encoding of these layers on a device, and list the values in the configuration that it ignores.

    Its tables are not initialised. If the configuration has ``rope_interleave``, it decides the layout.
    """
    with torch.device(device), _SkipInitialization(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")  # the table states that the encoding was measured
        warnings.simplefilter("always", ConfigWarning)
        encoding = encoding_from_config(config, layer_type=name, layout=named_layout(config), allow_no_rotation=True)
    return encoding, [str(each.message) for each in caught]


class _SkipInitialization(TorchFunctionMode):
    """A mode without the initialization of tables, because random numbers on the meta device load torch's compiler.

    It does not use `Weightless`, because the measurement of an architecture without a row would fail in that mode.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in (nn.init.normal_, torch.Tensor.normal_):
            return {"tensor": args[0] if args else None, **(kwargs or {})}["tensor"]
        return func(*args, **(kwargs or {}))


def _tables(config: Config, named: Mapping[str | None, PositionEncoding]) -> tuple[TableSize, ...]:
    vocab = integer_at(config, "vocab_size")
    width = next((integer_at(config, key) for key in TOKEN_WIDTHS if config.get(key) is not None), None)
    tables: list[TableSize] = []
    if vocab is not None and width is not None:
        tables.append(TableSize(name="tokens", shape=(vocab, width)))
        segments = integer_at(config, "type_vocab_size", low=0)
        if segments:
            tables.append(TableSize(name="segments", shape=(segments, width)))
    for name, encoding in named.items():
        for size in table_sizes(encoding):
            table = "positions" if isinstance(encoding, Learned) else f"positions.{size.name}"
            tables.append(TableSize(name=table if name is None else f"{table} ({name})", shape=size.shape))
    return tuple(tables)


def _longest(config: Config) -> int | None:
    """Return the longest sequence. If no other length is stated, it is the training length (BLOOM, Qwen 1)."""
    longest = integer_at(config, *LENGTHS)
    return integer_at(config, "seq_length") if longest is None else longest
