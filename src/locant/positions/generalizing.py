"""Other indices than 0, 1, 2, ...: with which models of short rows go on at longer ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from locant.arguments import MAX_INT32, whole
from locant.errors import RangeError

__all__ = ["coupled_number", "drawn", "places_in_numbers"]


def drawn(longest: int, max_seq_len: int, seed: Sequence[int]) -> Int[Tensor, " longest"]:
    """So many different numbers below `max_seq_len`, in order."""
    max_seq_len = whole("max_seq_len", max_seq_len, 1, remedy="a length beyond all that will be seen")
    if longest > max_seq_len:
        got = f"got documents of {longest} tokens for positions below max_seq_len={max_seq_len}"
        raise RangeError(got, f"max_seq_len={longest} or more")
    numbers = np.random.default_rng([*seed])
    return torch.from_numpy(
        np.sort(numbers.choice(max_seq_len, longest, replace=False, shuffle=False)).astype(np.int64)
    )


def places_in_numbers(
    is_digit: Bool[Tensor, "batch seq"], document: Int[Tensor, "batch seq"], offset: int
) -> Int[Tensor, "batch seq"]:
    """1, 2, 3, ... over each run of digits within a document, and `offset` more; 0 elsewhere."""
    begins = is_digit.clone()
    begins[:, 1:] &= ~is_digit[:, :-1] | (document.diff() != 0)
    slots = torch.arange(is_digit.shape[1], device=is_digit.device)
    first = torch.where(begins, slots, 0).cummax(1).values
    return torch.where(is_digit, slots - first + 1 + offset, 0)


def coupled_number(digits: Sequence[int], start: int, reverse: bool) -> list[int]:
    """Numbers of so many digits, with a sign after each but the last: digits of one significance share an index.

    The most significant digit of the longest operand is at ``start + 1``, units are together, signs one behind them.
    """
    units = start + max(digits[:-1] or digits)
    low = units - max(digits) + 1
    if low < 0:
        raise RangeError(f"got start={start}, from which a number of {max(digits)} digits reaches below 0", "start=1")
    whole("the last index from start", units + 1, 0, MAX_INT32, remedy="start=1")
    rows = [[*range(units - count + 1, units + 1)] for count in digits]
    *operands, result = rows
    signed = [place for operand in operands for place in (*operand, units + 1)]
    return [*signed, *(reversed(result) if reverse else result)]
