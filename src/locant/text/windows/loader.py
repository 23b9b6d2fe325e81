"""`BatchSampler`: which windows each batch of each rank holds, by seed and epoch. `Loader`: these, to be resumed.

An epoch is one order of all windows. A step takes the next ``batch_size * world_size`` of them, and each rank its own
part. So the windows that were seen are those before one place of the order, whatever the number of ranks and the size
of their batches. The last step holds what is left, shared out evenly: if fewer are left than there are ranks, some have
one batch less. With `drop_last` that step is left out on every rank.

The state of a loader holds the epoch, and how many windows of it all ranks together were given: batches that the caller
got, not those that workers have prefetched. After `load_state_dict` the next iteration goes on there, so that every
window of an epoch is given exactly once however often it is interrupted, also with other ranks, workers and batch
sizes; but not with other windows, or in another order. Of a last step with fewer windows than ranks, ranks without a
batch are a step behind until their iteration ends: save a state after the loop, or use `drop_last`.

Every iteration is an epoch with an order of its own; breaking out of one skips its rest. There is one state, so there
is one iteration at a time: the one before raises an error when it is asked for more.
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

from locant.arguments import flag, one_of, real, shown, whole
from locant.errors import InputError
from locant.text.windows.layouts import collate

BLOCK = 16_384  # windows whose places are looked up together
LISTED = 2**16  # below this, an order is a list
ROUNDS = 6  # an even number, after which each digit stands in its own place again
HALF = np.uint64(32)
Numbers = UInt64[np.ndarray, " n"]

VERSION = 1  # of the state: a later one may be read by later versions only

OURS = ("self", "dataset", "batch_size", "batch_sampler", "sampler", "collate_fn", "generator", "shuffle", "drop_last")
"""What the loader makes itself, or takes by a name of its own."""

OF_WORKERS = {"prefetch_factor": None, "persistent_workers": False, "multiprocessing_context": None, "timeout": 0}
"""What has no meaning without workers, and its value then."""

LONGEST = 2_147_483  # seconds that a system can wait: it counts the milliseconds in 32 bits

OWN_LOADER = "DataLoader(windows, ...) with BatchSampler"


class BatchSampler:
    """Batches of window numbers, as arrays, for one rank and one epoch at a time.

    For a `torch.utils.data.DataLoader` of your own, as its ``batch_sampler``. `Windows.loader` describes the arguments;
    `windows` may be anything that has a length.

    Raises:
        RangeError: a number out of range, or a flag that is no bool. InputError: only one of rank and world size, or
            no whole step at all.

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
            raise InputError(f"got {shown(windows)} to draw from, which has no length", "pass the Windows, or range(n)")
        self.num_windows = len(windows)
        self.batch_size = whole("batch_size", batch_size, 1, remedy="a number of windows")
        self.shuffle, self.drop_last = flag("shuffle", shuffle), flag("drop_last", drop_last)
        self.seed = whole("seed", seed, 0, 2**64 - 1, remedy="seed=0")
        if (rank is None) != (world_size is None):
            cause = f"got rank={rank} and world_size={world_size}, expected both or none"
            raise InputError(cause, "rank=0, world_size=1")
        if rank is None or world_size is None:
            spread = dist.is_available() and dist.is_initialized()
            rank, world_size = (dist.get_rank(), dist.get_world_size()) if spread else (0, 1)
        self.world_size = whole("world_size", world_size, 1, remedy="the number of processes")
        self.rank = whole("rank", rank, 0, self.world_size - 1, remedy="0 .. world_size - 1")
        self.epoch, self.start = 0, 0
        if self.drop_last and self.num_windows < self.step_size:
            cause = f"got {self.num_windows} windows for a step of {self.batch_size} x {self.world_size}, and drop_last"
            raise InputError(cause, "use a smaller batch_size, or drop_last=False")

    @property
    def step_size(self) -> int:
        """The windows of one step of all ranks together."""
        return self.batch_size * self.world_size

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Choose the epoch that is iterated next, and how many of its windows all ranks together have had already."""
        epoch = whole("epoch", epoch, 0, 2**63 - 1, remedy="the number of epochs done")
        self.start = whole("start", start, 0, self.num_windows, remedy="the windows that all ranks have had")
        self.epoch = epoch

    def reached(self, steps: int) -> int:
        """How many windows of the epoch all ranks together have had after so many steps from `start`."""
        return min(self.start + steps * self.step_size, self.num_windows)

    def __len__(self) -> int:
        """The batches of a whole epoch on this rank, wherever the next iteration starts."""
        steps, rest = divmod(self.num_windows, self.step_size)
        first, end = self._share_of(rest)
        return steps + (end > first)

    def __iter__(self) -> Iterator[Int[np.ndarray, " batch"]]:
        # Settled now and not with the first batch: the next epoch may be chosen before that.
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
        """This rank's part of the last step: from and to."""
        if self.drop_last:
            return 0, 0
        return rest * self.rank // self.world_size, rest * (self.rank + 1) // self.world_size


