"""The layers of a model in their order: which encoding each has, and how far it attends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from locant.models.architecture import Architecture
from locant.models.config_values import Config, integer, integer_at, layer_types_in
from locant.models.encodings import layer_types
from locant.models.layered import LISTED, WINDOWED
from locant.models.registry import read_known, with_defaults

__all__ = ["Layer", "layer_strip"]

COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
MOST = 10_000
"""Layers that are listed; no published model has a tenth of them."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer.

    Args:
        kind: as `Explanation.layers` are named; ``None`` where all share one encoding.
        window: how many tokens it attends to; ``None``: to all.
    """

    kind: str | None
    window: int | None


def layer_strip(config: Mapping[str, Any] | object) -> tuple[Layer, ...]:
    """Every layer, from the first to the last; empty where a configuration does not tell their number or order.

    >>> config = {"model_type": "gpt2", "n_positions": 1024, "n_embd": 768, "n_layer": 12}
    >>> len(layer_strip(config)), layer_strip(config)[0]
    (12, Layer(kind=None, window=None))
    """
    _, row = read_known(config)
    full = with_defaults(config)
    count = min(integer_at(full, *COUNTS) or 0, MOST)
    kinds = layer_types(full)
    types = layer_types_in(full)[:MOST] or _patterned(row, full, count)
    if kinds == ("encoder", "decoder"):
        decoder = min(integer_at(full, "num_decoder_layers") or count, MOST)
        return tuple(Layer(kind=kind, window=None) for kind in [kinds[0]] * count + [kinds[1]] * decoder)
    named = _listed(full, count) if kinds and set(kinds) <= set(LISTED) else types
    if kinds and len(named) != count:
        return ()
    window = _window(full)
    return tuple(
        Layer(
            kind=named[number] if kinds else None,
            window=window if not types or types[number] == WINDOWED[0] else None,
        )
        for number in range(count)
        if not types or number < len(types)
    )


def _patterned(row: Architecture, config: Config, count: int) -> tuple[str, ...]:
    """Windows but for every so manieth layer, where there are windows at all."""
    every = config.get("sliding_window_pattern", row.full_attention_every)
    if every is None or _window(config) is None:
        return ()
    every = integer("sliding_window_pattern", every)
    return tuple(WINDOWED[(number + 1) % every == 0] for number in range(count))


def _listed(config: Config, count: int) -> tuple[str, ...]:
    """``with`` or ``without`` rotary positions, by the keys that `listed_layers` and `based_layers` read."""
    has = config.get("layer_rope_theta") or config.get("no_rope_layers")
    if not has:
        every = integer("no_rope_layer_interval", config.get("no_rope_layer_interval", 4))
        has = [(number + 1) % every for number in range(count)]
    return tuple(LISTED[not each] for each in has)


def _window(config: Config) -> int | None:
    return integer_at(config, "sliding_window", low=0) if config.get("use_sliding_window", True) else None
