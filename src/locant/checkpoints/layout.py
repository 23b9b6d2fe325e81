"""Convert weights between the rotary layouts ``"half"`` and ``"interleaved"``.

Rotary positions rotate pairs of dimensions. Llama and NeoX pair dimension i with i + d/2, GPT-J and the paper pair 2i
with 2i + 1. Weights trained with one layout are wrong with the other. A model computes the same scores in both layouts
if the rows of its query and key projections, and the weights of their norms, are reordered too. The value projection is
not reordered.

Rows are moved without arithmetic. A conversion there and back gives the same bytes in every dtype.

The names of tensors, as in `transformers`, and the row of an architecture determine which tensors hold such rows. An
unknown name that looks like a part of attention raises an error.
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
from locant.models.config_values import HEADS, Config, integer, integer_at, layer_types_in, per_layer_configs, required
from locant.models.lab_decoder import is_lab_decoder
from locant.models.registry import read_config
from locant.models.rope_parameters import is_per_layer, rope_dictionary
from locant.models.rotary_config import head_dim_of, named_layout, rotary_dim_of
from locant.models.weights import HeadRows, HeadShape, RowOrder, key_rows, query_rows

LAYOUTS = ("half", "interleaved")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")


class Part(Enum):
    """The role of a tensor in attention."""

    KEPT = "no part of queries or keys"
    ROWS = "rows of queries or keys, or a weight for each"
    QUANTISED = "part of quantised rows"
    UNKNOWN = "unknown"


SEPARATE: Mapping[str, RowOrder] = {
    "q_proj": lambda shape: (query_rows(shape),),
    "k_proj": lambda shape: (key_rows(shape),),
}
"""Projections with the same meaning in every architecture."""

NORMS: Mapping[str, Callable[[HeadShape], int]] = {
    **dict.fromkeys(("q_norm", "q_layernorm"), lambda shape: shape.queries),
    **dict.fromkeys(("k_norm", "k_layernorm"), lambda shape: shape.keys),
}
"""Norms of queries and keys, and the number of heads that they can have weights for."""

PLAIN = frozenset(
    {
        "v_proj", "o_proj", "out_proj", "dense", "Wo", "v_norm", "sinks", "rotary_emb", "attn_sub_norm",
        "q_a_proj", "q_a_layernorm", "kv_a_layernorm", "kv_b_proj",
    }
)  # fmt: skip
"""Other parts of attention. They hold no queries or keys, or hold them before the last projection."""

TOWERS = frozenset({"visual", "vision_tower", "vision_model", "vision_encoder", "audio_tower", "audio_model"})
"""Encoders of images and sound, whose positions do not depend on the text configuration."""

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
"""The patterns that can follow the name of a projection."""

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
    """Return the weights for a rotation in the other layout.

    The function reorders the rows of query and key projections (also fused ones), of their biases and of LoRA's B. It
    also reorders the weights of query and key norms. Every other tensor is the same object in the result. The cost is
    one copy of the reordered tensors.

    Args:
        state_dict: tensors by their names in transformers. It is not changed, nor are its tensors.
        config: the model's configuration, as an object or as the dictionary of its ``config.json``.
        to: the layout to convert to.
        source: the layout of these weights. The default is ``rope_interleave`` in `config`, or if it is missing, the
            layout of the architecture.

    Raises:
        InputError: the weights already have this layout, have no other layout or are quantised, an unknown name may
            belong to queries or keys, or the layout or the order of rows in the architecture is unknown.
        ShapeError: a tensor does not have the rows that follow from the configuration.

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
        name: _reorder_rows(tensor, moved[name], to) if name in moved else tensor for name, tensor in state_dict.items()
    }


class LayoutChange:
    """A change from one layout to another, for the tensors of one model. See `convert_layout`."""

    def __init__(self, config: Config | object, *, to: Layout, source: Layout | None = None) -> None:
        self.config, self.row = read_config(config)
        self.architecture: str | None = self.config.get("model_type")
        if is_lab_decoder(self.config):
            got = "got a model of locant train, whose code reads the layout of its config.json"
            raise InputError(got, "keep its weights as they are")
        if self.config.get("alibi"):
            raise InputError("got alibi=true, a model without rotary positions", "keep its weights as they are")
        if self.row.rotary_keys.not_converted is not None:
            got = f"got {self.architecture}, {self.row.rotary_keys.not_converted}: its weights have no other layout"
            raise InputError(got, "keep its weights as they are")
        self.projections = {**SEPARATE, **self.row.projections}
        one_of("to", to, LAYOUTS)
        if source is not None:
            one_of("source", source, LAYOUTS)
        stated = source or named_layout(self.config) or self.row.rotary_keys.layout
        if stated is None:
            got = f"got model_type={self.architecture!r}, whose layout is not known"
            raise InputError(got, Remedy("pass {} or 'interleaved', the layout of its training", source="half"))
        if stated == to:
            because = f"source={source!r}" if source else "the configuration"
            other = "interleaved" if to == "half" else "half"
            raise InputError(
                f"got weights that already have the layout {to!r}, according to {because}",
                Remedy("convert to the other layout, or pass {} if these weights were converted before", source=other),
            )
        self.to: Layout = to
        self.source: Layout = stated

    def moves(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[HeadRows, ...]]:
        """Return the tensors whose rows are reordered, and how their rows are divided into heads."""
        parts = {name: part_of(name, self.projections) for name in shapes}
        unknown, quantised = (
            sorted(name for name, (part, _) in parts.items() if part is kind) for kind in (Part.UNKNOWN, Part.QUANTISED)
        )
        if unknown:
            raise InputError(
                f"got {_join(unknown)}, which may belong to queries or keys of {self.architecture!r} and "
                f"{'is' if len(unknown) == 1 else 'are'} not one of {', '.join([*self.projections, *NORMS])}",
                "rename them as in transformers, or remove them if they do not belong to attention",
            )
        if quantised:
            got = f"got {_join(quantised)}: queries or keys are quantised, and their rows share scales"
            raise InputError(got, "convert the weights before they are quantised")
        moved = {
            name: self._rows(name, shapes[name], component)
            for name, (part, component) in parts.items()
            if part is Part.ROWS
        }
        if not moved:
            got = "got no tensor of queries or keys, so there is nothing to convert"
            raise InputError(got, "use the names of transformers")
        return moved

    def _rows(self, name: str, shape: Sequence[int], component: str) -> tuple[HeadRows, ...]:
        layer = _LAYER.search(name)
        heads = head_shape_of(self.config, self.row, int(layer[1]) if layer else None)
        norm = component in NORMS
        rows = math.prod(shape) if norm or ".lora_magnitude_vector" in name else shape[0] if shape else 0
        if norm:  # one weight for each dimension of a head, or of all heads (OLMo 2, Cohere)
            parts = (query_rows(heads, 1 if rows == heads.width else NORMS[component](heads)),)
        else:
            parts = self.projections[component](heads)
        expected = sum(part.rows for part in parts)
        if rows != expected:
            latent = f" after {heads.latent} latent rows" if heads.latent else ""
            raise ShapeError(
                f"got {name} of shape {tuple(shape)}, expected {expected} {'weights' if norm else 'rows'} for "
                f"{heads.queries} query heads and {heads.keys} key heads of {heads.width} dimensions{latent}",
                "use the configuration of this model, and weights that are neither sharded nor quantised",
            )
        return parts


