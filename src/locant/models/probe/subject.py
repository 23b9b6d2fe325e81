"""What is probed, brought into one form: something that rotates tokens at positions, however it wants to be called.

No code is read: every way of calling that the field uses is tried on a few tokens, and the first that gives tokens back
is taken. A call that is tried may raise whatever it likes; of two ways that work, the one that is named first counts.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from locant.models.probe.trial import Tried, UnusableError, sides_of
from locant.positions.base import PositionEncoding
from locant.positions.positions import Positions

__all__ = ["FAILED", "HEADS", "Subject", "counting", "name_of", "subject_of"]

Turn = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From tokens ``[batch, heads, seq, width]`` and their index ``[batch or 1, seq, axes]`` to queries, and to keys."""

Apply = Callable[..., Any]


@dataclass(frozen=True)
class Way:
    """A way of calling, in words, and what makes a `Turn` of a target and a number of axes with it."""

    called: str
    turn_of: Callable[[Any, int], Turn]
    given: bool = True
    """Whether positions are told."""


TRIAL, HEADS = 3, 2
WIDTHS = (64, 128, 32, 80, 96, 256, 16, 48, 72, 112, 40, 24, 8, 512, 192, 12, 6, 4, 2)
"""Widths of a head that are tried where nothing says it."""

FAILED = (
    TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError, AssertionError, NotImplementedError,
    ArithmeticError,
)  # fmt: skip
"""What a call may end with that is tried on code of others."""


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
    turn: Turn
    width: int
    axes: int = 1
    given: bool = True
    limit: int | None = None
    again: Callable[[torch.dtype | None], Subject] | None = None

    def within(self, limit: int) -> Subject:
        """The same, asked for no position past this one."""
        again, last = self.again, limit if self.limit is None else min(limit, self.limit)
        return replace(self, limit=last, again=None if again is None else lambda dtype: again(dtype).within(limit))

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

    def counted(x: Tensor) -> tuple[Tensor, Tensor]:
        index = torch.arange(x.shape[2])[None, :, None].expand(1, -1, subject.axes)
        return subject.turn(x, index)

    again = subject.again
    return replace(
        subject,
        turn=_counted(counted),
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
        turn = way.turn_of(target, num_axes)
        failure = _failure(turn, width, num_axes)
        if failure is None:
            subject = Subject(
                name=name_of(target), called=way.called, turn=turn, width=width, axes=num_axes, given=way.given,
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
    return lambda dtype: replace(subject, turn=way.turn_of(copy.deepcopy(kept).to(dtype), subject.axes))


def _failure(turn: Turn, width: int, axes: int) -> Exception | None:
    """Why no tokens come back, whole and finite; ``None``: they do."""
    x = torch.ones(1, HEADS, TRIAL, width)
    index = torch.arange(TRIAL)[None, :, None].expand(1, TRIAL, axes)
    try:
        with torch.no_grad():
            sides = sides_of(turn(x, index), x.shape, 2)
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
        ways: tuple[Way, ...] = (ENCODING,)
    elif hasattr(target, "rotate_queries_or_keys"):
        ways = (BOTH_ALONE_BY_NAME,) if getattr(target, "use_xpos", False) else (WITH_OFFSET,)
    elif _returns_tables(target):
        return (yield from _tables(target, stated, counts, apply, layer_type, tried))
    else:
        ways = {1: (ALONE,), 2: (WITH_POSITIONS, BOTH_ALONE), 3: (BOTH_WITH_POSITIONS,)}.get(_required(target), ())
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
    if _is_axial(target):
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


def _alone(target: Any, axes: int) -> Turn:
    return _counted(lambda x: (turned := target(x), turned))


def _both_alone(target: Any, axes: int) -> Turn:
    return _counted(lambda x: target(x, x.clone()))


def _counted(turn: Callable[[Tensor], Any]) -> Turn:
    """What counts tokens itself is given a row that is long enough, of which the tokens asked for are picked."""

    def turned(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        row = index[0, :, 0]
        long = x.new_zeros(*x.shape[:2], int(row.max()) + 1, x.shape[-1])
        for place in range(len(row)):  # the same place may be asked for twice
            long[:, :, row[place]] = x[:, :, place]
        q, k = sides_of(turn(long), long.shape, 2)
        return q[:, :, row], k[:, :, row]

    return turned


def _with_positions(target: Any, axes: int) -> Turn:
    call = _in_some_shape(lambda x, index: target(x, index), 1)
    return lambda x, index: (turned := call(x, index)[0], turned)


def _both_with_positions(target: Any, axes: int) -> Turn:
    call = _in_some_shape(lambda x, index: target(x, x.clone(), index), 2)

    def turn(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        q, k = call(x, index)
        return q, k

    return turn


def _in_some_shape(call: Callable[[Tensor, Tensor], Any], count: int) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    """Positions as ``[batch, seq]``, as ``[seq]``, or with axes last or first; tokens with heads before or after."""

    def called(x: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        failures: list[Exception] = []
        forms = [index.squeeze(-1), index.squeeze(-1)[0]] if index.shape[-1] == 1 else [index, index.movedim(-1, 0)]
        for swapped, form in itertools.product((False, True), forms if len(index) == 1 else forms[:1]):
            tokens = x.transpose(1, 2) if swapped else x
            try:
                sides = sides_of(call(tokens, form), tokens.shape, count)
            except FAILED as error:
                failures.append(error)
                continue
            return tuple(side.transpose(1, 2) if swapped else side for side in sides)
        raise failures[0]

    return called


def _encoding(target: PositionEncoding, axes: int) -> Turn:
    def turn(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        return target.rotate(x, x.clone(), Positions.of(index if axes > 1 else index[..., 0]))

    return turn


def _both_alone_by_name(target: Any, axes: int) -> Turn:
    return _counted(lambda x: target.rotate_queries_and_keys(x, x.clone()))


def _with_offset(target: Any, axes: int) -> Turn:
    def turn(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        rows = [
            torch.cat([
                target.rotate_queries_or_keys(row[:, :, place : place + 1], offset=int(where[place, 0]))
                for place in range(x.shape[2])
            ], 2)
            for row, where in zip(x.split(-(-len(x) // len(index))), index, strict=True)
        ]  # fmt: skip
        return (turned := torch.cat(rows)), turned

    return turn


ALONE = Way("f(x): it counts tokens from 0", _alone, given=False)
BOTH_ALONE = Way("f(q, k): it counts tokens from 0", _both_alone, given=False)
BOTH_ALONE_BY_NAME = Way(
    "module.rotate_queries_and_keys(q, k): it counts tokens from 0", _both_alone_by_name, given=False
)
WITH_POSITIONS = Way("f(x, positions)", _with_positions)
BOTH_WITH_POSITIONS = Way("f(q, k, positions)", _both_with_positions)
WITH_OFFSET = Way("module.rotate_queries_or_keys(x, offset=...)", _with_offset)
ENCODING = Way("encoding.rotate(q, k, positions)", _encoding)

# ---------------------------------------------------------------------- modules that give tables of cosines and sines


def _returns_tables(target: Any) -> bool:
    """Whether a module's name says that it makes tables, and its module has a function that rotates by them."""
    return isinstance(target, nn.Module) and any(word in type(target).__name__ for word in ("Rotary", "Rope", "RoPE"))


def _tables(
    target: nn.Module,
    stated: int | None,
    counts: tuple[int, ...],
    apply: Apply | None,
    layer_type: str | None,
    tried: Tried,
) -> Iterator[tuple[int, int, Way]]:
    """Every way to make tables, with every function of the same module that rotates by them."""
    functions = [apply] if apply is not None else _functions_beside(target)
    forms = [form for form in FORMS if not _is_axial(target) or "axes]" in form]
    for axes, form in itertools.product(counts, forms):
        make = functools.partial(_made, form=form, layer_type=layer_type)
        try:
            with torch.no_grad():
                first = make(target, torch.zeros(1, HEADS, TRIAL, 8), torch.zeros(1, TRIAL, axes, dtype=torch.int64))[0]
        except FAILED as error:
            tried.setdefault(f"module({form})", error)
            continue
        widths = [stated] if stated else [first.shape[-1], 2 * first.shape[-1]]
        for width, function, rotate in itertools.product(widths, functions, ROTATING):
            yield width, axes, _tabled(form, make, function, rotate)


def _functions_beside(target: nn.Module) -> list[Apply]:
    """Those of its Python module, the likely first: axial ones have a name of their own, and so have interleaved."""
    beside, config = vars(sys.modules[type(target).__module__]), getattr(target, "config", None)
    latent = hasattr(config, "qk_rope_head_dim") and getattr(config, "rope_interleave", True)
    words = ("_vision", "_2d", "_multidimensional") if _is_axial(target) else ("_interleave",) if latent else ()
    last = () if words else ("_interleave", "_vision")
    names = [name for name in beside if name.startswith("apply") and ("rot" in name or "rope" in name)]
    names.sort(key=lambda name: (any(map(name.endswith, last)), not any(word in name for word in words), len(name)))
    return [beside[name] for name in names if callable(beside[name])]


def _is_axial(target: Any) -> bool:
    """A rotary module of `transformers` that takes a row and a column for each patch."""
    return hasattr(target, "compute_axial_rope_parameters")


FORMS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, ...]]] = {
    "x, ids [batch, seq]": lambda x, index: (x[:, 0], *index.unbind(-1)) if index.shape[-1] == 1 else (),
    "x, ids [axes, batch, seq]": lambda x, index: (x[:, 0], index.movedim(-1, 0)),
    "x, ids [seq, axes]": lambda x, index: (x[:, 0], index[0]),
    "x, ids [batch, seq, axes]": lambda x, index: (x[:, 0], index),
    "ids [seq]": lambda x, index: (index[0, :, 0],),
}


def _made(target: nn.Module, x: Tensor, index: Tensor, *, form: str, layer_type: str | None) -> tuple[Tensor, ...]:
    """The tables of these positions."""
    options = {} if layer_type is None else {"layer_type": layer_type}
    tables = target(*FORMS[form](x, index), **options)
    parts = tables if isinstance(tables, tuple) else (tables,)
    if not isinstance(parts[0], Tensor) or not parts[0].ndim:
        raise TypeError("no tables")
    return parts


def _tabled(
    form: str,
    make: Callable[..., tuple[Any, ...]],
    function: Apply,
    rotate: Callable[..., tuple[Tensor, Tensor]],
) -> Way:
    def turn_of(target: nn.Module, axes: int) -> Turn:
        return lambda x, index: rotate(function, x, make(target, x, index), index)

    return Way(f"module({form}) makes tables, and {function.__name__} rotates by them", turn_of)


def _whole(function: Apply, x: Tensor, tables: tuple[Any, ...], index: Tensor) -> tuple[Tensor, Tensor]:
    takes = [*inspect.signature(inspect.unwrap(function)).parameters.values()]
    ids = (index,) if any(one.name == "position_ids" and one.default is one.empty for one in takes) else ()
    if "k" not in "".join(one.name for one in takes[:2]):
        return (turned := function(x, *tables, *ids), turned)
    named = {"cos": tables[0], "sin": tables[1]} if {"cos", "sin"} <= {one.name for one in takes} else {}
    q, k = function(x, x.clone(), *(() if named else tables), *ids, **named)[:2]
    return q, k


def _on_its_width(function: Apply, x: Tensor, tables: tuple[Any, ...], index: Tensor) -> tuple[Tensor, Tensor]:
    """As attention classes do, whose function takes no more than the part of a head that is rotated."""
    width = tables[0].shape[-1] * (2 if tables[0].is_complex() else 1)
    q, k = _whole(function, x[..., :width], tables, index)
    return torch.cat([q, x[..., width:]], -1), torch.cat([k, x[..., width:]], -1)


def _heads_last(function: Apply, x: Tensor, tables: tuple[Any, ...], index: Tensor) -> tuple[Tensor, Tensor]:
    q, k = _whole(function, x.transpose(1, 2), tables, index)
    return q.transpose(1, 2), k.transpose(1, 2)


def _one_row(function: Apply, x: Tensor, tables: tuple[Any, ...], index: Tensor) -> tuple[Tensor, Tensor]:
    """Patches without a batch, ``[seq, heads, width]``."""
    sides = _whole(function, x.flatten(0, 1).transpose(0, 1), tables, index)
    q, k = (side.transpose(0, 1).unflatten(0, x.shape[:2]) for side in sides)
    return q, k


ROTATING = (_whole, _on_its_width, _heads_last, _one_row)
