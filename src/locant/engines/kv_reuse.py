"""Reuse cached keys at other positions, if a cached text follows another text or moves up in a conversation.

Two rotations are equal to one rotation by the sum of their angles. So one more rotation, the same for all tokens of a
span, moves the keys. Values do not change. One error remains. In every layer but the first, keys and values depend on
the tokens before them, and the moved keys and values were computed in another context.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import index
from typing import Any, NamedTuple, TypeVar, get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from locant.arguments import MAX_INT32, one_of, short_repr, whole
from locant.checkpoints.layer_strip import layer_strip
from locant.checkpoints.pretrained import describe_layers
from locant.errors import LocantError, RangeError, ShapeError
from locant.kernels.rotary import Layout, rotate
from locant.models.encodings import encoding_from_config
from locant.models.registry import read_config
from locant.positions import PositionEncoding, Positions, Rotary
from locant.positions.positions import require_positions
from locant.positions.temperature import Tempered
from locant.spelling import dtype_name

Cache = TypeVar("Cache")
Spans = Sequence[tuple[int, int]]

WITHOUT_POSITIONS = ("keys", "values", "conv_states", "recurrent_states")
"""The states of a cached layer that allow a move: keys and values, and states that are not rotated."""

UNROTATED = (PositionEncoding, Tempered)
"""The classes of encodings that do not rotate keys."""

PER_LAYER = "[rotary, None, ...], one encoding for each layer, or None if it does not rotate"


class _Move(NamedTuple):
    """Keys that move, with their spans ``(start, stop, by)`` and their current positions."""

    keys: Float[Tensor, "batch kv_heads seq head_dim"]
    rotary: Rotary
    spans: list[tuple[int, int, int]]
    positions: Positions


def move_cache(
    cache: Cache,
    encoding: Rotary | Sequence[PositionEncoding | None] | nn.Module | object,
    by: int | Sequence[int] | Tensor | np.ndarray,
    spans: Spans | None = None,
    *,
    positions: Positions | None = None,
    latent_layout: Layout | None = None,
) -> Cache:
    """Move the keys of a cache by a number of positions, in place, and return the cache.

    With exact angles, all keys of a span are rotated by the same angles. This takes about as long as copying the keys.
    With ``angles="float32"``, the move reproduces the model's rounding at both positions. This takes several times as
    long.

    Args:
        cache: a cache of `transformers` (dynamic or static), or keys as a tensor ``batch kv_heads seq head_dim``. For
            blocks of a paged cache ``blocks block kv_heads head_dim``, pass ``blocks.transpose(1, 2)``, with a row for
            each block.
        encoding: the model that filled the cache or its configuration (layers may differ), the `Rotary` that rotated
            all keys, or one encoding for each layer, with ``None`` for layers that do not rotate.
        by: one number of positions, or one for each span. Negative numbers move keys towards the start.
        spans: slots ``(start, stop)`` of the cache that move, without overlap. Default: all slots.
        positions: the current positions of the keys. Default: each key is at the position of its slot, after the tokens
            that a sliding window has dropped. With exact angles they only matter for the range check of the encoding.
        latent_layout: the layout of cached keys in multi-head latent attention, where `transformers` caches the rotated
            part as values. Use ``"half"`` for DeepSeek-V3 and models with its code, which sorts dimensions before it
            rotates, so that ``rope_interleave`` does not matter. Use ``"interleaved"`` for DeepSeek-V2. It is required
            for such models, because the wrong layout silently gives wrong keys.

    Raises:
        LocantError: the cache is quantised, needs gradients or has other rotated states. Or the encoding is not rotary,
            one `Rotary` is passed for a model whose layers differ, or `latent_layout` is missing or does not fit.
        RangeError, ShapeError: the spans overlap or exceed the cache, `by` does not match the spans, `positions` or the
            encoding does not match the keys, or a token would move to a position for which the encoding has no angle.

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
    moves = [*_moves(cache, encoding, by, spans, positions, latent_layout)]  # check everything before anything moves
    with torch.no_grad():
        for each in moves:
            with torch.inference_mode(each.keys.is_inference() or torch.is_inference_mode_enabled()):
                _move(each)
    return cache


