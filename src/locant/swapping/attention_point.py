"""Biases and rotations of queries and keys in the attention of a `transformers` model, by a named attention function.

`transformers` calls the function that the configuration names, and a function of the same name for the mask. Ours adds
to the scores what the layer's encoding adds, and leaves the rest to the function that was named before. Its mask holds,
for each query and key, by how many slots they are apart, and, far below zero, that the query may not see the key.
A slot is a token's place in the row that the cache has seen; a window keeps the last slots only. A hook before the
model passes on to every layer at which slot its tokens begin. Where a caller gives position ids that are no slots, it
passes on these, and another hook behind the model notes them beside the keys in the cache: these are rotated, and
biased, as the model's own would have been.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from locant.arguments import MAX_INT32
from locant.attention import attend
from locant.attention.choice import SMALL
from locant.errors import InputError, LocantError
from locant.positions.base import PositionEncoding, has_bias
from locant.positions.documents import PADDING
from locant.positions.encodings.rotary import Rotary
from locant.positions.positions import Positions
from locant.positions.rotary_by_class import products
from locant.swapping.added_point import GivenBias
from locant.swapping.forward_arguments import ForwardArguments, cache_in, named_argument
from locant.swapping.rotary_point import OfLength
from locant.tensors import has_values

NAME = "locant"
KEY = "_locant_point"
EAGER = "eager_attention_forward"
BEFORE = ("sdpa", "eager")
"""The functions that take a mask of numbers, and so can be left the rest of the work."""

HIDDEN = 2**30
"""What is taken off the distance of a query and a key that it may not see."""

PLACES = "locant_places"
"""Models pass what they do not know on to their attention, as they do for fused kernels."""
KEYS = "_locant_places"
"""Where a cache holds its `KeyPlaces`."""
FOLLOWED = ("reorder_cache", "batch_select_indices", "batch_repeat_interleave", "crop")
"""The methods of a cache that change which rows and keys it holds."""


class Places(NamedTuple):
    """Where the tokens of a call are.

    Args:
        queries: their position ids, ``batch|1 seq``; ``None``: these are their slots.
        keys: the position ids of the first slots, up to the last query unless a graph counts on in a cache of one
            shape; those behind count up to the queries' without a gap. ``None``: so do all.
        first: the slot of the first query; ``None``: not known, and all earlier keys are there.
    """

    queries: Tensor | None = None
    keys: Tensor | None = None
    first: int | Tensor | None = None


@dataclass
class AttentionPoint:
    """What an attention module needs to know: its encoding, and the function that was named before.

    Args:
        owner: the model that holds the encodings, as `locant`, so that they are trained and saved with it.
        place: which of them; ``None``: this layer has its attention as before.
        of_length: one for all layers of this encoding.
        own: the bias that the model's own code hands on to the layer, as its table where `place` is ``None``; for
            another encoding it is left out. ``None``: it is added as it comes.
    """

    owner: nn.Module
    place: int | None
    before: str
    of_length: OfLength
    own: GivenBias | None = None

    @property
    def encoding(self) -> PositionEncoding | None:
        return None if self.place is None else getattr(self.owner.locant, str(self.place))

    def function(self, module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
        """The function that was named before."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        files = (sys.modules[cls.__module__] for cls in type(module).__mro__)  # FSDP makes a subclass of its own
        eager = next((vars(file)[EAGER] for file in files if EAGER in vars(file)), None)
        return ALL_ATTENTION_FUNCTIONS.get(self.before, eager)


def attention_modules(owner: nn.Module) -> dict[int, list[nn.Module]]:
    """The attention modules of each layer."""
    found: dict[int, list[nn.Module]] = {}
    for module in owner.modules():
        layer = getattr(module, "layer_idx", None)
        if "Attention" in type(module).__name__ and isinstance(layer, int):
            found.setdefault(layer, []).append(module)
    return found


def goes_by_class(encoding: PositionEncoding) -> bool:
    """Whether it rotates a pair of tokens by its class."""
    return type(encoding).pair_classes is not PositionEncoding.pair_classes


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
    from transformers.masking_utils import sdpa_mask

    named_argument(sdpa_mask, "the slots of queries", *SLOTS_OF_QUERIES)
    if owner.config._attn_implementation not in BEFORE:
        got = f"got {name} with {owner.config._attn_implementation} attention, which is fused and takes no bias"
        raise InputError(got, "model.set_attn_implementation('sdpa')")


