"""Attention whose bias depends only on the distance. It stores one number of the bias per head and distance.

The pair of query i and key j uses entry ``i - j + keys - 1`` of a table. If the table and the queries of a tile are
reversed, row r and key j use entry ``r + j`` plus a constant. So the matrix of all pairs is a view of the table with
strides 1 and 1. torch's fused kernel for CPUs reads this view as an additive mask, row by row from the cache, and no
tensor of size query x key exists. Entries at the ends of the table that the attention mask hides become minus infinity.
Tiles skip the keys to which none of their queries attends.

The bias of a pair has the same bits as in a matrix. It is also added in the same way, once to the scaled score.

``locant::distance_attention`` is for CPUs, without dropout. Its backward pass calls the backward of the fused kernel
for each tile. If the table or the log-sum-exp needs a gradient, or with a soft cap, plain operations compute the scores
in float32 at least, one head of a tile at a time. In bfloat16 they are more exact than the backward of the fused
kernel, which uses the rounded output with or without a bias.

Measured on two cores (8 heads of 64, float32), relative to plain causal attention without a bias: 1.2 times the time
for 8192 tokens forward, 1.1 times for 4096 tokens forward and backward, and 1.1 to 1.3 times with a gradient of the
table.
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
from locant.kernels.transforms import is_differentiated, is_plain_eager

TILE = 768
"""The number of queries in a tile. With this size or more, torch's kernel uses its largest steps."""
NARROW_TILE = 256  # for queries that attend to few keys, and for tiles whose scores or bias are stored
MAX_STORED_SCORES = 2**19  # the largest number of scores of a head that are stored

EAGER = "backend='eager', which uses plain operations"

# F.scaled_dot_product_attention calls these kernels, but does not return their log-sum-exps.
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


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
    """Return ``softmax(q k^T scale + bias) v`` with the bias ``table[:, i - j + keys - 1]`` for query i and key j.

    Also return the log-sum-exp of every query's scores in the dtype of the table, minus infinity for a query without
    keys. Only ``backward`` computes derivatives, and only of the first order.

    Args:
        q, k, v: tensors on a CPU, with at least one query and one key.
        table: one entry for each of the ``query + key - 1`` differences of slots, float32 at least.
        first, last: the first and the last entry that the mask allows. A query without any key gets zeros.
        scale: the factor of the scores.
        softcap: scaled scores become ``softcap * tanh(scores / softcap)`` before the bias is added.
        onto: zeros and minus infinity in the shapes of the results, to which the results are written. Use it only if
            the caller needs only the result (`locant.kernels.transforms.is_plain_eager`).

    >>> q = k = v = torch.ones(1, 1, 2, 4)
    >>> y, lse = distance_attention(q, k, v, torch.zeros(1, 3), first=1, last=2, scale=1.0)
    >>> y.shape, lse
    (torch.Size([1, 1, 2, 4]), tensor([[[4.0000, 4.6931]]]))
    """
    is_plain = is_plain_eager() and type(q) is type(k) is type(v) is type(table) is Tensor
    if not is_plain and is_differentiated(q, k, v, table):  # torch would treat this result as a constant
        raise LocantError("got tensors in forward mode or inside torch.func.grad and similar transforms", EAGER)
    q_width, v_width, v_wide = q.shape[-1], v.shape[-1], v
    if q_width > v_width:  # torch's kernel needs one width, and zeros do not change scores
        v_wide = F.pad(v, (0, q_width - v_width))
    elif q_width < v_width:
        q, k = (F.pad(x, (0, v_width - q_width)) for x in (q, k))
    arguments = (q, k, v_wide, table, first, last, scale, softcap)
    if is_plain:  # the dispatch of a custom operator takes microseconds
        y, lse = _attend_on_cpu(*arguments, onto=onto if q_width <= v_width else None)
    else:
        y, lse = _attend(*arguments)
    y = y if q_width <= v_width else y[..., :v_width]  # a view only if needed: FSDP does not handle views well
    for output, x in zip(onto or (), (y, lse), strict=False):
        if x is not output:
            output.copy_(x)
    return y, lse


@dataclass(frozen=True)
class Tile:
    """Some queries that have keys, and the keys to which at least one of them attends."""

    rows: slice
    keys: slice
    entry: int
    """The entry of the reversed table for the last query and the first key."""


