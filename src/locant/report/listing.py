"""`locant list`: every encoding, what it does and where it comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from locant.positions.catalog import CATALOG, Entry
from locant.report.console import QUIET, out, show, table

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["catalog_facts", "print_catalog"]

WIDE = 120


def catalog_facts() -> list[dict[str, object]]:
    """The catalog as plain lists and strings, for JSON."""
    return [_facts(entry) for entry in CATALOG]


def print_catalog() -> None:
    """A table where there is room for one, otherwise one paragraph per encoding."""
    console = out()
    if console.width >= WIDE:
        _print_table(console)
    else:
        _print_paragraphs(console)


def _facts(entry: Entry) -> dict[str, object]:
    return {
        "name": entry.name,
        "doors": list(entry.doors),
        "sizes": list(entry.sizes),
        "parameters": entry.parameters,
        "extrapolation": entry.extrapolation,
        "used_by": entry.used_by,
        "paper": entry.paper,
    }


def _print_table(console: Console) -> None:
    rows = table()
    rows.add_column("name", style="bold", no_wrap=True)
    for heading in ("door", "parameters"):
        rows.add_column(heading, no_wrap=True)
    for heading in ("beyond the trained length", "used by"):
        rows.add_column(heading, ratio=1, overflow="fold")
    rows.add_column("paper", style=QUIET, no_wrap=True)
    for entry in CATALOG:
        rows.add_row(entry.name, _doors(entry), entry.parameters, entry.extrapolation, entry.used_by, entry.paper)
    show(console, rows)


def _print_paragraphs(console: Console) -> None:
    rows = table()
    rows.show_header = False
    rows.box = None
    rows.add_column("name", style="bold", no_wrap=True)
    rows.add_column("what", style=QUIET, no_wrap=True)
    rows.add_column("facts", ratio=1, overflow="fold")
    for number, entry in enumerate(CATALOG):
        if number:
            rows.add_row()
        facts = {
            "door": _doors(entry), "parameters": entry.parameters, "beyond": entry.extrapolation,
            "used by": entry.used_by, "paper": entry.paper,
        }  # fmt: skip
        for line, (what, fact) in enumerate(facts.items()):
            rows.add_row("" if line else entry.name, what, fact)
    show(console, rows)


def _doors(entry: Entry) -> str:
    return ", ".join(entry.doors) or "none"
