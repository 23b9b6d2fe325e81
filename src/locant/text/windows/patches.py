"""`BytePatches`: group the bytes of windows into patches, as byte models such as BLT read them.

A patch begins where the next byte is hard to predict (`from_entropies`), or after a space (`from_spaces`). As in BLT,
the first byte of a document is a patch of its own. Patches come from ids and `Positions` alone, so they never cross a
document, and padding has no patch. A padded or packed row has the patches of its documents alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from locant.arguments import Real, real, whole
from locant.errors import ShapeError
from locant.positions import Positions
from locant.positions.documents import PADDING, document_or_none
from locant.positions.positions import OptionalPositions, positions_or_default, require_positions
from locant.spelling import dtype_name
from locant.tensors import require_tensor

LETTERS = ((ord("0"), ord("9")), (ord("A"), ord("Z")), (ord("a"), ord("z")), (0x80, 0xBF))
"""The bytes after which no patch ends: digits, Latin letters, and all but the first byte of a longer character."""


@dataclass(frozen=True, eq=False, repr=False)
class BytePatches:
    """The patches of a batch of rows of bytes (`Pagnoni et al. 2024 <https://arxiv.org/abs/2412.09871>`_).

    Args:
        lengths: the number of bytes of each patch, filled up with zeros. `BltModel` of ``transformers`` reads them as
            ``patch_lengths``. A patch of length 0 after the last byte of a document means that the next byte begins a
            patch. Without `max_length`, both `from_entropies` and `from_spaces` keep such a patch, as BLT does.
        ids: the number of the patch of each byte in its row, -1 for padding.
        positions: the positions of the patches, for the attention between patches. They count from 0 in each document.

    Patches of a batch of `Windows` need one line:

    >>> from locant import Tokenizer, Windows
    >>> text = Tokenizer.bytes().encode("To be, or not to be")
    >>> batch = Windows(text, length=10).__getitems__([0, 1])
    >>> patches = BytePatches.from_spaces(batch["ids"], batch["positions"])
    >>> patches.lengths.tolist()
    [[1, 2, 3, 4, 0], [1, 3, 3, 1, 0]]
    >>> patches.ids[0].tolist()
    [0, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    """

    lengths: Int[Tensor, "batch patches"]
    ids: Int[Tensor, "batch seq"]
    positions: Positions

    @classmethod
    def from_entropies(
        cls,
        entropies: Float[Tensor, "batch seq"],
        threshold: Real,
        positions: OptionalPositions = None,
        *,
        max_length: int | None = None,
    ) -> BytePatches:
        """Begin a patch after every byte at which the entropy of the next byte is above the threshold.

        In each row, patches are those of ``BltPatcher`` in ``transformers`` for this row alone. (In a batch, it counts
        one byte too many in the last patch of a row with fewer patches than another, and then a patch of length -1.)

        Args:
            entropies: the entropy of the prediction of a small byte model, at each byte for the next one.
            threshold: in nats, 1.3354 for the published BLT (``config.patching_threshold``).
            positions: the positions of the bytes. Default: every row is one document.
            max_length: cut longer patches (``config.max_patch_length``). As in ``transformers``, there is then no patch
                of length 0.

        Raises:
            ShapeError: the entropies are not rows of floating-point numbers. RangeError: a number is out of range.

        >>> BytePatches.from_entropies(torch.tensor([[3.0, 0.1, 2.0, 0.2, 0.1]]), 1.0).lengths.tolist()
        [[1, 2, 2]]
        """
        require_tensor("entropies", entropies)
        if entropies.ndim != 2 or not entropies.is_floating_point():
            got = f"got entropies {tuple(entropies.shape)} of {dtype_name(entropies.dtype)}"
            raise ShapeError(f"{got}, expected floats of batch x seq", "pass Categorical(logits=logits).entropy()")
        threshold = real("threshold", threshold, remedy="threshold=1.335442066192627")
        return cls._after(entropies > threshold, positions, max_length)

    @classmethod
    def from_spaces(
        cls,
        ids: Int[Tensor, "batch seq"],
        positions: OptionalPositions = None,
        *,
        first_byte: int = 0,
        max_length: int | None = None,
    ) -> BytePatches:
        """Begin a patch after the first byte of every run of bytes that are not part of a word.

        Letters and digits of ASCII are parts of words, and so are all but the first byte of a longer character. A patch
        also begins after every special token.

        Args:
            ids: the ids of bytes. The end-of-text token of `Tokenizer.bytes` (256) is a special token, too.
            positions: the positions of the bytes. Default: every row is one document.
            first_byte: the id of byte 0. Ids below it are special tokens. 4 in BLT's own vocabulary of 260 ids.
            max_length: cut longer patches. There is then no patch of length 0.

        Raises:
            ShapeError: the ids are not rows of integers. RangeError: a number is out of range.

        >>> BytePatches.from_spaces(torch.tensor([list(b"a, b c")])).lengths.tolist()
        [[1, 1, 3, 1]]
        """
        require_tensor("ids", ids)
        if ids.ndim != 2 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            got = f"got ids {tuple(ids.shape)} of {dtype_name(ids.dtype)}, expected integers of batch x seq"
            raise ShapeError(got, 'pass batch["ids"] of Windows')
        byte = ids.long() - whole("first_byte", first_byte, 0, remedy="first_byte=4 for the ids of BLT")
        is_special = (byte < 0) | (byte > 255)
        is_between = ~torch.stack([(byte >= low) & (byte <= high) for low, high in LETTERS]).any(0)
        before = _slot_before(_documents(positions, is_between))
        follows = is_between.gather(1, before.clamp(min=0)) & (before >= 0)
        return cls._after(is_special | (is_between & ~follows), positions, max_length)

    @classmethod
    def _after(
        cls, is_end: Bool[Tensor, "batch seq"], positions: OptionalPositions, max_length: int | None
    ) -> BytePatches:
        """Return the patches that end with these bytes, with the first byte of a document and with its last one."""
        batch, document = len(is_end), _documents(positions, is_end)
        is_real, is_first = document != PADDING, _is_first(document)
        is_end = (is_end | is_first) & is_real
        if max_length is not None:
            max_length = whole("max_length", max_length, 1, remedy="max_length=16")
            is_cut = is_real & (_offsets(is_end, is_first, is_real) % max_length == max_length - 1)
            is_end = (is_end | is_cut) & ~_is_first(document.flip(1)).flip(1)  # not after the last byte of a document
        ends_before = is_end.cumsum(1) - is_end.long()
        ids = (is_first.cumsum(1) + ends_before - 1).masked_fill(~is_real, PADDING)
        count = int((is_first.sum(1) + is_end.sum(1)).max()) if is_end.numel() else 0
        slots = ids.masked_fill(~is_real, count)  # one slot more, for padding
        lengths = ids.new_zeros(batch, count + 1).scatter_add(1, slots, is_real.long())[:, :count]
        return cls(lengths, ids, _patch_positions(slots, document, is_first, is_end, count))

    def __repr__(self) -> str:
        rows, count = self.lengths.shape
        return f"BytePatches({rows} rows of {self.ids.shape[1]} bytes, up to {count} patches)"


def _documents(positions: OptionalPositions, bytes_: Bool[Tensor, "batch seq"]) -> Int[Tensor, "batch seq"]:
    """Return the document of each byte."""
    batch, seq = bytes_.shape
    positions = positions_or_default(positions, seq, bytes_.device, matter=False)
    require_positions(positions)
    positions.require_fits(batch, seq, bytes_.device, "the row of bytes")
    return positions.document.expand(batch, seq)


def _slot_before(document: Int[Tensor, "batch seq"]) -> Int[Tensor, "batch seq"]:
    """Return the slot of the last byte before each slot, without padding, or -1 if there is none."""
    slot = torch.arange(document.shape[1], device=document.device)
    latest = torch.where(document == PADDING, -1, slot).cummax(1).values
    return torch.cat([torch.full_like(latest[:, :1], -1), latest[:, :-1]], 1)


def _is_first(document: Int[Tensor, "batch seq"]) -> Bool[Tensor, "batch seq"]:
    """Return which bytes are the first of a document. Padding neither begins nor ends one."""
    before = _slot_before(document)
    earlier = document.gather(1, before.clamp(min=0)).masked_fill(before < 0, PADDING)
    return (document != PADDING) & (document != earlier)


def _offsets(
    is_end: Bool[Tensor, "batch seq"], is_first: Bool[Tensor, "batch seq"], is_real: Bool[Tensor, "batch seq"]
) -> Int[Tensor, "batch seq"]:
    """Return the place of each byte in its patch, from 0."""
    rank = is_real.cumsum(1)
    after = torch.where(is_end, rank + 1, 0).cummax(1).values
    begin = torch.where(is_first, rank, 0)
    begin[:, 1:] = torch.maximum(begin[:, 1:], after[:, :-1])
    return rank - begin.cummax(1).values


def _patch_positions(
    slots: Int[Tensor, "batch seq"],
    document: Int[Tensor, "batch seq"],
    is_first: Bool[Tensor, "batch seq"],
    is_end: Bool[Tensor, "batch seq"],
    count: int,
) -> Positions:
    """Return the positions of the patches, from the patch of each byte (`count` for padding)."""
    shape = len(slots), count + 1
    documents = torch.full(shape, PADDING, device=slots.device)
    documents = documents.scatter(1, torch.where(is_end, slots + 1, count), document)  # also if the next one is empty
    documents = documents.scatter(1, slots, document)[:, :count]
    starts = slots.new_zeros(shape).scatter(1, torch.where(is_first, slots, count), slots)[:, :count].cummax(1).values
    index = (torch.arange(count, device=slots.device) - starts).masked_fill(documents == PADDING, 0)
    return Positions.from_fields(index, document_or_none(documents), None, 0, int(index.max()) if count else 0)
