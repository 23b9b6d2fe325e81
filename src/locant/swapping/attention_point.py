"""An attention function that adds biases and rotates queries and keys in a `transformers` model.

`transformers` calls the attention function that the configuration names, and a mask function of the same name. Our
attention function applies the layer's encoding and calls the previous function for the rest. Our mask function returns
the distance in slots of each query and key, or a number far below zero if the query may not see the key. A slot is the
index of a token in the row that the cache has processed. A window keeps only the last slots.

A hook before the model passes the slot of its first token to every layer. If the caller gives position ids that are not
the slots, the hook passes the ids as well, and another hook after the model stores them with the keys in the cache. So
keys are rotated and biased as in the model's own code. In this file, a token's *place* is its position id, or its slot
if it has no position id.
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
from locant.swapping.added_point import T5BiasWithoutTable
from locant.swapping.forward_arguments import ForwardArguments, cache_in, named_argument
from locant.swapping.rotary_point import ForLongestRow
from locant.tensors import has_values

NAME = "locant"
KEY = "_locant_point"
EAGER = "eager_attention_forward"
SUPPORTED = ("sdpa", "eager")
"""The attention functions that take a mask of numbers, so that ours can call them."""

HIDDEN = 2**30
"""The number that is subtracted from the distance of a query and a key that it may not see."""

PLACES = "locant_places"
"""The argument that holds the `Places`. Models pass unknown arguments on to their attention, for fused kernels."""
KEYS = "_locant_places"
"""The attribute of a cache that holds its `KeyPlaces`."""
ROW_METHODS = ("reorder_cache", "batch_select_indices", "batch_repeat_interleave", "crop")
"""The methods of a cache that change which rows and keys it holds."""


class Places(NamedTuple):
    """The places of the tokens of a call.

    Args:
        queries: the position ids of the queries, ``batch|1 seq``, ``None`` if they are the slots.
        keys: the position ids of the first slots, up to the last query unless a graph continues in a static cache. The
            ids of later slots count up to the queries' ids without a gap. ``None`` if all do so.
        first: the slot of the first query, ``None`` if it is not known and the cache holds all earlier keys.
    """

    queries: Tensor | None = None
    keys: Tensor | None = None
    first: int | Tensor | None = None


@dataclass
class AttentionPoint:
    """The encoding of an attention module, and the attention function that it had before.

    Args:
        owner: the model that holds the encodings, as `locant`, so that they are trained and saved with it.
        encoding_index: the index of the encoding among them, ``None`` if the layer keeps its own attention.
        previous: the name of the previous attention function.
        for_longest: an object that all layers of this encoding share.
        own: the bias that the model's own code passes to the layer. It arrives as its table if the layer keeps its own
            attention, and is left out for another encoding. ``None`` if it is added unchanged.
    """

    owner: nn.Module
    encoding_index: int | None
    previous: str
    for_longest: ForLongestRow
    own: T5BiasWithoutTable | None = None

    @property
    def encoding(self) -> PositionEncoding | None:
        return None if self.encoding_index is None else getattr(self.owner.locant, str(self.encoding_index))

    def previous_function(self, module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
        """Return the attention function that the module had before."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        files = (sys.modules[cls.__module__] for cls in type(module).__mro__)  # FSDP makes a subclass in another file
        eager = next((vars(file)[EAGER] for file in files if EAGER in vars(file)), None)
        return ALL_ATTENTION_FUNCTIONS.get(self.previous, eager)


def attention_modules(owner: nn.Module) -> dict[int, list[nn.Module]]:
    """Return the attention modules of each layer."""
    modules: dict[int, list[nn.Module]] = {}
    for module in owner.modules():
        layer = getattr(module, "layer_idx", None)
        if "Attention" in type(module).__name__ and isinstance(layer, int):
            modules.setdefault(layer, []).append(module)
    return modules


def rotates_by_class(encoding: PositionEncoding) -> bool:
    """Return whether the encoding rotates each pair of tokens by the class of the pair."""
    return type(encoding).pair_classes is not PositionEncoding.pair_classes


def has_learned_bias(owner: nn.Module) -> bool:
    """Return whether the model's attention has a learned bias, as T5's has."""
    return any("relative_attention_bias" in path or "rel_pos" in path for path, _ in owner.named_parameters())


