"""Which tensors of a checkpoint hold rows of queries and keys, by their names.

Names are those of `transformers`; projections that an architecture names in its own way stand in its row. A name that
looks like a part of attention and is not known is not guessed at. Norms, adapters and biases of a projection follow its
rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import Enum

from locant.models.projections import HeadRows, HeadShape, RowOrder, key_rows, query_rows

__all__ = ["NORMS", "SEPARATE", "Part", "layer_of", "norm_rows", "part_of"]


class Part(Enum):
    """What a tensor is to attention."""

    KEPT = "no part of queries or keys"
    ROWS = "rows of queries or keys"
    NORM = "a weight for each of their dimensions"
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

_ROWS = re.compile(
    r"(?:base_layer\.)?(?:weight|bias)|lora_B(?:\.\w+)?\.(?:weight|bias)|lora_magnitude_vector(?:\.\w+)*"
)
_INPUTS = re.compile(r"lora_A(?:\.\w+)?\.weight")
_QUANTISED = re.compile(
    r"(?:base_layer\.)?(?:qweight|qzeros|scales|g_idx|SCB|weight_format|(?:weight|input|output)_(?:scale|zero_point)\w*"
    r"|(?:weight|input|output)_(?:packed|shape|g_idx|global_scale)|[kv]_(?:scale|zero_point)"
    r"|weight\.(?:absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..+))"
)
_NORM = re.compile(r"(?:norms\.\d+\.)?(?:weight|bias)")
_BUFFER = re.compile(r"(?:.*\.)?attn(?:ention)?\.(?:bias|masked_bias|causal_mask|embed_positions)")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_IS_NORM = re.compile(r"norm|^ln_|_ln$", re.IGNORECASE)
_QUERY_OR_KEY = re.compile(r"w?(?:q|k|qk|kv|qkv)(?:\d*|_\w+)|\w*(?:query|queries|key|keys|qkv)(?:_\w+)?", re.IGNORECASE)


def part_of(name: str, projections: Mapping[str, RowOrder]) -> tuple[Part, str]:
    """What this tensor is, and which component of its name decides it.

    >>> part_of("model.layers.0.self_attn.q_proj.weight", SEPARATE)
    (<Part.ROWS: 'rows of queries or keys'>, 'q_proj')
    >>> part_of("model.layers.0.mlp.up_proj.weight", SEPARATE)[0].name
    'KEPT'
    """
    components = name.split(".")
    if TOWERS.intersection(components):
        return Part.KEPT, ""
    for place, component in enumerate(components):
        tail = ".".join(components[place + 1 :])
        if component in projections:
            return _of_projection(tail), component
        if component in NORMS:
            return Part.NORM if _NORM.fullmatch(tail) else Part.UNKNOWN, component
        if component in PLAIN:
            return Part.KEPT, component
    if _BUFFER.fullmatch(name):
        return Part.KEPT, ""
    return (Part.UNKNOWN if any(map(_like_attention, components)) else Part.KEPT), ""


def _of_projection(tail: str) -> Part:
    if _ROWS.fullmatch(tail):
        return Part.ROWS
    if _INPUTS.fullmatch(tail):
        return Part.KEPT
    return Part.QUANTISED if _QUANTISED.fullmatch(tail) else Part.UNKNOWN


def _like_attention(component: str) -> bool:
    if _IS_NORM.search(component) and not _QUERY_OR_KEY.fullmatch(component):
        return False
    return bool(_ATTENTION.search(component) or _QUERY_OR_KEY.fullmatch(component))


def layer_of(name: str) -> int | None:
    """The number of the layer, where the name has one."""
    found = _LAYER.search(name)
    return int(found[1]) if found else None


def norm_rows(component: str, shape: HeadShape, size: int) -> tuple[HeadRows, ...]:
    """The weights of a norm: one for each dimension of a head, or of all heads (OLMo 2, Cohere)."""
    return (query_rows(shape, 1 if size == shape.width else NORMS[component](shape)),)
