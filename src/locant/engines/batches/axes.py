"""Check whether ids of several axes can belong to a sequence of texts, images and videos, without their grids.

Text has the same id on all axes. A grid begins like text and goes through columns, rows and frames. Text after a grid
continues from the grid's longer side, or from its largest id.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from locant.engines.batches.documents import documents_from_batch
from locant.engines.batches.finding import Batch, Finding, at
from locant.positions.batches import AXES, document_positions

Ids = Sequence[tuple[int, ...]]


def form_findings(batch: Batch) -> Iterator[Finding]:
    """Yield the first token of a row whose ids neither continue a text nor belong to a grid."""
    index = batch.index
    if index is None or index.ndim != 3 or index.shape[2] != AXES:
        return
    document = documents_from_batch(batch)
    numbers = torch.zeros(batch.shape, dtype=torch.int64) if document is None else document_positions(document)
    for row in range(batch.shape[0]):
        for number in numbers[row].unique_consecutive().tolist():
            slots = ((numbers[row] == number) & batch.real[row]).nonzero()[:, 0]
            ids = [tuple(each) for each in index[row, slots].tolist()]
            if (token := find_misplaced_token(ids)) is not None:
                slot = int(slots[token])
                wrong = f"position_ids {at(row, slot)} are (time, row, column) {ids[token]}"
                before = f" after {ids[token - 1]}" if token else ""
                remedy = "compute them with the model's get_rope_index"
                yield Finding("images", f"{wrong}{before}, which no text, image or video has", remedy, row, slot)
                return


def find_misplaced_token(ids: Ids) -> int | None:
    """Return the first token that cannot belong to a sequence of texts and grids, or ``None``.

    >>> find_misplaced_token([(0, 0, 0), (1, 1, 1), (1, 1, 2), (1, 2, 1), (1, 2, 2), (3, 3, 3)])
    >>> find_misplaced_token([(0, 0, 0), (1, 1, 1), (1, 1, 2), (1, 2, 1), (1, 2, 2), (5, 5, 5)])
    5
    """
    token, allowed = 0, {ids[0][0]} if ids else set[int]()
    while token < len(ids):
        start = ids[token][0]
        if ids[token] != (start,) * AXES or start not in allowed:
            return token
        columns, rows, frames = _grid_at(ids, token)
        token += columns * rows * frames
        side = start + max(columns, rows)
        allowed = {side, max(side, ids[token - 1][0] + 1)}
    return None


def _grid_at(ids: Ids, begin: int) -> tuple[int, int, int]:
    """Return the columns, rows and frames of the largest grid that begins at a token, or 1, 1 and 1 for text."""
    time, row, column = ids[begin]
    columns = 1
    while ids[begin + columns : begin + columns + 1] == [(time, row, column + columns)]:
        columns += 1
    rows, next_row = 1, begin + columns
    while ids[next_row : next_row + columns] == [(time, row + rows, column + n) for n in range(columns)]:
        rows, next_row = rows + 1, next_row + columns
    size, frames, next_frame = rows * columns, 1, next_row
    cells = [each[1:] for each in ids[begin:next_row]]
    while [each[1:] for each in ids[next_frame : next_frame + size]] == cells:
        times = {each[0] for each in ids[next_frame : next_frame + size]}
        if len(times) > 1 or times.pop() < ids[next_frame - 1][0]:
            break
        frames, next_frame = frames + 1, next_frame + size
    has_no_time = ids[next_frame - 1][0] == time  # fast frames may share an id, but not all of them
    return columns, rows, 1 if has_no_time else frames
