"""`PagedKVCache`: the keys and values of many sequences in blocks of one pool, for servers.

Sequences come, grow and go. Each has a table of blocks, in the order of its tokens, and the server keeps a list of free
blocks; nothing is moved, and blocks of a common prefix may stand in several tables (Kwon et al. 2023,
https://arxiv.org/abs/2309.06180). Tables and lengths are tensors on the device, so that a step of fixed shape asks the
device nothing, and compiles and replays like one of `StaticKVCache`. `truncate` and `reorder` give a server the tables
of rows that took drafts back, or are beams of one another.

`append` gathers the blocks of its rows for `attend`: a copy of their keys and values in every step, which a kernel that
reads through tables would spare.
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
    NewValues,
    Values,
    as_bytes,
    lengths_of,
    require_numbers,
    require_rows,
)
from locant.errors import RangeError, ShapeError
from locant.positions import PositionEncoding, Positions
from locant.positions.documents import PADDING
from locant.positions.fields import Read
from locant.spelling import dtype_name
from locant.tensors import bounds, readable, require_tensor


class PagedKVCache(FixedCache):
    """One layer's keys and values of any number of sequences. Keys go in rotated.

    For inference only, and for positions of one axis whose order is their index.

    Blocks that are full may stand in several rows. One that stands in a row twice, or that takes new tokens and stands
    in another row too, is refused on a CPU; on other devices, where asking would wait for them, it is not noticed, and
    keeps the later of its tokens.

    Args:
        num_blocks: how many there are, over all sequences.
        block_size: tokens in a block.
        kv_heads, head_dim: of the keys.
        value_dim: width of the values; default: `head_dim`.
        dtype: of both.
        device: where they are.
        max_index: no position is larger; default: what all blocks together can hold.
        encoding: of a layer whose bias is made from hidden states (`HiddenBias`): what it reads of keys is kept beside
            them, and it reads new tokens by ``encoding.read(x, positions, cache.positions_of(table, cached))``.

    >>> cache = PagedKVCache(10, block_size=4, kv_heads=2, head_dim=16)
    >>> table, cached = torch.tensor([[7, 2]]), torch.tensor([0])
    >>> k = v = torch.randn(1, 2, 5, 16)
    >>> keys, values, k_positions = cache.append(k, v, Positions.arange(5), table, cached)
    >>> keys.shape, k_positions.document
    (torch.Size([1, 2, 8, 16]), tensor([[ 0,  0,  0,  0,  0, -1, -1, -1]]))
    >>> Positions.after(cached + 5, 1, max_index=cache.max_index).index  # the next token's
    tensor([[5]])
    """

    REMEDY = "PagedKVCache(...) of the heads, width, dtype and device of these keys"

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
        self.num_blocks = whole("num_blocks", num_blocks, 1, remedy="the number of blocks of all sequences")
        self.block_size = whole("block_size", block_size, 1, remedy="block_size=16")
        largest = min(self.num_blocks * self.block_size - 1, MAX_INT32) if max_index is None else max_index
        blocks = (self.num_blocks + 1, self.block_size)  # padding is written to the last one, which no table names
        super().__init__(
            blocks, 2, largest, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim, dtype=dtype, device=device,
            encoding=encoding,
        )  # fmt: skip

    def _like(self, store: Tensor, new: Tensor) -> Tensor:
        return store.transpose(1, 2)[:1].expand(len(new), -1, -1, -1)

    def append(
        self,
        k: NewKeys,
        v: NewValues,
        positions: Positions,
        table: Int[Tensor, "batch blocks"],
        cached: Int[Tensor, " batch"],
    ) -> tuple[Keys, Values, Positions]:
        """Store new tokens after the `cached` ones of every row; returns the rows' slots and their positions.

        Padding among the new tokens takes no slot, so rows may have different numbers of them. Slots after the last
        token are padding, whatever a block was used for before.

        Args:
            k, v: of the new tokens.
            positions: theirs.
            table: the blocks of every row, in the order of its tokens; -1 where a row has no more.
            cached: how many tokens every row has already.
        """
        self._require_tokens(k, v, positions)
        _require_of_rows(table, cached, len(k), k.device)
        rows = positions.expand(k.shape[0])
        real = rows.document != PADDING
        lengths = cached + real.sum(1)
        self._require_within(table, cached, lengths)
        if not table.shape[1]:
            return self._gathered(table, lengths)  # rows without a block, of padding alone
        places = self._places(real, table, cached)
        pair = (as_bytes(x.transpose(1, 2)) for x in zero_padding(positions, k.detach(), v.detach()))
        read = () if rows.read.of_key is None else (rows.read.of_key.detach(),)
        for store, new in zip(self._stores, (*pair, rows.index, rows.document, *read), strict=True):
            store.flatten(0, 1).index_copy_(0, places, new.flatten(0, 1))
        return self._gathered(table, lengths)

    def positions_of(self, table: Int[Tensor, "batch blocks"], cached: Int[Tensor, " batch"]) -> Positions:
        """The positions of the tokens that these rows have already, as `append` returns them with new ones.

        >>> cache = PagedKVCache(10, block_size=4, kv_heads=2, head_dim=16)
        >>> cache.positions_of(torch.tensor([[7, 2]]), torch.tensor([0])).document
        tensor([[-1, -1, -1, -1, -1, -1, -1, -1]])
        """
        slots = torch.arange(table.shape[1] * self.block_size, device=table.device)
        document = torch.where(slots < cached[:, None], self._document[table].flatten(1), PADDING)
        read = None if self._read is None else self._read[table].flatten(1, 2)
        return Positions(self._index[table].flatten(1), document, None, 0, self.max_index, read=Read(None, read))

    def truncate(
        self, length: Length, table: Int[Tensor, "batch blocks"], cached: Int[Tensor, " batch"]
    ) -> tuple[Int[Tensor, "batch blocks"], Int[Tensor, " batch"]]:
        """The table and the numbers of rows that keep their first `length` tokens: drafts that were not accepted.

        Blocks that a row no longer needs are -1 in it, and free where no other row has them.

        >>> cache = PagedKVCache(10, block_size=4, kv_heads=2, head_dim=16)
        >>> cache.truncate(torch.tensor([3, 6]), torch.tensor([[7, 2], [1, 4]]), torch.tensor([5, 8]))
        (tensor([[ 7, -1],
                [ 1,  4]]), tensor([3, 6]))
        """
        _require_of_rows(table, cached, None, self._keys.device)
        lengths = lengths_of(length, cached, len(cached), cached.device)
        begins = torch.arange(table.shape[1], device=table.device) * self.block_size
        return table.where(begins < lengths[:, None], -1), lengths

    def reorder(
        self,
        rows: Int[Tensor, " rows"],
        table: Int[Tensor, "batch blocks"],
        cached: Int[Tensor, " batch"],
        free: Int[Tensor, " rows"],
    ) -> tuple[Int[Tensor, "rows blocks"], Int[Tensor, " rows"]]:
        """The table and the numbers of these rows, of which some may come several times: beams.

        Full blocks are shared. Of a block that is not, because new tokens of a row go there, and that another row has
        too, the row gets a copy: the one in its place in `free`, which is otherwise not used.

        >>> cache = PagedKVCache(10, block_size=4, kv_heads=2, head_dim=16)
        >>> rows, free = torch.tensor([0, 0]), torch.tensor([5, 9])
        >>> cache.reorder(rows, torch.tensor([[7, 2], [1, 4]]), torch.tensor([6, 8]), free)
        (tensor([[7, 2],
                [7, 9]]), tensor([6, 6]))
        """
        _require_of_rows(table, cached, None, self._keys.device)
        require_rows(rows, len(table), table.device)
        require_numbers("free", free, len(rows), table.device)
        table, cached = table.index_select(0, rows), cached.index_select(0, rows)
        if not table.shape[1]:
            return table, cached
        last = (cached - 1).clamp(min=0) // self.block_size
        blocks = table.gather(1, last[:, None])[:, 0]
        others = blocks[:, None] == table.index_select(1, last).T  # whether another row has the last block of a row
        number, more = torch.arange(len(rows), device=rows.device), cached - cached[:, None]
        before = (more > 0) | ((more == 0) & (number < number[:, None]))  # the one with the most tokens in it keeps it
        copied = (cached % self.block_size != 0) & (others & before).any(1)
        self._require_free(free[copied] if readable(free) else free, table)
        places = torch.where(copied, free, self.num_blocks)
        for store in self._stores:
            store.index_copy_(0, places, store.index_select(0, blocks.clamp(min=0)))
        return table.scatter(1, last[:, None], torch.where(copied, free, blocks)[:, None]), cached

    def _places(self, real: Tensor, table: Tensor, cached: Tensor) -> Int[Tensor, " tokens"]:
        """Of every new token in the pool, counted over all blocks."""
        slots = cached[:, None] + real.cumsum(1) - 1
        blocks = table.gather(1, torch.where(real, slots // self.block_size, 0))
        if readable(blocks) and bool((missing := (blocks < 0) & real).any()):
            row = int(missing.any(1).nonzero()[0, 0])
            raise RangeError(f"got -1 in row {row} of table where its new tokens go", "a free block in its place")
        _require_own_blocks(table, torch.where(real, blocks, -1))
        places = blocks * self.block_size + slots % self.block_size
        return torch.where(real, places, self.num_blocks * self.block_size).flatten()

    def _require_free(self, free: Tensor, table: Tensor) -> None:
        """Raise, on a CPU, unless blocks that are written to are different ones, and no row has them."""
        if not (readable(free) and readable(table)):
            return
        taken = torch.isin(free, table) | (free < 0) | (free >= self.num_blocks)
        taken |= (free[:, None] == free).sum(1) > 1
        if bool(taken.any()):
            block = int(free[taken.nonzero()[0, 0]])
            got = f"got block {block} in free for a copy, expected blocks 0 to {self.num_blocks - 1} in no row, once"
            raise RangeError(got, "a free block for each row")

    def _gathered(self, table: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Positions]:
        keys, values = (store[table].flatten(1, 2).transpose(1, 2) for store in (self._keys, self._values))
        positions = self.positions_of(table, lengths)
        keys, values = zero_padding(positions, keys, values)  # a block may hold NaN of the sequence it was used for
        return keys, values, positions

    def _require_within(self, table: Tensor, cached: Tensor, lengths: Tensor) -> None:
        """Raise, on a CPU, unless there are such blocks and rows fit into their tables."""
        if not (readable(table) and readable(lengths) and len(lengths)):
            return
        low, high = bounds(table)
        if low is not None and high is not None and not -1 <= low <= high < self.num_blocks:
            got = f"got table with {low if low < -1 else high}, expected blocks 0 to {self.num_blocks - 1}, or -1"
            raise RangeError(got, "PagedKVCache(num_blocks=...) with more")
        held, needed = table.shape[1] * self.block_size, int(lengths.max())
        if int(cached.min()) < 0 or needed > held:
            got = f"got cached from {int(cached.min())} on, and {needed} tokens with the new ones, for {held} slots"
            raise RangeError(got, "one more block at the end of every table")


def _require_own_blocks(table: Tensor, written: Int[Tensor, "batch new"]) -> None:
    """Raise, on a CPU, where a block would hold two tokens in one place; `written` is -1 at padding."""
    if not readable(table):
        return
    named = table.sort(1).values
    twice = (named[:, 1:] == named[:, :-1]) & (named[:, 1:] >= 0)
    if bool(twice.any()):
        row, place = twice.nonzero()[0].tolist()
        got = f"got block {int(named[row, place])} twice in row {row} of table"
        raise RangeError(got, "another free block in its second place")
    rows_of = torch.bincount(named[named >= 0], minlength=1)
    shared = (written >= 0) & (rows_of[written.clamp(min=0)] > 1)
    if bool(shared.any()):
        row, token = shared.nonzero()[0].tolist()
        got = f"got block {int(written[row, token])}, where new tokens of row {row} go, in another row of table too"
        remedy = "reorder(torch.arange(len(table)), table, cached, free), which gives that row a copy of it"
        raise RangeError(got, f"{remedy}, or a free block there; only full blocks may stand in several rows")


def _require_of_rows(table: Tensor, cached: Tensor, rows: int | None, device: torch.device) -> None:
    """Raise unless there is a row of the table, and a number, for each of these rows, or for each other."""
    require_tensor("table", table)
    if table.dtype != torch.int64 or table.device != device:
        got = f"got table of {dtype_name(table.dtype)} on {table.device}, expected int64 on {device}"
        raise ShapeError(got, f"table.to({str(device)!r}, torch.int64)")
    if table.ndim != 2 or rows not in (None, len(table)):
        expected = "(rows, blocks)" if rows is None else f"({rows}, blocks)"
        raise shape_error("table", table, expected, "one row for each row of k")
    require_numbers("cached", cached, len(table), device)
