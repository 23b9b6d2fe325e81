"""The attention function and the mask function of a swapped model, which `transformers` calls by name.

The attention function applies the layer's encoding, and then calls the attention function that the layer had before.
The mask function returns the distance of each query and key in slots, or a number far below zero if the query may not
see the key. A slot is the index of a token among all tokens that the cache has seen. A cache with a window keeps only
the last slots.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from locant.arguments import MAX_INT32
from locant.attention.attend import attend_to_inputs, without_autocast
from locant.attention.choice import FAST_MATRIX_SCORES, BackendChoice, BackendName, choose_backend
from locant.attention.inputs import AttentionInputs, check_dropout, check_scale, require_keys_between, require_tensors
from locant.attention.mask import AttentionMask
from locant.errors import LocantError
from locant.kernels.transforms import is_plain_eager
from locant.positions.base import PositionEncoding, has_bias, has_pair_sets
from locant.positions.documents import PADDING
from locant.positions.encodings.rotary import Rotary
from locant.positions.positions import Positions
from locant.positions.rotary_by_class import products
from locant.swapping.added_point import T5BiasWithoutTable
from locant.swapping.new_encoding import NewEncoding
from locant.swapping.token_places import PLACES, Places

ATTENTION_POINT = "_locant_point"
"""The attribute of an attention module that holds its `AttentionPoint`."""
EAGER = "eager_attention_forward"

HIDDEN_DISTANCE = 2**30
"""The number that is subtracted from the distance of a query and a key if the query may not see the key."""


@dataclass
class AttentionPoint:
    """The data of an attention module that our attention function needs.

    Args:
        new_encoding: the encoding to apply, or ``None`` if the layer keeps its own attention.
        previous: the name of the attention function that the module had before.
        own_bias: T5's bias, if our attention function computes or replaces it. A layer that keeps its bias receives the
            table instead of the matrix. ``None`` if the model's own code adds the bias.
    """

    new_encoding: NewEncoding | None
    previous: str
    own_bias: T5BiasWithoutTable | None = None
    has_plain_softmax: bool = field(init=False, default=False)
    """Whether the module's attention is sdpa without sinks."""

    def attach(self, module: nn.Module, undo: ExitStack) -> None:
        """Store this object in an attention module, so that our attention function finds it."""
        self.has_plain_softmax = self.previous == "sdpa" and not hasattr(module, "sinks")
        setattr(module, ATTENTION_POINT, self)
        undo.callback(delattr, module, ATTENTION_POINT)

    def previous_function(self, module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
        """Return the attention function that the module had before."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        files = (sys.modules[cls.__module__] for cls in type(module).__mro__)  # FSDP makes a subclass in another file
        eager = next((vars(file)[EAGER] for file in files if EAGER in vars(file)), None)
        return ALL_ATTENTION_FUNCTIONS.get(self.previous, eager)


def distance_mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: Any = None,
    **others: Any,
) -> Tensor | None:
    """Return the distances in slots, ``batch 1 query key``, minus `HIDDEN_DISTANCE` for hidden keys.

    Return ``None`` if only later keys are hidden and the last keys belong to the queries.
    """
    from transformers.masking_utils import sdpa_mask

    are_last = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    visible = sdpa_mask(
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        allow_is_causal_skip=allow_is_causal_skip and are_last,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip and are_last,
        device=device,
        **others,
    )
    if visible is None:
        return None
    queries = torch.arange(q_length, device=device) + q_offset
    keys = torch.arange(kv_length, device=queries.device) + kv_offset
    distance = (queries[:, None] - keys).to(torch.int32)
    return torch.where(visible, distance, distance - HIDDEN_DISTANCE)


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
    """Return the output ``batch query heads value_dim``, and the weights if the previous function returns them."""
    point: AttentionPoint | None = getattr(module, ATTENTION_POINT, None)
    if point is None:
        got = f"got {type(module).__name__} of a model that was built from the configuration of a swapped model"
        raise LocantError(got, "new_model.set_attn_implementation('sdpa'), or give it another configuration")
    new, own_bias, places = point.new_encoding, others.pop("position_bias", None), _take_places(others)
    encoding = None if new is None else places.share(lambda: new.current, by=new)
    if own_bias is not None and encoding is not None and point.own_bias is None:
        raise LocantError(f"got {type(module).__name__}, which computes its own bias", "use a model without one")
    causal = others.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
    mask = None if attention_mask is None else attention_mask[..., : key.shape[2]]
    can_attend = mask is None and _is_plain_softmax(point, others)
    if encoding is None and can_attend:
        encoding = _matrix_free_bias(point, query, key, own_bias)
    if encoding is None:
        mask, options = _own_mask_and_bias(point, query, key, mask, own_bias, causal=causal)
        return point.previous_function(module)(
            module, query, key, value, mask, scaling=scaling, dropout=dropout, **options, **others
        )
    if rotates_by_class(encoding) and places.queries is not None:
        can_attend = False  # classes of pairs depend on distances, not on slots
    if mask is None and not can_attend:
        mask = _slot_distances(query, key, causal)
    width, dtype = query.shape[-1], query.dtype
    positions, k_positions = _positions(query, key, mask, places)
    if new is not None and type(encoding) is Rotary:
        encoding = new.for_longest(encoding, positions.index)
    query, key = encoding.rotate(query, key, positions, k_positions)
    if scaling is not None:  # the model's scaling is for the width of its heads, which an encoding may double (PoPE)
        scaling *= (width / query.shape[-1]) ** 0.5
    if mask is None:
        alike = ((x.shape, x.dtype, x.device) for x in (query, key, value))
        arguments = (query, key, value, positions, k_positions, causal, encoding, scaling, dropout)
        inputs, backend = places.share(_prepare_attention, *arguments, by=(*alike, causal, encoding, scaling, dropout))
        y = attend_to_inputs(inputs.with_tensors(query, key, value), backend).y
        return y.transpose(1, 2).contiguous(), None
    bias = encoding.bias(query, key, positions, k_positions) if has_bias(encoding) else None
    unordered = (replace(each, order_or_none=None) for each in (positions, k_positions))  # ordered by their positions
    if (classes := encoding.pair_classes(*unordered)) is not None:
        # We need a matrix, because only the model's mask shows which pairs exist in padded or packed rows.
        bias = products(classes, query, key) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        if (softcap := others.get("softcap")) is not None:
            bias = (bias / softcap).tanh() * softcap
        query = query * 0.0  # the scores are then only these products
    if bias is not None:  # always use float32, because 16 bits cannot distinguish long distances
        query, key, value = (x.to(bias.dtype) for x in (query, key, value))
    mask = _additive_mask(mask, query.dtype, bias)
    function = point.previous_function(module)
    y, weights = function(module, query, key, value, mask, scaling=scaling, dropout=dropout, **others)
    return y.to(dtype), weights


def _take_places(others: dict[str, Any]) -> Places:
    """Remove the places of the tokens from the arguments of a layer, and return them."""
    if PLACES in others:
        places: Places = others.pop(PLACES) or Places()
    else:  # some models pass position ids to their attention, but no unknown arguments
        ids = others.get("position_ids")
        places = Places() if ids is None or ids.ndim != 2 else Places(ids)
    if places.shared is not None and not is_plain_eager():  # a value is right for all layers without gradients alone
        return places._replace(shared=None)
    return places


def _prepare_attention(
    query: Tensor, key: Tensor, value: Tensor, positions: Positions, k_positions: Positions, causal: bool,
    encoding: PositionEncoding, scaling: float | None, dropout: float,
) -> tuple[AttentionInputs, BackendName | BackendChoice]:  # fmt: skip
    """Return the checked inputs of attention and its backend. Layers with tensors of the same shapes share both."""
    require_tensors(query, key, value)
    mask = AttentionMask(positions, k_positions, causal)
    require_keys_between(encoding, mask)
    scale, dropout_p = check_scale(scaling, query.shape[-1]), check_dropout(dropout)
    inputs = AttentionInputs(query, key, value, mask, encoding, scale, dropout_p)
    if rotates_by_class(encoding) or has_pair_sets(encoding):  # each class and each set has a backend of its own
        return inputs, "auto"
    with without_autocast(query):
        return inputs, choose_backend("auto", inputs)


def _matrix_free_bias(
    point: AttentionPoint, query: Tensor, key: Tensor, table: Tensor | None
) -> T5BiasWithoutTable | None:
    """Return the model's own bias if it costs less without a matrix, or ``None``."""
    if point.own_bias is None or table is None or query.shape[:3].numel() * key.shape[2] < FAST_MATRIX_SCORES:
        return None
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and table.requires_grad):
        return None  # a graph cannot be made from another table, and gradients need the matrix of the model's own code
    return point.own_bias.with_table(table)


