"""Tensors that belong to a formula, not to a model's state.

Angle tables, ALiBi's slopes and T5's buckets follow from the configuration alone. As buffers they would be cast by
``.half()``, shared by DDP, sharded by FSDP, left uninitialised by ``to_empty`` and expected in checkpoints; each of
these has broken released models. A `Constant` is none of that: a CPU tensor made once, and a copy per device.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["Constant"]


class Constant:
    """A tensor whose values and dtype nothing outside can change.

    >>> Constant(torch.tensor([1.0, 2.0])).on(torch.device("cpu"))
    tensor([1., 2.])
    """

    def __init__(self, value: Tensor) -> None:
        self._value = value.detach()
        self._copies: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """The tensor on this device; copied there once, and kept."""
        if not torch.compiler.is_compiling() and isinstance(fake := torch.empty(0, device=device), FakeTensor):
            return fake.fake_mode.from_tensor(self._value).to(device)  # only shapes are computed there
        if device == self._value.device:
            return self._value
        if device in self._copies:
            return self._copies[device]
        copy = self._value.to(device)
        if not torch.compiler.is_compiling():  # a graph must not keep memory that it owns
            self._copies[device] = copy
        return copy
