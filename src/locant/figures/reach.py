"""The picture of a configuration: how far each pair of dimensions reaches, before and after its scaling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from locant.checkpoints.explanation import Explanation
from locant.checkpoints.rotary_settings import RotarySettings
from locant.errors import InputError
from locant.figures.canvas import LIGHT, Theme, add_legend, blank, dress, stroke
from locant.figures.choice import DRAWINGS, draw
from locant.models import encoding_from_config, with_defaults

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_explanation", "draw_reach"]


def draw_explanation(explanation: Explanation, config: Mapping[str, Any], name: str, theme: Theme = LIGHT) -> Figure:
    """Wavelengths and stretches of rotary models, one row per kind of layer; other encodings as `locant plot` does."""
    rotary = [(layers.name, layers.rotary) for layers in explanation.layers if layers.rotary is not None]
    if rotary:
        rows = [
            (name if kind is None else f"{name}, {kind}", *_plain_and_scaled(facts), facts) for kind, facts in rotary
        ]
        return draw_reach(rows, ("without a scaling", "as it is"), theme)
    kind = explanation.layers[0].name
    encoding = encoding_from_config(with_defaults(config), layer_type=kind)
    if not isinstance(encoding, tuple(DRAWINGS)):
        kinds = ", ".join(sorted(drawn.__name__ for drawn in DRAWINGS))
        raise InputError(f"got {explanation.layers[0].kind}, which has no picture; {kinds} have one", "no figure")
    longest = min(explanation.longest or 128, 128)
    return draw(encoding, length=longest, theme=theme)


def draw_reach(
    rows: Sequence[tuple[str, list[float | None], list[float | None], RotarySettings]],
    names: tuple[str, str],
    theme: Theme = LIGHT,
) -> Figure:
    """For each row, positions per turn of every pair before and after, and the ratio of the two.

    Args:
        rows: title, wavelengths before, wavelengths after, and the facts with the lengths to mark.
        names: what before and after are called.
        theme: colours for light or dark paper.
    """
    figure = blank(10.5, 0.6 + 3.6 * len(rows), theme)
    grid = figure.subplots(len(rows), 2, squeeze=False, width_ratios=(3, 2))
    for (title, before, after, facts), (left, right) in zip(rows, grid, strict=True):
        _wavelengths(left, title, before, after, facts, names, theme)
        _stretches(right, before, after, theme)
    return figure


def _wavelengths(
    axes: Axes,
    title: str,
    before: list[float | None],
    after: list[float | None],
    facts: RotarySettings,
    names: tuple[str, str],
    theme: Theme,
) -> None:
    for number, (name, waves) in enumerate(zip(names, (before, after), strict=True)):
        look = stroke(number, theme)
        turning = [(pair, wave) for pair, wave in enumerate(waves) if wave is not None]
        axes.plot(*zip(*turning, strict=True), color=look.color, linestyle=look.linestyle, linewidth=1.8, label=name)
    axes.set_yscale("log")
    dress(axes, theme, title=title, x="pair of dimensions", y="positions per turn", grid=True)
    lengths = (
        {facts.trained: "trained", facts.length: "longest"}
        if facts.trained != facts.length
        else {facts.length: "longest"}
    )
    for length, what in lengths.items():
        axes.axhline(length, color=theme.muted, linewidth=1.0, linestyle=":")
        axes.annotate(
            f"{what} {length:,}",
            (0, length),
            xytext=(2, 3),
            textcoords="offset points",
            color=theme.muted,
            fontsize=8.5,
        )
    add_legend(axes, theme, loc="lower right")


def _stretches(axes: Axes, before: list[float | None], after: list[float | None], theme: Theme) -> None:
    look = stroke(1, theme)
    pairs = [(pair, new / old) for pair, (old, new) in enumerate(zip(before, after, strict=True)) if old and new]
    axes.plot(*zip(*pairs, strict=True), color=look.color, linewidth=1.8)
    axes.set_ylim(bottom=0)
    dress(axes, theme, title="Stretched by", x="pair of dimensions", y="factor", grid=True)


def _plain_and_scaled(facts: RotarySettings) -> tuple[list[float | None], list[float | None]]:
    after = [pair.wavelength for pair in facts.pairs]
    before = [pair.wavelength / pair.stretch if pair.wavelength and pair.stretch else None for pair in facts.pairs]
    return before, after
