"""Pictures of published models: what `explain` and `extend` found, as wavelengths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from locant.checkpoints.explanation import Explanation
from locant.checkpoints.extension import Extension
from locant.figures.canvas import LIGHT, Theme
from locant.figures.plot import draw
from locant.figures.wavelengths import Wavelengths, draw_wavelengths
from locant.models import encoding_from_config, with_defaults

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_explanation", "draw_extension"]


def draw_explanation(explanation: Explanation, config: Mapping[str, Any], name: str, theme: Theme = LIGHT) -> Figure:
    """The wavelengths of a rotary model, one row per kind of layer; other encodings as `locant.plot` does."""
    rotary = [(layers.name, layers.rotary) for layers in explanation.layers if layers.rotary is not None]
    if not rotary:
        encoding = encoding_from_config(with_defaults(config), layer_type=explanation.layers[0].name)
        return draw(encoding, length=max(min(explanation.longest or 128, 128), 2), theme=theme)
    rows = [
        Wavelengths(
            title=name if kind is None else f"{name}, {kind}",
            before=[pair.wavelength / pair.stretch if pair.wavelength and pair.stretch else None for pair in one.pairs],
            after=[pair.wavelength for pair in one.pairs],
            marks={"trained": one.trained, "longest": one.length},
        )
        for kind, one in rotary
    ]
    return draw_wavelengths(rows, ("without a scaling", "as it is"), theme)


def draw_extension(extension: Extension, name: str) -> Figure:
    """The wavelengths before and after a context was extended."""
    before, after = ([pair.wavelength for pair in each.pairs] for each in (extension.before, extension.after))
    title = f"{name}: {extension.trained:,} to {extension.to:,} positions by {extension.method}"
    marks = {"trained": extension.after.trained, "longest": extension.after.length}
    return draw_wavelengths([Wavelengths(title=title, before=before, after=after, marks=marks)], ("before", "after"))
