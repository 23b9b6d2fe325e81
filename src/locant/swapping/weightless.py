"""Models and encodings without the memory of their weights, to look at what would be done with them."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["Weightless"]

MADE = (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn)
DRAWN = (torch.Tensor.normal_, torch.Tensor.uniform_)


class Weightless(TorchFunctionMode):
    """What is made of a size alone, as parameters are, gets no memory; what is computed, as angles are, does."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func in MADE:
            given["device"] = "meta"
        elif getattr(func, "__module__", "") == "torch.nn.init" or func in DRAWN:
            return given["tensor"] if "tensor" in given else args[0]
        return func(*args, **given)