def require_point(owner: Any, *, has_known_bias: bool = False) -> None:
    """Raise `InputError` unless the model calls an attention function by name, and it takes a mask of numbers.

    T5 does not declare support for other functions, because it passes its bias, which they do not know.
    """
    name = type(owner).__name__
    if not (owner._supports_attention_backend or has_known_bias) or not owner._can_set_attn_implementation():
        got = f"got {name}, whose attention is not called by name, so that nothing can be added to its scores"
        raise InputError(got, "use a model whose attention goes through transformers.AttentionInterface")
    if has_learned_bias(owner) and not has_known_bias:
        raise InputError(f"got {name}, whose attention has its own learned bias", "use a model without one")
    from transformers.masking_utils import sdpa_mask

    named_argument(sdpa_mask, "the slots of queries", *SLOTS_OF_QUERIES)
    if owner.config._attn_implementation not in SUPPORTED:
        got = f"got {name} with {owner.config._attn_implementation} attention, which is fused and takes no bias"
        raise InputError(got, "model.set_attn_implementation('sdpa')")


def install_function(owner: Any, places: PlacesHooks | None) -> list[Any]:
    """Let the model call our attention function, which has one name for all models. Return the handles of hooks.

    One hook raises an error if the model is later set to another function, which would lose its encoding. Two hooks
    pass the places of the tokens to every layer.

    Args:
        places: ``None`` for T5 and its relatives, which have two stacks of layers and no position ids.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, distance_mask)
    owner.set_attn_implementation(NAME)
    hooks = [] if places is None else places.attach(owner)
    return [owner.register_forward_pre_hook(_require_name), *hooks]


def _require_name(owner: Any, args: tuple[Any, ...]) -> None:
    name = owner.config._attn_implementation
    if name != NAME:
        got = f"got {type(owner).__name__} set to {name} attention while it is swapped, which would lose its encoding"
        raise LocantError(got, f"handle.undo(), then set_attn_implementation({name!r}) and swap again")


def restore_function(owner: Any, previous: str) -> None:
    """Set the previous attention function again, unless the user has set another one since."""
    if owner.config._attn_implementation == NAME:
        owner.set_attn_implementation(previous)


# ---------------------------------------------------------------------- places of tokens


class PlacesHooks:
    """Hooks that pass the places of the tokens to the attention, and store the places of keys in the cache."""

    def __init__(self, owner: nn.Module, *, generates: bool) -> None:
        self.arguments = ForwardArguments(owner, generates=generates)

    def attach(self, owner: nn.Module) -> list[Any]:
        """Register the hooks, and return their handles."""
        return [
            owner.register_forward_pre_hook(self.before, with_kwargs=True),
            owner.register_forward_hook(self.after, with_kwargs=True),
        ]

    def before(self, owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = self.arguments.read(args, kwargs)
        return args, kwargs | {PLACES: _places(arguments, self.arguments.cache_of(arguments))}

    def after(self, owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        places, cache = kwargs[PLACES], cache_in(result)
        if cache is None:  # the model writes to the caller's cache, even if it does not return it
            cache = self.arguments.cache_of(self.arguments.read(args, kwargs))
        # A tensor that a graph makes is overwritten by the next run of the graph.
        may_keep = isinstance(getattr(places, "first", None), int) or not torch.compiler.is_compiling()
        if places is not None and cache is not None and may_keep:
            setattr(cache, KEYS, KeyPlaces(places.keys, _first_keys(cache)))
            _wrap_row_methods(cache)


@dataclass
class KeyPlaces:
    """The places of the keys in a cache.

    Args:
        ids: the position ids of the keys, ``batch|1 keys``, ``None`` if they are the slots.
        tensor: the keys of a layer when the ids were stored. If the cache now holds another tensor, its rows were
            changed in a way that we do not follow. A copy of the cache has a copy of both.
    """

    ids: Tensor | None
    tensor: Tensor | None

    def change(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Change the position ids as this method of a layer changes its keys."""
        from transformers.cache_utils import DynamicLayer

        if self.ids is None or (len(self.ids) == 1 and method != "crop"):  # all rows share these ids
            return
        layer = DynamicLayer()
        layer.keys = layer.values = self.ids[:, None, :, None]
        layer.is_initialized = True
        getattr(layer, method)(*args, **kwargs)
        self.ids = layer.keys[:, 0, :, 0]


