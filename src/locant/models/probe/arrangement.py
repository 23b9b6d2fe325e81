"""Whether a token is rotated by its position alone: not by its neighbours, the length, other rows, or earlier calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from locant.models.probe.subject import Subject
from locant.models.probe.trial import FAILED, HEADS, refuse_unsteady

__all__ = ["Arrangement", "arrangement_of", "counts_itself", "require_steady", "shifts"]

SAME = 1e-4
"""How far two rotations of one token may be apart at small positions; wrong ones are further by far."""

SHORT = 8
LONGEST = 2**18
COUNTED = 2048
"""How many tokens are rotated at once where positions are counted."""


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """What else a rotation depends on.

    Args:
        neighbours: positions of one call are no consecutive numbers, or some of them equal: left padding, a cache.
        rows: rows of a batch with positions of their own.
        grows_at: the largest position of a call from which on small positions too are rotated otherwise.
        remembers: a short sequence is rotated otherwise after a long one.
        writes: it overwrites what it is given.
        of: the one side of which that holds, ``"queries"`` or ``"keys"``; ``None``: both, or more than one thing.
    """

    neighbours: bool = False
    rows: bool = False
    grows_at: int | None = None
    remembers: bool = False
    writes: bool = False
    of: str | None = None

    def warnings(self) -> Iterator[str]:
        """What of it goes wrong, in plain words."""
        if self.neighbours:
            yield (
                "A token is rotated otherwise when others stand beside it: with left padding, a cache or positions "
                "that do not follow each other it is wrong."
            )
        if self.rows:
            yield "Rows of a batch do not have positions of their own: the second row is rotated as if it were another."
        if self.grows_at is not None:
            yield (
                f"What a token gets depends on the largest position of the call (from {self.grows_at:,} on): keys in "
                "a cache were rotated otherwise."
            )
        if self.remembers:
            yield "It remembers: after a long sequence a short one is rotated otherwise than before."
        if self.writes:
            yield "It overwrites the tokens it is given."

    def with_keys(self, keys: Arrangement) -> Arrangement:
        """That of queries and that of keys in one."""
        if self == keys:
            return self
        nothing = Arrangement()
        of = "keys" if self == nothing else "queries" if keys == nothing else None
        begins = [each for each in (self.grows_at, keys.grows_at) if each is not None]
        return replace(
            self, of=of, neighbours=self.neighbours or keys.neighbours, rows=self.rows or keys.rows,
            grows_at=min(begins, default=None), remembers=self.remembers or keys.remembers,
            writes=self.writes or keys.writes,
        )  # fmt: skip


def require_steady(subject: Subject) -> None:
    """Two equal calls agree: nothing can be measured of what is random."""
    x, near = _random(subject, SHORT), _index(subject, *range(SHORT))
    one, again = (torch.cat(subject.rotate(x.clone(), near)) for _ in range(2))
    refuse_unsteady(subject.name, one, again)


def counts_itself(subject: Subject) -> bool:
    """Whether positions are asked for and have no effect."""
    x = _random(subject, 5)
    here, there = (torch.cat(subject.rotate(x.clone(), _index(subject, *range(begin, begin + 5)))) for begin in (0, 7))
    return torch.equal(here, there)


def arrangement_of(subject: Subject) -> Arrangement:
    """All of it; short sequences come first, so that what remembers has nothing to remember yet."""
    x = _random(subject, SHORT)
    near = _index(subject, *range(SHORT))
    given = _rotated(subject, x, near)
    written = x.clone()
    subject.rotate(written, near)
    alone = rows = False
    if subject.given:
        places = [place for place in (0, 0, 0, 1, 2, 3, 40, 41) if subject.limit is None or place <= subject.limit]
        tokens = _random(subject, len(places))
        whole = _rotated(subject, tokens, _index(subject, *places))
        for number, place in enumerate(places):
            one = _rotated(subject, tokens[:, :, number : number + 1], _index(subject, place))
            alone = alone or _apart(one, whole[:, :, number : number + 1])
        rows = _rows_depend(subject)
    grows_at = _grows_at(subject)
    longest = min(LONGEST, 4 * (grows_at or COUNTED)) if subject.limit is None else subject.limit
    if subject.given:
        _try(subject, torch.cat([x, x[:, :, :1]], 2), _index(subject, *range(SHORT), longest - 1))
    else:
        _try(subject, _random(subject, 1), _index(subject, longest - 1))
    return Arrangement(
        neighbours=alone,
        rows=rows,
        grows_at=grows_at,
        remembers=_apart(_rotated(subject, x, near), given),
        writes=not torch.equal(written, x),
    )


def shifts(subject: Subject, factor: float, limit: int) -> dict[int, float]:
    """By how much q . k changes when both move on together, over the lengths of both, by how far they moved.

    `factor` is by what q . k is multiplied.
    """
    x = _random(subject, 4)
    where = (0, 1, 3, 7)
    scores: dict[int, Tensor] = {}
    for shift in (0, 1, 64, 1000, 65_536, 2**20):
        if shift + max(where) > limit:
            break
        q, k = subject.rotate(x.clone(), _index(subject, *(shift + place for place in where)))
        scores[shift] = q.double() @ k.double().mT
    size = x.double().norm(dim=-1)
    lengths = size[..., :, None] * size[..., None, :] * factor
    return {shift: float(((score - scores[0]) / lengths).abs().max()) for shift, score in scores.items() if shift}


def _rows_depend(subject: Subject) -> bool:
    """Whether the second row of a batch is rotated as if it stood where the first one does."""
    last = 30 if subject.limit is None else min(30, subject.limit)
    one, other = _index(subject, *range(5)), _index(subject, *range(last - 4, last + 1))
    x = _random(subject, 5).repeat(3, 1, 1, 1)  # more rows than heads, so that no code takes one for the other
    rows = _try(subject, x, torch.cat([one, other, one]))
    return rows is not None and _apart(rows[1:2], _rotated(subject, x[1:2], other))


def _grows_at(subject: Subject) -> int | None:
    """The smallest last position, in a power of two or between, at which small positions are rotated otherwise."""
    x, near = _random(subject, SHORT), _index(subject, *range(SHORT))
    given = _rotated(subject, x, near)

    def changes(last: int) -> bool:
        longer = torch.cat([x, x[:, :, :1]], 2)
        rotated = _try(subject, longer, _index(subject, *range(SHORT), last))
        return rotated is not None and _apart(rotated[:, :, :SHORT], given)

    end = (LONGEST if subject.limit is None else subject.limit) if subject.given else COUNTED
    low, high = SHORT, 2 * SHORT
    while high <= end and not changes(high - 1):
        low, high = high, 2 * high
    if high > end:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if changes(middle - 1) else (middle, high)
    return high - 1


def _apart(one: Tensor, other: Tensor) -> bool:
    return float((one - other).abs().max()) > SAME


def _rotated(subject: Subject, x: Tensor, index: Tensor) -> Tensor:
    return subject.rotate(x.clone(), index)[0].clone()


def _try(subject: Subject, x: Tensor, index: Tensor) -> Tensor | None:
    try:
        return _rotated(subject, x, index)
    except FAILED:
        return None


def _index(subject: Subject, *places: int) -> Tensor:
    return torch.tensor(places, dtype=torch.int64)[None, :, None].expand(1, -1, subject.axes)


def _random(subject: Subject, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(1, HEADS, tokens, subject.width, generator=generator)
