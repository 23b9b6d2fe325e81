"""`PagedKVCache`: the keys and values of many sequences in blocks of one pool, for servers.

Sequences come, grow and go. Each has a table of blocks, in the order of its tokens, and the server keeps a list of free
blocks; nothing is moved, and blocks of a common prefix may stand in several tables (Kwon et al. 2023,
https://arxiv.org/abs/2309.06180). Tables and lengths are tensors on the device, so that a step of fixed shape asks the
device nothing, and compiles and replays like one of `StaticKVCache`.

`append` gathers the blocks of its rows for `attend`: a copy of their keys and values in every step, which a kernel that
reads through tables would spare.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locant.arguments import MAX_INT32, shape_error, whole
from locant.attention.cache import require_alike, require_tokens
from locant.attention.inputs import zero_padding
from locant.attention.static_cache import as_bytes, memory_of_read, new_memory, require_index, require_plain
from locant.errors import RangeError, ShapeError
from locant.positions import PositionEncoding, Positions
from locant.positions.documents import PADDING
from locant.tensors import bounds, readable, require_tensor

__all__ = ["PagedKVCache"]


class PagedKVCache:
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

    def __init__(
        self,
        num_blocks: int,
        *,
        block_size: int = 16,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        max_index: int | None = None,
        encoding: PositionEncoding | None = None,
    ) -> None:
        self.num_blocks = whole("num_blocks", num_blocks, 1, remedy="the number of blocks of all sequences")
        self.block_size = whole("block_size", block_size, 1, remedy="block_size=16")
        kv_heads = whole("kv_heads", kv_heads, 1, remedy="the number of key heads")
        head_dim = whole("head_dim", head_dim, 1, remedy="the width of a key")
        value_dim = whole("value_dim", head_dim if value_dim is None else value_dim, 1, remedy="the width of a value")
        largest = min(self.num_blocks * self.block_size - 1, MAX_INT32) if max_index is None else max_index
        self.max_index = whole("max_index", largest, 0, MAX_INT32, remedy="the largest position there will be")
        blocks = (self.num_blocks + 1, self.block_size)  # padding is written to the last one, which no table names
        self._keys = new_memory((*blocks, kv_heads, head_dim), dtype, device)
        self._values = new_memory((*blocks, kv_heads, value_dim), dtype, device)
        self._index = new_memory(blocks, torch.int64, device)
        self._document = new_memory(blocks, torch.int64, device)
        self._read = None if encoding is None else memory_of_read(encoding, *blocks, device)

    def append(
        self,
        k: Float[Tensor, "batch kv_heads new head_dim"],
        v: Float[Tensor, "batch kv_heads new value_dim"],
        positions: Positions,
        table: Int[Tensor, "batch blocks"],
        cached: Int[Tensor, " batch"],
    ) -> tuple[Float[Tensor, "batch kv_heads key head_dim"], Float[Tensor, "batch kv_heads key value_dim"], Positions]:
        """Store new tokens behind the `cached` ones of every row; returns the rows' slots and their positions.

        Padding among the new tokens takes no slot, so rows may have different numbers of them. Slots behind the last
        token are padding, whatever a block was used for before.

        Args:
            k, v: of the new tokens.
            positions: theirs.
            table: the blocks of every row, in the order of its tokens; -1 where a row has no more.
            cached: how many tokens every row has already.
        """
        require_tokens(k, v, positions)
        for name, store, new in (("keys", self._keys, k), ("values", self._values, v)):
            of_one_row = store.transpose(1, 2)[:1].expand(len(new), -1, -1, -1)
            require_alike(
                name, of_one_row, new, "PagedKVCache(...) of the heads, width, dtype and device of these keys"
            )
        require_plain(positions, self._read is not None)
        require_index(positions, self.max_index)
        _require_of_rows(table, cached, k)
        rows = positions.expand(k.shape[0])
        real = rows.document != PADDING
        lengths = cached + real.sum(1)
        self._require_within(table, cached, lengths)
        places = self._places(real, table, cached)
        new_keys, new_values = zero_padding(positions, k.detach(), v.detach())
        for store, new in ((self._keys, new_keys), (self._values, new_values)):
            tokens = as_bytes(new.transpose(1, 2).flatten(0, 1))
            as_bytes(store).flatten(0, 1).index_copy_(0, places, tokens)
        for store, new in ((self._index, rows.index), (self._document, rows.document)):
            store.view(-1).index_copy_(0, places, new.flatten())
        if self._read is not None and rows.as_key is not None:
            self._read.flatten(0, 1).index_copy_(0, places, rows.as_key.detach().flatten(0, 1))
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
        return Positions(self._index[table].flatten(1), document, None, 0, self.max_index, as_key=read)

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
    rows_of = torch.bincount(named[named >= 0])
    shared = (written >= 0) & (rows_of[written.clamp(min=0)] > 1)
    if bool(shared.any()):
        row, token = shared.nonzero()[0].tolist()
        got = f"got block {int(written[row, token])}, where new tokens of row {row} go, in another row of table too"
        raise RangeError(got, "a free block in that row; only full blocks may stand in several rows")


def _require_of_rows(table: Tensor, cached: Tensor, k: Tensor) -> None:
    """Raise unless there is a row of the table, and a number, for each row of the keys."""
    for name, x, ndim in (("table", table, 2), ("cached", cached, 1)):
        require_tensor(name, x)
        if x.dtype != torch.int64 or x.device != k.device:
            got = f"got {name} of {x.dtype} on {x.device}, expected torch.int64 on {k.device}"
            raise ShapeError(got, f"{name}.to(k.device, torch.int64)")
        if x.ndim != ndim or len(x) != len(k):
            expected = f"({len(k)}, blocks)" if ndim == 2 else f"({len(k)},)"
            raise shape_error(name, x, expected, "one row for each row of k")
