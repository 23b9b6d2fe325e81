"""Attention with a `Lookup` or `Pairwise` bias: a block of queries and keys at a time, forward and backward.

Any part of such a bias is known by itself, and its gradient is that of the scores: neither has to be held for all of
them. The bias is asked for one block of some heads, in either direction. The softmax over a row is joined from blocks
by their log-sum-exp. Scores are float32 at least, and a few times `HELD` of them are all that is held.

Where keys are far enough for the bias to be a sum of a number of the query and one of the key (its `far`), the forward
pass goes through torch's fused kernel: the number of the key is a mask whose rows are all the same memory, and that of
the query moves the log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from locant.arguments import Real
from locant.attention.inputs import Attended, AttentionInputs
from locant.attention.mask import AttentionMask
from locant.positions.distances import bias_dtype
from locant.positions.score_bias import Lookup, Pairwise

BLOCK = 256
"""Queries, and keys, of a block."""
HELD = 2**16
"""Scores that are held at a time: of as many heads as they suffice for."""
HIDDEN = -1e30
"""The score of a key that the mask does not allow. A row of them gives no NaN, as infinities would."""
FAR_AT_ONCE = 4096
"""Keys that torch's kernel is given at a time, copied for every head."""
SMALLEST = -80.0
"""The logarithm of the smallest weight in the backward pass: numbers near the end of float32 are slow."""

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # F.scaled_dot_product_attention gives no sums

Parted = Lookup | Pairwise
"""What any part of is known."""
Numbers = tuple[Parted, AttentionMask, Real, Real | None]


def attention_by_blocks(inputs: AttentionInputs) -> Attended:
    """The output and the log-sum-exp of every query, without dropout; on a CPU."""
    bias = cast("Parted", inputs.bias)
    tensors = bias.tensors
    numbers: Numbers = (bias.with_tensors([None] * len(tensors)), inputs.mask, inputs.scale, inputs.softcap)
    y, lse = _ByBlocks.apply(numbers, inputs.q, inputs.k, inputs.v, *tensors)
    return Attended(y.to(inputs.q.dtype), lse)


class _Block(NamedTuple):
    """Some keys that one of some queries or more attends to."""

    keys: slice
    mask: AttentionMask
    hidden: Bool[Tensor, "#batch 1 query key"] | None
    """What the mask does not allow; ``None`` where it allows all."""
    far: bool
    """Whether the bias is a sum of a number of the query and one of the key."""
    bias: Parted


