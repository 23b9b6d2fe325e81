"""Keys about rotary positions that the modeling code does not read.

Published configurations have many of them, from older versions of a model or from other programs. A key that agrees
with the values that are read is ignored silently. A key that contradicts them is an error. Any other key causes a
warning, because its meaning is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from locant.arguments import FINITE, short_repr
from locant.errors import InputError
from locant.models.config_values import Config


@dataclass(frozen=True)
class RotaryFacts:
    """The values that are read for all layers of a model."""

    bases: Collection[float]
    widths: Collection[int]
    shares: Collection[float]
    layout: str
    types: Collection[str]
    factors: Collection[float]
    has_axes: bool


Claim = Callable[[Any, RotaryFacts], bool]
"""A function that returns whether a value agrees with the facts."""

CONTRADICTION = "and which contradicts the keys that it reads"
ROTARY_NAME = re.compile("rope|rotary")


def find_unread_keys(config: Config, known: Collection[str]) -> list[str]:
    """Return the keys whose names concern rotary positions, but are not in `known`."""
    return [key for key in map(str, config) if ROTARY_NAME.search(key) and key not in known]


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value can be compared with a float. A file may hold an integer of any size."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= FINITE


def _number_in(values: Callable[[RotaryFacts], Collection[float]]) -> Claim:
    return lambda value, facts: is_number(value) and any(abs(value - one) <= 1e-6 * abs(one) for one in values(facts))


def _is_layout(value: Any, facts: RotaryFacts) -> bool:
    return value is (facts.layout == "interleaved")


def _has_no_scaling(value: Any, facts: RotaryFacts) -> bool:
    """Return whether a dictionary of rope parameters has no scaling."""
    return isinstance(value, Mapping) and value.get("rope_type", value.get("type", "default")) == "default"


CLAIMS: Mapping[str, Claim] = {
    r"rope_interleaved?|(rotary|rope)_(emb_)?interleaved?": _is_layout,
    r"partial_rotary_factor|(rotary|rope)_(emb_)?(pct|percent|percentage|fraction)": _number_in(
        lambda facts: facts.shares
    ),
    r"(rotary|rope)_(n?dims?)|attn_rotary_emb": _number_in(lambda facts: facts.widths),
    r".*(rope|rotary).*(theta|base|base_freq|base_frequency)": _number_in(lambda facts: facts.bases),
    r"rotary|use_(rotary|rope)(_pos_emb|_embeddings?|_position_embeddings?)?": lambda value, facts: value is True,
    r"use_mrope|rope_3d": lambda value, facts: value is facts.has_axes,
    r"(rotary|rope)_(scaling_)?(factor|ratio)": _number_in(lambda facts: facts.factors),
    r"rope_(scaling_)?type": lambda value, facts: isinstance(value, str) and value in facts.types,
    r"rope_(scaling|parameters)": _has_no_scaling,
    r"factor|attention_factor": lambda value, facts: value == 1,  # in a dictionary whose rope type does not read it
    r"rotary_emb_scale_base": lambda value, facts: False,  # xPos
    r"no_rope_layers": lambda value, facts: isinstance(value, list) and all(value),
}
"""The claim of a key, by a pattern of its name."""


def check_unread_keys(config: Config, keys: Collection[str], facts: RotaryFacts, model_type: str) -> list[str]:
    """Return the keys to warn of. Raise `InputError` if a key contradicts the facts."""
    unknown = []
    for key in keys:
        value = config[key]
        if value is None or value in ([], {}):
            continue
        claim = next((claim for name, claim in CLAIMS.items() if re.fullmatch(name, key)), None)
        if claim is None and value is not False:
            unknown.append(f"{key}={short_repr(value)}")
        elif claim is not None and not claim(value, facts):
            raise InputError(
                f"got {key!r}: {short_repr(value)}, which {model_type} does not read, {CONTRADICTION}",
                f"remove {key!r} from the configuration, if the model was trained without it",
            )
    return unknown
