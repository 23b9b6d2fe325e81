"""Measure modules that add a vector to each token according to its position.

A call adds a vector if the difference of its results for two inputs is the difference of the inputs times one factor.
The vector is the result minus the input times this factor. We measure the vectors, their axis, and the last position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from locant.arguments import MAX_INT32
from locant.positions.base import PositionEncoding
from locant.positions.encodings.rotary import Rotary
from locant.positions.encodings.sinusoidal import First, Sinusoidal
from locant.positions.positions import Positions
from locant.positions.scaling import Unscaled
from locant.probing.costs import Finding
from locant.probing.report import Report
from locant.probing.rotation import NEAR, Block, Rotation, find_encoding, fit_frequencies, wrap_angle
from locant.probing.subject import WIDTH_NAMES, Subject, name_of, refuse_unsteady
from locant.probing.table_calls import WIDTHS
from locant.probing.token_calls import CALL_ERRORS, HEADS, NUM_TOKENS, Failures, arguments_of
from locant.spelling import spell

SAME = 1e-4
"""Vectors count as equal up to this difference, relative to the largest number."""

WRONG = 1e-2
"""The smallest error of sinusoidal vectors that causes a warning."""

FAR = 4096
"""The last position whose vectors are compared with a formula."""

MAX_ELEMENTS = 2**22
"""The largest number of elements in a sequence that is tried."""

SHAPES = {
    (2, 0): "[seq, batch, dim]", (2, 1): "[batch, seq, dim]", (1, 0): "[seq, dim]",
    (3, 0): "[seq, batch, heads, dim]", (3, 1): "[batch, seq, heads, dim]", (3, 2): "[batch, heads, seq, dim]",
}  # fmt: skip
"""The shapes of tokens, by the number of axes before the last axis and by the axis of positions."""


@dataclass(frozen=True, kw_only=True)
class AdditionReport(Report):
    """The report on a module that adds a vector to each token by its position.

    Args:
        width: the width of a token.
        tokens: the shape of tokens, in words.
        along: the axes of positions, usually one.
        given: whether the module takes positions. Otherwise it counts tokens from 0.
        factor: the factor by which tokens are multiplied before the vector is added.
        last: the last position that has a vector, or ``None`` if there are several axes of positions.
        ended: the error that a later position raises, or ``None`` if no error was found.
        far: the last position whose vectors were compared with a formula.
    """

    width: int
    tokens: str
    along: tuple[int, ...]
    given: bool
    factor: float
    last: int | None
    ended: str | None
    far: int

    @property
    def compared(self) -> str:
        """A description of what was compared with the encoding."""
        return f"at positions up to {self.far:,}"

    def _facts(self) -> Iterator[str]:
        yield "It adds a vector to each token by its position. It does not rotate tokens."
        if not math.isclose(self.factor, 1, rel_tol=SAME):
            root = math.isclose(self.factor, math.sqrt(self.width), rel_tol=SAME)
            reason = f", the square root of the width {self.width}" if root else ""
            yield f"Tokens are multiplied by {spell(self.factor)} first{reason}."
        axes = f"ax{'is' if len(self.along) == 1 else 'es'} {' and '.join(map(str, self.along))}"
        counts = "It takes positions of tokens along" if self.given else "It counts tokens from 0 along"
        yield f"{counts} {axes}: tokens are {self.tokens}."
        if self.last is not None:
            end = f"Its last position is {self.last:,}: a later one raises {self.ended}."
            yield (
                end
                if self.ended is not None
                else f"Positions up to {self.last:,} have vectors. No later one was tried."
            )
        if isinstance(self.encoding, Sinusoidal):
            order = "take turns" if self.encoding.layout == "interleaved" else "are in two halves"
            table = f"sines and cosines {order} (layout {self.encoding.layout}), base {spell(self.encoding.base)}"
            yield f"The vectors are the sinusoidal table: {table}."
        elif self.last is not None:
            yield "The vectors are not sines and cosines of one base: they are another table, such as a learned one."

    def _warnings(self) -> Iterator[Finding]:
        if self.tokens == SHAPES[2, 0]:
            same = "all tokens of a sequence get the same vector, and each sequence of the batch gets another one"
            remedy = "Transpose them first, or count along axis 1"
            yield Finding(f"If tokens are [batch, seq, dim], it counts along the batch: {same}. {remedy}.")
        if self.agrees is not None and self.agrees > WRONG:
            error = spell(self.agrees, 2)
            extent = f"up to position {NEAR[-1]}, but up to position {self.far:,} they are up to {error} off"
            yield Finding(f"The vectors are those of the sinusoidal table {extent}.")


class _Call(NamedTuple):
    """A calling convention, with the axis sizes of tokens (without the width) and the axis of positions."""

    called: str
    add: Callable[[Tensor, Tensor], Any]
    width: int
    sizes: tuple[int, ...]
    axis: int | None
    """``None`` if the target counts tokens itself, on any axis."""
    is_fixed: bool = False
    """True if the target takes only sequences of this length."""

    def result(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return the result for tokens, in float64."""
        result = self.add(x.clone(), positions)
        result = result[0] if isinstance(result, (tuple, list)) and result else result
        if not isinstance(result, Tensor) or result.shape != x.shape or result.is_complex():
            raise ValueError("returned no tensor of the shape of the tokens")
        return result.double()

    def rows(self, positions: Tensor, axis: int) -> Tensor:
        """Return the added vectors ``[positions, width]``. The tokens are zeros, so that no sum rounds the vectors."""
        sizes = [1] * len(self.sizes)
        sizes[axis] = len(positions) if self.axis is not None else int(positions.max()) + 1
        sizes = [*self.sizes] if self.is_fixed else sizes
        added = self.result(torch.zeros(*sizes, self.width), positions).movedim(axis, 0).flatten(1, -2)[:, 0]
        return added if self.axis is not None else added[positions]


