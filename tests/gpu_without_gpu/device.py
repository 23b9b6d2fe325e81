"""Tensors that say they are on a GPU, on a machine without one, and a device that the host may not ask for a value.

The tensors are those of the CPU. Our own operators go the way they would on a GPU, with Triton's interpreter in the
place of its compiler; every other operator is torch's for the CPU. Whatever would wait for a device raises: reading a
number of a tensor, copying one to the host with nothing to wait for it, or asking an event while a graph is captured.
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

from locant.kernels.input_embedding import op
from tests.kernels.interpreted import interpreted

__all__ = ["Device", "HostReadError", "pretended"]

CUDA = torch.device("cuda", 0)
READS = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero")
OURS = {"locant::input_embedding": op._forward_on_cuda, "locant::input_embedding_backward": op._backward_on_cuda}
MOVES = ("cpu", "item", "numpy", "tolist")


class HostReadError(AssertionError):
    """The host would have waited for the device."""


class Device:
    """What the device is doing."""

    def __init__(self) -> None:
        self.capturing = False
        self.finished = False
        """Whether it has done all it was given: events have arrived then, and the host may read what they stand for."""
        self.at_work = False
        """In one of our kernels, where all tensors are what they are."""


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
        if not self.device.at_work:
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
        if name.removeprefix("aten::") in READS and not (self.device.finished or self.device.at_work):
            raise HostReadError(name)
        if name not in OURS:
            return operator(*args, **kwargs or {})
        self.device.at_work = True
        try:
            return OURS[name](*_whole(operator, args, kwargs or {}))
        finally:
            self.device.at_work = False


def _whole(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """All arguments in their order; torch leaves out those at their defaults."""
    names = [argument.name for argument in operator._schema.arguments]
    return [*args, *(kwargs[name] for name in names[len(args) :])]


@contextmanager
def pretended() -> Iterator[Device]:
    """Meanwhile every tensor says it is on a GPU."""
    device = Device()
    kernels = interpreted("locant.kernels.input_embedding.triton")
    where, on_gpu = Tensor.device.__get__, Tensor.is_cuda.__get__  # type: ignore[attr-defined]
    with ExitStack() as patches:

        def patch(of: Any, name: str, value: Any) -> None:
            patches.enter_context(mock.patch.object(of, name, value, create=True))

        patch(torch.cuda, "is_current_stream_capturing", lambda: device.capturing)
        patch(torch.cuda, "Event", lambda: _Event(device))
        for name in ("forward", "backward"):
            patch(__import__(op.__package__ + ".triton", fromlist=[name]), name, getattr(kernels, name))
        patch(Tensor, "device", property(lambda x: where(x) if device.at_work else CUDA))
        patch(Tensor, "is_cuda", property(lambda x: on_gpu(x) if device.at_work else True))
        patches.enter_context(_Functions(device))
        patches.enter_context(_Operators(device))
        yield device
