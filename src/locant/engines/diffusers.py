"""The rotary encodings of the transformers of `diffusers`, and the positions of image and video tokens.

`locant.engines.diffusers_rows` has one row for each class, which describes its code. `diffusers` itself is not needed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from locant.arguments import Real, entries, real, short_repr, whole
from locant.checkpoints.config_source import CONFIG, read_json
from locant.engines.diffusers_rows import TRANSFORMERS, Picture, Transformer, head_dim_of
from locant.errors import InputError, RangeError
from locant.models.config_values import Config, flag_at, number
from locant.positions import Pairs, Positions, Rotary
from locant.positions.angles import AngleMode
from locant.positions.scaling import Scaling, Unscaled

ROTATES = "use_rotary_positional_embeddings"


def encoding_from_diffusers(
    config_or_folder: Config | str | Path,
    *,
    scalings: Sequence[Scaling | None] | None = None,
    angles: AngleMode = "exact",
) -> Rotary:
    """Return the rotary encoding of a transformer of `diffusers`.

    Args:
        config_or_folder: its configuration, a ``config.json``, or the folder of a pipeline or of its transformer.
        scalings: a scaling or ``None`` for each axis, which replaces the scalings of the model. Use `RIFLEx` for
            frames, and `DyPE` for rows and columns.
        angles: as in `Rotary`.

    Raises:
        InputError: the class is unknown, has no rotary positions, or has positions that `Rotary` cannot express.

    >>> encoding_from_diffusers({"_class_name": "WanTransformer3DModel", "attention_head_dim": 128})
    Rotary(head_dim=128, base=10000, sections=(22, 21, 21), axial=True, layout='interleaved', angles='exact')
    """
    config = _config(config_or_folder)
    row = transformer_of(config)
    if row.refused or not flag_at(config, ROTATES, default=True):
        got = f"got {config['_class_name']}, which {row.refused or f'has no rotary positions without {ROTATES}'}"
        raise InputError(got, "use the encoding that docs/guides/diffusers.md names for it")
    base = number(row.base[0], config.get(*row.base), above=0) if isinstance(row.base, tuple) else row.base
    dims = row.dims(config)
    chosen = scalings if scalings is not None else row.scalings(config) if row.scalings else [None] * len(dims)
    by_axis = [Unscaled() if each is None else each for each in entries("scalings", chosen, "pass one for each axis")]
    if len(by_axis) != len(dims) or not all(isinstance(each, Scaling) for each in by_axis):
        got = f"got {short_repr(scalings)} for scalings, expected one of locant.scaling, or None, for each axis"
        raise RangeError(got, f"scalings={(None,) * len(dims)}")
    head_dim, same = head_dim_of(config, sum(dims)), len({*by_axis}) == 1
    options: dict[str, Any] = {"pairs": _pairs(row.layout, dims, by_axis, base)}
    if same and row.layout in ("interleaved", "half"):
        sections = [each // 2 for each in dims] if len(dims) > 1 else None
        options = {"rotary_dim": sum(dims), "layout": row.layout, "sections": sections, "axial": sections is not None}
    return Rotary(head_dim, base=base, scaling=by_axis[0] if same else None, angles=angles, **options)


def positions_from_diffusers(
    config_or_folder: Config | str | Path,
    frames: int = 1,
    rows: int = 1,
    columns: int = 1,
    *,
    text: int = 0,
    fps: Real = 24.0,
) -> Positions:
    """Return the positions of an image or video, and of the text that the model rotates with it, in the model's order.

    Args:
        frames, rows, columns: the number of tokens (patches) on each axis. Sound has only columns.
        text: the number of text tokens.
        fps: frames per second of the video, for models that count time (Cosmos).

    Raises:
        RangeError: a number is out of range, or `text` is given for a model that does not rotate text.
        InputError: the transformer is unknown, or its configuration cannot be read.

    >>> positions_from_diffusers({"_class_name": "FluxTransformer2DModel"}, rows=1, columns=2, text=1).index.tolist()
    [[[0, 0, 0], [0, 0, 0], [0, 0, 1]]]
    """
    config = _config(config_or_folder)
    row = transformer_of(config)
    t, h, w = (
        whole(name, size, 1, remedy=f"{name}=1")
        for name, size in (("frames", frames), ("rows", rows), ("columns", columns))
    )
    rate = Fraction(str(real("fps", fps, above=0, remedy="fps=24")))
    picture = Picture(t, h, w, whole("text", text, 0, remedy="text=0"), rate)
    if text and row.text is None:
        got = f"got text={text} for {config['_class_name']}, which does not rotate text with the image"
        raise RangeError(got, "text=0, for the tokens of the image alone")
    places = row.grid(config, picture)
    sizes = {"t": t, "h": h, "w": w}
    sides = [[Fraction(places.get(axis, int)(place)) for place in range(size)] for axis, size in sizes.items()]
    over = math.lcm(*(place.denominator for side in sides for place in side))
    grids = torch.meshgrid(*(torch.tensor([int(place * over) for place in side]) for side in sides), indexing="ij")
    cells = {axis: grid.flatten() for axis, grid in zip(sizes, grids, strict=True)}
    words = torch.arange(picture.text) + (row.text_from if isinstance(row.text_from, int) else row.text_from(picture))
    axes = row.axes[-len(row.dims(config)) :]
    image_index = torch.stack([cells.get(axis, torch.zeros_like(cells["t"])) for axis in axes], dim=-1)
    text_index = torch.stack([words * over * (axis in (row.text or "")) for axis in axes], dim=-1)
    index = torch.cat([image_index, text_index] if row.text_last else [text_index, image_index])
    return Positions.of(index[None] if len(axes) > 1 else index[None, :, 0], denominator=over)


def _pairs(layout: str, dims: Sequence[int], scalings: Sequence[Scaling], base: float) -> Pairs:
    """Return pairs with a ladder and a scaling for each axis, or with one ladder for all axes of the head."""
    ladders = [sum(dims) if layout == "mrope" else each for each in dims]
    places = [(axis, rung) for axis, each in enumerate(dims) for rung in range(each // 2)]
    table = Pairs.of(sum(dims), layout="half" if layout in ("half", "mrope") else "interleaved").dims
    if layout == "in turns":
        places.sort(key=lambda place: place[1])
    elif layout == "mrope":
        turns = enumerate(pair % 3 for pair in range(len(table)))
        places = [(axis if pair < 3 * (dims[axis] // 2) else 0, pair) for pair, axis in turns]
    elif layout == "half of each":
        starts = [*itertools.accumulate(dims, initial=0)]
        table = [(starts[axis] + rung, starts[axis] + rung + dims[axis] // 2) for axis, rung in places]
    axes = [axis for axis, _ in places]
    if len({*scalings}) == 1:
        return Pairs(dims=table, axes=axes, rungs=[(ladders[axis], rung) for axis, rung in places])
    if any(each.effective_attention_factor != 1 for each in scalings):
        raise RangeError(
            "got scalings that multiply cosines of only some axes, which is not a rotation", "DyPE, RIFLEx"
        )
    by_axis = [each.frequencies(dim, base) for each, dim in zip(scalings, ladders, strict=True)]
    return Pairs(dims=table, axes=axes, inv_freq=[float(by_axis[axis][rung]) for axis, rung in places])


def transformer_of(config: Config) -> Transformer:
    """Return the row for the class of a configuration."""
    name = config.get("_class_name")
    if not isinstance(name, str) or name not in TRANSFORMERS:
        got = f"got {short_repr(name)} for _class_name, no transformer of diffusers whose rotary positions are known"
        raise InputError(got, "use one of locant.engines.diffusers_rows.TRANSFORMERS")
    return TRANSFORMERS[name]


def _config(config_or_folder: Config | str | Path) -> Config:
    if isinstance(config_or_folder, Mapping):
        return config_or_folder
    if not isinstance(config_or_folder, (str, Path)):
        got = f"got {short_repr(config_or_folder)}, expected a configuration of diffusers, or a path"
        raise InputError(got, "transformer.config, or pass the folder of a pipeline")
    path = Path(config_or_folder)
    path = path / "transformer" if (path / "transformer").is_dir() else path
    return read_json(path / CONFIG if path.is_dir() else path)