def is_addition(subject: Subject) -> bool:
    """Return whether the subject adds a vector that does not depend on the tokens."""
    index = subject.index(*range(NUM_TOKENS))
    one, other = torch.randn(2, 1, HEADS, NUM_TOKENS, subject.width, generator=torch.Generator().manual_seed(0))
    try:
        results = [torch.stack(subject.rotate(x.clone(), index)).double() for x in (one, other)]
    except CALL_ERRORS:
        return False
    return _factor(results, [x.double() for x in (one, other)]) is not None


def _factor(results: Sequence[Tensor], inputs: Sequence[Tensor]) -> float | None:
    """Return the factor of tokens in a sum of tokens and a vector, or ``None`` if the results are not such sums."""
    moved, change = results[0] - results[1], (inputs[0] - inputs[1]).expand_as(results[0])
    factor = float((moved * change).sum() / change.square().sum())
    least = SAME * max(float(each.abs().max()) for each in (*results, *inputs))
    if not abs(factor) > SAME or not float((moved - factor * change).abs().max()) <= least:
        return None
    return factor if float((results[0] - factor * inputs[0]).abs().max()) > least else None


def addition_report(
    target: Any, expected: PositionEncoding | None, head_dim: int | None, failures: Failures
) -> AdditionReport | None:
    """Return a report on the added vectors, or ``None`` if no call adds vectors that depend only on positions."""
    measured: set[str] = set()
    for call in _calls(target, head_dim):
        if call.called in measured:  # it was measured with another width
            continue
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(2, *call.sizes, call.width, generator=generator)
        positions = torch.arange(max(call.sizes))
        try:
            results = [call.result(x, positions) for x in inputs]
            repeated = call.result(inputs[1], positions)
        except CALL_ERRORS as error:
            failures.setdefault(call.called, error)
            continue
        refuse_unsteady(target, results[1], repeated)
        factor = _factor(results, [*inputs.double()])
        if factor is None:
            continue
        measured.add(call.called)
        added = results[0] - factor * inputs[0].double()
        varying = [axis for axis, size in enumerate(call.sizes) if size > 1 and _varies_along(added, axis)]
        if varying and call.axis in (None, *varying):
            return _report(target, call, tuple(varying), factor, expected)
    return None


