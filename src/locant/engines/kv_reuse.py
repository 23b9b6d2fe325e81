"""Cached keys at another place: a text that was read once stands after another one, or moves up in a conversation.

One rotation after another is one by the sum of their angles, so keys move by one more rotation, which is the same for
all tokens of a span. Values need nothing. What this does not repair: in every layer but the first, keys and values have
seen the tokens before them, and moved ones have seen another past.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import index
from typing import Any, NamedTuple, TypeVar, get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from locant.arguments import MAX_INT32, one_of, shown, whole
from locant.checkpoints.explanation import layer_strip
from locant.checkpoints.pretrained import told_layers
from locant.errors import LocantError, RangeError, ShapeError
from locant.kernels.rotary import Layout, rotate
from locant.models.encodings import encoding_from_config
from locant.models.registry import read
from locant.positions import PositionEncoding, Positions, Rotary
from locant.positions.positions import require_positions
from locant.positions.temperature import Tempered
from locant.spelling import dtype_name

Cache = TypeVar("Cache")
Spans = Sequence[tuple[int, int]]

WITHOUT_POSITIONS = ("keys", "values", "conv_states", "recurrent_states")
"""States of a cached layer that are moved here, or that have no rotation to correct."""

UNROTATED = (PositionEncoding, Tempered)
"""Encodings of layers whose keys are cached as they are."""

PER_LAYER = "[rotary, None, ...], one encoding for each layer, None where it does not rotate"


class _Move(NamedTuple):
    """Keys that move: each span ``(start, stop, by)``, and where the keys stand now."""

    keys: Float[Tensor, "batch kv_heads seq head_dim"]
    rotary: Rotary
    spans: list[tuple[int, int, int]]
    here: Positions


def move_cache(
    cache: Cache,
    encoding: Rotary | Sequence[PositionEncoding | None] | nn.Module | object,
    by: int | Sequence[int] | Tensor | np.ndarray,
    spans: Spans | None = None,
    *,
    positions: Positions | None = None,
    latent_layout: Layout | None = None,
) -> Cache:
    """Move the keys of a cache by so many positions, in place, and return the cache.

    With exact angles each span is one rotation by one angle, which takes about as long as copying the keys. With
    ``angles="float32"`` the rounding of the model at both places is made again, which takes several times as long.

    Args:
        cache: of `transformers` (dynamic or static), or keys as a tensor
            ``batch kv_heads seq head_dim``; blocks of a paged cache ``blocks block kv_heads head_dim`` as
            ``blocks.transpose(1, 2)``, each block a row.
        encoding: the model that filled the cache, or its configuration, whose layers may differ. Or the `Rotary` that
            rotated all keys. Or one encoding for each layer, ``None`` for layers that do not rotate.
        by: how far, negative ones towards the start; one number, or one for each span.
        spans: slots of the cache ``(start, stop)`` that move, without overlap; default: all of it.
        positions: where the keys stand now; default: each at the position of its slot, behind the tokens that a
            sliding window has dropped. With exact angles only the end of what an encoding is defined for depends on it.
        latent_layout: which dimensions of a cached key form a pair in multi-head latent attention, of which
            `transformers` caches the rotated part as values: ``"half"`` for DeepSeek-V3 and what follows its code,
            whatever ``rope_interleave`` of the configuration says, for it sorts them before it rotates;
            ``"interleaved"`` for DeepSeek-V2. Required there: the wrong one is 7 off without a word.

    Raises:
        LocantError: a quantised cache, or one with other rotated states beside its keys; an encoding that is not
            rotary; one `Rotary` for a model whose layers differ.
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
    moves = [*_moves(cache, encoding, by, spans, positions, latent_layout)]  # all is checked before any of it moves
    with torch.no_grad():
        for each in moves:
            with torch.inference_mode(each.keys.is_inference() or torch.is_inference_mode_enabled()):
                _move(each)
    return cache