def name_our_function(owner: Any, places: PlacesHooks | None) -> list[Any]:
    """Let the model call our attention function, registered once under one name for all models; returns hooks.

    One refuses to run the model after it was told to call another one, without its encoding; two tell every layer
    where its tokens are. ``None`` for T5 and its kin, which have two stacks of layers and no position ids.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask_of_slots)
    owner.set_attn_implementation(NAME)
    hooks = [] if places is None else places.attach(owner)
    return [owner.register_forward_pre_hook(_require_name), *hooks]


def _require_name(owner: Any, args: tuple[Any, ...]) -> None:
    named = owner.config._attn_implementation
    if named != NAME:
        got = f"got {type(owner).__name__} set to {named} attention while it is swapped, which would lose its encoding"
        raise LocantError(got, f"handle.undo(), then set_attn_implementation({named!r}) and swap again")


def name_again(owner: Any, before: str) -> None:
    """Name the function from before; one that the user has named since stays."""
    if owner.config._attn_implementation == NAME:
        owner.set_attn_implementation(before)


# ---------------------------------------------------------------------- where tokens are


class PlacesHooks:
    """Pass on to the attention where the tokens are, and note beside the keys of a cache where these are."""

    def __init__(self, owner: nn.Module, *, generates: bool) -> None:
        self.arguments = ForwardArguments(owner, generates=generates)

    def attach(self, owner: nn.Module) -> list[Any]:
        """The handles of the hooks."""
        return [
            owner.register_forward_pre_hook(self.before, with_kwargs=True),
            owner.register_forward_hook(self.after, with_kwargs=True),
        ]

    def before(self, owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = self.arguments.read(args, kwargs)
        return args, kwargs | {PLACES: _places(given, self.arguments.cache_of(given))}

    def after(self, owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        places, cache = kwargs[PLACES], cache_in(result)
        if cache is None:  # one that is given is written to, whether the model returns it or not
            cache = self.arguments.cache_of(self.arguments.read(args, kwargs))
        told = isinstance(getattr(places, "first", None), int) or not torch.compiler.is_compiling()
        if places is not None and cache is not None and told:  # what a graph makes does not outlast its next run
            setattr(cache, KEYS, KeyPlaces(places.keys, _tensor_of(cache)))
            _follow(cache)


@dataclass
class KeyPlaces:
    """Where the keys of a cache stand.

    Args:
        ids: their position ids, ``batch|1 keys``; ``None``: their slots.
        tensor: the keys of a layer when this was noted. If the cache holds another, its rows were changed by means that
            nobody follows; a copy of the cache has a copy of both.
    """

    ids: Tensor | None
    tensor: Tensor | None

    def change(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Do with the position ids what this method of a layer does with its keys."""
        from transformers.cache_utils import DynamicLayer

        if self.ids is None or (len(self.ids) == 1 and method != "crop"):  # one row stands for all
            return
        layer = DynamicLayer()
        layer.keys = layer.values = self.ids[:, None, :, None]
        layer.is_initialized = True
        getattr(layer, method)(*args, **kwargs)
        self.ids = layer.keys[:, 0, :, 0]


def _tensor_of(cache: Any) -> Tensor | None:
    """The keys of the first layer that has some."""
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", ())
    return next((each.keys for each in layers if isinstance(getattr(each, "keys", None), Tensor)), None)


def _follow(cache: Any) -> None:
    """Let the methods of this cache that change its rows change the places of its keys as well."""
    for name, followed in METHODS.items():
        method = getattr(type(cache), name, None)
        if method is not None and getattr(getattr(cache, name), "__func__", None) is method:
            setattr(cache, name, MethodType(followed, cache))  # which copies of the cache take with them


def _followed(name: str) -> Callable[..., None]:
    def method(cache: Any, *args: Any, **kwargs: Any) -> None:
        kept: KeyPlaces = getattr(cache, KEYS)
        known = kept.tensor is _tensor_of(cache)
        getattr(type(cache), name)(cache, *args, **kwargs)
        if known:
            kept.change(name, *args, **kwargs)
            kept.tensor = _tensor_of(cache)

    method.__name__ = name  # by which a cache is restored from a file, with the method of its class
    return method


