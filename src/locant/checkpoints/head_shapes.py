"""How many heads a layer has, and which rows of a head are turned: read from a Hugging Face configuration.

Only sizes are read. A base or a scaling that this package would refuse does not matter to how rows are ordered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from locant.errors import InputError
from locant.positions.rope_config.dialects import Dialect, dialect_of
from locant.positions.rope_config.layers import is_per_layer, rope_dictionary
from locant.positions.rope_config.sizes import (
    HEADS,
    Config,
    head_dim_of,
    integer_of,
    layer_types_in,
    own_of_layers,
    rotary_dim_of,
)
from locant.positions.rope_config.types import integer

__all__ = ["HeadShape", "head_shape_of", "rotary_dialect_of"]

KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
LATENT = "qk_rope_head_dim"


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """The heads of one layer.

    Args:
        queries, keys: how many heads.
        width: rows of a head in the projection of queries.
        start: the first row of a head that is turned; not 0 in multi-head latent attention alone.
        turned: how many rows of a head are turned.
        latent: rows before the one key head of multi-head latent attention.
    """

    queries: int
    keys: int
    width: int
    start: int = 0
    turned: int
    latent: int = 0


def rotary_dialect_of(facts: Config) -> Dialect:
    """What is known about the architecture; a model without rotary positions raises."""
    if facts.get("alibi"):
        raise InputError("got alibi=true, a model without rotary positions", "the weights as they are")
    return dialect_of(facts)


def head_shape_of(facts: Config, layer: int | None) -> HeadShape:
    """The heads of this layer; without a number, those that all layers share.

    >>> facts = {"model_type": "phi", "hidden_size": 2560, "num_attention_heads": 32, "partial_rotary_factor": 0.4}
    >>> head_shape_of(facts, 0)
    HeadShape(queries=32, keys=32, width=80, start=0, turned=32, latent=0)
    """
    dialect = rotary_dialect_of(facts)
    shapes = {_shape(facts, rope, dialect, layer_type, layer) for layer_type, rope in _parameters(facts, layer).items()}
    if len(shapes) > 1:
        where = "a tensor without the number of its layer" if layer is None else f"layer {layer}, and no layer_types"
        raise InputError(f"got {where}, in a model whose layers differ in their heads", "names as in transformers")
    return shapes.pop()


def _shape(
    facts: Config, rope: Config | None, dialect: Dialect, layer_type: str | None, layer: int | None
) -> HeadShape:
    width = head_dim_of(facts, dialect, layer_type)
    turned = 0 if rope is None else _turned(facts, rope, dialect, width)
    if turned % 2 or turned > width:
        raise InputError(f"got {turned} rotary dimensions of a head of {width}", "an even number up to the whole head")
    queries = integer_of(facts, *HEADS)
    if queries is None:
        raise InputError(f"got a configuration without {HEADS[0]}", "the config.json of the model")
    if dialect.head_dim_key != LATENT:
        return HeadShape(queries=queries, keys=_keys(facts, layer, queries), width=width, turned=turned)
    start, latent = (_required(facts, key) for key in ("qk_nope_head_dim", "kv_lora_rank"))
    return HeadShape(queries=queries, keys=1, width=start + width, start=start, turned=turned, latent=latent)


def _turned(facts: Config, rope: Config, dialect: Dialect, width: int) -> int:
    """Pairs that stand still keep their place in Gemma 4's proportional type, so that the whole head is paired."""
    proportional = rope.get("rope_type", rope.get("type")) == "proportional"
    return width if proportional else rotary_dim_of(facts, rope, dialect, width)


def _keys(facts: Config, layer: int | None, queries: int) -> int:
    """Heads of keys; Falcon has one, or as many as queries, unless it is of the newer architecture."""
    if facts.get("attention_k_eq_v"):
        raise InputError(
            "got attention_k_eq_v=true: the rows of k_proj are values too, and may not change their order",
            "a model with a v_proj in every layer",
        )
    if facts.get("model_type") == "falcon" and not facts.get("new_decoder_architecture"):
        if not isinstance(facts.get("multi_query"), bool):
            raise InputError("got a falcon configuration without multi_query", "multi_query, as the model has it")
        return 1 if facts["multi_query"] else queries
    own = None if layer is None else own_of_layers(facts).get(layer, {}).get(KEY_HEADS[0])
    stated = integer_of(facts, *KEY_HEADS) if own is None else integer(KEY_HEADS[0], own)
    keys = stated or queries
    if queries % keys:
        raise InputError(f"got {queries} heads of queries for {keys} of keys, expected a multiple", "the right counts")
    return keys


def _parameters(facts: Config, layer: int | None) -> dict[str | None, Config | None]:
    """The rope parameters that may hold for this layer, by layer type; one entry where that is known."""
    rope = rope_dictionary(facts)
    nested: Mapping[Any, Any] = rope if is_per_layer(rope) else {}
    layer_type = _layer_type(facts, layer)
    if not nested:
        return {layer_type: rope}
    if layer_type is None:
        return dict(nested)
    if layer_type not in nested:
        raise InputError(f"got layer type {layer_type!r}, expected one of {', '.join(nested)}", "matching rope types")
    return {layer_type: nested[layer_type]}


def _layer_type(facts: Config, layer: int | None) -> str | None:
    types = layer_types_in(facts)
    return types[layer] if layer is not None and layer < len(types) else None


def _required(facts: Config, key: str) -> int:
    if key not in facts:
        raise InputError(f"got a configuration without {key}", "the config.json of the model")
    return integer(key, facts[key])
