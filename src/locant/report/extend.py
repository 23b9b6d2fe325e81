"""`locant extend`: the configuration of a longer context, what changes per pair, and the picture of it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locant.checkpoints.config_source import read_source
from locant.checkpoints.extension import Extension, extend
from locant.errors import InputError
from locant.figures.canvas import require_matplotlib, require_suffix, save
from locant.figures.wavelengths import Wavelengths, draw_wavelengths
from locant.files import replacing
from locant.report.console import QUIET, out, print_json, show, table
from locant.report.explain import pair_spans, some_pairs, tokens

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

__all__ = ["draw_extension", "extend_source", "extension_facts"]

SAME = 1e-6


def extend_source(
    source: str, *, to: int, method: str, output: Path | None = None, figure: Path | None = None, as_json: bool = False
) -> None:
    """Write the configuration of `source` for `to` tokens, and say what changes."""
    if figure is not None:
        require_matplotlib()
        require_suffix(figure)
    path = (
        Path(f"{Path(source).name.removesuffix('.json') or 'config'}-{method}-{to}.json") if output is None else output
    )
    _require_another(source, path)
    extension = extend(read_source(source), to=to, method=method)
    with replacing(path) as temporary:  # both files, or none
        temporary.write_text(json.dumps(extension.config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        if figure is not None:
            save(draw_extension(extension, source), figure)
    drawn = None if figure is None else str(figure)
    if as_json:
        print_json({"config": source, **extension_facts(extension), "written": str(path), "figure": drawn})
        return
    _print(extension, source)
    for written in (str(path), drawn):
        if written is not None:
            out().print(written)


def extension_facts(extension: Extension) -> dict[str, Any]:
    """What changes, as plain values for JSON."""
    facts = dataclasses.asdict(extension)
    del facts["config"]
    facts["changed"] = {key: {"before": old, "after": new} for key, (old, new) in extension.changed.items()}
    return {**facts, "stretches": extension.stretches}


def draw_extension(extension: Extension, source: str) -> Figure:
    """Wavelengths before and after, and their ratio."""
    before, after = ([pair.wavelength for pair in facts.pairs] for facts in (extension.before, extension.after))
    title = f"{source}: {extension.trained:,} to {extension.to:,} positions by {extension.method}"
    marks = {"trained": extension.after.trained, "longest": extension.after.length}
    return draw_wavelengths([Wavelengths(title=title, before=before, after=after, marks=marks)], ("before", "after"))


def _require_another(source: str, path: Path) -> None:
    here = Path(source) / "config.json" if Path(source).is_dir() else Path(source)
    if path.exists() and here.exists() and path.samefile(here):
        raise InputError(f"got {path} as the place to write, which is the configuration itself", "-o another-name.json")


def _print(extension: Extension, source: str) -> None:
    console = out()
    show(console, _summary(extension, source))
    show(console)
    show(console, _pairs(extension))
    show(console)


def _summary(extension: Extension, source: str) -> Table:
    rows = table()
    rows.show_header = False
    rows.box = None
    rows.add_column(no_wrap=True, style=QUIET)
    rows.add_column(overflow="fold")
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
        stretch = extension.stretches[number]
        old, new = (tokens(facts.pairs[number].wavelength) for facts in (extension.before, extension.after))
        rows.add_row(str(number), old, new, "" if stretch is None else f"{stretch:.4g}")
    return rows


def _short(value: Any) -> str:
    """A value as it stands in the file, long lists in short."""
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_short(part)}" for key, part in value.items()) + "}"
    return f"[{len(value)} numbers]" if isinstance(value, list) and len(value) > 4 else json.dumps(value)
