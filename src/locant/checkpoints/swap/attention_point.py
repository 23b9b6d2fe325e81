"""Biases and rotations of queries and keys in the attention of a `transformers` model, by a named attention function.

`transformers` calls the function that the configuration names, and a function of the same name for the mask. Ours adds
to the scores what the layer's encoding adds, and leaves the rest to the function that was named before. Its mask holds,
for each query and key, by how many slots they are apart, and, far below zero, that the query may not see the key.
Distances are right in padded and packed rows and behind every cache, because only keys of the same document are seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from locant.attention import attend
from locant.attention.choice import SMALL
from locant.checkpoints.swap.bias_point import GivenBias
from locant.errors import InputError, LocantError
from locant.positions.base import PositionEncoding, has_bias
from locant.positions.positions import Positions
from locant.positions.rotary_by_class import RotaryByClass

__all__ = [
    "KEY", "AttentionPoint", "attention_modules", "has_learned_bias", "name_again", "name_our_function",
    "require_point",
]  # fmt: skip

NAME = "locant"
KEY = "_locant_point"
EAGER = "eager_attention_forward"
BEFORE = ("sdpa", "eager")
"""The functions that take a mask of numbers, and so can be left the rest of the work."""

HIDDEN = 2**30
"""What is taken off the distance of a query and a key that it may not see."""


@dataclass
class AttentionPoint:
    """What an attention module needs to know: its encoding, and the function that was named before.

    Args:
        owner: the model that holds the encodings, as `locant`, so that they are trained and saved with it.
        place: which of them; ``None``: this layer has its attention as before.
        own: the bias that the model's own code hands on to the layer, as its table where `place` is ``None``; for
            another encoding it is left out. ``None``: it is added as it comes.
    """

    owner: nn.Module
    place: int | None
    before: str
    own: GivenBias | None = None

    @property
    def encoding(self) -> PositionEncoding | None:
        return None if self.place is None else getattr(self.owner.locant, str(self.place))

    def function(self, module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
        """The function that was named before."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        files = (sys.modules[cls.__module__] for cls in type(module).__mro__)  # FSDP makes a subclass of its own
        eager = next((vars(file)[EAGER] for file in files if EAGER in vars(file)), None)
        return ALL_ATTENTION_FUNCTIONS.get_interface(self.before, eager)  # pyright: ignore[reportArgumentType]


def attention_modules(owner: nn.Module) -> dict[int, list[nn.Module]]:
    """The attention modules of each layer."""
    found: dict[int, list[nn.Module]] = {}
    for module in owner.modules():
        layer = getattr(module, "layer_idx", None)
        if "Attention" in type(module).__name__ and isinstance(layer, int):
            found.setdefault(layer, []).append(module)
    return found


def has_learned_bias(owner: nn.Module) -> bool:
    """Whether the attention has a learned bias of its own, as T5's has."""
    return any("relative_attention_bias" in path or "rel_pos" in path for path, _ in owner.named_parameters())


def require_point(owner: Any, *, has_known_bias: bool = False) -> None:
    """Raise unless the model asks for its attention function by name, and has named one that takes a mask.

    T5 does not say that it supports any function, since it calls it with its bias, which others would not know.
    """
    name = type(owner).__name__
    if not (owner._supports_attention_backend or has_known_bias) or not owner._can_set_attn_implementation():
        got = f"got {name}, whose attention is not called by name and has no point for scores"
        raise InputError(got, "a model whose attention goes through transformers.AttentionInterface")
    if has_learned_bias(owner) and not has_known_bias:
        raise InputError(f"got {name}, whose attention has a learned bias of its own", "a model without one")
    if owner.config._attn_implementation not in BEFORE:
        got = f"got {name} with {owner.config._attn_implementation} attention, which is fused and takes no bias"
        raise InputError(got, "model.set_attn_implementation('sdpa')")


