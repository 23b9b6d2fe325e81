"""Tensors that belong to a formula and not to a model's state.

Angle tables, ALiBi's slopes and T5's buckets follow from the configuration alone. As buffers they would be cast by
``.half()``, shared by DDP, sharded by FSDP, left uninitialised by ``to_empty`` and expected in checkpoints. Each of
these effects has broken released models. A `Constant` is a CPU tensor with one copy per device. A compiled graph takes
the copy as an input. If the graph made the copy itself, every call would copy again, and CUDA graphs would be skipped.
"""

from __future__ import annotations

from weakref import WeakSet

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from locant.kernels.transforms import is_dispatch_mode_active, unwrap_transforms
from locant.tensors import has_float64

CONSTANTS: WeakSet[Constant] = WeakSet()


class Constant:
    """A tensor whose values and dtype no other code can change.

    >>> Constant(torch.tensor([1.0, 2.0])).on(torch.device("cpu"))
    tensor([1., 2.])
    """

    def __init__(self, value: Tensor) -> None:
        self._value = unwrap_transforms(value.detach())
        self._copies: dict[torch.device, Tensor] = {}
        CONSTANTS.add(self)

    def __deepcopy__(self, memo: object) -> Constant:
        return self  # models copy layers, and a constant cannot change

    def __reduce__(self) -> tuple[type[Constant], tuple[Tensor]]:
        return Constant, (self._value,)

    @property
    def dtype(self) -> torch.dtype:
        return self._value.dtype

    def on(self, device: torch.device) -> Tensor:
        """Return the tensor on this device. The first call copies it, and later calls reuse the copy."""
        is_here = device == self._value.device
        if torch.compiler.is_compiling():
            if not is_here:
                copy_all(device)
        elif is_dispatch_mode_active() and isinstance(fake := torch.empty(0, device=device), FakeTensor):
            return fake.fake_mode.from_tensor(self._value).to(device)  # fake tensors have shapes only
        elif not is_here:
            self._copy(device)
        if is_here:
            return self._value
        return self._copies[device] if device in self._copies else self._value.to(device)

    def _copy(self, device: torch.device) -> None:
        if device == self._value.device or device in self._copies:
            return
        with torch.inference_mode(mode=False):  # training cannot use an inference tensor later
            copy = unwrap_transforms(self._value.to(device))
        if not isinstance(copy, FakeTensor):  # `torch.export` makes fake copies, and its graph stores the values
            self._copies[device] = copy


def copy_all(device: torch.device) -> bool:
    """Copy every constant to this device, so that one graph serves all layers."""
    for constant in list(CONSTANTS):
        if constant.dtype == torch.float64 and not has_float64(device):
            continue
        constant._copy(device)  # pyright: ignore[reportPrivateUsage]
    return True


# `torch.compiler.assume_constant_result` sets this attribute, but imports the whole compiler. The function is called
# while a graph is traced and is not part of the graph.
copy_all._dynamo_marked_constant = True  # type: ignore[attr-defined]
