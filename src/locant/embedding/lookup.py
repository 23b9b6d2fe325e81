"""Checks that every table look-up of this room makes before it reads a row."""

from __future__ import annotations

import torch
from torch import Tensor

from locant.errors import RangeError, ShapeError

__all__ = ["require_ids"]


def require_ids(ids: Tensor, num_rows: int, layer: str, limit: str, device: torch.device) -> None:
    """Raise unless `ids` are integers in ``0 .. num_rows - 1`` on `device`.

    Reads the smallest and largest id, which on an accelerator waits for it; without that a wrong id would end in a
    device-side assert that poisons the process. Not while compiling or capturing a graph: nothing may be read there.
    """
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ShapeError(f"got ids of dtype {ids.dtype} for {layer}, expected integers", "ids.long()")
    if ids.device != device:
        raise ShapeError(f"got ids on {ids.device}, {layer} is on {device}", f"ids.to({str(device)!r})")
    if torch.compiler.is_compiling() or ids.device.type == "meta" or not ids.numel():
        return
    if ids.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return
    low, high = torch.aminmax(ids)
    if int(low) < 0 or int(high) >= num_rows:
        place = tuple(((ids < 0) | (ids >= num_rows)).nonzero()[0].tolist())
        raise RangeError(
            f"got id {int(ids[place])} at {place}, {layer} has {limit}={num_rows}",
            f"ids from 0 to {num_rows - 1}, from the tokenizer the table was made for",
        )
