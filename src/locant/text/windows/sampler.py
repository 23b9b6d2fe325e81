"""`BatchSampler`: which windows each batch of each rank holds, by seed and epoch.

An epoch is one order of all windows. A step takes the next ``batch_size * world_size`` of them, and each rank its own
part. So the windows that were seen are those before one place of the order, whatever the number of ranks and the size
of their batches, and an epoch can be resumed from there with others.

The last step holds what is left, shared out evenly: batches of different ranks differ by one window at most, and if
fewer are left than there are ranks, some have one batch less. With `drop_last` that step is left out on every rank.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sized

import numpy as np
import torch.distributed as dist
from jaxtyping import Int, UInt64

from locant.arguments import flag, shown, whole
from locant.errors import InputError

__all__ = ["BatchSampler", "Permutation"]

BLOCK = 16_384  # windows whose places are looked up together
LISTED = 2**16  # below this, an order is a list
ROUNDS = 6  # an even number, after which each digit stands in its own place again
HALF = np.uint64(32)
Numbers = UInt64[np.ndarray, " n"]


class BatchSampler:
    """Batches of window numbers, as arrays, for one rank and one epoch at a time.

    For a `torch.utils.data.DataLoader` of your own, as its ``batch_sampler``; `Windows.loader` has one, and describes
    its arguments. `windows` may be anything that has a length.

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
            raise InputError(f"got {shown(windows)} to draw from, which has no length", "the Windows, or range(n)")
        self.num_windows = len(windows)
        self.batch_size = whole("batch_size", batch_size, 1, remedy="a number of windows")
        self.shuffle, self.drop_last = flag("shuffle", shuffle), flag("drop_last", drop_last)
        self.seed = whole("seed", seed, 0, 2**64 - 1, remedy="seed=0")
        self.rank, self.world_size = _place(rank, world_size)
        self.epoch, self.start = 0, 0
        if self.drop_last and self.num_windows < self.step_size:
            cause = f"got {self.num_windows} windows for a step of {self.batch_size} x {self.world_size}, and drop_last"
            raise InputError(cause, "a smaller batch_size, or drop_last=False")

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


def _place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise InputError(f"got rank={rank} and world_size={world_size}, expected both or none", "rank=0, world_size=1")
    if rank is None or world_size is None:
        spread = dist.is_available() and dist.is_initialized()
        return (dist.get_rank(), dist.get_world_size()) if spread else (0, 1)
    world_size = whole("world_size", world_size, 1, remedy="the number of processes")
    return whole("rank", rank, 0, world_size - 1, remedy="0 .. world_size - 1"), world_size


class Permutation:
    """An order of ``range(n)``, for n below 2**62, that a seed and an epoch decide, computed place by place.

    A place is written as two digits, one below a and one below b, where a times b is n or little more; in every round
    of a Feistel network, one digit is shifted by a number that the other and a key decide. That maps the places onto
    themselves, and what is mapped to one of the few from n on is mapped again until it is below n. Under 2**16 windows
    there is a list after all, sorted by random keys: so small a network reaches few of all orders. It is integer
    arithmetic, so an order never changes with the version of NumPy nor the machine; it is not cryptographic.
    """

    def __init__(self, n: int, *, seed: int, epoch: int) -> None:
        self.n = n
        digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8 * ROUNDS).digest()
        self._keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
        self._low = np.uint64(max(math.isqrt(n), 1))
        self._high = np.uint64(-(-n // int(self._low)))
        self._listed = self._sorted() if n < LISTED else None

    def __call__(self, places: Int[np.ndarray, " places"]) -> Int[np.ndarray, " places"]:
        """What stands at these places of the order."""
        if self._listed is not None:
            return self._listed[places]
        found = self._network(places.astype(np.uint64))
        outside = np.flatnonzero(found >= self.n)
        while len(outside):
            found[outside] = self._network(found[outside])
            outside = outside[found[outside] >= self.n]
        return found.view(np.int64)

    def _sorted(self) -> Int[np.ndarray, " n"]:
        once = _mixed(np.arange(self.n, dtype=np.uint64), self._keys[0])
        return np.argsort(_mixed(once, self._keys[1]), kind="stable")

    def _network(self, places: Numbers) -> Numbers:
        """One pass: each digit in alternation is shifted by the other."""
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
