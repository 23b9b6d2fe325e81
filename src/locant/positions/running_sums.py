"""`RunningSums`: the base class of biases that sum one number per token between key and query (FoX, CABLE)."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from locant.errors import LocantError
from locant.positions.distances import bias_dtype
from locant.positions.documents import PADDING
from locant.positions.hidden_bias import HiddenBias, project
from locant.positions.positions import Positions

GRID = 2.0**-30
"""The unit to which numbers are rounded. Sums down to minus eight million are then exact, in any order."""
CHUNK_ELEMENTS = 2**22
"""The number of elements of cached tokens that are compared with new ones at a time."""


class RunningSums(HiddenBias):
    """A bias that decreases at every token.

    The decrease is a function of the product of the token's hidden state and a vector.

    A token needs one number per head, the running sum within its document. The sum is exact, in float64. So neighbours
    at the end of a long row still have the right difference, and padded, packed or cached rows have the same bits as
    single rows. Each number has an error of at most 2**-31, which adds up to 3e-5 in 65,536 tokens.

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
        """Return the bias that a token adds for all earlier tokens, 0 or less, in float64. Subclasses implement it."""
        raise LocantError(f"{type(self).__name__} does not define of_product", "def of_product(self, product)")

    def rounded_product(self, x: Float[Tensor, "batch seq d_model"]) -> Float[Tensor, "batch seq heads"]:
        """Return `of_product` of every token, in float64, rounded to `GRID` unless `x` is in float64, too."""
        steps = self.of_product(project(x, self.weight, torch.float64))
        return steps if bias_dtype(x) == torch.float64 else steps + ((steps / GRID).round() * GRID - steps).detach()

    def of_hidden(
        self, x: Float[Tensor, "batch seq d_model"], positions: Positions, past: Positions | None
    ) -> tuple[Tensor, Tensor]:
        """Return the running sums within documents, which continue from the sums of the cached tokens."""
        steps = self.rounded_product(x)
        if positions.document_or_none is not None:
            steps = steps.masked_fill((positions.document_or_none == PADDING)[..., None], 0.0)
        sums = steps.cumsum(1) if positions.start is not None else _sum_within_documents(steps, positions)
        if past is not None:
            sums = sums + _last_sums(positions, past, self.require_features("past", past.read.of_key))
        return sums, sums

    def of_row(
        self, queries: Tensor | None, keys: Tensor, row: Positions, rank: int, ranks: int
    ) -> tuple[Tensor, Tensor]:
        """Undo the sums of each rank's part, without rounding, and sum over the row."""
        parts = [row.slice(i * row.seq_len // ranks, (i + 1) * row.seq_len // ranks) for i in range(ranks)]
        steps = [_steps_from_sums(sums, part) for sums, part in zip(keys.chunk(ranks, dim=1), parts, strict=True)]
        sums = _sum_within_documents(torch.cat(steps, dim=1), row)
        return sums.chunk(ranks, dim=1)[rank], sums

    def of_pair(self, queries: Tensor | None, keys: Tensor | None, head: Tensor) -> Tensor:
        """Return minus the absolute difference of the sums, computed in float64 and rounded once."""
        queries, keys = self._require_both(queries, keys)
        return -(queries - keys).to(bias_dtype(self.weight)).abs()

    far = 0

    def far_terms(self, queries: Tensor | None, keys: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return both sums relative to the first query. In float32 the sums of neighbours would be the same number."""
        queries, keys = self._require_both(queries, keys)
        first = queries[:, :, :1]
        of_query, of_key = (x.to(bias_dtype(self.weight)) for x in (queries - first, first - keys))
        return of_query, of_key.contiguous()

    def _require_both(self, queries: Tensor | None, keys: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.require_features("positions", queries), self.require_features("k_positions", keys)


def _sum_within_documents(steps: Float[Tensor, "batch seq heads"], positions: Positions) -> Tensor:
    """Return running sums that restart with every document. They follow the order of tokens, not their slots.

    If a step is not finite, its sum and the later sums of its document are NaN. Other documents do not change.
    """
    slots, begins = document_order(positions)
    ordered = steps.gather(1, slots[..., None].expand_as(steps))
    first = torch.where(begins, torch.arange(slots.shape[1], device=slots.device), 0).cummax(1).values
    is_finite = ordered.isfinite()
    ordered = ordered.where(is_finite, 0.0)
    sums = ordered.cumsum(1)
    before = (sums - ordered).gather(1, first[..., None].expand_as(sums))
    sums = (sums - before).masked_fill(last_slot(~is_finite) >= first[..., None], torch.nan)
    return sums.gather(1, slots.argsort(dim=1)[..., None].expand_as(sums))


def _steps_from_sums(sums: Float[Tensor, "batch seq heads"], positions: Positions) -> Tensor:
    """Undo `_sum_within_documents`."""
    slots, begins = document_order(positions)
    ordered = sums.gather(1, slots[..., None].expand_as(sums))
    before = F.pad(ordered[:, :-1], (0, 0, 1, 0)).masked_fill(begins[..., None], 0.0)
    return (ordered - before).gather(1, slots.argsort(dim=1)[..., None].expand_as(sums))


def document_order(positions: Positions) -> tuple[Int[Tensor, "batch seq"], Bool[Tensor, "batch seq"]]:
    """Return the slots of tokens sorted by document and order, and whether each begins a document."""
    by_order = positions.order.argsort(dim=1, stable=True)
    document, back = positions.document.gather(1, by_order).sort(dim=1, stable=True)
    begins = torch.ones_like(document, dtype=torch.bool)
    begins[:, 1:] = document.diff(dim=1) != 0
    return by_order.gather(1, back), begins


def last_slot(marked: Bool[Tensor, "batch seq heads"]) -> Int[Tensor, "batch seq heads"]:
    """Return the slot of the last marked token up to each token, or -1 if there is none."""
    slots = torch.arange(marked.shape[1], device=marked.device)[:, None]
    return torch.where(marked, slots, -1).cummax(1).values


def _last_sums(
    positions: Positions, past: Positions, sums: Float[Tensor, "batch cached heads"]
) -> Float[Tensor, "batch some heads"]:
    """Return the last sum in the cache for each new token's document. Sums only fall, so it is the minimum."""
    if positions.document_or_none is None and past.document_or_none is None:
        return sums.amin(1, keepdim=True)
    cached = past.document[:, None, :, None]
    at_once = max(1, CHUNK_ELEMENTS // max(sums.numel(), 1))
    return torch.cat(
        [
            sums[:, None].where(part[:, :, None, None] == cached, 0.0).amin(2)
            for part in positions.document.split(at_once, dim=1)
        ],
        dim=1,
    )
