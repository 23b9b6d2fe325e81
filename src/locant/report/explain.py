"""`locant explain`: how a model encodes positions, in words and numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from locant.checkpoints.explanation import Explanation, Layers
from locant.checkpoints.rotary_settings import RotarySettings
from locant.embedding.table import TableSize
from locant.report.console import QUIET, out, print_json, show, table

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["explanation_facts", "named_rows", "pair_spans", "print_explanation", "some_pairs", "stretched", "tokens"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DOOR_WORDS = {
    "embed": "added to the token embeddings",
    "rotate": "rotates queries and keys",
    "bias": "added to the attention scores",
}
LAYOUT_WORDS = {"half": "dimension i pairs with i + {half}", "interleaved": "dimension 2i pairs with 2i + 1"}
ANSWERS = {"yes": "yes", "differently": "yes, but not as the configuration says", "no": "no"}
NUM_PAIRS = 9
UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def print_explanation(
    explanation: Explanation, source: str, figure: Path | None = None, *, as_json: bool = False
) -> None:
    """What is known of the configuration of `source`, and where its picture is."""
    drawn = None if figure is None else str(figure)
    if as_json:
        print_json({"config": source, **explanation_facts(explanation), "figure": drawn})
        return
    console = out()
    show(console, _summary(explanation, source))
    for layers in explanation.layers:
        show(console)
        show(console, _layers(layers))
        if layers.rotary is not None:
            show(console)
            show(console, _pairs(layers.rotary))
    if explanation.tables:
        show(console)
        show(console, _tables(explanation))
    if drawn is not None:
        console.print(drawn)


def explanation_facts(explanation: Explanation) -> dict[str, Any]:
    """Everything as plain values, for JSON."""
    values = dataclasses.asdict(explanation)
    values["tables"] = [_table_facts(size) for size in explanation.tables]
    for layers, plain in zip(explanation.layers, values["layers"], strict=True):
        if layers.rotary is not None:
            groups = ("kept", "between", "stretched", "still", "never_round")
            plain["rotary"] |= {name: getattr(layers.rotary, name) for name in groups}
    return values


def pair_spans(pairs: Sequence[int]) -> str:
    """Numbers in words: ``0-28, 30``.

    >>> pair_spans([0, 1, 2, 5, 7, 8]), pair_spans([])
    ('0-2, 5, 7-8', 'none')
    """
    spans: list[list[int]] = []
    for pair in pairs:
        if spans and pair == spans[-1][1] + 1:
            spans[-1][1] = pair
        else:
            spans.append([pair, pair])
    return ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in spans) or "none"


def some_pairs(count: int) -> list[int]:
    """A few pairs from the first to the last.

    >>> some_pairs(64), some_pairs(4)
    ([0, 8, 16, 24, 32, 39, 47, 55, 63], [0, 1, 2, 3])
    """
    return sorted({round(step * (count - 1) / (NUM_PAIRS - 1)) for step in range(NUM_PAIRS)})


def tokens(length: float | None) -> str:
    """A wavelength with three digits, or more where it has them before the point.

    >>> tokens(6.2831), tokens(20473564.1), tokens(None)
    ('6.28', '20,473,564', 'never')
    """
    if length is None:
        return "never"
    return f"{length:.3g}" if length < 1000 else f"{length:,.0f}"


def stretched(factor: float | None) -> str:
    """By how much a wavelength grew; nothing for a pair that is not rotated."""
    return "" if factor is None else f"{factor:.4g}"


def named_rows() -> Table:
    """An empty table of names and what they hold."""
    rows = table()
    rows.show_header = False
    rows.box = None
    rows.add_column(no_wrap=True, style=QUIET)
    rows.add_column(overflow="fold")
    return rows


def _summary(explanation: Explanation, source: str) -> Table:
    rows = named_rows()
    rows.add_row("model", f"{source} ({explanation.model_type})" if source != explanation.model_type else source)
    if explanation.longest is not None:
        rows.add_row("longest", f"{explanation.longest:,} positions")
    if explanation.trained not in (None, explanation.longest):
        rows.add_row("trained", f"{explanation.trained:,} positions, before it was stretched")
    for number, (key, value) in enumerate(explanation.defaults.items()):
        default = f"{key} {_plain(value)}: not in the configuration, the default of {explanation.model_type}"
        rows.add_row("" if number else "defaults", f"{default} in transformers")
    rows.add_row("vLLM", "; ".join((ANSWERS[explanation.vllm.answer], *explanation.vllm.reasons)))
    return rows


def _layers(layers: Layers) -> Table:
    rows = named_rows()
    if layers.name is not None:
        rows.add_row("layers", layers.name)
    rows.add_row("door", "; ".join(f"{door}: {DOOR_WORDS[door]}" for door in layers.doors) or "none")
    if layers.rotary is None:
        rows.add_row("encoding", layers.encoding)
    else:
        _rotary(rows, layers.rotary)
    for number, warning in enumerate(layers.warnings):
        rows.add_row("beware" if not number else "", warning)
    return rows


def _rotary(rows: Table, rotary: RotarySettings) -> None:
    rows.add_row("encoding", f"Rotary: {rotary.rotary_dim} of {rotary.head_dim} dimensions, {len(rotary.pairs)} pairs")
    rows.add_row("layout", f"{rotary.layout}: {LAYOUT_WORDS[rotary.layout].format(half=rotary.rotary_dim // 2)}")
    if rotary.sections is not None:
        rows.add_row("sections", f"{', '.join(map(str, rotary.sections))} pairs, one position axis each")
    rows.add_row("base", f"{rotary.base:,.10g}")
    rows.add_row("scaling", _scaling(rotary))
    rows.add_row("attention factor", f"{rotary.attention_factor:.10g}, on queries and on keys")
    if rotary.kept and len(rotary.kept) == len(rotary.pairs):
        rows.add_row("pairs", "all rotated at the frequencies of the base")
    else:
        rows.add_row("pairs kept", _count(rotary.kept))
        rows.add_row("pairs between", _count(rotary.between))
        rows.add_row("pairs stretched", _count(rotary.stretched))
    if rotary.still:
        rows.add_row("pairs not rotated", _count(rotary.still))
    if rotary.never_round:
        rows.add_row(
            "never round",
            f"{_count(rotary.never_round)}: less than one rotation in {rotary.trained:,} positions, unscaled",
        )
    first = rotary.precision.first_visible
    seen = "not below 1,048,576" if first is None else f"from position {first:,} on"
    rows.add_row(
        "float32 angles", f"a cosine misses by more than 0.001 {seen}; by {rotary.precision.at_longest:.1g} at the end"
    )


def _scaling(rotary: RotarySettings) -> str:
    if not rotary.scaling_options:
        return "none" if rotary.scaling == "Unscaled" else rotary.scaling
    options = {
        name: f"{len(value)} values" if isinstance(value, list) else value
        for name, value in rotary.scaling_options.items()
    }
    return f"{rotary.scaling}: {', '.join(f'{name} {_plain(value)}' for name, value in options.items())}"


def _plain(value: Any) -> str:
    return f"{value:,.10g}" if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)


def _count(pairs: Sequence[int]) -> str:
    return f"{len(pairs)} ({pair_spans(pairs)})" if pairs else "none"


def _pairs(rotary: RotarySettings) -> Table:
    rows = table()
    for heading in ("pair", "wavelength", f"rotations in {rotary.trained:,}, unscaled", "stretched by"):
        rows.add_column(heading, justify="right", no_wrap=True)
    for number in some_pairs(len(rotary.pairs)):
        pair = rotary.pairs[number]
        rotations = rotary.trained * (pair.stretch or 1) / pair.wavelength if pair.wavelength else 0
        rows.add_row(str(number), tokens(pair.wavelength), f"{rotations:,.3g}", stretched(pair.stretch))
    return rows


def _tables(explanation: Explanation) -> Table:
    rows = table()
    rows.add_column("table")
    for heading in ("shape", "parameters", *DTYPES):
        rows.add_column(heading, justify="right", no_wrap=True)
    for size in explanation.tables:
        shape = " x ".join(f"{side:,}" for side in size.shape)
        weights = [_weight(size.num_bytes(dtype)) for dtype in DTYPES.values()]
        name = f"{size.name}, also the head" if size.name == "tokens" and explanation.tied else size.name
        rows.add_row(name, shape, f"{size.num_parameters:,}", *weights)
    return rows


def _weight(num_bytes: int) -> str:
    """Bytes with one digit behind the point, in the largest unit that leaves one before it.

    >>> _weight(1536), _weight(3 * 2**30)
    ('1.5 KiB', '3.0 GiB')
    """
    power = max((power for power in range(len(UNITS)) if num_bytes >= 1024**power), default=0)
    return f"{num_bytes / 1024**power:,.1f} {UNITS[power]}" if power else f"{num_bytes} {UNITS[0]}"


def _table_facts(size: TableSize) -> dict[str, Any]:
    weights = {name: size.num_bytes(dtype) for name, dtype in DTYPES.items()}
    return {"name": size.name, "shape": list(size.shape), "parameters": size.num_parameters, "bytes": weights}
