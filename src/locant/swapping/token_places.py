"""The positions of the tokens in a call. Two hooks around the model pass them to every layer.

A token's *slot* is its index in the row that the cache has processed. Its *place* is its position id, or its slot if it
has no position id. The hook before the model passes the slot of the first token to every layer. If the caller passes
position ids that differ from the slots, the hook passes the ids as well. The hook after the model stores them with the
keys in the cache. So keys are rotated and biased as in the model's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import ExitStack
from dataclasses import dataclass
from types import MethodType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from locant.errors import LocantError
from locant.swapping.forward_arguments import ForwardArguments, cache_in
from locant.tensors import has_values

PLACES = "locant_places"
"""The argument that holds the `Places`. Models pass unknown arguments on to their attention, for fused kernels."""
KEYS = "_locant_places"
"""The attribute of a cache that holds its `KeyPlaces`."""
ROW_METHODS = ("reorder_cache", "batch_select_indices", "batch_repeat_interleave", "crop")
"""The methods of a cache that change which rows and keys it holds."""

T = TypeVar("T")


class Places(NamedTuple):
    """The places of the tokens of a call.

    Args:
        queries: the position ids of the queries, ``batch|1 seq``, or ``None`` if they are the slots.
        keys: the position ids of the keys, by slot. They may end before the last query if a graph continues in a static
            cache. The ids of all later slots count up to the queries' ids without a gap. ``None`` if this holds for
            every slot.
        first: the slot of the first query, or ``None`` if it is unknown. The cache then holds all earlier keys.
        shared: the values that the layers of this call share, or ``None`` if a compiler traces the call, or a value of
            one layer may be wrong for another because of gradients or transforms.
    """

    queries: Tensor | None = None
    keys: Tensor | None = None
    first: int | Tensor | None = None
    shared: dict[Any, Any] | None = None

    def share(self, compute: Callable[..., T], *arguments: Any, by: Hashable) -> T:
        """Return a value that an earlier layer of this call has stored under this key, or compute and store it."""
        if self.shared is None:
            return compute(*arguments)
        if by not in self.shared:
            self.shared[by] = compute(*arguments)
        return self.shared[by]


class PlacesHooks:
    """Hooks that pass the places of the tokens to the attention, and store the places of keys in the cache."""

    def __init__(self, arguments: ForwardArguments) -> None:
        self.arguments = arguments

    def attach(self, owner: nn.Module, undo: ExitStack) -> None:
        """Register the hooks."""
        undo.callback(owner.register_forward_pre_hook(self.before, with_kwargs=True).remove)
        undo.callback(owner.register_forward_hook(self.after, with_kwargs=True).remove)

    def before(self, owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = self.arguments.read(args, kwargs)
        places = _places(arguments, self.arguments.cache_of(arguments))
        if places is not None and not torch.compiler.is_compiling():
            places = places._replace(shared={})
        return args, kwargs | {PLACES: places}

    def after(self, owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        places, cache = kwargs[PLACES], cache_in(result)
        if cache is None:  # the model writes to the caller's cache, even if it does not return it
            cache = self.arguments.cache_of(self.arguments.read(args, kwargs))
        # A tensor that a graph makes is overwritten by the next run of the graph.
        may_keep = isinstance(getattr(places, "first", None), int) or not torch.compiler.is_compiling()
        if places is not None and cache is not None and may_keep:
            if not hasattr(cache, KEYS):
                _wrap_row_methods(cache)
            setattr(cache, KEYS, KeyPlaces(places.keys, _first_keys(cache)))


@dataclass
class KeyPlaces:
    """The places of the keys in a cache.

    Args:
        ids: the position ids of the keys, ``batch|1 keys``, or ``None`` if they are the slots.
        tensor: the keys of a layer when the ids were stored. If the cache now holds another tensor, its rows were
            changed in a way that we do not follow. A copy of the cache has a copy of the ids and of this tensor.
    """

    ids: Tensor | None
    tensor: Tensor | None

    def change(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Apply a method of a cache layer to the position ids, as the layer applies it to its keys."""
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
    """Make the methods that change the rows of this cache also change the places of its keys."""
    for name, wrapper in WRAPPERS.items():
        method = getattr(type(cache), name, None)
        if method is not None and getattr(getattr(cache, name), "__func__", None) is method:
            setattr(cache, name, MethodType(wrapper, cache))  # copies of the cache keep the wrapper


def _wrapper(name: str) -> Callable[..., None]:
    def method(cache: Any, *args: Any, **kwargs: Any) -> None:
        key_places: KeyPlaces = getattr(cache, KEYS)
        is_valid = key_places.tensor is _first_keys(cache)
        getattr(type(cache), name)(cache, *args, **kwargs)
        if is_valid:
            key_places.change(name, *args, **kwargs)
            key_places.tensor = _first_keys(cache)

    method.__name__ = name  # so that unpickling a cache finds the method of its class
    return method


WRAPPERS = {name: _wrapper(name) for name in ROW_METHODS}


def _places(arguments: dict[str, Any], cache: Any) -> Places | None:
    """Return places from the position ids or else from the slots, or ``None`` if the call has no tokens."""
    ids = arguments.get("position_ids")
    tokens = arguments.get("input_ids") if arguments.get("inputs_embeds") is None else arguments["inputs_embeds"]
    if tokens is None:
        return None
    seen: int | Tensor = 0 if cache is None else cache.get_seq_length()
    seen = seen.clone() if isinstance(seen, Tensor) else seen  # the first layer changes this tensor in place
    if ids is not None and ids.ndim != 2:
        return Places(first=seen)
    stored: KeyPlaces | None = getattr(cache, KEYS, None)
    stored = stored if stored is not None and stored.tensor is _first_keys(cache) else None
    if ids is None and isinstance(seen, int) and (not seen or (stored is not None and stored.ids is None)):
        return Places(first=seen)
    slots = (torch.arange(tokens.shape[1], device=tokens.device) + seen)[None]
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
        # Without ids, fused kernels can run. Reading the ids costs no more than transformers' own check of the mask.
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
    """Return the places of keys in a cache that other code filled or changed, or ``None`` if they are the slots.

    The position of a row's first new token must be its slot, or the number of earlier tokens that the mask shows.

    Raises:
        LocantError: it is neither, so some keys have unknown positions.
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
