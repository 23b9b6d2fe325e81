"""`KeptTable`: a table that is computed from parameters once, for later calls and for all layers that share it.

In decoding, a table of distances would cost more than the attention of one query, and it is the same in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from locant.kernels.transforms import is_plain_eager

AT_A_TIME = 1_024
"""The number of distances whose rows are computed at a time."""

T = TypeVar("T")


class KeptTable(Generic[T]):
    """A table, and copies of the parameters from which it was computed.

    It is kept while the parameters have the same values. They are compared at each call, because an optimizer, a
    checkpoint or ``.data`` can change values in ways that torch does not count. On a CPU this takes microseconds. In
    calls with gradients, in compiled code and on other devices, nothing is kept. A copied or loaded module begins
    without a table.

    >>> weight, kept = torch.ones(2), KeptTable()
    >>> with torch.no_grad():
    ...     first, second = (kept.get([weight], None, lambda: weight * 2) for _ in range(2))
    ...     _ = weight.mul_(3)
    ...     third = kept.get([weight], None, lambda: weight * 2)
    >>> first is second, third
    (True, tensor([6., 6.]))
    """

    def __init__(self) -> None:
        self._kept: tuple[Hashable, list[Tensor], T] | None = None

    def __deepcopy__(self, memo: object) -> KeptTable[T]:
        return KeptTable()

    def __reduce__(self) -> tuple[type[KeptTable[T]], tuple[()]]:
        return KeptTable, ()

    def get(self, parameters: Sequence[Tensor], key: Hashable, make: Callable[[], T]) -> T:
        """Return the table. `key` holds everything else that the table depends on."""
        if not can_keep(parameters):
            return make()
        entry = self._kept  # read once, because another thread may replace it
        if entry is None or entry[0] != key or not _are_same(entry[1], parameters):
            with torch.inference_mode(mode=False), torch.no_grad():  # training cannot use inference tensors later
                entry = self._kept = key, [x.detach().clone() for x in parameters], make()
        return entry[2]


def _are_same(copies: Sequence[Tensor], parameters: Sequence[Tensor]) -> bool:
    pairs = zip(copies, parameters, strict=True)
    return all(x.dtype == y.dtype and x.shape == y.shape and torch.equal(x, y) for x, y in pairs)


def can_keep(parameters: Sequence[Tensor]) -> bool:
    """Return whether a table of these parameters can be kept: plain tensors on a CPU, in a call without gradients."""
    return is_plain_eager() and all(type(x) in (Tensor, nn.Parameter) and x.device.type == "cpu" for x in parameters)


class RowsByDistance:
    """The rows of a range of distances, the largest first. The range grows when more distances are needed.

    Args:
        make: a function that returns the rows of some distances, ``* distances width``.
        dim: the dimension of the distances in these rows.

    >>> rows = RowsByDistance(lambda distance: distance[:, None] * 10.0)
    >>> rows.between(-1, 2).flatten()
    tensor([ 20.,  10.,   0., -10.])
    """

    def __init__(self, make: Callable[[Int[Tensor, " distances"]], Tensor], *, dim: int = -2) -> None:
        self._make, self._dim = make, dim
        self._kept: tuple[int, int, Tensor] | None = None

    def between(self, first: int, last: int) -> Float[Tensor, "*rows"]:
        """Return the rows of the distances from `last` down to `first`."""
        entry = self._kept
        if entry is None or first < entry[0] or entry[1] < last:
            with torch.inference_mode(mode=False), torch.no_grad():
                entry = self._kept = self._grow(first, last, entry)
        return entry[2].narrow(self._dim, entry[1] - last, last - first + 1)

    def _grow(self, first: int, last: int, kept: tuple[int, int, Tensor] | None) -> tuple[int, int, Tensor]:
        """Return all rows, with a quarter more than needed, because each step of decoding needs one more."""
        if kept is None or max(last, kept[1]) - min(first, kept[0]) > 2 * (last - first + kept[1] - kept[0]):
            return first, last, self._rows(first, last)
        low, high, rows = kept
        spare = (high - low) // 4
        new_low = low if low <= first else min(first, low - spare)
        new_high = high if last <= high else max(last, high + spare)
        parts = [self._rows(high + 1, new_high), rows, self._rows(new_low, low - 1)]
        return new_low, new_high, torch.cat([x for x in parts if x.numel()], dim=self._dim)

    def _rows(self, first: int, last: int) -> Tensor:
        parts = torch.arange(last, first - 1, -1, device="cpu").split(AT_A_TIME)
        return torch.cat([self._make(part) for part in parts], dim=self._dim)
