"""What callers pass as arrays of integers, checked: raw errors of NumPy and torch name no cause."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Integer
from torch import Tensor

from locant.errors import ShapeError

__all__ = ["one_axis"]

INTEGERS = frozenset(
    (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)
)


def one_axis(name: str, values: Any) -> Integer[np.ndarray, " n"]:
    """One axis of integers, sharing the memory of arrays and of tensors on the host."""
    remedy = "the array that Tokenizer.encode returns" if name == "ids" else "a list of offsets"
    array = _array(name, values, remedy)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ShapeError(
            f"got {name} of shape {array.shape} and dtype {array.dtype}, expected one axis of integers", remedy
        )
    return array if array.size else array.astype(np.int64)


def _array(name: str, values: Any, remedy: str) -> np.ndarray:
    if isinstance(values, Tensor):
        if values.dtype not in INTEGERS or values.layout != torch.strided or values.is_meta:
            what = f"{values.dtype} tensor on {values.device}, {values.layout}"
            raise ShapeError(f"got {name} as a {what}, expected one axis of integers", remedy)
        values = values.detach().cpu().numpy()
    if isinstance(values, np.ma.MaskedArray):
        raise ShapeError(f"got {name} as a masked array, expected one axis of integers", "values.compressed()")
    try:
        return np.asarray(values)
    except (ValueError, TypeError, OverflowError):
        raise ShapeError(f"got {name} of uneven shape, expected one axis of integers", remedy) from None
