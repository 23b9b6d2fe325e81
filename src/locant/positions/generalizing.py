"""Positions other than 0, 1, 2, ..., with which models that were trained on short rows go on at longer ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from locant.arguments import flag, shape_error, whole
from locant.errors import RangeError
from locant.positions.checks import integers, known_device, rows_of
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
    """Different numbers below `max_seq_len`, drawn anew for every `seed`, in order: Ruoss et al. 2023.

    Trained so, a model has seen every index that longer rows will have (arXiv 2305.16843). Masks, and windows
    of attention, count tokens.

    Args:
        lengths: of a row of one document, or as in `Positions.packed`, where every document has numbers of its own.
        max_seq_len: beyond the longest row that will be seen.

    >>> randomized(4, 100, seed=3).index
    tensor([[ 8, 17, 23, 78]])
    """
    one_document = isinstance(lengths, (int, np.integer)) and not isinstance(lengths, bool)
    counted = Positions.packed([lengths] if one_document else lengths, length=length)  # type: ignore[list-item]
    seed, index = whole("seed", seed, 0, 2**62, remedy="seed=0"), counted.index.clone()
    max_seq_len = whole("max_seq_len", max_seq_len, 1, remedy="a length beyond all that will be seen")
    for row, documents in enumerate(counted.document):
        for number in documents.unique().tolist():
            tokens = documents == number
            if number != PADDING:
                index[row, tokens] = _drawn(int(tokens.sum()), max_seq_len, [seed, row, number])
    positions = Positions.checked(index, document_or_none(counted.document), counted.index, 0, max_seq_len - 1)
    return positions.to(known_device(device) or "cpu")


def abacus(ids: Numbers, digits: Numbers, *, offset: int = 0, positions: Positions | None = None) -> Positions:
    """The place of every digit within its number, from 1, and 0 for all else: McLeish et al. 2024.

    For the table that is added to the embeddings of digits (arXiv 2405.17399); numbers are written with their
    units first. In training `offset` is drawn for every batch, so that longer numbers find trained rows.

    Args:
        ids: ``seq`` or ``batch seq``.
        digits: the ids of tokens that are digits.
        offset: added to the places of digits.
        positions: where the tokens stand: their documents end numbers, and they have its order.

    >>> abacus([7, 8, 0, 9], digits=range(5, 10)).index
    tensor([[1, 2, 0, 1]])
    """
    tokens, of_digits = integers("ids", ids), integers("digits", digits)
    tokens = tokens[None] if tokens.ndim == 1 else tokens
    if tokens.ndim != 2:
        raise shape_error("ids", tokens, "(batch, seq)", "the ids of the tokenizer")
    batch, seq_len = tokens.shape
    offset = whole("offset", offset, 0, remedy="offset=0")
    where = Positions.arange(seq_len, batch=batch, device=tokens.device) if positions is None else positions
    require_positions(where)
    where.require_fits(batch, seq_len, tokens.device, "ids")
    where = where.expand(batch)
    index = _places_in_numbers(torch.isin(tokens, of_digits.to(tokens.device)), where.document, offset)
    return Positions.checked(index, where.document_or_none, where.order, 0, offset + seq_len)


def coupled(
    numbers: Sequence[int] | Sequence[Sequence[int]],
    *,
    start: int = 1,
    reverse: bool = True,
    length: int | None = None,
    device: Device = None,
) -> Positions:
    """Digits of one significance at one index, for sums like ``653+49=207``: Cho et al. 2024, arXiv 2405.20671.

    Args:
        numbers: how many digits each has; a sign follows each but the last, which is the result. Or one such list
            per row.
        start: one less than the index of the first digit of the longest operand; drawn in training.
        reverse: whether the result is written with its units first.
        length: of every row, padded on the right; default: the longest.

    >>> coupled([3, 2, 3]).index.tolist()
    [[2, 3, 4, 5, 3, 4, 5, 4, 3, 2]]
    """
    start, reverse = whole("start", start, 0, remedy="start=1"), flag("reverse", reverse)
    rows = [_coupled_number(row, start, reverse) if row else [] for row in rows_of("numbers", numbers)]
    counted = Positions.packed([[len(row)] for row in rows], length=length)
    index = torch.zeros_like(counted.index)
    for place, row in enumerate(rows):
        index[place, : len(row)] = torch.tensor(row, dtype=torch.int64)
    largest = max((max(row) for row in rows if row), default=0)
    positions = Positions.checked(index, document_or_none(counted.document), counted.index, 0, largest)
    return positions.to(known_device(device) or "cpu")


def _drawn(length: int, max_seq_len: int, seed: Sequence[int]) -> Int[Tensor, " length"]:
    """So many different numbers below `max_seq_len`, in order."""
    if length > max_seq_len:
        got = f"got documents of {length} tokens for positions below max_seq_len={max_seq_len}"
        raise RangeError(got, f"max_seq_len={length} or more")
    numbers = np.random.default_rng([*seed]).choice(max_seq_len, length, replace=False, shuffle=False)
    return torch.from_numpy(np.sort(numbers).astype(np.int64))


def _places_in_numbers(
    is_digit: Bool[Tensor, "batch seq"], document: Int[Tensor, "batch seq"], offset: int
) -> Int[Tensor, "batch seq"]:
    """1, 2, 3, ... over each run of digits within a document, and `offset` more; 0 elsewhere."""
    begins = is_digit.clone()
    begins[:, 1:] &= ~is_digit[:, :-1] | (document.diff() != 0)
    slots = torch.arange(is_digit.shape[1], device=is_digit.device)
    first = torch.where(begins, slots, 0).cummax(1).values
    return torch.where(is_digit, slots - first + 1 + offset, 0)


def _coupled_number(digits: Sequence[int], start: int, reverse: bool) -> list[int]:
    """Numbers of so many digits, with a sign after each but the last: digits of one significance share an index.

    The most significant digit of the longest operand is at ``start + 1``, units are together, signs one after them.
    """
    units = start + max(digits[:-1] or digits)
    if units - max(digits) + 1 < 0:
        raise RangeError(f"got start={start}, from which a number of {max(digits)} digits reaches below 0", "start=1")
    whole("the last index from start", units + 1, 0, remedy="start=1")
    *operands, result = ([*range(units - count + 1, units + 1)] for count in digits)
    signed = [place for operand in operands for place in (*operand, units + 1)]
    return [*signed, *(reversed(result) if reverse else result)]
