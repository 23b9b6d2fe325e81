"""Triton before a device that is not there: what a launch does, down to machine code and its arguments.

A make-believe driver answers for devices of any compute capability. Kernels are specialised, compiled and assembled as
for a real one, with the launcher that users have; what would start on the device is written down instead.

Triton knows one driver per process. So this is for processes of its own, see `fresh_process`; nothing in it may be
interpreted there, and tensors are those of the CPU, of which Triton reads dtype, address and strides.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gpu_without_gpu.outcomes import stack

__all__ = ["CAPABILITIES", "Launch", "device", "fresh_process", "launches", "start"]

CAPABILITIES = (80, 90, 100)
"""A100, H100 and H200, B200; each of them is the device of this number."""

SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes that a program may have, from the table of technical specifications in the CUDA programming guide."""

_LAUNCHED: list[Launch] = []
_CURRENT = [CAPABILITIES[1]]


@dataclass(frozen=True)
class Launch:
    """What a device would have been given."""

    kernel: str
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    """Everything that the kernel takes, tensors as their addresses."""
    ptx: str
    stack: int
    """Bytes of every thread that did not fit into its registers."""


class _Driver:
    """As much of Triton's driver as compiling and launching ask for."""

    def __init__(self) -> None:
        self.utils = self
        self.launcher_cls = _Launcher

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", _CURRENT[0], 32)

    def get_current_device(self) -> int:
        return _CURRENT[0]

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_MEMORY[device]}

    def load_binary(self, name: str, cubin: bytes, shared: int, device: int) -> tuple[Any, ...]:
        """Module, function, registers, spills, and the most threads."""
        return object(), None, 0, 0, 1024

    def allocate_default_profile_scratch(self, *_: Any) -> None:
        return None


class _Launcher:
    """Takes the place of the function in C that hands arguments to the device."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.name = source.fn.__name__

    def __call__(self, *given: Any) -> None:
        grid, kernel, arguments = given[:3], given[4], given[9:]
        _LAUNCHED.append(Launch(self.name, grid, _addresses(arguments), kernel.asm["ptx"], stack(kernel.asm["cubin"])))


def _addresses(argument: Any) -> Any:
    if isinstance(argument, tuple):
        return tuple(map(_addresses, argument))
    return argument.data_ptr() if hasattr(argument, "data_ptr") else argument


@contextmanager
def device(capability: int) -> Iterator[None]:
    """Launches meanwhile are for a device of this compute capability."""
    before, _CURRENT[0] = _CURRENT[0], capability
    try:
        yield
    finally:
        _CURRENT[0] = before


def launches(function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Launch]:
    """What `function` launches."""
    _LAUNCHED.clear()
    function(*arguments, **options)
    return list(_LAUNCHED)


def start(cache: Path, folder: Path | None = None) -> None:
    """Give Triton the make-believe driver, for as long as this process lives: the one in `folder`, if given."""
    os.environ["TRITON_CACHE_DIR"] = str(cache)
    if folder is not None:
        sys.path.insert(0, str(folder))
    from triton.compiler import CompiledKernel
    from triton.runtime import driver

    load = CompiledKernel._init_handles

    def load_and_sign(kernel: Any) -> None:
        load(kernel)
        kernel.function = kernel  # for the launcher, which is told no more than this of what it launches

    CompiledKernel._init_handles = load_and_sign
    driver.set_active(_Driver())


@contextmanager
def fresh_process(cache: Path, folder: Path | None = None) -> Iterator[Callable[..., Any]]:
    """Calls functions in a process in which Triton, that of `folder` or else the usual one, has that driver."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), start, (cache, folder)) as process:
        yield lambda function, *arguments: process.submit(function, *arguments).result()
