"""What constructors of positions accept, checked where it comes in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from locant.errors import RangeError, ShapeError

__all__ = ["bounds", "integers", "padding_mask", "require_count", "rows_of"]


def rows_of(lengths: Sequence[int] | Sequence[Sequence[int]]) -> list[list[int]]:
    """One list per row, from a list per row or the list of the only row."""
    nested = [[*row] for row in lengths if isinstance(row, Sequence)]
    flat = [number for number in lengths if not isinstance(number, Sequence)]
    if nested and flat:
        raise ShapeError(
            f"got lengths {lengths}, expected numbers or a list per row", "Positions.packed([[5, 3], [8]])"
        )
    return nested or [flat]


def require_count(name: str, value: object) -> None:
    """Raise unless `value` is an integer of 0 or more."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer, torch.SymInt)) or value < 0:
        raise RangeError(f"got {value!r} for {name}, expected an integer of 0 or more", "a length in tokens")


def integers(name: str, value: object, device: torch.device | str | None = None) -> Int[Tensor, "*shape"]:
    """`value` as int64; floats and booleans are refused rather than rounded."""
    tensor = torch.as_tensor(value, device=device)
    if tensor.numel() == 0:
        return tensor.long()
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ShapeError(f"got {name} of dtype {tensor.dtype}, expected integers", f"{name}.long()")
    return tensor.long()


def bounds(index: Tensor) -> tuple[int | None, int | None]:
    """Smallest and largest index, where the host can read them."""
    if torch.compiler.is_compiling() or index.device.type != "cpu":
        return None, None
    if index.numel() == 0:
        return 0, 0
    low, high = torch.aminmax(index)
    return int(low), int(high)


def padding_mask(value: object) -> Bool[Tensor, "batch seq"]:
    """A padding mask of ones and zeros as booleans."""
    mask = torch.atleast_2d(torch.as_tensor(value))
    if mask.ndim != 2:
        got = f"got an attention mask of shape {tuple(mask.shape)}, expected (batch, seq)"
        raise ShapeError(got, "the 2-D padding mask of the tokenizer")
    readable = mask.device.type == "cpu" and not torch.compiler.is_compiling()
    if readable and mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
        got = "got an attention mask with values other than 0 and 1"
        raise RangeError(got, "1 for real tokens and 0 for padding, not an additive mask")
    return mask.bool()
