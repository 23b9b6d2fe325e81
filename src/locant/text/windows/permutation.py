"""`Permutation`: an order of ``range(n)`` that a seed and an epoch decide, computed place by place.

A list of all windows in random order takes 8 bytes each, in every process. Here the window at a place of the order is
computed from the place. A place is written as two digits, one below a and one below b, where a times b is n or
little more; in every round of a Feistel network, one digit is shifted by a number that the other and a key decide. That
maps the places onto themselves, and what is mapped to one of the few from n on is mapped again until it is below n.
Under 2**16 windows there is a list after all, sorted by random keys: so small a network reaches few of all orders.

All of it is integer arithmetic in this file: an order never changes with the version of NumPy, nor with the machine. It
is good enough for training and nothing else: it is not cryptographic.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
from jaxtyping import Int, UInt64

__all__ = ["Permutation"]

LISTED = 2**16  # below this, an order is a list
ROUNDS = 6  # an even number, after which each digit stands in its own place again
HALF = np.uint64(32)


class Permutation:
    """A keyed order of ``range(n)``, for n below 2**62.

    >>> order = Permutation(10, seed=0, epoch=3)
    >>> sorted(order(np.arange(10)).tolist()) == list(range(10))
    True
    """

    def __init__(self, n: int, *, seed: int, epoch: int) -> None:
        self.n = n
        digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8 * ROUNDS).digest()
        self._keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
        self._low = np.uint64(max(math.isqrt(n), 1))
        self._high = np.uint64(-(-n // int(self._low)))
        self._listed = self._sorted() if n < LISTED else None

    def __call__(self, places: Int[np.ndarray, " places"]) -> Int[np.ndarray, " places"]:
        """What stands at these places of the order."""
        if self._listed is not None:
            return self._listed[places]
        found = self._network(places.astype(np.uint64))
        outside = np.flatnonzero(found >= self.n)
        while len(outside):
            found[outside] = self._network(found[outside])
            outside = outside[found[outside] >= self.n]
        return found.view(np.int64)

    def _sorted(self) -> Int[np.ndarray, " n"]:
        once = _mixed(np.arange(self.n, dtype=np.uint64), self._keys[0])
        return np.argsort(_mixed(once, self._keys[1]), kind="stable")

    def _network(self, places: UInt64[np.ndarray, " places"]) -> UInt64[np.ndarray, " places"]:
        """One pass: each digit in alternation is shifted by the other."""
        left = places // self._low
        right = places - left * self._low
        sizes = (self._high, self._low)
        for number, key in enumerate(self._keys):
            left, right = right, _shifted(left, sizes[number % 2], _mixed(right, key))
        return left * self._low + right


def _shifted(
    digit: UInt64[np.ndarray, " n"], size: np.uint64, by: UInt64[np.ndarray, " n"]
) -> UInt64[np.ndarray, " n"]:
    """The digit plus a number below `size` that 32 random bits choose, around in a circle."""
    by >>= HALF
    by *= size
    by >>= HALF
    by += digit
    return np.minimum(by, by - size, out=by)  # where it is below `size`, the difference wraps around and is huge


def _mixed(x: UInt64[np.ndarray, " n"], key: np.uint64) -> UInt64[np.ndarray, " n"]:
    """64 bits that all depend on all bits of `x` and of the key: two rounds of multiplying and folding."""
    x = x ^ key
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> HALF
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> HALF
    return x
