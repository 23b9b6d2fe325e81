"""The number of tokens that each layer of a published model attends to.

Most configurations have ``sliding_window`` and perhaps ``layer_types``. Some older architectures have other keys, and
defaults that are only in their code. This module has all of these. A causal window includes the token itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, cycle, islice
from typing import Literal, NamedTuple

from locant.arguments import short_repr
from locant.errors import InputError
from locant.models.architecture import Architecture
from locant.models.config_values import Config, flag_at, integer, integer_at, layer_types_in

SLIDING, FULL, CHUNKED, NO_ATTENTION = "sliding_attention", "full_attention", "chunked_attention", "linear_attention"
WITHOUT_ATTENTION = {NO_ATTENTION, "conv", "moe", "mamba", "recurrent"}
"""Layer types without attention to tokens. Some of them have a state instead."""

BY_RADIUS = {"embedding_gemma2_text", "neomme", "openai_privacy_filter", "ultrabert"}
"""Encoders whose ``sliding_window`` is the largest distance, on both sides."""

T5_GEMMA_ENCODERS = {"t5gemma2_text", "t5gemma2_encoder"}
"""Encoders whose ``sliding_window`` is the width of a window around the token."""

OWN_NAMES = {"attention": FULL, "hybrid": FULL, "hybrid_sliding": SLIDING, "local": SLIDING, "global": FULL}


Place = Literal["before", "around", "chunk"]


class Reach(NamedTuple):
    """The number of tokens that a layer attends to: ``None`` for all, 0 for none.

    These are the last tokens up to and including the token itself, or the same number of tokens on each side, or the
    earlier tokens of the same chunk.
    """

    window: int | None
    place: Place = "before"


def reach_by_layer(config: Config, row: Architecture, num_layers: int) -> tuple[Reach, ...]:
    """Return the reach of each layer whose type the configuration states.

    >>> from locant.models.architecture import RotaryKeys
    >>> config = {"model_type": "gpt_neo", "attention_types": [[["global", "local"], 1]], "window_size": 64}
    >>> [reach.window for reach in reach_by_layer(config, Architecture(rotary=RotaryKeys()), 2)]
    [None, 64]
    """
    types = layer_types_in(config) or _own_types(config, row, num_layers)
    reaches = {
        SLIDING: _sliding_reach(config),
        CHUNKED: Reach(integer("attention_chunk_size", config.get("attention_chunk_size", 8192)), "chunk"),
        **dict.fromkeys(WITHOUT_ATTENTION, Reach(0)),
    }
    if not types:
        types = (SLIDING if reaches[SLIDING].window is not None else FULL,) * num_layers
    return tuple(reaches.get(OWN_NAMES.get(kind, kind), Reach(None)) for kind in types[:num_layers])


def _sliding_reach(config: Config) -> Reach:
    model_type = config.get("model_type")
    if model_type == "gpt_neo":
        return Reach(integer("window_size", config.get("window_size", 256)))
    if model_type == "recurrent_gemma":
        return Reach(integer("attention_window_size", config.get("attention_window_size", 2048)))
    if model_type in ("modernbert", "modernbert-decoder"):
        half = integer("local_attention", config.get("local_attention", 128)) // 2
        return Reach(2 * half + 1, "around") if model_type == "modernbert" else Reach(half)
    window = integer_at(config, "sliding_window", "sliding_window_size", low=0)
    if not window or not flag_at(config, "use_sliding_window", default=True):
        return Reach(None)
    if model_type in BY_RADIUS:
        return Reach(2 * window + 1, "around")
    if model_type in T5_GEMMA_ENCODERS:
        return Reach(window, "around")
    if config.get("use_bidirectional_attention") is True:
        return Reach(2 * (window // 2) + 1, "around")
    return Reach(window)


# ---------------------------------------------------------------------- layer types without a list


def _own_types(config: Config, row: Architecture, num_layers: int) -> tuple[str, ...]:
    """Return the type of each layer from the architecture's own keys, or an empty tuple if it has none of them."""
    read_types = OWN_TYPES.get(str(config.get("model_type")))
    if read_types is not None:
        return tuple(islice(read_types(config), num_layers))
    if _sliding_reach(config).window is None:
        return ()
    every = config.get("sliding_window_pattern", row.full_attention_every)
    if isinstance(every, str):  # Exaone 4: "LLLG"
        return tuple(islice(cycle(FULL if each == "G" else SLIDING for each in every), num_layers))
    if every is not None:
        every = integer("sliding_window_pattern", every)
        return tuple(FULL if (number + 1) % every == 0 else SLIDING for number in range(num_layers))
    first = integer_at(config, "max_window_layers", low=0)
    if first is not None:  # Qwen 2 and related models
        return tuple(SLIDING if number >= first else FULL for number in range(num_layers))
    return ()


def _gpt_neo_types(config: Config) -> Iterator[str]:
    listed = config.get("attention_layers")
    if listed is None:
        groups = config.get("attention_types", [[["global", "local"], 12]])
        try:
            listed = [*chain.from_iterable([*kinds] * count for kinds, count in groups)]
        except (TypeError, ValueError):
            got = (
                f"got attention_types={short_repr(groups)}, expected lists of types, each with a number of repetitions"
            )
            raise InputError(got, "set 'attention_types': [[['global', 'local'], 12]]") from None
    return cycle(_names("attention_layers", listed))


def _recurrent_gemma_types(config: Config) -> Iterator[str]:
    blocks = _names("block_types", config.get("block_types", ["recurrent", "recurrent", "attention"]))
    return cycle(NO_ATTENTION if block == "recurrent" else SLIDING for block in blocks)


def _modernbert_types(config: Config) -> Iterator[str]:
    every = integer("global_attn_every_n_layers", config.get("global_attn_every_n_layers", 3))
    return cycle([FULL, *[SLIDING] * (every - 1)])


def _llama_4_types(config: Config) -> Iterator[str]:
    rotated = config.get("no_rope_layers") or []
    if not rotated:
        every = integer("no_rope_layer_interval", config.get("no_rope_layer_interval", 4))
        rotated = [1] * (every - 1) + [0]
    return cycle([CHUNKED if each else FULL for each in rotated])


def _names(key: str, names: object) -> list[str]:
    if not isinstance(names, (list, tuple)) or not names or not all(isinstance(one, str) for one in names):
        raise InputError(
            f"got {key}={short_repr(names)}, expected a list of names", f"set {key!r}: ['global', 'local']"
        )
    return [*names]


OWN_TYPES: dict[str, Callable[[Config], Iterator[str]]] = {
    "gpt_neo": _gpt_neo_types,
    "recurrent_gemma": _recurrent_gemma_types,
    "modernbert": _modernbert_types,
    "modernbert-decoder": _modernbert_types,
    "llama4_text": _llama_4_types,
}
