"""One drawing in marks gives the pictures that are drawn in each theme."""

from __future__ import annotations

import doctest
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import locant
from docs.generator import colours
from docs.generator.known_bugs import draw
from locant.figures.canvas import ONE_SIGN, THEMES, save

IDS = re.compile(r"\b(?:[mC][0-9a-f]+(?:_\w+)?|image[0-9a-f]+)\b")
"""Names of markers, glyphs and images, which matplotlib derives from colours, too."""


def numbers(theme: str) -> Any:
    """A map with numbers in black and in white, which are no colours of the theme."""
    figure = THEMES[theme].blank(4.0, 3.0)
    THEMES[theme].heat_map(
        figure.subplots(), np.arange(9.0).reshape(3, 3), ONE_SIGN, 0.0, 8.0, "title", "x", "y", "bar"
    )
    return figure


PLOTTED = pytest.param(partial(locant.plot, "alibi"), marks=pytest.mark.unchecked)  # its themes do not include marks


def in_order(svg: str) -> str:
    """Rename ids by their order."""
    names: dict[str, str] = {}
    return IDS.sub(lambda found: names.setdefault(found[0], f"id{len(names)}"), svg.lower())


@pytest.mark.parametrize(
    "drawing",
    [numbers, partial(draw, "other-layout"), partial(draw, "documents-run-on"), PLOTTED],
)
def test_one_drawing_gives_the_picture_of_each_theme(drawing: Callable[..., Any], tmp_path: Path) -> None:
    found = colours.in_each_theme(drawing)
    assert {*found} == {*THEMES}
    for theme, svg in found.items():
        save(drawing(theme=theme), tmp_path / "drawn.svg")
        assert in_order(svg) == in_order((tmp_path / "drawn.svg").read_text(encoding="utf-8"))
    assert in_order(found["light"]) != in_order(found["dark"])


def test_a_mark_is_no_colour_of_a_theme_and_stands_for_one() -> None:
    marks = [*colours.colours_of(colours.MARKS)]
    for theme in THEMES.values():
        assert len({*marks}) == len(marks) == len([*colours.colours_of(theme)])
        assert not {*marks} & {colour.lower() for colour in colours.colours_of(theme)}
    assert colours.MARKED not in THEMES


def test_examples() -> None:
    assert doctest.testmod(colours).failed == 0
