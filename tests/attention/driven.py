"""Caches behind one interface, so that the same steps drive all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from locant import KVCache, Positions
from locant.attention import PagedKVCache, StaticKVCache

MAX_LEN, BLOCK = 40, 3


class InSlots:
    """`KVCache` or `StaticKVCache`, in which what rows take back leaves padding between tokens."""

    def __init__(self, cache: KVCache | StaticKVCache) -> None:
        self.cache = cache

    @property
    def positions(self) -> Positions:
        return self.cache.positions

    def following(self, n: int) -> Positions:
        return self.cache.next_positions(n)

    def rows_for(self, where: Positions, batch: int) -> tuple[Tensor, ...]:
        """What `append` takes beside keys, values and positions; the next `keep` counts from these tokens."""
        self.before = len(self.cache)
        return ()

    def append(self, k: Tensor, v: Tensor, where: Positions) -> Any:
        return self.cache.append(k, v, where, *self.rows_for(where, len(k)))

    def keep(self, accepted: list[int]) -> None:
        self.cache.truncate(self.before + torch.tensor(accepted))

    def reorder(self, rows: list[int]) -> None:
        self.cache.reorder(torch.tensor(rows))


class InBlocks:
    """`PagedKVCache` and the smallest server: it gives blocks to rows that grow, and takes back those of no row."""

    def __init__(self, cache: PagedKVCache, batch: int) -> None:
        self.cache = cache
        self.table, self.cached = torch.full((batch, MAX_LEN // BLOCK), -1), torch.zeros(batch, dtype=torch.int64)

    def free(self, n: int) -> Tensor:
        """Blocks of no row, those that others left last coming first."""
        unused = [block for block in range(self.cache.num_blocks) if block not in self.table]
        return torch.tensor(unused[::-1][:n])

    @property
    def positions(self) -> Positions:
        return self.cache.positions_of(self.table, self.cached)

    def following(self, n: int) -> Positions:
        return Positions.after(self.cached, n, max_index=self.cache.max_index)

    def rows_for(self, where: Positions, batch: int) -> tuple[Tensor, ...]:
        self.before, self.cached = self.cached, self.cached + (where.expand(batch).document >= 0).sum(1)
        for row, needed in enumerate((-(-self.cached // BLOCK)).tolist()):
            for place in range(needed):
                if self.table[row, place] < 0:
                    self.table[row, place] = self.free(1)[0]
        return self.table, self.before

    def append(self, k: Tensor, v: Tensor, where: Positions) -> Any:
        return self.cache.append(k, v, where, *self.rows_for(where, len(k)))

    def keep(self, accepted: list[int]) -> None:
        self.table, self.cached = self.cache.truncate(self.before + torch.tensor(accepted), self.table, self.cached)

    def reorder(self, rows: list[int]) -> None:
        free = self.free(len(rows))
        self.table, self.cached = self.cache.reorder(torch.tensor(rows), self.table, self.cached, free)
