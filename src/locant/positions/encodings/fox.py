"""The forget gates of the Forgetting Transformer: Lin et al. 2025, https://arxiv.org/abs/2503.02130."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from locant.arguments import Real, real
from locant.positions.base import EncodingInfo, bias_dtype
from locant.positions.documents import PADDING
from locant.positions.hidden_bias import HiddenBias, OfTokens, projected
from locant.positions.positions import Positions

__all__ = ["Fox"]

GRID = 2.0**-30
"""Logarithms of gates are rounded to this: sums down to minus eight million then have no rounding, and so no order."""
AT_ONCE = 2**22
"""Numbers of cached tokens that are compared with new ones at a time."""


class Fox(HiddenBias):
    r"""Each token may forget what came before it: the scores of earlier keys fall by the logarithm of its gate.

    .. math:: b_{ij} = - \left| c_i - c_j \right|, \qquad c_i = \sum_{l \le i} \log \sigma(w_h \cdot x_l + \beta_h)

    For a key before the query that is the paper's sum of logarithms from the key, which does not count, to the query,
    which does. It is ALiBi with distances that depend on the data: where every gate is the same, the bias falls by the
    same for every token. The paper is causal; here a later key is as far away as an earlier one.

    A token needs one number per head, its running sum within its document. It is kept in float64 and without rounding,
    so that neighbours far down a long row still differ by what they should, and rows that are padded, packed or
    cached have the same bits as alone. Each gate has an error of at most 2**-31, also summed: 3e-5 in 65 536 tokens.

    In the paper every layer has gates of its own: an encoding for each layer. The gates are made from the hidden
    states that queries and keys are made from.

    Args:
        num_heads: the number of query heads.
        d_model: the width of the hidden states.
        initial: of the bias of the gates; 0, as in the paper's models: gates begin near one half. With 5 a thousandth
            of the weight of a key is forgotten with every seven tokens.
        head_slice: the heads of this rank under tensor parallelism; default: all.

    Measured on a CPU, with two threads, for 8 192 tokens of 8 heads of 64, against plain causal attention: 1.3 times
    its time and 1.06 times its memory beyond queries, keys and values; with the backward pass 2.0 times its time.

    Limits:
        What is forgotten stays so: a sum only falls. `KVCache` carries the running sums, and `StaticKVCache` and
        `PagedKVCache` where they are given the encoding. A static graph of `torch.compile` holds the matrix. It goes
        with the causal mask: without one, torch's fused kernel has no part in it.

    Tested against:
        The paper's formula in NumPy, forward and every gradient; attention in float64 with the matrix written out.

    >>> fox, x, q = Fox(8, 512), torch.randn(2, 5, 512), torch.randn(2, 8, 5, 64)
    >>> positions = fox.read(x, Positions.arange(5))
    >>> fox.bias(q, q, positions).shape
    torch.Size([2, 8, 5, 5])
    """

    info = EncodingInfo(
        name="fox",
        aliases=("forgetting", "forget_gates"),
        kind="relative",
        parameters="num_heads x (d_model + 1)",
        cost_of_tokens="a product per head",
        cost_of_pairs="one difference",
        extrapolation="good: what is forgotten stays so",
        used_by="its paper's models",
        paper="Lin 2025, arXiv 2503.02130",
    )

    def __init__(self, num_heads: int, d_model: int, *, initial: Real = 0.0, head_slice: slice | None = None) -> None:
        super().__init__(num_heads, d_model, head_slice=head_slice)
        self.initial = real("initial", initial, remedy="initial=0.0, gates that begin at one half")
        here = len(self.heads)
        self.weight = nn.Parameter(torch.empty(here, self.d_model))
        self.offset = nn.Parameter(torch.empty(here))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        full = self.weight.new_empty(self.num_heads, self.d_model)
        self.heads.fill(self.weight, nn.init.normal_(full, std=self.d_model**-0.5))
        nn.init.constant_(self.offset, self.initial)

    def gates(self, x: Float[Tensor, "batch seq d_model"]) -> Float[Tensor, "batch seq heads"]:
        """The logarithm of every token's gate, in float64."""
        dtype = bias_dtype(x)
        gates = F.logsigmoid(projected(x, self.weight, torch.float64) + self.offset.double())
        return gates if dtype == torch.float64 else gates + ((gates / GRID).round() * GRID - gates).detach()

    def of_hidden(
        self, x: Float[Tensor, "batch seq d_model"], positions: Positions, past: Positions | None
    ) -> OfTokens:
        """The running sums within documents, which go on from those of the cached tokens."""
        gates = self.gates(x)
        if positions.document_or_none is not None:
            gates = gates.masked_fill((positions.document_or_none == PADDING)[..., None], 0.0)
        sums = gates.cumsum(1) if positions.start is not None else _within_documents(gates, positions)
        if past is not None:
            sums = sums + _last(positions, past, self.require_read("past", past.read.of_key))
        return sums, sums

    def of_row(self, queries: Tensor | None, keys: Tensor, everyone: Positions, rank: int, ranks: int) -> OfTokens:
        """The sums of each rank's part are taken apart into gates, without rounding, and summed over the row."""
        own = [everyone.slice(i * everyone.seq_len // ranks, (i + 1) * everyone.seq_len // ranks) for i in range(ranks)]
        gates = [_gates(sums, where) for sums, where in zip(keys.chunk(ranks, dim=1), own, strict=True)]
        sums = _within_documents(torch.cat(gates, dim=1), everyone)
        return sums.chunk(ranks, dim=1)[rank], sums

    def of_pair(self, queries: Tensor | None, keys: Tensor | None, head: Tensor) -> Tensor:
        """The difference in float64, rounded once."""
        queries, keys = self._read(queries, keys)
        return -(queries - keys).to(bias_dtype(self.weight)).abs()

    far = 0

    def of_far(self, queries: Tensor | None, keys: Tensor | None) -> tuple[Tensor, Tensor]:
        """Both from the first of the queries, in float64: a float32 of the whole sums could not tell neighbours."""
        queries, keys = self._read(queries, keys)
        first = queries[:, :, :1]
        of_query, of_key = (x.to(bias_dtype(self.weight)) for x in (queries - first, first - keys))
        return of_query, of_key.contiguous()

    def _read(self, queries: Tensor | None, keys: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.require_read("positions", queries), self.require_read("k_positions", keys)


def _within_documents(gates: Float[Tensor, "batch seq heads"], positions: Positions) -> Tensor:
    """Running sums that begin anew with every document, in the order of its tokens, wherever these stand."""
    slots, begins = _in_order(positions)
    ordered = gates.gather(1, slots[..., None].expand_as(gates))
    first = torch.where(begins, torch.arange(slots.shape[1], device=slots.device), 0).cummax(1).values
    sums = ordered.cumsum(1)
    before = (sums - ordered).gather(1, first[..., None].expand_as(sums))
    return (sums - before).gather(1, slots.argsort(dim=1)[..., None].expand_as(sums))


def _gates(sums: Float[Tensor, "batch seq heads"], positions: Positions) -> Tensor:
    """The gates that `_within_documents` makes these sums of."""
    slots, begins = _in_order(positions)
    ordered = sums.gather(1, slots[..., None].expand_as(sums))
    before = F.pad(ordered[:, :-1], (0, 0, 1, 0)).masked_fill(begins[..., None], 0.0)
    return (ordered - before).gather(1, slots.argsort(dim=1)[..., None].expand_as(sums))


def _in_order(positions: Positions) -> tuple[Int[Tensor, "batch seq"], Bool[Tensor, "batch seq"]]:
    """The slots of tokens document by document, each in its order, and where a document begins."""
    by_order = positions.order.argsort(dim=1, stable=True)
    document, back = positions.document.gather(1, by_order).sort(dim=1, stable=True)
    begins = torch.ones_like(document, dtype=torch.bool)
    begins[:, 1:] = document.diff(dim=1) != 0
    return by_order.gather(1, back), begins


def _last(
    positions: Positions, past: Positions, sums: Float[Tensor, "batch cached heads"]
) -> Float[Tensor, "batch some heads"]:
    """The sum that the cached tokens of each new token's document have come to: sums only fall, so it is the least."""
    if positions.document_or_none is None and past.document_or_none is None:
        return sums.amin(1, keepdim=True)
    cached = past.document[:, None, :, None]
    at_once = max(1, AT_ONCE // max(sums.numel(), 1))
    return torch.cat(
        [
            sums[:, None].where(part[:, :, None, None] == cached, 0.0).amin(2)
            for part in positions.document.split(at_once, dim=1)
        ],
        dim=1,
    )
