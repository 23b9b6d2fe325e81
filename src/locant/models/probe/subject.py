"""What is probed, brought into one form: something that rotates tokens at positions, however it wants to be called.

No code is read: every way of calling that the field uses is tried on a few tokens, and the first that gives tokens back
is taken. A call that is tried may raise whatever it likes; of two ways that work, the one that is named first counts.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from locant.models.probe import ways as calls
from locant.models.probe.rotary_module import Apply, is_axial, returns_tables, ways_with_tables
from locant.models.probe.trial import FAILED, HEADS, TRIAL, Rotate, Tried, UnusableError, Way, sides_of
from locant.positions.base import PositionEncoding

__all__ = ["Subject", "counting", "name_of", "subject_of"]

WIDTHS = (64, 128, 32, 80, 96, 256, 16, 48, 72, 112, 40, 24, 8, 512, 192, 12, 6, 4, 2)
"""Widths of a head that are tried where nothing says it."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Something that rotates tokens.

    Args:
        called: how it is called, in words.
        given: whether it is told positions; else it counts tokens from 0.
        limit: the last position that it can be asked for; ``None``: any.
        again: the same with a copy of its module as it was, or cast to a dtype; ``None``: it is no module.
    """

    name: str
    called: str
    rotate: Rotate
    width: int
    axes: int = 1
    given: bool = True
    limit: int | None = None
    again: Callable[[torch.dtype | None], Subject] | None = None

    def within(self, limit: int) -> Subject:
        """The same, asked for no position past this one."""
        again, last = self.again, limit if self.limit is None else min(limit, self.limit)
        return replace(self, limit=last, again=None if again is None else lambda dtype: again(dtype).within(limit))

    def sides(self) -> tuple[Subject, ...]:
        """What is done to queries, and what to keys, each as if both got it; one, where one result stands for both."""
        q, k = self.rotate(torch.ones(1, HEADS, TRIAL, self.width), self.places(*range(TRIAL)))
        return (self,) if q is k else (self._side(0), self._side(1))

    def _side(self, number: int) -> Subject:
        rotate, again = self.rotate, self.again

        def one_side(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
            side = rotate(x, index)[number]
            return side, side

        copied = None if again is None else lambda dtype: again(dtype)._side(number)
        return replace(self, rotate=one_side, again=copied)

    def places(self, *index: int, axis: int = 0) -> Tensor:
        """These positions on one axis, and 0 on the others."""
        found = torch.zeros(1, len(index), self.axes, dtype=torch.int64)
        found[..., axis] = torch.tensor(index, dtype=torch.int64)
        return found


def name_of(target: Any) -> str:
    """What it is called in sentences."""
    return getattr(target, "__qualname__", None) or type(target).__name__


def counting(subject: Subject) -> Subject:
    """What is told positions and counts tokens itself, as what it is."""

    def by_count(x: Tensor) -> tuple[Tensor, Tensor]:
        index = torch.arange(x.shape[2])[None, :, None].expand(1, -1, subject.axes)
        return subject.rotate(x, index)

    again = subject.again
    return replace(
        subject,
        rotate=calls.counted(by_count),
        given=False,
        axes=1,
        again=None if again is None else lambda dtype: counting(again(dtype)),
    )


def subject_of(
    target: Any,
    *,
    head_dim: int | None = None,
    axes: int | None = None,
    apply: Apply | None = None,
    limit: int | None = None,
    config: Any = None,
    layer_type: str | None = None,
    tried: Tried | None = None,
) -> Subject | None:
    """The one form of what was given; ``None``: it gives no tokens back, and `tried` says why.

    See `probe` for what it may be.
    """
    tried = {} if tried is None else tried
    for width, num_axes, way in _ways(target, head_dim, axes, apply, config, layer_type, tried):
        rotate = way.rotation_of(target, num_axes)
        failure = _failure(rotate, width, num_axes)
        if failure is None:
            subject = Subject(
                name=name_of(target), called=way.called, rotate=rotate, width=width, axes=num_axes, given=way.given,
                limit=limit,
            )  # fmt: skip
            return replace(subject, again=_copies(target, subject, way))
        tried.setdefault(way.called.split(":")[0], failure)
    return None


def _copies(target: Any, subject: Subject, way: Way) -> Callable[[torch.dtype | None], Subject] | None:
    """`Subject.again`, of a copy that is taken now; some modules hold what Python cannot copy."""
    if not isinstance(target, nn.Module):
        return None
    try:
        kept = copy.deepcopy(target)
    except FAILED:
        return None
    return lambda dtype: replace(subject, rotate=way.rotation_of(copy.deepcopy(kept).to(dtype), subject.axes))


def _failure(rotate: Rotate, width: int, axes: int) -> Exception | None:
    """Why no tokens come back, whole and finite; ``None``: they do."""
    x = torch.ones(1, HEADS, TRIAL, width)
    index = torch.arange(TRIAL)[None, :, None].expand(1, TRIAL, axes)
    try:
        with torch.no_grad():
            sides = sides_of(rotate(x, index), x.shape, 2)
    except FAILED as error:
        return error
    if all(side.isfinite().all() for side in sides):
        return None
    return UnusableError(
        "gave NaN or infinite numbers", "return finite numbers for tokens of ones at positions 0, 1 and 2"
    )


def _ways(
    target: Any,
    head_dim: int | None,
    axes: int | None,
    apply: Apply | None,
    config: Any,
    layer_type: str | None,
    tried: Tried,
) -> Iterator[tuple[int, int, Way]]:
    """Widths, axes and ways of calling, the likely first."""
    stated = head_dim or _stated_width(target, config)
    widths = WIDTHS if stated is None else (stated,)
    counts = _stated_axes(target) if axes is None else (axes,)
    if isinstance(target, PositionEncoding):
        ways: tuple[Way, ...] = (calls.ENCODING,)
    elif hasattr(target, "rotate_queries_or_keys"):
        ways = (calls.BOTH_ALONE_BY_NAME,) if getattr(target, "use_xpos", False) else (calls.WITH_OFFSET,)
    elif returns_tables(target):
        return (yield from ways_with_tables(target, stated, counts, apply, layer_type, tried))
    else:
        ways = {1: (calls.ALONE,), 2: (calls.WITH_POSITIONS, calls.BOTH_ALONE), 3: (calls.BOTH_WITH_POSITIONS,)}.get(
            _required(target), ()
        )
    yield from itertools.product(widths, counts, ways)


def _stated_width(target: Any, config: Any) -> int | None:
    """The width of a head, as far as it is said; layers of a Gemma 4 have no single one."""
    said = {} if config is None else config if isinstance(config, Mapping) else config.to_dict()
    if said.get("per_layer_config"):
        return None
    values = [getattr(target, "head_dim", None), said.get("qk_rope_head_dim"), said.get("head_dim")]
    width, heads = said.get("hidden_size"), said.get("num_attention_heads")
    values += [width // heads] if isinstance(width, int) and isinstance(heads, int) else []
    return next((value for value in values if isinstance(value, int)), None)


def _stated_axes(target: Any) -> tuple[int, ...]:
    """How many axes positions may have, the likely first."""
    if isinstance(target, PositionEncoding):
        return (getattr(getattr(target, "pairs", None), "num_axes", 1),)
    if is_axial(target):
        return (2, 3)
    sections = getattr(target, "mrope_section", None)
    return (len(sections),) if isinstance(sections, (list, tuple)) else (3,) if sections else (1, 2, 3, 4)


def _required(target: Any) -> int:
    """How many arguments a call has to have, or has before those that have a name of their own."""
    call = target.forward if isinstance(target, nn.Module) else target
    names = [*inspect.signature(call).parameters.values()]
    asked = [one for one in names if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    needed = [one for one in asked if one.default is one.empty]
    told = any(word in one.name for one in asked[len(needed) :] for word in ("pos", "index", "offset"))
    return len(needed) + told
