"""`Positions`: the position of every token, as one immutable object.

Position ids, padding masks, document boundaries and cache offsets are usually passed as separate tensors. In most
position bugs, two of these tensors disagree. Here they come from one object. It costs one or two integers per token.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from locant.arguments import entries, flag, whole
from locant.deprecation import Renamed
from locant.errors import LocantError, RangeError, ShapeError
from locant.positions import checks, distances, documents
from locant.positions.batches import fields_from_batch, make_batch
from locant.positions.documents import MaskMod, check_window, is_allowed
from locant.positions.fields import (
    NO_FEATURES,
    TokenFeatures,
    are_equal,
    flatten,
    join_fields,
    register_pytree,
    unflatten,
)
from locant.positions.grids import Grid, fields_from_grids, pack_grids, to_grid, to_rows_of_grids
from locant.positions.multimodal import Counting, Parts, fields_from_parts
from locant.tensors import bounds, has_values

Device = torch.device | str | None
Numbers = Tensor | np.ndarray | Sequence[object]


@dataclass(frozen=True, eq=False, repr=False)
class Positions:
    """The position of every token: an index, a document and an order. The named constructors check their arguments.

    Args:
        index: each token's offset in its document, or its coordinates on a grid.
        document_or_none: the document of each token, or ``None`` for one document without padding. `document` is
            always a tensor.
        order_or_none: the order of each token, or ``None`` if it equals the index. `order` is always a tensor.
        min_index, max_index: bounds of the index, or ``None`` if only the device knows them.
        start: the first index, if every row is known to be one document that counts ``start, start + 1, ...``.
        denominator: an index of 1 is ``1 / denominator`` of a position, so that fractions also have exact angles.
        read: the features that `PositionEncoding.read` computed from each token's hidden states.
        place_or_none: the number of each token's prefix token or cell, counted through all of `grids`.
        grids: the full sizes of the grids that hold the tokens, even if only some of their tokens are present. Empty
            without a grid.
        is_shard: whether `shard` has left out tokens, which other ranks hold.

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
    read: TokenFeatures = NO_FEATURES
    place_or_none: Int[Tensor, "batch seq"] | None = None
    grids: tuple[Grid, ...] = ()
    is_shard: bool = False

    def __post_init__(self) -> None:
        checks.require_index(self.index)

    @classmethod
    def arange(cls, seq_len: int, *, batch: int = 1, device: Device = None) -> Positions:
        """Return the positions 0, 1, ..., seq_len - 1 in every row."""
        seq_len = checks.token_count("seq_len", seq_len)
        batch = checks.token_count("batch", batch, "a number of rows")
        return cls._counting(0, seq_len, batch, checks.to_device(device))

    @classmethod
    def after(
        cls, cache_len: int | Numbers, n: int, *, device: Device = None, max_index: int | None = None
    ) -> Positions:
        """Return the `n` positions after `cache_len` cached tokens. `cache_len` may differ between rows.

        Pass `max_index` to avoid a device sync if `cache_len` is on an accelerator.

        >>> Positions.after([3, 5], 2).index.tolist()
        [[3, 4], [5, 6]]
        """
        device, max_index, n = checks.to_device(device), checks.check_max_index(max_index), checks.token_count("n", n)
        if isinstance(cache_len, (int, np.integer)):
            cache_len = checks.token_count("cache_len", cache_len, "the number of tokens already cached")
            return cls._counting(cache_len, n, 1, device)
        lengths = checks.to_lengths("cache_len", cache_len, device)
        index = lengths[:, None] + torch.arange(n, device=lengths.device)
        low, high = bounds(index) if max_index is None else (0, max_index)
        if low is not None and low < 0:
            raise RangeError(f"got cache_len with {low}, expected 0 or more", "use cache_len=0 for an empty cache")
        return cls.from_fields(index, None, None, low, high)

    @classmethod
    def from_mask(cls, attention_mask: Tensor) -> Positions:
        """Count the real tokens of each row. Zeros in the mask are padding, on either side or between tokens.

        Args:
            attention_mask: ``batch seq`` (or ``seq``), bool or 0/1 numbers: 1 for every real token.

        >>> Positions.from_mask(torch.tensor([[0, 0, 1, 1]])).document
        tensor([[-1, -1,  0,  0]])
        """
        real, is_full = checks.padding_mask(attention_mask)
        batch, seq_len = real.shape
        if is_full:
            return cls._counting(0, seq_len, batch, real.device)
        index, document = (real.cumsum(1) - 1).clamp(min=0), real - 1  # 0 - 1 is PADDING
        last = max(seq_len - 1, 0) if is_full is None else int(index.max())
        return cls(index, document, None, 0, last)

    @classmethod
    def packed(
        cls, lengths: Sequence[int] | Sequence[Sequence[int]], *, length: int | None = None, device: Device = None
    ) -> Positions:
        """Return the positions of several documents in one row.

        Each document counts from 0. Pass a list per row for a batch.

        Rows are padded to `length` (default: the longest row). A document of length 0 has no token, but keeps its
        number.

        >>> Positions.packed([[2, 1], [1]]).document.tolist()
        [[0, 0, 1], [0, -1, -1]]
        """
        rows = checks.to_rows("lengths", lengths)
        index, document = checks.to_tensors(device, *documents.pack(rows, length))
        return cls.from_fields(index, document, None, 0, max([1, *itertools.chain.from_iterable(rows)]) - 1)

    @classmethod
    def grid(cls, *sizes: int, centred: bool = False, prefix: int = 0, device: Device = None) -> Positions:
        """Return the coordinates of a grid, row-major: ``grid(h, w)`` for an image, ``grid(t, h, w)`` for a video.

        Args:
            centred: whether each axis goes from -1 to 1 over the whole grid, with each token in the middle of its cell
                (DINOv3). The coordinate is index / `denominator`, so angles stay exact.
            prefix: the number of tokens (class token, registers) before the cells. Their index is 0 on all axes, so no
                rotation changes them. Encodings of grids distinguish them from cells by place. Their places come first.

        >>> Positions.grid(2, 2).index.tolist()
        [[[0, 0], [0, 1], [1, 0], [1, 1]]]
        >>> Positions.grid(1, 4, centred=True, prefix=1)
        Positions(1x5x2, index -4..4, over 4, grid 1x4 after 1)
        """
        grid, device = to_grid(sizes, prefix), checks.to_device(device)
        place, order = (torch.arange(grid.num_tokens, device=device)[None] for _ in range(2))
        return cls.from_fields(**fields_from_grids((grid,), flag("centred", centred), place, order, None))

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
        """Return the positions of several images in one row. Each is laid out as in `grid` and is one document.

        Pass a list per row for a batch. A tuple holds the sizes of an image, ``(height, width)``. Rows are padded as in
        `packed`. With `centred`, all sides in one call need a common multiple below 2^31.

        >>> Positions.packed_grids([(1, 2), (2, 1)], prefix=1).index[0].tolist()
        [[0, 0], [0, 0], [0, 1], [0, 0], [0, 0], [1, 0]]
        """
        rows = to_rows_of_grids(grids, prefix)
        different, *slots = pack_grids(rows, length)
        return cls.from_fields(
            **fields_from_grids(different, flag("centred", centred), *checks.to_tensors(device, *slots))
        )

    @classmethod
    def multimodal(
        cls,
        parts: Parts,
        *,
        merge: int = 1,
        merge_frames: int = 1,
        continue_from: str = "largest",
        denominator: int = 1,
        length: int | None = None,
        padding: str = "right",
        device: Device = None,
        goes_on: str | None = None,
    ) -> Positions:
        """Return ``(time, row, column)`` for text with images and videos, as vision-language models count.

        Args:
            parts: the parts of a document. Each is a number of text tokens, or a grid ``(frames, rows, columns)`` of
                patches. A fourth number is the step between frames (Qwen2.5-VL: ``tokens_per_second`` x seconds per
                frame). `parts` may also be a list of documents that are packed in one row, or a list of such rows.
            merge: the side of a block of patches that becomes one token.
            merge_frames: the number of video frames that become one frame (ERNIE-4.5-VL). A single frame is kept.
            continue_from: where text after a grid begins. ``"largest"``: after the grid's largest index, frames
                included (as these models were published). ``"sides"``: after its rows and columns (`transformers` 5).
            denominator: the number of parts of a position, for fractional steps (Qwen3-Omni). With 1, the time of a
                frame is truncated to a whole number.
            length: the length of every row. Default: the longest.
            padding: the padded side of a row, ``"right"`` or ``"left"``.
            goes_on: the old name of `continue_from`, for one release.

        >>> Positions.multimodal([2, (1, 2, 4), 1], merge=2).index[0].tolist()
        [[0, 0, 0], [1, 1, 1], [2, 2, 2], [2, 2, 3], [4, 4, 4]]
        """
        if goes_on is not None:
            warnings.warn(
                "locant: Positions.multimodal(goes_on=...) is now continue_from; the old name goes in the next release",
                DeprecationWarning,
                stacklevel=2,
            )
            continue_from = goes_on
        counting = Counting(
            merge=merge, merge_frames=merge_frames, continue_from=continue_from, denominator=denominator
        )
        return cls.from_fields(**fields_from_parts(parts, counting, length, padding, device))

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
        """Return positions with any integer index per token, negative ones included.

        Args:
            index: ``seq``, ``batch seq`` or ``batch seq axes``, each in -2**31 + 1 .. 2**31 - 1.
            document: ``seq`` or ``batch seq``. -1 is padding. Default: one document.
            order: ``seq`` or ``batch seq``. Default: the index, or the slot in the row if there are several axes.
            max_index: as in `after`.
            denominator: the divisor of every index. ``3`` over 2 is position 1.5. `Rotary` has exact angles for such
                positions, and encodings that count whole tokens raise an error. If `denominator` is not 1, the default
                order is the slot in the row.
        """
        max_index = checks.check_max_index(max_index)
        denominator = whole("denominator", denominator, 1, remedy="denominator=1")
        index = checks.to_index(index)
        document_ids, orders = checks.to_row("document", document, index), checks.to_row("order", order, index)
        if document_ids is not None:
            documents.require_documents(document_ids)
        if (index.ndim == 3 or denominator > 1) and orders is None:
            orders = torch.arange(index.shape[1], device=index.device).expand(index.shape[:2])
        low, high = bounds(index) if max_index is None else (None, max_index)
        return cls.from_fields(index, document_ids, orders, low, high, None, denominator)

    @classmethod
    def cat(cls, parts: Sequence[Positions]) -> Positions:
        """Join parts along the sequence, such as an image between two texts, or a cache and the tokens after it.

        Equal document numbers mean the same document. If the order of a part begins at 0, as in a grid, it continues
        where the previous part ended. Features that `read` computed are joined for keys alone, as in a cache.
        """
        parts = entries("parts", parts, "Positions.cat([text, image])")
        for part in parts:
            require_positions(part)
        return cls(**join_fields(parts))

    @classmethod
    def from_batch(cls, batch: Mapping[str, Any]) -> Positions:
        """Return the positions of a batch of `transformers`, trl or another trainer: the inverse of `to_batch`.

        It reads ``position_ids`` (``batch seq``, ``3 batch seq``, or ``4 batch seq`` with text ids first and the axes
        after them), ``attention_mask`` (zeros and ones, or documents numbered from 1) and ``cu_seq_lens_q`` or ``_k``.
        Raise `LocantError` if two of them describe different documents. `locant check-batch` prints where they differ.

        >>> Positions.from_batch({"position_ids": torch.tensor([[0, 1, 0, 1, 2]])}).document
        tensor([[0, 0, 1, 1, 1]])
        """
        index, document, order = fields_from_batch(batch)
        return cls.of(index, document, order=order)

    @classmethod
    def _counting(cls, start: int, n: int, batch: int, device: torch.device | None) -> Positions:
        last = max(start + n - 1, start)
        checks.require_bounds(start, last)
        index = torch.arange(start, start + n, device=device)
        return cls(index.expand(batch, n), None, None, start, last, start)

    @classmethod
    def from_fields(cls, *fields: Any, **named: Any) -> Positions:
        """Return positions with these fields. Raise `RangeError` unless their bounds fit 32 bits."""
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
        """The document of every token, -1 for padding."""
        if self.document_or_none is not None:
            return self.document_or_none
        return torch.zeros((self.batch, self.seq_len), dtype=torch.int64, device=self.device)

    @property
    def order(self) -> Int[Tensor, "batch seq"]:
        """The number that causal masks compare. A token attends to tokens of equal or smaller order."""
        return self.index if self.order_or_none is None else self.order_or_none

    def to(self, device: torch.device | str) -> Positions:
        """Return the same positions on another device."""
        return self._map(lambda tensor: tensor.to(device), self.start)

    def expand(self, batch: int) -> Positions:
        """Repeat one row for a whole batch, without copying."""
        if self.batch == batch:
            return self
        if self.batch != 1:
            got = f"got positions for {self.batch} rows, expected 1 or {batch}"
            raise ShapeError(got, _positions_of_size(batch, self.seq_len, self.device))
        return self._map(lambda tensor: tensor.expand(batch, *tensor.shape[1:]), self.start)

    def slice(self, start: int, stop: int) -> Positions:
        """Return the positions of the tokens ``start:stop`` of every row, such as a chunk of a prompt."""
        # `slice.indices` would fix the length of a compiled graph.
        first, last = (min(max(end + self.seq_len if end < 0 else end, 0), self.seq_len) for end in (start, stop))
        return self._map(lambda tensor: tensor[:, first:last], None if self.start is None else self.start + first)

    def select(self, slots: Int[Tensor, " n"]) -> Positions:
        """Return the positions of the tokens at these slots of every row, in this order."""
        return self._map(lambda tensor: tensor[:, slots.to(tensor.device)], None)

    def _map(self, function: Callable[[Tensor], Tensor], start: int | None) -> Positions:
        leaves, host_fields = flatten(self)
        moved = [None if leaf is None else function(leaf) for leaf in leaves]
        return Positions(**unflatten(moved, host_fields._replace(start=start)))

    def shard(self, rank: int, world: int, zigzag: bool = True) -> Positions:
        """Return this rank's part of the sequence for context parallelism: the tokens at `shard_slots`.

        Call `PositionEncoding.read` after it, with the hidden states of this rank's tokens. Encodings and tables that
        need the tokens before each token raise an error for a shard.

        >>> Positions.packed([4, 4]).shard(0, 2).index
        tensor([[0, 3, 0, 3]])
        """
        if any(x is not None for x in self.read):
            got = "got positions with features of hidden states, expected positions before encoding.read"
            raise LocantError(got, "encoding.read(x[:, slots], row.shard(rank, world)) on every rank")
        part = self.select(self.shard_slots(rank, world, zigzag))
        return replace(part, is_shard=self.is_shard or world > 1)

    def shard_slots(self, rank: int, world: int, zigzag: bool = True) -> Int[Tensor, " n"]:
        """Return the slots of the row that belong to this rank: ``tokens[:, slots]`` are its tokens.

        Each document and each stretch of padding is split separately into ``world`` parts. With `zigzag` there are
        ``2 * world`` parts, and a rank gets the ``rank``-th part from each end. Ranks then share the causal work
        equally. This reads the documents on the host.
        """
        world = whole("world", world, 1, remedy="pass the number of ranks")
        rank = whole("rank", rank, 0, world - 1, remedy=f"pass the rank within its group, 0 to {world - 1}")
        return documents.shard_slots(self.document, rank, world, flag("zigzag", zigzag))

    def mask(
        self, k_positions: Positions | None = None, *, causal: bool = True, window: int | None = None
    ) -> Bool[Tensor, "batch 1 query key"]:
        """Return the mask of the keys that each query may attend to.

        Args:
            k_positions: the positions of the keys. Default: the same tokens.
            causal: whether to hide later keys.
            window: the width of a sliding window. It hides keys that are `window` or more positions away.

        >>> Positions.packed([2, 1]).mask().int().tolist()
        [[[[1, 0, 0], [1, 1, 0], [0, 0, 1]]]]
        """
        queries, keys = self.expand_together(k_positions)
        same = (queries.document[:, :, None], keys.document[:, None])
        orders = (queries.order[:, :, None], keys.order[:, None])
        return is_allowed(*same, *orders, causal, check_window(window))[:, None]

    def mask_mod(
        self, k_positions: Positions | None = None, *, causal: bool = True, window: int | None = None
    ) -> MaskMod:
        """Return `mask` as a function of (batch, head, query, key) slots, for FlexAttention."""
        return distances.mask_mod(*self.expand_together(k_positions), causal, check_window(window))

    def block_mask(
        self, k_positions: Positions | None = None, *, causal: bool = True, window: int | None = None
    ) -> object:
        """Return `mask` as a block-sparse mask for FlexAttention."""
        from torch.nn.attention.flex_attention import create_block_mask

        queries, keys = self.expand_together(k_positions)
        mask_mod = self.mask_mod(k_positions, causal=causal, window=window)
        return create_block_mask(mask_mod, queries.batch, None, self.seq_len, keys.seq_len, str(self.device))

    def expand_together(self, k_positions: Positions | None) -> tuple[Positions, Positions]:
        """Return the positions of queries and keys, both expanded to the larger batch."""
        keys = self if k_positions is None else k_positions
        batch = max(self.batch, keys.batch)
        return self.expand(batch), keys.expand(batch)

    paired = Renamed("expand_together")

    def cu_seqlens(self) -> Int[Tensor, " documents_plus_1"]:
        """Return the start of each document, and the end of the last one, for varlen kernels.

        These are int32 indices into ``tokens[positions.document >= 0]``. The length of the result depends on the data,
        so this costs one sync on an accelerator.

        >>> Positions.packed([2, 3], length=6).cu_seqlens()
        tensor([0, 2, 5], dtype=torch.int32)
        """
        return documents.cu_seqlens(self.document)

    def to_batch(self) -> dict[str, Any]:
        """Return these positions as keyword arguments for a `transformers` model, as its padding-free collator does.

        These are ``position_ids``, ``attention_mask`` if there is padding, and ``cu_seq_lens_q`` and ``_k``,
        ``max_length_q`` and ``_k`` for one row of several documents. Raise `LocantError` for several documents with
        padding, because no key describes both. This reads data from an accelerator.

        >>> Positions.packed([2, 3]).to_batch()["cu_seq_lens_q"]
        tensor([0, 2, 5], dtype=torch.int32)
        """
        return make_batch(self.index, self.document)

    def require_within(self, low: int, high: int, owner: str, remedy: str) -> None:
        """Raise `RangeError` unless every index lies in ``low .. high``. A graph checks only known bounds."""
        smallest, largest = self.min_index, self.max_index
        if smallest is not None and largest is not None and low <= smallest <= largest <= high:
            return
        if has_values(self.index) and len(outside := ((self.index < low) | (self.index > high)).nonzero()):
            place = tuple(outside[0].tolist())
            got = f"got position {int(self.index[place])} at {place}, {owner} is defined for {low}..{high}"
            raise RangeError(got, remedy)

    def require_single_axis(self, owner: str) -> None:
        """Raise `ShapeError` unless every token has one index."""
        if self.axes != 1:
            got = f"got positions with {self.axes} axes, {owner} needs one index per token"
            raise ShapeError(got, "use Rotary(sections=...) for grids")
        if self.denominator != 1:
            got = f"got positions in parts of 1/{self.denominator}, {owner} counts whole tokens"
            raise ShapeError(got, "use Rotary, or Positions.of(index) without denominator")

    def require_fits(self, batch: int, seq_len: int, device: torch.device, what: str) -> None:
        """Raise `ShapeError` unless batch, length and device match `what`."""
        rows, tokens = self.index.shape[:2]
        if tokens != seq_len or rows not in (1, batch):
            got = f"got positions for {rows} x {tokens} tokens, {what} has {batch} x {seq_len}"
            raise ShapeError(got, _positions_of_size(batch, seq_len, device))
        if (own_device := self.index.device) != device:
            raise ShapeError(f"got positions on {own_device}, {what} is on {device}", f"positions.to({str(device)!r})")

    def __eq__(self, other: object) -> bool:
        """Return whether every token has the same index, document, order and place in grids of the same sizes."""
        return are_equal(self, other) if isinstance(other, Positions) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # equality compares tensors, so it cannot be a dictionary key

    def __repr__(self) -> str:
        shape = f"{self.batch}x{self.seq_len}" + (f"x{self.axes}" if self.axes > 1 else "")
        if self.start is not None:
            return f"Positions({shape}, {self.start}..{self.start + self.seq_len - 1})"
        over = "" if self.denominator == 1 else f", over {self.denominator}"
        document = "" if self.document_or_none is None else ", with documents"
        grids = "".join(f", grid {grid}" for grid in self.grids)
        return f"Positions({shape}, index {self.min_index}..{self.max_index}{over}{document}{grids})"


