"""Which tensors of a checkpoint hold rows of queries and keys, and in what order: a table by name.

Read off the modeling code of `transformers`. A name that looks like a part of attention and is not in the table is not
guessed at. Norms, adapters and biases of a projection follow its rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from locant.checkpoints.head_shapes import HeadShape

__all__ = ["FUSED", "NORMS", "PLAIN", "Part", "Run", "layer_of", "norm_runs", "part_of", "runs_of"]


@dataclass(frozen=True, kw_only=True)
class Run:
    """`count` heads one after the other, of `width` rows each, of which `turned` rows from `start` on are turned."""

    count: int
    width: int
    start: int = 0
    turned: int = 0

    @property
    def rows(self) -> int:
        return self.count * self.width


class Part(Enum):
    """What a tensor is to attention."""

    KEPT = "no part of queries or keys"
    ROWS = "rows of queries or keys"
    NORM = "a weight for each of their dimensions"
    QUANTISED = "belongs to quantised rows"
    UNKNOWN = "may be any of these"


Order = Callable[[HeadShape], tuple[Run, ...]]


def _queries(shape: HeadShape, count: int | None = None) -> Run:
    return Run(
        count=shape.queries if count is None else count, width=shape.width, start=shape.start, turned=shape.turned
    )


def _keys(shape: HeadShape, count: int | None = None) -> Run:
    return _queries(shape, shape.keys if count is None else count)


def _values(shape: HeadShape, count: int | None = None) -> Run:
    return Run(count=shape.keys if count is None else count, width=shape.width)


def _one_after_another(shape: HeadShape) -> tuple[Run, ...]:
    """All queries, all keys, all values."""
    return _queries(shape), _keys(shape), _values(shape)


def _group_by_group(shape: HeadShape) -> tuple[Run, ...]:
    """The queries that share a key, then that key and its value: with a group for every head, or one for all, too."""
    group = (_queries(shape, shape.queries // shape.keys), _keys(shape, 1), _values(shape, 1))
    return group * shape.keys


def _in_four_parts(shape: HeadShape) -> tuple[Run, ...]:
    """CodeGen: cut for four accelerators, and in each part queries, values, keys."""
    share = shape.queries // 4
    return (_queries(shape, share), _values(shape, share), _keys(shape, share)) * 4


def _latent_keys(shape: HeadShape) -> tuple[Run, ...]:
    """DeepSeek: what keys and values are made of, then the part of the keys that is turned, once for all heads."""
    return Run(count=1, width=shape.latent), Run(count=1, width=shape.turned, turned=shape.turned)


SEPARATE: Mapping[str, Order] = {
    "q_proj": lambda shape: (_queries(shape),),
    "k_proj": lambda shape: (_keys(shape),),
}
"""Projections that mean the same in every architecture."""

_LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2")

FUSED: Mapping[str, Mapping[str, Order]] = {
    "query_key_value": dict.fromkeys(("falcon", "gpt_neox", "persimmon"), _group_by_group),
    "qkv_proj": {"phi3": _one_after_another, "codegen": _in_four_parts},
    "Wqkv": {"modernbert": _one_after_another},
    "q_b_proj": dict.fromkeys(_LATENT, SEPARATE["q_proj"]),
    "kv_a_proj_with_mqa": dict.fromkeys(_LATENT, _latent_keys),
}
"""Projections whose rows stand in an order that the architecture decides."""

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
"""Encoders of images and sound: they have positions of their own, of which the configuration of the text is silent."""

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


def part_of(name: str, architecture: str | None) -> tuple[Part, str]:
    """What this tensor is, and which component of its name says so.

    >>> part_of("model.layers.0.self_attn.q_proj.weight", "llama")
    (<Part.ROWS: 'rows of queries or keys'>, 'q_proj')
    >>> part_of("model.layers.0.mlp.up_proj.weight", "llama")[0].name
    'KEPT'
    """
    components = name.split(".")
    if TOWERS.intersection(components):
        return Part.KEPT, ""
    for place, component in enumerate(components):
        tail = ".".join(components[place + 1 :])
        if component in SEPARATE or architecture in FUSED.get(component, ()):
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


def runs_of(component: str, architecture: str | None, shape: HeadShape) -> tuple[Run, ...]:
    """The rows of a projection, in their order."""
    order = SEPARATE.get(component) or FUSED[component][architecture or ""]
    return order(shape)


def norm_runs(component: str, shape: HeadShape, size: int) -> tuple[Run, ...]:
    """The weights of a norm: one for each dimension of a head, or of all heads (OLMo 2, Cohere)."""
    return (_queries(shape, 1 if size == shape.width else NORMS[component](shape)),)
