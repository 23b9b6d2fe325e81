"""What kernels need beside torch, and whether it is there."""

from __future__ import annotations

import functools
import importlib.util

__all__ = ["has_triton"]


@functools.cache
def has_triton() -> bool:
    """Whether the kernels for GPUs can be compiled."""
    return importlib.util.find_spec("triton") is not None
