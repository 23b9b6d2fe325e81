"""Which dimensions of a head form a pair, changed in the weights: ``"half"`` to ``"interleaved"`` and back.

Rotary positions rotate pairs of dimensions. Llama and NeoX pair dimension i with i + d/2, GPT-J and the paper 2i with
2i + 1, and weights trained with one are wrong with the other. A model computes the same scores in both layouts if the
rows of its projections of queries and keys, and the weights of their norms, change their order too. Values do not.

Nothing is computed with, rows are only moved: there and back gives the same bytes, whatever the dtype.

Which tensors hold such rows is told by their names, which are those of `transformers`, and in the row of an
architecture. A name that looks like a part of attention and is not known is not guessed at.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from locant.arguments import one_of
from locant.errors import InputError, Remedy, ShapeError
from locant.kernels.rotary import Layout
from locant.models.architecture import Architecture
from locant.models.config_values import HEADS, Config, integer, integer_at, layer_types_in, of_single_layers, required
from locant.models.lab_decoder import is_lab_decoder
from locant.models.registry import read
from locant.models.rope_parameters import is_per_layer, rope_dictionary
from locant.models.rotary_config import head_dim_of, named_layout, rotary_dim_of
from locant.models.weights import HeadRows, HeadShape, RowOrder, key_rows, query_rows

LAYOUTS = ("half", "interleaved")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")


class Part(Enum):
    """What a tensor is to attention."""

    KEPT = "no part of queries or keys"
    ROWS = "rows of queries or keys, or a weight for each"
    QUANTISED = "belongs to quantised rows"
    UNKNOWN = "may be any of these"


SEPARATE: Mapping[str, RowOrder] = {
    "q_proj": lambda shape: (query_rows(shape),),
    "k_proj": lambda shape: (key_rows(shape),),
}
"""Projections that mean the same in every architecture."""

NORMS: Mapping[str, Callable[[HeadShape], int]] = {
    **dict.fromkeys(("q_norm", "q_layernorm"), lambda shape: shape.queries),
    **dict.fromkeys(("k_norm", "k_layernorm"), lambda shape: shape.keys),
}
"""Norms of queries and keys, and how many heads they may have weights for."""

PLAIN = frozenset(
    {
        "v_proj", "o_proj", "out_proj", "dense", "Wo", "v_norm", "sinks", "rotary_emb", "attn_sub_norm",
        "q_a_proj", "q_a_layernorm", "kv_a_layernorm", "kv_b_proj",
    }
)  # fmt: skip
"""What else attention has. Queries and keys are not in them, or not yet."""

TOWERS = frozenset({"visual", "vision_tower", "vision_model", "vision_encoder", "audio_tower", "audio_model"})
"""Encoders of images and sound, whose positions have nothing to do with the configuration of the text."""

TAILS: Mapping[Part, re.Pattern[str]] = {
    Part.ROWS: re.compile(
        r"(?:base_layer\.)?(?:weight|bias)|lora_B(?:\.\w+)?\.(?:weight|bias)|lora_magnitude_vector(?:\.\w+)*"
    ),
    Part.KEPT: re.compile(r"lora_A(?:\.\w+)?\.weight"),
    Part.QUANTISED: re.compile(
        r"(?:base_layer\.)?(?:qweight|qzeros|scales|g_idx|SCB|weight_format|(?:weight|input|output)_(?:packed|shape|g_idx)"
        r"|(?:weight|input|output)_(?:global_scale|(?:scale|zero_point)\w*)|[kv]_(?:scale|zero_point)"
        r"|weight\.(?:absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..+))"
    ),
}
"""What follows the name of a projection."""

_NORM = re.compile(r"(?:norms\.\d+\.)?(?:weight|bias)")
_BUFFER = re.compile(r"(?:.*\.)?attn(?:ention)?\.(?:bias|masked_bias|causal_mask|embed_positions)")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_IS_NORM = re.compile(r"norm|^ln_|_ln$", re.IGNORECASE)
_QUERY_OR_KEY = re.compile(r"w?(?:q|k|qk|kv|qkv)(?:\d*|_\w+)|\w*(?:query|queries|key|keys|qkv)(?:_\w+)?", re.IGNORECASE)


def convert_layout(
    state_dict: Mapping[str, Shaped[Tensor, "*_"]],
    config: Config | object,
    *,
    to: Layout,
    source: Layout | None = None,
) -> dict[str, Shaped[Tensor, "*_"]]:
    """The same weights for a rotation in the other layout.

    Moves the rows of query and key projections, fused ones included, of their biases and LoRA's B, and the weights of
    query and key norms. Every other tensor is the same object in the result. Costs one copy of what is moved.

    Args:
        state_dict: names as in transformers; it and its tensors stay as they are.
        config: the model's configuration, as an object or as the dictionary of its ``config.json``.
        to: the layout to convert to; it has no default.
        source: the layout of these weights; by default that of ``rope_interleave`` in `config`, and without it that of
            the architecture.

    Raises:
        InputError: weights that are in this layout already, a name that may belong to queries or keys and is not
            known, quantised weights, an architecture whose order of rows is not known.
        ShapeError: a tensor that does not have the rows that follow from the configuration.

    >>> config = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2}
    >>> weights = {"layers.0.self_attn.q_proj.bias": torch.arange(8), "layers.0.self_attn.v_proj.bias": torch.arange(8)}
    >>> for tensor in convert_layout(weights, config, to="interleaved").values():
    ...     print(tensor)
    tensor([0, 2, 1, 3, 4, 6, 5, 7])
    tensor([0, 1, 2, 3, 4, 5, 6, 7])
    """
    change = LayoutChange(config, to=to, source=source)
    moved = change.moves({name: tuple(tensor.shape) for name, tensor in state_dict.items()})
    return {
        name: _reordered(tensor, moved[name], to) if name in moved else tensor for name, tensor in state_dict.items()
    }


class LayoutChange:
    """From which layout to which, for the tensors of one model; see `convert_layout`."""

    def __init__(self, config: Config | object, *, to: Layout, source: Layout | None = None) -> None:
        self.config, self.row = read(config)
        self.architecture: str | None = self.config.get("model_type")
        if is_lab_decoder(self.config):
            got = "got a model of locant train, whose code reads the layout of its config.json"
            raise InputError(got, "keep its weights as they are")
        if self.config.get("alibi"):
            raise InputError("got alibi=true, a model without rotary positions", "the weights as they are")
        if self.row.rotary_keys.not_converted is not None:
            got = f"got {self.architecture}, {self.row.rotary_keys.not_converted}: its weights have no other layout"
            raise InputError(got, "the weights as they are")
        self.projections = {**SEPARATE, **self.row.projections}
        one_of("to", to, LAYOUTS)
        if source is not None:
            one_of("source", source, LAYOUTS)
        stated = source or named_layout(self.config) or self.row.rotary_keys.layout
        if stated is None:
            got = f"got model_type={self.architecture!r}, whose layout is not known"
            raise InputError(got, Remedy("{} or 'interleaved', as its weights were trained with", source="half"))
        if stated == to:
            because = f"source={source!r}" if source else "the configuration"
            other = "interleaved" if to == "half" else "half"
            raise InputError(
                f"got weights that are in the layout {to!r} already, according to {because}",
                Remedy("the other layout, or {} if these weights were converted before", source=other),
            )
        self.to: Layout = to
        self.source: Layout = stated

    def moves(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[HeadRows, ...]]:
        """The tensors whose rows change their order, and how these rows are divided into heads."""
        parts = {name: part_of(name, self.projections) for name in shapes}
        unknown, quantised = (
            sorted(name for name, (part, _) in parts.items() if part is kind) for kind in (Part.UNKNOWN, Part.QUANTISED)
        )
        if unknown:
            raise InputError(
                f"got {_listed(unknown)}, which may belong to queries or keys of {self.architecture!r} and "
                f"{'is' if len(unknown) == 1 else 'are'} not known; known are {', '.join([*self.projections, *NORMS])}",
                "names as in transformers, without these tensors if they have nothing to do with it",
            )
        if quantised:
            got = (
                f"got {_listed(quantised)}: queries or keys are quantised, and their rows share what they are scaled by"
            )
            raise InputError(got, "the weights before they were quantised")
        moved = {
            name: self._rows(name, shapes[name], component)
            for name, (part, component) in parts.items()
            if part is Part.ROWS
        }
        if not moved:
            raise InputError("got no tensor of queries or keys, and nothing to convert", "names as in transformers")
        return moved

    def _rows(self, name: str, shape: Sequence[int], component: str) -> tuple[HeadRows, ...]:
        layer = _LAYER.search(name)
        heads = head_shape_of(self.config, self.row, int(layer[1]) if layer else None)
        norm = component in NORMS
        rows = math.prod(shape) if norm or ".lora_magnitude_vector" in name else shape[0] if shape else 0
        if norm:  # one weight for each dimension of a head, or of all heads (OLMo 2, Cohere)
            found = (query_rows(heads, 1 if rows == heads.width else NORMS[component](heads)),)
        else:
            found = self.projections[component](heads)
        expected = sum(each.rows for each in found)
        if rows != expected:
            latent = f" after {heads.latent} latent rows" if heads.latent else ""
            raise ShapeError(
                f"got {name} of shape {tuple(shape)}, expected {expected} {'weights' if norm else 'rows'} for "
                f"{heads.queries} heads of queries and {heads.keys} of keys, of {heads.width} dimensions{latent}",
                "the configuration of this very model, and weights that are neither sharded nor quantised",
            )
        return found


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


def row_order(rows: HeadRows, to: Layout) -> list[int]:
    """For every row of one head in the layout `to`, which row it was before.

    >>> row_order(HeadRows(count=1, width=6, start=1, rotated=4), "interleaved")
    [0, 1, 3, 2, 4, 5]
    """
    half = rows.rotated // 2
    if to == "interleaved":
        rotated = [row for pair in range(half) for row in (pair, pair + half)]
    else:
        rotated = [*range(0, rows.rotated, 2), *range(1, rows.rotated, 2)]
    end = rows.start + rows.rotated
    return [*range(rows.start), *(rows.start + row for row in rotated), *range(end, rows.width)]


def _reordered(tensor: Tensor, parts: Sequence[HeadRows], to: Layout) -> Tensor:
    order: list[int] = []
    for part in parts:
        head, first = row_order(part, to), len(order)
        order += [first + place * part.width + row for place in range(part.count) for row in head]
    flat = tensor.detach().reshape(len(order), tensor.numel() // len(order))
    return flat.index_select(0, torch.tensor(order, device=tensor.device)).reshape(tensor.shape)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def part_of(name: str, projections: Mapping[str, RowOrder]) -> tuple[Part, str]:
    """What this tensor is, and which component of its name decides it.

    >>> part_of("model.layers.0.self_attn.q_proj.weight", SEPARATE)
    (<Part.ROWS: 'rows of queries or keys, or a weight for each'>, 'q_proj')
    """
    components = name.split(".")
    if TOWERS.intersection(components):
        return Part.KEPT, ""
    for place, component in enumerate(components):
        tail = ".".join(components[place + 1 :])
        if component in projections:
            return next((part for part, form in TAILS.items() if form.fullmatch(tail)), Part.UNKNOWN), component
        if component in NORMS:
            return Part.ROWS if _NORM.fullmatch(tail) else Part.UNKNOWN, component
        if component in PLAIN:
            return Part.KEPT, component
    if _BUFFER.fullmatch(name):
        return Part.KEPT, ""
    return (Part.UNKNOWN if any(map(_like_attention, components)) else Part.KEPT), ""


def _like_attention(component: str) -> bool:
    if _IS_NORM.search(component) and not _QUERY_OR_KEY.fullmatch(component):
        return False
    return bool(_ATTENTION.search(component) or _QUERY_OR_KEY.fullmatch(component))
