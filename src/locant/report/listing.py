"""Print the properties, costs and papers of all encodings for `locant list`, or one encoding with its numbers."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from locant.positions import PositionEncoding
from locant.positions.angles import Angles
from locant.positions.registry import ENCODINGS, broken_encodings, encodings, find, name_of_class
from locant.report.console import QUIET, out, show, table
from locant.spelling import spell

if TYPE_CHECKING:
    from rich.table import Table

WIDE = 120
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
    written = [str(each).replace("'", "") for each in inspect.signature(kind).parameters.values()]
    accepted = [re.sub(r"\bReal\b", "float", each) for each in written]  # in Python, a float may be an int
    return {
        **_facts(name_of_class(kind) or name, kind),
        "options": accepted,
        "built": repr(built),
        "numbers": numbers(built),
    }


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
