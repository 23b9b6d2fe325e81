"""The kind of figure that `locant.plot` returns: one that a notebook shows, without pyplot and without a magic word.

In a file of its own, as matplotlib is imported with the first picture.
"""

from __future__ import annotations

from io import BytesIO

from matplotlib.figure import Figure

__all__ = ["Drawing"]


class Drawing(Figure):
    """A figure that Jupyter asks for its picture; matplotlib's own are shown once pyplot was imported.

    >>> Drawing()._repr_png_()[1:4]
    b'PNG'
    """

    def _repr_png_(self) -> bytes:
        image = BytesIO()
        self.savefig(image, format="png", facecolor=self.get_facecolor())
        return image.getvalue()
