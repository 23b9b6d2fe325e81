"""A picture for light and for dark paper, from one drawing: most of its time is that of the layout and the SVG.

It is drawn in marks, which are colours that occur nowhere else. Each stands for a colour of the theme.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

from locant.figures.canvas import LIGHT, THEMES, Theme, save

__all__ = ["MARKS", "colours_of", "in_each_theme"]

MARKED = "marked"
"""The name of the theme of marks, while a picture is drawn."""


def _marks() -> Theme:
    numbers = iter(range(1, 100))
    marks = {field.name: f"#fe01{next(numbers):02x}" for field in fields(Theme) if field.name != "curves"}
    return Theme(**marks, curves=tuple(f"#fe01{next(numbers):02x}" for _ in LIGHT.curves))


MARKS = _marks()


def in_each_theme(drawing: Callable[..., Any]) -> dict[str, str]:
    """Return the SVG of a picture by theme.

    >>> def drawing(theme):
    ...     return THEMES[theme].blank(2.0, 1.0)
    >>> {theme: THEMES[theme].paper in svg for theme, svg in in_each_theme(drawing).items()}
    {'light': True, 'dark': True}
    """
    with patch.dict(THEMES, {MARKED: MARKS}), tempfile.TemporaryDirectory() as folder:
        save(drawing(theme=MARKED), Path(folder) / "marked.svg")
        marked = (Path(folder) / "marked.svg").read_text(encoding="utf-8")
    return {theme: _coloured(marked, colours) for theme, colours in THEMES.items()}


def _coloured(svg: str, theme: Theme) -> str:
    for mark, colour in zip(colours_of(MARKS), colours_of(theme), strict=True):
        svg = svg.replace(mark, colour.lower())
    return svg


def colours_of(theme: Theme) -> Iterator[str]:
    """Yield the colours of a theme, in the order of its fields."""
    for field in fields(Theme):
        value = getattr(theme, field.name)
        yield from [value] if isinstance(value, str) else value
