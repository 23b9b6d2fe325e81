"""Draw the moving picture at the top of the README: the loss of a trained model that reads a text with position bugs.

The picture is ``docs/images/breaking_curves-light.svg`` and its dark twin. A browser plays it inside an ``<img>``: a
cursor reads the text, and each curve appears as far as it has read. Without animation, or if the reader prefers less
motion, the picture shows the whole curves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

import numpy as np

from benchmarks.real_models.cost_of_bugs import BLOCK, CORRECT
from benchmarks.real_models.picture import FOLDER, MODEL
from locant.figures.canvas import THEMES, Theme
from locant.files import write_whole

__all__ = ["BUGS", "LENGTH", "Curve", "curve", "draw", "write"]

NAME = "breaking_curves"
LENGTH = 8192
BUGS = {
    "base-10000": ("base 10,000", "instead of 100,000"),
    "restarts": ("positions start again", "in the middle, at {breaks}"),
    "positions-bfloat16": ("positions in bfloat16", "fails from token {breaks} on"),
    "positions-float16": ("positions in float16", "fails from token {breaks} on"),
}
"""Bugs that a short text does not show, with two lines of words each."""
BROKEN = 0.25
"""A curve breaks where the loss rises by more than this, and does not come back."""
STRETCHES = 24
SECONDS, READING = 14, 0.7
"""The length of the loop, and the share of it in which the cursor reads. Then the whole picture stands still."""

WIDTH, HEIGHT = 880, 400
LEFT, RIGHT, TOP, BOTTOM = 66, 640, 76, 352
LINE, STEP = 17, 2
FONT = "system-ui, 'Segoe UI', Roboto, 'Noto Sans', 'Liberation Sans', sans-serif"
DASHES = ("none", "9 4", "2 3", "9 3 2 3")


class Curve(NamedTuple):
    """The increase of the loss by position.

    Args:
        positions: the middle of each stretch of tokens.
        rises: the mean increase of the loss in each stretch, in nats per token.
        breaks: the first token from which the loss stays higher by more than `BROKEN`.
    """

    positions: np.ndarray
    rises: np.ndarray
    breaks: int


def curve(record: Mapping[str, Any], key: str, length: int = LENGTH) -> Curve:
    """Return the increase of the loss with a bug, in stretches that grow with the position."""
    with_bug, correct = (
        np.mean([window["blocks"] for window in record["measured"][f"{MODEL}/{length}/{each}"]["value"]["windows"]], 0)
        for each in (key, f"{CORRECT} text")
    )
    rises = with_bug - correct
    whole = np.flatnonzero(rises <= BROKEN)
    ends = np.unique(np.round(np.geomspace(1, len(rises), STRETCHES)).astype(int))
    begins = np.concatenate([[0], ends[:-1]])
    means = [rises[begin:end].mean() for begin, end in zip(begins, ends, strict=True)]
    return Curve((begins + ends) / 2 * BLOCK, np.array(means), int(whole.max(initial=-1) + 1) * BLOCK)


def draw(record: Mapping[str, Any], theme: Theme, length: int = LENGTH) -> str:
    """Return the picture as SVG with an animation in CSS."""
    curves = {key: curve(record, key, length) for key in BUGS}
    highest = int(np.ceil(max(each.rises.max() for each in curves.values())))
    first = min(each.positions[0] for each in curves.values())

    def x(position: float) -> float:
        return LEFT + (RIGHT - LEFT) * np.log2(position / first) / np.log2(length / first)

    def y(rise: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * rise / highest

    lines, rules, words = [], [], []
    places = _apart([y(0), *(y(each.rises[-1]) for each in curves.values())], 2.4 * LINE)
    words.append(_label(places[0], "correct", "", theme.ink, theme))
    for number, (key, each) in enumerate(curves.items()):
        color, name = theme.curves[number], f"label-{number}"
        points = " ".join(f"{x(at):.1f},{y(rise):.1f}" for at, rise in zip(each.positions, each.rises, strict=True))
        last = f"{x(length):.1f},{y(each.rises[-1]):.1f}"
        lines.append(
            f'<polyline points="{points} {last}" fill="none" stroke="{color}" stroke-width="2.4" '
            f'stroke-linejoin="round" stroke-dasharray="{DASHES[number]}"/>'
            f'<circle cx="{x(max(each.breaks, first)):.1f}" cy="{y(0):.1f}" r="4" fill="{color}"/>'
        )
        share = 100 * READING * (x(max(each.breaks, first)) - LEFT) / (RIGHT - LEFT)
        hidden, shown = f"0%, {share:.1f}% {{ opacity: 0 }}", f"{share + 3:.1f}%, 100% {{ opacity: 1 }}"
        rules.append(f"@keyframes {name} {{ {hidden} {shown} }}")
        rules.append(f".{name} {{ animation: {name} {SECONDS}s linear infinite }}")
        first_line, second_line = (line.format(breaks=f"{each.breaks:,}") for line in BUGS[key])
        label = _label(places[number + 1], first_line, second_line, color, theme)
        words.append(f'<g class="{name}">{label}</g>')
    across = "".join(f"M{LEFT} {y(rise):.1f}H{RIGHT}" for rise in range(STEP, highest + 1, STEP))
    grid = f'<path d="{across}" stroke="{theme.grid}"/>'
    title = f"Four position bugs that a short test does not show: {record['weights'][MODEL]['title']}"
    subtitle = f"Increase of the loss in nats per token, by position in a text of {length:,} tokens"
    plot = f'x="{LEFT}" y="{TOP - 6}" width="{RIGHT - LEFT + 2}" height="{BOTTOM - TOP + 12}"'
    size = f'width="{WIDTH}" height="{HEIGHT}"'
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {size} role="img" aria-label="{escape(title)}">
<style>{_style(rules)}</style>
<g font-family="{FONT}" font-size="13">
<rect {size} rx="8" fill="{theme.paper}"/>
<text x="20" y="32" fill="{theme.ink}" font-size="17" font-weight="600">{escape(title)}</text>
<text x="20" y="54" fill="{theme.muted}">{subtitle}</text>
<clipPath id="plot"><rect {plot}/></clipPath>
{grid}
<g clip-path="url(#plot)">
{chr(10).join(lines)}
<g class="unread"><rect {plot} fill="{theme.paper}"/>
{grid}
<path d="M{LEFT} {TOP - 6}V{BOTTOM}" stroke="{theme.muted}" stroke-width="1.5"/></g>
</g>
{chr(10).join([*_axes(x, y, first, highest, length, theme), *words])}
</g>
</svg>
"""