METHODS = {name: _followed(name) for name in FOLLOWED}


def _places(given: dict[str, Any], cache: Any) -> Places | None:
    """By the position ids that a model is given, else by slots; ``None``: the model is given no tokens."""
    ids = given.get("position_ids")
    tokens = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
    if tokens is None:
        return None
    seen: int | Tensor = 0 if cache is None else cache.get_seq_length()
    seen = seen.clone() if isinstance(seen, Tensor) else seen  # the first layer counts on in the same tensor
    if ids is not None and ids.ndim != 2:
        return Places(first=seen)
    slots = (torch.arange(tokens.shape[1], device=tokens.device) + seen)[None]
    kept: KeyPlaces | None = getattr(cache, KEYS, None)
    kept = kept if kept is not None and kept.tensor is _tensor_of(cache) else None
    if isinstance(seen, Tensor) and not has_values(slots):  # a cache of one shape in a graph
        known = None if kept is None else kept.ids
        if ids is None and known is None:
            return Places(first=seen)
        return Places(slots if ids is None else ids, known, seen)
    count, past = int(seen), None
    if count and kept is not None and _fits(kept.ids, len(tokens), count):
        past = kept.ids
    elif count:
        past = _places_of_past(given.get("attention_mask"), ids, slots, count)
    if past is None and (ids is None or (has_values(ids) and torch.equal(ids, slots.expand_as(ids)))):
        return Places(first=seen)  # fused kernels know it; transformers looks as often whether a mask hides anything
    ids = slots if ids is None else ids
    if not count:
        return Places(ids, ids, 0)
    past = torch.arange(count, device=ids.device)[None] if past is None else past
    batch = max(len(past), len(ids))
    return Places(ids, torch.cat([past.expand(batch, -1), ids.expand(batch, -1)], 1), seen)


def _fits(ids: Tensor | None, rows: int, keys: int) -> bool:
    return ids is None or (len(ids) in (1, rows) and ids.shape[1] == keys)


def _places_of_past(mask: Any, ids: Tensor | None, slots: Tensor, seen: int) -> Tensor | None:
    """Where the keys of a cache stand that was filled or changed by others; ``None``: at their slots.

    The first token of a row follows its keys: at its slot, or behind as many as the mask does not hide.

    Raises:
        LocantError: it does neither, so that there is a gap somewhere.
    """
    past = torch.arange(seen, device=slots.device)[None]
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[1] < seen + slots.shape[1]:
        if ids is None:
            return None
        first, slot, counted, count = ids[:, :1], slots[:, :1], past, slots[:, :1]
        hidden = torch.zeros_like(first, dtype=torch.bool)
    else:
        real = mask.to(slots.device)[:, : seen + slots.shape[1]] != 0
        counts = (real.long().cumsum(1) - 1).clamp(min=0)
        begin = real[:, seen:].long().argmax(1, keepdim=True)  # padding may come first, which nothing follows from
        first, slot = (
            (slots if each is None else each).expand(len(real), -1).gather(1, begin) for each in (ids, slots)
        )
        counted, count = counts[:, :seen], counts[:, seen:].gather(1, begin)
        hidden = ~real[:, :seen].all(1, keepdim=True)
    by_slot = (first == slot) & (~hidden if ids is None else True)
    by_count = first == count
    known = bool((by_slot | by_count).all()) if has_values(first) else not torch.compiler.is_compiling()
    if not known:
        got = f"got a cache of {seen} keys whose places are not known: others filled it or changed its rows, and "
        got += "position_ids and attention_mask do not say where its keys stand (rows have padding or gaps)"
        remedy = "a cache that this model filled, and methods of the cache that change its rows; or the attention_mask "
        remedy += "of the whole row and position_ids that count on behind its keys; or the whole row without a cache"
        raise LocantError(got, remedy)
    if has_values(first) and bool(by_slot.all()):
        return None
    return torch.where(by_count, counted, past)


# ---------------------------------------------------------------------- what transformers calls


