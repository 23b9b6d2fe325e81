"""What a published model does about position, in numbers: everything that `locant explain` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from locant.checkpoints.config_warnings import config_warnings
from locant.checkpoints.rotary_settings import RotarySettings, rotary_settings
from locant.embedding.table import TableSize, table_sizes
from locant.models.architecture import Architecture
from locant.models.config_values import LENGTHS, TRAINED, WIDTHS, Config, flag, integer_at
from locant.models.encodings import encoding_from_config, layer_types
from locant.models.registry import read_known, with_defaults
from locant.models.rotary_config import named_layout
from locant.positions.base import PositionEncoding
from locant.positions.encodings.learned import Learned
from locant.positions.encodings.rotary import Rotary
from locant.positions.scaling import DynamicNTK, Linear, LongRoPE, Proportional, YaRN

__all__ = ["Explanation", "Layers", "explain", "trained_length"]

LENGTH_KEYS = (*LENGTHS, "seq_length")
TOKEN_WIDTHS = ("embedding_size", "word_embed_proj_dim", "dim", *WIDTHS)


@dataclass(frozen=True, kw_only=True)
class Serving:
    """Whether vLLM honours the configuration, and why not."""

    answer: Literal["yes", "differently", "no"]
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The layers that share one encoding.

    Args:
        name: their type; ``None`` where all layers share one.
        encoding: the class, as its ``repr`` shows it.
        doors: where it acts: ``embed``, ``rotate``, ``bias``; none for NoPE.
    """

    name: str | None
    kind: str
    encoding: str
    doors: tuple[str, ...]
    num_parameters: int
    rotary: RotarySettings | None
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A configuration, explained.

    Args:
        longest: the longest sequence that the configuration has.
        trained: the length before it was stretched, where it is known.
        tables: embedding tables: tokens, segments, positions.
        defaults: values that the configuration lacks, and that the class of its architecture in `transformers` has.
    """

    model_type: str
    longest: int | None
    trained: int | None
    layers: tuple[Layers, ...]
    tables: tuple[TableSize, ...]
    tied: bool | None
    vllm: Serving
    defaults: Mapping[str, Any]


def explain(config: Mapping[str, Any] | object) -> Explanation:
    """What a Hugging Face configuration means for positions; takes a second for long contexts, which are measured.

    Values that are missing are those that `transformers` takes for the architecture, see `with_defaults`.

    >>> explained = explain({"model_type": "gpt2", "n_positions": 1024, "n_embd": 768, "vocab_size": 50257})
    >>> explained.layers[0].doors, explained.tables[1]
    (('embed',), TableSize(name='positions', shape=(1024, 768)))
    """
    stated, architecture = read_known(config)
    full = with_defaults(config)
    longest = integer_at(full, *LENGTH_KEYS)
    named = {name: _on_meta(full, name) for name in layer_types(full) or (None,)}
    rotaries = [encoding for encoding in named.values() if isinstance(encoding, Rotary)]
    return Explanation(
        model_type=full["model_type"],
        longest=longest,
        trained=trained_length(full, rotaries[0]) if rotaries else longest,
        layers=tuple(_layers(full, architecture, name, encoding, longest) for name, encoding in named.items()),
        tables=_tables(full, named),
        tied=flag("tie_word_embeddings", full["tie_word_embeddings"]) if "tie_word_embeddings" in full else None,
        vllm=_serving(full, architecture, rotaries),
        defaults={key: value for key, value in full.items() if key not in stated},
    )


def trained_length(config: Config, rotary: Rotary) -> int | None:
    """The length that a model was trained with, as far as its configuration has it: with linear scaling, not."""
    stated = getattr(rotary.scaling, "original_max_seq_len", None) or integer_at(config, TRAINED)
    return stated or (None if isinstance(rotary.scaling, (Linear, Proportional)) else integer_at(config, *LENGTH_KEYS))


def _layers(
    config: Config, architecture: Architecture, name: str | None, encoding: PositionEncoding, longest: int | None
) -> Layers:
    rotary = None
    if isinstance(encoding, Rotary):
        trained = trained_length(config, encoding) or longest or MADE_FOR
        rotary = rotary_settings(encoding, longest or trained, trained)
    return Layers(
        name=name,
        kind="none" if type(encoding) is PositionEncoding else type(encoding).__name__,
        encoding="no position encoding (NoPE)" if type(encoding) is PositionEncoding else repr(encoding),
        doors=encoding.doors(),
        num_parameters=sum(size.num_parameters for size in table_sizes(encoding)),
        rotary=rotary,
        warnings=tuple(config_warnings(config, architecture, encoding, rotary, longest)),
    )


MADE_FOR = 2048
"""Measured where a configuration has no length at all."""


def _on_meta(config: Config, name: str | None) -> PositionEncoding:
    """An encoding whose tables have shapes and no memory, in the layout of converted weights where they are."""
    with torch.device("meta"), _Unfilled():
        return encoding_from_config(config, layer_type=name, layout=named_layout(config))


class _Unfilled(TorchFunctionMode):
    """Leaves fresh tables as they are: drawing random numbers on the meta device makes torch load its compiler."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in (nn.init.normal_, torch.Tensor.normal_):
            return {"tensor": args[0] if args else None, **(kwargs or {})}["tensor"]
        return func(*args, **(kwargs or {}))


