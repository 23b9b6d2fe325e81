"""How many numbers the largest tensor of a computation has."""

from __future__ import annotations

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Largest"]


class Largest(TorchDispatchMode):
    """Notes the most numbers that any tensor has that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, (tuple, list)) else [result]:
            self.numbers = max(self.numbers, one.numel() if isinstance(one, Tensor) else 0)
        return result
