"""`locant list`: every encoding, what it does and where it comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from locant.positions import PositionEncoding
from locant.positions.registry import encodings
from locant.report.console import QUIET, out, show, table

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["catalog_facts", "print_catalog"]

WIDE = 120


def catalog_facts() -> list[dict[str, object]]:
    """The catalog as plain lists and strings, for JSON."""
    return [_facts(name, kind) for name, kind in encodings().items()]


def print_catalog() -> None:
    """A table where there is room for one, otherwise one paragraph per encoding."""
    console = out()
    if console.width >= WIDE:
        _print_table(console)
    else:
        _print_paragraphs(console)


def _facts(name: str, kind: type[PositionEncoding]) -> dict[str, object]:
    info = kind.info
    return {
        "name": name,
        "doors": list(kind.doors()),
        "sizes": list(kind.sizes()),
        "parameters": info.parameters,
        "extrapolation": info.extrapolation,
        "used_by": info.used_by,
        "paper": info.paper,
    }


def _print_table(console: Console) -> None:
    rows = table()
    rows.add_column("name", style="bold", no_wrap=True)
    for heading in ("door", "parameters"):
        rows.add_column(heading, no_wrap=True)
    for heading in ("beyond the trained length", "used by"):
        rows.add_column(heading, ratio=1, overflow="fold")
    rows.add_column("paper", style=QUIET, no_wrap=True)
    for name, kind in encodings().items():
        info = kind.info
        rows.add_row(name, _doors(kind), info.parameters, info.extrapolation, info.used_by, info.paper)
    show(console, rows)


def _print_paragraphs(console: Console) -> None:
    rows = table()
    rows.show_header = False
    rows.box = None
    rows.add_column("name", style="bold", no_wrap=True)
    rows.add_column("what", style=QUIET, no_wrap=True)
    rows.add_column("facts", ratio=1, overflow="fold")
    for number, (name, kind) in enumerate(encodings().items()):
        if number:
            rows.add_row()
        info = kind.info
        facts = {
            "door": _doors(kind), "parameters": info.parameters, "beyond": info.extrapolation,
            "used by": info.used_by, "paper": info.paper,
        }  # fmt: skip
        for line, (what, fact) in enumerate(facts.items()):
            rows.add_row("" if line else name, what, fact)
    show(console, rows)


def _doors(kind: type[PositionEncoding]) -> str:
    return ", ".join(kind.doors()) or "none"