def _moves(
    cache: object, encoding: Any, by: object, spans: Spans | None, positions: Positions | None, latent: Layout | None
) -> Iterator[_Move]:
    """Every layer's keys that move."""
    if isinstance(cache, Tensor):
        rotary = _encoding_of_keys(encoding)
        if rotary is not None:
            rotary = rotary if latent is None else rotary.alike(layout=latent)
            yield _checked_move(cache, rotary, by, spans, positions)
        return
    layers = getattr(cache, "layers", None)
    if layers is None:
        got = f"got {shown(cache)}, expected a cache of transformers, or keys"
        raise LocantError(got, "move_cache(keys, ...) for the keys of each layer")
    encodings, is_latent = _encodings_of_layers(encoding, layers), _has_latent_attention(encoding)
    for number, layer in enumerate(layers):
        _require_plain(layer, spans)
        rotary = _one_of(encodings, number)
        if rotary is not None and _is_filled(layer):
            keys, rotary = _rotated_part(layer, rotary, latent, is_latent=is_latent)
            yield _checked_move(keys, rotary, by, spans, _positions_of(layer, keys, positions))


def _checked_move(keys: Tensor, rotary: Rotary, by: object, spans: Spans | None, here: Positions | None) -> _Move:
    _require_keys(keys, rotary)
    steps = _spans_of(keys, by, spans)
    here = Positions.arange(keys.shape[2], device=keys.device) if here is None else here
    last = max((stop for _, stop, _ in steps), default=0)
    if here.seq_len < last or here.batch not in (1, len(keys)):
        got = f"got positions for {here.batch} rows of {here.seq_len} tokens, and {len(keys)} rows of {last} slots"
        raise ShapeError(got, "positions with one entry for each slot")
    _require_places(rotary, steps, here)
    return _Move(keys, rotary, steps, here)


# ---------------------------------------------------------------------- which encoding a layer has


def _encoding_of_keys(encoding: Any) -> Rotary | None:
    """That of the keys of one layer, given as a tensor."""
    encodings = encoding if isinstance(encoding, (PositionEncoding, list, tuple)) else _encodings_of_model(encoding)
    if isinstance(encodings, (list, tuple)) and len({repr(each) for each in encodings}) != 1:
        raise LocantError(f"got {len(encodings)} encodings for the keys of one layer", "the encoding of that layer")
    return _one_of(encodings, 0)


def _encodings_of_layers(encoding: Any, layers: Sequence[Any]) -> Rotary | Sequence[PositionEncoding | None]:
    """The encoding of each layer of a cache, or one that all of them have."""
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
            "got one encoding for a cache in which some layers have a sliding window: the others may have another base "
            "or no rotation",
            f"move_cache(cache, model, by=...), or {PER_LAYER}",
        )
    return encoding  # type: ignore[return-value]  # `_one_of` refuses what is not rotary


def _has_latent_attention(encoding: Any) -> bool:
    """Whether this is a model, or its configuration, with multi-head latent attention."""
    is_model = not isinstance(encoding, (PositionEncoding, list, tuple))
    return is_model and read(_config_of(encoding))[1].rotary_keys.latent


def _config_of(model: Any) -> Any:
    config = getattr(model, "config", model)
    if not isinstance(config, Mapping) and getattr(config, "model_type", None) is None:
        got = f"got {shown(model)}, expected a Rotary, a model, or one encoding for each layer"
        raise LocantError(got, "move_cache(cache, model, by=...)")
    return config


def _encodings_of_model(model: Any) -> list[PositionEncoding]:
    """The encoding of each layer of a model, or of a configuration."""
    config = _config_of(model)
    values, _ = read(config)
    if any(told_layers(values)):
        raise LocantError("got a model with other encodings swapped into its layers", PER_LAYER)
    kinds = [layer.kind for layer in layer_strip(config)]
    if not kinds:
        got = f"got a {values.get('model_type')} model whose configuration does not list the kinds of its layers"
        raise LocantError(got, PER_LAYER)
    by_kind = {kind: encoding_from_config(config, layer_type=kind) for kind in {*kinds}}
    return [by_kind[kind] for kind in kinds]


def _one_of(encodings: Any, number: int) -> Rotary | None:
    """The encoding of this layer; ``None`` if it does not rotate."""
    one = encodings
    if isinstance(encodings, (list, tuple)):
        if number >= len(encodings):
            raise ShapeError(f"got {len(encodings)} encodings for layer {number}", "one for each layer of the cache")
        one = encodings[number]
    if one is None or type(one) in UNROTATED:
        return None
    if type(one) is not Rotary:
        got = f"got {shown(one)}, expected a Rotary"
        raise LocantError(got, "move_cache(cache, model, by=...), for a model that rotates its keys")
    return one


