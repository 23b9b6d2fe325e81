"""Attention with a bias from hidden states: a block of queries and keys at a time, written out, forward and backward.

Such a bias is a function of two tokens, and its gradient is that of the scores: neither has to be held for all of them.
The encoding is asked for the bias of one block of some heads, in either direction. The softmax over a row is joined
from blocks by their log-sum-exp. Scores are float32 at least, and a few times `HELD` of them are all that is held.

Where keys are far enough for the bias to be a sum of a number of the query and one of the key (`HiddenBias.far`), the
forward pass goes through torch's fused kernel: the number of the key is a mask whose rows are all the same memory, and
that of the query moves the log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Iterator
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
from locant.positions.base import bias_dtype
from locant.positions.hidden_bias import HiddenBias

__all__ = ["attention_by_blocks"]

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

Numbers = tuple[HiddenBias, AttentionMask, Real, Real | None]


def attention_by_blocks(inputs: AttentionInputs) -> Attended:
    """The output and the log-sum-exp of every query, for a `HiddenBias` and without dropout; on a CPU."""
    encoding = cast("HiddenBias", inputs.encoding)
    numbers: Numbers = (encoding, inputs.mask, inputs.scale, inputs.softcap)
    read = encoding.read_of(inputs.mask.queries, inputs.mask.keys)
    y, lse = _ByBlocks.apply(numbers, inputs.q, inputs.k, inputs.v, *read, *encoding.parameters())
    return Attended(y.to(inputs.q.dtype), lse)


class _Block(NamedTuple):
    """Some keys that one of some queries or more attends to."""

    keys: slice
    mask: AttentionMask
    hidden: Bool[Tensor, "#batch 1 query key"] | None
    """What the mask does not allow; ``None`` where it allows all."""
    far: bool
    """Whether the bias is a sum of a number of the query and one of the key."""


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

    def read(self, block: _Block) -> tuple[Tensor | None, Tensor | None]:
        """What was read of the queries and of the keys, for these heads."""
        as_query, as_key = block.mask.queries.as_query, block.mask.keys.as_key
        return (
            None if as_query is None else as_query[:, :, self.heads],
            None if as_key is None else as_key[:, :, self.heads],
        )

    def bias(self, block: _Block, as_query: Tensor | None, as_key: Tensor | None) -> Tensor:
        """What is added to scores."""
        encoding = self.numbers[0]
        return encoding.of_pairs(as_query, as_key, block.mask.queries, block.mask.keys).to(self.q.dtype)

    def scores(self, k: Tensor, bias: Tensor) -> tuple[Float[Tensor, "batch heads query key"], Tensor | None]:
        """With the bias; and, over the soft cap, without it."""
        softcap = self.numbers[3]
        if softcap is None:
            return (self.q @ k.mT).add_(bias), None
        bounded = (self.q / softcap @ k.mT).tanh_()
        return torch.add(bias, bounded, alpha=softcap), bounded

    def attended(self, block: _Block, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The output and the log-sum-exp over the keys of a block."""
        k_here, v_here = self.those_of(k, block.keys), self.those_of(v, block.keys)
        if block.far:
            of_query, of_key = self.numbers[0].of_far(*self.read(block))
            row = None if of_key is None else of_key[:, :, None].to(self.q.dtype).expand(*self.q.shape[:3], -1)
            width = max(self.q.shape[-1], v.shape[-1])
            y, lse = FLASH(*(_widened(x, width) for x in (self.q, k_here, v_here)), attn_mask=row, scale=1.0)
            return y[..., : v.shape[-1]], lse if of_query is None else lse + of_query
        scores, _ = self.scores(k_here, self.bias(block, *self.read(block)))
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
    encoding, mask, _, softcap = numbers
    tile, keys = mask.tile(rows.start, rows.stop)
    found: list[_Block] = []
    for start in range(keys.start, keys.stop, BLOCK):
        part = slice(start, min(start + BLOCK, keys.stop))
        here = AttentionMask(tile.queries, mask.keys.slice(part.start, part.stop), mask.causal, mask.window)
        allowed = None if here.is_full else here.queries.mask(here.keys, causal=here.causal, window=here.window)
        if allowed is None or bool(allowed.all()):
            far = encoding.far if mask.causal and softcap is None else None
            found.append(_Block(part, here, None, far is not None and _nearest(here) >= far))
        elif bool(allowed.any()):
            found.append(_Block(part, here, ~allowed, False))
    return found


