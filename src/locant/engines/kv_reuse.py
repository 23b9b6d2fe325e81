"""Cached keys at another place: a text that was read once stands after another one, or moves up in a conversation.

One rotation after another is one by the sum of their angles, so keys move by one more rotation, which is the same for
all tokens of a span. Values need nothing. What this does not repair: in every layer but the first, keys and values have
seen the tokens before them, and moved ones have seen another past.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any, TypeVar, get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from locant.arguments import MAX_INT32, one_of, shown, whole
from locant.errors import LocantError, RangeError, ShapeError
from locant.kernels.rotary import Layout, rotate
from locant.positions import Positions, Rotary
from locant.positions.positions import require_positions

Cache = TypeVar("Cache")
Spans = Sequence[tuple[int, int]]


def move_cache(
    cache: Cache,
    encoding: Rotary | Sequence[Rotary | None],
    by: int | Sequence[int] | Tensor | np.ndarray,
    spans: Spans | None = None,
    *,
    positions: Positions | None = None,
    latent_layout: Layout | None = None,
) -> Cache:
    """Move the keys of a cache by so many positions, in place; returns the cache.

    With exact angles each span is one rotation by one angle, which takes about as long as copying the keys. With
    ``angles="float32"`` the rounding of the model at both places is made again, which takes several times as long.

    Args:
        cache: of `transformers` (dynamic or static), or keys as a tensor
            ``batch kv_heads seq head_dim``; blocks of a paged cache ``blocks block kv_heads head_dim`` as
            ``blocks.transpose(1, 2)``, each block a row.
        encoding: with which the keys were rotated; or one for each layer, ``None`` for layers that rotate nothing.
        by: how far, negative ones towards the start; one number, or one for each span.
        spans: slots of the cache ``(start, stop)`` that move, without overlap; default: all of it.
        positions: where the keys stand now; default: each at the position of its slot. With exact angles only the
            end of what an encoding is defined for depends on it.
        latent_layout: which dimensions of a cached key form a pair in multi-head latent attention, of which
            `transformers` caches the rotated part as values: ``"half"`` for DeepSeek-V3 and what follows its code,
            whatever ``rope_interleave`` of the configuration says, for it sorts them before it rotates;
            ``"interleaved"`` for DeepSeek-V2. Required there: the wrong one is 7 off without a word.

    Raises:
        LocantError: a quantised cache, or one whose slots are no positions; an encoding that is not rotary.
        RangeError, ShapeError: spans outside of the cache or of each other, or keys that are not of this encoding.

    >>> rotary, keys = Rotary(8), torch.randn(1, 2, 3, 8)
    >>> rotated = rotary.rotate_one(keys, Positions.arange(3))
    >>> moved = move_cache(rotated.clone(), rotary, by=1_000_000)
    >>> torch.allclose(moved, rotary.rotate_one(keys, Positions.after(1_000_000, 3)), atol=1e-6)
    True
    """
    if latent_layout is not None:
        one_of("latent_layout", latent_layout, get_args(Layout))
    if positions is not None:
        require_positions(positions)
    if isinstance(cache, Tensor):
        rotary = _of_layer(encoding, 0)
        if rotary is not None:
            _require_keys(cache, rotary)
            moves = _spans_of(cache, by, spans)
            _require_places(cache, rotary, moves, positions)
            _move(cache, rotary, moves, positions)
        return cache
    layers = getattr(cache, "layers", None)
    if layers is None:
        got = f"got {shown(cache)}, expected a cache of transformers, or keys"
        raise LocantError(got, "move_cache(keys, ...) for the keys of each layer")
    parts: list[tuple[Tensor, Rotary, list[tuple[int, int, int]]]] = []
    for number, layer in enumerate(layers):  # all is checked before any of it moves
        _require_plain(layer, spans)
        of_layer = _of_layer(encoding, number)
        if of_layer is not None and _is_filled(layer):
            keys, rotary = _part_of(layer, of_layer, latent_layout)
            _require_keys(keys, rotary)
            moves = _spans_of(keys, by, spans)
            _require_places(keys, rotary, moves, positions)
            parts.append((keys, rotary, moves))
    for keys, rotary, moves in parts:
        _move(keys, rotary, moves, positions)
    return cache


def _of_layer(encoding: Rotary | Sequence[Rotary | None], number: int) -> Rotary | None:
    one: Any = encoding
    if isinstance(encoding, Sequence):
        if number >= len(encoding):
            raise ShapeError(f"got {len(encoding)} encodings for layer {number}", "one for each layer of the cache")
        one = encoding[number]
        if one is None:
            return None
    if type(one) is not Rotary:
        raise LocantError(f"got {shown(one)}, expected a Rotary", "Rotary.from_config(model.config)")
    return one


def _require_plain(layer: Any, spans: Spans | None) -> None:
    name = type(layer).__name__
    if "Quantized" in name:
        got = f"got a cache with a {name}, whose keys are rounded: another rotation would round them again"
        raise LocantError(got, "a cache of the model's dtype, or the text read again")
    if getattr(layer, "is_sliding", False) and spans is not None:
        got = f"got spans for a cache with a {name}, whose slots are no positions"
        raise LocantError(got, "move_cache without spans, for the whole window")


def _is_filled(layer: Any) -> bool:
    """Not so: layers with a state in the place of keys, and those that nothing was written to."""
    keys = getattr(layer, "keys", None)
    return isinstance(keys, Tensor) and keys.numel() > 0


def _part_of(layer: Any, rotary: Rotary, latent_layout: Layout | None) -> tuple[Tensor, Rotary]:
    """What is rotated in a layer of a cache, and with which pairs."""
    keys, values = layer.keys, layer.values
    if keys.shape[-1] == rotary.head_dim or values.shape[1] != 1 or values.shape[-1] != rotary.head_dim:
        return keys, rotary
    if latent_layout is None:
        got = "got a cache of multi-head latent attention, whose keys need not be in the order of the configuration"
        raise LocantError(got, "latent_layout='half' for DeepSeek-V3 and its kin, 'interleaved' for DeepSeek-V2")
    return values, rotary.alike(layout=latent_layout)


def _spans_of(keys: Tensor, by: object, spans: Spans | None) -> list[tuple[int, int, int]]:
    """Where each span begins and ends, and how far it moves."""
    length = keys.shape[2]
    try:
        given = [(0, length)] if spans is None else [(index(start), index(stop)) for start, stop in spans]
    except (TypeError, ValueError):
        raise RangeError(f"got {shown(spans)} for spans", "[(start, stop), ...], slots of the cache") from None
    of_numbers = by.tolist() if isinstance(by, (Tensor, np.ndarray)) else by
    steps = [*of_numbers] if isinstance(of_numbers, (Sequence, range)) else [of_numbers] * len(given)
    if len(steps) != len(given):
        raise ShapeError(f"got {len(steps)} numbers for by and {len(given)} spans", "one number for each span, or one")
    steps = [whole("by", each, -MAX_INT32, remedy="a number of positions") for each in steps]
    before = 0
    for start, stop in sorted(given):
        if not before <= start <= stop <= length:
            got = f"got the span {(start, stop)} of a cache with {length} slots"
            raise RangeError(got, "spans within it that do not overlap")
        before = stop
    return [(start, stop, step) for (start, stop), step in zip(given, steps, strict=True)]


def _require_keys(keys: Tensor, rotary: Rotary) -> None:
    if keys.ndim != 4 or keys.shape[-1] != rotary.head_dim:
        got = f"got keys of shape {tuple(keys.shape)}, expected (batch, kv_heads, seq, {rotary.head_dim})"
        raise ShapeError(got, "keys[..., -head_dim:] for the part that is rotated, and the encoding in its layout")
    if not keys.dtype.is_floating_point or keys.dtype.itemsize < 2:
        got = f"got keys of {keys.dtype}, which another rotation would round again"
        raise LocantError(got, "keys.float() * scale moved, and quantised anew")
    if keys.requires_grad and torch.is_grad_enabled():
        got = "got keys that need a gradient, which a move in place would not be part of"
        raise LocantError(got, "torch.no_grad() around it, or rotary.move(keys, positions, to)")


def _require_places(
    keys: Tensor, rotary: Rotary, spans: list[tuple[int, int, int]], positions: Positions | None
) -> None:
    """Raise where a token would move to a position that the encoding has no angle for."""
    for start, stop, step in spans:
        here = Positions.arange(keys.shape[2]) if positions is None else positions
        here = here.slice(start, stop)
        if here.index.numel():
            low, high = (int(end) for end in here.index.aminmax())
            rotary.cos_sin(Positions.of([low + step, high + step]))


def _move(
    keys: Float[Tensor, "batch kv_heads seq head_dim"],
    rotary: Rotary,
    spans: list[tuple[int, int, int]],
    positions: Positions | None,
) -> None:
    for start, stop, step in spans:
        part = keys[:, :, start:stop]
        if rotary.angles.mode == "exact" and rotary.pairs.runs_as is not None:
            steps = torch.full((1, stop - start), step, dtype=torch.int64, device=keys.device)
            tables = rotary.angles.tables(keys.device, None, None)._replace(attention_factor=1.0)
            with torch.no_grad():
                rotate(part, None, steps, tables, rotary.layout, inplace=True)
            continue
        here = Positions.arange(keys.shape[2], device=keys.device) if positions is None else positions
        here = here.slice(start, stop)
        part.copy_(rotary.move(part, here, Positions.of(here.index + step, here.document_or_none)))
