"""What a published model does about position, in numbers: everything that `locant explain` says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from locant.checkpoints.architectures import architecture_of, encoding_from_config, layer_types
from locant.checkpoints.readers import flag
from locant.checkpoints.rotary_facts import RotaryFacts, rotary_facts
from locant.checkpoints.serving import Serving, serving
from locant.checkpoints.traps import Case, traps
from locant.embedding.table import TableSize, table_sizes
from locant.positions.base import PositionEncoding
from locant.positions.encodings.learned import Learned
from locant.positions.encodings.rotary import Rotary
from locant.positions.rope_config.config import config_dict
from locant.positions.rope_config.sizes import LENGTHS, TRAINED, WIDTHS, integer_of, named_layout
from locant.positions.scaling import Linear, Proportional

__all__ = ["DOORS", "Explanation", "Layers", "explain", "trained_length"]

LENGTH_KEYS = (*LENGTHS, "seq_length")
TOKEN_WIDTHS = ("embedding_size", "word_embed_proj_dim", "dim", *WIDTHS)
DOORS = ("embed", "rotate", "bias")


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
    rotary: RotaryFacts | None
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A configuration, explained.

    Args:
        longest: the longest sequence that the configuration names.
        trained: the length before it was stretched, where that is said.
        tables: embedding tables: tokens, segments, positions.
    """

    model_type: str
    longest: int | None
    trained: int | None
    layers: tuple[Layers, ...]
    tables: tuple[TableSize, ...]
    tied: bool | None
    vllm: Serving


def explain(config: Mapping[str, Any] | object) -> Explanation:
    """What a Hugging Face configuration says about position; takes a second for long contexts, which are measured.

    >>> explained = explain({"model_type": "gpt2", "n_positions": 1024, "n_embd": 768, "vocab_size": 50257})
    >>> explained.layers[0].doors, explained.tables[1]
    (('embed',), TableSize(name='positions', shape=(1024, 768)))
    """
    facts = config_dict(config)
    architecture_of(facts)
    longest = integer_of(facts, *LENGTH_KEYS)
    named = {name: _on_meta(facts, name) for name in layer_types(facts) or (None,)}
    rotaries = [encoding for encoding in named.values() if isinstance(encoding, Rotary)]
    return Explanation(
        model_type=facts["model_type"],
        longest=longest,
        trained=trained_length(facts, rotaries[0]) if rotaries else longest,
        layers=tuple(_layers(facts, name, encoding, longest) for name, encoding in named.items()),
        tables=_tables(facts, named),
        tied=flag(facts, "tie_word_embeddings") if "tie_word_embeddings" in facts else None,
        vllm=serving(facts, rotaries),
    )


def trained_length(facts: Mapping[str, Any], rotary: Rotary) -> int | None:
    """The length that a model was trained with, as far as its configuration says it: with linear scaling, not."""
    stated = getattr(rotary.scaling, "original_max_seq_len", None) or integer_of(facts, TRAINED)
    return stated or (None if isinstance(rotary.scaling, (Linear, Proportional)) else integer_of(facts, *LENGTH_KEYS))


def _layers(facts: Mapping[str, Any], name: str | None, encoding: PositionEncoding, longest: int | None) -> Layers:
    measured = None
    if isinstance(encoding, Rotary):
        trained = trained_length(facts, encoding) or longest or MADE_FOR
        measured = rotary_facts(encoding, longest or trained, trained)
    case = Case(facts=facts, longest=longest, encoding=encoding, rotary=measured)
    return Layers(
        name=name,
        kind="none" if type(encoding) is PositionEncoding else type(encoding).__name__,
        encoding="no position encoding (NoPE)" if type(encoding) is PositionEncoding else repr(encoding),
        doors=_doors(encoding),
        num_parameters=sum(size.num_parameters for size in table_sizes(encoding)),
        rotary=measured,
        warnings=tuple(traps(case)),
    )


MADE_FOR = 2048
"""Measured where a configuration names no length at all."""


def _on_meta(facts: Mapping[str, Any], name: str | None) -> PositionEncoding:
    """Tables are weighed, not made. Of converted weights the layout is the one they were converted to."""
    with torch.device("meta"), _Unfilled():
        return encoding_from_config(facts, layer_type=name, layout=named_layout(facts))


class _Unfilled(TorchFunctionMode):
    """Leaves fresh tables as they are: drawing numbers that do not exist makes torch load its compiler first."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in (nn.init.normal_, torch.Tensor.normal_):
            return {"tensor": args[0] if args else None, **(kwargs or {})}["tensor"]
        return func(*args, **(kwargs or {}))


def _doors(encoding: PositionEncoding) -> tuple[str, ...]:
    return tuple(door for door in DOORS if getattr(type(encoding), door) is not getattr(PositionEncoding, door))


def _tables(facts: Mapping[str, Any], named: Mapping[str | None, PositionEncoding]) -> tuple[TableSize, ...]:
    vocab, width = integer_of(facts, "vocab_size"), _token_width(facts)
    tables: list[TableSize] = []
    if vocab is not None and width is not None:
        tables.append(TableSize(name="tokens", shape=(vocab, width)))
        segments = integer_of(facts, "type_vocab_size", low=0)
        if segments:
            tables.append(TableSize(name="segments", shape=(segments, width)))
    for name, encoding in named.items():
        for size in table_sizes(encoding):
            what = "positions" if isinstance(encoding, Learned) else f"positions.{size.name}"
            tables.append(TableSize(name=what if name is None else f"{what} ({name})", shape=size.shape))
    return tuple(tables)


def _token_width(facts: Mapping[str, Any]) -> int | None:
    """The width of the token table, which may be narrower than the layers."""
    found = next((key for key in TOKEN_WIDTHS if facts.get(key) is not None), None)
    return None if found is None else integer_of(facts, found)