# ---------------------------------------------------------------------- what a layer of a cache holds


def _require_plain(layer: Any, spans: Spans | None) -> None:
    name = type(layer).__name__
    if "Quantized" in name:
        got = f"got a cache with a {name}, whose keys are rounded: another rotation would round them again"
        raise LocantError(got, "a cache of the model's dtype, or the text read again")
    if getattr(layer, "is_sliding", False) and spans is not None:
        got = f"got spans for a cache with a {name}, whose slots are no positions"
        raise LocantError(got, "move_cache without spans, for the whole window")
    beside = [key for key, value in vars(layer).items() if key not in WITHOUT_POSITIONS and _holds_states(value)]
    if beside:
        got = f"got a cache with a {name}, which keeps {', '.join(beside)} beside its keys, rotated in another way"
        raise LocantError(got, "read the text again at its new place")


def _holds_states(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_states, value.values()))
    return isinstance(value, Tensor) and value.ndim > 2 and value.is_floating_point()


def _is_filled(layer: Any) -> bool:
    """Not so: layers with a state in the place of keys, and those that nothing was written to."""
    keys = getattr(layer, "keys", None)
    return isinstance(keys, Tensor) and keys.numel() > 0


def _rotated_part(layer: Any, rotary: Rotary, latent: Layout | None, *, is_latent: bool) -> tuple[Tensor, Rotary]:
    """What is rotated in a layer of a cache, and with which pairs; `is_latent` if the model is known to be so."""
    keys, values = layer.keys, layer.values
    fits_values = values.shape[1] == 1 and values.shape[-1] == rotary.head_dim
    if latent is not None:
        if not fits_values:
            got = f"got latent_layout for values of shape {tuple(values.shape)}, expected one head of {rotary.head_dim}"
            raise LocantError(got, "move_cache without latent_layout, for keys that are cached whole")
        return values, rotary.alike(layout=latent)
    if fits_values and (is_latent or keys.shape[-1] != rotary.head_dim):
        got = "got a cache of multi-head latent attention, whose keys need not be in the order of the configuration"
        raise LocantError(got, "latent_layout='half' for DeepSeek-V3 and its kin, 'interleaved' for DeepSeek-V2")
    return keys, rotary


def _positions_of(layer: Any, keys: Tensor, positions: Positions | None) -> Positions | None:
    """Where the keys of a layer stand; a sliding window keeps the last tokens."""
    if not getattr(layer, "is_sliding", False):
        return positions
    slots = keys.shape[2]
    if positions is not None:
        return positions.slice(max(positions.seq_len - slots, 0), positions.seq_len)
    read_so_far = getattr(layer, "cumulative_length_int", getattr(layer, "cumulative_length", 0))
    return Positions.after(max(int(read_so_far) - slots, 0), slots, device=keys.device)


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
        got = f"got keys of {dtype_name(keys.dtype)}, which another rotation would round again"
        raise LocantError(got, "keys.float() * scale moved, and quantised anew")
    if keys.requires_grad and torch.is_grad_enabled():
        got = "got keys that need a gradient, which a move in place would not be part of"
        raise LocantError(got, "torch.no_grad() around it, or rotary.move(keys, positions, to)")


def _require_places(rotary: Rotary, spans: list[tuple[int, int, int]], here: Positions) -> None:
    """Raise where a token would move to a position that the encoding has no angle for."""
    for start, stop, step in spans:
        part = here.slice(start, stop)
        if part.index.numel():
            ends = [int(end) + step * part.denominator for end in part.index.aminmax()]
            rotary.cos_sin(Positions.of(ends, denominator=part.denominator))


def _move(move: _Move) -> None:
    keys, rotary, spans, here = move
    for start, stop, step in spans:
        part = keys[:, :, start:stop]
        if rotary.angles.mode == "exact" and rotary.pairs.runs_as is not None:
            steps = torch.full((1, stop - start), step, dtype=torch.int64, device=keys.device)
            tables = rotary.angles.tables(keys.device, None, None)._replace(attention_factor=1.0)
            rotate(part, None, steps, tables, rotary.layout, inplace=True)
            continue
        before = here.slice(start, stop)
        index = before.index + step * before.denominator
        after = Positions.of(index, before.document_or_none, order=before.order_or_none, denominator=before.denominator)
        part.copy_(rotary.move(part, before, after))
