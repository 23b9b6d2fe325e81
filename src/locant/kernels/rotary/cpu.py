"""The rotation on a CPU, as fast as its memory: torch's own loops over blocks that stay in cache.

What costs here is memory that is touched for the first time, not arithmetic, so nothing of the size of q is allocated
but the result, and nothing at all in place. Two neighbours are one complex number, and one complex multiplication
rotates them in a single pass. The half layout takes two passes over a block in cache, in which every element is
multiplied by its sine and by its cosine, and two over half of it each, which put the products together. Half precision
is widened and narrowed block by block.

Every product is rounded before the sum is, as in the reference, for every element: a row has the same bits alone and
in a batch, under any number of threads. torch's complex multiplication keeps to that in its vector loop only: what is
left over past whole vectors goes through code in which compilers fuse product and sum. So it is used only where
nothing is left over, see `_is_whole`; and a machine whose vector loop fuses them, too, is found out by a trial.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from locant.kernels.rotary.reference import Layout, cos_sin
from locant.kernels.rotary.tables import Tables

__all__ = ["rotate_"]

ANGLES = 2**17
"""Angles made at a time: 2 MiB of complex128."""
BLOCK = 2**19
"""Elements rotated at a time: 2 MiB of float32. A fourth of it takes 1.4 times as long: threads start and stop."""
SMALL = 2**15
"""Elements that are not worth cutting up scratch memory for."""
RUN = 256
"""Positions that share all but their lowest byte."""
VECTOR = 16
"""Complex numbers in one step of torch's widest vector loop: two registers of eight."""
GRAIN = 2**15
"""With fewer elements than this for each, torch takes fewer threads (``at::internal::GRAIN_SIZE``)."""

ALL = slice(None)

Angles = tuple[Tensor, ...]
"""Those of some tokens, with one row or one per sequence.

Either ``(cos + i sin,)``, ``rows 1 seq pairs``, where multiplying by it is a way to rotate; or ``(cos, sin)``,
``rows 1 seq rotary_dim``: each twice, at the places of its pair in a head.
"""