def write(record: Mapping[str, Any], folder: Path = FOLDER) -> list[Path]:
    """Write the picture for both themes and return the files."""
    files = {folder / f"{NAME}-{name}.svg": draw(record, theme) for name, theme in THEMES.items()}
    for file, text in files.items():
        write_whole(file, text)
    return [*files]


def _style(rules: list[str]) -> str:
    read = f"transform: translateX({RIGHT - LEFT + 2}px)"  # the cursor is then outside
    return " ".join(
        [
            f".unread {{ {read}; animation: read {SECONDS}s linear infinite }}",
            f"@keyframes read {{ 0% {{ transform: none }} {100 * READING:g}%, 100% {{ {read} }} }}",
            *rules,
            "@media (prefers-reduced-motion: reduce) { * { animation: none !important } }",
        ]
    )


def _axes(x: Any, y: Any, first: float, highest: int, length: int, theme: Theme) -> Iterator[str]:
    yield f'<path d="M{LEFT} {y(0):.1f}H{RIGHT}" stroke="{theme.ink}" stroke-width="2"/>'
    for rise in range(0, highest + 1, STEP):
        sign = "+" if rise else ""
        yield f'<text x="{LEFT - 10}" y="{y(rise) + 4:.1f}" fill="{theme.muted}" text-anchor="end">{sign}{rise}</text>'
    for power in range(length.bit_length()):
        if first <= 2**power <= length:
            at = f"{x(2**power):.1f}"
            yield f'<path d="M{at} {BOTTOM}v5" stroke="{theme.muted}"/>'
            yield f'<text x="{at}" y="{BOTTOM + 20}" fill="{theme.muted}" text-anchor="middle">{2**power:,}</text>'
    yield f'<text x="{(LEFT + RIGHT) / 2}" y="{BOTTOM + 39}" fill="{theme.muted}" text-anchor="middle">token</text>'


def _label(y: float, first: str, second: str, color: str, theme: Theme) -> str:
    name = f'<text x="{RIGHT + 12}" y="{y + 4:.1f}" fill="{color}" font-weight="600">{escape(first)}</text>'
    more = f'<text x="{RIGHT + 12}" y="{y + 4 + LINE:.1f}" fill="{theme.muted}">{escape(second)}</text>'
    return name + more if second else name


def _apart(places: list[float], least: float) -> list[float]:
    """Return the places from the bottom up, moved up until no two are nearer than `least`.

    >>> _apart([100.0, 10.0, 95.0], 20.0)
    [100.0, 10.0, 80.0]
    """
    moved = [*places]
    order = sorted(range(len(places)), key=lambda index: -places[index])
    for below, index in pairwise(order):
        moved[index] = min(moved[index], moved[below] - least)
    return moved
