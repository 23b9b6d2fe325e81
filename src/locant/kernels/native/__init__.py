"""Kernels in C for the CPU, loaded from the library that `build.py` compiles.

The operations in `kernels/rotary/cpu.py`, `kernels/distance_attention.py`, `kernels/exact_dot.py`, `kernels/cope.py`
and `text/windows` pack the arguments of their kernels and call them.

This file does not compile anything. The library is in the package, next to the Python code, and is trusted in the same
way. No other folder is searched. The name of the library depends on its sources, so that an old library is not loaded.
The environment variable ``LOCANT_NATIVE`` is read at the first use. It may be ``off`` or an instruction set:
``baseline``, ``avx2``, ``avx512``.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

from locant.errors import InputError
from locant.kernels.native.build import library_path, variants

__all__ = ["DTYPES", "function", "has", "is_in_rows", "runnable", "status", "threads"]

HOW_TO_BUILD = "python -m locant.kernels.native build"
CAPABILITIES = {"AVX512": "avx512", "AVX2": "avx2"}
"""The names of instruction sets in torch and in `build.py`. All others are the baseline."""

DTYPES = {torch.float64: 0, torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}
"""The numbers of dtypes in ``numbers.h``."""


class _LoadedLibrary(NamedTuple):
    library: ctypes.CDLL | None
    variant: str
    status: str


@functools.cache
def function(name: str, variant: str | None = None) -> Any:
    """Return the function of this name for an instruction set (default: the best), or ``None`` without a library."""
    library, best, _ = _load_library()
    return None if library is None else getattr(library, f"{name}_{variant or best}")


def has(name: str) -> bool:
    """Return whether there is a library with this function. A compiler calls this once and keeps the answer."""
    return function(name) is not None


has._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as in `locant.kernels.transforms`


def is_in_rows(x: Tensor) -> bool:
    """Return whether kernels can access the memory of `x`. torch may store negated numbers, or not store zeros."""
    return x.stride()[-1] == 1 and not x.is_neg() and (x.data_ptr() != 0 or x.numel() == 0)


def threads() -> int:
    """Return the number of threads that a call may use: torch's number, or one in a forked process.

    A forked process has no threads of its parent's pool, but OpenMP does not notice and would wait for them forever, as
    torch's own operations do. A spawned process has its own pool.
    """
    return 1 if _is_forked else torch.get_num_threads()


def status() -> str:
    """Return whether native kernels are used and for which instruction set, or the reason why not and the remedy."""
    return _load_library().status


def runnable() -> tuple[str, ...]:
    """Return the library's instruction sets that torch finds on this machine, the fastest first."""
    best = CAPABILITIES.get(torch.backends.cpu.get_cpu_capability(), "baseline")
    return variants()[variants().index(best) :] if best in variants() else variants()[-1:]


@functools.cache
def _load_library() -> _LoadedLibrary:
    setting = os.environ.get("LOCANT_NATIVE", "")
    if setting not in ("", "off", *runnable()):
        choices = ", ".join(("off", *runnable()))
        raise InputError(f"got LOCANT_NATIVE={setting}, this machine supports {choices}", "unset LOCANT_NATIVE")
    if setting == "off":
        return _LoadedLibrary(None, "", "not used, because of LOCANT_NATIVE=off")
    path = library_path()
    if not path.exists():
        return _LoadedLibrary(None, "", f"not built; with a C compiler: {HOW_TO_BUILD}")
    try:
        library = ctypes.CDLL(str(path))  # uses the OpenMP library that torch has loaded, or fails here, not in a call
    except OSError as error:
        return _LoadedLibrary(None, "", f"cannot be loaded ({error}); with a C compiler: {HOW_TO_BUILD}")
    variant = setting or runnable()[0]
    return _LoadedLibrary(library, variant, f"used, for {variant}")


_is_forked = False


def _note_fork() -> None:
    global _is_forked
    _is_forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)
