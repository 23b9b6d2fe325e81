"""Triton kernels where there is no GPU: carried out by NumPy, statement by statement, and watched meanwhile.

Triton decides when a kernel is defined whether it will be interpreted. So a module is loaded a second time for it,
under another name: the one that the package would use on a GPU stays as it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import mmap
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

__all__ = ["Access", "Place", "interpreted", "sparse", "watched", "without_copying_back"]


@functools.cache
def interpreted(name: str) -> ModuleType:
    """The module `name` with kernels that run on tensors of the CPU."""
    importlib.import_module("triton")  # before the switch is thrown: Triton looks at it when it is imported, too
    found = importlib.util.find_spec(name)
    assert found is not None
    assert found.origin is not None
    spec = importlib.util.spec_from_file_location(f"{name}_interpreted", found.origin)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    package = ".".join(name.split(".")[:2])  # kernels call functions of other packages of kernels
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"), _without_kernels_of(package):
        spec.loader.exec_module(module)
    _count_in_tensors()
    _leave_out_what_is_for_nothing()
    return module


@contextlib.contextmanager
def _without_kernels_of(package: str) -> Iterator[None]:
    """What is imported of it meanwhile is loaded a second time, too, where there are kernels in it."""
    usual = _kernels_of(package)
    for name in usual:
        del sys.modules[name]
    yield
    for name in _kernels_of(package):
        del sys.modules[name]
        parent, _, child = name.rpartition(".")
        delattr(sys.modules[parent], child)  # an import also makes a module an attribute of its package
    sys.modules.update(usual)
    for name, module in usual.items():
        parent, _, child = name.rpartition(".")
        setattr(sys.modules[parent], child, module)


def _kernels_of(package: str) -> dict[str, ModuleType]:
    inside = {name: module for name, module in sys.modules.items() if name.startswith(f"{package}.")}
    return {name: module for name, module in inside.items() if hasattr(module, "tl")}


@functools.cache
def _count_in_tensors() -> None:
    """A number is an array of one element, which NumPy 2.4 refuses as an index; Triton 3.5 has not heard of that."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_squeeze(tensor: Any, *scope: Any) -> None:
        patch(tensor, *scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    interpreter._patch_lang_tensor = patch_and_squeeze


@functools.cache
def _leave_out_what_is_for_nothing() -> None:
    """Half of the interpreter's time: what it does again at every call, and checks whose outcome it drops."""
    from triton.language import core
    from triton.runtime import interpreter

    # Overflow of integers is computed, and asserted where `debug` is on only, which it is not.
    options = interpreter.interpreter_builder.options
    assert not options.debug
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)

    # A table of all dtypes is made to look one up.
    slowly = interpreter._get_np_dtype
    quickly = functools.cache(slowly)
    interpreter._get_np_dtype = lambda dtype: (slowly if dtype.scalar.is_ptr() else quickly)(dtype.scalar)

    # The language is looked through, and NumPy's operations put into it, when kernels call one another, too.
    members, patch = functools.cache(inspect.getmembers), interpreter._patch_lang

    @functools.cache
    def languages(function: Any) -> list[ModuleType]:
        return [x for x in function.__globals__.values() if x is interpreter.tl or x is core]

    def patch_unless_patched(function: Any) -> Any:
        places = (*languages(function), core.tensor)
        return patch(function) if any(core.is_builtin(x.atomic_add) for x in places) else None

    def patch_builtins(package: Any, builder: Any, *scope: Any) -> None:
        for name, member in members(package):
            if core.is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, *scope)

    interpreter._patch_lang, interpreter._patch_builtin = patch_unless_patched, patch_builtins


@dataclass(frozen=True)
class Place:
    """Where kernels run: ``"cpu"``, interpreted, or ``"cuda"``."""

    device: str

    @property
    def is_interpreted(self) -> bool:
        return self.device == "cpu"

    def load(self, name: str) -> Any:
        """The module `name`, with kernels that run here."""
        return interpreted(name) if self.is_interpreted else importlib.import_module(name)


@dataclass(frozen=True)
class Access:
    """What one statement of one program touched: the addresses of the lanes that no mask switched off."""

    program: int
    stores: bool
    addresses: np.ndarray


@contextlib.contextmanager
def watched() -> Iterator[list[Access]]:
    """Every load and store that interpreted kernels make meanwhile, in their order."""
    from triton.runtime.interpreter import InterpreterBuilder

    seen: list[Access] = []
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def note(builder: Any, pointers: Any, mask: Any, *, stores: bool) -> None:
        lanes = np.broadcast_to(mask.data, pointers.data.shape)
        seen.append(Access(int(builder.grid_idx[0]), stores, pointers.data[lanes].astype(np.uint64)))

    def noted_load(builder: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        note(builder, pointers, mask, stores=False)
        return load(builder, pointers, mask, *rest)

    def noted_store(builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        note(builder, pointers, mask, stores=True)
        return store(builder, pointers, value, mask, *rest)

    with mock.patch.multiple(InterpreterBuilder, create_masked_load=noted_load, create_masked_store=noted_store):
        yield seen


MAP_NORESERVE = 0x4000  # in `mmap` from Python 3.13 on


def sparse(elements: int) -> Tensor:
    """float16 zeros, any number of them: only those that are touched take memory."""
    pages = mmap.mmap(-1, 2 * elements, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    return torch.frombuffer(pages, dtype=torch.float16)


@contextlib.contextmanager
def without_copying_back() -> Iterator[None]:
    """The interpreter copies whole storages back, even onto themselves; of a sparse one nothing must be touched."""
    from triton.runtime.interpreter import GridExecutor

    with mock.patch.object(GridExecutor, "_restore_args_dev"):
        yield
