"""Options that `Windows.loader` passes to `torch.utils.data.DataLoader`, checked: its own errors name no remedy."""

from __future__ import annotations

import difflib
import inspect
import multiprocessing
from collections.abc import Callable, Mapping
from multiprocessing.context import BaseContext
from typing import Any

from torch.utils.data import DataLoader

from locant.arguments import Real, flag, one_of, real, shown, whole
from locant.errors import InputError

__all__ = ["checked_options"]

OURS = ("self", "dataset", "batch_size", "batch_sampler", "sampler", "collate_fn", "generator", "shuffle", "drop_last")
"""What the loader makes itself, or takes by a name of its own."""

LONGEST = 2_147_483
"""Seconds that a system can wait at most: it counts the milliseconds in 32 bits."""

OF_WORKERS: dict[str, object] = {
    "prefetch_factor": None,
    "persistent_workers": False,
    "multiprocessing_context": None,
    "timeout": 0,
}
"""What has no meaning without workers, and its value then."""


def checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, which a data loader will take.

    Raises:
        InputError: one that is unknown, made by the loader itself, or of no use without workers.
        RangeError: a number out of range, or another kind of value.

    >>> checked_options({"num_workers": 2, "pin_memory": True})
    {'num_workers': 2, 'pin_memory': True}
    """
    _require_known(options)
    checked = {name: CHECKS[name](name, value) if name in CHECKS else value for name, value in options.items()}
    if not checked.get("num_workers", 0):
        _require_no_workers(checked)
    return checked


def _require_known(options: Mapping[str, Any]) -> None:
    if taken := [name for name in OURS if name in options]:
        raise InputError(
            f"got {', '.join(taken)}, which the loader makes itself", "DataLoader(windows, ...) with BatchSampler"
        )
    known = [name for name in inspect.signature(DataLoader.__init__).parameters if name not in OURS]
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            remedy = f"{close[0]}=" if close else f"one of {', '.join(known)}"
            raise InputError(f"got {name}={shown(options[name])}, which is no option of a data loader", remedy)


def _require_no_workers(options: Mapping[str, Any]) -> None:
    for name, nothing in OF_WORKERS.items():
        if name in options and options[name] != nothing:
            raise InputError(
                f"got {name}={shown(options[name])} without workers", f"num_workers=2, or {name}={nothing}"
            )


def _workers(name: str, value: Any) -> int:
    return whole(name, value, 0, 4096, remedy="num_workers=0, or one or two for each process that trains")


def _prefetched(name: str, value: Any) -> int | None:
    return None if value is None else whole(name, value, 1, remedy="prefetch_factor=2, batches for each worker")


def _seconds(name: str, value: Any) -> Real:
    return real(name, value, low=0, high=LONGEST, remedy="timeout=0, which waits without an end")


def _in_order(name: str, value: Any) -> bool:
    if not flag(name, value):
        cause = f"got {name}=False, with which batches come in another order than the one which a state counts"
        raise InputError(cause, f"{name}=True, or DataLoader(windows, ...) with BatchSampler")
    return True


def _function(name: str, value: Any) -> Callable[[int], object] | None:
    if value is not None and not callable(value):
        raise InputError(f"got {name}={shown(value)}, expected a function of a worker's number", f"{name}=None")
    return value


def _context(name: str, value: Any) -> BaseContext | str | None:
    if value is None or isinstance(value, BaseContext):
        return value
    return one_of(name, value, multiprocessing.get_all_start_methods())


CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "num_workers": _workers,
    "prefetch_factor": _prefetched,
    "timeout": _seconds,
    "pin_memory": flag,
    "persistent_workers": flag,
    "in_order": _in_order,
    "worker_init_fn": _function,
    "multiprocessing_context": _context,
}
