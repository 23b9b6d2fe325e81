"""Checks and conversions of the arguments of `Positions`' constructors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from locant.arguments import MAX_INT32, entries, shape_error, short_repr, whole
from locant.errors import LocantError, RangeError, ShapeError
from locant.spelling import dtype_name
from locant.tensors import has_values, host_can_read, readable_bounds

AXES = "(batch, seq) or (batch, seq, axes)"


def token_count(name: str, value: Any, remedy: str = "pass a length in tokens") -> int:
    """Return a checked number of tokens or rows. A graph has no upper limit, because a limit would become a guard."""
    return whole(name, value, 0, None if torch.compiler.is_compiling() else MAX_INT32 + 1, remedy=remedy)


def check_max_index(value: Any) -> int | None:
    """Return a checked bound of the index, or ``None``."""
    remedy = "use a bound of 2**31 - 1 or less, or None"
    return None if value is None else whole("max_index", value, -MAX_INT32, remedy=remedy)


def to_device(value: Any) -> torch.device | None:
    """Convert the name of a device to a device."""
    if value is None or isinstance(value, torch.device):
        return value
    try:
        return torch.device(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RangeError(f"got {short_repr(value)} for device, expected a device of torch", "device='cpu'") from error


def to_tensors(device: Any, *arrays: np.ndarray) -> tuple[Tensor, ...]:
    """Convert arrays to tensors on this device."""
    return tuple(torch.from_numpy(array).to(to_device(device) or "cpu") for array in arrays)


def require_bounds(*bounds: int | None) -> None:
    """Raise `RangeError` if positions with these bounds do not fit 32 bits."""
    for bound in bounds:
        if bound is not None and abs(bound) > MAX_INT32:
            got = f"got position {bound}, expected at most 2**31 - 1 = {MAX_INT32} in size"
            raise RangeError(got, "Positions.packed(lengths), which counts each document from 0")


def require_index(index: object) -> None:
    """Raise an error if the index that a caller passed to `Positions` itself has the wrong type or shape."""
    if isinstance(index, Tensor):
        if index.ndim not in (2, 3) and has_values(index):
            raise shape_error("index", index, AXES, "Positions.of(index)")
    elif type(index) in (int, float, str, list, tuple, range, np.ndarray):
        remedy = f"Positions.arange({index})" if type(index) is int else "Positions.of(index)"
        raise LocantError(f"got {short_repr(index)} for the index of Positions, expected a tensor", remedy)


def to_rows(name: str, lengths: Sequence[int] | Sequence[Sequence[int]]) -> list[list[int]]:
    """Return one list per row, from a list per row or from the list of a single row."""
    rows = entries(name, lengths, "[5, 3], or [[5, 3], [8]]")
    nested = [[*row] for row in rows if isinstance(row, Sequence)]
    flat = [number for number in rows if not isinstance(number, Sequence)]
    if nested and flat:
        got = f"got {name} {short_repr(lengths)}, expected numbers or a list per row"
        raise ShapeError(got, "[[5, 3], [8]]")
    return [[token_count(f"an entry of {name}", number) for number in row] for row in nested or [flat]]


def to_int64(name: str, value: object, device: torch.device | str | None = None) -> Int[Tensor, "*shape"]:
    """Convert `value` to int64. Raise an error for floats and booleans instead of rounding them."""
    tensor = _as_tensor(name, value, device)
    if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool):
        raise ShapeError(f"got {name} of dtype {dtype_name(tensor.dtype)}, expected integers", f"{name}.long()")
    if tensor.dtype == torch.uint64 and host_can_read(tensor) and bool((tensor.long() < 0).any()):
        raise RangeError(f"got {name} of 2**63 or more, expected {MAX_INT32} at most", "count from 0")
    return tensor.long()


def to_index(value: object) -> Int[Tensor, "batch seq"] | Int[Tensor, "batch seq axes"]:
    """Return an index in new memory, because the caller may later write into the tensor. Drop a single axis."""
    index = to_int64("index", value).clone()
    index = index[None] if index.ndim == 1 else index
    if index.ndim not in (2, 3):
        raise shape_error("index", index, AXES, "Positions.of([[0, 1, 2]])")
    return index.squeeze(2) if index.ndim == 3 and index.shape[2] == 1 else index


def to_lengths(name: str, value: object, device: torch.device | None) -> Int[Tensor, " batch"]:
    """Convert `value` to one length per row."""
    lengths = to_int64(name, value, device)
    if lengths.ndim != 1:
        raise shape_error(name, lengths, "(batch,), one number per row", f"{name}[:, 0]")
    return lengths


def to_row(name: str, value: object, index: Tensor) -> Int[Tensor, "batch seq"] | None:
    """Convert `value` to one integer for every token of `index`, in new memory. Return ``None`` for ``None``."""
    if value is None:
        return None
    row = torch.atleast_2d(to_int64(name, value, index.device)).clone()
    if row.shape != index.shape[:2]:
        raise shape_error(name, row, f"{tuple(index.shape[:2])}, as the index has", f"pass one {name} for every token")
    return row


def padding_mask(value: object) -> tuple[Int[Tensor, "batch seq"], bool | None]:
    """Convert a padding mask to ones and zeros in int64.

    Also return whether it holds ones alone, or ``None`` if the host cannot read it.
    """
    mask = _as_tensor("attention_mask", value)
    mask = mask if mask.ndim > 1 else mask.reshape(1, -1)
    if mask.ndim != 2:
        raise shape_error("attention_mask", mask, "(batch, seq)", "pass the 2-D padding mask of the tokenizer")
    if not host_can_read(mask):
        return (mask != 0).long(), None
    if mask.dtype not in (torch.int64, torch.bool) and not bool(((mask == 0) | (mask == 1)).all()):
        raise _not_a_padding_mask()
    real = mask.long()
    low, high = readable_bounds(real)
    if not 0 <= low <= high <= 1:
        raise _not_a_padding_mask()
    return real, low == 1 or not real.numel()


def _not_a_padding_mask() -> RangeError:
    remedy = "use attention_mask == 0 for an additive mask, or tokenizer(...).attention_mask"
    return RangeError("got an attention_mask with values other than 0 and 1", remedy)


def _as_tensor(name: str, value: Any, device: torch.device | str | None = None) -> Tensor:
    if isinstance(value, Tensor) and device is None:
        return value
    try:
        if isinstance(value, (list, tuple)) and any(isinstance(row, np.ndarray) for row in value):
            value = np.array(value)  # torch warns that converting a list of arrays is slow
        if isinstance(value, np.ndarray) and (not value.flags.writeable or min(value.strides, default=0) < 0):
            value = value.copy()  # torch warns about read-only arrays (mapped files) and rejects reversed ones
        return torch.as_tensor(value, device=device)
    except (TypeError, ValueError, RuntimeError) as error:  # strings, rows of different lengths, more than 64 bits
        got = f"got {short_repr(value)} for {name}, expected integers in rows of one length"
        raise ShapeError(got, _remedy(value)) from error


def _remedy(value: Any) -> str:
    """Return the remedy for a value that torch cannot convert to a tensor of integers."""
    entries = value if isinstance(value, (list, tuple)) else [value]
    if any(isinstance(entry, str) for entry in entries):
        return "Tokenizer.encode(text)"
    if all(isinstance(entry, (list, tuple, np.ndarray, Tensor)) and np.ndim(entry) for entry in entries) and entries:
        lengths = short_repr([[len(row)] for row in entries])
        return f"torch.nn.utils.rnn.pad_sequence, with positions=Positions.packed({lengths})"
    return "pass a tensor of integers"
