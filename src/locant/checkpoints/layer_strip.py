"""The layers of a model in order: their types, and the tokens that each of them attends to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from locant.checkpoints.windows import FULL, SLIDING, Place, reach_by_layer
from locant.models.config_values import NUM_LAYERS, Config, integer, integer_at, layer_types_in
from locant.models.encodings import layer_types, read_measurable
from locant.models.mixed_layers import ROTATION_KINDS
from locant.models.registry import with_defaults

MAX_LAYERS = 10_000
"""The largest number of layers that are listed. No published model has a tenth of this number."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer.

    Args:
        kind: the name in `Explanation.layers`, or ``None`` if all layers share one encoding.
        window: the number of tokens that the layer attends to, including the token itself. ``None`` means all tokens,
            and 0 means no attention.
        place: where these tokens are, see `Reach`.
    """

    kind: str | None
    window: int | None
    place: Place = field(default="before", repr=False)


def layer_strip(config: Mapping[str, Any] | object) -> tuple[Layer, ...]:
    """Return all layers in order, or an empty tuple if a configuration lacks their number or order.

    >>> config = {"model_type": "gpt2", "n_positions": 1024, "n_embd": 768, "n_layer": 12}
    >>> len(layer_strip(config)), layer_strip(config)[0]
    (12, Layer(kind=None, window=None))
    """
    _, row = read_measurable(config)
    full = with_defaults(config)
    if isinstance(full.get("num_hidden_layers"), Mapping):  # one number for each of several parts (LXMERT)
        return ()
    count = min(integer_at(full, *NUM_LAYERS) or 0, MAX_LAYERS)
    kinds = layer_types(full)
    reaches = reach_by_layer(full, row, count)
    if kinds == ("encoder", "decoder"):
        decoder = min(integer_at(full, "num_decoder_layers") or count, MAX_LAYERS)
        return tuple(Layer(kind=kind, window=None) for kind in [kinds[0]] * count + [kinds[1]] * decoder)
    named = (
        _rotary_by_layer(full, count)
        if kinds and set(kinds) <= set(ROTATION_KINDS)
        else layer_types_in(full)[:MAX_LAYERS]
    )
    named = named or tuple(FULL if reach.window is None else SLIDING for reach in reaches)
    if kinds and (len(named) != count or not {*named} <= {*kinds}):
        return ()
    return tuple(
        Layer(kind=named[number] if kinds else None, window=reach.window, place=reach.place)
        for number, reach in enumerate(reaches)
    )


def _rotary_by_layer(config: Config, count: int) -> tuple[str, ...]:
    """Return ``with`` or ``without`` rotary positions per layer, by the keys of `listed_layers` and `based_layers`."""
    has = config.get("layer_rope_theta") or config.get("no_rope_layers")
    if not has:
        every = integer("no_rope_layer_interval", config.get("no_rope_layer_interval", 4))
        has = [(number + 1) % every for number in range(count)]
    return tuple(ROTATION_KINDS[not each] for each in has)
