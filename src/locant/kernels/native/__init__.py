"""Kernels in C for the CPU, loaded from the library that `build.py` makes.

The code that calls them and packs their tasks is beside each operation: `kernels/rotary/cpu.py`,
`kernels/distance_attention.py`, and `text/windows`.

Nothing is compiled here. The library lies in the package, beside the Python code, and is trusted as much as that is: no
cache elsewhere is looked into. Its name tells the sources it was made from, so that an old one is not loaded. The
environment variable ``LOCANT_NATIVE``, read at the first use, may say ``off``, or an instruction set: ``baseline``,
``avx2``, ``avx512``.
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
"""What torch calls an instruction set, and what `build.py` does; on everything else it is the baseline."""

DTYPES = {torch.float64: 0, torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}
"""Their numbers in ``numbers.h``."""


class _Found(NamedTuple):
    library: ctypes.CDLL | None
    variant: str
    why: str


@functools.cache
def function(name: str, variant: str | None = None) -> Any:
    """The function of this name, for the best instruction set or another, or ``None`` where there is no library."""
    library, best, _ = _found()
    return None if library is None else getattr(library, f"{name}_{variant or best}")


def has(name: str) -> bool:
    """Whether there is such a function; a compiler asks once."""
    return function(name) is not None


has._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as in `locant.kernels.transforms`


def is_in_rows(x: Tensor) -> bool:
    """Whether it is read and written where it lies: torch keeps some tensors negated, and zeros without memory."""
    return x.stride(-1) == 1 and not x.is_neg() and (x.data_ptr() != 0 or x.numel() == 0)


def threads() -> int:
    """How many threads a call may use: those of torch, or one in a forked process.

    There the threads of the parent's pool are missing, which OpenMP does not see: it would wait for them without end,
    as torch's own operations do. A process that is spawned has a pool of its own.
    """
    return 1 if _is_forked else torch.get_num_threads()


def status() -> str:
    """Whether native kernels are used, for which instruction set, or why not and what to do."""
    return _found().why


def runnable() -> tuple[str, ...]:
    """The instruction sets of the library that this machine has, as torch sees it, the fastest first."""
    best = CAPABILITIES.get(torch.backends.cpu.get_cpu_capability(), "baseline")
    return variants()[variants().index(best) :] if best in variants() else variants()[-1:]


@functools.cache
def _found() -> _Found:
    wanted = os.environ.get("LOCANT_NATIVE", "")
    if wanted not in ("", "off", *runnable()):
        choices = ", ".join(("off", *runnable()))
        raise InputError(f"got LOCANT_NATIVE={wanted}, on this machine there are {choices}", "unset LOCANT_NATIVE")
    if wanted == "off":
        return _Found(None, "", "not used, as LOCANT_NATIVE=off says")
    path = library_path()
    if not path.exists():
        return _Found(None, "", f"not built; with a C compiler: {HOW_TO_BUILD}")
    try:
        library = ctypes.CDLL(str(path))  # finds OpenMP in what torch has loaded, or fails here and not in a call
    except OSError as error:
        return _Found(None, "", f"cannot be loaded ({error}); with a C compiler: {HOW_TO_BUILD}")
    variant = wanted or runnable()[0]
    return _Found(library, variant, f"used, for {variant}")


_is_forked = False


def _note_fork() -> None:
    global _is_forked
    _is_forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)
