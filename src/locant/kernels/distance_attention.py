"""Attention whose bias follows from the distance: one number per head and distance is all that is held of it.

The pair of query i and key j has entry ``i - j + keys - 1`` of a table. Read backwards, and with the queries of a tile
in reverse order, the entry of row r and key j is a constant more than ``r + j``: the matrix of all pairs is a view of
the table whose strides are 1 and 1. torch's fused kernel for CPUs reads it as an additive mask, row by row out of the
cache, and nothing of the size query x key exists. What the attention mask hides are the ends of the table: minus
infinity, and tiles of queries skip the keys that none of them attends to.

The bias of a pair has the bits that a matrix of them would have, and enters as it would there: added to the scaled
score, once.

``locant::distance_attention`` is for CPUs, without dropout. Its backward is the kernel's own, tile by tile. Where the
table or the log-sum-exp takes part in it, and with a soft cap, scores are made of plain operations, a head of a tile at
a time, in float32 at least. In bfloat16 the kernel's own backward is less exact than that: it works with the rounded
output, as torch's fused attention does with or without a bias. Measured on two cores
(8 heads of 64, float32): 8192 tokens in 1.2 times what plain causal attention takes without a bias; forward and
backward of 4096 tokens in 1.1 times, and in 1.1 to 1.3 times with a gradient for the table.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from locant.errors import LocantError
from locant.kernels import native
from locant.kernels.transforms import is_differentiated, wants_result_alone

TILE = 768
"""Queries at a time; from here on torch's kernel takes them in its largest steps."""
NARROW_TILE = 256  # where queries attend to few keys, or scores or their bias are held
HELD = 2**19  # where scores of a head are held, no more of them than this

EAGER = "backend='eager', which is made of plain operations"

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # the one behind F.scaled_dot_product_attention,
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward  # which does not hand out its sums


def distance_attention(
    q: Float[Tensor, "batch heads query head_dim"],
    k: Float[Tensor, "batch kv_heads key head_dim"],
    v: Float[Tensor, "batch kv_heads key value_dim"],
    table: Float[Tensor, "#heads distances"],
    first: int,
    last: int,
    scale: float,
    softcap: float | None = None,
    onto: tuple[Tensor, Tensor] | None = None,
) -> tuple[Float[Tensor, "batch heads query value_dim"], Float[Tensor, "batch heads query"]]:
    """``softmax(q k^T scale + bias) v`` with the bias ``table[:, i - j + keys - 1]`` for query i and key j.

    And, in the dtype of the table, the log-sum-exp of every query's scores; minus infinity of none.

    Args:
        q, k, v: on a CPU; there is at least one query and one key.
        table: one entry for each of the ``query + key - 1`` differences of slots, float32 at least.
        first, last: the entries that the mask allows; the others are hidden. A query without any key gets zeros.
        scale: of the scores.
        softcap: scaled scores become ``softcap * tanh(scores / softcap)`` before the bias is added.
        onto: zeros and minus infinity of the shapes of the result, which it is written to; for use where nothing else
            is wanted (`locant.kernels.transforms.wants_result_alone`).

    Derivatives by ``backward`` alone, and of the first order.

    >>> q = k = v = torch.ones(1, 1, 2, 4)
    >>> y, lse = distance_attention(q, k, v, torch.zeros(1, 3), first=1, last=2, scale=1.0)
    >>> y.shape, lse
    (torch.Size([1, 1, 2, 4]), tensor([[[4.0000, 4.6931]]]))
    """
    given = (q, k, v, table)
    if is_differentiated(*given):  # or torch would take what it knows no derivative of for constant
        raise LocantError("got tensors in forward mode or inside torch.func.grad and the like", EAGER)
    width = max(q.shape[-1], v.shape[-1])  # torch's kernel takes one for both; zeros change no score
    q, k, v_wide = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    plain = wants_result_alone() and all(type(x) is Tensor for x in given)
    given = (q, k, v_wide, table, first, last, scale, softcap)
    if plain:  # an operator of ours takes microseconds to be found
        y, lse = _computed(*given, onto=onto if v.shape[-1] == width else None)
    else:
        y, lse = _attend(*given)
    y = y if v.shape[-1] == width else y[..., : v.shape[-1]]  # views only where needed: FSDP mistrusts them
    for place, x in zip(onto or (), (y, lse), strict=False):
        if x is not place:
            place.copy_(x)
    return y, lse


@dataclass(frozen=True)
class Tile:
    """Some queries, each with a key, and the keys that one of them or more attends to."""

    rows: slice
    keys: slice
    entry: int
    """Of the table that is read backwards, for the last query and the first key."""


