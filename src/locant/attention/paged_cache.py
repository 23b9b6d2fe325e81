"""`PagedKVCache`: the keys and values of many sequences in blocks of one pool, for servers.

Sequences start, grow and end. Each sequence has a table of blocks, in the order of its tokens, and the server keeps a
list of free blocks. Tokens are not moved, and several tables may share the blocks of a common prefix (Kwon et al. 2023,
https://arxiv.org/abs/2309.06180). Tables and lengths are tensors on the device. So a step of fixed shape does not wait
for the device, and it can be compiled and replayed like a step of `StaticKVCache`. `truncate` returns the tables
without rejected draft tokens, and `reorder` returns the tables of beams.

`append` gathers the blocks of its rows for `attend`. This copies their keys and values in every step. A kernel that
reads through tables would not need a copy.
"""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from locant.arguments import MAX_INT32, shape_error, whole
from locant.attention.inputs import zero_padding
from locant.attention.memory import (
    FixedCache,
    Keys,
    Length,
    NewKeys,
    NewQueries,
    NewValues,
    RotatedKeys,
    RotatedQueries,
    Values,
    as_bytes,
)
from locant.errors import RangeError, ShapeError
from locant.kernels.norm_rotary import HeadNorm
from locant.positions import PositionEncoding, Positions
from locant.positions.cached_rows import check_lengths, require_numbers, require_rows
from locant.positions.documents import PADDING
from locant.positions.fields import TokenFeatures
from locant.spelling import dtype_name
from locant.tensors import bounds, host_can_read, require_tensor


