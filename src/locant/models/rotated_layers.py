"""Which layers of a model are rotated, where some have no positions: by their windows, a list, or a base of 0."""

from __future__ import annotations

from collections.abc import Callable

from locant.arguments import shown
from locant.errors import InputError
from locant.models.config_values import Config, integer, missing, number, required
from locant.positions.base import PositionEncoding

__all__ = [
    "LISTED", "WINDOWED", "based_layers", "listed_layers", "none_where_full", "none_without", "nope_in_full_attention",
    "windowed_layers",
]  # fmt: skip

WINDOWED = ("sliding_attention", "full_attention")
LISTED = ("with", "without")


def windowed_layers(config: Config) -> tuple[str, ...]:
    """``sliding_attention`` and ``full_attention``, unless no layer has a window (Cohere 2, Exaone 4)."""
    if "sliding_window" not in config:
        raise missing(config, "sliding_window", "'sliding_window': its width, or null where no layer has a window")
    return () if config["sliding_window"] is None else WINDOWED


def nope_in_full_attention(*, rotary_without_windows: bool) -> Callable[[Config, str | None], PositionEncoding | None]:
    """Rotary positions where attention slides, and none where it is full; without windows, in all layers or in none."""

    def encoding(config: Config, layer_type: str | None) -> PositionEncoding | None:
        rotary = layer_type != "full_attention" if windowed_layers(config) else rotary_without_windows
        return None if rotary else PositionEncoding()

    return encoding


def none_where_full(config: Config, layer_type: str | None) -> PositionEncoding | None:
    """Rotary positions where attention slides, and none where it is full, whatever its windows are (AFMoE)."""
    return PositionEncoding() if layer_type == "full_attention" else None


def none_without(config: Config, layer_type: str | None) -> PositionEncoding | None:
    """Rotary positions for layers of the kind ``with``, as `listed_layers` and `based_layers` have them."""
    return PositionEncoding() if layer_type == "without" else None


def based_layers(config: Config) -> tuple[str, ...]:
    """``with`` and ``without`` rotary positions by ``layer_rope_theta``: a base for each layer, of which 0 means none.

    Layers with several bases are refused: they want an encoding each.
    """
    bases = config.get("layer_rope_theta")
    if bases is None:
        return ()
    if not isinstance(bases, (list, tuple)) or not bases:
        raise InputError(f"got layer_rope_theta={shown(bases)}, expected a base for each layer", "[10000.0, 0, ...]")
    distinct = {number("layer_rope_theta", base) for base in bases}
    if len(distinct - {0.0}) > 1:
        got = f"got layer_rope_theta with {len(distinct - {0.0})} bases, and one encoding for all layers to make"
        raise InputError(got, "a configuration with layer_rope_theta of the layers of one base, for each base")
    return tuple(kind for kind, has in zip(LISTED, (distinct != {0.0}, 0.0 in distinct), strict=True) if has)


def listed_layers(*, default_interval: int | None = None) -> Callable[[Config], tuple[str, ...]]:
    """``with`` and ``without`` rotary positions, as far as there are such layers; none, where all layers have them.

    ``no_rope_layers`` is a list with 1 for layers that do have rotary positions; ``no_rope_layer_interval`` gives every
    how many layers one has none. Published configurations of Llama 4 have an empty list and mean the default interval.
    """

    def layer_types(config: Config) -> tuple[str, ...]:
        rotary = _rotary_layers(config, default_interval)
        kinds = tuple(kind for kind, has in zip(LISTED, (True, False), strict=True) if has in rotary)
        return () if kinds == ("with",) else kinds

    return layer_types


def _rotary_layers(config: Config, default_interval: int | None) -> set[bool]:
    """Whether layers have rotary positions, over all layers."""
    listed = config.get("no_rope_layers")
    every = config.get("no_rope_layer_interval", default_interval if listed == [] else None)
    if listed or every is None or (listed == [] and default_interval is None):
        return _listed(config)
    every = integer("no_rope_layer_interval", every)
    return {(layer + 1) % every != 0 for layer in range(required(config, "num_hidden_layers"))}


def _listed(config: Config) -> set[bool]:
    listed, remedy = config.get("no_rope_layers"), "1 for each layer with positions, else 0"
    if listed is None:
        raise missing(config, "no_rope_layers", remedy)
    count = integer("num_hidden_layers", config["num_hidden_layers"]) if "num_hidden_layers" in config else None
    right = isinstance(listed, (list, tuple)) and all(isinstance(one, int) and one in (0, 1) for one in listed)
    if not right or not listed or count not in (None, len(listed)):
        expected = "ones and zeros" if count is None else f"{count} ones and zeros"
        raise InputError(f"got no_rope_layers={shown(listed)}, expected a list of {expected}", remedy)
    return {bool(one) for one in listed}
