"""`locant plot`: an encoding by name, into a picture on disk."""

from __future__ import annotations

from pathlib import Path

import torch

from locant.figures.canvas import require_matplotlib, require_suffix, save
from locant.figures.choice import default_length, draw, encoding_to_draw

__all__ = ["draw_to_file"]


def draw_to_file(
    name: str, path: Path | None = None, *, length: int | None = None, seed: int = 0, **options: int | float | None
) -> dict[str, object]:
    """Draw a fresh encoding of this name; returns what was drawn, and where it lies.

    Args:
        name: one of the catalog.
        path: ends in .png, .svg or .pdf; default: the name, as .png, in the current folder.
        length: positions; default: enough to see the pattern.
        seed: of the random weights that a table starts with.
        options: of the encoding's constructor; ``None`` for those that were not given.
    """
    require_matplotlib()
    path = Path(f"{name}.png") if path is None else path
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoding = encoding_to_draw(name, length=length, **options)
    figure = draw(encoding, length=length)
    require_suffix(path)
    save(figure, path)
    length = default_length(encoding) if length is None else length
    return {"encoding": name, "built": repr(encoding), "length": length, "seed": seed, "figure": str(path)}
