"""Pictures of words: how alike any two are, and where they lie in a plane."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxtyping import Float
from torch import Tensor

from locant.figures.canvas import LIGHT, SIGNED, Theme, heat_map

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_flat_map", "draw_similarity"]


def draw_similarity(words: Sequence[str], similarity: Float[Tensor, "words words"], theme: Theme = LIGHT) -> Figure:
    """A heat map of the cosine of any two words, in the order of the list."""
    side = max(3.2, 0.32 * len(words) + 1.4)
    figure = theme.blank(side + 1.0, side)
    axes = figure.subplots()
    theme.color_bar(heat_map(axes, similarity.numpy(), SIGNED, -1.0, 1.0), "cosine")
    theme.dress(axes, title="How alike two words are", x="", y="")
    axes.set_xticks(range(len(words)), words, rotation=90)
    axes.set_yticks(range(len(words)), words)
    axes.set_box_aspect(1)
    return figure


def draw_flat_map(words: Sequence[str], places: Float[Tensor, "words 2"], theme: Theme = LIGHT) -> Figure:
    """The words at their places in the plane."""
    figure = theme.blank(6.4, 5.4)
    axes = figure.subplots()
    color, _, marker = theme.stroke(0)
    axes.scatter(places[:, 0], places[:, 1], s=18, color=color, marker=marker)
    for word, (x, y) in zip(words, places.tolist(), strict=True):
        axes.annotate(word, (x, y), xytext=(4, 3), textcoords="offset points", fontsize=9, color=theme.ink)
    axes.margins(0.12)
    axes.set_aspect("equal", adjustable="datalim")  # one direction is not drawn larger than the other
    theme.dress(axes, title="Words in two dimensions: near is alike", x="", y="", grid=True)
    axes.set_xticklabels([])
    axes.set_yticklabels([])
    axes.tick_params(length=0)
    return figure
