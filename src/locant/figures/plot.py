"""`locant.plot` draws encodings, configurations, and the results of `probe`, `explain` and `extend`."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch

from locant.arguments import one_of, whole
from locant.errors import RangeError, Remedy
from locant.figures import GRID, MAX_LENGTH, SIZES, TRAINED, bias, embed, rotate
from locant.figures.canvas import LIGHT, THEMES, Theme
from locant.models import encoding_from_config, with_defaults
from locant.positions import PositionEncoding
from locant.positions.base import ModelShape
from locant.positions.registry import find
from locant.positions.scaling import Unscaled, scaling_by_name
from locant.probing.report import Report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from locant.checkpoints.explanation import Explanation
    from locant.checkpoints.extension import Extension

Drawing = Callable[..., None]
_SEEDING = threading.Lock()
TABLES = 1 << 16
"""An offset of the seed for an encoding's tables, so that they differ from random contents with the same seed."""

DRAWINGS: tuple[tuple[str, str, Drawing, float], ...] = (
    ("embed", "vectors", embed.draw_sinusoidal, 7.6),
    ("embed", "table", embed.draw_grid, 5.8),
    ("embed", "kernel_size", embed.draw_convolution, 5.0),
    ("embed", "", embed.draw_table, 5.0),
    ("rotate", "cos_sin", rotate.draw_rotary, 8.8),
    ("rotate", "fading", rotate.draw_xpos, 6.6),
    ("rotate", "classes", rotate.draw_by_class, 4.6),
    ("rotate", "strength", rotate.draw_between, 4.6),
    ("rotate", "", rotate.draw_rotated, 4.6),
    ("bias", "height", bias.draw_offsets, 6.4),
    ("bias", "", bias.draw_bias, 5.6),
)
"""Each row has a method of encodings, an attribute, a function that draws the method, and the height of the picture in
inches. If this package defines the method, the first row whose attribute the encoding has is used. A row without an
attribute fits any encoding.
"""


def plot(
    what: PositionEncoding | str | Report | object,
    *,
    length: int | None = None,
    theme: Literal["light", "dark"] = "light",
    layer_type: str | None = None,
    seed: int = 0,
    causal: bool | None = None,
    **options: Any,
) -> Figure:
    """Draw an encoding, and return a `matplotlib.figure.Figure`.

    Args:
        what: an encoding, a name from `locant list`, a `transformers` configuration, or the dictionary of a
            ``config.json``. Trained tables are drawn unchanged. For a report of `locant.probe`, the measurements are
            drawn.
        length: the number of positions to draw, 2 to 4 096. Default: enough to see the pattern.
        theme: a light or a dark background.
        layer_type: the type of layer, for a configuration with several types.
        seed: the seed of the random tables of an encoding that is given by name.
        causal: whether to hide the bias of later keys. Default: yes, unless the encoding is bidirectional.
        options: the options of an encoding that is given by name. The default is the sizes of a small model.
            ``scaling`` may also be a name and a factor, such as ``"yarn:8"``, with the trained length as ``trained``.
            Then the wavelengths before and after are drawn.

    Raises:
        RangeError: a name is unknown, the length is out of range, or the options do not fit.
        InputError: a configuration cannot be read, or matplotlib is not installed.

    >>> figure = plot("alibi", num_heads=2, length=16)
    >>> figure.axes[0].get_xlabel()
    'distance (tokens)'
    >>> figure.savefig("alibi.png")  # doctest: +SKIP
    """
    colors = THEMES[one_of("theme", theme, THEMES)]
    trained, untrained = None, not isinstance(what, PositionEncoding)
    if isinstance(what, str):
        what, trained = encoding_to_draw(what, length=length, seed=seed, **options), options.get("trained", TRAINED)
    elif options:
        cause = f"got {', '.join(options)} for a {type(what).__name__}, expected options only with a name"
        raise RangeError(cause, "plot('rotary', head_dim=64)")
    elif isinstance(what, Report):
        return rotate.draw_report(what, colors)
    elif not isinstance(what, PositionEncoding):
        what = encoding_from_config(what, layer_type=layer_type)
    return draw(what, length=length, theme=colors, trained=trained, causal=causal, untrained=untrained)


