"""`BatchSampler` chooses the windows of each batch of each rank, by seed and epoch. `Loader` can resume an epoch.

An epoch is one order of all windows. A step takes the next ``batch_size * world_size`` windows, and each rank takes its
part of them. So after each step, all ranks together have seen the windows before one place of the order, for any number
of ranks and any batch size. The last step divides the remaining windows evenly. If there are fewer windows than ranks,
some ranks have one batch less. With `drop_last` no rank has this step.

The state of a loader holds the epoch, and the number of windows of the epoch that all ranks together have returned to
their callers. Batches that workers have prefetched do not count. After `load_state_dict` the next iteration continues
at this place. So every window of an epoch is returned exactly once, even after many interruptions and with other ranks,
workers and batch sizes. The windows and their order must be the same. If the last step has fewer windows than ranks,
the state of a rank without a batch is a step behind until its iteration ends. So save a state after the loop, or use
`drop_last`.

Every iteration is an epoch with its own order. Breaking out of an iteration skips the rest of its epoch. There is only
one state, so only one iteration can be active. An earlier iteration raises an error on its next batch.
"""

from __future__ import annotations

import difflib
import hashlib
import inspect
import math
import multiprocessing
from collections.abc import Iterator, Mapping, Sized
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Int, UInt64
from torch import Tensor
from torch.utils.data import DataLoader

from locant.arguments import flag, one_of, real, short_repr, whole
from locant.errors import InputError
from locant.text.windows.layouts import collate

BLOCK = 16_384  # windows whose places are computed together
MAX_LISTED = 2**16  # smaller orders are stored as lists
ROUNDS = 6  # even, so that each digit ends in its original place
HALF_BITS = np.uint64(32)
Numbers = UInt64[np.ndarray, " n"]

VERSION = 1  # of the state

OWN_OPTIONS = (
    "self",
    "dataset",
    "batch_size",
    "batch_sampler",
    "sampler",
    "collate_fn",
    "generator",
    "shuffle",
    "drop_last",
)
"""Options of a `DataLoader` that the loader sets itself."""

WORKER_DEFAULTS = {"prefetch_factor": None, "persistent_workers": False, "multiprocessing_context": None, "timeout": 0}
"""Options that have no meaning without workers, and their values in this case."""

MAX_TIMEOUT = 2_147_483  # the longest wait in seconds, because systems count milliseconds in 32 bits

OWN_LOADER = "DataLoader(windows, ...) with BatchSampler"


