"""Tensors that say they are on a GPU, on a machine without one, and a device that the host may not ask for a value.

The tensors are those of the CPU, and so are all operators. Whatever would wait for a device raises: reading a number of
a tensor, copying one to the host with nothing to wait for it, or asking an event while a graph is captured.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Device", "HostReadError", "pretended"]

CUDA = torch.device("cuda", 0)
READS = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero")
MOVES = ("cpu", "item", "numpy", "tolist")


class HostReadError(AssertionError):
    """The host would have waited for the device."""


class Device:
    """What the device is doing."""

    def __init__(self) -> None:
        self.capturing = False
        self.finished = False
        """Whether it has done all it was given: events have arrived then, and the host may read what they stand for."""


class _Event:
    def __init__(self, device: Device) -> None:
        self.device = device

    def record(self) -> None: ...

    def query(self) -> bool:
        if self.device.capturing:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        return self.device.finished

    def synchronize(self) -> None:
        self.device.finished = True


class _Functions(TorchFunctionMode):
    """Takes what is made on the device for something on the CPU."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(function, "__name__", "") in MOVES and not self.device.finished:
            raise HostReadError(f"{function.__name__} of {args[0].shape}")
        kwargs.pop("device", None)
        kwargs.pop("pin_memory", None)
        args = tuple(x for x in args if not isinstance(x, torch.device))
        return function(*args, **kwargs)


class _Operators(TorchDispatchMode):
    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operator._schema.name
        if name.removeprefix("aten::") in READS and not self.device.finished:
            raise HostReadError(name)
        assert not name.startswith("locant::"), "an operator that there is for a CPU alone"
        return operator(*args, **kwargs or {})


@contextmanager
def pretended() -> Iterator[Device]:
    """Meanwhile every tensor says it is on a GPU."""
    device = Device()
    with ExitStack() as patches:

        def patch(of: Any, name: str, value: Any) -> None:
            patches.enter_context(mock.patch.object(of, name, value, create=True))

        patch(torch.cuda, "is_current_stream_capturing", lambda: device.capturing)
        patch(torch.cuda, "Event", lambda: _Event(device))
        patch(Tensor, "device", property(lambda x: CUDA))
        patch(Tensor, "is_cuda", property(lambda x: True))
        patches.enter_context(_Functions(device))
        patches.enter_context(_Operators(device))
        yield device
