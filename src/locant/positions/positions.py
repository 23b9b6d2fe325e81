"""`Positions`: the position of every token, as one immutable object.

Position ids, padding masks, document boundaries and cache offsets are usually passed side by side, and most position
bugs are two of them disagreeing. Here they come from one place. Costs one or two integers a token.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from locant.arguments import entries, flag, whole
from locant.errors import LocantError, RangeError, ShapeError
from locant.positions import checks, documents, pairs
from locant.positions.batches import batch_of, fields_of_batch
from locant.positions.documents import PADDING, MaskMod, is_allowed, window_of
from locant.positions.fields import NOT_READ, Read, equal, flat, joined, register_pytree, unflat
from locant.positions.grids import Grid, fields_of_grids, grid_of, pack_grids, rows_of_grids
from locant.positions.multimodal import Counting, Parts, fields_of_parts
from locant.tensors import bounds, has_values, readable

Device = torch.device | str | None
Numbers = Tensor | np.ndarray | Sequence[object]


@dataclass(frozen=True, eq=False, repr=False)
class Positions:
    """The position of every token: an index, a document and an order. The named constructors check what they take.

    Args:
        index: how far each token is into its document; on a grid, its coordinates.
        document_or_none: ``None``: one document, no padding. `document` is the same as a tensor.
        order_or_none: ``None``: the index itself. `order` is the same as a tensor.
        min_index, max_index: no index is smaller, or larger; ``None`` where only the device knows.
        start: set where every row is known to be one document counting ``start, start + 1, ...``.
        denominator: an index counts such parts of a position, so that fractions have exact angles, too.
        read: what `PositionEncoding.read` has read of the hidden states of each token.
        place_or_none: of which prefix token or cell of `grids` each token is, counted through all of them.
        grids: the sizes of the grids that tokens stand in, whole, whichever part of them is here; none: no grid.

    >>> Positions.packed([2, 3]).index, Positions.packed([2, 3]).document
    (tensor([[0, 1, 0, 1, 2]]), tensor([[0, 0, 1, 1, 1]]))
    """

    index: Int[Tensor, "batch seq"] | Int[Tensor, "batch seq axes"]
    document_or_none: Int[Tensor, "batch seq"] | None = None
    order_or_none: Int[Tensor, "batch seq"] | None = None
    min_index: int | None = None
    max_index: int | None = None
    start: int | None = None
    denominator: int = 1
    read: Read = NOT_READ
    place_or_none: Int[Tensor, "batch seq"] | None = None
    grids: tuple[Grid, ...] = ()

    def __post_init__(self) -> None:
        checks.require_index(self.index)

    @classmethod
    def arange(cls, seq_len: int, *, batch: int = 1, device: Device = None) -> Positions:
        """0, 1, ..., seq_len - 1 in every row."""
        return cls._counting(0, checks.token_count("seq_len", seq_len), batch, device)

    @classmethod
    def after(
        cls, cache_len: int | Numbers, n: int, *, device: Device = None, max_index: int | None = None
    ) -> Positions:
        """The `n` positions that follow `cache_len` cached tokens; `cache_len` may differ from row to row.

        `max_index` saves the sync that reading `cache_len` from an accelerator would cost.

        >>> Positions.after([3, 5], 2).index.tolist()
        [[3, 4], [5, 6]]
        """
        device, max_index, n = checks.known_device(device), checks.index_bound(max_index), checks.token_count("n", n)
        if isinstance(cache_len, (int, np.integer)):
            cache_len = checks.token_count("cache_len", cache_len, "the number of tokens already cached")
            return cls._counting(cache_len, n, 1, device)
        lengths = checks.lengths_of("cache_len", cache_len, device)
        index = lengths[:, None] + torch.arange(n, device=lengths.device)
        low, high = bounds(index) if max_index is None else (0, max_index)
        if low is not None and low < 0:
            raise RangeError(f"got cache_len with {low}, expected 0 or more", "cache_len=0 for an empty cache")
        return cls.checked(index, None, None, low, high)

    @classmethod
    def from_mask(cls, attention_mask: Tensor) -> Positions:
        """Count the real tokens of each row; zeros of the mask are padding, on either side or between.

        Args:
            attention_mask: ``batch seq`` (or ``seq``), bool or 0/1 numbers, one for every real token.

        >>> Positions.from_mask(torch.tensor([[0, 0, 1, 1]])).document
        tensor([[-1, -1,  0,  0]])
        """
        real = checks.padding_mask(attention_mask)
        if readable(real) and bool(real.all()):
            return cls.arange(real.shape[1], batch=real.shape[0], device=real.device)
        index = (real.long().cumsum(1) - 1).clamp(min=0)
        low, high = bounds(index) if readable(index) else (0, max(real.shape[1] - 1, 0))
        return cls(index, torch.where(real, 0, PADDING), None, low, high)

    @classmethod
    def packed(
        cls, lengths: Sequence[int] | Sequence[Sequence[int]], *, length: int | None = None, device: Device = None
    ) -> Positions:
        """Several documents in one row, each counting from 0; or one such list per row.

        Rows are filled up with padding to `length` (default: the longest row). A document of length 0 leaves no
        token, but keeps its number.

        >>> Positions.packed([[2, 1], [1]]).document.tolist()
        [[0, 0, 1], [0, -1, -1]]
        """
        rows = checks.rows_of("lengths", lengths)
        index, document = checks.on_device(device, *documents.pack(rows, length))
        return cls.checked(index, document, None, 0, max([1, *itertools.chain.from_iterable(rows)]) - 1)

    @classmethod
    def grid(cls, *sizes: int, centred: bool = False, prefix: int = 0, device: Device = None) -> Positions:
        """The coordinates of a grid, row-major: ``grid(h, w)`` for an image, ``grid(t, h, w)`` for a video.

        Args:
            centred: each axis goes from -1 to 1 over the whole grid, and a token is in the middle of its cell (DINOv3):
                index over `denominator`, at which angles stay exact.
            prefix: so many tokens (class token, registers) before the cells. Their index is 0 on all axes, which no
                rotation turns; encodings of grids tell them from cells by their places, which come first.

        >>> Positions.grid(2, 2).index.tolist()
        [[[0, 0], [0, 1], [1, 0], [1, 1]]]
        >>> Positions.grid(1, 4, centred=True, prefix=1)
        Positions(1x5x2, index -4..4, over 4, grid 1x4 after 1)
        """
        grid, device = grid_of(sizes, prefix), checks.known_device(device)
        place, order = (torch.arange(grid.num_tokens, device=device)[None] for _ in range(2))
        return cls.checked(**fields_of_grids((grid,), flag("centred", centred), place, order, None))

    @classmethod
    def packed_grids(
        cls,
        grids: Sequence[Sequence[int]] | Sequence[Sequence[Sequence[int]]],
        *,
        centred: bool = False,
        prefix: int = 0,
        length: int | None = None,
        device: Device = None,
    ) -> Positions:
        """Several images in one row, each as in `grid` and a document of its own; or one such list per row.

        A tuple holds the sizes of an image, ``(height, width)``; rows are filled up as in `packed`. With `centred`, all
        sides in one call need a common multiple below 2^31.

        >>> Positions.packed_grids([(1, 2), (2, 1)], prefix=1).index[0].tolist()
        [[0, 0], [0, 0], [0, 1], [0, 0], [0, 0], [1, 0]]
        """
        rows = rows_of_grids(grids, prefix)
        different, *slots = pack_grids(rows, length)
        return cls.checked(**fields_of_grids(different, flag("centred", centred), *checks.on_device(device, *slots)))

    @classmethod
    def multimodal(
        cls,
        parts: Parts,
        *,
        merge: int = 1,
        merge_frames: int = 1,
        goes_on: str = "largest",
        denominator: int = 1,
        length: int | None = None,
        padding: str = "right",
        device: Device = None,
    ) -> Positions:
        """Text with images and videos, ``(time, row, column)`` each, as vision-language models count them.

        Args:
            parts: of a document: a number of text tokens, or a grid ``(frames, rows, columns)`` of patches; a fourth
                number is the step from frame to frame (Qwen2.5-VL: ``tokens_per_second`` x seconds per frame). Or a
                list of documents that are packed in one row; or a list of such rows.
            merge: blocks of so many by so many patches are one token.
            merge_frames: so many frames of a video are one (ERNIE-4.5-VL); a single one stays one.
            goes_on: text after a grid begins after its ``"largest"`` index, frames included (as these models were
                published), or after its ``"sides"``, rows and columns (`transformers` 5).
            denominator: of a position, for steps that are fractions (Qwen3-Omni). With 1, the time of a frame is cut
                off to a whole number.
            length: of every row; default: the longest.
            padding: on which side of a row, ``"right"`` or ``"left"``.

        >>> Positions.multimodal([2, (1, 2, 4), 1], merge=2).index[0].tolist()
        [[0, 0, 0], [1, 1, 1], [2, 2, 2], [2, 2, 3], [4, 4, 4]]
        """
        counting = Counting(merge=merge, merge_frames=merge_frames, goes_on=goes_on, denominator=denominator)
        return cls.checked(**fields_of_parts(parts, counting, length, padding, device))

    @classmethod
    def of(
        cls,
        index: Numbers,
        document: Numbers | None = None,
        *,
        order: Numbers | None = None,
        max_index: int | None = None,
        denominator: int = 1,
    ) -> Positions:
        """Anything else: any integer index per token, negative ones included.

        Args:
            index: ``seq``, ``batch seq`` or ``batch seq axes``, each in -2**31 + 1 .. 2**31 - 1.
            document: ``seq`` or ``batch seq``; -1 is padding; default: one document.
            order: ``seq`` or ``batch seq``; default: the index, or the slot in the row where there are several axes.
            max_index: as in `after`.
            denominator: of an index: ``3`` over 2 is position 1.5. `Rotary` has exact angles there, too; what counts
                whole tokens refuses it. The order is then the slot in the row.
        """
        max_index = checks.index_bound(max_index)
        denominator = whole("denominator", denominator, 1, remedy="denominator=1")
        where = checks.index_of(index)
        document_ids, orders = checks.row_of("document", document, where), checks.row_of("order", order, where)
        if document_ids is not None:
            documents.require_documents(document_ids)
        if (where.ndim == 3 or denominator > 1) and orders is None:
            orders = torch.arange(where.shape[1], device=where.device).expand(where.shape[:2])
        low, high = bounds(where) if max_index is None else (None, max_index)
        return cls.checked(where, document_ids, orders, low, high, None, denominator)

    @classmethod
    def cat(cls, parts: Sequence[Positions]) -> Positions:
        """Join along the sequence: an image between two texts, a cache and the tokens after it.

        The same document number is the same document. An order that begins at 0, as that of a grid does, goes on where
        the part before it ended. What was read of all parts is joined for keys alone, as a cache keeps it.
        """
        parts = entries("parts", parts, "Positions.cat([text, image])")
        for part in parts:
            require_positions(part)
        return cls(**joined(parts))

    @classmethod
    def from_batch(cls, batch: Mapping[str, Any]) -> Positions:
        """The positions of a batch of `transformers`, trl and other trainers; the inverse of `to_batch`.

        Read are ``position_ids`` (``batch seq``; ``3 batch seq``, or ``4`` with ids of text before those of the axes),
        ``attention_mask`` (zeros and ones, or documents numbered from 1) and ``cu_seq_lens_q`` or ``_k``. Two of them
        that tell different documents are a `LocantError`; `locant check-batch` says where they differ.

        >>> Positions.from_batch({"position_ids": torch.tensor([[0, 1, 0, 1, 2]])}).document
        tensor([[0, 0, 1, 1, 1]])
        """
        index, document, order = fields_of_batch(batch)
        return cls.of(index, document, order=order)

    @classmethod
    def _counting(cls, start: int, n: int, batch: int, device: Device) -> Positions:
        batch = checks.token_count("batch", batch, "a number of rows")
        index = torch.arange(start, start + n, device=checks.known_device(device)).expand(batch, n)
        return cls.checked(index, None, None, start, max(start + n - 1, start), start)

    @classmethod
    def checked(cls, *fields: Any, **named: Any) -> Positions:
        """Positions of these fields, whose bounds fit 32 bits."""
        positions = cls(*fields, **named)
        checks.require_bounds(positions.min_index, positions.max_index)
        return positions

    @property
    def batch(self) -> int:
        return self.index.shape[0]

    @property
    def seq_len(self) -> int:
        return self.index.shape[1]

    @property
    def axes(self) -> int:
        return self.index.shape[2] if self.index.ndim == 3 else 1

    @property
    def device(self) -> torch.device:
        return self.index.device

    @property
    def document(self) -> Int[Tensor, "batch seq"]:
        """The document of every token; -1 is padding."""
        if self.document_or_none is not None:
            return self.document_or_none
        return torch.zeros((self.batch, self.seq_len), dtype=torch.int64, device=self.device)

    @property
    def order(self) -> Int[Tensor, "batch seq"]:
        """What causal masks compare: a token attends to those of equal or smaller order."""
        return self.index if self.order_or_none is None else self.order_or_none

    def to(self, device: torch.device | str) -> Positions:
        """The same positions on another device."""
        return self._map(lambda tensor: tensor.to(device), self.start)

    def expand(self, batch: int) -> Positions:
        """One row repeated for a whole batch, without copying."""
        if self.batch == batch:
            return self
        if self.batch != 1:
            got = f"got positions for {self.batch} rows, expected 1 or {batch}"
            raise ShapeError(got, f"Positions made for {batch} rows, or for one row")
        return self._map(lambda tensor: tensor.expand(batch, *tensor.shape[1:]), self.start)

    def slice(self, start: int, stop: int) -> Positions:
        """The tokens ``start:stop`` of every row: a chunk of a prompt."""
        # Not `slice.indices`, which would fix the length of a compiled graph.
        first, last = (min(max(end + self.seq_len if end < 0 else end, 0), self.seq_len) for end in (start, stop))
        return self._map(lambda tensor: tensor[:, first:last], None if self.start is None else self.start + first)

    def select(self, slots: Int[Tensor, " n"]) -> Positions:
        """The tokens at these slots of every row, in this order."""
        return self._map(lambda tensor: tensor[:, slots.to(tensor.device)], None)

    def _map(self, function: Callable[[Tensor], Tensor], start: int | None) -> Positions:
        leaves, known = flat(self)
        moved = [None if leaf is None else function(leaf) for leaf in leaves]
        return Positions(**unflat(moved, known._replace(start=start)))

    def shard(self, rank: int, world: int, zigzag: bool = True) -> Positions:
        """This rank's part of the sequence, for context parallelism: the tokens at `shard_slots`.

        An encoding reads hidden states after it, of this rank's tokens.

        >>> Positions.packed([4, 4]).shard(0, 2).index
        tensor([[0, 3, 0, 3]])
        """
        if any(x is not None for x in self.read):
            got = "got positions with what an encoding has read of hidden states, which goes over ranks by itself"
            raise LocantError(got, "encoding.read(x[:, slots], row.shard(rank, world)) on every rank")
        return self.select(self.shard_slots(rank, world, zigzag))

    def shard_slots(self, rank: int, world: int, zigzag: bool = True) -> Int[Tensor, " n"]:
        """Which slots of the row belong to this rank: ``tokens[:, slots]`` are its tokens.

        Each document, and each stretch of padding, is cut on its own, so that ranks have equal parts of its causal
        work: into ``world`` parts, or with `zigzag` into ``2 * world``, of which a rank gets the ``rank``-th from both
        ends. Reads the documents on the host.
        """
        world = whole("world", world, 1, remedy="the number of ranks")
        rank = whole("rank", rank, 0, world - 1, remedy=f"0 to {world - 1}, the rank within its group")
        return documents.shard_slots(self.document, rank, world, flag("zigzag", zigzag))

    def mask(
        self, k_positions: Positions | None = None, *, causal: bool = True, window: int | None = None
    ) -> Bool[Tensor, "batch 1 query key"]:
        """Which key each query may attend to.

        Args:
            k_positions: of the keys; default: the same tokens.
            causal: whether later keys are hidden.
            window: width of a sliding window: keys `window` positions away, or farther, are hidden.

        >>> Positions.packed([2, 1]).mask().int().tolist()
        [[[[1, 0, 0], [1, 1, 0], [0, 0, 1]]]]
        """
        queries, keys = self.paired(k_positions)
        same = (queries.document[:, :, None], keys.document[:, None])
        orders = (queries.order[:, :, None], keys.order[:, None])
        return is_allowed(*same, *orders, causal, window_of(window))[:, None]

    def mask_mod(
        self, k_positions: Positions | None = None, *, causal: bool = True, window: int | None = None
    ) -> MaskMod:
        """The same mask as a function of (batch, head, query, key) slots, for FlexAttention."""
        return pairs.mask_mod(*self.paired(k_positions), causal, window_of(window))

    def block_mask(
        self, k_positions: Positions | None = None, *, causal: bool = True, window: int | None = None
    ) -> object:
        """The same mask as a block-sparse one, for FlexAttention."""
        from torch.nn.attention.flex_attention import create_block_mask

        queries, keys = self.paired(k_positions)
        mask_mod = self.mask_mod(k_positions, causal=causal, window=window)
        return create_block_mask(mask_mod, queries.batch, None, self.seq_len, keys.seq_len, str(self.device))

    def paired(self, k_positions: Positions | None) -> tuple[Positions, Positions]:
        """Queries and keys, with as many rows as the larger of the two has."""
        keys = self if k_positions is None else k_positions
        batch = max(self.batch, keys.batch)
        return self.expand(batch), keys.expand(batch)

    def cu_seqlens(self) -> Int[Tensor, " documents_plus_1"]:
        """Where each document of ``tokens[positions.document >= 0]`` begins, and the end: int32, for varlen kernels.

        The number of documents is data, so an accelerator is asked for it once.

        >>> Positions.packed([2, 3], length=6).cu_seqlens()
        tensor([0, 2, 5], dtype=torch.int32)
        """
        return documents.cu_seqlens(self.document)

    def to_batch(self) -> dict[str, Any]:
        """The keys that tell a model of `transformers` these positions, as its padding-free collator makes them.

        ``position_ids``; where there is padding ``attention_mask``; of one row of documents ``cu_seq_lens_q`` and
        ``_k``, ``max_length_q`` and ``_k``. Documents beside padding are a `LocantError`, as no key tells both. Asks an
        accelerator for data.

        >>> Positions.packed([2, 3]).to_batch()["cu_seq_lens_q"]
        tensor([0, 2, 5], dtype=torch.int32)
        """
        return batch_of(self.index, self.document)

    def require_within(self, low: int, high: int, owner: str, remedy: str) -> None:
        """Raise unless every index lies in ``low .. high``; where bounds leave a doubt, a graph does, too."""
        smallest, largest = self.min_index, self.max_index
        if smallest is not None and largest is not None and low <= smallest <= largest <= high:
            return
        if has_values(self.index) and len(outside := ((self.index < low) | (self.index > high)).nonzero()):
            place = tuple(outside[0].tolist())
            got = f"got position {int(self.index[place])} at {place}, {owner} is defined for {low}..{high}"
            raise RangeError(got, remedy)

    def require_single_axis(self, owner: str) -> None:
        """Raise unless every token has one index."""
        if self.axes != 1:
            got = f"got positions with {self.axes} axes, {owner} needs one index per token"
            raise ShapeError(got, "Rotary(sections=...) for grids")
        if self.denominator != 1:
            got = f"got positions in parts of 1/{self.denominator}, {owner} counts whole tokens"
            raise ShapeError(got, "Rotary, or Positions.of(index) without denominator")

    def require_fits(self, batch: int, seq_len: int, device: torch.device, what: str) -> None:
        """Raise unless these are the positions of `what`, which has this batch, length and device."""
        if self.seq_len != seq_len or self.batch not in (1, batch):
            got = f"got positions for {self.batch} x {self.seq_len} tokens, {what} has {batch} x {seq_len}"
            raise ShapeError(got, f"Positions.arange({seq_len})")
        if self.device != device:
            raise ShapeError(f"got positions on {self.device}, {what} is on {device}", f"positions.to({str(device)!r})")

    def __eq__(self, other: object) -> bool:
        """Whether every token has the same index, document, order and place in grids of the same sizes."""
        return equal(self, other) if isinstance(other, Positions) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # compared by value, held in tensors: not a key

    def __repr__(self) -> str:
        shape = f"{self.batch}x{self.seq_len}" + (f"x{self.axes}" if self.axes > 1 else "")
        if self.start is not None:
            return f"Positions({shape}, {self.start}..{self.start + self.seq_len - 1})"
        over = "" if self.denominator == 1 else f", over {self.denominator}"
        document = "" if self.document_or_none is None else ", with documents"
        grids = "".join(f", grid {grid}" for grid in self.grids)
        return f"Positions({shape}, index {self.min_index}..{self.max_index}{over}{document}{grids})"


def require_positions(positions: object) -> None:
    """Raise unless these are `Positions`: position ids or masks alone are not enough."""
    if not isinstance(positions, Positions):
        got = f"got positions of type {type(positions).__name__}, expected Positions"
        raise LocantError(got, "Positions.of(position_ids), or Positions.from_mask(attention_mask)")


def from_zero(num_tokens: int, device: torch.device, num_keys: int | None = None, axes: int = 1) -> Positions:
    """0, 1, 2, ... for tokens that come without positions, where these can be no others.

    Refused are what may stand anywhere: a token alone, and queries beside fewer or more keys. Both come up in decoding,
    where a wrong guess would be silent. So are tokens of an encoding with several `axes`.
    """
    if axes > 1:
        got = f"got no positions, expected them for an encoding of {axes} axes: which row and column has each token?"
        raise LocantError(got, f"Positions.grid(height, width), or Positions.arange({num_tokens}) for text")
    if num_keys is not None and num_keys != num_tokens:
        got = f"got {num_tokens} queries and {num_keys} keys without positions: where do the queries stand?"
        raise LocantError(got, "positions=Positions.after(cache_len, n), and k_positions=... for the keys")
    if num_tokens == 1:
        got = "got a single token without positions: where does it stand?"
        raise LocantError(got, "Positions.after(cache_len, 1), or Positions.arange(1) for the first of a text")
    return Positions.arange(num_tokens, device=device)


def positions_or_length(positions: Positions | int) -> Positions:
    """Positions as they are, or so many from 0 on."""
    if isinstance(positions, (int, np.integer)):
        return Positions.arange(positions)
    require_positions(positions)
    return positions


Where = Positions | None
"""Where tokens stand; ``None`` for `from_zero`."""

register_pytree(Positions)
torch.serialization.add_safe_globals([Positions, Grid])  # a saved program holds those that it was exported with