class BatchSampler:
    """Batches of window numbers, as arrays, for one rank and one epoch at a time.

    Pass it as ``batch_sampler`` to your own `torch.utils.data.DataLoader`. `Windows.loader` describes the arguments.
    `windows` may be any object with a length.

    Raises:
        RangeError: a number is out of range, or a flag is not a bool. InputError: only one of rank and world size is
            given, or there is no whole step.

    >>> [batch.tolist() for batch in BatchSampler(range(7), 2, shuffle=False, rank=1, world_size=2)]
    [[2, 3], [5, 6]]
    >>> sampler = BatchSampler(range(7), 4, seed=1)
    >>> sampler.set_epoch(5)
    >>> sorted(number for batch in sampler for number in batch.tolist())
    [0, 1, 2, 3, 4, 5, 6]
    """

    def __init__(
        self,
        windows: Sized,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = False,
    ) -> None:
        if not isinstance(windows, Sized):
            raise InputError(
                f"got {short_repr(windows)} to draw from, which has no length", "pass the Windows, or range(n)"
            )
        self.num_windows = len(windows)
        self.batch_size = whole("batch_size", batch_size, 1, remedy="pass a number of windows")
        self.shuffle, self.drop_last = flag("shuffle", shuffle), flag("drop_last", drop_last)
        self.seed = whole("seed", seed, 0, 2**64 - 1, remedy="seed=0")
        if (rank is None) != (world_size is None):
            cause = f"got rank={rank} and world_size={world_size}, expected both or none"
            raise InputError(cause, "pass rank=0, world_size=1")
        if rank is None or world_size is None:
            is_distributed = dist.is_available() and dist.is_initialized()
            rank, world_size = (dist.get_rank(), dist.get_world_size()) if is_distributed else (0, 1)
        self.world_size = whole("world_size", world_size, 1, remedy="pass the number of processes")
        self.rank = whole("rank", rank, 0, self.world_size - 1, remedy="pass 0 .. world_size - 1")
        self.epoch, self.start = 0, 0
        if self.drop_last and self.num_windows < self.step_size:
            cause = f"got {self.num_windows} windows for a step of {self.batch_size} x {self.world_size}, and drop_last"
            raise InputError(cause, "use a smaller batch_size, or drop_last=False")

    @property
    def step_size(self) -> int:
        """The number of windows of one step of all ranks together."""
        return self.batch_size * self.world_size

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Choose the epoch of the next iteration, and the number of its windows that all ranks together have seen."""
        epoch = whole("epoch", epoch, 0, 2**63 - 1, remedy="pass the number of finished epochs")
        self.start = whole(
            "start", start, 0, self.num_windows, remedy="pass the number of windows that all ranks have had"
        )
        self.epoch = epoch

    def windows_after(self, steps: int) -> int:
        """Return the number of windows of the epoch that all ranks together have seen `steps` steps after `start`."""
        return min(self.start + steps * self.step_size, self.num_windows)

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch on this rank, even if the next iteration starts later."""
        steps, rest = divmod(self.num_windows, self.step_size)
        first, end = self._share_of(rest)
        return steps + (end > first)

    def __iter__(self) -> Iterator[Int[np.ndarray, " batch"]]:
        # The order is fixed now, because the next epoch may be chosen before the first batch is read.
        order = Permutation(self.num_windows, seed=self.seed, epoch=self.epoch) if self.shuffle else None
        return self._batches(self.start, order)

    def _batches(self, start: int, order: Permutation | None) -> Iterator[Int[np.ndarray, " batch"]]:
        full, rest = divmod(self.num_windows - start, self.step_size)
        block = max(1, BLOCK // self.batch_size)
        slots = np.arange(self.batch_size) + self.rank * self.batch_size
        for first in range(0, full, block):
            steps = np.arange(first, min(first + block, full))[:, None]
            places = start + steps * self.step_size + slots
            yield from places if order is None else order(places.ravel()).reshape(places.shape)
        first, end = self._share_of(rest)
        if end > first:
            places = np.arange(first, end) + (self.num_windows - rest)
            yield places if order is None else order(places)

    def _share_of(self, rest: int) -> tuple[int, int]:
        """Return the begin and end of this rank's part of the last step."""
        if self.drop_last:
            return 0, 0
        return rest * self.rank // self.world_size, rest * (self.rank + 1) // self.world_size


class Permutation:
    """A random order of ``range(n)``, for n below 2**62, computed place by place from a seed and an epoch.

    It is a Feistel network of two digits, one below a and one below b, with a times b equal to n or slightly larger. In
    every round, one digit is shifted by a number that depends on the other digit and a key. Results of n or more, which
    are few, are mapped again until they are below n. Below 2**16 windows the order is a list sorted by random keys,
    because such a small network can make only few of all orders. All arithmetic is on integers, so an order does not
    depend on the version of NumPy or the machine. It is not cryptographic.
    """

    def __init__(self, n: int, *, seed: int, epoch: int) -> None:
        self.n = n
        digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8 * ROUNDS).digest()
        self._keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
        self._low = np.uint64(max(math.isqrt(n), 1))
        self._high = np.uint64(-(-n // int(self._low)))
        self._list = None
        if n < MAX_LISTED:
            mixed = _mix(np.arange(n, dtype=np.uint64), self._keys[0])
            self._list = np.argsort(_mix(mixed, self._keys[1]), kind="stable")

    def __call__(self, places: Int[np.ndarray, " places"]) -> Int[np.ndarray, " places"]:
        """Return the numbers at these places of the order."""
        if self._list is not None:
            return self._list[places]
        numbers = self._network(places.astype(np.uint64))
        outside = np.flatnonzero(numbers >= self.n)
        while len(outside):
            numbers[outside] = self._network(numbers[outside])
            outside = outside[numbers[outside] >= self.n]
        return numbers.view(np.int64)

    def _network(self, places: Numbers) -> Numbers:
        left = places // self._low
        right = places - left * self._low
        sizes = (self._high, self._low)
        for number, key in enumerate(self._keys):
            left, right = right, _shift(left, sizes[number % 2], _mix(right, key))
        return left * self._low + right


def _shift(digit: Numbers, size: np.uint64, by: Numbers) -> Numbers:
    """Add a number below `size` to the digit, modulo `size`. The upper 32 bits of `by` choose this number."""
    by >>= HALF_BITS
    by *= size
    by >>= HALF_BITS
    by += digit
    return np.minimum(by, by - size, out=by)  # if `by` is below `size`, the difference wraps around and is huge


def _mix(x: Numbers, key: np.uint64) -> Numbers:
    """Return 64 bits that all depend on all bits of `x` and the key, by two rounds of multiplying and folding."""
    x = x ^ key
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> HALF_BITS
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> HALF_BITS
    return x


class Loader:
    """Iterate over batches of windows, epoch by epoch. `Windows.loader` makes it, and has an example."""

    def __init__(self, windows: Any, sampler: BatchSampler, /, **options: Any) -> None:  # `Windows` imports this module
        self._windows, self._sampler = windows, sampler
        # A data loader draws a number for its workers. It has its own generator, because a draw from the generator of
        # dropout would make a resumed run different from an uninterrupted one.
        self._data_loader = DataLoader(
            windows,
            batch_sampler=self._sampler,  # type: ignore[arg-type]  # typed as lists, but arrays work, too
            collate_fn=collate,
            generator=torch.Generator().manual_seed(self._sampler.seed % 2**63),
            **_check_options(options),
        )
        self._seen = 0
        self._begun = False
        self._current: object = None

    @property
    def epoch(self) -> int:
        """The epoch of the current iteration, or of the next iteration if none has begun."""
        return self._sampler.epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration. If a state of this epoch was just loaded, its place is kept."""
        if self._begun or epoch != self.epoch:
            self._go_to(epoch, 0)

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch on this rank. After a resume, the first iteration has fewer."""
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        if self._begun:
            self._go_to(self.epoch + 1, 0)
        self._begun = True
        self._current = run = object()
        return self._count_batches(run, iter(self._data_loader))

    def state_dict(self) -> dict[str, Any]:
        """Return the current place, as numbers and strings. It is equal on all ranks after the same number of steps."""
        return {**self._identity(), "epoch": self.epoch, "windows_seen": self._seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the place of a state. Raise `InputError` if it is for other windows or another order."""
        if not isinstance(state, Mapping):
            raise InputError(f"got {state!r} as a state, expected a dictionary", "pass a result of Loader.state_dict()")
        identity = self._identity()
        missing = [name for name in (*identity, "epoch", "windows_seen") if name not in state]
        if missing:
            raise InputError(f"got a state without {', '.join(missing)}", "pass a result of Loader.state_dict()")
        if other := [name for name in identity if not _equals(state[name], identity[name])]:
            got, expected = (
                ", ".join(f"{name} {short_repr(facts[name])}" for name in other) for facts in (state, identity)
            )
            remedy = "use the text, options and seed of the resumed run, or call set_epoch to start an epoch again"
            raise InputError(f"got a state of {got} for a loader of {expected}", remedy)
        self._go_to(state["epoch"], state["windows_seen"])

    def _identity(self) -> dict[str, Any]:
        """Return the facts that must be equal for a place in the order to have the same meaning."""
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

    def _count_batches(self, run: object, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches. A batch is counted before it is used, so a state that is taken meanwhile includes it."""
        self._require_current(run)
        for number, batch in enumerate(batches, start=1):
            self._seen = self._sampler.windows_after(number)
            yield batch
            self._require_current(run)
        if not self._sampler.drop_last:
            self._seen = self._sampler.num_windows  # also on a rank without a part of the last step

    def _require_current(self, run: object) -> None:
        """Raise `InputError` if another iteration has begun.

        Persistent workers would return a batch of that iteration.
        """
        if self._current is not run:
            cause = "got a request for a batch of an iteration that another one, set_epoch or load_state_dict has ended"
            raise InputError(cause, "use one loader for each iteration")


def _equals(value: Any, expected: str | int) -> bool:
    """Return True if the value is this text or number, which saving may have converted to an array of one number."""
    plain = value.item() if isinstance(value, (np.ndarray, np.generic, Tensor)) and value.ndim == 0 else value
    return isinstance(plain, (str, int)) and plain == expected


def _check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Check and return the options of a data loader, whose own errors have no remedy."""
    if reserved := [name for name in OWN_OPTIONS if name in options]:
        raise InputError(f"got {', '.join(reserved)}, which the loader makes itself", f"use {OWN_LOADER}")
    names = [name for name in inspect.signature(DataLoader.__init__).parameters if name not in OWN_OPTIONS]
    for name in options:
        if name not in names:
            close = difflib.get_close_matches(name, [*inspect.signature(BatchSampler).parameters, *names], n=1)
            remedy = f"pass {close[0]}=" if close else f"use one of {', '.join(names)}"
            raise InputError(f"got {name}={short_repr(options[name])}, which is not an option of a data loader", remedy)
    checked = {name: _check_option(name, value) for name, value in options.items()}
    for name, default in WORKER_DEFAULTS.items():
        if not checked.get("num_workers") and checked.get(name, default) != default:
            cause = f"got {name}={short_repr(options[name])} without workers"
            raise InputError(cause, f"pass num_workers=2, or {name}={default}")
    return checked


def _check_option(name: str, value: Any) -> Any:
    if name == "num_workers":
        return whole(name, value, 0, 4096, remedy="pass num_workers=0, or one or two for each training process")
    if name == "timeout":
        return real(name, value, low=0, high=MAX_TIMEOUT, remedy="pass timeout=0 to wait without a limit")
    if name in ("pin_memory", "persistent_workers"):
        return flag(name, value)
    if name == "in_order" and not flag(name, value):
        cause = "got in_order=False, which changes the order of batches that a state counts"
        raise InputError(cause, f"pass in_order=True, or use {OWN_LOADER}")
    if name == "prefetch_factor" and value is not None:
        return whole(name, value, 1, remedy="pass prefetch_factor=2, the batches for each worker")
    if name == "worker_init_fn" and value is not None and not callable(value):
        raise InputError(
            f"got {name}={short_repr(value)}, expected a function of a worker's number", f"pass {name}=None"
        )
    if name == "multiprocessing_context" and value is not None and not isinstance(value, BaseContext):
        return one_of(name, value, multiprocessing.get_all_start_methods())
    return value
