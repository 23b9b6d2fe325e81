"""CABLE: context-aware biases for length extrapolation. Veisi et al. 2025, https://arxiv.org/abs/2503.08067."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from locant.arguments import flag
from locant.positions.base import EncodingInfo
from locant.positions.distances import bias_dtype
from locant.positions.hidden_bias import project
from locant.positions.positions import Positions
from locant.positions.running_sums import RunningSums


class Cable(RunningSums):
    r"""ALiBi in which the distance between neighbouring tokens and the slope of each query depend on hidden states.

    .. math:: b_{ij} = - g_i \left| S_i - S_j \right|, \qquad S_i = \sum_{l \le i} \mathrm{ReLU}(w_h \cdot x_l), \qquad
        g_i = \mathrm{softplus}(u_h \cdot x_i)

    With steps of 1 and one slope per head, this is `ALiBi`. The distance is subtracted, as in the authors' code. The
    paper's equations use negative steps instead. The paper uses only causal attention. Here a later key is as far away
    as an earlier one. In the paper every layer has its own steps and slopes, so build an encoding for each layer.

    Args:
        num_heads, d_model, head_slice: as in `HiddenBias`.
        weighted: whether the slopes depend on queries. Otherwise all slopes are 1 (the paper's CABLE-NW).

    Limits:
        If a token's step is 0 in a head, the step has no gradient there. With slopes, `Cable` has no score function, so
        it cannot use FlexAttention's kernels. `KVCache` stores the running sums. `StaticKVCache` and `PagedKVCache`
        store them if you pass the encoding. The authors' first code uses a softplus and an offset for the steps, and no
        slopes. That is `Fox` with weights of the opposite sign.

    Tested against:
        The paper's formula in NumPy, forward and every gradient, and attention in float64 with the full matrix.

    >>> cable, x, q = Cable(8, 512), torch.randn(2, 5, 512), torch.randn(2, 8, 5, 64)
    >>> positions = cable.read(x, Positions.arange(5))
    >>> cable.bias(q, q, positions).shape
    torch.Size([2, 8, 5, 5])
    """

    info = EncodingInfo(
        name="cable",
        aliases=("context_aware",),
        kind="relative",
        parameters="2 num_heads x d_model",
        cost_of_tokens="two products per head",
        cost_of_pairs="a difference and a product",
        extrapolation="good in its paper: 15 times the trained length",
        used_by="its paper's models",
        paper="Veisi 2025, arXiv 2503.08067",
    )

    def __init__(self, num_heads: int, d_model: int, *, weighted: bool = True, head_slice: slice | None = None) -> None:
        super().__init__(num_heads, d_model, head_slice=head_slice)
        self.weighted = flag("weighted", weighted)
        self.slope = nn.Parameter(torch.empty_like(self.weight)) if self.weighted else None
        self.far = None if self.weighted else super().far
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.slope is not None:
            full = self.slope.new_empty(self.num_heads, self.d_model)
            self.heads.fill(self.slope, nn.init.normal_(full, std=self.d_model**-0.5))

    def of_product(self, product: Float[Tensor, "batch seq heads"]) -> Float[Tensor, "batch seq heads"]:
        return -product.relu()

    def of_hidden(
        self, x: Float[Tensor, "batch seq d_model"], positions: Positions, past: Positions | None
    ) -> tuple[Tensor, Tensor]:
        """Return the running sums of every token, and for queries also the slope."""
        queries, sums = super().of_hidden(x, positions, past)
        if self.slope is None:
            return queries, sums
        return torch.stack([queries, F.softplus(project(x, self.slope, torch.float64))], -1), sums

    def of_row(
        self, queries: Tensor | None, keys: Tensor, row: Positions, rank: int, ranks: int
    ) -> tuple[Tensor, Tensor]:
        sums, keys = super().of_row(queries, keys, row, rank, ranks)
        if self.slope is not None:
            sums = torch.stack([sums, self.require_features("positions", queries)[..., 1]], -1)
        return sums, keys

    def of_pair(self, queries: Tensor | None, keys: Tensor | None, head: Tensor) -> Tensor:
        """Return the difference of the sums, computed in float64 and rounded once, times the slope."""
        if self.slope is None:
            return super().of_pair(queries, keys, head)
        queries = self.require_features("positions", queries)
        slope = queries[..., 1].to(bias_dtype(self.weight))
        return slope * super().of_pair(queries[..., 0], keys, head)

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.weighted else ", weighted=False")
