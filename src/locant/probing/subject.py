"""What is probed, brought into one form: something that rotates tokens at positions, however it wants to be called.

No code is read: every way of calling that the field uses is tried on a few tokens, and the first that gives tokens back
is taken. A call that is tried may raise whatever it likes; of two ways that work, the one that is named first counts.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from locant.arguments import MAX_INT32, shown
from locant.errors import InputError
from locant.positions.base import PositionEncoding
from locant.positions.positions import Positions

ROTATES = "locant.probe(lambda x, positions: ..., head_dim=64), x of shape [batch, heads, seq, 64]"

WIDTHS = (64, 128, 32, 80, 96, 256, 16, 48, 72, 112, 40, 24, 8, 512, 192, 12, 6, 4, 2)
"""Widths of a head that are tried where nothing says it."""

TRIAL, HEADS = 3, 2
"""Tokens and heads of a trial."""

FAILED = (
    TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError, AssertionError, NotImplementedError,
    ArithmeticError,
)  # fmt: skip
"""What a call may end with that is tried on code of others."""

Call = Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Of a target, tokens ``[batch, heads, seq, width]`` and their index ``[batch or 1, seq, axes]``: queries, and keys."""

Apply = Callable[..., Any]
"""A function that rotates by tables."""

Tried = dict[str, Exception]
"""The first failure of each way of calling."""


class UnusableError(InputError):
    """A call came to an end, and nothing that can be measured came back."""


