"""The positions of text, images and videos: ``(time, row, column)``, as vision-language models count.

Text has the same index on all three axes. An image or a video is a grid that begins where the text before it ended, and
text continues after it. The tokens of a grid are merged blocks of patches. Time may grow by a step other than one per
frame.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from locant.arguments import MAX_INT32, Real, one_of, real, short_repr, whole
from locant.errors import RangeError, ShapeError
from locant.positions.checks import to_tensors, token_count
from locant.positions.documents import PADDING, document_or_none, row_width

Part = int | tuple[Real, ...]
Parts = Sequence[Part] | Sequence[Sequence[Part]] | Sequence[Sequence[Sequence[Part]]]

Sizes = int | tuple[int, int, int, np.float32 | int]
EXAMPLE = "Positions.multimodal([5, (1, 4, 6), 3])"


@dataclass(frozen=True, kw_only=True)
class Counting:
    """The counting rules of a model: see `Positions.multimodal`."""

    merge: int
    merge_frames: int
    continue_from: str
    denominator: int

    def __post_init__(self) -> None:
        for name in ("merge", "merge_frames", "denominator"):
            object.__setattr__(self, name, whole(name, getattr(self, name), 1, remedy=f"{name}=1"))
        one_of("continue_from", self.continue_from, ("largest", "sides"))

    def document(self, parts: Sequence[Any]) -> Int[np.ndarray, "tokens 3"]:
        """Return the index of every token of one document."""
        sizes = [self._sizes(part) for part in parts]
        starts = self._starts(sizes)  # raises before an array gets too large
        indices = [self._indices(size) + start for size, start in zip(sizes, starts, strict=True)]
        return np.concatenate([np.zeros((0, 3), dtype=np.int64), *indices])

    def _starts(self, sizes: Sequence[Sizes]) -> list[int]:
        """Return the index at which each part begins. Raise if there are too many tokens or an index is too large."""
        starts, start, end, tokens = [], 0, 0, 0
        for size in sizes:
            frames, rows, columns, tick = size if isinstance(size, tuple) else (1, size, 1, 1)
            starts.append(start)
            if not rows:
                continue
            sides = max(rows, columns) * self.denominator
            times = int(type(tick)(frames - 1) * tick) + self.denominator
            tokens, end = tokens + frames * rows * columns, max(end, start + max(sides, times))
            start += sides if self.continue_from == "sides" else max(sides, times)
        for got, number in ((f"that reach position {end}", end), (f"of {tokens} tokens", tokens)):
            if number > MAX_INT32:
                raise RangeError(f"got parts {got}, expected 2**31 - 1 at most", "pass fewer parts")
        return starts

    def _sizes(self, part: Part) -> Sizes:
        """Return the number of tokens of a text, or the merged frames, rows, columns and frame step of a grid."""
        if not isinstance(part, tuple):
            return token_count("a number of tokens in parts", part, EXAMPLE)
        if len(part) not in (3, 4):
            got = f"got {short_repr(part)} in parts, expected (frames, rows, columns) or (frames, rows, columns, step)"
            raise ShapeError(got, EXAMPLE)
        frames, rows, columns = (token_count("a grid's size in parts", size, EXAMPLE) for size in part[:3])
        frames = frames // self.merge_frames if frames > 1 else frames
        rows, columns = (self._merge_side(size, part) for size in (rows, columns))
        step = part[3] if len(part) == 4 else 1
        step = real(
            "the step of a grid in parts", step, low=0, high=MAX_INT32, remedy="pass positions per frame, such as 2"
        )
        return (frames, rows, columns, self._tick(step)) if frames and rows and columns else 0

    def _indices(self, size: Sizes) -> Int[np.ndarray, "tokens 3"]:
        """Return the indices of a part that begins at 0."""
        if not isinstance(size, tuple):
            return np.repeat(np.arange(size)[:, None] * self.denominator, 3, axis=1)
        frames, rows, columns, tick = size
        times = (np.arange(frames, dtype=type(tick)) * tick).astype(np.int64)
        axes = [times, *(np.arange(side) * self.denominator for side in (rows, columns))]
        return np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 3)

    def _merge_side(self, size: int, part: tuple[Any, ...]) -> int:
        if size % self.merge:
            got = f"got a grid {short_repr(part)} in parts for blocks of {self.merge} x {self.merge} patches"
            raise RangeError(got, f"use rows and columns in multiples of {self.merge}, or another merge")
        return size // self.merge

    def _tick(self, step: Real) -> np.float32 | int:
        """Return the step between frames, in parts of a position.

        If positions are whole numbers, it is rounded to float32, as in models.
        """
        if self.denominator == 1:
            return np.float32(step)
        ticks = step * self.denominator
        if not math.isclose(ticks, round(ticks), rel_tol=1e-9):
            got = f"got a step of {step:g} positions per frame in parts, expected a multiple of 1/{self.denominator}"
            raise RangeError(got, "use another denominator")
        return round(ticks)


def fields_from_parts(parts: Any, counting: Counting, length: Any, padding: str, device: Any) -> dict[str, Any]:
    """Return the fields of `Positions` for one document, for several in one row, or for several rows."""
    one_of("padding", padding, ("right", "left"))
    rows = [[counting.document(document) for document in row] for row in _to_rows(parts)]
    width = row_width("parts", [sum(map(len, row)) for row in rows], length)
    index = np.zeros((len(rows), width, 3), dtype=np.int64)
    document = np.full((len(rows), width), PADDING, dtype=np.int64)
    order = np.zeros((len(rows), width), dtype=np.int64)
    for number, row in enumerate(rows):
        first = 0 if padding == "right" else width - sum(map(len, row))
        for document_number, tokens in enumerate(row):
            slots = slice(first, first + len(tokens))
            index[number, slots], document[number, slots] = tokens, document_number
            order[number, slots] = np.arange(len(tokens))
            first += len(tokens)
    index_tensor, documents, orders = to_tensors(device, index, document, order)
    return {
        "index": index_tensor,
        "document_or_none": document_or_none(documents),
        "order_or_none": orders,
        "min_index": 0,
        "max_index": int(index.max(initial=0)),
        "denominator": counting.denominator,
    }


def _to_rows(parts: Any) -> Iterator[list[Any]]:
    """Yield rows of documents. Lists are nested, and a tuple is a grid."""
    depth = _list_depth(parts)
    if depth is None:
        depth, parts = 1, []
    if depth not in (1, 2, 3):
        raise ShapeError(f"got {short_repr(parts)} for parts, expected lists of rows, of documents, of parts", EXAMPLE)
    yield from [[parts]] if depth == 1 else [parts] if depth == 2 else parts


def _list_depth(parts: Any) -> int | None:
    """Return the depth of nested lists, which must be equal everywhere, or ``None`` if the lists are empty."""
    if not isinstance(parts, list):
        return 0
    depths = {depth for part in parts if (depth := _list_depth(part)) is not None}
    if len(depths) > 1:
        got = f"got {short_repr(parts)} for parts, which mixes lists with numbers or grids"
        raise ShapeError(got, "use lists for documents and rows, tuples for grids: " + EXAMPLE)
    return 1 + depths.pop() if depths else None