def require_positions(*positions: object) -> None:
    """Raise `LocantError` unless these are `Positions`. Position ids or masks alone are not enough."""
    for each in positions:
        if not isinstance(each, Positions):
            got = f"got positions of type {type(each).__name__}, expected Positions"
            raise LocantError(got, "Positions.of(position_ids), or Positions.from_mask(attention_mask)")


def positions_or_default(
    positions: OptionalPositions, num_tokens: int, device: torch.device,
    *, num_keys: int | None = None, axes: int = 1, matter: bool = True,
) -> Positions:  # fmt: skip
    """Return the positions, or 0, 1, 2, ... by default. Only this function decides the default.

    Raise `LocantError` if the positions are unclear: for a single token, and for unequal numbers of queries and keys.
    Both cases occur in decoding, and a wrong guess would be silent. Raise it also for an encoding with several `axes`.
    `matter` is false if no result depends on the positions.
    """
    if positions is not None:
        return positions
    if not matter:
        return Positions.arange(num_tokens, device=device)
    if axes > 1:
        got = f"got no positions, expected them for an encoding of {axes} axes, such as rows and columns"
        raise LocantError(got, f"Positions.grid(height, width), or Positions.arange({num_tokens}) for text")
    if num_keys is not None and num_keys != num_tokens:
        got = f"got {num_tokens} queries and {num_keys} keys without positions, so the queries may be anywhere"
        raise LocantError(got, "positions=Positions.after(cache_len, n), and k_positions=... for the keys")
    if num_tokens == 1:
        got = "got a single token without positions, so it may be anywhere"
        raise LocantError(got, "Positions.after(cache_len, 1), or Positions.arange(1) for the first of a text")
    return Positions.arange(num_tokens, device=device)


def _positions_of_size(batch: int, seq_len: int, device: torch.device) -> str:
    """Return the remedy for positions of another size. Positions that only count would be wrong for padded rows."""
    rows = "" if batch == 1 else f", batch={batch}"
    place = "" if device.type == "cpu" else f", device={str(device)!r}"
    whole = f"Positions.arange({seq_len}{rows}{place})"
    return (
        f"pass {whole}, or Positions.from_mask or Positions.packed of the same rows if they have padding or documents"
    )


def positions_or_length(positions: Positions | int) -> Positions:
    """Return positions unchanged, or count from 0 if a length was passed."""
    if isinstance(positions, (int, np.integer)):
        return Positions.arange(positions)
    require_positions(positions)
    return positions


OptionalPositions = Positions | None
"""The positions of tokens, or ``None`` for the default of `positions_or_default`."""

register_pytree(Positions)
torch.serialization.add_safe_globals([Positions, Grid])  # a saved program holds its example inputs