class ReversedTable:
    """The reversed table, with minus infinity for entries that the mask hides, and its gradient."""

    def __init__(self, table: Float[Tensor, "#heads distances"], first: int, last: int) -> None:
        hidden = table.new_full(table.shape, float("-inf"))
        hidden[:, first : last + 1] = table[:, first : last + 1]
        self.table = hidden.flip(1)

    @functools.cached_property
    def gradient(self) -> Float[Tensor, "#heads distances"]:
        return torch.zeros_like(self.table, dtype=torch.float64)

    def view(self, tile: Tile) -> Float[Tensor, "#one #heads rows keys"]:
        """Return a view of the table. The last query comes first. Row r and column c use ``entry + r + c``."""
        sizes = (1, len(self.table), tile.rows.stop - tile.rows.start, tile.keys.stop - tile.keys.start)
        return self.table.as_strided(sizes, (0, self.table.stride(0), 1, 1), tile.entry)

    def add_to(self, scores: Float[Tensor, "rows keys"], factor: float, tile: Tile, head: int) -> None:
        """Replace the scores of one head by ``scores * factor`` plus the bias of this head."""
        torch.add(self.view(tile)[0, head % len(self.table)], scores, alpha=factor, out=scores)

    def add_gradient(self, tile: Tile, head: int, skewed: Float[Tensor, " numbers"]) -> None:
        """Add the gradient of one head's scores, whose row r begins at ``r * (rows + keys)``.

        With a stride that is one shorter, each diagonal becomes a column.
        """
        rows = tile.rows.stop - tile.rows.start
        diagonals = rows + tile.keys.stop - tile.keys.start - 1
        sums = skewed[: rows * diagonals].view(rows, diagonals).sum(0)
        self.gradient[head % len(self.table), tile.entry : tile.entry + diagonals] += sums