def _varies_along(added: Tensor, axis: int) -> bool:
    first = added.narrow(axis, 0, 1)
    return float((added - first).abs().max()) > SAME * float(added.abs().max())


def _calls(target: Any, head_dim: int | None) -> Iterator[_Call]:
    """Yield every calling convention, the most likely first."""
    tables = [*target.parameters(), *target.buffers()] if isinstance(target, nn.Module) else []
    tables = [table for table in tables if table.ndim > 1]
    stated = [getattr(target, name, None) for name in WIDTH_NAMES]
    widths = [each for each in stated if isinstance(each, int) and each > 1]
    widths = [head_dim] if head_dim else [*dict.fromkeys((*widths, *(table.shape[-1] for table in tables), *WIDTHS))]
    for width in widths:
        if isinstance(target, PositionEncoding):
            called = "encoding.embed(x, positions)"
            yield _Call(called, lambda x, ids: target.embed(x, Positions.of(ids[None])), width, (1, NUM_TOKENS), 1)
        elif isinstance(target, nn.Embedding):
            yield _Call(f"x + {name_of(target)}(positions)", lambda x, ids: x + target(ids), width, (1, NUM_TOKENS), 1)
        else:
            yield from _calls_with_arguments(target, width)
    for width, size in dict.fromkeys((table.shape[-1], size) for table in tables for size in table.shape[:-1]):
        if 1 < size <= FAR and width in widths and not isinstance(target, (PositionEncoding, nn.Embedding)):
            for sizes in ((2, size), (size, 2), (size,)):
                called = f"f(x) of exactly {size} tokens"
                yield _Call(called, lambda x, ids: target(x), width, sizes, None, is_fixed=True)


def _calls_with_arguments(target: Any, width: int) -> Iterator[_Call]:
    for arguments in arguments_of(target):
        if arguments.takes_positions and not arguments.takes_offset:
            for sizes, axis, shape in (
                ((1, NUM_TOKENS), 1, (1, -1)), ((1, NUM_TOKENS), 1, (-1,)), ((NUM_TOKENS, 1), 0, (-1,)),
                ((NUM_TOKENS, 1), 0, (-1, 1)), ((NUM_TOKENS,), 0, (-1,)),
            ):  # fmt: skip

                def add_at(x: Tensor, ids: Tensor, arguments: Any = arguments, shape: Any = shape) -> Any:
                    return arguments.invoke(target, (x, x.clone())[: arguments.num_tokens], ids.reshape(shape))

                yield _Call(arguments.notation, add_at, width, sizes, axis)
            continue

        def add_from_zero(x: Tensor, ids: Tensor, arguments: Any = arguments) -> Any:
            return arguments.invoke(target, (x, x.clone())[: arguments.num_tokens], 0)

        called = arguments.notation.replace("number of the first token", "0").partition(":")[0]
        for sizes in ((2, NUM_TOKENS), (NUM_TOKENS,), (2, 4, NUM_TOKENS)):
            yield _Call(called, add_from_zero, width, sizes, None)


def _report(
    target: Any, call: _Call, along: tuple[int, ...], factor: float, expected: PositionEncoding | None
) -> AdditionReport:
    """Return a report on the vectors and their last position."""
    last, ended, far, rows = None, None, 0, None
    axis, *others = along
    tokens = SHAPES[len(call.sizes), axis]
    if others:
        tokens = f"tensors with {len(call.sizes) + 1} axes"
    else:
        last, ended = _end(call, axis)
        far = min(last, FAR)
        rows = call.rows(torch.arange(far + 1), axis)
    encoding = None if rows is None else _sinusoidal(rows)
    agrees = None if encoding is None or rows is None else float((_vectors(encoding, far + 1) - rows).abs().max())
    return AdditionReport(
        subject=name_of(target), called=call.called, encoding=encoding, agrees=agrees, expected=expected,
        differences=() if expected is None else tuple(_differences(rows, expected)), width=call.width, tokens=tokens,
        along=along, given=call.axis is not None, factor=factor, last=last, ended=ended, far=far,
    )  # fmt: skip


