"""What is probed, brought into one form: something that rotates tokens at positions, however it wants to be called.

No code is read: every way of calling that the field uses is tried on a few tokens. The first is taken whose tokens come
back, and come back otherwise from later positions. A call that is tried may raise whatever it likes.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from locant.arguments import MAX_INT32, shown
from locant.errors import InputError
from locant.positions.base import PositionEncoding
from locant.positions.positions import Positions
from locant.spelling import spell

ROTATES = "locant.probe(lambda x, positions: ..., head_dim=64), x of shape [batch, heads, seq, 64]"

WIDTHS = (64, 128, 32, 80, 96, 256, 16, 48, 72, 112, 40, 24, 8, 512, 192, 12, 6, 4, 2)
"""Widths of a head that are tried where nothing says it."""

WIDTH_NAMES = ("head_dim", "dim_head", "d_head", "head_size", "d_k", "dim", "d", "d_model", "embed_dim")
"""Attributes in which a module may say its width; only the first is relied upon."""

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
    writes: bool = False
    """Whether it returns nothing, but rotates the tokens that it is given."""
    one_by_one: bool = False
    """Whether each token is a call of its own."""
    undoes_norm: bool = False
    """Whether tokens are made so that a norm before the rotation leaves no trace."""


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
        if self.original is None:
            return self
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of complex numbers, whose imaginary part a cast discards
            return replace(self, target=copy.deepcopy(self.original).to(dtype))

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


def called_of(target: Any) -> Any:
    """What has the signature of a call: of a module its ``forward``."""
    return target.forward if isinstance(target, nn.Module) else target


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
    qkv: tuple[int, int, int] | None = None,
) -> Subject | None:
    """Return the one form of what was given to `probe`, or ``None`` if no call gives tokens back: `tried` says why."""
    stated = [each for each in (head_dim or _stated_width(target, config),) if each]
    guessed = [getattr(target, name, None) for name in WIDTH_NAMES]
    widths = stated or [*(each for each in guessed if isinstance(each, int) and each > 1 and not each % 2), *WIDTHS]
    counts = _stated_axes(target) if axes is None else (axes,)
    best: tuple[int, Subject] | None = None
    for width, num_axes, way in _trials(target, widths, counts, stated, apply, layer_type, qkv, tried):
        subject = Subject(target=target, way=way, width=width, axes=num_axes, limit=limit or MAX_INT32)
        try:
            likeness = _likeness(subject)
        except FAILED as error:
            tried.setdefault(re.split(":| with tokens|, in place", way.called)[0], error)
            continue
        if likeness == ALIKE:
            return _with_original(subject)
        if (best is None or likeness > best[0]) and (likeness or not way.writes):  # who writes nothing does not write
            best = likeness, subject
    return None if best is None else _with_original(best[1])


ALIKE = 2


def _likeness(subject: Subject) -> int:
    """2: later tokens are rotated otherwise than the first, and heads alike. 1: tokens are. 0: nothing changes.

    Where heads are taken for tokens, these are less.
    """
    x, index = torch.ones(1, HEADS, TRIAL, subject.width), subject.places(*range(TRIAL))
    others = torch.cat([x[..., :1], -x[..., 1:]], -1)
    sides = _sides_of(subject.rotate(x, index), x.shape, 2)
    if not all(side.isfinite().all() for side in sides):
        remedy = "return finite numbers for tokens of ones at positions 0, 1 and 2"
        raise UnusableError("gave NaN or infinite numbers", remedy)
    q, k = (side.clone() for side in sides)
    if torch.equal(subject.rotate(others, index)[0], q):
        raise UnusableError("gave the same for other tokens", ROTATES)
    moves = any(bool((side[:, 0, :1] != side[:, 0, 1:]).any()) for side in (q, k))
    return moves + (moves and all(torch.equal(side[:, 0], side[:, 1]) for side in (q, k)))


def _with_original(subject: Subject) -> Subject:
    with contextlib.suppress(*FAILED):
        if isinstance(subject.target, nn.Module):
            return replace(subject, original=copy.deepcopy(subject.target))
    return subject


Trial = tuple[int, int, Way]


def _trials(
    target: Any, widths: Sequence[int], counts: Sequence[int], stated: Sequence[int], apply: Apply | None,
    layer_type: str | None, qkv: tuple[int, int, int] | None, tried: Tried,
) -> Iterator[Trial]:  # fmt: skip
    """Widths and numbers of axes with every way of calling, the likely first."""

    def called(ways: Callable[[], Iterator[Way]]) -> Iterator[Trial]:
        for width, num_axes in itertools.product(widths, counts):
            yield from ((width, num_axes, way) for way in ways())

    functions = _functions_beside(target) if apply is None else [apply]
    tables = _called_for_tables(target, stated, counts, functions, layer_type, tried)
    direct = called(lambda: _direct(target))
    if isinstance(target, PositionEncoding):
        return called(lambda: iter((ENCODING,)))
    if qkv is not None:
        return called(lambda: _fused(target, qkv))
    if hasattr(target, "rotate_queries_or_keys"):
        return called(lambda: iter((BY_NAME if getattr(target, "use_xpos", False) else WITH_OFFSET,)))
    if apply is not None or type(target).__module__.startswith("transformers."):
        return itertools.chain(tables, direct)
    lengths = called(lambda: _of_fixed_length(target)) if isinstance(target, nn.Module) else ()
    return itertools.chain(direct, tables if isinstance(target, nn.Module) else (), lengths)


def _stated_width(target: Any, config: Any) -> int | None:
    """The width of a head, as far as it is said; layers of a Gemma 4 have no single one."""
    said = {} if config is None else config if isinstance(config, Mapping) else config.to_dict()
    if said.get("per_layer_config"):
        return None

    def read(name: str) -> Any:
        return said.get(name, None if isinstance(config, Mapping) else getattr(config, name, None))

    width, heads = read("hidden_size"), read("num_attention_heads")
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
        if side.is_complex():
            raise UnusableError("gave complex numbers", ROTATES)
    return sides


def _both(side: Any) -> tuple[Any, Any]:
    return side, side


# ---------------------------------------------------------------------- shapes of tokens, and of their positions


class TokenShape(NamedTuple):
    """A shape that code may want its tokens in, how they get there, and how what it returns comes back.

    `place` brings an index ``[batch, seq, axes]`` along. With `alone`, each row of each head is a call of its own.
    """

    name: str
    there: Callable[[Tensor], Tensor]
    back: Callable[[Tensor, Tensor], Tensor]
    place: Callable[[Tensor, Tensor], Tensor] = lambda index, x: index
    alone: bool = False


def _of_each_head(index: Tensor, x: Tensor) -> Tensor:
    return index if len(index) == 1 else index.repeat_interleave(x.shape[1], 0)


def _of_each_token(index: Tensor, x: Tensor) -> Tensor:
    return index.expand(len(x), -1, -1).flatten(0, 1)[None]


def _tokens_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(0, 1)


def _heads_first(side: Tensor, x: Tensor) -> Tensor:
    return side.unflatten(0, (x.shape[0], x.shape[2])).transpose(1, 2)


TOKEN_SHAPES = (
    TokenShape("[batch, heads, seq, dim]", lambda x: x, lambda side, x: side),
    TokenShape("[batch, seq, heads, dim]", lambda x: x.transpose(1, 2), lambda side, x: side.transpose(1, 2)),
    TokenShape(
        "[batch, seq, dim]", lambda x: x.flatten(0, 1), lambda side, x: side.unflatten(0, x.shape[:2]), _of_each_head
    ),
    TokenShape("[tokens, heads, dim]", _tokens_first, _heads_first, _of_each_token),
    TokenShape(
        "[seq, batch, heads, dim]", lambda x: x.permute(2, 0, 1, 3), lambda side, x: side.permute(1, 2, 0, 3)
    ),
    TokenShape(
        "[tokens, heads * dim]", lambda x: _tokens_first(x).flatten(1),
        lambda side, x: _heads_first(side.unflatten(1, (x.shape[1], -1)), x), _of_each_token,
    ),
    TokenShape(
        "[seq, dim]", lambda x: x.flatten(0, 1), lambda side, x: side.unflatten(0, x.shape[:2]), _of_each_head,
        alone=True,
    ),
)  # fmt: skip


def _one_row(index: Tensor) -> Tensor:
    if len(index) > 1:
        raise ValueError("it takes one row of positions at a time")
    return index[0]


PLACES: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda index: index.squeeze(-1) if index.shape[-1] == 1 else index,
    lambda index: _one_row(index).squeeze(-1) if index.shape[-1] == 1 else index.movedim(-1, 0),
    lambda index: index.squeeze(-1)[:, None] if index.shape[-1] == 1 else _one_row(index),
    lambda index: _one_row(index).movedim(-1, 0),
)
"""An index ``[batch, seq, axes]`` as the function takes it: ``[batch, seq]``, ``[seq]``, ``[batch, 1, seq]``, or with
axes last or first, with and without a batch."""


# ---------------------------------------------------------------------- functions of tokens


class Arguments(NamedTuple):
    """What a call takes: its tokens, and where among them its positions stand."""

    words: str
    num_tokens: int
    invoke: Callable[[Any, Sequence[Tensor], Any], Any]
    given: bool = True
    one_number: bool = False
    """Whether the position is the number of the first token, such as an offset."""


POSITION_NAME = re.compile(r"pos|index|idx|offset|ids$|^t$|step|start")
NUMBER_NAME = re.compile(r"offset|start|past|step")


def arguments_of(target: Any) -> Iterator[Arguments]:
    """What it may be called with, by its signature: ``f(x)``, ``f(x, positions)``, ``f(q, k, positions)`` and so on."""
    call = called_of(target)
    try:
        names = [*inspect.signature(call).parameters.values()]
    except (ValueError, TypeError):  # of what is written in C, such as int
        return
    if any(one.kind is one.VAR_POSITIONAL for one in names):
        yield from (BY_PLACE[count] for count in ("x, positions", "q, k, positions", "x", "q, k"))
        return
    asked = [one for one in names if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    needed = [one.name for one in asked if one.default is one.empty]
    optional = [one.name for one in names if one.name not in needed and one.kind is not one.VAR_KEYWORD]
    number = next((name for name in needed[1:] + optional if NUMBER_NAME.search(name)), None)
    place = next((name for name in optional if POSITION_NAME.search(name)), None)
    counted = [name for name in needed if name != number]
    if number is not None and len(counted) in (1, 2):
        yield _by_number(number, len(counted))
    if place is not None and len(needed) in (1, 2):
        yield _by_keyword(place, len(needed))
    if len(needed) == 1:
        yield BY_PLACE["x"]
    if len(needed) == 2:
        first = POSITION_NAME.search(needed[0]) is not None and not POSITION_NAME.search(needed[1])
        yield BY_PLACE["positions, x" if first else "x, positions"]
        yield BY_PLACE["q, k"]
    if len(needed) == 3:
        yield BY_PLACE["positions, q, k" if POSITION_NAME.search(needed[0]) else "q, k, positions"]


BY_PLACE = {
    "x": Arguments("f(x): it counts tokens from 0", 1, lambda f, x, ids: f(*x), given=False),
    "q, k": Arguments("f(q, k): it counts tokens from 0", 2, lambda f, x, ids: f(*x), given=False),
    "x, positions": Arguments("f(x, positions)", 1, lambda f, x, ids: f(*x, ids)),
    "positions, x": Arguments("f(positions, x)", 1, lambda f, x, ids: f(ids, *x)),
    "q, k, positions": Arguments("f(q, k, positions)", 2, lambda f, x, ids: f(*x, ids)),
    "positions, q, k": Arguments("f(positions, q, k)", 2, lambda f, x, ids: f(ids, *x)),
}
TOKENS = ("", "x", "q, k")


def _by_keyword(name: str, count: int) -> Arguments:
    words = f"f({TOKENS[count]}, {name}=positions)"
    return Arguments(words, count, lambda f, x, ids: f(*x, **{name: ids}))


def _by_number(name: str, count: int) -> Arguments:
    words = f"f({TOKENS[count]}, {name}=number of the first token)"
    return Arguments(words, count, lambda f, x, ids: f(*x, **{name: ids}), one_number=True)


def _direct(target: Any) -> Iterator[Way]:
    """Every way to hand it tokens, with positions or without."""
    if inspect.isclass(target):
        return
    all_arguments = [*arguments_of(target)]
    for writes, arguments, shape in itertools.product((False, True), all_arguments, TOKEN_SHAPES):
        for place in PLACES[: None if arguments.given and not arguments.one_number else 1]:
            yield _way(arguments, shape, place, writes)


def _way(arguments: Arguments, shape: TokenShape, place: Callable[[Tensor], Tensor], writes: bool = False) -> Way:
    """These arguments with tokens in this shape and positions in this form."""

    def call(target: Any, x: Tensor, ids: Any) -> tuple[Tensor, ...]:
        tokens = (x, x.clone())[: arguments.num_tokens]
        result = arguments.invoke(target, tokens, ids)
        if writes:
            if result is not None:
                raise UnusableError("gave something back", ROTATES)
            return tokens
        return _sides_of(result, x.shape, arguments.num_tokens)

    def shaped(target: Any, x: Tensor, index: Tensor | None) -> tuple[Tensor, Tensor]:
        tokens = shape.there(x)
        ids = None if index is None else place(shape.place(index, x))
        if shape.alone:
            rows = [call(target, row, ids) for row in tokens]
            sides = [torch.stack(side) for side in zip(*rows, strict=True)]
        else:
            sides = call(target, tokens, ids)
        sides = [shape.back(side, x) for side in sides]
        return (sides[0], sides[0]) if len(sides) == 1 else (sides[0], sides[1])

    def by_number(target: Any, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """One token in each call, the number of which is told."""

        def rotated(row: Tensor, number: int) -> tuple[Tensor, Tensor]:
            result = call(target, shape.there(row), number)
            sides = [shape.back(side, row) for side in result]
            return sides[0], sides[-1]

        rows = zip(x.split(-(-len(x) // len(index))), index, strict=True)
        both = [[rotated(row[:, :, at : at + 1], int(where[at, 0])) for at in range(x.shape[2])] for row, where in rows]
        q, k = (torch.cat([torch.cat([one[side] for one in row], 2) for row in both]) for side in (0, 1))
        return (q, q) if arguments.num_tokens == 1 else (q, k)

    words, _, rest = arguments.words.partition(":")
    words += "" if shape in TOKEN_SHAPES[:2] else f" with tokens {shape.name}"
    words += ", in place" if writes else ""
    called = f"{words}:{rest}" if rest else words
    if arguments.one_number:
        return Way(called, by_number, writes=writes, one_by_one=True)
    if not arguments.given:
        return Way(called, _counted(lambda target, x: shaped(target, x, None)), given=False, writes=writes)
    return Way(called, shaped, writes=writes)


def _counted(call: Callable[[Any, Tensor], Any], length: int | None = None) -> Call:
    """What counts tokens itself is given a row that is long enough, of which the tokens asked for are picked."""

    def rotate(target: Any, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        row = index[0, :, 0]
        if length is not None and int(row.max()) >= length:
            raise IndexError(f"it has {length} positions")
        long = x.new_zeros(*x.shape[:2], length or int(row.max()) + 1, x.shape[-1])
        for place in range(len(row)):  # the same place may be asked for twice
            long[:, :, row[place]] = x[:, :, place]
        q, k = _sides_of(call(target, long), long.shape, 2)
        picked = q[:, :, row]
        return picked, picked if k is q else k[:, :, row]

    return rotate


def _of_fixed_length(target: nn.Module) -> Iterator[Way]:
    """Of a module that adds or multiplies whole tables, and so takes rows of one length alone: that of its tables."""
    sizes = {size for table in target.buffers() for size in table.shape[:-1] if 8 <= size <= 2**16}
    for length, shape in itertools.product(sorted(sizes), TOKEN_SHAPES[:3]):

        def call(target: Any, x: Tensor, shape: TokenShape = shape) -> tuple[Tensor, Tensor]:
            tokens = shape.there(x)
            (side,) = _sides_of(target(tokens), tokens.shape, 1)
            return _both(shape.back(side, x))

        called = f"f(x) of exactly {length} tokens {shape.name}: it counts them from 0"
        yield Way(called, _counted(call, length), given=False)


def _with_offset(target: Any, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    def rotated(row: Tensor, where: Tensor, place: int) -> Tensor:
        return target.rotate_queries_or_keys(row[:, :, place : place + 1], offset=int(where[place, 0]))

    rows = zip(x.split(-(-len(x) // len(index))), index, strict=True)
    return _both(torch.cat([torch.cat([rotated(*row, place) for place in range(x.shape[2])], 2) for row in rows]))


BY_NAME = Way(
    "module.rotate_queries_and_keys(q, k): it counts tokens from 0",
    _counted(lambda target, x: target.rotate_queries_and_keys(x, x.clone())), given=False,
)  # fmt: skip
WITH_OFFSET = Way("module.rotate_queries_or_keys(x, offset=...)", _with_offset, one_by_one=True)
ENCODING = Way(
    "encoding.rotate(q, k, positions)",
    lambda target, x, index: target.rotate(x, x.clone(), Positions.of(index if index.shape[-1] > 1 else index[..., 0])),
)


# ---------------------------------------------------------------------- queries, keys and values in one tensor


def _fused(target: Any, heads: tuple[int, int, int]) -> Iterator[Way]:
    """Ways to call what rotates views of ``qkv [tokens, (hq + hk + hv) * dim]``, which it returns, or writes into."""
    names = [*inspect.signature(called_of(target)).parameters]
    first = bool(names) and POSITION_NAME.search(names[0]) is not None
    for place in (PLACES[1], PLACES[3]):

        def call(target: Any, x: Tensor, index: Tensor, place: Any = place) -> tuple[Tensor, Tensor]:
            where, sides = place(_of_each_token(index, x)), []
            for number in range(x.shape[1]):  # all heads get the tokens of one, so that they can be compared
                qkv = _join_heads(x[:, number : number + 1], heads)
                result = target(where, qkv) if first else target(qkv, where)
                sides.append(_read_heads(qkv if result is None else result, x, heads, last=number > 0))
            q, k = (torch.cat(side, 1) for side in zip(*sides, strict=True))
            return q, k

        yield Way("f(positions, qkv)" if first else "f(qkv, positions)", call)


def _join_heads(x: Tensor, heads: tuple[int, int, int]) -> Tensor:
    """Return tokens as queries and keys of that many heads beside each other, with values of ones behind them."""
    parts = [x.expand(-1, heads[0] + heads[1], -1, -1), torch.ones_like(x).expand(-1, heads[2], -1, -1)]
    return _tokens_first(torch.cat(parts, 1)).flatten(1)


def _read_heads(qkv: Any, x: Tensor, heads: tuple[int, int, int], last: bool) -> list[Tensor]:
    """Return the first head of queries and of keys; with `last`, one that is not as the first, or else the last."""
    if isinstance(qkv, (tuple, list)) and all(isinstance(part, Tensor) for part in qkv):
        qkv = torch.cat([part.flatten(1) for part in qkv], -1)
    width, count = x.shape[-1], x.shape[0] * x.shape[2]
    if not isinstance(qkv, Tensor):
        raise UnusableError(f"gave {shown(qkv)}, which is no tensor", "return qkv, or write into it")
    if qkv.shape != (count, sum(heads) * width):
        expected = f"[{count}, {sum(heads) * width}] of {count} tokens with {sum(heads)} heads of {width}"
        raise UnusableError(f"gave shape {[*qkv.shape]}, not {expected}", f"qkv={heads}, head_dim={width}")
    q, k, v = qkv.unflatten(1, (-1, width)).split(heads, 1)
    if not bool((v == 1).all()):
        raise UnusableError("changed the values, which lie behind queries and keys", "rotate queries and keys alone")

    def head(part: Tensor) -> Tensor:
        odd = ((part - part[:, :1]).abs().amax((0, 2)) > 1e-3).nonzero()
        return part[:, 0 if not last else int(odd[0, 0]) if len(odd) else -1]

    return [_heads_first(head(part)[:, None], x) for part in (q, k)]


# ---------------------------------------------------------------------- modules and functions that make tables

FORMS: dict[str, Callable[[Tensor, Tensor], tuple[Any, ...]]] = {
    "x, ids [batch, seq]": lambda x, index: (x[:, 0], *index.unbind(-1)) if index.shape[-1] == 1 else (),
    "x, ids [axes, batch, seq]": lambda x, index: (x[:, 0], index.movedim(-1, 0)),
    "x, ids [seq, axes]": lambda x, index: (x[:, 0], index[0]),
    "x, ids [batch, seq, axes]": lambda x, index: (x[:, 0], index),
    "ids [seq]": lambda x, index: (index[0, :, 0],),
    "ids [batch, seq]": lambda x, index: (*index.unbind(-1),) if index.shape[-1] == 1 else (),
}
"""What is called with to make tables of these positions."""

COUNTED_FORMS: dict[str, Callable[[Tensor, int], tuple[Any, ...]]] = {
    "seq_len": lambda x, width: (x.shape[2],),
    "x": lambda x, width: (x,),
    "x [batch, seq, dim]": lambda x, width: (x[:, 0],),
    "x, seq_len": lambda x, width: (x, x.shape[2]),
    "head_dim, seq_len": lambda x, width: (width, x.shape[2]),
}
"""What is called with to make tables of the first positions."""

Shape = Callable[[Tensor, int], tuple[Tensor, Callable[[Tensor], Tensor]]]


def _part(times: int, heads_behind: bool) -> Shape:
    """The first dimensions alone: as many as a table has, or twice as many, where it has one number for each pair."""

    def shape(x: Tensor, width: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        part, rest = x[..., : times * width], x[..., times * width :]
        if heads_behind:
            return part.transpose(1, 2), lambda side: torch.cat([side.transpose(1, 2), rest], -1)
        return part, lambda side: torch.cat([side, rest], -1)

    return shape


SHAPES: tuple[Shape, ...] = (
    lambda x, width: (x, lambda side: side),
    _part(1, heads_behind=False),
    lambda x, width: (x.transpose(1, 2), lambda side: side.transpose(1, 2)),
    lambda x, width: (
        x.flatten(0, 1).transpose(0, 1), lambda side: side.transpose(0, 1).unflatten(0, x.shape[:2])
    ),
    _part(2, heads_behind=False), _part(1, heads_behind=True), _part(2, heads_behind=True),
    lambda x, width: (x.flatten(0, 1), lambda side: side.unflatten(0, x.shape[:2])),
    lambda x, width: (x.permute(2, 0, 1, 3), lambda side: side.permute(1, 2, 0, 3)),
)  # fmt: skip
"""Tokens as the function takes them, and the way back: as they are; the part that tables are for, where it takes no
more; heads behind; patches without a batch, ``[seq, heads, width]``; other parts; no heads; tokens first."""

IS_KEY = re.compile(r"(^|_|x)k(ey|eys|s|_|$)|^(key|k)")
ARE_TABLES = re.compile(r"freq|cos|sin|rot|table|emb|theta|angle")


def _multiply(x: Tensor, matrix: Tensor) -> Tensor:
    """A matrix for each position, by which tokens are multiplied."""
    return torch.einsum("...sij,bhsj->bhsi", matrix, x)


def _called_for_tables(
    target: Any, widths: Sequence[int], counts: Sequence[int], functions: Sequence[Apply], layer_type: str | None,
    tried: Tried,
) -> Iterator[Trial]:  # fmt: skip
    """Every way to make tables, with every function that rotates by them."""
    options = {} if layer_type is None else {"layer_type": layer_type}
    noun = "module" if isinstance(target, nn.Module) else "f"

    def takes(given: Sequence[Any]) -> bool:
        with contextlib.suppress(ValueError):  # of what is written in C
            try:
                inspect.signature(called_of(target)).bind(*given, **options)
            except TypeError:
                return False
        return bool(given)

    def read_tables(tables: Any) -> tuple[Tensor, ...]:
        parts = tuple(tables) if isinstance(tables, (tuple, list)) else (tables,)
        if not parts or not isinstance(parts[0], Tensor) or not parts[0].ndim:
            raise UnusableError("gave no tables", ROTATES)
        return parts

    def tables_at(form: str, module: Any, x: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        return read_tables(module(*FORMS[form](x, index), **options))

    def apply_tables(function: Apply, shape: Shape, tables: tuple[Tensor, ...], x: Tensor, index: Tensor) -> Any:
        if function is _multiply:
            return _both(_multiply(x, tables[0]))
        tokens, back = shape(x, tables[0].shape[-1] * (2 if tables[0].is_complex() else 1))
        takes = [*inspect.signature(inspect.unwrap(function)).parameters.values()]
        ids = (index,) if any(one.name == "position_ids" and one.default is one.empty for one in takes) else ()
        if not any(IS_KEY.search(one.name) for one in takes[:2]):
            first = bool(takes) and ARE_TABLES.search(takes[0].name) is not None
            return _both(back(function(*tables, tokens, *ids) if first else function(tokens, *tables, *ids)))
        named = {"cos": tables[0], "sin": tables[1]} if {"cos", "sin"} <= {one.name for one in takes} else {}
        q, k = function(tokens, tokens.clone(), *(() if named else tables), *ids, **named)[:2]
        return back(q), back(k)

    def rotate(form: str, function: Apply, shape: Shape, module: Any, x: Tensor, index: Tensor) -> Any:
        return apply_tables(function, shape, tables_at(form, module, x, index), x, index)

    def rotate_all(form: str, function: Apply, shape: Shape, module: Any, x: Tensor) -> Any:
        tables = read_tables(module(*COUNTED_FORMS[form](x, x.shape[-1]), **options))
        return apply_tables(function, shape, tables, x, torch.arange(x.shape[2])[None])

    def ways(form: str, tables: tuple[Tensor, ...], given: bool, shapes: Sequence[Shape]) -> Iterator[Way]:
        size, orthogonal = tables[0].shape, False
        if len(size) > 2 and size[-1] == size[-2] > TRIAL and not tables[0].is_complex():
            unit = torch.eye(size[-1], dtype=tables[0].dtype)
            orthogonal = torch.allclose(tables[0] @ tables[0].mT, unit.expand_as(tables[0]), atol=1e-4)
        for function, shape in itertools.product([_multiply] if orthogonal else functions, shapes):
            told = "the tokens are multiplied by them" if orthogonal else f"{_name(function)} rotates by them"
            called = f"{noun}({form}) makes {'matrices' if orthogonal else 'tables'}, and {told}"
            if given:
                yield Way(called, partial(rotate, form, function, shape))
            else:
                call = _counted(partial(rotate_all, form, function, shape))
                yield Way(f"{called}: it counts tokens from 0", call, given=False)
        if not functions and not orthogonal:
            made = " and ".join(str([*one.shape]) for one in tables)
            error = UnusableError(f"makes tables of shape {made}, by which nothing rotates", APPLY)
            tried.setdefault(f"{noun}({form})", error)

    def trials(
        form: str, tables: tuple[Tensor, ...], axes: int, shapes: Sequence[Shape], given: bool = True,
        width: int | None = None,
    ) -> Iterator[Trial]:  # fmt: skip
        last = tables[0].shape[-1]
        for each in [width] if width else widths or (last, 2 * last):
            yield from ((each, axes, way) for way in ways(form, tables, given, shapes) if each % 2 == 0)

    usual = itertools.product([SHAPES[:4]], counts, [*FORMS][:5])
    for shapes, axes, form in itertools.chain(usual, itertools.product([SHAPES], counts, FORMS)):
        if _is_axial(target) and "axes]" not in form:
            continue
        x, index = torch.zeros(1, HEADS, TRIAL, 8), torch.zeros(1, TRIAL, axes, dtype=torch.int64)
        if not takes(FORMS[form](x, index)):
            continue
        try:
            tables = tables_at(form, target, x, index)
        except FAILED as error:
            tried.setdefault(f"{noun}({form})", error)
            continue
        yield from trials(form, tables, axes, shapes)
    for form, make in COUNTED_FORMS.items() if not _is_axial(target) else ():
        for width in widths or ((64,) if form == "seq_len" else WIDTHS):
            given = make(torch.zeros(1, HEADS, TRIAL, width), width)
            if not takes(given):
                break
            try:
                tables = read_tables(target(*given, **options))
            except FAILED as error:
                tried.setdefault(f"{noun}({form})", error)
                continue
            yield from trials(form, tables, 1, SHAPES, False, width if form != "seq_len" or widths else None)


APPLY = "locant.probe(module, apply=apply_rotary, head_dim=64), with the function that rotates tokens by its tables"


def _name(function: Apply) -> str:
    return getattr(function, "__name__", None) or type(function).__name__


def _functions_beside(target: Any) -> list[Apply]:
    """Those of its Python module, the likely first: axial ones have a name of their own, and so have interleaved."""
    module = sys.modules.get(type(target).__module__)
    if not isinstance(target, nn.Module) or module is None:
        return []
    beside, config = vars(module), getattr(target, "config", None)
    latent = hasattr(config, "qk_rope_head_dim") and getattr(config, "rope_interleave", True)
    words = ("_vision", "_2d", "_multidimensional") if _is_axial(target) else ("_interleave",) if latent else ()
    last = () if words else ("_interleave", "_vision")
    names = [name for name in beside if name.startswith("apply") and ("rot" in name or "rope" in name)]
    names.sort(key=lambda name: (name.endswith(last), not any(word in name for word in words), len(name)))
    if not module.__name__.startswith("transformers."):
        others = [name for name, each in beside.items() if name not in names and inspect.isfunction(each)]
        names += [name for name in others if "rot" in name.lower() or "rope" in name.lower()]
    functions = [beside[name] for name in names if callable(beside[name])]
    own = [name for name in dir(type(target)) if name.startswith("apply") and ("rot" in name or "rope" in name)]
    return functions + [getattr(target, name) for name in own]


# ---------------------------------------------------------------------- refusals


def refuse(target: Any, tried: Tried) -> NoReturn:
    """What could be called in no way, with the calls that were tried, and what each ended with."""
    if inspect.isclass(target) and issubclass(target, nn.Module):
        got = f"got the class {target.__name__}, which has to be built before it can be called"
        raise InputError(got, f"locant.probe({target.__name__}(...))")
    calls: dict[str, list[str]] = {}
    for called, error in tried.items():
        ended = error.cause if isinstance(error, UnusableError) else f"raised {type(error).__name__}: {error}"
        calls.setdefault(" ".join(ended.split()), []).append(called)
    told = "; ".join(f"{' and '.join(ways)} {ended}" for ended, ways in calls.items())
    got = f"got {shown(target)}, which neither rotates tokens nor gives a bias in any way of calling that is known"
    errors = [error for error in tried.values() if isinstance(error, UnusableError)]
    first = next(iter(tried.values()), None)
    tables = next((error.remedy for error in errors if error.remedy == APPLY), None)
    remedy = tables or (first.remedy if isinstance(first, UnusableError) else ROTATES)
    raise InputError(f"{got}: {told}" if told else got, remedy) from first


DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def refuse_unsteady(target: Any, one: Tensor, again: Tensor) -> None:
    """Of two equal calls the same is expected, up to the last digits."""
    apart = float((one - again).nan_to_num().abs().max())
    if apart > 1e-4:
        got = f"two equal calls give numbers up to {spell(apart, 2)} apart"
        owner = getattr(target, "__self__", target)
        inside = owner.modules() if isinstance(owner, nn.Module) else ()
        drops = any(isinstance(each, DROPOUTS) and each.training and each.p > 0 for each in inside)
        why = "whose dropout is active, because it is in training mode" if drops else "which is random or keeps a state"
        got = f"got {name_of(target)}, {why}: {got}"
        raise InputError(got, ".eval() on its module, which turns dropout off, or leave the random part out")