@dataclass(frozen=True)
class _Rows:
    """Some heads of some queries."""

    numbers: Numbers
    num_heads: int
    heads: slice
    shared: Tensor
    """The head of the keys for each of them."""
    rows: slice
    q: Float[Tensor, "batch heads query head_dim"]
    """Times the scale."""

    def those_of(self, x: Tensor, keys: slice) -> Float[Tensor, "batch heads key _"]:
        """Keys or values, for each head, in the dtype of the computation."""
        if x.shape[1] == self.num_heads:
            return x[:, self.heads, keys].to(self.q.dtype)
        return x[:, self.shared, keys].to(self.q.dtype)

    def scores(self, k: Tensor, bias: Tensor) -> tuple[Float[Tensor, "batch heads query key"], Tensor | None]:
        """With the bias; and, over the soft cap, without it."""
        softcap = self.numbers[3]
        if softcap is None:
            return (self.q @ k.mT).add_(bias), None
        bounded = (self.q / softcap @ k.mT).tanh_()
        return torch.add(bias, bounded, alpha=softcap), bounded

    def attended(self, block: _Block, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The output and the log-sum-exp over the keys of a block."""
        k_here, v_here = (self.those_of(x, block.keys) for x in (k, v))
        if block.far:
            of_query, of_key = block.bias.of_heads(self.heads).of_far()
            row = None if of_key is None else of_key[:, :, None].to(self.q.dtype).expand(*self.q.shape[:3], -1)
            width = max(self.q.shape[-1], v.shape[-1])
            y, lse = FLASH(*(_widened(x, width) for x in (self.q, k_here, v_here)), attn_mask=row, scale=1.0)
            return y[..., : v.shape[-1]], lse if of_query is None else lse + of_query
        scores, _ = self.scores(k_here, block.bias.of_heads(self.heads).dense())
        if block.hidden is not None:
            scores.masked_fill_(block.hidden, HIDDEN)
        weights = torch.softmax(scores, -1)
        lse = scores.amax(-1) - weights.amax(-1).log()  # the greatest weight is one over the rest's sum
        return weights @ v_here, lse


def _widened(x: Tensor, width: int) -> Tensor:
    """The kernel takes one width for all, and reads a vector as one piece of memory; zeros change no score."""
    x = x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


def _rows(numbers: Numbers, q: Tensor, k: Tensor) -> Iterator[tuple[list[_Block], list[_Rows]]]:
    """For each tile of queries the blocks of keys, and the heads, a few at a time."""
    scale = numbers[2]
    at_once = max(1, HELD // (q.shape[0] * BLOCK * BLOCK))
    shared = torch.arange(q.shape[1]) // (q.shape[1] // k.shape[1])
    for start in range(0, q.shape[2], BLOCK):
        rows = slice(start, min(start + BLOCK, q.shape[2]))
        wide = q[:, :, rows].to(bias_dtype(q)) * scale
        parts = [slice(head, min(head + at_once, q.shape[1])) for head in range(0, q.shape[1], at_once)]
        heads = [_Rows(numbers, q.shape[1], part, shared[part], rows, wide[:, part]) for part in parts]
        yield _blocks(numbers, rows), heads


def _blocks(numbers: Numbers, rows: slice) -> list[_Block]:
    """The blocks of keys that these queries attend to."""
    bias, mask, _, softcap = numbers
    tile, keys = mask.tile(rows.start, rows.stop)
    blocks: list[_Block] = []
    for start in range(keys.start, keys.stop, BLOCK):
        part = slice(start, min(start + BLOCK, keys.stop))
        here = AttentionMask(tile.queries, mask.keys.slice(part.start, part.stop), mask.causal, mask.window)
        allowed = None if here.is_full else here.queries.mask(here.keys, causal=here.causal, window=here.window)
        if allowed is None or bool(allowed.all()):
            limit = bias.far if mask.causal and softcap is None else None
            is_far = limit is not None and int(here.queries.index.amin() - here.keys.index.amax()) >= limit
            blocks.append(_Block(part, here, None, is_far, bias.tile(rows, part)))
        elif bool(allowed.any()):
            blocks.append(_Block(part, here, ~allowed, False, bias.tile(rows, part)))
    return blocks


def _runs(bias: Parted, rows: slice, mask: AttentionMask, blocks: list[_Block]) -> list[_Block]:
    """The same keys, with neighbouring blocks that are far as one."""
    runs: list[_Block] = []
    for block in blocks:
        last = runs[-1] if runs else block
        beside = last.far and block.far and last.keys.stop == block.keys.start
        if beside and block.keys.stop - last.keys.start <= FAR_AT_ONCE:
            keys = slice(last.keys.start, block.keys.stop)
            both = AttentionMask(block.mask.queries, mask.keys.slice(keys.start, keys.stop), mask.causal, mask.window)
            runs[-1] = _Block(keys, both, None, True, bias.tile(rows, keys))
        else:
            runs.append(block)
    return runs


class _ByBlocks(torch.autograd.Function):
    """Differentiable by what was read and by the parameters of the encoding, beside queries, keys and values.

    The output is in the dtype of the computation: its product with its gradient is what the backward pass subtracts.
    """

    @staticmethod
    def forward(
        ctx: Any, numbers: Numbers, q: Tensor, k: Tensor, v: Tensor, *learned: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.numbers = numbers
        numbers = (numbers[0].with_tensors(learned), *numbers[1:])
        wide = bias_dtype(q)
        y = q.new_zeros(*q.shape[:3], v.shape[-1], dtype=wide)
        lse = q.new_full(q.shape[:3], HIDDEN, dtype=wide)
        for blocks, parts in _rows(numbers, q, k):
            runs = _runs(numbers[0], parts[0].rows, numbers[1], blocks)
            for part in parts:
                y_here, lse_here = y[:, part.heads, part.rows], lse[:, part.heads, part.rows]
                for run in runs:
                    more, lse_of_run = part.attended(run, k, v)
                    joined = torch.logaddexp(lse_here, lse_of_run)
                    y_here *= (lse_here - joined).exp_()[..., None]
                    y_here += more.mul_((lse_of_run - joined).exp_()[..., None])
                    lse_here.copy_(joined)
        without_keys = lse <= HIDDEN / 2
        y.masked_fill_(without_keys[..., None], 0.0)
        lse.masked_fill_(without_keys, float("-inf"))
        ctx.save_for_backward(q, k, v, y, lse, *learned)
        ctx.set_materialize_grads(False)  # that of the sums is most often not asked for
        return y, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]  # decorated
        q, k, v, y, lse, *learned = ctx.saved_tensors
        grad, grad_lse = grads
        scale = ctx.numbers[2]
        grad = torch.zeros_like(y) if grad is None else grad
        onto_q, onto_k, onto_v = (torch.zeros_like(x, dtype=y.dtype) for x in (q, k, v))
        wanted = ctx.needs_input_grad[4:]
        onto_learned = [
            torch.zeros_like(x, dtype=torch.float64 if x.numel() < HELD else bias_dtype(x)) if asked else None
            for x, asked in zip(learned, wanted, strict=True)
        ]
        gradient = ctx.numbers[0].with_tensors(onto_learned)  # whose parts are where the gradients of a part go
        numbers = (ctx.numbers[0].with_tensors(learned), *ctx.numbers[1:])
        for blocks, parts in _rows(numbers, q, k):
            for part in parts:
                here = (slice(None), part.heads, part.rows)
                mean = torch.linalg.vecdot(y[here], grad[here])
                mean = (mean if grad_lse is None else mean - grad_lse[here])[..., None]
                for block in blocks:
                    k_here, v_here = part.those_of(k, block.keys), part.those_of(v, block.keys)
                    some = block.bias.of_heads(part.heads)
                    asked = zip(some.tensors, wanted, strict=True)
                    leaves = [x if x is None else x.detach().requires_grad_(is_asked) for x, is_asked in asked]
                    with torch.enable_grad():
                        bias = some.with_tensors(leaves).dense()
                    weights, bounded = part.scores(k_here, bias.detach())
                    weights.sub_(lse[here][..., None]).clamp_(min=SMALLEST).exp_()
                    if block.hidden is not None:
                        weights.masked_fill_(block.hidden, 0.0)
                    onto_v[:, :, block.keys].index_add_(1, part.shared, weights.mT @ grad[here])
                    of_scores = (grad[here] @ v_here.mT).sub_(mean).mul_(weights)
                    if bias.requires_grad:
                        onto = gradient.of_heads(part.heads).tile(part.rows, block.keys).tensors
                        _add_gradients(onto, leaves, bias, of_scores)
                    if bounded is not None:
                        of_scores.addcmul_(of_scores, bounded.square_(), value=-1)
                    onto_q[here] += (of_scores @ k_here).mul_(scale)
                    onto_k[:, :, block.keys].index_add_(1, part.shared, of_scores.mT @ part.q)
        totals = (total if total is None else total.to(x.dtype) for x, total in zip(learned, onto_learned, strict=True))
        return None, *(x.to(q.dtype) for x in (onto_q, onto_k, onto_v)), *totals


def _add_gradients(onto: Sequence[Tensor | None], sources: Sequence[Tensor | None], bias: Tensor, grad: Tensor) -> None:
    """The gradients of what one bias was made from, added to those of all."""
    pairs = [(total, x) for total, x in zip(onto, sources, strict=True) if total is not None and x is not None]
    gradients = torch.autograd.grad(bias, [x for _, x in pairs], grad.sum_to_size(bias.shape), allow_unused=True)
    for (total, _), gradient in zip(pairs, gradients, strict=True):
        if gradient is not None:
            total += gradient
