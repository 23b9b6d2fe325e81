"""Draw position vectors that are added to embeddings, their similarities, and word vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from locant.figures import SIZES
from locant.figures.canvas import LIGHT, SIGNED, Theme, evenly_spaced, range_of
from locant.figures.rotate import wavelength_text
from locant.positions import PositionEncoding, Positions
from locant.positions.grids import Grid
from locant.spelling import spell

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

TOKENS, ADDED = "position (tokens)", "added to the embedding"


def draw_sinusoidal(part: Figure | SubFigure, encoding: Any, length: int, theme: Theme) -> None:
    """Draw all dimensions at all positions, a few dimensions as curves, and the product of each pair of positions."""
    vectors = encoding.vectors(Positions.arange(length))[0]
    top, bottom = part.subfigures(2, 1, squeeze=False, height_ratios=(3, 3.4))[:, 0]
    theme.set_title(part, f"Sinusoidal positions, d_model {encoding.d_model}, base {spell(encoding.base, 10)}")
    _table(top.subplots(), vectors, theme, reach=encoding.scale)
    left, right = bottom.subplots(1, 2, width_ratios=(1.5, 1))
    for number, pair in enumerate(evenly_spaced((encoding.d_model + 1) // 4 + 1, 5)):
        wave = wavelength_text(float(encoding.angles.frequencies[pair]))
        column = _sine_column(encoding, pair)
        theme.curve(left, vectors[:, column], number, label=f"{column}: {wave}")
    theme.style_axes(left, title="A few sine dimensions", x=TOKENS, y="value", grid=True)
    below = {"loc": "upper left", "bbox_to_anchor": (0, -0.16), "ncols": 3, "columnspacing": 1.2}
    theme.legend(left, title="dimension: wavelength in tokens", **below)
    product = (vectors @ vectors.T).numpy()
    scale = range_of(min(float(product.min()), 0.0), float(product.max()))
    theme.heat_map(right, product, *scale, "Product of two positions", TOKENS, TOKENS, "PE · PE")
    right.set_box_aspect(1)


def _sine_column(encoding: Any, pair: int) -> int:
    """Return the dimension with the sine of a pair. The pair's other dimension is the cosine."""
    sine_is_first = encoding.first == "sine"
    if encoding.layout == "interleaved":
        return 2 * pair + (0 if sine_is_first else 1)
    return pair + (0 if sine_is_first else (encoding.d_model + 1) // 2)


def draw_table(part: Figure | SubFigure, encoding: PositionEncoding, length: int, theme: Theme) -> None:
    """Draw the vector that is added at each position, and the similarity of each pair of positions."""
    width = getattr(encoding, "d_model", SIZES["d_model"])
    length = min(length, getattr(encoding, "max_seq_len", length))
    with torch.no_grad():
        vectors = encoding.embed(torch.zeros(1, length, width), Positions.arange(length))[0].float()
    unit = torch.nn.functional.normalize(vectors, dim=1)
    left, right = part.subplots(1, 2)
    reach = float(vectors.abs().quantile(0.995)) if vectors.numel() < 2**24 else float(vectors.abs().max())
    _table(left, vectors, theme, reach=max(reach, 1e-12))
    labels = "Similarity of two positions", TOKENS, TOKENS, "cosine"
    theme.heat_map(right, (unit @ unit.T).numpy(), SIGNED, -1.0, 1.0, *labels)
    for axes in (left, right):
        axes.set_box_aspect(1)
    rows = getattr(encoding, "max_seq_len", None)
    name = type(encoding).__name__ if rows is None else f"Learned positions: {rows} rows"
    theme.set_title(part, f"{name}, d_model {width}")


def draw_grid(part: Figure | SubFigure, encoding: Any, length: int, theme: Theme) -> None:
    """Draw the similarity of some cells to all cells, in the table and in a table of twice the size."""
    if encoding.height == 1:
        return draw_table(part, encoding, min(length, encoding.width), theme)
    for side, scale in zip(part.subfigures(1, 2, squeeze=False)[0], (1, 2), strict=True):
        height, width = scale * encoding.height, scale * encoding.width
        table = encoding.table([Grid((height, width), encoding.prefix)]).detach()[encoding.prefix :]
        unit = torch.nn.functional.normalize(table.float(), dim=1)
        rows, columns = ([size * part // 6 for part in (1, 3, 5)] for size in (height, width))
        maps = side.subplots(3, 3, sharex=True, sharey=True)
        for (down, across), axes in np.ndenumerate(maps):
            similarity = unit @ unit[rows[down] * width + columns[across]]
            title, x, y = f"{rows[down]}, {columns[across]}", "column" if down == 2 else "", "" if across else "row"
            theme.heat_map(axes, similarity.view(height, width).numpy(), SIGNED, -1.0, 1.0, title, x, y)
            axes.set_aspect("equal")
        theme.color_bar(maps[0, 0].images[0], "cosine", ax=maps, fraction=0.05, pad=0.03)
        theme.set_title(side, f"The table, {height}x{width}" if scale == 1 else f"{height}x{width}, {encoding.mode}")
    theme.set_title(
        part, f"LearnedGrid, d_model {encoding.d_model}: similarity of all cells to the cell at row, column"
    )
    return None


def draw_convolution(part: Figure | SubFigure, encoding: Any, length: int, theme: Theme) -> None:
    """Draw the vectors that one token adds to its neighbours, and the lengths of these vectors."""
    generator, reach = torch.Generator().manual_seed(0), encoding.kernel_size
    x = encoding.weight.new_zeros(2, 2 * reach + 1, encoding.d_model)
    x[0, reach] = torch.randn(encoding.d_model, generator=generator)
    with torch.no_grad():
        with_token, without = (encoding.embed(x, Positions.arange(x.shape[1], device=x.device)) - x).float()
    added = with_token - without
    theme.set_title(part, f"Convolutional positions, d_model {encoding.d_model}, kernel of {encoding.kernel_size}")
    left, right = part.subplots(1, 2)
    offsets = (-reach - 0.5, reach + 0.5)
    largest = max(float(added.abs().max()), 1e-12)
    labels = "Vectors that one token adds to its neighbours", "tokens after it", "dimension", ADDED
    image = theme.heat_map(left, added.numpy().T, SIGNED, -largest, largest, *labels)
    image.set_extent((*offsets, encoding.d_model - 0.5, -0.5))
    right.plot(range(-reach, reach + 1), added.norm(dim=1).numpy(), color=theme.stroke(0)[0], linewidth=1.6)
    right.set_xlim(*offsets)
    theme.style_axes(right, title="Lengths of these vectors", x="tokens after it", y="length of the vector", grid=True)
    for axes in (left, right):
        axes.set_box_aspect(1)


def _table(axes: Axes, vectors: Tensor, theme: Theme, *, reach: float) -> None:
    labels = "Every dimension of every position", TOKENS, "dimension", ADDED
    theme.heat_map(axes, vectors.numpy().T, SIGNED, -reach, reach, *labels)


def draw_similarity(words: Sequence[str], similarity: Float[Tensor, "words words"], theme: Theme = LIGHT) -> Figure:
    """Draw a heat map of the cosines of all pairs of words, in the order of the list."""
    side = max(3.2, 0.32 * len(words) + 1.4)
    figure = theme.blank(side + 1.0, side)
    axes = figure.subplots()
    theme.heat_map(axes, similarity.numpy(), SIGNED, -1.0, 1.0, title="Similarity of two words", bar="cosine")
    axes.set_xticks(range(len(words)), words, rotation=90)
    axes.set_yticks(range(len(words)), words)
    axes.set_box_aspect(1)
    return figure


def draw_flat_map(words: Sequence[str], places: Float[Tensor, "words 2"], theme: Theme = LIGHT) -> Figure:
    """Draw the words at their coordinates in the plane."""
    figure = theme.blank(6.4, 5.4)
    axes = figure.subplots()
    color, _, marker = theme.stroke(0)
    axes.scatter(places[:, 0], places[:, 1], s=18, color=color, marker=marker)
    middle = float(places[:, 0].min() + places[:, 0].max()) / 2
    for word, (x, y) in zip(words, places.tolist(), strict=True):  # text grows inwards, to stay inside the frame
        offset, side = ((-4, 3), "right") if x > middle else ((4, 3), "left")
        axes.annotate(word, (x, y), xytext=offset, textcoords="offset points", ha=side, fontsize=9, color=theme.ink)
    axes.margins(0.12)
    axes.set_aspect("equal", adjustable="datalim")  # both directions have the same scale
    theme.style_axes(axes, title="Words in two dimensions: similar words are near", x="", y="", grid=True)
    axes.tick_params(length=0, labelbottom=False, labelleft=False)
    return figure
