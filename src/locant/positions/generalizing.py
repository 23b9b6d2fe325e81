"""Positions other than 0, 1, 2, ..., with which models that were trained on short rows can work on longer rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from locant.arguments import flag, shape_error, whole
from locant.errors import RangeError
from locant.positions.checks import to_device, to_int64, to_rows
from locant.positions.documents import PADDING, document_or_none
from locant.positions.positions import Device, Numbers, Positions, require_positions


def randomized(
    lengths: int | Sequence[int] | Sequence[Sequence[int]],
    max_seq_len: int,
    *,
    seed: int = 0,
    length: int | None = None,
    device: Device = None,
) -> Positions:
    """Return sorted random positions below `max_seq_len`, different for every `seed` (Ruoss et al. 2023).

    A model that is trained on them has seen every index of longer rows (arXiv 2305.16843). Masks and attention windows
    still count tokens.

    Args:
        lengths: the length of a single document, or lengths as in `Positions.packed`. Documents are drawn separately.
        max_seq_len: a length beyond the longest row that the model will read.

    >>> randomized(4, 100, seed=3).index
    tensor([[ 8, 17, 23, 78]])
    """
    is_one_document = isinstance(lengths, (int, np.integer)) and not isinstance(lengths, bool)
    packed = Positions.packed([lengths] if is_one_document else lengths, length=length)  # type: ignore[list-item]
    seed, index = whole("seed", seed, 0, 2**62, remedy="seed=0"), packed.index.clone()
    max_seq_len = whole("max_seq_len", max_seq_len, 1, remedy="pass a length beyond the longest row")
    for row, documents in enumerate(packed.document):
        for number in documents.unique().tolist():
            tokens = documents == number
            if number != PADDING:
                index[row, tokens] = _draw_sorted(int(tokens.sum()), max_seq_len, [seed, row, number])
    positions = Positions.from_fields(index, document_or_none(packed.document), packed.index, 0, max_seq_len - 1)
    return positions.to(to_device(device) or "cpu")


def abacus(ids: Numbers, digits: Numbers, *, offset: int = 0, positions: Positions | None = None) -> Positions:
    """Return the place of every digit in its number, counted from 1, and 0 for other tokens (McLeish et al. 2024).

    The places index a table that is added to the embeddings of digits (arXiv 2405.17399). Numbers are written with
    their units first. In training, draw `offset` for every batch, so that longer numbers find trained rows.

    Args:
        ids: ``seq`` or ``batch seq``.
        digits: the ids of tokens that are digits.
        offset: a number added to the places of digits.
        positions: the positions of the tokens. A number does not continue in another document. The result has the same
            order.

    >>> abacus([7, 8, 0, 9], digits=range(5, 10)).index
    tensor([[1, 2, 0, 1]])
    """
    tokens, digit_ids = to_int64("ids", ids), to_int64("digits", digits)
    tokens = tokens[None] if tokens.ndim == 1 else tokens
    if tokens.ndim != 2:
        raise shape_error("ids", tokens, "(batch, seq)", "pass the ids of the tokenizer")
    batch, seq_len = tokens.shape
    offset = whole("offset", offset, 0, remedy="offset=0")
    rows = Positions.arange(seq_len, batch=batch, device=tokens.device) if positions is None else positions
    require_positions(rows)
    rows.require_fits(batch, seq_len, tokens.device, "ids")
    rows = rows.expand(batch)
    index = _places_in_numbers(torch.isin(tokens, digit_ids.to(tokens.device)), rows.document, offset)
    return Positions.from_fields(index, rows.document_or_none, rows.order, 0, offset + seq_len)


def coupled(
    numbers: Sequence[int] | Sequence[Sequence[int]],
    *,
    start: int = 1,
    reverse: bool = True,
    reverse_operands: bool = False,
    length: int | None = None,
    device: Device = None,
) -> Positions:
    """Return positions that give digits of equal significance the same index, for sums like ``653+49=207``.

    From Cho et al. 2024, arXiv 2405.20671.

    Args:
        numbers: the number of digits of each number. The last number is the result, and a sign follows each of the
            others. Pass a list per row for a batch.
        start: one less than the index of the first digit of the longest operand. Draw it in training.
        reverse: whether the result is written with its units first.
        reverse_operands: whether the operands are written with their units first.
        length: the length of every row, padded on the right. Default: the longest.

    >>> coupled([3, 2, 3]).index.tolist()
    [[2, 3, 4, 5, 3, 4, 5, 4, 3, 2]]
    >>> coupled([3, 2, 3], reverse_operands=True).index.tolist()
    [[4, 3, 2, 5, 4, 3, 5, 4, 3, 2]]
    """
    start, reverse = whole("start", start, 0, remedy="start=1"), flag("reverse", reverse)
    reverse_operands = flag("reverse_operands", reverse_operands)
    rows = [
        _coupled_number(row, start, reverse, reverse_operands) if row else [] for row in to_rows("numbers", numbers)
    ]
    packed = Positions.packed([[len(row)] for row in rows], length=length)
    index = torch.zeros_like(packed.index)
    for place, row in enumerate(rows):
        index[place, : len(row)] = torch.tensor(row, dtype=torch.int64)
    largest = max((max(row) for row in rows if row), default=0)
    positions = Positions.from_fields(index, document_or_none(packed.document), packed.index, 0, largest)
    return positions.to(to_device(device) or "cpu")


def _draw_sorted(length: int, max_seq_len: int, seed: Sequence[int]) -> Int[Tensor, " length"]:
    """Draw `length` distinct numbers below `max_seq_len`, and sort them."""
    if length > max_seq_len:
        got = f"got documents of {length} tokens for positions below max_seq_len={max_seq_len}"
        raise RangeError(got, f"use max_seq_len={length} or more")
    numbers = np.random.default_rng([*seed]).choice(max_seq_len, length, replace=False, shuffle=False)
    return torch.from_numpy(np.sort(numbers).astype(np.int64))


def _places_in_numbers(
    is_digit: Bool[Tensor, "batch seq"], document: Int[Tensor, "batch seq"], offset: int
) -> Int[Tensor, "batch seq"]:
    """Return 1, 2, 3, ... plus `offset` over each run of digits within a document, and 0 elsewhere."""
    begins = is_digit.clone()
    begins[:, 1:] &= ~is_digit[:, :-1] | (document.diff() != 0)
    slots = torch.arange(is_digit.shape[1], device=is_digit.device)
    first = torch.where(begins, slots, 0).cummax(1).values
    return torch.where(is_digit, slots - first + 1 + offset, 0)


def _coupled_number(digits: Sequence[int], start: int, reverse: bool, reverse_operands: bool) -> list[int]:
    """Return the indices of the digits of a sum, with a sign after each number but the last.

    Digits of equal significance share an index. The most significant digit of the longest operand is at ``start + 1``,
    and the index of a sign is one more than the index of the units.
    """
    units = start + max(digits[:-1] or digits)
    if units - max(digits) + 1 < 0:
        raise RangeError(f"got start={start}, too low for a number of {max(digits)} digits", "start=1")
    whole("the last index from start", units + 1, 0, remedy="start=1")
    *operands, result = ([*range(units - count + 1, units + 1)] for count in digits)
    step = -1 if reverse_operands else 1
    signed = [place for operand in operands for place in (*operand[::step], units + 1)]
    return [*signed, *(reversed(result) if reverse else result)]
