"""How many heads a layer has, and which rows of a head are rotated: read from a Hugging Face configuration.

Only sizes are read. A base or a scaling that this package would refuse does not matter to how rows are ordered.
"""

from __future__ import annotations

from typing import Any

from locant.errors import InputError
from locant.models.architecture import Architecture
from locant.models.config_values import HEADS, Config, integer, integer_at, layer_types_in, of_single_layers, required
from locant.models.projections import HeadShape
from locant.models.rope_layers import is_per_layer, rope_dictionary
from locant.models.rotary_config import head_dim_of, rotary_dim_of

__all__ = ["head_shape_of"]

KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")


def head_shape_of(config: Config, architecture: Architecture, layer: int | None) -> HeadShape:
    """The heads of this layer; without a number, those that all layers share."""
    parameters = _parameters(config, layer)
    shapes = {_shape(config, rope, architecture, layer_type, layer) for layer_type, rope in parameters.items()}
    if len(shapes) > 1:
        where = "a tensor without the number of its layer" if layer is None else f"layer {layer}, and no layer_types"
        raise InputError(f"got {where}, in a model whose layers differ in their heads", "names as in transformers")
    return shapes.pop()


def _shape(
    config: Config, rope: Config | None, architecture: Architecture, layer_type: str | None, layer: int | None
) -> HeadShape:
    width = head_dim_of(config, architecture, layer_type)
    if rope is None:
        rotated = 0
    elif rope.get("rope_type", rope.get("type")) == "proportional":
        rotated = width  # pairs that are not rotated keep their place: the whole head is paired
    else:
        rotated = rotary_dim_of(config, rope, architecture, width)
    if rotated % 2 or rotated > width:
        raise InputError(f"got {rotated} rotary dimensions of a head of {width}", "an even number up to the whole head")
    queries = required(config, *HEADS)
    if not architecture.rotary_keys.latent:
        keys = _keys(config, architecture, layer, queries)
        return HeadShape(queries=queries, keys=keys, width=width, rotated=rotated)
    start, latent = required(config, "qk_nope_head_dim"), required(config, "kv_lora_rank")
    return HeadShape(queries=queries, keys=1, width=start + width, start=start, rotated=rotated, latent=latent)


def _keys(config: Config, architecture: Architecture, layer: int | None, queries: int) -> int:
    if config.get("attention_k_eq_v"):
        got = "got attention_k_eq_v=true: the rows of k_proj are values too, and may not change their order"
        raise InputError(got, "a model with a v_proj in every layer")
    of_model = None if architecture.key_heads is None else architecture.key_heads(config, queries)
    if of_model is not None:
        return of_model
    of_layer = None if layer is None else of_single_layers(config).get(layer, {}).get(KEY_HEADS[0])
    stated = integer_at(config, *KEY_HEADS) if of_layer is None else integer(KEY_HEADS[0], of_layer)
    keys = stated or queries
    if queries % keys:
        got = f"got {queries} query heads for {keys} key/value heads, expected a multiple"
        raise InputError(got, f"{KEY_HEADS[0]!r}: {queries}, if every query head has a key head of its own")
    return keys


def _parameters(config: Config, layer: int | None) -> dict[str | None, Config | None]:
    """The rope parameters that may hold for this layer, by layer type; one entry where that is known."""
    rope = rope_dictionary(config)
    types = layer_types_in(config)
    layer_type = types[layer] if layer is not None and layer < len(types) else None
    if not is_per_layer(rope):
        return {layer_type: rope}
    nested: dict[str | None, Any] = {**rope}
    if layer_type is None:
        return nested
    if layer_type not in nested:
        got = f"got layer type {layer_type!r}, expected one of {', '.join(rope)}"
        raise InputError(got, f"rope parameters of {layer_type!r}")
    return {layer_type: nested[layer_type]}