def _first_keys(cache: Any) -> Tensor | None:
    """Return the keys of the first layer that has keys."""
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", ())
    return next((each.keys for each in layers if isinstance(getattr(each, "keys", None), Tensor)), None)


def _wrap_row_methods(cache: Any) -> None:
    """Let the methods of this cache that change its rows also change the places of its keys."""
    for name, wrapper in WRAPPERS.items():
        method = getattr(type(cache), name, None)
        if method is not None and getattr(getattr(cache, name), "__func__", None) is method:
            setattr(cache, name, MethodType(wrapper, cache))  # copies of the cache keep it


def _wrapper(name: str) -> Callable[..., None]:
    def method(cache: Any, *args: Any, **kwargs: Any) -> None:
        key_places: KeyPlaces = getattr(cache, KEYS)
        is_valid = key_places.tensor is _first_keys(cache)
        getattr(type(cache), name)(cache, *args, **kwargs)
        if is_valid:
            key_places.change(name, *args, **kwargs)
            key_places.tensor = _first_keys(cache)

    method.__name__ = name  # by this name, unpickling a cache finds the method of its class
    return method


WRAPPERS = {name: _wrapper(name) for name in ROW_METHODS}


def _places(arguments: dict[str, Any], cache: Any) -> Places | None:
    """Return places from the model's position ids, else from slots, ``None`` if the model gets no tokens."""
    ids = arguments.get("position_ids")
    tokens = arguments.get("input_ids") if arguments.get("inputs_embeds") is None else arguments["inputs_embeds"]
    if tokens is None:
        return None
    seen: int | Tensor = 0 if cache is None else cache.get_seq_length()
    seen = seen.clone() if isinstance(seen, Tensor) else seen  # the first layer changes this tensor in place
    if ids is not None and ids.ndim != 2:
        return Places(first=seen)
    slots = (torch.arange(tokens.shape[1], device=tokens.device) + seen)[None]
    stored: KeyPlaces | None = getattr(cache, KEYS, None)
    stored = stored if stored is not None and stored.tensor is _first_keys(cache) else None
    if isinstance(seen, Tensor) and not has_values(slots):  # a static cache in a graph
        stored_ids = None if stored is None else stored.ids
        if ids is None and stored_ids is None:
            return Places(first=seen)
        return Places(slots if ids is None else ids, stored_ids, seen)
    count, past = int(seen), None
    if count and stored is not None and _fits(stored.ids, len(tokens), count):
        past = stored.ids
    elif count:
        past = _past_places(arguments.get("attention_mask"), ids, slots, count)
    if past is None and (ids is None or (has_values(ids) and torch.equal(ids, slots.expand_as(ids)))):
        # Fused kernels can use this. Reading the ids costs no more than transformers' own check of the mask.
        return Places(first=seen)
    ids = slots if ids is None else ids
    if not count:
        return Places(ids, ids, 0)
    past = torch.arange(count, device=ids.device)[None] if past is None else past
    batch = max(len(past), len(ids))
    return Places(ids, torch.cat([past.expand(batch, -1), ids.expand(batch, -1)], 1), seen)


def _fits(ids: Tensor | None, rows: int, keys: int) -> bool:
    return ids is None or (len(ids) in (1, rows) and ids.shape[1] == keys)