def _nearest(mask: AttentionMask) -> int:
    """The index of the first query minus that of the last key."""
    return int(mask.queries.index.amin() - mask.keys.index.amax())


def _runs(mask: AttentionMask, blocks: list[_Block]) -> list[_Block]:
    """The same keys, with neighbouring blocks that are far as one."""
    runs: list[_Block] = []
    for block in blocks:
        last = runs[-1] if runs else block
        beside = last.far and block.far and last.keys.stop == block.keys.start
        if beside and block.keys.stop - last.keys.start <= FAR_AT_ONCE:
            keys = slice(last.keys.start, block.keys.stop)
            both = AttentionMask(block.mask.queries, mask.keys.slice(keys.start, keys.stop), mask.causal, mask.window)
            runs[-1] = _Block(keys, both, None, True)
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
        wide = bias_dtype(q)
        y = q.new_zeros(*q.shape[:3], v.shape[-1], dtype=wide)
        lse = q.new_full(q.shape[:3], HIDDEN, dtype=wide)
        for blocks, parts in _rows(numbers, q, k):
            runs = _runs(numbers[1], blocks)
            for part in parts:
                y_here, lse_here = y[:, part.heads, part.rows], lse[:, part.heads, part.rows]
                for run in runs:
                    more, found = part.attended(run, k, v)
                    joined = torch.logaddexp(lse_here, found)
                    y_here *= (lse_here - joined).exp_()[..., None]
                    y_here += more.mul_((found - joined).exp_()[..., None])
                    lse_here.copy_(joined)
        without_keys = lse <= HIDDEN / 2
        y.masked_fill_(without_keys[..., None], 0.0)
        lse.masked_fill_(without_keys, float("-inf"))
        ctx.numbers = numbers
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
        onto_learned = [torch.zeros_like(x) if asked else None for x, asked in zip(learned, wanted, strict=True)]
        for blocks, parts in _rows(ctx.numbers, q, k):
            for part in parts:
                here = (slice(None), part.heads, part.rows)
                mean = torch.linalg.vecdot(y[here], grad[here])
                mean = (mean if grad_lse is None else mean - grad_lse[here])[..., None]
                for block in blocks:
                    k_here, v_here = part.those_of(k, block.keys), part.those_of(v, block.keys)
                    read = [None if x is None else x.detach().requires_grad_() for x in part.read(block)]
                    with torch.enable_grad():
                        bias = part.bias(block, *read)
                    weights, bounded = part.scores(k_here, bias.detach())
                    weights.sub_(lse[here][..., None]).clamp_(min=SMALLEST).exp_()
                    if block.hidden is not None:
                        weights.masked_fill_(block.hidden, 0.0)
                    onto_v[:, :, block.keys].index_add_(1, part.shared, weights.mT @ grad[here])
                    of_scores = (grad[here] @ v_here.mT).sub_(mean).mul_(weights)
                    if bias.requires_grad:
                        slots = ((part.rows, part.heads), (block.keys, part.heads))
                        _add_gradients(onto_learned, [*read, *learned[2:]], slots, bias, of_scores)
                    if bounded is not None:
                        of_scores.addcmul_(of_scores, bounded.square_(), value=-1)
                    onto_q[here] += (of_scores @ k_here).mul_(scale)
                    onto_k[:, :, block.keys].index_add_(1, part.shared, of_scores.mT @ part.q)
        return None, *(x.to(q.dtype) for x in (onto_q, onto_k, onto_v)), *onto_learned


def _add_gradients(
    onto: list[Tensor | None], sources: list[Tensor | None], slots: tuple[tuple[slice, slice], ...], bias: Tensor,
    grad: Tensor,
) -> None:  # fmt: skip
    """The gradients of what one bias was made from, added to those of what was read and of the parameters."""
    asked = [i for i, (total, x) in enumerate(zip(onto, sources, strict=True)) if total is not None and x is not None]
    found = torch.autograd.grad(bias, [sources[i] for i in asked], grad.sum_to_size(bias.shape), allow_unused=True)  # type: ignore[misc]
    for i, gradient in zip(asked, found, strict=True):
        total = onto[i]
        if gradient is not None and total is not None:
            part = total[:, *slots[i]] if i < len(slots) else total
            part += gradient
