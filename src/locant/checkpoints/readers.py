"""How the position encoding of each kind of architecture follows from its configuration.

Every function takes a `Request` and returns a fresh encoding; `locant.checkpoints.architectures` says which
architecture is of which kind. A key that decides something has to be there: the defaults of somebody's class are not
guessed at, but for numbers that were written into the modeling code before there was a key for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from locant.arguments import shown
from locant.errors import InputError
from locant.kernels.rotary import Layout
from locant.positions.angles import AngleMode
from locant.positions.base import PositionEncoding
from locant.positions.constant import Constant
from locant.positions.encodings.alibi import ALiBi, alibi_slopes
from locant.positions.encodings.deberta import Deberta
from locant.positions.encodings.learned import Learned
from locant.positions.encodings.shaw import Shaw
from locant.positions.encodings.t5 import T5Bias
from locant.positions.rope_config.config import rotary_from_config
from locant.positions.rope_config.sizes import HEADS, LENGTHS, WIDTHS, integer_of
from locant.positions.rope_config.types import integer, number

__all__ = [
    "Request", "flag", "read_alibi", "read_bert", "read_deberta", "read_falcon", "read_learned", "read_mpt",
    "read_opt", "read_roberta", "read_rotary", "read_t5", "required",
]  # fmt: skip

T5_MAX_DISTANCE = 128
"""What T5's code had before its configuration had a key for it."""

OPT_OFFSET = 2
"""Rows before position 0, written into OPT's code."""

TABLE_WIDTHS = ("embedding_size", "dim", *WIDTHS)


@dataclass(frozen=True, kw_only=True)
class Request:
    """A configuration, and which encoding of the model is meant."""

    facts: Mapping[str, Any]
    layer_type: str | None = None
    angles: AngleMode = "exact"
    layout: Layout | None = None


def required(facts: Mapping[str, Any], *keys: str) -> int:
    """The integer under one of these synonyms."""
    value = integer_of(facts, *keys)
    if value is None:
        raise InputError(
            f"got a {facts.get('model_type')} configuration without {keys[0]}", f"{keys[0]!r}, as the model has it"
        )
    return value


def flag(facts: Mapping[str, Any], key: str, default: bool | None = None) -> bool:
    """Whether a key says true; a text such as "false" would."""
    value = facts.get(key, default)
    if not isinstance(value, bool):
        raise InputError(f"got {key}={shown(value)} for {facts.get('model_type')}, expected true or false", "a boolean")
    return value


def read_rotary(request: Request) -> PositionEncoding:
    """Rotary positions in all layers, or in those of one type."""
    return rotary_from_config(
        request.facts, layer_type=request.layer_type, angles=request.angles, layout=request.layout
    )


def read_learned(request: Request) -> PositionEncoding:
    """A table with one row per position (GPT-2)."""
    return Learned(required(request.facts, *LENGTHS), required(request.facts, *TABLE_WIDTHS))


def read_opt(request: Request) -> PositionEncoding:
    """A table whose row 2 is position 0; its width is that of the layers, not of the token table."""
    return Learned(required(request.facts, *LENGTHS), required(request.facts, *WIDTHS), offset=OPT_OFFSET)


def read_roberta(request: Request) -> PositionEncoding:
    """A table that begins behind the row of the padding token: 514 rows are 512 positions."""
    facts = request.facts
    if "pad_token_id" not in facts:
        raise InputError(
            f"got a {facts['model_type']} configuration without pad_token_id", "'pad_token_id': 1, usually"
        )
    offset = integer("pad_token_id", facts["pad_token_id"], 0) + 1
    _require_absolute(facts)
    rows = required(facts, *LENGTHS)
    if rows <= offset:
        raise InputError(f"got max_position_embeddings={rows}, of which {offset} are no positions", "514, usually")
    return Learned(rows - offset, required(facts, *TABLE_WIDTHS), offset=offset)


def read_bert(request: Request) -> PositionEncoding:
    """A table, or what ``position_embedding_type`` says instead (up to transformers 4)."""
    facts = request.facts
    kind = facts.get("position_embedding_type", "absolute")
    if kind == "absolute":
        return read_learned(request)
    if not isinstance(kind, str) or kind not in RELATIVE_KEYS:
        known = ", ".join(("absolute", *RELATIVE_KEYS))
        raise InputError(f"got position_embedding_type={shown(kind)}, expected one of {known}", "one of these names")
    return Shaw(_head_dim(facts), required(facts, *LENGTHS) - 1, key_term=RELATIVE_KEYS[kind])


RELATIVE_KEYS: Mapping[str, bool] = {"relative_key": False, "relative_key_query": True}
"""Whether keys are multiplied with the table as well. BERT counts its rows from the other end: flip its table."""