def _end(call: _Call, axis: int) -> tuple[int, str | None]:
    """Return the last position that has a vector, and the error of the next position, if an error was found."""
    if call.is_fixed:
        return call.sizes[axis] - 1, None

    def error_at(place: int) -> str | None:
        try:
            call.rows(torch.tensor([place]), axis)
        except CALL_ERRORS as error:
            return type(error).__name__
        return None

    limit = MAX_INT32 if call.axis is not None else MAX_ELEMENTS // call.width - 1
    low, high = NUM_TOKENS - 1, 2 * NUM_TOKENS
    ended = error_at(high := min(high, limit))
    while ended is None and high < limit:
        low, high = high, min(2 * high, limit)
        ended = error_at(high)
    if ended is None:
        return high, None
    while high - low > 1:
        middle = (low + high) // 2
        error = error_at(middle)
        low, high, ended = (middle, high, ended) if error is None else (low, middle, error)
    return low, ended


def _vectors(encoding: PositionEncoding, count: int) -> Tensor:
    return encoding.embed(torch.zeros(1, count, getattr(encoding, "d_model", 1)))[0].double()


def _sinusoidal(rows: Tensor) -> Sinusoidal | None:
    """Return the sinusoidal encoding with these vectors, or ``None`` if there is none.

    Each sine and its cosine give an angle, and the angles give the frequencies.
    """
    width, steps = rows.shape[1], [step for step in NEAR if step < len(rows)]
    if width % 2 or len(steps) < 2:
        return None
    near = rows[[0, *steps]]
    halves, turns = near.unflatten(1, (2, -1)), near.unflatten(1, (-1, 2)).mT
    orders: tuple[tuple[First, int, int], ...] = (("sine", 0, 1), ("cosine", 1, 0))
    for layout, parts in (("interleaved", turns), ("half", halves)):
        scale = float(parts.square().sum(1).sqrt().median())
        for first, sine, cosine in orders:
            angles = torch.atan2(parts[:, sine], parts[:, cosine])
            frequencies, bent = fit_frequencies(wrap_angle(angles), steps, 1)
            speeds, offsets = frequencies[:, 0].tolist(), angles[0].tolist()
            half = width // 2
            blocks = tuple(
                Block(dims=(pair, pair + half), frequencies=(speed,), of_second=(speed,), offset=offset)
                for pair, (speed, offset) in enumerate(zip(speeds, offsets, strict=True))
            )
            rotation = Rotation(
                blocks=blocks, mixed=2, factor=1.0, change=0.0, bent=bent, order=None, num_heads=None, same_heads=True,
            )  # fmt: skip
            ladder = find_encoding(rotation, width, 1) if min(speeds) > 0 else None
            begin = rotation.begin
            if not isinstance(ladder, Rotary) or not isinstance(ladder.scaling, Unscaled) or begin is None:
                continue
            if ladder.pairs.inv_freq is not None or begin < 0 or begin != int(begin):
                continue
            plain = float(f"{scale:.6g}")
            scale = plain if math.isclose(scale, plain, rel_tol=SAME) else scale
            options: dict[str, Any] = {"layout": layout, "first": first, "offset": int(begin), "scale": scale}
            encoding = Sinusoidal(width, base=ladder.base, **options)
            count = min(len(rows), NEAR[-1] + 1)
            if float((_vectors(encoding, count) - rows[:count]).abs().max()) <= SAME * abs(scale):
                return encoding
    return None


def _differences(rows: Tensor | None, expected: PositionEncoding) -> Iterator[str]:
    """Yield the differences between the vectors and the vectors of an encoding."""
    if "embed" not in expected.methods():
        yield "it adds vectors to tokens, and the encoding does not"
        return
    width = getattr(expected, "d_model", None)
    if rows is None or width != rows.shape[1]:
        yield f"its vectors have other axes or another width, the encoding has {width}"
        return
    errors = (_vectors(expected, len(rows)) - rows).abs().amax(1)
    wrong = (errors > SAME * max(1.0, float(rows.abs().max()))).nonzero()[:, 0]
    if len(wrong):
        yield f"its vectors differ from position {int(wrong[0])} on, by up to {spell(float(errors.max()), 2)}"
