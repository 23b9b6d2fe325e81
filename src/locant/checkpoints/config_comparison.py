"""Compare two configurations, and find the positions at which their models differ, for each layer type.

The comparison is for a draft model and its target, a model before and after an extension of its context, or a copy with
changed keys.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from locant.checkpoints.explanation import Layers, explain
from locant.checkpoints.layer_strip import Layer
from locant.checkpoints.rotary_settings import CHUNK, VISIBLE
from locant.models.config_values import integer_at
from locant.models.encodings import encoding_from_config
from locant.models.registry import with_defaults
from locant.models.rotary_config import named_layout
from locant.positions import Positions, Rotary
from locant.spelling import spell

MOST_POSITIONS = 131_072
"""The number of positions, starting at 0, at which two encodings are compared."""


@dataclass(frozen=True, kw_only=True)
class LayersComparison:
    """The comparison of one layer type of each model.

    Args:
        names: the compared layer types of this model and of the other model. ``None`` means all layers.
        differences: the differences in words, if any.
        first_position: the first position at which a cosine or sine differs by more than 1e-3. ``None`` means that
            there is no such position, or that the pairs cannot be compared.
        largest_difference: the largest difference of a cosine or sine at the compared positions.
        compared: the number of compared positions, starting at 0.
    """

    names: tuple[str | None, str | None]
    differences: tuple[str, ...]
    first_position: int | None = None
    largest_difference: float | None = None
    compared: int = 0


@dataclass(frozen=True, kw_only=True)
class ConfigComparison:
    """The comparison of two configurations.

    Args:
        longest: the longest sequence of each model.
        differences: the differences between the whole models, in words.
        layers: the comparison of each layer type of this model with the same type of the other.
    """

    longest: tuple[int | None, int | None]
    differences: tuple[str, ...]
    layers: tuple[LayersComparison, ...]

    @property
    def agrees(self) -> bool:
        return not self.differences and not any(layers.differences for layers in self.layers)


def compare_configs(ours: Mapping[str, Any] | object, theirs: Mapping[str, Any] | object) -> ConfigComparison:
    """Compare the position encodings of two configurations, in words and numbers.

    >>> sizes = {"hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 512, "num_hidden_layers": 2}
    >>> llama = {"model_type": "llama", **sizes, "rope_theta": 10_000.0}
    >>> compare_configs(llama, {**llama, "rope_theta": 500_000.0}).layers[0].differences[0]
    'base is 10,000 here and 500,000 there'
    """
    explained = explain(ours), explain(theirs)
    names = [[layers.name for layers in each.layers] for each in explained]
    common_names = names[0] if {*names[0]} == {*names[1]} else None
    pairs = (
        [(name, name) for name in common_names]
        if common_names
        else [(one, other) for one in names[0] for other in names[1]]
    )
    longest = explained[0].longest, explained[1].longest
    common = min((each for each in longest if each is not None), default=MOST_POSITIONS)
    by_name = [{layers.name: layers for layers in each.layers} for each in explained]
    layers = tuple(
        _compare_layers((ours, theirs), (by_name[0][one], by_name[1][other]), common) for one, other in pairs
    )
    strips = explained[0].strip, explained[1].strip
    return ConfigComparison(
        longest=longest, differences=tuple(_model_differences((ours, theirs), longest, strips)), layers=layers
    )


def _model_differences(
    configs: tuple[Any, Any],
    longest: tuple[int | None, int | None],
    strips: tuple[tuple[Layer, ...], tuple[Layer, ...]],
) -> Iterator[str]:
    full = [with_defaults(config) for config in configs]
    vocabularies = [integer_at(config, "vocab_size") for config in full]
    if None not in vocabularies and vocabularies[0] != vocabularies[1]:
        yield f"the vocabulary has {vocabularies[0]:,} entries here and {vocabularies[1]:,} there"
    if None not in longest and longest[0] != longest[1]:
        yield f"the longest sequence has {longest[0]:,} positions here and {longest[1]:,} there"
    windows = [sorted({layer.window for layer in strip if layer.window}) for strip in strips]
    if windows[0] != windows[1]:
        words = [", ".join(f"{window:,}" for window in each) + " tokens" if each else "all tokens" for each in windows]
        yield f"layers with a window attend to {words[0]} here and {words[1]} there"
    elif len(strips[0]) == len(strips[1]):
        both = enumerate(zip(*strips, strict=True))
        odd = [number for number, (one, other) in both if one.window != other.window]
        if odd:
            yield f"{len(odd)} of {len(strips[0])} layers have another window, the first of them layer {odd[0]}"


def _compare_layers(configs: tuple[Any, Any], layers: tuple[Layers, Layers], common: int) -> LayersComparison:
    names = layers[0].name, layers[1].name
    rotaries = [_rotary(config, name) for config, name in zip(configs, names, strict=True)]
    first_rotary, second_rotary = rotaries
    if first_rotary is None or second_rotary is None:
        encodings = [each.encoding if each.rotary is None else "Rotary" for each in layers]
        same = encodings[0] == encodings[1]
        return LayersComparison(
            names=names, differences=() if same else (f"{encodings[0]} here, {encodings[1]} there",)
        )
    differences = [*_rotary_differences(first_rotary, second_rotary)]
    if len(first_rotary.pairs) != len(second_rotary.pairs):
        return LayersComparison(names=names, differences=tuple(differences))
    first, largest, compared = _cos_sin_difference(first_rotary, second_rotary, min(common, MOST_POSITIONS))
    if first is not None:
        differences.append(
            f"cosines and sines differ from position {first:,} on, by up to {spell(largest, 2)} in the first "
            f"{compared:,} positions"
        )
    elif differences:
        differences.append(
            f"but no cosine or sine differs by more than {spell(VISIBLE)} in the first {compared:,} positions"
        )
    return LayersComparison(
        names=names, differences=tuple(differences), first_position=first, largest_difference=largest, compared=compared
    )


def _rotary(config: Any, name: str | None) -> Rotary | None:
    """Return the encoding of these layers if it is rotary, else None."""
    full = with_defaults(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `explain` reports what is missing
        encoding = encoding_from_config(full, layer_type=name, layout=named_layout(full))
    return encoding if isinstance(encoding, Rotary) else None


def _rotary_differences(ours: Rotary, theirs: Rotary) -> Iterator[str]:
    facts = {
        "dimensions of a head": [str(each.head_dim) for each in (ours, theirs)],
        "rotated dimensions": [str(each.rotary_dim) for each in (ours, theirs)],
        "layout": [str(each.pairs.layout or "a table") for each in (ours, theirs)],
        "base": [spell(each.base, 10) for each in (ours, theirs)],
        "scaling": [str(each.scaling) for each in (ours, theirs)],
        "attention factor": [spell(each.scaling.effective_attention_factor, 10) for each in (ours, theirs)],
        "axis of each pair": ["one" if each.num_axes == 1 else str(each.pairs.axes) for each in (ours, theirs)],
    }
    for name, (one, other) in facts.items():
        if one != other:
            verb = "are" if name.endswith("dimensions") or name.startswith("dimensions") else "is"
            yield f"{name} {verb} {one} here and {other} there"


def _cos_sin_difference(ours: Rotary, theirs: Rotary, length: int) -> tuple[int | None, float, int]:
    """Return the first position with a visible difference, the largest difference and the number of positions compared.

    The compared positions are positions of text, which have the same index on all axes.
    """
    first, largest = None, 0.0
    pair = [each.for_length(length) for each in (ours, theirs)]
    for start in range(0, length, CHUNK):
        index = torch.arange(start, min(start + CHUNK, length))
        tables = []
        for rotary in pair:
            places = index[None] if rotary.num_axes == 1 else index[None, :, None].expand(1, -1, rotary.num_axes)
            tables.append(torch.stack(rotary.cos_sin(Positions.of(places), torch.float64)))
        off = (tables[0] - tables[1]).abs().amax((0, 1, 3))
        largest = max(largest, float(off.max()))
        if first is None and bool((off > VISIBLE).any()):
            first = start + int((off > VISIBLE).nonzero()[0, 0])
    return first, largest, length
