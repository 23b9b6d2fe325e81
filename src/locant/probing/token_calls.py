"""Calling conventions of functions and modules that rotate tokens: argument order, token shapes, position shapes."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from locant.arguments import short_repr
from locant.errors import InputError
from locant.positions.positions import Positions

ROTATION_REMEDY = "locant.probe(lambda x, positions: ..., head_dim=64), x of shape [batch, heads, seq, 64]"

NUM_TOKENS, HEADS = 3, 2
"""The numbers of tokens and heads in a trial."""

CALL_ERRORS = (
    TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError, AssertionError, NotImplementedError,
    ArithmeticError,
)  # fmt: skip
"""The errors that a trial call of foreign code may raise."""

Call = Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor]]
"""A function that returns rotated queries and keys. Its arguments are a target, tokens ``[batch, heads, seq, width]``
and their index ``[batch or 1, seq, axes]``."""

Failures = dict[str, Exception]
"""The first error of each calling convention."""


class UnusableError(InputError):
    """A call returned something that cannot be measured."""


@dataclass(frozen=True)
class Convention:
    """A calling convention, with its notation, its call, and whether it takes positions or counts tokens from 0."""

    notation: str
    call: Call
    takes_positions: bool = True
    writes: bool = False
    """True if the target returns nothing and rotates its tokens in place."""
    one_by_one: bool = False
    """True if each token needs a separate call."""
    undoes_norm: bool = False
    """True if the call transforms tokens so that a norm before the rotation has no effect."""


def function_of(target: Any) -> Any:
    """Return the function whose signature we read: a module's ``forward``, or the target itself."""
    return target.forward if isinstance(target, nn.Module) else target


def unpack_sides(values: Any, shape: Sequence[int], count: int) -> tuple[Tensor, ...]:
    """Return the tensors in a result, or raise `UnusableError` if their number, type or shape is wrong."""
    sides = tuple(values) if isinstance(values, (tuple, list)) else (values,)
    if len(sides) != count:
        raise UnusableError(f"returned {len(sides)} values, not {count}", ROTATION_REMEDY)
    for side in sides:
        if not isinstance(side, Tensor):
            remedy = f"return the rotated tokens, as in {ROTATION_REMEDY}"
            raise UnusableError(f"returned {short_repr(side)}, which is not a tensor", remedy)
        if side.shape != tuple(shape):
            raise UnusableError(f"returned shape {[*side.shape]} for tokens of shape {[*shape]}", ROTATION_REMEDY)
        if side.is_complex():
            raise UnusableError("returned complex numbers", ROTATION_REMEDY)
    return sides


def for_both_sides(side: Any) -> tuple[Any, Any]:
    """Return the same result for queries and keys."""
    return side, side


# ---------------------------------------------------------------------- shapes of tokens and positions


class TokenShape(NamedTuple):
    """A shape in which a target may take tokens, with conversions from and to ``[batch, heads, seq, dim]``.

    `index_for_target` converts an index ``[batch, seq, axes]``. With `one_row`, each row of each head needs a separate
    call.
    """

    name: str
    to_target: Callable[[Tensor], Tensor]
    from_target: Callable[[Tensor, Tensor], Tensor]
    index_for_target: Callable[[Tensor, Tensor], Tensor] = lambda index, x: index
    one_row: bool = False


def _repeat_for_heads(index: Tensor, x: Tensor) -> Tensor:
    return index if len(index) == 1 else index.repeat_interleave(x.shape[1], 0)


def _flatten_rows(index: Tensor, x: Tensor) -> Tensor:
    return index.expand(len(x), -1, -1).flatten(0, 1)[None]