def _serving(config: Config, architecture: Architecture, rotaries: Sequence[Rotary]) -> Serving:
    """Whether vLLM rotates as a configuration prescribes, by its sources and its open issues in 2025.

    vLLM's ``get_rope`` picks keys out of the dictionary of rope parameters; it drops the others in silence.
    """
    if not architecture.vllm:
        return Serving(answer="no", reasons=(f"it has no model for {config['model_type']}",))
    if config.get("position_embedding_type", "absolute") != "absolute":
        return Serving(answer="no", reasons=("its BERT knows absolute positions only",))
    reasons = tuple(dict.fromkeys(reason for rotary in rotaries for reason in _reasons(rotary, architecture)))
    return Serving(answer="differently" if reasons else "yes", reasons=reasons)


def _reasons(rotary: Rotary, architecture: Architecture) -> Iterator[str]:
    scaling, keys = rotary.scaling, architecture.rotary_keys
    if isinstance(scaling, YaRN) and scaling.attention_factor is not None:
        yield "its YaRN drops attention_factor (vllm#46280)"
    if isinstance(scaling, YaRN) and scaling.mscale is not None and not keys.latent:
        yield "its YaRN reads mscale for DeepSeek's models only"
    if isinstance(scaling, DynamicNTK):
        yield "its dynamic scaling is fixed at the longest length, also for short sequences (vllm#3488)"
    if isinstance(scaling, LongRoPE):
        yield "it takes the long factors for every sequence if it is started with a longer context (vllm#27414)"
    if keys.layout not in (None, rotary.layout):
        yield f"it pairs dimensions as {keys.layout} for this architecture, whatever rope_interleave is"


def _tables(config: Config, named: Mapping[str | None, PositionEncoding]) -> tuple[TableSize, ...]:
    vocab, width = integer_at(config, "vocab_size"), _token_width(config)
    tables: list[TableSize] = []
    if vocab is not None and width is not None:
        tables.append(TableSize(name="tokens", shape=(vocab, width)))
        segments = integer_at(config, "type_vocab_size", low=0)
        if segments:
            tables.append(TableSize(name="segments", shape=(segments, width)))
    for name, encoding in named.items():
        for size in table_sizes(encoding):
            what = "positions" if isinstance(encoding, Learned) else f"positions.{size.name}"
            tables.append(TableSize(name=what if name is None else f"{what} ({name})", shape=size.shape))
    return tuple(tables)


def _token_width(config: Config) -> int | None:
    """The width of the token table, which may be narrower than the layers."""
    found = next((key for key in TOKEN_WIDTHS if config.get(key) is not None), None)
    return None if found is None else integer_at(config, found)