def _moves(
    cache: object, encoding: Any, by: object, spans: Spans | None, positions: Positions | None, latent: Layout | None
) -> Iterator[_Move]:
    """Yield the move of each layer with rotated keys."""
    if isinstance(cache, Tensor):
        rotary = _encoding_of_keys(encoding)
        if rotary is not None:
            rotary = rotary if latent is None else rotary.replace(layout=latent)
            yield _checked_move(cache, rotary, by, spans, positions)
        return
    layers = getattr(cache, "layers", None)
    if layers is None:
        got = f"got {short_repr(cache)}, expected a cache of transformers, or keys"
        raise LocantError(got, "call move_cache(keys, ...) for the keys of each layer")
    encodings, is_latent = _encodings_of_layers(encoding, layers), _has_latent_attention(encoding)
    for number, layer in enumerate(layers):
        _require_plain(layer, spans)
        rotary = _rotary_of_layer(encodings, number)
        if rotary is not None and _is_filled(layer):
            keys, rotary = _rotated_part(layer, rotary, latent, is_latent=is_latent)
            yield _checked_move(keys, rotary, by, spans, _positions_of(layer, keys, positions))


def _checked_move(keys: Tensor, rotary: Rotary, by: object, spans: Spans | None, positions: Positions | None) -> _Move:
    _require_keys(keys, rotary)
    steps = _spans_of(keys, by, spans)
    positions = Positions.arange(keys.shape[2], device=keys.device) if positions is None else positions
    last = max((stop for _, stop, _ in steps), default=0)
    if positions.seq_len < last or positions.batch not in (1, len(keys)):
        rows = f"{positions.batch} rows of {positions.seq_len} tokens, and {len(keys)} rows of {last} slots"
        raise ShapeError(f"got positions for {rows}", "pass positions with one entry for each slot")
    _require_defined(rotary, steps, positions)
    return _Move(keys, rotary, steps, positions)


# ---------------------------------------------------------------------- the encoding of each layer


def _encoding_of_keys(encoding: Any) -> Rotary | None:
    """Return the encoding of one layer's keys, which are passed as a tensor."""
    encodings = encoding if isinstance(encoding, (PositionEncoding, list, tuple)) else _encodings_of_model(encoding)
    if isinstance(encodings, (list, tuple)) and len({repr(each) for each in encodings}) != 1:
        raise LocantError(
            f"got {len(encodings)} encodings for the keys of one layer", "pass the encoding of that layer"
        )
    return _rotary_of_layer(encodings, 0)


def _encodings_of_layers(encoding: Any, layers: Sequence[Any]) -> Rotary | Sequence[PositionEncoding | None]:
    """Return the encoding of each layer of a cache, or one encoding for all of them."""
    if isinstance(encoding, (list, tuple)):
        return encoding
    if not isinstance(encoding, PositionEncoding):
        return _encodings_of_model(encoding)
    kinds = getattr(encoding, "layer_types", None)
    if kinds:
        raise LocantError(
            f"got one encoding for the cache of a model whose layers differ ({', '.join(kinds)})",
            f"move_cache(cache, model, by=...), or {PER_LAYER}",
        )
    if kinds is None and len({getattr(layer, "is_sliding", False) for layer in layers}) > 1:
        raise LocantError(
            "got one encoding for a cache where some layers have a sliding window: the others may have another base or "
            "no rotation",
            f"move_cache(cache, model, by=...), or {PER_LAYER}",
        )
    return encoding  # type: ignore[return-value]  # `_rotary_of_layer` raises if it is not rotary


def _has_latent_attention(encoding: Any) -> bool:
    """Return whether this is a model or a configuration with multi-head latent attention."""
    is_model = not isinstance(encoding, (PositionEncoding, list, tuple))
    return is_model and read_config(_config_of(encoding))[1].rotary_keys.latent