def draw(
    encoding: PositionEncoding, *, length: int | None = None, theme: Theme = LIGHT, trained: int | None = None,
    causal: bool | None = None, untrained: bool = False,
) -> Figure:  # fmt: skip
    """Draw the effect of each method of this encoding, one below the other.

    `trained` is the trained length for scalings that do not contain it. With `untrained`, the titles of encodings with
    parameters state that they are untrained.
    """
    default = default_length(encoding)
    length = default if length is None else whole("length", length, 2, MAX_LENGTH, remedy=Remedy(length=default))
    drawings = _drawings(encoding, trained, causal)
    heights = [height for _, height in drawings]
    figure = theme.blank(11.5, sum(heights))
    parts = [figure]
    if drawings[1:]:
        parts = figure.subfigures(len(drawings), 1, height_ratios=heights, squeeze=False)[:, 0]
    for part, (drawing, _) in zip(parts, drawings, strict=True):
        drawing(part, encoding, length, theme)
        if untrained and [*encoding.parameters()]:
            theme.set_title(part, f"{part.get_suptitle()}, untrained")
    return figure


def default_length(encoding: PositionEncoding) -> int:
    """Return a length that shows the pattern. For T5, it includes distances that share the last bucket."""
    length = getattr(encoding, "max_distance", 0) * 3 // 2 if bias.has_buckets(encoding) else SIZES["max_seq_len"]
    return max(2, min(length, MAX_LENGTH))


def encoding_to_draw(
    name: str | type[PositionEncoding],
    *,
    length: int | None = None,
    seed: int = 0,
    scaling: Any = None,
    trained: int = TRAINED,
    **options: Any,
) -> PositionEncoding:
    """Return a new encoding of this name or class. The default sizes are `SIZES`.

    With a length, an encoding for grids is built for tokens in one row.
    """
    kind = find(name) if isinstance(name, str) else name
    sizes = {**SIZES, **({} if length is None else {"max_seq_len": length})}
    if isinstance(scaling, str):
        parameters = inspect.signature(kind).parameters
        if "scaling" not in parameters:
            raise RangeError(f"got a scaling for {name}, which has no frequencies to scale", "plot('rotary', ...)")
        base = options.get("base", parameters["base"].default)
        width = options.get("rotary_dim", options.get("head_dim", sizes["head_dim"]))
        scaling = scaling_by_name(scaling, trained, width, base)
    if scaling is not None:
        options["scaling"] = scaling
    if length is None and GRID.keys() <= {*kind.sizes()}:
        options = {**GRID, **options}
    shape = ModelShape(**sizes)
    with fixed_seed(TABLES + seed):
        return kind.for_model(shape, **options)


@contextmanager
def fixed_seed(seed: int) -> Generator[None]:
    """Seed the random numbers of `torch.nn` in the block, even if other threads use this function, too.

    `torch.nn` uses the generator of the process, whose state is restored afterwards.
    """
    with _SEEDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _drawings(encoding: PositionEncoding, trained: int | None, causal: bool | None) -> list[tuple[Drawing, float]]:
    if not isinstance(getattr(encoding, "scaling", Unscaled()), Unscaled):
        return [(partial(rotate.draw_scaled, trained=trained), 4.4)]
    by_method: dict[str, tuple[Drawing, float]] = {}
    for method, attribute, drawing, height in DRAWINGS:
        is_ours = getattr(type(encoding), method).__module__.startswith("locant.")
        if method not in encoding.methods() or (drawing is rotate.draw_rotated and not rotate.rotates(encoding)):
            continue
        if not attribute or (is_ours and hasattr(encoding, attribute)):
            drawing = partial(drawing, causal=causal) if drawing is bias.draw_bias else drawing
            by_method.setdefault(method, (drawing, height))
    return list(by_method.values()) or [(bias.draw_nothing, 5.6)]


def draw_explanation(explanation: Explanation, config: Mapping[str, Any], name: str) -> Figure:
    """Draw the wavelengths of a rotary model, with a row per type of layer. Draw other encodings like `locant.plot`."""
    rotary = [(layers.name, layers.rotary) for layers in explanation.layers if layers.rotary is not None]
    if not rotary:
        encoding = encoding_from_config(with_defaults(config), layer_type=explanation.layers[0].name)
        return draw(encoding, length=max(min(explanation.longest or 128, 128), 2))
    rows = [
        rotate.Wavelengths(
            name if kind is None else f"{name}, {kind}",
            [pair.wavelength / pair.stretch if pair.wavelength and pair.stretch else None for pair in one.pairs],
            [pair.wavelength for pair in one.pairs],
            {"trained": one.trained, "longest": one.length},
        )
        for kind, one in rotary
    ]
    return rotate.draw_wavelengths(rows, "without scaling", "with scaling")


def draw_extension(extension: Extension, name: str) -> Figure:
    """Draw the wavelengths before and after the extension of a context."""
    title = f"{name}: {extension.trained:,} to {extension.to:,} positions by {extension.method}"
    marks = {"trained": extension.trained, "longest": extension.to}
    return rotate.draw_wavelengths([rotate.Wavelengths(title, *extension.wavelengths, marks)], "before", "after")