def _flatten_tokens(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(0, 1)


def _unflatten_tokens(side: Tensor, x: Tensor) -> Tensor:
    return side.unflatten(0, (x.shape[0], x.shape[2])).transpose(1, 2)


TOKEN_SHAPES = (
    TokenShape("[batch, heads, seq, dim]", lambda x: x, lambda side, x: side),
    TokenShape("[batch, seq, heads, dim]", lambda x: x.transpose(1, 2), lambda side, x: side.transpose(1, 2)),
    TokenShape(
        "[batch, seq, dim]", lambda x: x.flatten(0, 1), lambda side, x: side.unflatten(0, x.shape[:2]),
        _repeat_for_heads,
    ),
    TokenShape("[tokens, heads, dim]", _flatten_tokens, _unflatten_tokens, _flatten_rows),
    TokenShape(
        "[seq, batch, heads, dim]", lambda x: x.permute(2, 0, 1, 3), lambda side, x: side.permute(1, 2, 0, 3)
    ),
    TokenShape(
        "[tokens, heads * dim]", lambda x: _flatten_tokens(x).flatten(1),
        lambda side, x: _unflatten_tokens(side.unflatten(1, (x.shape[1], -1)), x), _flatten_rows,
    ),
    TokenShape(
        "[seq, dim]", lambda x: x.flatten(0, 1), lambda side, x: side.unflatten(0, x.shape[:2]), _repeat_for_heads,
        one_row=True,
    ),
)  # fmt: skip


def _one_row(index: Tensor) -> Tensor:
    if len(index) > 1:
        raise ValueError("it takes one row of positions at a time")
    return index[0]


POSITION_SHAPES: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda index: index.squeeze(-1) if index.shape[-1] == 1 else index,
    lambda index: _one_row(index).squeeze(-1) if index.shape[-1] == 1 else index.movedim(-1, 0),
    lambda index: index.squeeze(-1)[:, None] if index.shape[-1] == 1 else _one_row(index),
    lambda index: _one_row(index).movedim(-1, 0),
)
"""Conversions of an index ``[batch, seq, axes]`` to the shape that the target takes: ``[batch, seq]``, ``[seq]``,
``[batch, 1, seq]``, or with axes first or last, with or without a batch."""


# ---------------------------------------------------------------------- arguments


class Arguments(NamedTuple):
    """The arguments of a call, which are tokens and possibly positions, and their order."""

    notation: str
    num_tokens: int
    invoke: Callable[[Any, Sequence[Tensor], Any], Any]
    takes_positions: bool = True
    takes_offset: bool = False
    """True if the call takes one number, the position of the first token."""


POSITION_NAME = re.compile(r"pos|index|idx|offset|ids$|^t$|step|start")
NUMBER_NAME = re.compile(r"offset|start|past|step")


