"""Pictures of losses by length: some recorded encodings, and the table of the guide to tuning."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from docs.generator.records import ROOT
from locant.figures.canvas import THEMES
from locant.lab.results import read_recorded
from locant.lab.summary import summarise
from locant.report.page import draw_loss_by_length

__all__ = ["draw_recorded", "draw_tuning", "pictures", "table_of_losses"]

COURSE = ("alibi", "t5", "nope", "rotary", "sinusoidal", "learned")
"""The encodings of the course."""
TUNING = ROOT / "docs" / "guides" / "tuning.md"


def pictures() -> dict[str, Callable[..., Any]]:
    """What draws each picture."""
    return {"course-losses": partial(draw_recorded, COURSE), "tuning": draw_tuning}


def draw_recorded(names: Sequence[str], theme: str) -> Any:
    """Draw the recorded losses of these encodings."""
    results = read_recorded("v1-tiny") or {}
    records = [record for record in results["records"] if record["encoding"] in names]
    return draw_loss_by_length(summarise({**results, "records": records}), THEMES[theme])


def draw_tuning(theme: str, page: Path = TUNING) -> Any:
    """Draw the losses of the base model by length, from the first table of the guide."""
    style, losses = THEMES[theme], table_of_losses(page.read_text(encoding="utf-8"))
    figure = style.blank(8.6, 4.6)
    axes = figure.subplots()
    lengths = [*next(iter(losses.values()))]
    for number, (name, row) in enumerate(sorted(losses.items(), key=lambda each: each[1][lengths[-1]])):
        color, linestyle, marker = style.stroke(number)
        look: dict[str, Any] = {"color": color, "linestyle": linestyle, "marker": marker, "linewidth": 1.8}
        axes.plot(lengths, [*row.values()], label=name, **look)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.minorticks_off()
    title = f"Trained at {lengths[0]:,} tokens, read at more"
    style.style_axes(axes, title=title, x="window (tokens)", y="loss (nats per token)", grid=True)
    style.legend(axes, title=f"at {lengths[-1]:,}, lowest first")
    return figure


def table_of_losses(page: str) -> Mapping[str, Mapping[int, float]]:
    r"""Return the first table of losses of a page, by name and length.

    >>> table_of_losses("| base, with | 256 | 1,024 |\n|---|---|---|\n| own | 4.0 | 4.5 |\n\n| x | 2 |")
    {'own': {256: 4.0, 1024: 4.5}}
    """
    found = re.search(r"^\|.*, with \|(.*)\|\n\|[-|]+\|\n((?:\|.*\n)+)", page, flags=re.MULTILINE)
    if found is None:
        raise ValueError("got no table of losses, expected one whose first heading ends in 'with'")
    lengths = [int(each.replace(",", "")) for each in found[1].split("|")]
    rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in found[2].splitlines())
    return {name: dict(zip(lengths, map(float, losses), strict=True)) for name, *losses in rows}