def read_alibi(request: Request) -> PositionEncoding:
    """The slopes of the paper (BLOOM)."""
    return ALiBi(required(request.facts, *HEADS))


def read_mpt(request: Request) -> PositionEncoding:
    """ALiBi whose smallest slope is ``2 ** -alibi_bias_max``.

    Where the number of heads is not a power of two, MPT sorts the slopes of the next larger one into odd and even
    places; that is the paper's rule in other words.
    """
    facts = request.facts
    attention = facts.get("attn_config", {})
    if not isinstance(attention, Mapping):
        raise InputError(f"got attn_config={shown(attention)}, expected a dictionary", "{'alibi': True, ...}")
    missing = [key for key in ("alibi", "alibi_bias_max") if attention.get(key) is None]
    if missing or not flag(attention, "alibi"):
        got = f"without {' and '.join(missing)}" if missing else "with alibi=false, which transformers does not know"
        raise InputError(f"got an attn_config {got}", "{'alibi': True, 'alibi_bias_max': 8}")
    heads = required(facts, *HEADS)
    reach = number("alibi_bias_max", attention["alibi_bias_max"]) / 8
    return _alibi_with(heads, [slope**reach for slope in alibi_slopes(heads)])


def read_falcon(request: Request) -> PositionEncoding:
    """Rotary positions, or ALiBi.

    Falcon adds its slopes before it divides the scores by ``sqrt(head_dim)``; ours are added after.
    """
    facts = request.facts
    if "alibi" not in facts:
        raise InputError("got a falcon configuration without alibi", "'alibi': False for rotary positions")
    if not flag(facts, "alibi"):
        return read_rotary(request)
    heads, width = required(facts, *HEADS), _head_dim(facts)
    return _alibi_with(heads, [slope / math.sqrt(width) for slope in alibi_slopes(heads)])


def read_t5(request: Request) -> PositionEncoding:
    """The table of relative buckets; the encoder's tells earlier keys from later ones."""
    facts = request.facts
    buckets = required(facts, "relative_attention_num_buckets")
    distance = facts.get("relative_attention_max_distance", T5_MAX_DISTANCE)
    return T5Bias(
        required(facts, *HEADS),
        num_buckets=buckets,
        max_distance=integer("relative_attention_max_distance", distance),
        bidirectional=request.layer_type == "encoder",
    )


def read_deberta(request: Request) -> PositionEncoding:
    """Disentangled attention over log buckets (DeBERTa v2 and v3)."""
    facts = request.facts
    if not flag(facts, "relative_attention", False) or flag(facts, "position_biased_input", True):
        raise InputError(
            "got a deberta-v2 configuration with absolute positions (position_biased_input, or no relative_attention)",
            "'relative_attention': True and 'position_biased_input': False, as released models have them",
        )
    heads = required(facts, *HEADS)
    buckets, longest = (_positive(facts, key) for key in ("position_buckets", "max_relative_positions"))
    return Deberta(
        heads,
        _head_dim(facts),
        num_buckets=buckets,
        max_distance=longest or required(facts, *LENGTHS),
        terms=_texts(facts, "pos_att_type"),  # type: ignore[arg-type]  # it knows its terms, and refuses others
        norm="layer_norm" in _texts(facts, "norm_rel_ebd"),
    )


def _positive(facts: Mapping[str, Any], key: str) -> int | None:
    """A number of which -1 means none."""
    return integer(key, facts.get(key, -1), -1) if facts.get(key, -1) not in (-1, 0) else None


def _texts(facts: Mapping[str, Any], key: str) -> list[str]:
    """Names in a list, or in one text with bars between them."""
    said = facts.get(key, "")
    names = said.split("|") if isinstance(said, str) else said
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise InputError(f"got {key}={shown(said)}, expected names", "'p2c|c2p', or a list of them")
    return [name.strip().lower() for name in names if name.strip()]


def _head_dim(facts: Mapping[str, Any]) -> int:
    width, heads = required(facts, *WIDTHS), required(facts, *HEADS)
    if width % heads:
        raise InputError(f"got hidden_size={width} for {heads} heads, expected a multiple", "the sizes of the model")
    return width // heads


def _alibi_with(heads: int, slopes: list[float]) -> ALiBi:
    bias = ALiBi(heads)
    bias.slopes = Constant(torch.tensor(slopes, dtype=torch.float64, device="cpu"))
    return bias


def _require_absolute(facts: Mapping[str, Any]) -> None:
    kind = facts.get("position_embedding_type", "absolute")
    if kind != "absolute":
        raise InputError(
            f"got position_embedding_type={shown(kind)} for {facts['model_type']}, expected 'absolute'",
            "a BERT of that kind",
        )