def arguments_of(target: Any) -> Iterator[Arguments]:
    """Yield the arguments that fit a signature: ``f(x)``, ``f(x, positions)``, ``f(q, k, positions)`` and so on."""
    call = function_of(target)
    try:
        names = [*inspect.signature(call).parameters.values()]
    except (ValueError, TypeError):  # functions written in C, such as int, have no signature
        return
    if any(one.kind is one.VAR_POSITIONAL for one in names):
        yield from (POSITIONAL[count] for count in ("x, positions", "q, k, positions", "x", "q, k"))
        return
    positional = [one for one in names if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    needed = [one.name for one in positional if one.default is one.empty]
    optional = [one.name for one in names if one.name not in needed and one.kind is not one.VAR_KEYWORD]
    number = next((name for name in needed[1:] + optional if NUMBER_NAME.search(name)), None)
    position = next((name for name in optional if POSITION_NAME.search(name)), None)
    tokens = [name for name in needed if name != number]
    if number is not None and len(tokens) in (1, 2):
        yield _by_number(number, len(tokens))
    if position is not None and len(needed) in (1, 2):
        yield _by_keyword(position, len(needed))
    if len(needed) == 1:
        yield POSITIONAL["x"]
    if len(needed) == 2:
        first = POSITION_NAME.search(needed[0]) is not None and not POSITION_NAME.search(needed[1])
        yield POSITIONAL["positions, x" if first else "x, positions"]
        yield POSITIONAL["q, k"]
    if len(needed) == 3:
        yield POSITIONAL["positions, q, k" if POSITION_NAME.search(needed[0]) else "q, k, positions"]


POSITIONAL = {
    "x": Arguments("f(x): it counts tokens from 0", 1, lambda f, x, ids: f(*x), takes_positions=False),
    "q, k": Arguments("f(q, k): it counts tokens from 0", 2, lambda f, x, ids: f(*x), takes_positions=False),
    "x, positions": Arguments("f(x, positions)", 1, lambda f, x, ids: f(*x, ids)),
    "positions, x": Arguments("f(positions, x)", 1, lambda f, x, ids: f(ids, *x)),
    "q, k, positions": Arguments("f(q, k, positions)", 2, lambda f, x, ids: f(*x, ids)),
    "positions, q, k": Arguments("f(positions, q, k)", 2, lambda f, x, ids: f(ids, *x)),
}
TOKEN_NOTATIONS = ("", "x", "q, k")


def _by_keyword(name: str, count: int) -> Arguments:
    words = f"f({TOKEN_NOTATIONS[count]}, {name}=positions)"
    return Arguments(words, count, lambda f, x, ids: f(*x, **{name: ids}))


def _by_number(name: str, count: int) -> Arguments:
    words = f"f({TOKEN_NOTATIONS[count]}, {name}=number of the first token)"
    return Arguments(words, count, lambda f, x, ids: f(*x, **{name: ids}), takes_offset=True)


def direct_calls(target: Any) -> Iterator[Convention]:
    """Yield every convention that passes tokens, with or without positions."""
    if inspect.isclass(target):
        return
    all_arguments = [*arguments_of(target)]
    for writes, arguments, shape in itertools.product((False, True), all_arguments, TOKEN_SHAPES):
        for position_shape in POSITION_SHAPES[
            : None if arguments.takes_positions and not arguments.takes_offset else 1
        ]:
            yield _convention(arguments, shape, position_shape, writes)


def _convention(
    arguments: Arguments, shape: TokenShape, position_shape: Callable[[Tensor], Tensor], writes: bool = False
) -> Convention:
    """Return the convention with these arguments, this token shape and this position shape."""

    def call_target(target: Any, x: Tensor, ids: Any) -> tuple[Tensor, ...]:
        tokens = (x, x.clone())[: arguments.num_tokens]
        result = arguments.invoke(target, tokens, ids)
        if writes:
            if result is not None:
                raise UnusableError("returned a result", ROTATION_REMEDY)
            return tokens
        return unpack_sides(result, x.shape, arguments.num_tokens)

    def shaped(target: Any, x: Tensor, index: Tensor | None) -> tuple[Tensor, Tensor]:
        tokens = shape.to_target(x)
        ids = None if index is None else position_shape(shape.index_for_target(index, x))
        if shape.one_row:
            rows = [call_target(target, row, ids) for row in tokens]
            sides = [torch.stack(side) for side in zip(*rows, strict=True)]
        else:
            sides = call_target(target, tokens, ids)
        sides = [shape.from_target(side, x) for side in sides]
        return (sides[0], sides[0]) if len(sides) == 1 else (sides[0], sides[1])

    def token_by_token(target: Any, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Call the target for each token, with the position of the token."""

        def rotated(row: Tensor, number: int) -> tuple[Tensor, Tensor]:
            result = call_target(target, shape.to_target(row), number)
            sides = [shape.from_target(side, row) for side in result]
            return sides[0], sides[-1]

        rows = zip(x.split(-(-len(x) // len(index))), index, strict=True)
        results = [[rotated(row[:, :, at : at + 1], int(ids[at, 0])) for at in range(x.shape[2])] for row, ids in rows]
        q, k = (torch.cat([torch.cat([one[side] for one in row], 2) for row in results]) for side in (0, 1))
        return (q, q) if arguments.num_tokens == 1 else (q, k)

    words, _, rest = arguments.notation.partition(":")
    words += "" if shape in TOKEN_SHAPES[:2] else f" with tokens {shape.name}"
    words += ", in place" if writes else ""
    notation = f"{words}:{rest}" if rest else words
    if arguments.takes_offset:
        return Convention(notation, token_by_token, writes=writes, one_by_one=True)
    if not arguments.takes_positions:
        call = counting_call(lambda target, x: shaped(target, x, None))
        return Convention(notation, call, takes_positions=False, writes=writes)
    return Convention(notation, shaped, writes=writes)


def counting_call(call: Callable[[Any, Tensor], Any], length: int | None = None) -> Call:
    """Return a call for a target that counts tokens from 0. It passes a full row and picks the requested tokens."""

    def rotate(target: Any, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        row = index[0, :, 0]
        if length is not None and int(row.max()) >= length:
            raise IndexError(f"it has {length} positions")
        full = x.new_zeros(*x.shape[:2], length or int(row.max()) + 1, x.shape[-1])
        for place in range(len(row)):  # the same position may be requested twice
            full[:, :, row[place]] = x[:, :, place]
        q, k = unpack_sides(call(target, full), full.shape, 2)
        picked = q[:, :, row]
        return picked, picked if k is q else k[:, :, row]

    return rotate


def fixed_length_calls(target: nn.Module) -> Iterator[Convention]:
    """Yield conventions of a module that adds or multiplies whole tables, so that rows must be as long as the table."""
    sizes = {size for table in target.buffers() for size in table.shape[:-1] if 8 <= size <= 2**16}
    for length, shape in itertools.product(sorted(sizes), TOKEN_SHAPES[:3]):

        def call(target: Any, x: Tensor, shape: TokenShape = shape) -> tuple[Tensor, Tensor]:
            tokens = shape.to_target(x)
            (side,) = unpack_sides(target(tokens), tokens.shape, 1)
            return for_both_sides(shape.from_target(side, x))

        notation = f"f(x) of exactly {length} tokens {shape.name}: it counts them from 0"
        yield Convention(notation, counting_call(call, length), takes_positions=False)


def _with_offset(target: Any, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    def rotated(row: Tensor, ids: Tensor, place: int) -> Tensor:
        return target.rotate_queries_or_keys(row[:, :, place : place + 1], offset=int(ids[place, 0]))

    rows = zip(x.split(-(-len(x) // len(index))), index, strict=True)
    return for_both_sides(
        torch.cat([torch.cat([rotated(*row, place) for place in range(x.shape[2])], 2) for row in rows])
    )


TWO_SIDED_METHOD = Convention(
    "module.rotate_queries_and_keys(q, k): it counts tokens from 0",
    counting_call(lambda target, x: target.rotate_queries_and_keys(x, x.clone())), takes_positions=False,
)  # fmt: skip
OFFSET_METHOD = Convention("module.rotate_queries_or_keys(x, offset=...)", _with_offset, one_by_one=True)
ENCODING = Convention(
    "encoding.rotate(q, k, positions)",
    lambda target, x, index: target.rotate(x, x.clone(), Positions.of(index if index.shape[-1] > 1 else index[..., 0])),
)


# ---------------------------------------------------------------------- queries, keys and values in one tensor


def fused_calls(target: Any, heads: tuple[int, int, int]) -> Iterator[Convention]:
    """Yield conventions of a target that rotates parts of ``qkv [tokens, (hq + hk + hv) * dim]``, in place or not."""
    names = [*inspect.signature(function_of(target)).parameters]
    is_first = bool(names) and POSITION_NAME.search(names[0]) is not None
    for position_shape in (POSITION_SHAPES[1], POSITION_SHAPES[3]):

        def call(target: Any, x: Tensor, index: Tensor, position_shape: Any = position_shape) -> tuple[Tensor, Tensor]:
            ids, sides = position_shape(_flatten_rows(index, x)), []
            for number in range(x.shape[1]):  # all heads get the same tokens, so that they can be compared
                qkv = _join_heads(x[:, number : number + 1], heads)
                result = target(ids, qkv) if is_first else target(qkv, ids)
                sides.append(_read_heads(qkv if result is None else result, x, heads, last=number > 0))
            q, k = (torch.cat(side, 1) for side in zip(*sides, strict=True))
            return q, k

        yield Convention("f(positions, qkv)" if is_first else "f(qkv, positions)", call)


def _join_heads(x: Tensor, heads: tuple[int, int, int]) -> Tensor:
    """Return tokens as adjacent heads of queries and keys, followed by values of ones."""
    parts = [x.expand(-1, heads[0] + heads[1], -1, -1), torch.ones_like(x).expand(-1, heads[2], -1, -1)]
    return _flatten_tokens(torch.cat(parts, 1)).flatten(1)


def _read_heads(qkv: Any, x: Tensor, heads: tuple[int, int, int], last: bool) -> list[Tensor]:
    """Return the first head of queries and of keys. With `last`, return a head unlike the first, or the last head."""
    if isinstance(qkv, (tuple, list)) and all(isinstance(part, Tensor) for part in qkv):
        qkv = torch.cat([part.flatten(1) for part in qkv], -1)
    width, count = x.shape[-1], x.shape[0] * x.shape[2]
    if not isinstance(qkv, Tensor):
        raise UnusableError(f"returned {short_repr(qkv)}, which is not a tensor", "return qkv, or write into it")
    if qkv.shape != (count, sum(heads) * width):
        expected = f"[{count}, {sum(heads) * width}] of {count} tokens with {sum(heads)} heads of {width}"
        raise UnusableError(f"returned shape {[*qkv.shape]}, not {expected}", f"qkv={heads}, head_dim={width}")
    q, k, v = qkv.unflatten(1, (-1, width)).split(heads, 1)
    if not bool((v == 1).all()):
        raise UnusableError("changed the values, which follow queries and keys", "rotate only queries and keys")

    def head(part: Tensor) -> Tensor:
        different = ((part - part[:, :1]).abs().amax((0, 2)) > 1e-3).nonzero()
        return part[:, 0 if not last else int(different[0, 0]) if len(different) else -1]

    return [_unflatten_tokens(head(part)[:, None], x) for part in (q, k)]
