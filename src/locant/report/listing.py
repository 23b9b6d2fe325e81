"""Print the properties, costs and papers of all encodings for `locant list`, or one encoding with its numbers."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from contextlib import suppress
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from locant.positions import PositionEncoding
from locant.positions.angles import Angles
from locant.positions.registry import ENCODINGS, broken_encodings, encodings, find, name_of_class
from locant.report.console import QUIET, out, show, table
from locant.spelling import spell

if TYPE_CHECKING:
    from rich.table import Table

WIDE = 120
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
Facts = dict[str, Any]

HEADINGS = {
    "aliases": "also called", "kind": "kind", "methods": "method", "parameters": "parameters",
    "cost_of_tokens": "per token", "cost_of_pairs": "per pair", "extrapolation": "beyond", "used_by": "used by",
    "paper": "paper", "options": "options",
}  # fmt: skip
SHORT = ("kind", "methods", "parameters", "cost_of_tokens", "cost_of_pairs")
LONG = ("extrapolation", "used_by", "paper", "aliases")


def facts_of_all() -> tuple[list[Facts], list[str]]:
    """Return the facts about every encoding, and the errors of encodings in installed packages that fail to load."""
    return [_facts(name, kind) for name, kind in encodings().items()], list(broken_encodings().values())


def encoding_facts(name: str, **options: Any) -> Facts:
    """Return the facts about one encoding, its options, and its numbers.

    The numbers are for a small model with `options`.
    """
    from locant.figures.plot import encoding_to_draw

    kind = find(name)
    built = encoding_to_draw(name, **options)
    return {
        **_facts(name_of_class(kind) or name, kind),
        "options": _options(kind),
        "built": repr(built),
        "numbers": numbers(built),
    }


def _options(kind: type[PositionEncoding]) -> list[str]:
    """Return the parameters of the constructor, with their types in words and their defaults."""
    types = dict[str, Any]()
    with suppress(NameError):  # a class of another package may import its types only for type checkers
        types = get_type_hints(kind.__init__)
    named = [each for each in inspect.signature(kind).parameters.values() if each.kind not in VARIADIC]
    return [
        f"{each.name}: {_type_words(types.get(each.name, each.annotation))}"
        + ("" if each.default is inspect.Parameter.empty else f" = {_value_words(each.default)}")
        for each in named
    ]


def _type_words(kind: Any) -> str:
    """Return a type in the words of a reader: ``half or interleaved``, ``int or none``, ``sequence of float``."""
    if kind is type(None):
        return "none"
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " or ".join(map(_value_words, parts))
    if origin in (Union, UnionType):
        parts = [each for each in parts if not (each is int and float in parts)]  # in Python, a float may be an int
        return " or ".join(dict.fromkeys(map(_type_words, parts)))
    if origin is not None:
        return f"{origin.__name__.lower()} of {' and '.join(map(_type_words, parts))}"
    return "any" if kind in (Any, inspect.Parameter.empty) else getattr(kind, "__name__", str(kind))


def _value_words(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_value_words, value))})"
    return "none" if value is None else str(value)


def numbers(encoding: PositionEncoding) -> dict[str, list[float | None]]:
    """Return the slopes, or the inverse frequencies and wavelengths, if an encoding has them.

    The wavelength of a pair that does not rotate is ``None``.
    """
    if (slopes := getattr(encoding, "slopes", None)) is not None:
        return {"slopes": slopes.tolist()}
    if not isinstance(angles := getattr(encoding, "angles", None), Angles):
        return {}
    frequencies = [float(each) for each in angles.frequencies]
    return {"inv_freq": [*frequencies], "wavelengths": [2 * math.pi / each if each else None for each in frequencies]}


def print_all(facts: Sequence[Facts]) -> None:
    """Print two tables if the terminal is wide enough, otherwise one paragraph per encoding."""
    wide = out().width >= WIDE
    show(*([_table(facts, columns) for columns in (SHORT, LONG)] if wide else map(_paragraph, facts)))
    show("")


def print_encoding(facts: Facts) -> None:
    """Print all facts about one encoding, and its numbers in a table."""
    show(_paragraph(facts))
    if not facts["numbers"]:
        return
    show("")
    show(facts["built"])
    headings = ("head" if "slopes" in facts["numbers"] else "pair", *facts["numbers"])
    rows = table(*(heading.replace("_", " ") for heading in headings))
    for number, values in enumerate(zip(*facts["numbers"].values(), strict=True)):
        rows.add_row(str(number), *("–" if value is None else spell(value, 8) for value in values))
    show(rows)


def _facts(name: str, kind: type[PositionEncoding]) -> Facts:
    names = ("parameters", "cost_of_tokens", "cost_of_pairs", "extrapolation", "used_by", "paper")
    return {
        "name": name,
        "aliases": list(ENCODINGS.aliases(name)),
        "kind": kind.info.kind,
        "methods": list(kind.methods()),
        "sizes": list(kind.sizes()),
        **{each: getattr(kind.info, each) for each in names},
    }


def _table(facts: Sequence[Facts], columns: Sequence[str]) -> Table:
    rows = table()
    rows.add_column("name", style="bold", no_wrap=True)
    for column in columns:
        narrow = column in ("kind", "methods", "paper")
        width = max(len(word) for one in facts for word in [*_text(one[column]).split(), HEADINGS[column]])
        rows.add_column(HEADINGS[column], no_wrap=narrow, ratio=None if narrow else 1, min_width=width, overflow="fold")
    for one in facts:
        rows.add_row(one["name"], *(_text(one[column]) for column in columns))
    return rows


def _paragraph(facts: Facts) -> Table:
    rows = table(box=None, show_header=False)
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column(style=QUIET, no_wrap=True)
    rows.add_column(ratio=1, overflow="fold")
    for line, column in enumerate(column for column in HEADINGS if facts.get(column) or column == "methods"):
        rows.add_row("" if line else facts["name"], HEADINGS[column], _text(facts[column]))
    return rows


def _text(fact: str | list[str]) -> str:
    return (", ".join(fact) or "none") if isinstance(fact, list) else fact
