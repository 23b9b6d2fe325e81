"""Attention with a `Lookup` or `Pairwise` bias: a block of queries and keys at a time, forward and backward.

Any part of such a bias can be computed separately, and the gradient of the bias is the gradient of the scores. So
neither the whole bias nor its whole gradient is stored. The forward and the backward pass compute the bias of one block
for some heads. The log-sum-exps combine the blocks into the softmax over a row. Scores are in float32 at least, and
only a few times `MAX_SCORES` scores exist at a time.

At a distance of `far` or more, the bias is the sum of one number for the query and one number for the key. For such
keys the forward pass uses torch's fused kernel. The numbers of the keys are a mask whose rows all share one memory. The
number of the query is added to the log-sum-exp.
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
from locant.attention.inputs import AttentionInputs, AttentionResult
from locant.attention.mask import AttentionMask
from locant.positions.distances import bias_dtype
from locant.positions.score_bias import Lookup, Pairwise

BLOCK = 256
"""The number of queries, and of keys, in a block."""
MAX_SCORES = 2**16
"""The number of scores to compute at a time. It determines the number of heads."""
HIDDEN_SCORE = -1e30
"""The score of a key that the mask does not allow. A row of infinities would give NaN."""
MAX_FAR_KEYS = 4096
"""The largest number of keys in a call of torch's kernel. They are copied for every head."""
MIN_LOG_WEIGHT = -80.0
"""The smallest logarithm of a weight in the backward pass. Arithmetic near the smallest float32 numbers is slow."""

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # this kernel also returns the log-sum-exp

BlockBias = Lookup | Pairwise
"""A bias whose parts can be computed separately."""
Arguments = tuple[BlockBias, AttentionMask, Real, Real | None]
"""The bias, the mask, the scale and the soft cap."""


def attention_by_blocks(inputs: AttentionInputs) -> AttentionResult:
    """Return the output and the log-sum-exp of every query, without dropout, on a CPU."""
    bias = cast("BlockBias", inputs.bias)
    tensors = bias.tensors
    arguments: Arguments = (bias.with_tensors([None] * len(tensors)), inputs.mask, inputs.scale, inputs.softcap)
    y, lse = _BlockwiseAttention.apply(arguments, inputs.q, inputs.k, inputs.v, *tensors)
    return AttentionResult(y.to(inputs.q.dtype), lse)


class _Block(NamedTuple):
    """A block of keys to which at least one query of a tile attends."""

    keys: slice
    mask: AttentionMask
    hidden: Bool[Tensor, "#batch 1 query key"] | None
    """The pairs that the mask does not allow, or ``None`` if it allows all pairs."""
    far: bool
    """True if the bias is the sum of one number for the query and one number for the key."""
    bias: BlockBias