def name_our_function(owner: Any) -> Any:
    """Let the model call our attention function, registered once under one name for all models; returns a hook.

    The hook refuses to run the model after it was told to call another one, without its encoding.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask_of_slots)
    owner.set_attn_implementation(NAME)
    return owner.register_forward_pre_hook(_require_name)


def _require_name(owner: Any, args: tuple[Any, ...]) -> None:
    named = owner.config._attn_implementation
    if named != NAME:
        got = f"got {type(owner).__name__} set to {named} attention while it is swapped, which would lose its encoding"
        raise LocantError(got, f"handle.undo(), then set_attn_implementation({named!r}) and swap again")


def name_again(owner: Any, before: str) -> None:
    """Name the function from before; one that the user has named since stays."""
    if owner.config._attn_implementation == NAME:
        owner.set_attn_implementation(before)


# ---------------------------------------------------------------------- what transformers calls


def mask_of_slots(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: Any = "cpu",
    **others: Any,
) -> Tensor | None:
    """``batch 1 query key``: slots from key to query, less `HIDDEN` where the key is not seen.

    ``None``: nothing is hidden but later keys, and the queries are the last of the keys.
    """
    from transformers.masking_utils import sdpa_mask

    last = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    visible = sdpa_mask(
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,  # pyright: ignore[reportArgumentType]  # a tensor for caches of one shape
        kv_offset=kv_offset,
        allow_is_causal_skip=allow_is_causal_skip and last,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip and last,
        device=device,
        **others,
    )
    if visible is None:
        return None
    queries = torch.arange(q_length, device=device) + q_offset
    keys = torch.arange(kv_length, device=device) + kv_offset
    apart = (queries[:, None] - keys).to(torch.int32)
    return torch.where(visible, apart, apart - HIDDEN)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """The output ``batch query heads value_dim`` and, where the function named before returns them, the weights."""
    point: AttentionPoint | None = getattr(module, KEY, None)
    if point is None:
        got = f"got {type(module).__name__} of a model that was built from the configuration of a swapped one"
        raise LocantError(got, "model.set_attn_implementation('sdpa') of the new model, or a configuration of its own")
    encoding = point.encoding
    causal = others.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
    if attention_mask is None and causal and point.before == "eager" and query.shape[2] > 1:
        attention_mask = _later_keys_hidden(query, key, causal)  # sdpa does so itself
    own_bias = others.pop("position_bias", None)
    if own_bias is not None and encoding is not None and point.own is None:
        raise LocantError(f"got a bias of its own from {type(module).__name__}", "a model without one")
    if own_bias is not None and encoding is None:
        if point.own is None or not _without_matrix(point, module, query, key, attention_mask, own_bias, others):
            mask, added = _beside_own_bias(point, query, key, attention_mask, own_bias)
            return point.function(module)(
                module, query, key, value, mask, scaling=scaling, dropout=dropout, position_bias=added, **others
            )
        encoding = point.own.of_table(own_bias)
    width = query.shape[-1]
    if attention_mask is None and encoding is not None and _is_plain(point, module, others):
        positions, k_positions = _in_slots(query, key)
        q, k = encoding.rotate(query, key, positions, k_positions)
        scaling = _for_width(scaling, width, q)
        y = attend(
            q, k, value, encoding=encoding, positions=positions, k_positions=k_positions, causal=causal,
            dropout_p=dropout, scale=scaling,
        )  # fmt: skip
        return y.transpose(1, 2).contiguous(), None
    if attention_mask is not None:
        attention_mask = attention_mask[..., : key.shape[2]]
    elif encoding is not None:
        attention_mask = _later_keys_hidden(query, key, causal)
    dtype = query.dtype
    if encoding is not None and attention_mask is not None:
        positions, k_positions = _positions(query, key, attention_mask, others.get("position_ids"))
        query, key = encoding.rotate(query, key, positions, k_positions)
        scaling = _for_width(scaling, width, query)
        bias = encoding.bias(query, key, positions, k_positions) if has_bias(encoding) else None
        if isinstance(encoding, RotaryByClass):
            bias = _scores_by_class(encoding, query, key, positions, k_positions, scaling, others.get("softcap"))
            query = query * 0.0  # whose scores are these, and no others
        if bias is not None:  # float32, whatever the model computes in: 16 bits cannot tell far distances apart
            query, key, value = (x.to(bias.dtype) for x in (query, key, value))
        attention_mask = _numbers(attention_mask, query.dtype, bias)
    elif attention_mask is not None:
        attention_mask = _numbers(attention_mask, query.dtype, None)
    y, weights = point.function(module)(
        module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **others
    )
    return y.to(dtype), weights


def _without_matrix(
    point: AttentionPoint, module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, table: Tensor,
    others: dict[str, Any],
) -> bool:  # fmt: skip
    """Whether a backend adds the model's own bias without a matrix, and a matrix would take more than it costs."""
    scores = query.shape[:3].numel() * key.shape[2]
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and table.requires_grad):
        return False  # a graph cannot be made of another table, and a gradient keeps the matrix of its own code
    return mask is None and scores >= SMALL and _is_plain(point, module, others)


