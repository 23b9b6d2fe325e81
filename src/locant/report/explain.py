"""Print the positions of a model for `locant explain`, and the changes for a longer context for `extend`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from locant.checkpoints.config_comparison import ConfigComparison
from locant.checkpoints.explanation import Explanation, Layers
from locant.checkpoints.extension import Extension
from locant.checkpoints.rotary_settings import VISIBLE, RotarySettings
from locant.figures.canvas import evenly_spaced
from locant.models.lab_decoder import MODEL_TYPE as LAB_DECODER
from locant.report.console import NamedRows, named_rows, shape, show, size, table
from locant.report.listing import HEADINGS
from locant.spelling import spell

if TYPE_CHECKING:
    from rich.table import Table

METHODS = {
    "embed": "added to the token embeddings",
    "rotate": "rotates queries and keys",
    "bias": "added to the attention scores",
    "unrotate": "rotates the output of attention back",
}
"""A description of each method of an encoding."""
LAYOUT_WORDS = {"half": "dimension i pairs with i + {half}", "interleaved": "dimension 2i pairs with 2i + 1"}
ANSWERS = {"yes": "yes", "differently": "yes, but not as the configuration says", "no": "no"}
NUM_PAIRS = 9
"""The number of rows in a table of pairs, from the first pair to the last."""
SAME = 1e-6
"""The largest relative change of a wavelength that counts as unchanged."""


def print_explanation(explanation: Explanation, source: str, note: str | None = None) -> None:
    """Print the explanation of the configuration of `source`, with a note on its origin."""
    parts = [named_rows(summary_rows(explanation, source, note))]
    for layers in explanation.layers:
        parts.append(named_rows(layers_rows(layers)))
        parts += [] if layers.rotary is None else [_pairs(layers.rotary)]
    show(*parts, *([_tables(explanation)] if explanation.tables else []))


def explanation_facts(explanation: Explanation) -> dict[str, Any]:
    """Return all facts as plain values, for JSON."""
    values = dataclasses.asdict(explanation)
    values["tables"] = [
        {"name": table.name, "shape": list(table.shape), "parameters": table.num_parameters,
         "bytes": table.bytes_by_dtype()}
        for table in explanation.tables
    ]  # fmt: skip
    for layers, plain in zip(explanation.layers, values["layers"], strict=True):
        if layers.rotary is not None:
            groups = ("kept", "between", "stretched", "still", "never_round")
            plain["rotary"] |= {name: getattr(layers.rotary, name) for name in groups}
    return values


def spans(numbers: Sequence[int]) -> str:
    """Format numbers as ranges, such as 0-28, 30."""
    runs = [[pair for _, pair in group] for _, group in groupby(enumerate(numbers), lambda each: each[1] - each[0])]
    return ", ".join(f"{span[0]}-{span[-1]}" if span[1:] else f"{span[0]}" for span in runs) or "none"


def _tokens(length: float | None) -> str:
    """Format a wavelength with three digits, or with all digits of its integer part."""
    return "never" if length is None else spell(length, 3) if length < 1000 else f"{length:,.0f}"


def _format_factor(factor: float | None) -> str:
    """Format the factor of a wavelength, or return an empty string for a pair that is not rotated."""
    return "" if factor is None else spell(factor, 4)


def summary_rows(explanation: Explanation, source: str, note: str | None = None) -> NamedRows:
    """Yield the name and the values of each fact about the whole model."""
    yield "model", [f"{source} ({explanation.model_type})" if source != explanation.model_type else source]
    yield "note", [] if note is None else [note]
    if explanation.longest is not None and explanation.model_type == LAB_DECODER:
        yield "trained", [f"in windows of {explanation.longest:,} tokens"]
    elif explanation.longest is not None:
        yield "longest", [f"{explanation.longest:,} positions"]
    if explanation.trained not in (None, explanation.longest):
        yield "trained", [f"{explanation.trained:,} positions, before it was extended"]
    yield "attention", [*_reaches(explanation)]
    yield "swapped", [f"{each}: layers {spans(at)}" for each, at in swapped_layers(explanation).items()]
    missing = f"not in the configuration, so the default of {explanation.model_type} in transformers"
    yield "defaults", [f"{key} {_plain(value)}: {missing}" for key, value in explanation.defaults.items()]
    yield "vLLM", ["; ".join((ANSWERS[explanation.vllm.answer], *explanation.vllm.reasons))]


def _reaches(explanation: Explanation) -> Iterator[str]:
    """Yield how many tokens each group of layers attends to, unless all layers attend to all tokens."""
    if all(layer.window is None for layer in explanation.strip):
        return
    reaches = [(layer.window, layer.place) for layer in explanation.strip]
    for window, place in dict.fromkeys(reaches):
        numbers = [at for at, reach in enumerate(reaches) if reach == (window, place)]
        layers = f"layer{'s' * (len(numbers) > 1)} {spans(numbers)}"
        if window is None:
            yield f"{layers}: all tokens"
        elif window == 0:
            yield f"{layers}: no attention"
        elif place == "around":
            sides = f", {window // 2:,} on each side" if window % 2 else ""
            yield f"{layers}: {window:,} tokens around the token itself{sides}"
        elif place == "chunk":
            yield f"{layers}: earlier tokens of the same chunk of {window:,}"
        else:
            yield f"{layers}: the last {window:,} tokens, including the token itself"


def swapped_layers(explanation: Explanation) -> dict[str, list[int]]:
    """Return the layers in which each encoding replaces the encoding of the model."""
    layers = [*enumerate(explanation.swapped)]
    return {name: [number for number, its in layers if its == name] for _, name in layers if name is not None}


def layers_rows(layers: Layers) -> NamedRows:
    """Yield the name and the values of each fact about layers that share an encoding."""
    if layers.name is not None:
        yield "layers", [layers.name]
    yield HEADINGS["methods"], ["; ".join(f"{method}: {METHODS[method]}" for method in layers.methods) or "none"]
    if layers.rotary is None:
        yield "encoding", [layers.encoding]
    else:
        yield from _rotary(layers.rotary)
    yield "beware", layers.warnings


def _rotary(rotary: RotarySettings) -> NamedRows:
    yield "encoding", [f"Rotary: {rotary.rotary_dim} of {rotary.head_dim} dimensions, {len(rotary.pairs)} pairs"]
    if rotary.layout is not None:
        yield "layout", [f"{rotary.layout}: {LAYOUT_WORDS[rotary.layout].format(half=rotary.rotary_dim // 2)}"]
    if rotary.table is not None:
        yield "table", [f"{rotary.table}: Rotary.from_config(config).pairs has a row for each pair"]
    if rotary.sections is not None:
        yield "sections", [f"{', '.join(map(str, rotary.sections))} pairs, one position axis each"]
    yield "base", [spell(rotary.base, 10)]
    yield "scaling", [_scaling(rotary)]
    yield "attention factor", [f"{spell(rotary.attention_factor, 10)}, on queries and on keys"]
    if rotary.kept and len(rotary.kept) == len(rotary.pairs):
        yield "pairs", ["all rotated at the frequencies of the base"]
    else:
        for name in ("kept", "between", "stretched"):
            yield f"pairs {name}", [_count(getattr(rotary, name))]
    if rotary.still:
        yield "pairs not rotated", [_count(rotary.still)]
    if rotary.never_round:
        rounds = f"less than one rotation in {rotary.trained:,} positions, unscaled"
        yield "never round", [f"{_count(rotary.never_round)}: {rounds}"]
    precision = rotary.precision
    if precision.first_visible is not None and precision.at_longest > VISIBLE:
        at_end = f"{spell(precision.at_longest, 1)} at the end"
        from_there = f"from position {precision.first_visible:,} on, and is {at_end}"
        yield "float32 angles", [f"the error of a cosine exceeds {VISIBLE} {from_there}"]


def _scaling(rotary: RotarySettings) -> str:
    if not rotary.scaling_options:
        return "none" if rotary.scaling == "Unscaled" else rotary.scaling
    options = ", ".join(
        f"{name} {f'{len(value)} values' if isinstance(value, list) else _plain(value)}"
        for name, value in rotary.scaling_options.items()
    )
    return f"{rotary.scaling}: {options}"


def _plain(value: Any) -> str:
    return spell(value, 10) if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)


def _count(pairs: Sequence[int]) -> str:
    return f"{len(pairs)} ({spans(pairs)})" if pairs else "none"


def _pairs(rotary: RotarySettings) -> Table:
    rows = table("pair", "wavelength", f"rotations in {rotary.trained:,}, unscaled", "stretched by")
    for number in evenly_spaced(len(rotary.pairs), NUM_PAIRS):
        pair = rotary.pairs[number]
        rotations = rotary.trained * (pair.stretch or 1) / pair.wavelength if pair.wavelength else 0
        rows.add_row(str(number), _tokens(pair.wavelength), spell(rotations, 3), _format_factor(pair.stretch))
    return rows


def _tables(explanation: Explanation) -> Table:
    rows = table("shape", "parameters", *explanation.tables[0].bytes_by_dtype(), name="table")
    for each in explanation.tables:
        weights = map(size, each.bytes_by_dtype().values())
        name = f"{each.name}, also the head" if each.name == "tokens" and explanation.tied else each.name
        rows.add_row(name, shape(each.shape), f"{each.num_parameters:,}", *weights)
    return rows


def comparison_facts(comparison: ConfigComparison, config: str, against: str) -> dict[str, Any]:
    """Return all facts as plain values, for JSON."""
    return {"config": config, "against": against, "agrees": comparison.agrees, **dataclasses.asdict(comparison)}


def print_comparison(comparison: ConfigComparison, here: str, there: str) -> None:
    """Print the differences between the configurations of two models."""
    parts = [named_rows({"here": [here], "there": [there], "differences": comparison.differences}.items())]
    for layers in comparison.layers:
        first, second = (name or "all" for name in layers.names)
        names = first if first == second else f"{first} here, {second} there"
        same = ["none: both encode positions in the same way"]
        parts.append(named_rows({"layers": [names], "differences": layers.differences or same}.items()))
    show(*parts)


def extension_facts(extension: Extension) -> dict[str, Any]:
    """Return all facts as plain values, for JSON."""
    names = ("method", "trained", "to", "layer_type", "notes", "stretches")
    values = {name: getattr(extension, name) for name in names}
    changed = {key: {"before": old, "after": new} for key, (old, new) in extension.changed.items()}
    before, after = map(dataclasses.asdict, (extension.before, extension.after))
    return {**values, "changed": changed, "before": before, "after": after}


def print_extension(extension: Extension, source: str) -> None:
    """Print the changes in the configuration of `source`."""
    changes, stretches = extension.changed.items(), extension.stretches
    same = [pair for pair, stretch in enumerate(stretches) if stretch is not None and abs(stretch - 1) <= SAME]
    rows = {
        "model": [source],
        "context": [f"{extension.trained:,} to {extension.to:,} positions, {extension.method}"],
        "changes": [f"{key}: {_shorten(old)} → {_shorten(new)}" for key, (old, new) in changes],
        "attention factor": [spell(extension.after.attention_factor, 10)],
        "pairs unchanged": [f"{len(same)} ({spans(same)}) of {len(stretches)}"],
        "note": extension.notes,
    }
    pairs = table("pair", "wavelength", "after", "stretched by")
    for number in evenly_spaced(len(stretches), NUM_PAIRS):
        old, new = (_tokens(each[number]) for each in extension.wavelengths)
        pairs.add_row(str(number), old, new, _format_factor(stretches[number]))
    show(named_rows(rows.items()), pairs)


def _shorten(value: Any) -> str:
    """Format a value as in the file, or a long list as its length."""
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_shorten(part)}" for key, part in value.items()) + "}"
    return f"[{len(value)} numbers]" if isinstance(value, list) and len(value) > 4 else json.dumps(value)