def _tiles(queries: int, keys: int, first: int, last: int, uses_plain_operations: bool) -> Iterator[Tile]:
    """Yield tiles of queries that have keys. Tiles are small if plain operations store their scores."""
    end = min(queries, last + 1) if first <= last else 0
    span = max(1, min(last - first + 1, keys))
    size = NARROW_TILE if span < 4 * TILE or queries < TILE else TILE
    if uses_plain_operations:
        size = max(1, min(NARROW_TILE, MAX_STORED_SCORES // span))
    for start in range(max(0, first - keys + 1), end, size):
        stop = min(start + size, end)
        low, high = max(start + keys - 1 - last, 0), min(stop + keys - 1 - first, keys)
        yield Tile(slice(start, stop), slice(low, high), queries - stop + low)


def _with_contiguous_rows(x: Tensor) -> Tensor:
    """Return `x` with a contiguous last dimension and real memory, as kernels need it. torch may not store zeros."""
    return x if native.is_in_rows(x) else torch.empty(x.shape, dtype=x.dtype).copy_(x)


# ---------------------------------------------------------------------- the operators and their derivatives


def _attend_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, first: int, last: int, scale: float, softcap: float | None,
    onto: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output and every query's log-sum-exp, written to `onto` unless the kernel for few queries runs."""
    if supports(q, v):
        return decode(q, k, v, table, first, last, scale, softcap)
    q, k, v = (_with_contiguous_rows(x) for x in (q, k, v))
    if onto is None:
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        onto = out, table.new_full(q.shape[:3], float("-inf"))  # queries without a key keep these values
    out, sums = onto
    bias, span = ReversedTable(table, first, last), (q.shape[2], k.shape[2], first, last)
    for tile in _tiles(*span, uses_plain_operations=softcap is not None):
        part = (q[:, :, tile.rows].flip(2), k[:, :, tile.keys], v[:, :, tile.keys])
        _attend_tile(*part, bias, tile, scale, softcap, out[:, :, tile.rows], sums[:, :, tile.rows])
    return out, sums


def _attend_tile(
    q: Tensor, k: Tensor, v: Tensor, bias: ReversedTable, tile: Tile, scale: float, softcap: float | None, out: Tensor,
    sums: Tensor,
) -> None:  # fmt: skip
    """Attend to one tile. This is a separate function so that its tensors are freed before the next tile."""
    if softcap is None:
        y, lse = FLASH(q, k, v, attn_mask=bias.view(tile), scale=scale)
    else:
        y, lse = _attend_tile_with_softcap(q, k, v, bias, tile, scale, softcap)
    out.copy_(y.flip(2))
    sums.copy_(lse.flip(2))


_attend = torch.library.custom_op(
    "locant::distance_attention",
    _attend_on_cpu,
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor q, Tensor k, Tensor v, Tensor table, SymInt first, SymInt last, float scale, float? softcap) "
    "-> (Tensor, Tensor)",
)


def _attend_tile_with_softcap(
    q: Tensor, keys: Tensor, values: Tensor, bias: ReversedTable, tile: Tile, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output and the log-sum-exps of one tile. Only the scores of one head are stored at a time."""
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
            sums[b, h] = largest - scores.amax(-1).log()  # the largest weight is 1 / sum(exp(score - largest score))
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
    """Return the gradients of q, k, v and the table. Without `of_bias`, the table's gradient is an empty tensor."""
    grad, q, k, v = (_with_contiguous_rows(x) for x in (grad, q, k, v))
    bias, wide = ReversedTable(table, first, last), torch.promote_types(q.dtype, torch.float32)
    grad_q = torch.zeros_like(q, memory_format=torch.contiguous_format)
    grad_k, grad_v = k.new_zeros(k.shape, dtype=wide), v.new_zeros(v.shape, dtype=wide)
    uses_plain_operations = of_bias or softcap is not None or grad_sums is not None
    with torch.autocast("cpu", enabled=False):  # backward is often called inside autocast
        for tile in _tiles(q.shape[2], k.shape[2], first, last, uses_plain_operations):
            rows, keys = (slice(None), slice(None), tile.rows), (slice(None), slice(None), tile.keys)
            part, totals = (grad[rows].flip(2), q[rows].flip(2), k[keys], v[keys]), (grad_k[keys], grad_v[keys])
            lse = sums[rows].flip(2)
            if uses_plain_operations:
                grad_lse = None if grad_sums is None else grad_sums[rows].flip(2)
                tile_grad_q = _tile_gradients(*part, grad_lse, lse, bias, tile, scale, softcap, *totals, of_bias)
            else:
                tile_grad_q, *key_gradients = FLASH_BACKWARD(
                    *part, out[rows].flip(2), lse, 0.0, False, attn_mask=bias.view(tile), scale=scale
                )
                totals[0].add_(key_gradients[0])
                totals[1].add_(key_gradients[1])
            grad_q[rows] = tile_grad_q.flip(2)
    grad_table = bias.gradient.flip(-1).to(table.dtype) if of_bias else table.new_empty(0)
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), grad_table


@_attend_backward.register_fake
def _(
    grad: Tensor, grad_sums: Tensor | None, q: Tensor, k: Tensor, v: Tensor, table: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    *_, of_bias = rest
    gradients = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return *gradients, torch.empty_like(table) if of_bias else table.new_empty(0)


def _tile_gradients(
    grad: Tensor, q: Tensor, keys: Tensor, values: Tensor, grad_sums: Tensor | None, sums: Tensor, bias: ReversedTable,
    tile: Tile, scale: float, softcap: float | None, grad_k: Tensor, grad_v: Tensor, of_bias: bool,
) -> Tensor:  # fmt: skip
    """Return the gradient of one tile's queries, and add the other gradients to their totals, head by head.

    The gradient of a score is the gradient of its bias. It is the score's weight times the gradient of the weight minus
    the weighted mean of the row, plus the weight times the gradient of the row's log-sum-exp. The mean uses the weights
    computed here, not the output, which was rounded to the dtype of the queries. Otherwise the gradients of a row's
    scores would not sum to zero, and biases of distances would drift to the mean of the values. Rows are written with a
    stride that is one longer than the stride for reading, so that each diagonal becomes a column.
    """
    (rows, cols), group = (q.shape[2], keys.shape[2]), q.shape[1] // keys.shape[1]
    skewed = grad_k.new_zeros(rows * (rows + cols))
    scores_gradient = skewed.as_strided((rows, cols), (rows + cols, 1))
    # Allocate once, because the first access to memory is slow.
    weights, grad_weights, *capped = (grad_k.new_empty(rows, cols) for _ in range(2 if softcap is None else 3))
    grad_q = torch.empty_like(q)
    for h in range(q.shape[1]):
        for b in range(q.shape[0]):
            key_head = (b, h // group)
            q_h, g_h, k_h, v_h = (x.to(grad_k.dtype) for x in (q[b, h], grad[b, h], keys[key_head], values[key_head]))
            torch.mm(q_h, k_h.T, out=weights)
            if softcap is not None:
                torch.mul(weights, scale / softcap, out=capped[0]).tanh_()
                weights.copy_(capped[0])
            bias.add_to(weights, scale if softcap is None else softcap, tile, h)
            weights.sub_(sums[b, h, :, None]).exp_()
            grad_v[key_head].addmm_(weights.T, g_h)
            torch.mm(g_h, v_h.T, out=grad_weights)
            torch.mul(grad_weights, weights, out=scores_gradient)
            mean = scores_gradient.sum(-1, keepdim=True) / weights.sum(-1, keepdim=True)
            mean = mean if grad_sums is None else mean - grad_sums[b, h, :, None]
            torch.mul(grad_weights.sub_(mean), weights, out=scores_gradient)
            if of_bias:
                bias.add_gradient(tile, h, skewed)
            if capped:
                scores_gradient.addcmul_(scores_gradient, capped[0].square_(), value=-1)
            grad_q[b, h] = (scores_gradient @ k_h).mul_(scale)
            grad_k[key_head].addmm_(scores_gradient.T, q_h, alpha=scale)
    return grad_q


def _save_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.first, ctx.last, ctx.scale, ctx.softcap = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)  # the gradient of the log-sum-exp is rarely needed, and needs plain operations


def _backward(ctx: Any, grad: Tensor | None, grad_sums: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, table, out, sums = ctx.saved_tensors  # read only once: a checkpoint does not return them twice
    grad = torch.zeros_like(out) if grad is None else grad
    options = (ctx.first, ctx.last, ctx.scale, ctx.softcap, ctx.needs_input_grad[3])
    gradients = _attend_backward(grad, grad_sums, q, k, v, table, out, sums, *options)
    pairs = zip(gradients, ctx.needs_input_grad, strict=False)
    return *(x if needed else None for x, needed in pairs), None, None, None, None


_attend.register_autograd(_backward, setup_context=_save_context)


def _raise_second_order(ctx: Any, *_: Tensor | None) -> tuple[None, ...]:
    got = "got a gradient of a gradient through backend='tiled', which supports only first-order gradients"
    raise LocantError(got, EAGER)


_attend_backward.register_autograd(_raise_second_order)


# ---------------------------------------------------------------------- few queries over many keys

# ``native/decode.c`` reads every key and value once for all query heads that share it, in one parallel region of
# torch's own threads, with scores, softmax and sums in float32. Results do not depend on the number of threads.

FUNCTION = "locant_decode"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_QUERIES = 8  # for more queries, matrix products for a tile of scores are faster
MIN_KEYS = 16  # for each query
MAX_WIDTH = 1_024  # of a head

pack = struct.Struct("=28q2d6q").pack
"""``Task`` in C."""


def supports(q: Tensor, v: Tensor) -> bool:
    """Return whether `decode` supports queries and values like these, on a CPU."""
    (_, _, queries, head_dim), (_, _, keys, value_dim) = q.shape, v.shape
    few = queries <= MAX_QUERIES and MIN_KEYS * queries <= keys
    return few and q.dtype in DTYPES and head_dim <= MAX_WIDTH and value_dim <= MAX_WIDTH and native.has(FUNCTION)


def decode(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, first: int, last: int, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Return the output and every query's log-sum-exp, as `distance_attention` defines them."""
    if not all(map(native.is_in_rows, (q, k, v, table))):
        q, k, v, table = map(_with_contiguous_rows, (q, k, v, table))
    (batch, heads, queries, head_dim), (_, kv_heads, keys, value_dim) = q.shape, v.shape
    out, sums = q.new_empty((batch, heads, queries, value_dim)), table.new_empty((batch, heads, queries))
    packed = pack(
        native.threads(), native.DTYPES[q.dtype],
        batch, kv_heads, heads // kv_heads, queries, keys, head_dim, value_dim,
        *q.stride(), *k.stride(), *v.stride(), *out.stride(),
        table.stride(0) if table.shape[0] > 1 else 0, first, last, scale, softcap or 0.0,
        q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), table.data_ptr(), sums.data_ptr(),
    )  # fmt: skip
    if native.function(FUNCTION)(packed):
        raise MemoryError("not enough memory for partial results of attention")
    return out, sums
