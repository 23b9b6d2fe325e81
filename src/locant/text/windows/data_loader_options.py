"""Options that `Windows.loader` passes to `torch.utils.data.DataLoader`, checked: its own errors name no remedy."""

from __future__ import annotations

import difflib
import inspect
import multiprocessing
from collections.abc import Mapping
from multiprocessing.context import BaseContext
from typing import Any

from torch.utils.data import DataLoader

from locant.arguments import flag, one_of, real, shown, whole
from locant.errors import InputError

__all__ = ["checked_options"]

OURS = ("self", "dataset", "batch_size", "batch_sampler", "sampler", "collate_fn", "generator", "shuffle", "drop_last")
"""What the loader makes itself, or takes by a name of its own."""

LONGEST = 2_147_483
"""Seconds that a system can wait at most: it counts the milliseconds in 32 bits."""

OF_WORKERS = {"prefetch_factor": None, "persistent_workers": False, "multiprocessing_context": None, "timeout": 0}
"""What has no meaning without workers, and its value then."""


def checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, which a data loader will take.

    Raises:
        InputError: one that is unknown, made by the loader itself, or of no use without workers.
        RangeError: a number out of range, or another kind of value.

    >>> checked_options({"num_workers": 2, "pin_memory": True})
    {'num_workers': 2, 'pin_memory': True}
    """
    if taken := [name for name in OURS if name in options]:
        cause = f"got {', '.join(taken)}, which the loader makes itself"
        raise InputError(cause, "DataLoader(windows, ...) with BatchSampler")
    known = [name for name in inspect.signature(DataLoader.__init__).parameters if name not in OURS]
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            remedy = f"{close[0]}=" if close else f"one of {', '.join(known)}"
            raise InputError(f"got {name}={shown(options[name])}, which is no option of a data loader", remedy)
    checked = {name: _checked(name, value) for name, value in options.items()}
    for name, nothing in OF_WORKERS.items():
        if not checked.get("num_workers") and checked.get(name, nothing) != nothing:
            cause = f"got {name}={shown(options[name])} without workers"
            raise InputError(cause, f"num_workers=2, or {name}={nothing}")
    return checked


def _checked(name: str, value: Any) -> Any:
    if name == "num_workers":
        remedy = "num_workers=0, or one or two for each process that trains"
        return whole(name, value, 0, 4096, remedy=remedy)
    if name == "timeout":
        return real(name, value, low=0, high=LONGEST, remedy="timeout=0, which waits without an end")
    if name in ("pin_memory", "persistent_workers"):
        return flag(name, value)
    if name == "in_order" and not flag(name, value):
        cause = "got in_order=False, with which batches come in another order than the one which a state counts"
        raise InputError(cause, "in_order=True, or DataLoader(windows, ...) with BatchSampler")
    if name == "prefetch_factor" and value is not None:
        return whole(name, value, 1, remedy="prefetch_factor=2, batches for each worker")
    if name == "worker_init_fn" and value is not None and not callable(value):
        raise InputError(f"got {name}={shown(value)}, expected a function of a worker's number", f"{name}=None")
    if name == "multiprocessing_context" and value is not None and not isinstance(value, BaseContext):
        return one_of(name, value, multiprocessing.get_all_start_methods())
    return value
