"""The README of this folder, read as data: its figures and its table of entries."""

from __future__ import annotations

from pathlib import Path

__all__ = ["README", "published", "table_under"]

README = Path(__file__).with_name("README.md")


def table_under(heading: str, text: str) -> list[list[str]]:
    """The cells of the first table after a heading that contains these words, without its head."""
    lines = iter(text.splitlines())
    if not any(line.startswith("#") and heading in line.lower() for line in lines):
        raise LookupError(f"no heading with {heading!r} in the README")
    rows: list[list[str]] = []
    for line in lines:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
        elif rows:
            break
    return rows[2:]


def published(heading: str) -> dict[str, list[float]]:
    """The figures under a heading: one row for each way of computing, named in its first cell."""
    rows = table_under(heading, README.read_text(encoding="utf-8"))
    return {name: [float(cell) for cell in cells] for name, *cells in rows}