SLOTS_OF_QUERIES = ("q_length", "cache_position")
"""What functions for masks are told of the slots of queries: how many there are, beside `q_offset`, the first of them;
before `transformers` 5.4, all of them."""


def mask_of_slots(
    *,
    kv_length: int,
    kv_offset: int = 0,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: Any = None,
    **others: Any,
) -> Tensor | None:
    """``batch 1 query key``: slots from key to query, less `HIDDEN` where the key is not seen.

    ``None``: nothing is hidden but later keys, and the queries are the last of the keys.
    """
    from transformers.masking_utils import sdpa_mask

    if (queries := others.get("cache_position")) is None:
        first = others.get("q_offset", 0)
        last = isinstance(first, int) and first + others["q_length"] == kv_offset + kv_length
        queries = torch.arange(others["q_length"], device=device) + first
        others["device"] = device
    else:  # whoever says so allows no mask to be skipped but for caches whose last keys are the queries'
        last = True
    visible = sdpa_mask(
        kv_length=kv_length,
        kv_offset=kv_offset,
        allow_is_causal_skip=allow_is_causal_skip and last,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip and last,
        **others,
    )
    if visible is None:
        return None
    keys = torch.arange(kv_length, device=queries.device) + kv_offset
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
    encoding, own_bias, ids = point.encoding, others.pop("position_bias", None), others.get("position_ids")
    of_layer = None if ids is None or ids.ndim != 2 else Places(ids)  # where the model passed nothing on
    places = others.pop(PLACES, of_layer)
    if own_bias is not None and encoding is not None and point.own is None:
        raise LocantError(f"got a bias of its own from {type(module).__name__}", "a model without one")
    causal = others.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
    mask = None if attention_mask is None else attention_mask[..., : key.shape[2]]
    plain = mask is None and _is_plain(point, module, others)
    if encoding is None and plain:
        encoding = _by_table(point, query, key, own_bias)
    if encoding is None:
        mask, added = _as_before(point, query, key, mask, own_bias, causal=causal)
        return point.function(module)(
            module, query, key, value, mask, scaling=scaling, dropout=dropout, **added, **others
        )
    if goes_by_class(encoding) and places is not None and places.queries is not None:
        plain = False  # its classes go by distance, not by slots
    if mask is None and not plain:
        mask = _later_keys_hidden(query, key, causal)
    width, dtype = query.shape[-1], query.dtype
    positions, k_positions = _positions(query, key, mask, places)
    if type(encoding) is Rotary:
        encoding = point.of_length(encoding, positions.index)
    query, key = encoding.rotate(query, key, positions, k_positions)
    if scaling is not None:  # that of a model is for the width of its heads, which an encoding may double (PoPE)
        scaling *= (width / query.shape[-1]) ** 0.5
    if mask is None:
        y = attend(
            query, key, value, encoding=encoding, positions=positions, k_positions=k_positions, causal=causal,
            dropout_p=dropout, scale=scaling,
        )  # fmt: skip
        return y.transpose(1, 2).contiguous(), None
    bias = encoding.bias(query, key, positions, k_positions) if has_bias(encoding) else None
    counted = (replace(each, order_or_none=None) for each in (positions, k_positions))  # as slots do in a document
    if (classes := encoding.pair_classes(*counted)) is not None:
        # A matrix: where a row is padded or packed, only the model's mask says which pairs there are.
        bias = products(classes, query, key) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        if (softcap := others.get("softcap")) is not None:
            bias = (bias / softcap).tanh() * softcap
        query = query * 0.0  # whose scores are these, and no others
    if bias is not None:  # float32, whatever the model computes in: 16 bits cannot tell far distances apart
        query, key, value = (x.to(bias.dtype) for x in (query, key, value))
    mask = _numbers(mask, query.dtype, bias)
    y, weights = point.function(module)(module, query, key, value, mask, scaling=scaling, dropout=dropout, **others)
    return y.to(dtype), weights


def _by_table(point: AttentionPoint, query: Tensor, key: Tensor, table: Tensor | None) -> GivenBias | None:
    """The model's own bias, where a matrix of it would take more than adding it without one costs."""
    if point.own is None or table is None or query.shape[:3].numel() * key.shape[2] < SMALL:
        return None
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and table.requires_grad):
        return None  # a graph cannot be made of another table, and a gradient keeps the matrix of its own code
    return point.own.of_table(table)