def rotate_(
    q: Tensor,
    k: Tensor | None,
    positions: Tensor,
    tables: Tables,
    layout: Layout,
    rotary_dim: int,
    out_q: Tensor,
    out_k: Tensor | None,
    inverse: bool = False,
) -> None:
    """Write the rotated `q` and `k` into `out_q` and `out_k`, which may be `q` and `k` themselves."""
    work = [(q, out_q)] if k is None or out_k is None else [(q, out_q), (k, out_k)]
    work = [(x, out) for x, out in work if x.numel()]
    if not work:
        return
    if rotary_dim < q.shape[-1]:
        for x, out in work:
            if out is not x:
                out[..., rotary_dim:].copy_(x[..., rotary_dim:])
        work = [(x[..., :rotary_dim], out[..., :rotary_dim]) for x, out in work]
    dtype = torch.promote_types(q.dtype, torch.float32)
    scratch = _scratch(max(x.numel() for x, _ in work), dtype, q.device)
    for tokens in _cut(positions.shape[1], ANGLES // (positions.shape[0] * tables.pairs())):
        angles = _angles(_at(positions, ALL, tokens), tables, layout, dtype, inverse)
        for x, out in work:
            _rotate_tokens(_at(x, ALL, ALL, tokens), _at(out, ALL, ALL, tokens), angles, layout, scratch)


def _scratch(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """Memory for what is in between; for little of it, asking torch every time is quicker than cutting this up."""
    return None if numel <= SMALL else torch.empty(2 * min(BLOCK, numel), dtype=dtype, device=device)


def _cut(length: int, step: int) -> Iterator[slice]:
    """``0:length`` in parts of `step`."""
    if length <= step:
        return iter((ALL,))
    step = max(step, 1)
    return (slice(begin, min(begin + step, length)) for begin in range(0, length, step))


def _at(x: Tensor, *place: slice) -> Tensor:
    """``x[place]``, which would take its time even where there is nothing to cut."""
    return x if place.count(ALL) == len(place) else x[place]


# ---------------------------------------------------------------------- angles


def _angles(positions: Tensor, tables: Tables, layout: Layout, dtype: torch.dtype, inverse: bool) -> Angles:
    """The angles of these tokens, made in float64 and rounded to `dtype`."""
    if tables.exact() and _is_whole(positions.shape[0] * positions.shape[1] * tables.pairs(), tables.pairs()):
        angle = _product_of_runs(positions, tables)
        angle = _product_of_levels(positions, tables) if angle is None else angle
        if layout == "interleaved":
            factor = angle.to(dtype.to_complex())
            return (factor.conj_physical_() if inverse else factor,)
        cos, sin = angle.real.to(dtype), angle.imag.to(dtype)
    else:
        cos, sin = (part[:, None] for part in cos_sin(positions, tables, dtype))
    sin = sin.neg_() if inverse else sin
    as_numbers = layout == "interleaved" and _may_be_whole(tables.pairs())
    return (torch.complex(cos, sin),) if as_numbers else _twice(cos, sin, layout)


def _twice(cos: Tensor, sin: Tensor, layout: Layout) -> Angles:
    """Those of a pair where its first lies, and where its second does."""
    if layout == "half":
        return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    return cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)


def _product_of_levels(positions: Tensor, tables: Tables) -> Tensor:
    """The same product as in the reference, as one complex multiplication for each level."""
    batch, seq = positions.shape[:2]
    rows = torch.view_as_complex(tables.table)
    if tables.axis_of_pair is None:
        index, row = positions.flatten(), torch.index_select
    else:
        index, row = positions[..., tables.axis_of_pair].flatten(0, 1), torch.gather
    angle = row(rows[0], 0, index & 255)
    for level in range(1, tables.levels):
        angle.mul_(row(rows[level], 0, (index >> 8 * level) & 255))
    if tables.attention_factor != 1:
        torch.view_as_real(angle).mul_(tables.attention_factor)
    return angle.view(batch, 1, seq, -1)


def _product_of_runs(positions: Tensor, tables: Tables) -> Tensor | None:
    """The same of tokens that follow each other, without looking up a row for each: they share all but the lowest byte.

    ``None`` where they do not, or are too few to gain anything.
    """
    length = positions.shape[1]
    if positions.shape[0] > 1 or tables.axis_of_pair is not None or length < 2 * RUN:
        return None
    first = int(positions[0, 0])
    if not torch.equal(positions[0], torch.arange(first, first + length, device=positions.device)):
        return None
    begin, end = first // RUN, -(-(first + length) // RUN)  # whole runs; what is too much is cut off
    if not _is_whole((end - begin) * RUN * tables.pairs(), tables.pairs()):
        return None
    rows = torch.view_as_complex(tables.table)
    runs = torch.arange(begin, end, device=positions.device)
    angle = rows[0] * rows[1].index_select(0, runs & 255)[:, None]
    for level in range(2, tables.levels):
        angle.mul_(rows[level].index_select(0, (runs >> 8 * (level - 1)) & 255)[:, None])
    if tables.attention_factor != 1:
        torch.view_as_real(angle).mul_(tables.attention_factor)
    skipped = first - begin * RUN
    return angle.flatten(0, 1)[None, None, skipped : skipped + length]


# ---------------------------------------------------------------------- rotating


def _rotate_tokens(x: Tensor, out: Tensor, angles: Angles, layout: Layout, scratch: Tensor | None) -> None:
    """Rotate some tokens: in the dtype of the angles, and what is narrower in a copy of that dtype."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    if x.dtype == dtype:
        _rotate_wide(x, out, angles, layout, scratch)
        return
    for place in _blocks(x):
        part, spare = _at(x, *place), None
        if scratch is None:
            wide = part.to(dtype, memory_format=torch.contiguous_format)
        else:
            wide, spare = scratch[: part.numel()].view(part.shape).copy_(part), scratch[part.numel() :]
        _rotate_wide(wide, wide, _of_rows(angles, place), layout, spare)
        _at(out, *place).copy_(wide)


def _rotate_wide(x: Tensor, out: Tensor, angles: Angles, layout: Layout, scratch: Tensor | None) -> None:
    done = _rotate_whole_vectors(x, out, *angles) if len(angles) == 1 else 0
    if done == x.shape[2]:
        return
    if done:
        x, out, angles = x[:, :, done:], out[:, :, done:], tuple(part[:, :, done:] for part in angles)
    both = angles if len(angles) == 2 else _twice(angles[0].real, angles[0].imag, layout)
    for place in _blocks(x):
        cos, sin = _of_rows(both, place)
        _rotate_block(_at(x, *place), _at(out, *place), cos, sin, layout, scratch)


def _rotate_block(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, layout: Layout, scratch: Tensor | None) -> None:
    """Separate products of all elements; the result may lie where the input does."""
    by_sin = x * sin if scratch is None else torch.mul(x, sin, out=scratch[: x.numel()].view(x.shape))
    a_sin, b_sin = _parts(by_sin, layout)
    a, b = _parts(torch.mul(x, cos, out=out), layout)
    a.sub_(b_sin)
    b.add_(a_sin)


def _rotate_whole_vectors(x: Tensor, out: Tensor, factor: Tensor) -> int:
    """Rotate neighbours by complex multiplication; returns for how many tokens that was possible."""
    numbers, results, done = _as_complex(x), _as_complex(out), 0
    if numbers is None or results is None:
        return 0
    batch, heads, length, pairs = numbers.shape
    for tokens in _cut_to_vectors(length, batch * heads * pairs, pairs):
        torch.mul(_at(numbers, ALL, ALL, tokens), _at(factor, ALL, ALL, tokens), out=_at(results, ALL, ALL, tokens))
        done = length if tokens is ALL else tokens.stop
    return done


def _parts(x: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """The first and the second of every pair."""
    if layout == "interleaved":
        return x[..., 0::2], x[..., 1::2]
    first, second = x.chunk(2, dim=-1)
    return first, second


def _as_complex(x: Tensor) -> Tensor | None:
    """Neighbours as one number, where they lie in memory as complex numbers have to."""
    *strides, last = x.stride()
    if last != 1 or x.storage_offset() % 2 or any(stride % 2 for stride in strides):
        return None
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


def _blocks(x: Tensor) -> Iterator[tuple[slice, slice]]:
    """Some sequences and heads at a time."""
    batch, heads, length, dim = x.shape
    for rows in _cut(batch, BLOCK // (heads * length * dim)):
        for some in _cut(heads, BLOCK // (length * dim)):
            yield rows, some


def _of_rows(angles: Angles, place: tuple[slice, slice]) -> Angles:
    """The angles of these sequences, where each has its own."""
    rows = place[0]
    return angles if rows is ALL or angles[0].shape[0] == 1 else tuple(part[rows] for part in angles)


# ---------------------------------------------------------------------- where products are rounded


def _cut_to_vectors(tokens: int, numbers: int, pairs: int) -> Iterator[slice]:
    """From the first token on, as many at a time, of so many complex numbers each, as fill whole vectors."""
    if _is_whole(tokens * numbers, pairs):
        yield ALL
        return
    begin, threads = 0, torch.get_num_threads()
    while begin < tokens:
        most = tokens - begin
        fitting = (n for n in range(most, max(most - VECTOR * threads, 0), -1) if _is_whole(n * numbers, pairs))
        length = next(fitting, 0)
        if not length:
            return
        yield slice(begin, begin + length)
        begin += length


def _is_whole(numbers: int, pairs: int) -> bool:
    """Whether torch works on so many complex numbers, in rows of `pairs`, in whole vectors, and rounds every product.

    It gives every thread an equal run of them, and goes row by row where rows do not lie one behind the other.
    """
    threads = max(min(torch.get_num_threads(), -(-numbers // GRAIN)), 1)
    return -(-numbers // threads) % VECTOR == 0 and _may_be_whole(pairs)


def _may_be_whole(pairs: int) -> bool:
    """Whether there are numbers of rows of so many pairs for which it does."""
    return pairs % VECTOR == 0 and _rounds_products()


@functools.cache
def _rounds_products() -> bool:
    """Whether this machine's vector loop has the bits of separate products; found out once, by trying."""
    for dtype in (torch.float32, torch.float64):
        a, b, cos, sin = torch.linspace(-1, 1, 32 * VECTOR, dtype=dtype, device="cpu").pow(3).view(4, -1)
        together = torch.complex(a, b) * torch.complex(cos, sin)
        if not torch.equal(together.real, a * cos - b * sin) or not torch.equal(together.imag, b * cos + a * sin):
            return False
    return True
