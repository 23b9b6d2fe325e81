"""Check whether the host can read a tensor's values and whether torch can compute with them, and find their bounds.

Tensors in a compiled graph, samples of `torch.func.vmap`, fake tensors and meta tensors have a shape but no values.
Reading a value on an accelerator waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from locant.arguments import short_repr
from locant.errors import RangeError, Remedy, ShapeError
from locant.kernels.transforms import is_batched
from locant.spelling import dtype_name

FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""The dtypes in which this package computes."""

FLOAT64 = {"cpu": True, "cuda": True, "meta": True}
"""The types of devices, with true if they support float64. `has_float64` tests every other type once and adds it."""


def has_float64(device: torch.device) -> bool:
    """Return whether a device computes in float64. Apple's GPUs and some NPUs do not."""
    if device.type not in FLOAT64:
        try:
            FLOAT64[device.type] = bool(torch.ones(1, dtype=torch.float64, device=device).add(1).eq(2).item())
        except (TypeError, RuntimeError):
            FLOAT64[device.type] = False
    return FLOAT64[device.type]


def has_values(tensor: Tensor) -> bool:
    """Return whether the tensor has values. Tensors in a graph or under `vmap`, fake and meta tensors do not."""
    if torch.compiler.is_compiling() or tensor.is_meta:
        return False
    return not (isinstance(tensor, FakeTensor) or is_batched(tensor))


def host_can_read(tensor: Tensor) -> bool:
    """Return whether the host can read the values without waiting for a device or fixing them in a graph."""
    return tensor.is_cpu and has_values(tensor)


def bounds(tensor: Tensor) -> tuple[int | None, int | None]:
    """Return the smallest and the largest integer: ``None`` if the host cannot read them, 0 if the tensor is empty."""
    return readable_bounds(tensor) if host_can_read(tensor) else (None, None)


def readable_bounds(tensor: Tensor) -> tuple[int, int]:
    """Return the smallest and the largest integer of a tensor that the host can read, or 0 if it is empty."""
    if tensor.numel() == 0:
        return 0, 0
    low, high = torch.aminmax(tensor)
    return int(low), int(high)


def require_tensor(name: str, x: Any) -> None:
    """Raise unless this is a tensor. Arrays and lists have methods with the same names that do something else."""
    if not isinstance(x, Tensor):
        raise ShapeError(f"got {name} of type {type(x).__name__}, expected a tensor", f"torch.as_tensor({name})")


def as_dtype(dtype: Any, allowed: Iterable[torch.dtype] = FLOATING) -> torch.dtype:
    """Return the torch dtype with this name. Raise `RangeError` if it is not allowed.

    >>> as_dtype("fp32"), as_dtype("torch.bfloat16"), as_dtype(torch.float16)
    (torch.float32, torch.bfloat16, torch.float16)
    """
    dtype_by_name = {dtype_name(each): each for each in allowed}
    if (named := dtype_name(dtype)) not in dtype_by_name:
        expected = f"expected one of {', '.join(dtype_by_name)}"
        raise RangeError(f"got {short_repr(dtype)} for dtype, {expected}", Remedy(dtype="float32"))
    return dtype_by_name[named]


def require_arithmetic(name: str, x: Any) -> None:
    """Raise unless this is a floating-point tensor of 16 bits or more. torch cannot compute with 8-bit floats."""
    require_tensor(name, x)
    if not x.is_floating_point() or x.dtype.itemsize < 2:
        expected = "expected floating-point numbers of 16 bits or more"
        raise ShapeError(f"got {name} of dtype {dtype_name(x.dtype)}, {expected}", f"{name}.float()")
