"""`Loader`: batches of windows through a `DataLoader`, with a state to resume from in the middle of an epoch.

The state holds the epoch, and how many windows of it all ranks together were given: batches that the caller got, not
those that workers have prefetched. After `load_state_dict` the next iteration goes on there, so that every window of an
epoch is given exactly once however often it is interrupted, also with other ranks, workers and batch sizes; but not
with other windows, or in another order. Of a last step with fewer windows than ranks, ranks without a batch are a step
behind until their iteration ends: save a state for all ranks after the loop, or leave that step out with `drop_last`.

Every iteration is an epoch with an order of its own; breaking out of one skips its rest. There is one state, so there
is one iteration at a time: the one before raises an error when it is asked for more.
"""

from __future__ import annotations

import difflib
import inspect
import multiprocessing
from collections.abc import Iterator, Mapping
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from locant.arguments import flag, one_of, real, shown, whole
from locant.errors import InputError
from locant.text.windows.collation import collate
from locant.text.windows.sampler import BatchSampler

__all__ = ["Loader"]

VERSION = 1
"""Of the state: a later one may be read by later versions only."""

OURS = ("self", "dataset", "batch_size", "batch_sampler", "sampler", "collate_fn", "generator", "shuffle", "drop_last")
"""What the loader makes itself, or takes by a name of its own."""

LONGEST = 2_147_483
"""Seconds that a system can wait at most: it counts the milliseconds in 32 bits."""

OF_WORKERS = {"prefetch_factor": None, "persistent_workers": False, "multiprocessing_context": None, "timeout": 0}
"""What has no meaning without workers, and its value then."""

OWN_LOADER = "DataLoader(windows, ...) with BatchSampler"


class Loader:
    """Iterates over batches of windows, epoch by epoch; made by `Windows.loader`, which has an example."""

    def __init__(self, windows: Any, sampler: BatchSampler, /, **options: Any) -> None:  # `Windows` imports this module
        self._windows = windows
        self._sampler = sampler
        # A generator of its own: a data loader draws a number for its workers, and would draw it from the one that
        # dropout uses, so that a run that was resumed could not be the same as one that was not.
        self._data_loader = DataLoader(
            windows,
            batch_sampler=self._sampler,  # type: ignore[arg-type]  # typed as lists; arrays of numbers are fetched alike
            collate_fn=collate,
            generator=torch.Generator().manual_seed(self._sampler.seed % 2**63),
            **_checked_options(options),
        )
        self._seen = 0
        self._begun = False
        self._current: object = None

    @property
    def epoch(self) -> int:
        """The epoch that is being iterated, or the one that will be if none has been yet."""
        return self._sampler.epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; the one that a state has just been loaded for keeps its place."""
        if self._begun or epoch != self.epoch:
            self._go_to(epoch, 0)

    def __len__(self) -> int:
        """The batches of a whole epoch on this rank; after a resume, the first iteration has fewer."""
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        if self._begun:
            self._go_to(self.epoch + 1, 0)
        self._begun = True
        self._current = run = object()
        return self._handed_out(run, iter(self._data_loader))

    def state_dict(self) -> dict[str, Any]:
        """Where we are, in plain numbers and strings; the same on every rank that has made as many steps."""
        return {**self._identity(), "epoch": self.epoch, "windows_seen": self._seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was asked; an `InputError` for a state of other windows or of another order."""
        if not isinstance(state, Mapping):
            raise InputError(f"got {state!r} as a state, expected a dictionary", "what Loader.state_dict returned")
        identity = self._identity()
        missing = [name for name in (*identity, "epoch", "windows_seen") if name not in state]
        if missing:
            raise InputError(f"got a state without {', '.join(missing)}", "what Loader.state_dict returned")
        if other := [name for name in identity if not _is(state[name], identity[name])]:
            theirs, mine = (", ".join(f"{name} {shown(of[name])}" for name in other) for of in (state, identity))
            remedy = "the text, options and seed of the run that is resumed, or set_epoch to begin an epoch anew"
            raise InputError(f"got a state of {theirs} for a loader of {mine}", remedy)
        self._go_to(state["epoch"], state["windows_seen"])

    def _identity(self) -> dict[str, Any]:
        """What has to be the same for a place in the order to mean the same."""
        sampler = self._sampler
        return {
            "version": VERSION,
            "windows": self._windows.fingerprint,
            "num_windows": sampler.num_windows,
            "shuffle": sampler.shuffle,
            "seed": sampler.seed,
        }

    def _go_to(self, epoch: int, start: int) -> None:
        self._sampler.set_epoch(epoch, start)
        self._seen, self._begun, self._current = self._sampler.start, False, None

    def _handed_out(self, run: object, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches, counted before the caller gets them: a state taken while one is being used includes it."""
        self._require_current(run)
        for number, batch in enumerate(batches, start=1):
            self._seen = self._sampler.reached(number)
            yield batch
            self._require_current(run)
        if not self._sampler.drop_last:
            self._seen = self._sampler.num_windows  # on a rank that had no part of the last step, too

    def _require_current(self, run: object) -> None:
        """Asked before a batch is fetched: workers that persist would give away one of the iteration that is going."""
        if self._current is not run:
            cause = "got a batch asked of an iteration that another has replaced, or set_epoch or load_state_dict"
            raise InputError(cause, "a loader of its own for each iteration")


def _is(value: Any, mine: str | int) -> bool:
    """Whether it is this text or number, which may have become an array of one number on its way."""
    plain = value.item() if isinstance(value, (np.ndarray, np.generic, Tensor)) and value.ndim == 0 else value
    return isinstance(plain, (str, int)) and plain == mine


def _checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, which a data loader will take: its own errors name no remedy."""
    if taken := [name for name in OURS if name in options]:
        raise InputError(f"got {', '.join(taken)}, which the loader makes itself", OWN_LOADER)
    known = [name for name in inspect.signature(DataLoader.__init__).parameters if name not in OURS]
    for name in options:
        if name not in known:
            of_order = [*inspect.signature(BatchSampler).parameters][1:]
            close = difflib.get_close_matches(name, [*of_order, *known], n=1)
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
        return whole(name, value, 0, 4096, remedy="num_workers=0, or one or two for each process that trains")
    if name == "timeout":
        return real(name, value, low=0, high=LONGEST, remedy="timeout=0, which waits without an end")
    if name in ("pin_memory", "persistent_workers"):
        return flag(name, value)
    if name == "in_order" and not flag(name, value):
        cause = "got in_order=False, with which batches come in another order than the one which a state counts"
        raise InputError(cause, f"in_order=True, or {OWN_LOADER}")
    if name == "prefetch_factor" and value is not None:
        return whole(name, value, 1, remedy="prefetch_factor=2, batches for each worker")
    if name == "worker_init_fn" and value is not None and not callable(value):
        raise InputError(f"got {name}={shown(value)}, expected a function of a worker's number", f"{name}=None")
    if name == "multiprocessing_context" and value is not None and not isinstance(value, BaseContext):
        return one_of(name, value, multiprocessing.get_all_start_methods())
    return value