def _past_places(mask: Any, ids: Tensor | None, slots: Tensor, seen: int) -> Tensor | None:
    """Return the places of keys in a cache that other code filled or changed, ``None`` if they are the slots.

    The position of a row's first new token must be its slot, or the number of earlier tokens that the mask shows.

    Raises:
        LocantError: it is neither, so that there is a gap somewhere.
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
        begin = real[:, seen:].long().argmax(1, keepdim=True)  # padding may come first, and has no position
        first, slot = (
            (slots if each is None else each).expand(len(real), -1).gather(1, begin) for each in (ids, slots)
        )
        counted, count = counts[:, :seen], counts[:, seen:].gather(1, begin)
        hidden = ~real[:, :seen].all(1, keepdim=True)
    by_slot = (first == slot) & (~hidden if ids is None else True)
    by_count = first == count
    is_known = bool((by_slot | by_count).all()) if has_values(first) else not torch.compiler.is_compiling()
    if not is_known:
        got = f"got a cache of {seen} keys with unknown positions: other code filled it or changed its rows, and "
        got += "position_ids and attention_mask do not determine them (rows have padding or gaps)"
        remedy = "use a cache that this model filled, and change its rows by the cache's methods only; or pass the "
        remedy += "attention_mask of the whole row and position_ids that continue after its keys; or pass the whole "
        remedy += "row without a cache"
        raise LocantError(got, remedy)
    if has_values(first) and bool(by_slot.all()):
        return None
    return torch.where(by_count, counted, past)


# ---------------------------------------------------------------------- functions that transformers calls


SLOTS_OF_QUERIES = ("q_length", "cache_position")
"""The arguments of mask functions for the slots of queries: their number (`q_offset` is the first slot), and before
`transformers` 5.4 a tensor of all slots."""


def distance_mask(
    *,
    kv_length: int,
    kv_offset: int = 0,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: Any = None,
    **others: Any,
) -> Tensor | None:
    """Return the distances in slots of queries and keys, ``batch 1 query key``, minus `HIDDEN` for hidden keys.

    Return ``None`` if only later keys are hidden, and the queries are the last keys.
    """
    from transformers.masking_utils import sdpa_mask

    if (queries := others.get("cache_position")) is None:
        first = others.get("q_offset", 0)
        are_last = isinstance(first, int) and first + others["q_length"] == kv_offset + kv_length
        queries = torch.arange(others["q_length"], device=device) + first
        others["device"] = device
    else:  # these releases allow a skipped mask only if the last keys of the cache are the queries' keys
        are_last = True
    visible = sdpa_mask(
        kv_length=kv_length,
        kv_offset=kv_offset,
        allow_is_causal_skip=allow_is_causal_skip and are_last,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip and are_last,
        **others,
    )
    if visible is None:
        return None
    keys = torch.arange(kv_length, device=queries.device) + kv_offset
    distance = (queries[:, None] - keys).to(torch.int32)
    return torch.where(visible, distance, distance - HIDDEN)


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
    point: AttentionPoint | None = getattr(module, KEY, None)
    if point is None:
        got = f"got {type(module).__name__} of a model that was built from the configuration of a swapped model"
        raise LocantError(got, "new_model.set_attn_implementation('sdpa'), or give it another configuration")
    encoding, own_bias, ids = point.encoding, others.pop("position_bias", None), others.get("position_ids")
    layer_places = None if ids is None or ids.ndim != 2 else Places(ids)  # for models that pass nothing on
    places = others.pop(PLACES, layer_places)
    if own_bias is not None and encoding is not None and point.own is None:
        raise LocantError(f"got {type(module).__name__}, which computes its own bias", "use a model without one")
    causal = others.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
    mask = None if attention_mask is None else attention_mask[..., : key.shape[2]]
    can_attend = mask is None and _is_plain_softmax(point, module, others)
    if encoding is None and can_attend:
        encoding = _matrix_free_bias(point, query, key, own_bias)
    if encoding is None:
        mask, options = _own_mask_and_bias(point, query, key, mask, own_bias, causal=causal)
        return point.previous_function(module)(
            module, query, key, value, mask, scaling=scaling, dropout=dropout, **options, **others
        )
    if rotates_by_class(encoding) and places is not None and places.queries is not None:
        can_attend = False  # its classes depend on distances, not on slots
    if mask is None and not can_attend:
        mask = _slot_distances(query, key, causal)
    width, dtype = query.shape[-1], query.dtype
    positions, k_positions = _positions(query, key, mask, places)
    if type(encoding) is Rotary:
        encoding = point.for_longest(encoding, positions.index)
    query, key = encoding.rotate(query, key, positions, k_positions)
    if scaling is not None:  # the model's scaling is for the width of its heads, which an encoding may double (PoPE)
        scaling *= (width / query.shape[-1]) ** 0.5
    if mask is None:
        y = attend(
            query, key, value, encoding=encoding, positions=positions, k_positions=k_positions, causal=causal,
            dropout_p=dropout, scale=scaling,
        )  # fmt: skip
        return y.transpose(1, 2).contiguous(), None
    bias = encoding.bias(query, key, positions, k_positions) if has_bias(encoding) else None
    unordered = (replace(each, order_or_none=None) for each in (positions, k_positions))  # ordered by their positions
    if (classes := encoding.pair_classes(*unordered)) is not None:
        # We need a matrix: if a row is padded or packed, only the model's mask shows which pairs exist.
        bias = products(classes, query, key) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        if (softcap := others.get("softcap")) is not None:
            bias = (bias / softcap).tanh() * softcap
        query = query * 0.0  # so that the scores are only these
    if bias is not None:  # use float32, whatever the model's dtype: 16 bits cannot distinguish long distances
        query, key, value = (x.to(bias.dtype) for x in (query, key, value))
    mask = _additive_mask(mask, query.dtype, bias)
    function = point.previous_function(module)
    y, weights = function(module, query, key, value, mask, scaling=scaling, dropout=dropout, **others)
    return y.to(dtype), weights


def _matrix_free_bias(
    point: AttentionPoint, query: Tensor, key: Tensor, table: Tensor | None
) -> T5BiasWithoutTable | None:
    """Return the model's own bias if its matrix would cost more than adding it without a matrix, else ``None``."""
    if point.own is None or table is None or query.shape[:3].numel() * key.shape[2] < SMALL:
        return None
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and table.requires_grad):
        return None  # a graph cannot be made from another table, and gradients need the matrix of the model's own code
    return point.own.with_table(table)


