r"""The row that a hashed n-gram has in its table, stated exactly.

A table has several columns. Column c hashes the last n_c ids of every token into size_c rows of its own:

.. math:: row_c(t) = offset_c + \Bigl(\bigoplus_{s=0}^{n_c-1} x_{t-s} \cdot m_{c,s}\Bigr) \bmod size_c

The operation is exclusive or (Engram, Qwen4) or addition (BLT, LongCat). Products and sums are signed integers of 64
bits that wrap around, as in torch and NumPy. The last remainder is never negative. offset_c is the sum of the sizes
before column c. An id before the first token of a document is `fill`.

The multipliers and sizes are Python integers, so no conversion of a model (`half`, `to_empty`, FSDP) changes them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from locant.arguments import entries, one_of, whole
from locant.errors import RangeError

Operation = Literal["xor", "sum"]
SizeKind = Literal["prime", "power_of_two"]

MAX_SIZE = 2**40
"""The largest number of rows of one column."""
MAX_ORDER = 64
MAX_INT64 = 2**63 - 1
WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
"""Bases for which the Miller-Rabin test has no false prime below 3.3e24 (Sorenson and Webster 2015)."""
LAYER_STEP = 10_007
"""The distance between the seeds of two layers in Engram and Qwen4."""


@dataclass(frozen=True, kw_only=True)
class NGramHash:
    """A hash of n-grams of token ids into the rows of one table. See the formula of this module.

    Args:
        orders: the order n of each column: 2 for pairs of tokens.
        sizes: the number of rows of each column.
        multipliers: the multipliers of each column, the one of the token itself first, then of the token before it.
        operation: ``"xor"`` or ``"sum"``.
        vocab_size: ids are below it.
        fill: the id that stands for a token before the document.
        end: the id of a token that ends a text. An n-gram does not reach over it. ``None``: there is no such token.

    >>> hashing = NGramHash.of(orders=(2, 3), heads=2, size=100, vocab_size=50)
    >>> hashing.sizes, hashing.num_rows
    ((101, 103, 107, 109), 420)
    >>> hashing.rows(torch.tensor([[[7, 3, 0]]])).shape
    torch.Size([1, 1, 4])
    """

    orders: tuple[int, ...]
    sizes: tuple[int, ...]
    multipliers: tuple[tuple[int, ...], ...]
    operation: Operation = "xor"
    vocab_size: int
    fill: int = 0
    end: int | None = None

    def __post_init__(self) -> None:
        lists = {"orders": "(2, 3)", "sizes": "(20_000_003, 20_000_023)", "multipliers": "((3, 5), (3, 5, 7))"}
        for name, example in lists.items():
            object.__setattr__(self, name, tuple(entries(name, getattr(self, name), f"{name}={example}")))
        rows = (entries("multipliers", each, f"multipliers={lists['multipliers']}") for each in self.multipliers)
        object.__setattr__(self, "multipliers", tuple(tuple(row) for row in rows))
        if not self.orders or not len(self.orders) == len(self.sizes) == len(self.multipliers):
            numbers = f"{len(self.orders)} orders, {len(self.sizes)} sizes and {len(self.multipliers)} multipliers"
            raise RangeError(
                f"got {numbers}, expected as many of each", "pass one order, size and tuple for each column"
            )
        for order, size, multipliers in zip(self.orders, self.sizes, self.multipliers, strict=True):
            whole("an order", order, 1, MAX_ORDER, remedy="orders=(2, 3)")
            whole("a size", size, 1, MAX_SIZE, remedy="sizes=(20_000_003,)")
            if len(multipliers) != order:
                got = f"got {len(multipliers)} multipliers for an order of {order}"
                raise RangeError(got, "pass one multiplier for each token of the n-gram")
            for each in multipliers:
                whole("a multiplier", each, -MAX_INT64 - 1, MAX_INT64, remedy="use wrap(multiplier), as torch computes")
        one_of("operation", self.operation, ("xor", "sum"))
        whole("vocab_size", self.vocab_size, 1, remedy="pass the vocab_size of the tokenizer")
        whole("fill", self.fill, -MAX_INT64 - 1, MAX_INT64, remedy="fill=0")
        if self.end is not None:
            whole("end", self.end, -MAX_INT64 - 1, MAX_INT64, remedy="end=None, or the id that ends a text")

    @classmethod
    def of(
        cls,
        *,
        orders: Sequence[int],
        heads: int,
        size: int,
        vocab_size: int,
        kind: SizeKind = "prime",
        seed: int = 0,
        fill: int = 0,
        end: int | None = None,
    ) -> NGramHash:
        """Return a new hash like Engram's: exclusive or, and random odd multipliers that cannot overflow.

        Args:
            orders: the orders of the n-grams, such as ``(2, 3)``.
            heads: the number of columns of each order.
            size: the least number of rows of a column.
            kind: ``"prime"`` takes the next primes, each once. ``"power_of_two"`` takes the next power of two.
            seed: the seed of the multipliers. Layers need different ones.
        """
        orders = tuple(
            whole("an order", each, 1, MAX_ORDER, remedy="orders=(2, 3)")
            for each in entries("orders", orders, "(2, 3)")
        )
        heads = whole("heads", heads, 1, MAX_ORDER, remedy="heads=8")
        size = whole("size", size, 1, MAX_SIZE // 2, remedy="size=1_000_000")
        vocab_size = whole("vocab_size", vocab_size, 1, remedy="pass the vocab_size of the tokenizer")
        one_of("kind", kind, ("prime", "power_of_two"))
        columns = [order for order in orders for _ in range(heads)]
        primes = primes_from(size)
        sizes = [next(primes) if kind == "prime" else 1 << (size - 1).bit_length() for _ in columns]
        numbers = random_multipliers(max(orders, default=1), vocab_size, whole("seed", seed, 0, remedy="seed=0"))
        return cls(
            orders=tuple(columns), sizes=tuple(sizes), multipliers=tuple(numbers[:order] for order in columns),
            vocab_size=vocab_size, fill=fill, end=end,
        )  # fmt: skip

    @property
    def max_order(self) -> int:
        return max(self.orders)

    @property
    def num_columns(self) -> int:
        return len(self.orders)

    @property
    def num_rows(self) -> int:
        """The number of rows of all columns together."""
        return sum(self.sizes)

    def rows(self, windows: Int[Tensor, "*batch order"]) -> Int[Tensor, "*batch columns"]:
        """Return the row of every column, from the ids of each token and of the tokens before it, in this order."""
        # columns of one order often share their multipliers
        hashes = {each: self._combine(windows, each) for each in dict.fromkeys(self.multipliers)}
        offsets = itertools.accumulate(self.sizes[:-1], initial=0)
        columns = zip(self.multipliers, self.sizes, offsets, strict=True)
        return torch.stack([hashes[key].remainder(size) + offset for key, size, offset in columns], -1)

    def _combine(self, windows: Tensor, multipliers: tuple[int, ...]) -> Tensor:
        result = windows[..., 0] * multipliers[0]
        for back, multiplier in enumerate(multipliers[1:], 1):
            product = windows[..., back] * multiplier
            result = result ^ product if self.operation == "xor" else result + product
        return result


def random_multipliers(count: int, vocab_size: int, seed: int) -> tuple[int, ...]:
    """Return the multipliers of Engram: odd, from NumPy's generator, and so small that no product overflows."""
    bound = max(1, MAX_INT64 // vocab_size // 2)
    return tuple(int(each) * 2 + 1 for each in np.random.default_rng(seed).integers(0, bound, size=count))


def wrap(number: int) -> int:
    """Return a number as a signed integer of 64 bits, as torch computes it.

    >>> wrap(2**63)
    -9223372036854775808
    """
    return (number + 2**63) % 2**64 - 2**63


def primes_from(low: int) -> Iterator[int]:
    """Yield the primes of at least `low`.

    >>> list(itertools.islice(primes_from(20_000_000), 2))
    [20000003, 20000023]
    """
    return filter(is_prime, itertools.count(low))


def is_prime(number: int) -> bool:
    """Return whether a number below 3.3e24 is prime, by the test of Miller and Rabin."""
    if number < 2 or any(number % prime == 0 for prime in WITNESSES):
        return number in WITNESSES
    odd = (number - 1) >> (twos := ((number - 1) & (1 - number)).bit_length() - 1)
    return all(_passes(witness, odd, twos, number) for witness in WITNESSES)


def _passes(witness: int, odd: int, twos: int, number: int) -> bool:
    power = pow(witness, odd, number)
    return power == 1 or any(pow(power, 1 << each, number) == number - 1 for each in range(twos))
