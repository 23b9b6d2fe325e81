"""Check the rows and the lengths with which a cache is reordered and truncated."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from locant.arguments import MAX_INT32, shape_error, whole
from locant.errors import RangeError, ShapeError
from locant.spelling import dtype_name
from locant.tensors import bounds, host_can_read, require_tensor


def require_numbers(name: str, x: Any, count: int | None, device: torch.device) -> None:
    """Raise unless `x` is an int64 vector of `count` numbers (``None``: any number) on the device of the cache."""
    require_tensor(name, x)
    if x.dtype != torch.int64 or x.device != device:
        got = f"got {name} of {dtype_name(x.dtype)} on {x.device}, expected int64 on {device}"
        raise ShapeError(got, f"{name}.to({str(device)!r}, torch.int64)")
    if x.ndim != 1 or count not in (None, len(x)):
        expected = "one dimension" if count is None else f"({count},)"
        raise shape_error(name, x, expected, "pass one number for each row")


def require_rows(rows: Any, held: int, device: torch.device) -> None:
    """Raise unless these are indices of rows of the cache. Values are checked if the host can read them."""
    require_numbers("rows", rows, None, device)
    low, high = bounds(rows)
    if low is not None and high is not None and len(rows) and not 0 <= low <= high < held:
        got = f"got rows with {low if low < 0 else high}, expected 0 to {held - 1}"
        raise RangeError(got, "use torch.arange(batch) for all rows in their order")


def check_lengths(length: Any, held: int | Tensor, batch: int, device: torch.device) -> Int[Tensor, " batch"]:
    """Return the number of tokens to keep in every row. Raise if a row has fewer and the host can read this."""
    if isinstance(length, Tensor):
        require_numbers("length", length, batch, device)
        lengths = length
    else:
        length = whole("length", length, 0, MAX_INT32, remedy="pass the number of tokens to keep")
        lengths = torch.full((batch,), length, device=device)
    if host_can_read(lengths) and (isinstance(held, int) or host_can_read(held)):
        outside = (lengths < 0) | (lengths > held)
        if bool(outside.any()):
            row = int(outside.nonzero()[0, 0])
            tokens = held if isinstance(held, int) else int(held.expand(batch)[row])
            got = f"got length {int(lengths[row])} for row {row}, which has {tokens}"
            raise RangeError(got, f"use a length from 0 to {tokens}")
    return lengths