def _config_of(model: Any) -> Any:
    config = getattr(model, "config", model)
    if not isinstance(config, Mapping) and getattr(config, "model_type", None) is None:
        got = f"got {short_repr(model)}, expected a Rotary, a model, or one encoding for each layer"
        raise LocantError(got, "move_cache(cache, model, by=...)")
    return config


def _encodings_of_model(model: Any) -> list[PositionEncoding]:
    """Return the encoding of each layer of a model or a configuration."""
    config = _config_of(model)
    values, _ = read_config(config)
    if any(describe_layers(values)):
        raise LocantError("got a model with other encodings swapped into its layers", PER_LAYER)
    kinds = [layer.kind for layer in layer_strip(config)]
    if not kinds:
        got = f"got a {values.get('model_type')} model whose configuration does not list the kinds of its layers"
        raise LocantError(got, PER_LAYER)
    by_kind = {kind: encoding_from_config(config, layer_type=kind) for kind in {*kinds}}
    return [by_kind[kind] for kind in kinds]


def _rotary_of_layer(encodings: Any, number: int) -> Rotary | None:
    """Return the encoding of this layer, or ``None`` if it does not rotate."""
    one = encodings
    if isinstance(encodings, (list, tuple)):
        if number >= len(encodings):
            raise ShapeError(
                f"got {len(encodings)} encodings for layer {number}", "pass one for each layer of the cache"
            )
        one = encodings[number]
    if one is None or type(one) in UNROTATED:
        return None
    if type(one) is not Rotary:
        got = f"got {short_repr(one)}, expected a Rotary"
        raise LocantError(got, "call move_cache(cache, model, by=...) for a model that rotates its keys")
    return one


# ---------------------------------------------------------------------- the states of a cached layer


def _require_plain(layer: Any, spans: Spans | None) -> None:
    name = type(layer).__name__
    if "Quantized" in name:
        got = f"got a cache with a {name}, whose keys are rounded: another rotation would round them again"
        raise LocantError(got, "use a cache of the model's dtype, or read the text again")
    if getattr(layer, "is_sliding", False) and spans is not None:
        got = f"got spans for a cache with a {name}, whose slots are not positions"
        raise LocantError(got, "call move_cache without spans, for the whole window")
    others = [key for key, value in vars(layer).items() if key not in WITHOUT_POSITIONS and _holds_states(value)]
    if others:
        got = f"got a cache with a {name}, which also has {', '.join(others)}, rotated in another way than its keys"
        raise LocantError(got, "read the text again at its new position")


def _holds_states(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_states, value.values()))
    return isinstance(value, Tensor) and value.ndim > 2 and value.is_floating_point()


def _is_filled(layer: Any) -> bool:
    """Return whether a layer has keys. It may have another state instead, or be empty."""
    keys = getattr(layer, "keys", None)
    return isinstance(keys, Tensor) and keys.numel() > 0


def _rotated_part(layer: Any, rotary: Rotary, latent: Layout | None, *, is_latent: bool) -> tuple[Tensor, Rotary]:
    """Return the rotated states of a layer, and the encoding with their layout.

    `is_latent` means that the model is known to have multi-head latent attention.
    """
    keys, values = layer.keys, layer.values
    fits_values = values.shape[1] == 1 and values.shape[-1] == rotary.head_dim
    if latent is not None:
        if not fits_values:
            got = f"got latent_layout for values of shape {tuple(values.shape)}, expected one head of {rotary.head_dim}"
            raise LocantError(got, "call move_cache without latent_layout if whole keys are cached")
        return values, rotary.replace(layout=latent)
    if fits_values and (is_latent or keys.shape[-1] != rotary.head_dim):
        got = "got a cache of multi-head latent attention, whose layout may differ from the configuration"
        raise LocantError(got, "latent_layout='half' for models like DeepSeek-V3, 'interleaved' for DeepSeek-V2")
    return keys, rotary


