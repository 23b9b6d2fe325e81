"""The picture one would want of an encoding: one function per kind, chosen by the encoding's class."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from locant.errors import InputError, RangeError
from locant.figures.biases import draw_alibi, draw_any_bias, draw_t5
from locant.figures.canvas import LIGHT, Theme
from locant.figures.waves import draw_learned, draw_rotary, draw_sinusoidal, draw_xpos
from locant.positions import ALiBi, Learned, PositionEncoding, Rotary, Sinusoidal, T5Bias, XPos
from locant.positions.base import ModelShape
from locant.positions.registry import find

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["MAX_LENGTH", "default_length", "draw", "encoding_to_draw"]

MAX_LENGTH = 4_096
"""A map of query x key at this length has as many values as a screen has pixels, and then some."""

SHAPE = ModelShape(d_model=128, num_heads=8, max_seq_len=128)
"""What is drawn unless sizes are given: large enough to show the pattern, small enough to see single values."""

HEAD_DIM = 64

DRAWINGS: dict[type[PositionEncoding], Callable[[Any, int, Theme], Figure]] = {
    Sinusoidal: draw_sinusoidal,
    Rotary: draw_rotary,
    XPos: draw_xpos,
    Learned: draw_learned,
    ALiBi: draw_alibi,
    T5Bias: draw_t5,
}


def draw(encoding: PositionEncoding, *, length: int | None = None, theme: Theme = LIGHT) -> Figure:
    """The picture of an encoding, as a `matplotlib.figure.Figure`.

    Args:
        encoding: any that has something to show; trained tables are drawn as they are.
        length: how many positions, 2 to 4 096; a learned table shows no more than it has.
        theme: colours for light or dark paper.

    >>> from locant.positions import ALiBi
    >>> [axes.get_xlabel() for axes in draw(ALiBi(2), length=16).axes][0]
    'distance (tokens)'
    """
    length = default_length(encoding) if length is None else length
    if not 2 <= length <= MAX_LENGTH:
        raise RangeError(
            f"got length={length}, expected 2 to {MAX_LENGTH} positions", f"length={default_length(encoding)}"
        )
    for kind, function in DRAWINGS.items():
        if isinstance(encoding, kind):
            return function(encoding, length, theme)
    if type(encoding).bias is not PositionEncoding.bias:
        return draw_any_bias(encoding, length, theme)
    name = "nope" if type(encoding) is PositionEncoding else type(encoding).__name__
    raise InputError(
        f"got {name}, which has nothing to draw: it embeds, rotates and biases nothing",
        "one of " + ", ".join(kind.__name__ for kind in DRAWINGS),
    )


def default_length(encoding: PositionEncoding) -> int:
    """Enough positions to see the pattern: for T5, past the distance from which all are one."""
    return min(encoding.max_distance * 3 // 2, MAX_LENGTH) if isinstance(encoding, T5Bias) else SHAPE.max_seq_len


def encoding_to_draw(name: str, *, length: int | None = None, **options: int | float | None) -> PositionEncoding:
    """A fresh encoding of this name; sizes that are not given are those of a small model.

    Options that are ``None`` were not given; one that the encoding does not take raises.
    """
    kind = find(name)
    given = {option: value for option, value in options.items() if value is not None}
    usual = {
        "d_model": SHAPE.d_model,
        "num_heads": SHAPE.num_heads,
        "head_dim": HEAD_DIM,
        "max_seq_len": length or SHAPE.max_seq_len,
    }
    sizes = {size: usual[size] for size in kind.sizes()}
    return kind.for_model(SHAPE, **{**sizes, **given})