class Backwards:
    """The table read backwards, with minus infinity for what the mask hides; and its gradient."""

    def __init__(self, table: Float[Tensor, "#heads distances"], first: int, last: int) -> None:
        hidden = table.new_full(table.shape, float("-inf"))
        hidden[:, first : last + 1] = table[:, first : last + 1]
        self.table = hidden.flip(1)

    @functools.cached_property
    def gradient(self) -> Float[Tensor, "#heads distances"]:
        return torch.zeros_like(self.table, dtype=torch.float64)

    def of(self, tile: Tile) -> Float[Tensor, "#one #heads rows keys"]:
        """A view of the table: the last query comes first, and row r has for column c the entry ``entry + r + c``."""
        sizes = (1, len(self.table), tile.rows.stop - tile.rows.start, tile.keys.stop - tile.keys.start)
        return self.table.as_strided(sizes, (0, self.table.stride(0), 1, 1), tile.entry)

    def add_to(self, scores: Float[Tensor, "rows keys"], factor: float, tile: Tile, head: int) -> None:
        """``scores * factor`` and the bias of one head, in the place of the scores."""
        torch.add(self.of(tile)[0, head % len(self.table)], scores, alpha=factor, out=scores)

    def learn(self, tile: Tile, head: int, skewed: Float[Tensor, " numbers"]) -> None:
        """Add the gradient of one head's scores, whose row r begins at ``r * (rows + keys)``.

        Read at a stride that is one shorter, what was a diagonal is a column.
        """
        rows = tile.rows.stop - tile.rows.start
        diagonals = rows + tile.keys.stop - tile.keys.start - 1
        along = skewed[: rows * diagonals].view(rows, diagonals).sum(0)
        self.gradient[head % len(self.table), tile.entry : tile.entry + diagonals] += along