@dataclass(frozen=True)
class _Rows:
    """Some heads of a tile of queries."""

    arguments: Arguments
    num_heads: int
    heads: slice
    shared: Tensor
    """The key head of each of these heads."""
    rows: slice
    q: Float[Tensor, "batch heads query head_dim"]
    """The queries times the scale."""

    def select(self, x: Tensor, keys: slice) -> Float[Tensor, "batch heads key _"]:
        """Return some keys or values for each head, in the dtype of the computation."""
        if x.shape[1] == self.num_heads:
            return x[:, self.heads, keys].to(self.q.dtype)
        return x[:, self.shared, keys].to(self.q.dtype)

    def scores(self, k: Tensor, bias: Tensor) -> tuple[Float[Tensor, "batch heads query key"], Tensor | None]:
        """Return the scores with the bias. With a soft cap, also return the bounded scores divided by the soft cap."""
        softcap = self.arguments[3]
        if softcap is None:
            return (self.q @ k.mT).add_(bias), None
        bounded = (self.q / softcap @ k.mT).tanh_()
        return torch.add(bias, bounded, alpha=softcap), bounded

    def attend(self, block: _Block, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output and the log-sum-exp over the keys of a block."""
        block_k, block_v = (self.select(x, block.keys) for x in (k, v))
        if block.far:
            query_bias, key_bias = block.bias.select_heads(self.heads).far_terms()
            row = None if key_bias is None else key_bias[:, :, None].to(self.q.dtype).expand(*self.q.shape[:3], -1)
            width = max(self.q.shape[-1], v.shape[-1])
            y, lse = FLASH(*(_pad_width(x, width) for x in (self.q, block_k, block_v)), attn_mask=row, scale=1.0)
            return y[..., : v.shape[-1]], lse if query_bias is None else lse + query_bias
        scores, _ = self.scores(block_k, block.bias.select_heads(self.heads).dense())
        if block.hidden is not None:
            scores.masked_fill_(block.hidden, HIDDEN_SCORE)
        weights = torch.softmax(scores, -1)
        lse = scores.amax(-1) - weights.amax(-1).log()  # the largest weight is 1 / sum(exp(score - largest score))
        return weights @ block_v, lse


def _pad_width(x: Tensor, width: int) -> Tensor:
    """Pad vectors to one width with zeros, which keep the scores. Make each vector contiguous for the kernel."""
    x = x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


def _tiles(arguments: Arguments, q: Tensor, k: Tensor) -> Iterator[tuple[list[_Block], list[_Rows]]]:
    """Yield the blocks of keys and the groups of heads for each tile of queries."""
    scale = arguments[2]
    num_heads = max(1, MAX_SCORES // (q.shape[0] * BLOCK * BLOCK))
    shared = torch.arange(q.shape[1]) // (q.shape[1] // k.shape[1])
    for start in range(0, q.shape[2], BLOCK):
        rows = slice(start, min(start + BLOCK, q.shape[2]))
        scaled_q = q[:, :, rows].to(bias_dtype(q)) * scale
        groups = [slice(head, min(head + num_heads, q.shape[1])) for head in range(0, q.shape[1], num_heads)]
        parts = [_Rows(arguments, q.shape[1], heads, shared[heads], rows, scaled_q[:, heads]) for heads in groups]
        yield _blocks(arguments, rows), parts


def _blocks(arguments: Arguments, rows: slice) -> list[_Block]:
    """Return the blocks of keys to which these queries attend."""
    bias, mask, _, softcap = arguments
    tile, keys = mask.tile(rows.start, rows.stop)
    blocks: list[_Block] = []
    for start in range(keys.start, keys.stop, BLOCK):
        part = slice(start, min(start + BLOCK, keys.stop))
        block_mask = AttentionMask(tile.queries, mask.keys.slice(part.start, part.stop), mask.causal, mask.window)
        queries, block_keys = block_mask.queries, block_mask.keys
        allowed = None if block_mask.is_full else queries.mask(block_keys, causal=mask.causal, window=mask.window)
        if allowed is None or bool(allowed.all()):
            limit = bias.far if mask.causal and softcap is None else None
            is_far = limit is not None and int(queries.index.amin() - block_keys.index.amax()) >= limit
            blocks.append(_Block(part, block_mask, None, is_far, bias.tile(rows, part)))
        elif bool(allowed.any()):
            blocks.append(_Block(part, block_mask, ~allowed, False, bias.tile(rows, part)))
    return blocks


def _merge_far_blocks(bias: BlockBias, rows: slice, mask: AttentionMask, blocks: list[_Block]) -> list[_Block]:
    """Merge adjacent far blocks into one block, and return all blocks."""
    merged: list[_Block] = []
    for block in blocks:
        last = merged[-1] if merged else block
        is_adjacent = last.far and block.far and last.keys.stop == block.keys.start
        if is_adjacent and block.keys.stop - last.keys.start <= MAX_FAR_KEYS:
            keys = slice(last.keys.start, block.keys.stop)
            both = AttentionMask(block.mask.queries, mask.keys.slice(keys.start, keys.stop), mask.causal, mask.window)
            merged[-1] = _Block(keys, both, None, True, bias.tile(rows, keys))
        else:
            merged.append(block)
    return merged


class _BlockwiseAttention(torch.autograd.Function):
    """Attention with gradients for queries, keys, values, token features and the encoding's parameters.

    The output is in the dtype of the computation, because the backward pass subtracts the product of the output and its
    gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, arguments: Arguments, q: Tensor, k: Tensor, v: Tensor, *learned: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.arguments = arguments
        arguments = (arguments[0].with_tensors(learned), *arguments[1:])
        wide = bias_dtype(q)
        y = q.new_zeros(*q.shape[:3], v.shape[-1], dtype=wide)
        lse = q.new_full(q.shape[:3], HIDDEN_SCORE, dtype=wide)
        for blocks, parts in _tiles(arguments, q, k):
            merged = _merge_far_blocks(arguments[0], parts[0].rows, arguments[1], blocks)
            for part in parts:
                part_y, part_lse = y[:, part.heads, part.rows], lse[:, part.heads, part.rows]
                for block in merged:
                    block_y, block_lse = part.attend(block, k, v)
                    total_lse = torch.logaddexp(part_lse, block_lse)
                    part_y *= (part_lse - total_lse).exp_()[..., None]
                    part_y += block_y.mul_((block_lse - total_lse).exp_()[..., None])
                    part_lse.copy_(total_lse)
        has_no_keys = lse <= HIDDEN_SCORE / 2
        y.masked_fill_(has_no_keys[..., None], 0.0)
        lse.masked_fill_(has_no_keys, float("-inf"))
        ctx.save_for_backward(q, k, v, y, lse, *learned)
        ctx.set_materialize_grads(False)  # most calls do not need the gradient of the log-sum-exp
        return y, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]  # decorated
        q, k, v, y, lse, *learned = ctx.saved_tensors
        grad, grad_lse = grads
        scale = ctx.arguments[2]
        grad = torch.zeros_like(y) if grad is None else grad
        grad_q, grad_k, grad_v = (torch.zeros_like(x, dtype=y.dtype) for x in (q, k, v))
        needs_grad = ctx.needs_input_grad[4:]
        grad_learned = [
            torch.zeros_like(x, dtype=torch.float64 if x.numel() < MAX_SCORES else bias_dtype(x)) if needed else None
            for x, needed in zip(learned, needs_grad, strict=True)
        ]
        gradient = ctx.arguments[0].with_tensors(grad_learned)  # its parts are views of the gradients of a part
        arguments = (ctx.arguments[0].with_tensors(learned), *ctx.arguments[1:])
        for blocks, parts in _tiles(arguments, q, k):
            for part in parts:
                index = (slice(None), part.heads, part.rows)
                mean = torch.linalg.vecdot(y[index], grad[index])
                mean = (mean if grad_lse is None else mean - grad_lse[index])[..., None]
                for block in blocks:
                    block_k, block_v = part.select(k, block.keys), part.select(v, block.keys)
                    part_bias = block.bias.select_heads(part.heads)
                    pairs = zip(part_bias.tensors, needs_grad, strict=True)
                    leaves = [x if x is None else x.detach().requires_grad_(needed) for x, needed in pairs]
                    with torch.enable_grad():
                        bias = part_bias.with_tensors(leaves).dense()
                    weights, bounded = part.scores(block_k, bias.detach())
                    weights.sub_(lse[index][..., None]).clamp_(min=MIN_LOG_WEIGHT).exp_()
                    if block.hidden is not None:
                        weights.masked_fill_(block.hidden, 0.0)
                    grad_v[:, :, block.keys].index_add_(1, part.shared, weights.mT @ grad[index])
                    grad_scores = (grad[index] @ block_v.mT).sub_(mean).mul_(weights)
                    if bias.requires_grad:
                        totals = gradient.select_heads(part.heads).tile(part.rows, block.keys).tensors
                        _add_gradients(totals, leaves, bias, grad_scores)
                    if bounded is not None:
                        grad_scores.addcmul_(grad_scores, bounded.square_(), value=-1)
                    grad_q[index] += (grad_scores @ block_k).mul_(scale)
                    grad_k[:, :, block.keys].index_add_(1, part.shared, grad_scores.mT @ part.q)
        totals = (total if total is None else total.to(x.dtype) for x, total in zip(learned, grad_learned, strict=True))
        return None, *(x.to(q.dtype) for x in (grad_q, grad_k, grad_v)), *totals


def _add_gradients(
    totals: Sequence[Tensor | None], sources: Sequence[Tensor | None], bias: Tensor, grad: Tensor
) -> None:
    """Add the gradients of a bias's source tensors to the total gradients."""
    pairs = [(total, x) for total, x in zip(totals, sources, strict=True) if total is not None and x is not None]
    gradients = torch.autograd.grad(bias, [x for _, x in pairs], grad.sum_to_size(bias.shape), allow_unused=True)
    for (total, _), gradient in zip(pairs, gradients, strict=True):
        if gradient is not None:
            total += gradient
