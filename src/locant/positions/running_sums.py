"""`RunningSums`: the base of biases that fall by a number of every token between the key and the query (FoX, CABLE)."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from locant.errors import LocantError
from locant.positions.documents import PADDING
from locant.positions.hidden_bias import HiddenBias, projected
from locant.positions.pairs import bias_dtype
from locant.positions.positions import Positions

GRID = 2.0**-30
"""Numbers are rounded to this: sums down to minus eight million then have no rounding, and so no order."""
AT_ONCE = 2**22
"""Numbers of cached tokens that are compared with new ones at a time."""


class RunningSums(HiddenBias):
    """A bias that falls, from a token to the next, by what the product of its hidden state with a vector says.

    A token needs one number per head, its running sum within its document. It is kept in float64 and without rounding,
    so that neighbours far down a long row still differ by what they should, and rows that are padded, packed or
    cached have the same bits as alone. Each number has an error of at most 2**-31, also summed: 3e-5 in 65 536 tokens.

    Args:
        num_heads, d_model, head_slice: as in `HiddenBias`.

    >>> class Falling(RunningSums):
    ...     '''By the square of the product.'''
    ...     def of_product(self, product):
    ...         return -product.square()
    >>> falling, x, q = Falling(2, 8), torch.ones(1, 3, 8), torch.zeros(1, 2, 3, 4)
    >>> nn.init.constant_(falling.weight, 1 / 8).shape
    torch.Size([2, 8])
    >>> falling.bias(q, q, falling.read(x, Positions.arange(3)))[0, 1, 2].tolist()
    [-2.0, -1.0, -0.0]
    """

    def __init__(self, num_heads: int, d_model: int, *, head_slice: slice | None = None) -> None:
        super().__init__(num_heads, d_model, head_slice=head_slice)
        self.weight = nn.Parameter(torch.empty(len(self.heads), self.d_model))
        RunningSums.reset_parameters(self)

    def reset_parameters(self) -> None:
        full = self.weight.new_empty(self.num_heads, self.d_model)
        self.heads.fill(self.weight, nn.init.normal_(full, std=self.d_model**-0.5))

    def of_product(self, product: Float[Tensor, "batch seq heads"]) -> Float[Tensor, "batch seq heads"]:
        """By how much a token moves all before it, 0 or less, in float64: a subclass writes this."""
        raise LocantError(f"{type(self).__name__} does not define of_product", "def of_product(self, product)")

    def of_token(self, x: Float[Tensor, "batch seq d_model"]) -> Float[Tensor, "batch seq heads"]:
        """`of_product` of every token, in float64; on a grid, unless `x` is in float64, too."""
        steps = self.of_product(projected(x, self.weight, torch.float64))
        return steps if bias_dtype(x) == torch.float64 else steps + ((steps / GRID).round() * GRID - steps).detach()

    def of_hidden(
        self, x: Float[Tensor, "batch seq d_model"], positions: Positions, past: Positions | None
    ) -> tuple[Tensor, Tensor]:
        """The running sums within documents, which go on from those of the cached tokens."""
        steps = self.of_token(x)
        if positions.document_or_none is not None:
            steps = steps.masked_fill((positions.document_or_none == PADDING)[..., None], 0.0)
        sums = steps.cumsum(1) if positions.start is not None else _within_documents(steps, positions)
        if past is not None:
            sums = sums + _last(positions, past, self.require_read("past", past.read.of_key))
        return sums, sums

    def of_row(
        self, queries: Tensor | None, keys: Tensor, everyone: Positions, rank: int, ranks: int
    ) -> tuple[Tensor, Tensor]:
        """The sums of each rank's part are taken apart, without rounding, and summed over the row."""
        own = [everyone.slice(i * everyone.seq_len // ranks, (i + 1) * everyone.seq_len // ranks) for i in range(ranks)]
        steps = [_steps(sums, where) for sums, where in zip(keys.chunk(ranks, dim=1), own, strict=True)]
        sums = _within_documents(torch.cat(steps, dim=1), everyone)
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


def _within_documents(steps: Float[Tensor, "batch seq heads"], positions: Positions) -> Tensor:
    """Running sums that begin anew with every document, in the order of its tokens, wherever these stand."""
    slots, begins = _in_order(positions)
    ordered = steps.gather(1, slots[..., None].expand_as(steps))
    first = torch.where(begins, torch.arange(slots.shape[1], device=slots.device), 0).cummax(1).values
    sums = ordered.cumsum(1)
    before = (sums - ordered).gather(1, first[..., None].expand_as(sums))
    return (sums - before).gather(1, slots.argsort(dim=1)[..., None].expand_as(sums))


def _steps(sums: Float[Tensor, "batch seq heads"], positions: Positions) -> Tensor:
    """What `_within_documents` makes these sums of."""
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