def head_shape_of(config: Config, architecture: Architecture, layer: int | None) -> HeadShape:
    """Return the heads of this layer, or the heads that all layers share if `layer` is None."""
    parameters = _parameters(config, layer)
    shapes = {_shape(config, rope, architecture, layer_type, layer) for layer_type, rope in parameters.items()}
    if len(shapes) > 1:
        where = "a tensor without the number of its layer" if layer is None else f"layer {layer}, and no layer_types"
        raise InputError(f"got {where}, in a model whose layers have different heads", "use the names of transformers")
    return shapes.pop()


def _shape(
    config: Config, rope: Config | None, architecture: Architecture, layer_type: str | None, layer: int | None
) -> HeadShape:
    width = head_dim_of(config, architecture, layer_type)
    if rope is None:
        rotated = 0
    elif rope.get("rope_type", rope.get("type")) == "proportional":
        rotated = width  # the whole head is paired, including pairs that are not rotated
    else:
        rotated = rotary_dim_of(config, rope, architecture, width)
    if rotated % 2 or rotated > width:
        raise InputError(f"got {rotated} rotary dimensions of a head of {width}", "use an even number up to it")
    queries = required(config, *HEADS)
    if not architecture.rotary_keys.latent:
        keys = _keys(config, architecture, layer, queries)
        return HeadShape(queries=queries, keys=keys, width=width, rotated=rotated)
    start, latent = required(config, "qk_nope_head_dim"), required(config, "kv_lora_rank")
    return HeadShape(queries=queries, keys=1, width=start + width, start=start, rotated=rotated, latent=latent)


def _keys(config: Config, architecture: Architecture, layer: int | None, queries: int) -> int:
    if config.get("attention_k_eq_v"):
        got = "got attention_k_eq_v=true: the rows of k_proj are also values, so they cannot be reordered"
        raise InputError(got, "use a model with a v_proj in every layer")
    architecture_keys = None if architecture.key_heads is None else architecture.key_heads(config, queries)
    if architecture_keys is not None:
        return architecture_keys
    layer_keys = None if layer is None else per_layer_configs(config).get(layer, {}).get(KEY_HEADS[0])
    stated = integer_at(config, *KEY_HEADS) if layer_keys is None else integer(KEY_HEADS[0], layer_keys)
    keys = stated or queries
    if queries % keys:
        got = f"got {queries} query heads for {keys} key/value heads, expected a multiple"
        raise InputError(got, f"set {KEY_HEADS[0]!r}: {queries} if every query head has a key head")
    return keys


def _parameters(config: Config, layer: int | None) -> dict[str | None, Config | None]:
    """Return the rope parameters that can apply to this layer, by layer type. A known type gives one entry."""
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
        raise InputError(got, f"add rope parameters of {layer_type!r}")
    return {layer_type: nested[layer_type]}


def row_order(rows: HeadRows, to: Layout) -> list[int]:
    """Return the previous number of each row of one head in the layout `to`.

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


def _reorder_rows(tensor: Tensor, parts: Sequence[HeadRows], to: Layout) -> Tensor:
    order: list[int] = []
    for part in parts:
        head, first = row_order(part, to), len(order)
        order += [first + place * part.width + row for place in range(part.count) for row in head]
    flat = tensor.detach().reshape(len(order), tensor.numel() // len(order))
    return flat.index_select(0, torch.tensor(order, device=tensor.device)).reshape(tensor.shape)


def _join(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def part_of(name: str, projections: Mapping[str, RowOrder]) -> tuple[Part, str]:
    """Return the role of this tensor, and the component of its name that decides it.

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
    return (Part.UNKNOWN if any(map(_looks_like_attention, components)) else Part.KEPT), ""


def _looks_like_attention(component: str) -> bool:
    if _IS_NORM.search(component) and not _QUERY_OR_KEY.fullmatch(component):
        return False
    return bool(_ATTENTION.search(component) or _QUERY_OR_KEY.fullmatch(component))
