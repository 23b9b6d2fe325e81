"""Calls of functions and modules that rotate tokens: their shapes, their positions, and how they are passed."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from locant.arguments import shown
from locant.errors import InputError
from locant.positions.positions import Positions

ROTATES = "locant.probe(lambda x, positions: ..., head_dim=64), x of shape [batch, heads, seq, 64]"

TRIAL, HEADS = 3, 2
"""Tokens and heads of a trial."""

FAILED = (
    TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError, AssertionError, NotImplementedError,
    ArithmeticError,
)  # fmt: skip
"""What a call may end with that is tried on code of others."""

Call = Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Of a target, tokens ``[batch, heads, seq, width]`` and their index ``[batch or 1, seq, axes]``: queries, and keys."""

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


def function_of(target: Any) -> Any:
    """What has the signature of a call: of a module its ``forward``."""
    return target.forward if isinstance(target, nn.Module) else target


def unpack_sides(values: Any, shape: Sequence[int], count: int) -> tuple[Tensor, ...]:
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


def for_both_sides(side: Any) -> tuple[Any, Any]:
    """Return one result for queries and for keys."""
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
    call = function_of(target)
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


def direct_calls(target: Any) -> Iterator[Way]:
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
        return unpack_sides(result, x.shape, arguments.num_tokens)

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
        return Way(called, counting_call(lambda target, x: shaped(target, x, None)), given=False, writes=writes)
    return Way(called, shaped, writes=writes)


def counting_call(call: Callable[[Any, Tensor], Any], length: int | None = None) -> Call:
    """What counts tokens itself is given a row that is long enough, of which the tokens asked for are picked."""

    def rotate(target: Any, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        row = index[0, :, 0]
        if length is not None and int(row.max()) >= length:
            raise IndexError(f"it has {length} positions")
        long = x.new_zeros(*x.shape[:2], length or int(row.max()) + 1, x.shape[-1])
        for place in range(len(row)):  # the same place may be asked for twice
            long[:, :, row[place]] = x[:, :, place]
        q, k = unpack_sides(call(target, long), long.shape, 2)
        picked = q[:, :, row]
        return picked, picked if k is q else k[:, :, row]

    return rotate


def fixed_length_calls(target: nn.Module) -> Iterator[Way]:
    """Of a module that adds or multiplies whole tables, and so takes rows of one length alone: that of its tables."""
    sizes = {size for table in target.buffers() for size in table.shape[:-1] if 8 <= size <= 2**16}
    for length, shape in itertools.product(sorted(sizes), TOKEN_SHAPES[:3]):

        def call(target: Any, x: Tensor, shape: TokenShape = shape) -> tuple[Tensor, Tensor]:
            tokens = shape.there(x)
            (side,) = unpack_sides(target(tokens), tokens.shape, 1)
            return for_both_sides(shape.back(side, x))

        called = f"f(x) of exactly {length} tokens {shape.name}: it counts them from 0"
        yield Way(called, counting_call(call, length), given=False)


def _with_offset(target: Any, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    def rotated(row: Tensor, where: Tensor, place: int) -> Tensor:
        return target.rotate_queries_or_keys(row[:, :, place : place + 1], offset=int(where[place, 0]))

    rows = zip(x.split(-(-len(x) // len(index))), index, strict=True)
    return for_both_sides(
        torch.cat([torch.cat([rotated(*row, place) for place in range(x.shape[2])], 2) for row in rows])
    )


BY_NAME = Way(
    "module.rotate_queries_and_keys(q, k): it counts tokens from 0",
    counting_call(lambda target, x: target.rotate_queries_and_keys(x, x.clone())), given=False,
)  # fmt: skip
WITH_OFFSET = Way("module.rotate_queries_or_keys(x, offset=...)", _with_offset, one_by_one=True)
ENCODING = Way(
    "encoding.rotate(q, k, positions)",
    lambda target, x, index: target.rotate(x, x.clone(), Positions.of(index if index.shape[-1] > 1 else index[..., 0])),
)


# ---------------------------------------------------------------------- queries, keys and values in one tensor


def fused_calls(target: Any, heads: tuple[int, int, int]) -> Iterator[Way]:
    """Ways to call what rotates views of ``qkv [tokens, (hq + hk + hv) * dim]``, which it returns, or writes into."""
    names = [*inspect.signature(function_of(target)).parameters]
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