def _beside_own_bias(
    point: AttentionPoint, query: Tensor, key: Tensor, mask: Tensor | None, bias: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """The mask and the bias that the model's own code would call the function from before with."""
    if mask is not None:
        mask = mask[..., : key.shape[2]]
    if point.own is not None:
        where = _in_slots(query, key) if mask is None else _positions(query, key, mask, None)
        bias = point.own.matrix_of(bias, *where)
    return (None, bias) if mask is None else (_numbers(mask, query.dtype, bias), None)


def _scores_by_class(
    encoding: RotaryByClass, query: Tensor, key: Tensor, positions: Positions, k_positions: Positions,
    scaling: float | None, softcap: float | None,
) -> Tensor:  # fmt: skip
    """As a matrix: where a row is padded or packed, only the model's mask says which pairs there are."""
    counted = (replace(each, order_or_none=None) for each in (positions, k_positions))  # as slots do in a document
    scores = encoding.products(query, key, *counted) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    return scores if softcap is None else (scores / softcap).tanh() * softcap


def _is_plain(point: AttentionPoint, module: nn.Module, others: dict[str, Any]) -> bool:
    """Whether nothing stands beside the softmax that only the function named before knows of."""
    beside = any(others.get(name) is not None for name in ("softcap", "s_aux", "cache")) or hasattr(module, "sinks")
    return point.before == "sdpa" and not beside


def _for_width(scaling: float | None, width: int, query: Tensor) -> float | None:
    """The scale of a model is for the width of its heads, which an encoding may double (PoPE)."""
    return None if scaling is None else scaling * (width / query.shape[-1]) ** 0.5


def _in_slots(query: Tensor, key: Tensor) -> tuple[Positions, Positions]:
    """The queries are the last of the keys."""
    before = key.shape[2] - query.shape[2]
    return (
        Positions.after(before, query.shape[2], device=query.device),
        Positions.arange(key.shape[2], device=query.device),
    )


def _later_keys_hidden(query: Tensor, key: Tensor, causal: bool) -> Tensor:
    positions, k_positions = _in_slots(query, key)
    apart = (positions.index[:, :, None] - k_positions.index[:, None])[:, None].to(torch.int32)
    return torch.where(apart >= 0, apart, apart - HIDDEN) if causal else apart


def _positions(query: Tensor, key: Tensor, mask: Tensor, position_ids: Tensor | None) -> tuple[Positions, Positions]:
    """Where the queries and the keys are: by the position ids, where a layer is given them, else by slots."""
    length, keys = query.shape[2], key.shape[2]
    slots = torch.arange(keys, device=query.device)
    if mask.dtype == torch.int32:
        first = mask[0, 0, 0, 0].long()
        before = torch.where(first < -HIDDEN // 2, first + HIDDEN, first)
    else:
        before = torch.tensor(keys - length, device=query.device)
    if position_ids is None or position_ids.ndim != 2 or position_ids.shape[1] != length:
        return Positions.of((slots[:length] + before)[None], max_index=keys), Positions.arange(
            keys, device=query.device
        )
    if keys == length:
        positions = Positions.of(position_ids, order=slots.expand_as(position_ids), max_index=2**31 - 1)
        return positions, positions
    shift = position_ids[:, -1:] - (before + length - 1)
    k_index = (slots + shift).clamp(min=0)  # below are the keys of padding
    return Positions.of(position_ids, max_index=2**31 - 1), Positions.of(k_index, max_index=2**31 - 1)


def _numbers(mask: Tensor, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """What is added to the scores: the bias, and the smallest number where a key is not seen."""
    if mask.is_floating_point():  # one that the caller made
        return mask.to(dtype) if bias is None else mask.to(dtype) + bias
    visible = mask if mask.dtype == torch.bool else mask > -HIDDEN // 2
    added = torch.zeros((), dtype=dtype, device=mask.device) if bias is None else bias
    return torch.where(visible, added, torch.finfo(dtype).min)