class PagedKVCache(FixedCache):
    """One layer's keys and values for any number of sequences. Append rotated keys.

    The cache is for inference only, and for positions with one axis whose order is their index.

    Several rows may share a full block. On a CPU, `append` raises an error if a row has the same block twice, or if
    `append` would write to a shared block. On other devices it does not check this, because a check would wait for the
    device. There, the later token overwrites the earlier token.

    Args:
        num_blocks: the number of blocks for all sequences.
        block_size: the number of tokens in a block.
        kv_heads, head_dim: the shape of the keys.
        value_dim: the width of the values. Default: `head_dim`.
        dtype: the dtype of keys and values.
        device: the device of keys and values.
        max_index: the largest position. Default: the number of tokens in all blocks, minus one.
        encoding: an encoding that reads hidden states (`HiddenBias`). The cache also stores the encoding's features of
            every key. Read new tokens with ``encoding.read(x, positions, cache.positions_of(table, cached))``.

    >>> cache = PagedKVCache(10, block_size=4, kv_heads=2, head_dim=16)
    >>> table, cached = torch.tensor([[7, 2]]), torch.tensor([0])
    >>> k = v = torch.randn(1, 2, 5, 16)
    >>> keys, values, k_positions = cache.append(k, v, Positions.arange(5), table, cached)
    >>> keys.shape, k_positions.document
    (torch.Size([1, 2, 8, 16]), tensor([[ 0,  0,  0,  0,  0, -1, -1, -1]]))
    >>> Positions.after(cached + 5, 1, max_index=cache.max_index).index  # the next token's
    tensor([[5]])
    """

    _REMEDY = "create PagedKVCache(...) with the heads, width, dtype and device of these keys"

    def __init__(
        self,
        num_blocks: int,
        *,
        block_size: int = 16,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        dtype: torch.dtype | str = torch.float32,
        device: torch.device | str | None = None,
        max_index: int | None = None,
        encoding: PositionEncoding | None = None,
    ) -> None:
        self.num_blocks = whole("num_blocks", num_blocks, 1, remedy="pass the number of blocks for all sequences")
        self.block_size = whole("block_size", block_size, 1, remedy="block_size=16")
        largest = min(self.num_blocks * self.block_size - 1, MAX_INT32) if max_index is None else max_index
        blocks = (self.num_blocks + 1, self.block_size)  # padding is written to the last block, which no table has
        super().__init__(
            blocks, 2, largest, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim, dtype=dtype, device=device,
            encoding=encoding,
        )  # fmt: skip

    def _with_new_dimensions(self, store: Tensor, new: Tensor) -> Tensor:
        return store.transpose(1, 2)[:1].expand(len(new), -1, -1, -1)

    def append(
        self,
        k: NewKeys,
        v: NewValues,
        positions: Positions,
        table: Int[Tensor, "batch blocks"],
        cached: Int[Tensor, " batch"],
    ) -> tuple[Keys, Values, Positions]:
        """Store new tokens after the `cached` tokens of every row. Return all slots of the rows and their positions.

        Padding among the new tokens does not use a slot, so rows may have different numbers of new tokens. Slots after
        the last token are padding, even if an earlier sequence used the block.

        Args:
            k, v: keys and values of the new tokens.
            positions: positions of the new tokens.
            table: the blocks of every row, in the order of its tokens. -1 means that a row has no more blocks.
            cached: the number of tokens that every row already has.
        """
        self._require_tokens(k, v, positions)
        _require_table(table, cached, len(k), k.device)
        rows = positions.expand(k.shape[0])
        real = rows.document != PADDING
        lengths = cached + real.sum(1)
        self._require_within(table, cached, lengths)
        if not table.shape[1]:
            return self._gather(table, lengths)  # rows without blocks contain only padding
        slots = self._pool_slots(real, table, cached)
        pair = (as_bytes(x.transpose(1, 2)) for x in zero_padding(positions, k.detach(), v.detach()))
        features = () if rows.read.of_key is None else (rows.read.of_key.detach(),)
        for store, new in zip(self._stores, (*pair, rows.index, rows.document, *features), strict=True):
            store.flatten(0, 1).index_copy_(0, slots, new.flatten(0, 1))
        return self._gather(table, lengths)

    def rotate_and_append(
        self,
        rotary: PositionEncoding,
        q: NewQueries,
        k: NewKeys,
        v: NewValues,
        positions: Positions,
        table: Int[Tensor, "batch blocks"],
        cached: Int[Tensor, " batch"],
        *,
        norm: HeadNorm | None = None,
        inplace: bool = False,
    ) -> tuple[RotatedQueries, RotatedKeys, Values, Positions]:
        """Rotate queries and keys and store the new tokens, with the results of `KVCache.rotate_and_append`.

        The slots of new tokens are not next to each other in the pool, so the rotated keys are copied into them.
        """
        return self._rotate_and_append(rotary, q, k, v, positions, norm, inplace, table, cached)

    def positions_of(self, table: Int[Tensor, "batch blocks"], cached: Int[Tensor, " batch"]) -> Positions:
        """Return the positions of the tokens that these rows already have, in the form that `append` returns.

        >>> cache = PagedKVCache(10, block_size=4, kv_heads=2, head_dim=16)
        >>> cache.positions_of(torch.tensor([[7, 2]]), torch.tensor([0])).document
        tensor([[-1, -1, -1, -1, -1, -1, -1, -1]])
        """
        slots = torch.arange(table.shape[1] * self.block_size, device=table.device)
        document = torch.where(slots < cached[:, None], self._document[table].flatten(1), PADDING)
        features = None if self._read is None else self._read[table].flatten(1, 2)
        return Positions(
            self._index[table].flatten(1), document, None, 0, self.max_index, read=TokenFeatures(None, features)
        )

    def truncate(
        self, length: Length, table: Int[Tensor, "batch blocks"], cached: Int[Tensor, " batch"]
    ) -> tuple[Int[Tensor, "batch blocks"], Int[Tensor, " batch"]]:
        """Return the table and the lengths of rows that keep only `length` tokens, for example after rejected drafts.

        Blocks that a row no longer needs become -1. They are free if no other row has them.

        >>> cache = PagedKVCache(10, block_size=4, kv_heads=2, head_dim=16)
        >>> cache.truncate(torch.tensor([3, 6]), torch.tensor([[7, 2], [1, 4]]), torch.tensor([5, 8]))
        (tensor([[ 7, -1],
                [ 1,  4]]), tensor([3, 6]))
        """
        _require_table(table, cached, None, self._keys.device)
        lengths = check_lengths(length, cached, len(cached), cached.device)
        starts = torch.arange(table.shape[1], device=table.device) * self.block_size
        return table.where(starts < lengths[:, None], -1), lengths

    def reorder(
        self,
        rows: Int[Tensor, " rows"],
        table: Int[Tensor, "batch blocks"],
        cached: Int[Tensor, " batch"],
        free: Int[Tensor, " rows"],
    ) -> tuple[Int[Tensor, "rows blocks"], Int[Tensor, " rows"]]:
        """Return the table and the lengths of these rows, in this order, for beam search. Rows may be repeated.

        Rows share full blocks. If several rows have the same unfilled block, one row keeps it. Each other row gets a
        copy, in its own block of `free`. The remaining blocks of `free` stay unused.

        >>> cache = PagedKVCache(10, block_size=4, kv_heads=2, head_dim=16)
        >>> rows, free = torch.tensor([0, 0]), torch.tensor([5, 9])
        >>> cache.reorder(rows, torch.tensor([[7, 2], [1, 4]]), torch.tensor([6, 8]), free)
        (tensor([[7, 2],
                [7, 9]]), tensor([6, 6]))
        """
        _require_table(table, cached, None, self._keys.device)
        require_rows(rows, len(table), table.device)
        require_numbers("free", free, len(rows), table.device)
        table, cached = table.index_select(0, rows), cached.index_select(0, rows)
        if not table.shape[1]:
            return table, cached
        last = (cached - 1).clamp(min=0) // self.block_size
        blocks = table.gather(1, last[:, None])[:, 0]
        is_shared = blocks[:, None] == table.index_select(1, last).T  # whether another row has the last block of a row
        row_ids, difference = torch.arange(len(rows), device=rows.device), cached - cached[:, None]
        # The row with the most tokens in a block keeps it.
        has_priority = (difference > 0) | ((difference == 0) & (row_ids < row_ids[:, None]))
        needs_copy = (cached % self.block_size != 0) & (is_shared & has_priority).any(1)
        self._require_free(free[needs_copy] if host_can_read(free) else free, table)
        targets = torch.where(needs_copy, free, self.num_blocks)
        for store in self._stores:
            store.index_copy_(0, targets, store.index_select(0, blocks.clamp(min=0)))
        return table.scatter(1, last[:, None], torch.where(needs_copy, free, blocks)[:, None]), cached

    def _pool_slots(self, real: Tensor, table: Tensor, cached: Tensor) -> Int[Tensor, " tokens"]:
        """Return the slot of every new token in the pool, counted over all blocks."""
        slots = cached[:, None] + real.cumsum(1) - 1
        blocks = table.gather(1, torch.where(real, slots // self.block_size, 0))
        if host_can_read(blocks) and bool((missing := (blocks < 0) & real).any()):
            row = int(missing.any(1).nonzero()[0, 0])
            raise RangeError(f"got -1 in row {row} of table for its new tokens", "put a free block there")
        _require_own_blocks(table, torch.where(real, blocks, -1))
        pool_slots = blocks * self.block_size + slots % self.block_size
        return torch.where(real, pool_slots, self.num_blocks * self.block_size).flatten()

    def _require_free(self, free: Tensor, table: Tensor) -> None:
        """Raise, on a CPU, unless the blocks to write to exist, differ from each other, and are not in `table`."""
        if not (host_can_read(free) and host_can_read(table)):
            return
        is_used = torch.isin(free, table) | (free < 0) | (free >= self.num_blocks)
        is_used |= (free[:, None] == free).sum(1) > 1
        if bool(is_used.any()):
            block = int(free[is_used.nonzero()[0, 0]])
            got = f"got block {block} in free for a copy, expected blocks 0 to {self.num_blocks - 1} in no row, once"
            raise RangeError(got, "pass a free block for each row")

    def _gather(self, table: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Positions]:
        keys, values = (store[table].flatten(1, 2).transpose(1, 2) for store in (self._keys, self._values))
        positions = self.positions_of(table, lengths)
        keys, values = zero_padding(positions, keys, values)  # a block may contain NaN from an earlier sequence
        return keys, values, positions

    def _require_within(self, table: Tensor, cached: Tensor, lengths: Tensor) -> None:
        """Raise, on a CPU, unless all blocks exist and rows fit into their tables."""
        if not (host_can_read(table) and host_can_read(lengths) and len(lengths)):
            return
        low, high = bounds(table)
        if low is not None and high is not None and not -1 <= low <= high < self.num_blocks:
            got = f"got table with {low if low < -1 else high}, expected blocks 0 to {self.num_blocks - 1}, or -1"
            raise RangeError(got, "create PagedKVCache(num_blocks=...) with more blocks")
        slots, needed = table.shape[1] * self.block_size, int(lengths.max())
        if int(cached.min()) < 0 or needed > slots:
            got = f"got cached from {int(cached.min())} on, and {needed} tokens with the new ones, for {slots} slots"
            raise RangeError(got, "add a block at the end of every table")


def _require_own_blocks(table: Tensor, written: Int[Tensor, "batch new"]) -> None:
    """Raise, on a CPU, if two tokens would use one slot. `written` is the block of each token, -1 at padding."""
    if not host_can_read(table):
        return
    blocks = table.sort(1).values
    is_repeated = (blocks[:, 1:] == blocks[:, :-1]) & (blocks[:, 1:] >= 0)
    if bool(is_repeated.any()):
        row, column = is_repeated.nonzero()[0].tolist()
        got = f"got block {int(blocks[row, column])} twice in row {row} of table"
        raise RangeError(got, "replace its second occurrence by a free block")
    num_rows = torch.bincount(blocks[blocks >= 0], minlength=1)
    is_shared = (written >= 0) & (num_rows[written.clamp(min=0)] > 1)
    if bool(is_shared.any()):
        row, token = is_shared.nonzero()[0].tolist()
        got = f"got block {int(written[row, token])} for new tokens of row {row}, but another row of table has it too"
        remedy = "reorder(torch.arange(len(table)), table, cached, free), which gives that row a copy of it"
        raise RangeError(got, f"{remedy}, or use a free block there; rows may share only full blocks")


def _require_table(table: Tensor, cached: Tensor, rows: int | None, device: torch.device) -> None:
    """Raise unless `table` has `rows` rows (``None``: any number) and `cached` has one number for each row."""
    require_tensor("table", table)
    if table.dtype != torch.int64 or table.device != device:
        got = f"got table of {dtype_name(table.dtype)} on {table.device}, expected int64 on {device}"
        raise ShapeError(got, f"table.to({str(device)!r}, torch.int64)")
    if table.ndim != 2 or rows not in (None, len(table)):
        expected = "(rows, blocks)" if rows is None else f"({rows}, blocks)"
        raise shape_error("table", table, expected, "pass one row for each row of k")
    require_numbers("cached", cached, len(table), device)
