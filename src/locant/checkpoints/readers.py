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

from locant.errors import InputError
from locant.kernels.rotary import Layout
from locant.positions.alibi import ALiBi, alibi_slopes
from locant.positions.angles import AngleMode
from locant.positions.base import PositionEncoding
from locant.positions.constant import Constant
from locant.positions.deberta import Deberta
from locant.positions.learned import Learned
from locant.positions.rope_config import rotary_from_config
from locant.positions.rope_sizes import HEADS, LENGTHS, WIDTHS, one_of
from locant.positions.rope_types import integer, number
from locant.positions.shaw import Shaw
from locant.positions.t5 import T5Bias

__all__ = [
    "Request", "read_alibi", "read_bert", "read_deberta", "read_falcon", "read_learned", "read_mpt", "read_opt",
    "read_roberta", "read_rotary", "read_rotary_in_some_layers", "read_rotary_in_windows", "read_t5", "required",
    "some_layers", "window_layers",
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
    value = one_of(facts, *keys)
    if value is None:
        raise InputError(
            f"got a {facts.get('model_type')} configuration without {keys[0]}", f"{keys[0]!r}, as the model has it"
        )
    return integer(keys[0], value)


def read_rotary(request: Request) -> PositionEncoding:
    """Rotary positions in all layers, or in those of one type."""
    return rotary_from_config(
        request.facts, layer_type=request.layer_type, angles=request.angles, layout=request.layout
    )


def read_rotary_in_windows(request: Request) -> PositionEncoding:
    """Rotary positions where attention slides, and none where it is full (Cohere 2, Exaone 4)."""
    return PositionEncoding() if request.layer_type == "full_attention" else _rotary_of_all(request)


def window_layers(facts: Mapping[str, Any]) -> tuple[str, ...]:
    """The two types of layers, unless no layer has a window."""
    if facts.get("sliding_window") is None:
        return ()
    return ("sliding_attention", "full_attention")


def read_rotary_in_some_layers(request: Request) -> PositionEncoding:
    """Rotary positions in the layers that a list names, and none in the others (SmolLM 3, Llama 4)."""
    return PositionEncoding() if request.layer_type == "without" else _rotary_of_all(request)


def some_layers(facts: Mapping[str, Any]) -> tuple[str, ...]:
    """``with`` and ``without``, unless all layers have rotary positions."""
    if "no_rope_layers" not in facts:
        raise InputError(
            f"got a {facts['model_type']} configuration without no_rope_layers",
            "1 for each layer with positions, else 0",
        )
    return () if all(facts["no_rope_layers"]) else ("with", "without")


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
    offset = int(facts["pad_token_id"]) + 1
    _require_absolute(facts)
    return Learned(required(facts, *LENGTHS) - offset, required(facts, *TABLE_WIDTHS), offset=offset)


def read_bert(request: Request) -> PositionEncoding:
    """A table, or what ``position_embedding_type`` says instead (up to transformers 4)."""
    facts = request.facts
    kind = facts.get("position_embedding_type", "absolute")
    if kind == "absolute":
        return read_learned(request)
    if kind not in RELATIVE_KEYS:
        known = ", ".join(("absolute", *RELATIVE_KEYS))
        raise InputError(f"got position_embedding_type={kind!r}, expected one of {known}", "one of these names")
    width, heads = required(facts, *WIDTHS), required(facts, *HEADS)
    return Shaw(width // heads, required(facts, *LENGTHS) - 1, key_term=RELATIVE_KEYS[kind])


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
    missing = [key for key in ("alibi", "alibi_bias_max") if key not in attention]
    if missing or not attention["alibi"]:
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
    if not facts["alibi"]:
        return read_rotary(request)
    heads, width = required(facts, *HEADS), required(facts, *WIDTHS)
    return _alibi_with(heads, [slope / math.sqrt(width // heads) for slope in alibi_slopes(heads)])


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
    if not facts.get("relative_attention") or facts.get("position_biased_input", True):
        raise InputError(
            "got a deberta-v2 configuration with absolute positions (position_biased_input, or no relative_attention)",
            "'relative_attention': True and 'position_biased_input': False, as released models have them",
        )
    terms: Any = facts.get("pos_att_type", ())
    terms = [term.strip() for term in terms.lower().split("|")] if isinstance(terms, str) else terms
    buckets, longest = facts.get("position_buckets", -1), facts.get("max_relative_positions", -1)
    width, heads = required(facts, *WIDTHS), required(facts, *HEADS)
    return Deberta(
        heads,
        width // heads,
        num_buckets=buckets if buckets > 0 else None,
        max_distance=longest if longest > 0 else required(facts, *LENGTHS),
        terms=terms,
        norm="layer_norm" in facts.get("norm_rel_ebd", "none"),
    )


def _rotary_of_all(request: Request) -> PositionEncoding:
    return rotary_from_config(request.facts, angles=request.angles, layout=request.layout)


def _alibi_with(heads: int, slopes: list[float]) -> ALiBi:
    bias = ALiBi(heads)
    bias.slopes = Constant(torch.tensor(slopes, dtype=torch.float64, device="cpu"))
    return bias


def _require_absolute(facts: Mapping[str, Any]) -> None:
    kind = facts.get("position_embedding_type", "absolute")
    if kind != "absolute":
        raise InputError(
            f"got position_embedding_type={kind!r} for {facts['model_type']}, expected 'absolute'",
            "a BERT of that kind",
        )
