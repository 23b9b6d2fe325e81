"""Models that rotate the queries and keys of some of their layers only, and which layers those are."""

from __future__ import annotations

from collections.abc import Callable

from locant.arguments import shown
from locant.errors import InputError
from locant.models.config_values import Config, integer, missing, required
from locant.positions.base import PositionEncoding

__all__ = [
    "LISTED",
    "WINDOWED",
    "listed_layers",
    "nope_in_full_attention",
    "nope_in_unlisted_layers",
    "windowed_layers",
]

WINDOWED = ("sliding_attention", "full_attention")
LISTED = ("with", "without")


def windowed_layers(config: Config) -> tuple[str, ...]:
    """``sliding_attention`` and ``full_attention``, unless no layer has a window (Cohere 2, Exaone 4)."""
    if "sliding_window" not in config:
        raise missing(config, "sliding_window", "'sliding_window': its width, or null where no layer has a window")
    return () if config["sliding_window"] is None else WINDOWED


def nope_in_full_attention(*, rotary_without_windows: bool) -> Callable[[Config, str | None], PositionEncoding | None]:
    """Rotary positions where attention slides, and none where it is full.

    Args:
        rotary_without_windows: whether all layers have rotary positions where no layer has a window, or none.
    """

    def encoding(config: Config, layer_type: str | None) -> PositionEncoding | None:
        rotary = layer_type != "full_attention" if windowed_layers(config) else rotary_without_windows
        return None if rotary else PositionEncoding()

    return encoding


def nope_in_unlisted_layers(config: Config, layer_type: str | None) -> PositionEncoding | None:
    """Rotary positions in the layers that ``no_rope_layers`` marks with 1, and none in the others."""
    return PositionEncoding() if layer_type == "without" else None


def listed_layers(*, default_interval: int | None = None) -> Callable[[Config], tuple[str, ...]]:
    """``with`` and ``without`` rotary positions, as far as there are such layers; none, where all layers have them.

    ``no_rope_layers`` is a list with 1 for layers that do have rotary positions; ``no_rope_layer_interval`` gives every
    how many layers one has none.

    Args:
        default_interval: the interval where the list is empty and nothing else is there, as in published
            configurations of Llama 4; ``None``: an empty list is refused.
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