def _tiles(queries: int, keys: int, first: int, last: int, by_hand: bool) -> Iterator[Tile]:
    """Few queries in each where something is held for each of their keys; those without a key are in none."""
    end = min(queries, last + 1) if first <= last else 0
    span = max(1, min(last - first + 1, keys))
    size = NARROW_TILE if span < 4 * TILE or queries < TILE else TILE
    if by_hand:
        size = max(1, min(NARROW_TILE, HELD // span))
    for start in range(max(0, first - keys + 1), end, size):
        stop = min(start + size, end)
        low, high = max(start + keys - 1 - last, 0), min(stop + keys - 1 - first, keys)
        yield Tile(slice(start, stop), slice(low, high), queries - stop + low)


def _in_rows(x: Tensor) -> Tensor:
    """With the last dimension side by side in memory, as kernels read it; torch keeps zeros without memory."""
    x = x.resolve_neg()
    return x if x.stride(-1) == 1 and x.data_ptr() else torch.empty(x.shape, dtype=x.dtype).copy_(x)


# ---------------------------------------------------------------------- what torch knows of it


def _computed(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, first: int, last: int, scale: float, softcap: float | None,
    onto: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output, and the logarithm of every query's sum of exponentials; in `onto`, unless one query is all."""
    if supports(q, v):
        return decode(q, k, v, table, first, last, scale, softcap)
    q, k, v = (_in_rows(x) for x in (q, k, v))
    if onto is None:
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        onto = out, table.new_full(q.shape[:3], float("-inf"))  # and so they stay for queries without a key
    out, sums = onto
    bias, span = Backwards(table, first, last), (q.shape[2], k.shape[2], first, last)
    for tile in _tiles(*span, by_hand=softcap is not None):
        part = (q[:, :, tile.rows].flip(2), k[:, :, tile.keys], v[:, :, tile.keys])
        _attend_tile(*part, bias, tile, scale, softcap, out[:, :, tile.rows], sums[:, :, tile.rows])
    return out, sums


def _attend_tile(
    q: Tensor, k: Tensor, v: Tensor, bias: Backwards, tile: Tile, scale: float, softcap: float | None, out: Tensor,
    sums: Tensor,
) -> None:  # fmt: skip
    """A function of its own, so that nothing of a tile is held while the next is computed."""
    if softcap is None:
        y, total = FLASH(q, k, v, attn_mask=bias.of(tile), scale=scale)
    else:
        y, total = _capped(q, k, v, bias, tile, scale, softcap)
    out.copy_(y.flip(2))
    sums.copy_(total.flip(2))


_attend = torch.library.custom_op(
    "locant::distance_attention",
    _computed,
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor q, Tensor k, Tensor v, Tensor table, SymInt first, SymInt last, float scale, float? softcap) "
    "-> (Tensor, Tensor)",
)


def _capped(
    q: Tensor, keys: Tensor, values: Tensor, bias: Backwards, tile: Tile, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output and the sums of one tile, head by head, so that the scores of one head are all that is held."""
    group, wide = q.shape[1] // keys.shape[1], torch.promote_types(q.dtype, torch.float32)
    out, sums = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=wide)
    scores = q.new_empty((q.shape[2], keys.shape[2]), dtype=wide)
    for h in range(q.shape[1]):
        for b in range(q.shape[0]):
            k_h, v_h = (x[b, h // group].to(wide) for x in (keys, values))
            torch.mm(q[b, h].to(wide) * (scale / softcap), k_h.T, out=scores).tanh_()
            bias.add_to(scores, softcap, tile, h)
            largest = scores.amax(-1)
            torch.softmax(scores, -1, out=scores)
            sums[b, h] = largest - scores.amax(-1).log()  # the greatest weight is one over the rest's sum
            out[b, h] = scores @ v_h
    return out, sums


@_attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, table: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q, memory_format=torch.contiguous_format), table.new_empty(q.shape[:3])


@torch.library.custom_op(
    "locant::distance_attention_backward",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor grad, Tensor? grad_sums, Tensor q, Tensor k, Tensor v, Tensor table, Tensor out, Tensor sums, "
    "SymInt first, SymInt last, float scale, float? softcap, bool of_bias) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _attend_backward(
    grad: Tensor, grad_sums: Tensor | None, q: Tensor, k: Tensor, v: Tensor, table: Tensor, out: Tensor, sums: Tensor,
    first: int, last: int, scale: float, softcap: float | None, of_bias: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients of q, k, v and, if asked for, of the table; else a tensor of nothing in its place."""
    grad, q, k, v = (_in_rows(x) for x in (grad, q, k, v))
    bias, wide = Backwards(table, first, last), torch.promote_types(q.dtype, torch.float32)
    grad_q = torch.zeros_like(q, memory_format=torch.contiguous_format)
    grad_k, grad_v = k.new_zeros(k.shape, dtype=wide), v.new_zeros(v.shape, dtype=wide)
    by_hand = of_bias or softcap is not None or grad_sums is not None
    with torch.autocast("cpu", enabled=False):  # gradients are often asked for where it is on
        for tile in _tiles(q.shape[2], k.shape[2], first, last, by_hand):
            at, there = (slice(None), slice(None), tile.rows), (slice(None), slice(None), tile.keys)
            part, onto = (grad[at].flip(2), q[at].flip(2), k[there], v[there]), (grad_k[there], grad_v[there])
            total = sums[at].flip(2)
            if by_hand:
                onto_sums = None if grad_sums is None else grad_sums[at].flip(2)
                onto_q = _by_hand(*part, onto_sums, total, bias, tile, scale, softcap, *onto, of_bias)
            else:
                onto_q, *of_keys = FLASH_BACKWARD(
                    *part, out[at].flip(2), total, 0.0, False, attn_mask=bias.of(tile), scale=scale
                )
                onto[0].add_(of_keys[0])
                onto[1].add_(of_keys[1])
            grad_q[at] = onto_q.flip(2)
    grad_table = bias.gradient.flip(-1).to(table.dtype) if of_bias else table.new_empty(0)
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), grad_table


@_attend_backward.register_fake
def _(
    grad: Tensor, grad_sums: Tensor | None, q: Tensor, k: Tensor, v: Tensor, table: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    *_, of_bias = rest
    gradients = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return *gradients, torch.empty_like(table) if of_bias else table.new_empty(0)


def _by_hand(
    grad: Tensor, q: Tensor, keys: Tensor, values: Tensor, grad_sums: Tensor | None, sums: Tensor, bias: Backwards,
    tile: Tile, scale: float, softcap: float | None, grad_k: Tensor, grad_v: Tensor, of_bias: bool,
) -> Tensor:  # fmt: skip
    """The gradient of one tile's queries; the others are added to. Head by head, as in `_capped`.

    The gradient of a score is the gradient of its bias: its weight times the difference between the gradient of that
    weight and the weighted mean of its row, and times the gradient of the row's log-sum-exp. The mean is taken of the
    weights that are here, not of the output, which was rounded to the dtype of the queries: over a row the gradients
    of scores have to add up to zero, or distances would be drawn to the mean of the values. Rows are written at a
    stride that is one longer than the one they are read at, so that what was a diagonal becomes a column.
    """
    (rows, cols), group = (q.shape[2], keys.shape[2]), q.shape[1] // keys.shape[1]
    skewed = grad_k.new_zeros(rows * (rows + cols))
    scores_gradient = skewed.as_strided((rows, cols), (rows + cols, 1))
    # Once: memory touched for the first time is slow.
    weights, of_weights, *more = (grad_k.new_empty(rows, cols) for _ in range(2 if softcap is None else 3))
    grad_q = torch.empty_like(q)
    for h in range(q.shape[1]):
        for b in range(q.shape[0]):
            there = (b, h // group)
            q_h, g_h, k_h, v_h = (x.to(grad_k.dtype) for x in (q[b, h], grad[b, h], keys[there], values[there]))
            torch.mm(q_h, k_h.T, out=weights)
            if softcap is not None:
                torch.mul(weights, scale / softcap, out=more[0]).tanh_()
                weights.copy_(more[0])
            bias.add_to(weights, scale if softcap is None else softcap, tile, h)
            weights.sub_(sums[b, h, :, None]).exp_()
            grad_v[there].addmm_(weights.T, g_h)
            torch.mm(g_h, v_h.T, out=of_weights)
            torch.mul(of_weights, weights, out=scores_gradient)
            mean = scores_gradient.sum(-1, keepdim=True) / weights.sum(-1, keepdim=True)
            mean = mean if grad_sums is None else mean - grad_sums[b, h, :, None]
            torch.mul(of_weights.sub_(mean), weights, out=scores_gradient)
            if of_bias:
                bias.learn(tile, h, skewed)
            if more:
                scores_gradient.addcmul_(scores_gradient, more[0].square_(), value=-1)
            grad_q[b, h] = (scores_gradient @ k_h).mul_(scale)
            grad_k[there].addmm_(scores_gradient.T, q_h, alpha=scale)
    return grad_q


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.first, ctx.last, ctx.scale, ctx.softcap = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)  # that of the sums is most often not asked for, and costs the fast way


def _backward(ctx: Any, grad: Tensor | None, grad_sums: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, table, out, sums = ctx.saved_tensors  # asked for once: checkpoints do not give them twice
    grad = torch.zeros_like(out) if grad is None else grad
    numbers = (ctx.first, ctx.last, ctx.scale, ctx.softcap, ctx.needs_input_grad[3])
    gradients = _attend_backward(grad, grad_sums, q, k, v, table, out, sums, *numbers)
    wanted = zip(gradients, ctx.needs_input_grad, strict=False)
    return *(x if is_wanted else None for x, is_wanted in wanted), None, None, None, None


_attend.register_autograd(_backward, setup_context=_keep)


def _no_second(ctx: Any, *_: Tensor | None) -> tuple[None, ...]:
    raise LocantError("got a gradient of a gradient through backend='tiled', which has those of first order", EAGER)


_attend_backward.register_autograd(_no_second)


# ---------------------------------------------------------------------- few queries over many keys

# By ``native/decode.c``: every key and value is read once for all query heads that share it, in one parallel region of
# torch's own threads, with scores, softmax and sums in float32. Results do not depend on the number of threads.

FUNCTION = "locant_decode"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MOST_QUERIES = 8  # with more, matrix products that hold a tile of scores are faster
FEWEST_KEYS = 16  # for each query
WIDEST = 1_024  # of a head

pack = struct.Struct("=24q2d6q").pack
"""``Task`` in C."""


def supports(q: Tensor, v: Tensor) -> bool:
    """Whether it is the way for queries and values like these, on a CPU."""
    few = q.shape[2] <= MOST_QUERIES and FEWEST_KEYS * q.shape[2] <= v.shape[2]
    return few and q.dtype in DTYPES and max(q.shape[3], v.shape[3]) <= WIDEST and native.has(FUNCTION)


def decode(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, first: int, last: int, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """What `distance_attention` says of these: the output, and every query's log-sum-exp."""
    q, k, v, table = (_in_rows(x) for x in (q, k, v, table))
    (batch, heads, queries, head_dim), (_, kv_heads, keys, value_dim) = q.shape, v.shape
    out, sums = q.new_empty(batch, heads, queries, value_dim), table.new_empty(batch, heads, queries)
    size = q.element_size()
    steps = [size * step for x in (q, k, v, out) for step in x.stride()[:3]]
    table_step = table.stride(0) if len(table) > 1 else 0
    packed = pack(
        native.threads(), native.DTYPES[q.dtype],
        batch, kv_heads, heads // kv_heads, queries, keys, head_dim, value_dim,
        *steps, table_step, first, last, scale, softcap or 0.0,
        *(x.data_ptr() for x in (q, k, v, out, table, sums)),
    )  # fmt: skip
    if native.function(FUNCTION)(packed):
        raise MemoryError("no memory for parts of attention")
    return out, sums
