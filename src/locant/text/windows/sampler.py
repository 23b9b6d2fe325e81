"""`BatchSampler`: which windows each batch of each rank holds, by seed and epoch.

An epoch is one order of all windows. All ranks go through it side by side: a step takes the next ``batch_size *
world_size`` windows, and each rank its own part of them. So the windows that were seen after some steps are those
before one place of the order, whatever the number of ranks and the size of their batches, and an epoch can be
resumed from there with others.

**The remainder.** The last step holds what is left: its windows are shared out evenly, so that batches of different
ranks differ by one window at most, and none is left out or repeated. If fewer are left than there are ranks, some ranks
have one batch less. With `drop_last` a step that is not whole is left out on every rank.

Nothing is kept per window: places of the order are looked up in blocks of a few thousand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized

import numpy as np
import torch.distributed as dist
from jaxtyping import Int

from locant.arguments import flag, shown, whole
from locant.errors import InputError
from locant.text.windows.permutation import Permutation

__all__ = ["BatchSampler"]

BLOCK = 16_384  # windows whose places are looked up together


class BatchSampler:
    """Batches of window numbers, as arrays, for one rank and one epoch at a time.

    For a `torch.utils.data.DataLoader` of your own, as its ``batch_sampler``; `Windows.loader` has one, and counts.

    Args:
        windows: the dataset, or anything else that has a length.
        batch_size, shuffle, seed, rank, world_size, drop_last: as `Windows.loader` describes them.

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