class Permutation:
    """An order of ``range(n)``, for n below 2**62, that a seed and an epoch decide, computed place by place.

    A Feistel network of two digits, one below a and one below b, where a times b is n or little more: in every round,
    one digit is shifted by a number that the other and a key decide. What is mapped to one of the few places from n on
    is mapped again until it is below n. Under 2**16 windows there is a list after all, sorted by random keys: so small
    a network reaches few of all orders. It is integer arithmetic, so an order never changes with the version of NumPy
    nor the machine; it is not cryptographic.
    """

    def __init__(self, n: int, *, seed: int, epoch: int) -> None:
        self.n = n
        digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8 * ROUNDS).digest()
        self._keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
        self._low = np.uint64(max(math.isqrt(n), 1))
        self._high = np.uint64(-(-n // int(self._low)))
        self._listed = None
        if n < LISTED:
            once = _mixed(np.arange(n, dtype=np.uint64), self._keys[0])
            self._listed = np.argsort(_mixed(once, self._keys[1]), kind="stable")

    def __call__(self, places: Int[np.ndarray, " places"]) -> Int[np.ndarray, " places"]:
        """What stands at these places of the order."""
        if self._listed is not None:
            return self._listed[places]
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
            left, right = right, _shifted(left, sizes[number % 2], _mixed(right, key))
        return left * self._low + right


def _shifted(digit: Numbers, size: np.uint64, by: Numbers) -> Numbers:
    """The digit plus a number below `size` that 32 random bits choose, around in a circle."""
    by >>= HALF
    by *= size
    by >>= HALF
    by += digit
    return np.minimum(by, by - size, out=by)  # where it is below `size`, the difference wraps around and is huge


def _mixed(x: Numbers, key: np.uint64) -> Numbers:
    """64 bits that all depend on all bits of `x` and of the key: two rounds of multiplying and folding."""
    x = x ^ key
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> HALF
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> HALF
    return x


class Loader:
    """Iterates over batches of windows, epoch by epoch; made by `Windows.loader`, which has an example."""

    def __init__(self, windows: Any, sampler: BatchSampler, /, **options: Any) -> None:  # `Windows` imports this module
        self._windows, self._sampler = windows, sampler
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
            raise InputError(f"got {state!r} as a state, expected a dictionary", "pass a result of Loader.state_dict()")
        identity = self._identity()
        missing = [name for name in (*identity, "epoch", "windows_seen") if name not in state]
        if missing:
            raise InputError(f"got a state without {', '.join(missing)}", "pass a result of Loader.state_dict()")
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
            raise InputError(cause, "use one loader for each iteration")


def _is(value: Any, mine: str | int) -> bool:
    """Whether it is this text or number, which may have become an array of one number on its way."""
    plain = value.item() if isinstance(value, (np.ndarray, np.generic, Tensor)) and value.ndim == 0 else value
    return isinstance(plain, (str, int)) and plain == mine


def _checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, which a data loader will take: its own errors name no remedy."""
    if taken := [name for name in OURS if name in options]:
        raise InputError(f"got {', '.join(taken)}, which the loader makes itself", OWN_LOADER)
    names = [name for name in inspect.signature(DataLoader.__init__).parameters if name not in OURS]
    for name in options:
        if name not in names:
            close = difflib.get_close_matches(name, [*inspect.signature(BatchSampler).parameters, *names], n=1)
            remedy = f"{close[0]}=" if close else f"one of {', '.join(names)}"
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