def _as_before(
    point: AttentionPoint, query: Tensor, key: Tensor, mask: Tensor | None, bias: Tensor | None, *, causal: bool
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """The mask of numbers and the bias that the model's own code would call the function from before with."""
    if mask is None and causal and point.before == "eager" and query.shape[2] > 1:
        mask = _later_keys_hidden(query, key, causal)  # sdpa does so itself
    if bias is not None and point.own is not None:
        bias = point.own.matrix_of(bias, *_positions(query, key, mask, None))
    if mask is not None:
        return _numbers(mask, query.dtype, bias), {}
    return None, {} if bias is None else {"position_bias": bias}


def _is_plain(point: AttentionPoint, module: nn.Module, others: dict[str, Any]) -> bool:
    """Whether nothing stands beside the softmax that only the function named before knows of."""
    beside = any(others.get(name) is not None for name in ("softcap", "s_aux", "cache")) or hasattr(module, "sinks")
    return point.before == "sdpa" and not beside


def _later_keys_hidden(query: Tensor, key: Tensor, causal: bool) -> Tensor:
    keys = torch.arange(key.shape[2], device=query.device)
    apart = (keys[key.shape[2] - query.shape[2] :, None] - keys)[None, None].to(torch.int32)
    return torch.where(apart >= 0, apart, apart - HIDDEN) if causal else apart


def _positions(query: Tensor, key: Tensor, mask: Tensor | None, places: Places | None) -> tuple[Positions, Positions]:
    """Where the queries and the keys are: at their places, or else at their slots, and in the order of these.

    A key that no query sees is padding: what counts the keys in between does not count it.
    """
    length, keys, device = query.shape[2], key.shape[2], query.device
    places = places or Places()
    first = keys - length if places.first is None else places.first
    if mask is None and places.queries is None and isinstance(first, int):
        begin = first + length - keys
        return Positions.after(first, length, device=device), Positions.after(begin, keys, device=device)
    document, before = None, torch.tensor(keys - length, device=device)  # keys before the first query
    if mask is not None:
        document = torch.where(_visible(mask).any(2)[:, 0], 0, PADDING)
        if mask.dtype == torch.int32:
            apart = mask[0, 0, 0, 0].long()
            before = torch.where(apart < -HIDDEN // 2, apart + HIDDEN, apart)
    if places.first is None:
        first = before
    largest = first + keys if isinstance(first, int) else keys if places.first is None else MAX_INT32
    order = torch.arange(length, device=device)[None] + first
    k_order = torch.arange(keys, device=device)[None] + (first - before)
    index, k_index = order, k_order
    if places.queries is not None:
        index, largest = places.queries, MAX_INT32
        if places.keys is None or isinstance(places.first, Tensor):  # of padding below 0
            k_index = (k_order + (index[:, -1:] - order[:, -1:])).clamp(min=0)
        if places.keys is not None:  # a cache of one shape has slots behind the last query, too, which nothing sees
            told = places.keys[:, k_order[0].clamp(max=places.keys.shape[1] - 1)]
            k_index = torch.where(k_order < places.keys.shape[1], told, k_index)
    rows = max(len(k_index), 1 if document is None else len(document))
    document = None if document is None else document.expand(rows, -1)
    k_positions = Positions(k_index.expand(rows, -1), document, k_order.expand(rows, -1), max_index=largest)
    return Positions(index, None, order.expand_as(index), max_index=largest), k_positions


def _visible(mask: Tensor) -> Tensor:
    """Which key each query may see."""
    if mask.is_floating_point():  # one that the caller made
        return mask > torch.finfo(mask.dtype).min / 2
    return mask if mask.dtype == torch.bool else mask > -HIDDEN // 2


def _numbers(mask: Tensor, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """What is added to the scores: the bias, and the smallest number where a key is not seen."""
    if mask.is_floating_point():  # one that the caller made
        return mask.to(dtype) if bias is None else mask.to(dtype) + bias
    visible = _visible(mask)
    added = torch.zeros((), dtype=dtype, device=mask.device) if bias is None else bias
    return torch.where(visible, added, torch.finfo(dtype).min)