@dataclass(frozen=True)
class Way:
    """A way of calling, in words and as code, and whether it tells positions; else tokens are counted from 0."""

    called: str
    call: Call
    given: bool = True


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Something that rotates tokens.

    Args:
        limit: the last position that it can be asked for.
        original: a copy of its module as it was; ``None``: it is no module, or holds what Python cannot copy.
    """

    target: Any
    way: Way
    width: int
    axes: int = 1
    limit: int = MAX_INT32
    original: nn.Module | None = None

    def rotate(self, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """What becomes of tokens as queries, and as keys; one tensor, where one result stands for both."""
        return self.way.call(self.target, x, index)

    def again(self, dtype: torch.dtype | None = None) -> Subject:
        """The same with a copy of its module as it was, cast to a dtype; itself, where there is none."""
        return self if self.original is None else replace(self, target=copy.deepcopy(self.original).to(dtype))

    def within(self, limit: int) -> Subject:
        """The same, asked for no position past this one."""
        return replace(self, limit=min(limit, self.limit))

    def sides(self) -> tuple[Subject, ...]:
        """What is done to queries, and what to keys, each as if both got it; one, where one result stands for both."""
        q, k = self.rotate(torch.ones(1, HEADS, TRIAL, self.width), self.places(*range(TRIAL)))
        calls = [lambda *given, side=side: _both(self.way.call(*given)[side]) for side in (0, 1)]
        return (self,) if q is k else tuple(replace(self, way=replace(self.way, call=call)) for call in calls)

    def counting(self) -> Subject:
        """What is told positions and counts tokens itself, as what it is."""

        def by_count(target: Any, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.way.call(target, x, self.places(*range(x.shape[2])))

        return replace(self, way=replace(self.way, call=_counted(by_count), given=False), axes=1)

    def places(self, *index: int, axis: int | None = None) -> Tensor:
        """These positions, ``[1, seq, axes]``: on one axis, with 0 on the others, or on all."""
        asked = torch.tensor([axis in (None, each) for each in range(self.axes)])
        return torch.tensor(index)[None, :, None] * asked


def name_of(target: Any) -> str:
    """What it is called in sentences."""
    return getattr(target, "__qualname__", None) or type(target).__name__


def subject_of(
    target: Any,
    tried: Tried,
    *,
    head_dim: int | None = None,
    axes: int | None = None,
    apply: Apply | None = None,
    limit: int | None = None,
    config: Any = None,
    layer_type: str | None = None,
) -> Subject | None:
    """The one form of what was given to `probe`; ``None``: it gives no tokens back, and `tried` says why."""
    widths = [each for each in (head_dim or _stated_width(target, config),) if each]
    counts = _stated_axes(target) if axes is None else (axes,)

    def called(*ways: Way) -> Iterator[tuple[int, int, Way]]:
        return itertools.product(widths or WIDTHS, counts, ways)

    if isinstance(target, PositionEncoding):
        trials = called(ENCODING)
    elif hasattr(target, "rotate_queries_or_keys"):
        trials = called(BY_NAME if getattr(target, "use_xpos", False) else WITH_OFFSET)
    elif isinstance(target, nn.Module) and any(word in type(target).__name__ for word in ("Rotary", "Rope", "RoPE")):
        functions = _functions_beside(target) if apply is None else [apply]
        trials = _called_for_tables(target, widths, counts, functions, layer_type, tried)
    else:
        trials = called(*BY_ARGUMENTS.get(_required(target), ()))
    for width, num_axes, way in trials:
        subject = Subject(target=target, way=way, width=width, axes=num_axes, limit=limit or MAX_INT32)
        x, index = torch.ones(1, HEADS, TRIAL, width), subject.places(*range(TRIAL))
        try:
            if all(side.isfinite().all() for side in _sides_of(subject.rotate(x, index), x.shape, 2)):
                with contextlib.suppress(*FAILED):
                    if isinstance(target, nn.Module):
                        return replace(subject, original=copy.deepcopy(target))
                return subject
            remedy = "return finite numbers for tokens of ones at positions 0, 1 and 2"
            failure: Exception = UnusableError("gave NaN or infinite numbers", remedy)
        except FAILED as error:
            failure = error
        tried.setdefault(way.called.split(":")[0], failure)
    return None


def _stated_width(target: Any, config: Any) -> int | None:
    """The width of a head, as far as it is said; layers of a Gemma 4 have no single one."""
    said = {} if config is None else config if isinstance(config, Mapping) else config.to_dict()
    if said.get("per_layer_config"):
        return None
    width, heads = said.get("hidden_size"), said.get("num_attention_heads")
    values = [getattr(target, "head_dim", None), said.get("qk_rope_head_dim"), said.get("head_dim")]
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


def _is_axial(target: Any) -> bool:
    """A rotary module of `transformers` that takes a row and a column for each patch."""
    return hasattr(target, "compute_axial_rope_parameters")


def _required(target: Any) -> int:
    """How many arguments a call has to have, or has before those that have a name of their own."""
    call = target.forward if isinstance(target, nn.Module) else target
    try:
        names = [*inspect.signature(call).parameters.values()]
    except ValueError:  # of what is written in C, such as int
        return 0
    asked = [one for one in names if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    needed = [one for one in asked if one.default is one.empty]
    return len(needed) + any(word in one.name for one in asked[len(needed) :] for word in ("pos", "index", "offset"))


def _sides_of(values: Any, shape: Sequence[int], count: int) -> tuple[Tensor, ...]:
    """The tensors that a call gave back, so many and of this shape."""
    sides = tuple(values) if isinstance(values, (tuple, list)) else (values,)
    if len(sides) != count:
        raise UnusableError(f"gave {len(sides)} values, not {count}", ROTATES)
    for side in sides:
        if not isinstance(side, Tensor):
            remedy = f"return the rotated tokens, as in {ROTATES}"
            raise UnusableError(f"gave {shown(side)}, which is no tensor", remedy)
        if side.shape != tuple(shape):
            raise UnusableError(f"gave shape {[*side.shape]} for tokens of shape {[*shape]}", ROTATES)
    return sides


def _both(side: Any) -> tuple[Any, Any]:
    return side, side


def _counted(call: Callable[[Any, Tensor], Any]) -> Call:
    """What counts tokens itself is given a row that is long enough, of which the tokens asked for are picked."""

    def rotate(target: Any, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        row = index[0, :, 0]
        long = x.new_zeros(*x.shape[:2], int(row.max()) + 1, x.shape[-1])
        for place in range(len(row)):  # the same place may be asked for twice
            long[:, :, row[place]] = x[:, :, place]
        q, k = _sides_of(call(target, long), long.shape, 2)
        picked = q[:, :, row]
        return picked, picked if k is q else k[:, :, row]

    return rotate


def _with_positions(count: int) -> Call:
    """Positions as ``[batch, seq]``, as ``[seq]``, or with axes last or first; tokens with heads before or after."""

    def rotate(target: Any, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        failures: list[Exception] = []
        forms = [index.squeeze(-1), index.squeeze(-1)[0]] if index.shape[-1] == 1 else [index, index.movedim(-1, 0)]
        for swapped, form in itertools.product((False, True), forms if len(index) == 1 else forms[:1]):
            tokens = x.transpose(1, 2) if swapped else x
            try:
                sides = _sides_of(target(*(tokens, tokens.clone())[:count], form), tokens.shape, count)
            except FAILED as error:
                failures.append(error)
                continue
            sides = tuple(side.transpose(1, 2) for side in sides) if swapped else sides
            return sides[0], sides[-1]
        raise failures[0]

    return rotate


def _with_offset(target: Any, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    def rotated(row: Tensor, where: Tensor, place: int) -> Tensor:
        return target.rotate_queries_or_keys(row[:, :, place : place + 1], offset=int(where[place, 0]))

    rows = zip(x.split(-(-len(x) // len(index))), index, strict=True)
    return _both(torch.cat([torch.cat([rotated(*row, place) for place in range(x.shape[2])], 2) for row in rows]))


BY_ARGUMENTS = {
    1: (Way("f(x): it counts tokens from 0", _counted(lambda target, x: _both(target(x))), given=False),),
    2: (
        Way("f(x, positions)", _with_positions(1)),
        Way("f(q, k): it counts tokens from 0", _counted(lambda target, x: target(x, x.clone())), given=False),
    ),
    3: (Way("f(q, k, positions)", _with_positions(2)),),
}
BY_NAME = Way(
    "module.rotate_queries_and_keys(q, k): it counts tokens from 0",
    _counted(lambda target, x: target.rotate_queries_and_keys(x, x.clone())), given=False,
)  # fmt: skip
WITH_OFFSET = Way("module.rotate_queries_or_keys(x, offset=...)", _with_offset)
ENCODING = Way(
    "encoding.rotate(q, k, positions)",
    lambda target, x, index: target.rotate(x, x.clone(), Positions.of(index if index.shape[-1] > 1 else index[..., 0])),
)

FORMS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, ...]]] = {
    "x, ids [batch, seq]": lambda x, index: (x[:, 0], *index.unbind(-1)) if index.shape[-1] == 1 else (),
    "x, ids [axes, batch, seq]": lambda x, index: (x[:, 0], index.movedim(-1, 0)),
    "x, ids [seq, axes]": lambda x, index: (x[:, 0], index[0]),
    "x, ids [batch, seq, axes]": lambda x, index: (x[:, 0], index),
    "ids [seq]": lambda x, index: (index[0, :, 0],),
}
"""What a module is called with to make tables."""

Shape = Callable[[Tensor, int], tuple[Tensor, Callable[[Tensor], Tensor]]]
SHAPES: tuple[Shape, ...] = (
    lambda x, width: (x, lambda side: side),
    lambda x, width: (x[..., :width], lambda side: torch.cat([side, x[..., width:]], -1)),
    lambda x, width: (x.transpose(1, 2), lambda side: side.transpose(1, 2)),
    lambda x, width: (
        x.flatten(0, 1).transpose(0, 1), lambda side: side.transpose(0, 1).unflatten(0, x.shape[:2])
    ),
)  # fmt: skip
"""Tokens as the function takes them, and the way back: as they are; the part that tables are for, where it takes no
more; heads behind; patches without a batch, ``[seq, heads, width]``."""


def _called_for_tables(
    target: nn.Module, widths: Sequence[int], counts: Sequence[int], functions: Sequence[Apply], layer_type: str | None,
    tried: Tried,
) -> Iterator[tuple[int, int, Way]]:  # fmt: skip
    """Every way to make tables, with every function that rotates by them."""
    options = {} if layer_type is None else {"layer_type": layer_type}

    def tables_of(form: str, module: nn.Module, x: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        tables = module(*FORMS[form](x, index), **options)
        parts = tables if isinstance(tables, tuple) else (tables,)
        if not isinstance(parts[0], Tensor) or not parts[0].ndim:
            raise TypeError("no tables")
        return parts

    def rotate(form: str, function: Apply, shape: Shape, module: nn.Module, x: Tensor, index: Tensor) -> Any:
        tables = tables_of(form, module, x, index)
        tokens, back = shape(x, tables[0].shape[-1] * (2 if tables[0].is_complex() else 1))
        takes = [*inspect.signature(inspect.unwrap(function)).parameters.values()]
        ids = (index,) if any(one.name == "position_ids" and one.default is one.empty for one in takes) else ()
        if "k" not in "".join(one.name for one in takes[:2]):
            return _both(back(function(tokens, *tables, *ids)))
        named = {"cos": tables[0], "sin": tables[1]} if {"cos", "sin"} <= {one.name for one in takes} else {}
        q, k = function(tokens, tokens.clone(), *(() if named else tables), *ids, **named)[:2]
        return back(q), back(k)

    for axes, form in itertools.product(counts, FORMS):
        if _is_axial(target) and "axes]" not in form:
            continue
        x, index = torch.zeros(1, HEADS, TRIAL, 8), torch.zeros(1, TRIAL, axes, dtype=torch.int64)
        try:
            width = tables_of(form, target, x, index)[0].shape[-1]
        except FAILED as error:
            tried.setdefault(f"module({form})", error)
            continue
        for each, function, shape in itertools.product(widths or (width, 2 * width), functions, SHAPES):
            called = f"module({form}) makes tables, and {function.__name__} rotates by them"
            yield each, axes, Way(called, partial(rotate, form, function, shape))


def _functions_beside(target: nn.Module) -> list[Apply]:
    """Those of its Python module, the likely first: axial ones have a name of their own, and so have interleaved."""
    beside, config = vars(sys.modules[type(target).__module__]), getattr(target, "config", None)
    latent = hasattr(config, "qk_rope_head_dim") and getattr(config, "rope_interleave", True)
    words = ("_vision", "_2d", "_multidimensional") if _is_axial(target) else ("_interleave",) if latent else ()
    last = () if words else ("_interleave", "_vision")
    names = [name for name in beside if name.startswith("apply") and ("rot" in name or "rope" in name)]
    names.sort(key=lambda name: (name.endswith(last), not any(word in name for word in words), len(name)))
    return [beside[name] for name in names if callable(beside[name])]


def refuse(target: Any, tried: Tried) -> NoReturn:
    """What could be called in no way, with the calls that were tried, and what each ended with."""
    calls: dict[str, list[str]] = {}
    for called, error in tried.items():
        ended = error.cause if isinstance(error, UnusableError) else f"raised {type(error).__name__}: {error}"
        calls.setdefault(" ".join(ended.split()), []).append(called)
    told = "; ".join(f"{' and '.join(ways)} {ended}" for ended, ways in calls.items())
    got = f"got {shown(target)}, which neither rotates tokens nor gives a bias in any way of calling that is known"
    first = next(iter(tried.values()), None)
    remedy = first.remedy if isinstance(first, UnusableError) else ROTATES
    raise InputError(f"{got}: {told}" if told else got, remedy) from first


def refuse_unsteady(target: Any, one: Tensor, again: Tensor) -> None:
    """Of two equal calls the same is expected, up to the last digits."""
    apart = float((one - again).nan_to_num().abs().max())
    if apart > 1e-4:
        got = f"two equal calls give numbers up to {apart:.2g} apart"
        got = f"got {name_of(target)}, which is random or keeps a state: {got}"
        raise InputError(got, ".eval() on its module, which turns dropout off, or leave the random part out")