def _own_mask_and_bias(
    point: AttentionPoint, query: Tensor, key: Tensor, mask: Tensor | None, bias: Tensor | None, *, causal: bool
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Return the mask of numbers and the bias that the model's own code would pass to the previous function."""
    if mask is None and causal and point.previous == "eager" and query.shape[2] > 1:
        mask = _slot_distances(query, key, causal)  # sdpa hides later keys itself
    if bias is not None and point.own is not None:
        bias = point.own.make_matrix(bias, *_positions(query, key, mask, None))
    if mask is not None:
        return _additive_mask(mask, query.dtype, bias), {}
    return None, {} if bias is None else {"position_bias": bias}


def _is_plain_softmax(point: AttentionPoint, module: nn.Module, others: dict[str, Any]) -> bool:
    """Return whether `attend` can replace the previous function: it is sdpa, without soft cap, sinks or a cache."""
    has_more = any(others.get(name) is not None for name in ("softcap", "s_aux", "cache")) or hasattr(module, "sinks")
    return point.previous == "sdpa" and not has_more


def _slot_distances(query: Tensor, key: Tensor, causal: bool) -> Tensor:
    """Return the distances in slots, minus `HIDDEN` for later keys if the attention is causal."""
    keys = torch.arange(key.shape[2], device=query.device)
    distance = (keys[key.shape[2] - query.shape[2] :, None] - keys)[None, None].to(torch.int32)
    return torch.where(distance >= 0, distance, distance - HIDDEN) if causal else distance


def _positions(query: Tensor, key: Tensor, mask: Tensor | None, places: Places | None) -> tuple[Positions, Positions]:
    """Return the positions of queries and keys, from their places or else their slots, in the order of the slots.

    A key that no query sees is padding: encodings that count the keys in between do not count it.
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
            distance = mask[0, 0, 0, 0].long()
            before = torch.where(distance < -HIDDEN // 2, distance + HIDDEN, distance)
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
            known = places.keys[:, k_order[0].clamp(max=places.keys.shape[1] - 1)]
            k_index = torch.where(k_order < places.keys.shape[1], known, k_index)
    rows = max(len(k_index), 1 if document is None else len(document))
    document = None if document is None else document.expand(rows, -1)
    k_positions = Positions(k_index.expand(rows, -1), document, k_order.expand(rows, -1), max_index=largest)
    return Positions(index, None, order.expand_as(index), max_index=largest), k_positions


def _visible(mask: Tensor) -> Tensor:
    """Return which keys each query may see."""
    if mask.is_floating_point():  # the caller's mask
        return mask > torch.finfo(mask.dtype).min / 2
    return mask if mask.dtype == torch.bool else mask > -HIDDEN // 2


def _additive_mask(mask: Tensor, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """Return the numbers to add to the scores: the bias, or the smallest number for a hidden key."""
    if mask.is_floating_point():  # the caller's mask
        return mask.to(dtype) if bias is None else mask.to(dtype) + bias
    visible = _visible(mask)
    numbers = torch.zeros((), dtype=dtype, device=mask.device) if bias is None else bias
    return torch.where(visible, numbers, torch.finfo(dtype).min)