def _positions_of(layer: Any, keys: Tensor, positions: Positions | None) -> Positions | None:
    """Return the positions of the keys of a layer. A sliding window keeps the last tokens."""
    if not getattr(layer, "is_sliding", False):
        return positions
    slots = keys.shape[2]
    if positions is not None:
        return positions.slice(max(positions.seq_len - slots, 0), positions.seq_len)
    read_so_far = getattr(layer, "cumulative_length_int", getattr(layer, "cumulative_length", 0))
    return Positions.after(max(int(read_so_far) - slots, 0), slots, device=keys.device)


def _spans_of(keys: Tensor, by: object, spans: Spans | None) -> list[tuple[int, int, int]]:
    """Return the start and stop of each span, and the number of positions by which it moves."""
    length = keys.shape[2]
    try:
        bounds = [(0, length)] if spans is None else [(index(start), index(stop)) for start, stop in spans]
    except (TypeError, ValueError):
        raise RangeError(f"got {short_repr(spans)} for spans", "[(start, stop), ...], slots of the cache") from None
    numbers = by.tolist() if isinstance(by, (Tensor, np.ndarray)) else by
    steps = [*numbers] if isinstance(numbers, (Sequence, range)) else [numbers] * len(bounds)
    if len(steps) != len(bounds):
        got = f"got {len(steps)} numbers for by and {len(bounds)} spans"
        raise ShapeError(got, "pass one number, or one for each span")
    steps = [whole("by", each, -MAX_INT32, remedy="pass a number of positions") for each in steps]
    before = 0
    for start, stop in sorted(bounds):
        if not before <= start <= stop <= length:
            got = f"got the span {(start, stop)} of a cache with {length} slots"
            raise RangeError(got, "use spans within it that do not overlap")
        before = stop
    return [(start, stop, step) for (start, stop), step in zip(bounds, steps, strict=True)]


def _require_keys(keys: Tensor, rotary: Rotary) -> None:
    if keys.ndim != 4 or keys.shape[-1] != rotary.head_dim:
        got = f"got keys of shape {tuple(keys.shape)}, expected (batch, kv_heads, seq, {rotary.head_dim})"
        raise ShapeError(got, "keys[..., -head_dim:] for the rotated part, and an encoding in its layout")
    if not keys.dtype.is_floating_point or keys.dtype.itemsize < 2:
        got = f"got keys of {dtype_name(keys.dtype)}, which another rotation would round again"
        raise LocantError(got, "move keys.float() * scale, and quantise the result")
    if keys.requires_grad and torch.is_grad_enabled():
        got = "got keys that need a gradient, which cannot include a move in place"
        raise LocantError(got, "call it under torch.no_grad(), or use rotary.move(keys, positions, to)")


def _require_defined(rotary: Rotary, spans: list[tuple[int, int, int]], positions: Positions) -> None:
    """Raise `RangeError` if a token would move to a position for which the encoding has no angle."""
    for start, stop, step in spans:
        part = positions.slice(start, stop)
        if part.index.numel():
            ends = [int(end) + step * part.denominator for end in part.index.aminmax()]
            rotary.cos_sin(Positions.of(ends, denominator=part.denominator))


def _move(move: _Move) -> None:
    keys, rotary, spans, positions = move
    for start, stop, step in spans:
        part = keys[:, :, start:stop]
        if rotary.angles.mode == "exact" and rotary.pairs.runs_as is not None:
            steps = torch.full((1, stop - start), step, dtype=torch.int64, device=keys.device)
            tables = rotary.angles.tables(keys.device, None, None)._replace(attention_factor=1.0)
            rotate(part, None, steps, tables, rotary.layout, inplace=True)
            continue
        before = positions.slice(start, stop)
        index = before.index + step * before.denominator
        after = Positions.of(index, before.document_or_none, order=before.order_or_none, denominator=before.denominator)
        part.copy_(rotary.move(part, before, after))
