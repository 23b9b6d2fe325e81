"""`locant extend`: what changes in a configuration for a longer context, in all and per pair."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locant.checkpoints.extension import Extension
from locant.report.console import out, print_json, show, table
from locant.report.explain import named_rows, pair_spans, some_pairs, stretched, tokens

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["print_extension"]

SAME = 1e-6


def print_extension(
    extension: Extension, source: str, written: Path, figure: Path | None = None, *, as_json: bool = False
) -> None:
    """What changes in the configuration of `source`, and which files were written."""
    drawn = None if figure is None else str(figure)
    if as_json:
        print_json({"config": source, **_plain(extension), "written": str(written), "figure": drawn})
        return
    console = out()
    show(console, _summary(extension, source))
    show(console)
    show(console, _pairs(extension))
    show(console)
    for path in filter(None, (str(written), drawn)):
        console.print(path)


def _plain(extension: Extension) -> dict[str, Any]:
    """What changes, as plain values for JSON."""
    values = dataclasses.asdict(extension)
    del values["config"]
    values["changed"] = {key: {"before": old, "after": new} for key, (old, new) in extension.changed.items()}
    return {**values, "stretches": extension.stretches}


def _summary(extension: Extension, source: str) -> Table:
    rows = named_rows()
    rows.add_row("model", source)
    rows.add_row("context", f"{extension.trained:,} to {extension.to:,} positions, {extension.method}")
    for number, (key, (old, new)) in enumerate(extension.changed.items()):
        rows.add_row("" if number else "changes", f"{key}: {_short(old)} -> {_short(new)}")
    rows.add_row("attention factor", f"{extension.after.attention_factor:.10g}")
    stretches = extension.stretches
    kept = [i for i, stretch in enumerate(stretches) if stretch is not None and abs(stretch - 1) <= SAME]
    rows.add_row("pairs unchanged", f"{len(kept)} ({pair_spans(kept)}) of {len(stretches)}")
    for number, note in enumerate(extension.notes):
        rows.add_row("" if number else "note", note)
    return rows


def _pairs(extension: Extension) -> Table:
    rows = table()
    for heading in ("pair", "wavelength", "after", "stretched by"):
        rows.add_column(heading, justify="right", no_wrap=True)
    for number in some_pairs(len(extension.stretches)):
        old, new = (tokens(each.pairs[number].wavelength) for each in (extension.before, extension.after))
        rows.add_row(str(number), old, new, stretched(extension.stretches[number]))
    return rows


def _short(value: Any) -> str:
    """A value as it stands in the file, long lists in short."""
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_short(part)}" for key, part in value.items()) + "}"
    return f"[{len(value)} numbers]" if isinstance(value, list) and len(value) > 4 else json.dumps(value)