def _own_mask_and_bias(
    point: AttentionPoint, query: Tensor, key: Tensor, mask: Tensor | None, bias: Tensor | None, *, causal: bool
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Return the additive mask and the bias that the model's own code would pass to the previous function."""
    if mask is None and causal and point.previous == "eager" and query.shape[2] > 1:
        mask = _slot_distances(query, key, causal)  # sdpa hides later keys itself
    if bias is not None and point.own_bias is not None:
        bias = point.own_bias.make_matrix(bias, *_positions(query, key, mask, Places()))
    if mask is not None:
        return _additive_mask(mask, query.dtype, bias), {}
    return None, {} if bias is None else {"position_bias": bias}


def _is_plain_softmax(point: AttentionPoint, others: dict[str, Any]) -> bool:
    """Return whether `attend` can replace the previous function, so it is sdpa without soft cap, sinks or a cache."""
    return point.has_plain_softmax and others.get("softcap") is others.get("s_aux") is others.get("cache") is None


def _slot_distances(query: Tensor, key: Tensor, causal: bool) -> Tensor:
    """Return the distances in slots, minus `HIDDEN_DISTANCE` for later keys if the attention is causal."""
    keys = torch.arange(key.shape[2], device=query.device)
    distance = (keys[key.shape[2] - query.shape[2] :, None] - keys)[None, None].to(torch.int32)
    return torch.where(distance >= 0, distance, distance - HIDDEN_DISTANCE) if causal else distance


def _positions(query: Tensor, key: Tensor, mask: Tensor | None, places: Places) -> tuple[Positions, Positions]:
    """Return the places of queries and keys if they are known, and their slots otherwise.

    A key that no query sees is padding. Encodings that count the keys between two tokens do not count padding.
    """
    length, keys, device = query.shape[2], key.shape[2], query.device
    first = keys - length if places.first is None else places.first
    if mask is None and places.queries is None and isinstance(first, int):
        slots = (first, length, keys, device)
        return places.share(_consecutive, *slots, by=slots)
    document, before = None, torch.tensor(keys - length, device=device)  # keys before the first query
    if mask is not None:
        document = torch.where(_visible(mask).any(2)[:, 0], 0, PADDING)
        if mask.dtype == torch.int32:
            distance = mask[0, 0, 0, 0].long()
            before = torch.where(distance < -HIDDEN_DISTANCE // 2, distance + HIDDEN_DISTANCE, distance)
    if places.first is None:
        first = before
    largest = first + keys if isinstance(first, int) else keys if places.first is None else MAX_INT32
    order = torch.arange(length, device=device)[None] + first
    k_order = torch.arange(keys, device=device)[None] + (first - before)
    index, k_index = order, k_order
    if places.queries is not None:
        index, largest = places.queries, MAX_INT32
        if places.keys is None or isinstance(places.first, Tensor):  # padding would be below 0
            k_index = (k_order + (index[:, -1:] - order[:, -1:])).clamp(min=0)
        if places.keys is not None:  # a static cache also has slots after the last query, which no query sees
            known_ids = places.keys[:, k_order[0].clamp(max=places.keys.shape[1] - 1)]
            k_index = torch.where(k_order < places.keys.shape[1], known_ids, k_index)
    rows = max(len(k_index), 1 if document is None else len(document))
    document = None if document is None else document.expand(rows, -1)
    k_positions = Positions(k_index.expand(rows, -1), document, k_order.expand(rows, -1), max_index=largest)
    return Positions(index, None, order.expand_as(index), max_index=largest), k_positions


def _consecutive(first: int, length: int, keys: int, device: torch.device) -> tuple[Positions, Positions]:
    """Return the positions of queries from `first` on, and of the keys that end with the last query."""
    begin = first + length - keys
    return Positions.after(first, length, device=device), Positions.after(begin, keys, device=device)


def _visible(mask: Tensor) -> Tensor:
    """Return whether each query may see each key."""
    if mask.is_floating_point():  # the caller's mask
        return mask > torch.finfo(mask.dtype).min / 2
    return mask if mask.dtype == torch.bool else mask > -HIDDEN_DISTANCE // 2


def _additive_mask(mask: Tensor, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """Return the numbers to add to the scores: the bias (or 0), and the smallest number for a hidden key."""
    if mask.is_floating_point():  # the caller's mask
        return mask.to(dtype) if bias is None else mask.to(dtype) + bias
    visible = _visible(mask)
    numbers = torch.zeros((), dtype=dtype, device=mask.device) if bias is None else bias
    return torch.where(visible, numbers, torch.finfo(dtype).min)


def rotates_by_class(encoding: PositionEncoding) -> bool:
    """Return whether the encoding rotates each pair of tokens by the class of the pair."""
    return type(encoding).pair_classes is not PositionEncoding.pair_classes
