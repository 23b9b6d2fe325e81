"""CoPE: contextual position encoding. Golovneva et al. 2024, https://arxiv.org/abs/2405.18719."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from locant.arguments import MAX_WIDTH, Real, scale_of, whole
from locant.kernels import cope as kernel
from locant.kernels.exact_dot import exact_dot, exact_scores
from locant.positions.base import Bias, EncodingInfo, Keys, PositionEncoding, Queries, require_tokens, resolve_positions
from locant.positions.distances import bias_dtype
from locant.positions.heads import require_query_heads
from locant.positions.positions import OptionalPositions, Positions
from locant.spelling import literal

GRID = 2.0**-30
"""The unit to which gates are rounded. Sums of up to eight million are then exact, in any order."""


class Cope(PositionEncoding):
    r"""Counts only the tokens that matter. A key's position is the sum of the gates from the key to the query.

    .. math:: g_{ij} = \sigma(s \, q_i \cdot k_j), \qquad p_{ij} = \sum_{t=j}^{i} g_{it}, \qquad
        b_{ij} = q_i \cdot e[p_{ij}]

    s is `scale`. e is interpolated between the two nearest of `max_positions` learned vectors. As in the authors' code,
    the gates use the scaled product, and the embeddings use the query without scaling. All heads share the embeddings,
    which begin as zeros.

    Gates count the tokens that a causal mask shows to the query. A sliding window of `attend` does not shorten the
    count. Keys may be in any order, but attention needs all keys between a key and the query at once. `attend` raises
    an error if positions show that some of these keys are missing. The oldest keys may be missing. Ranks cannot use
    ring attention. A later key is at position 0.

    It costs several matrices of ``batch x heads x query x key`` numbers in float64, and has no score function. Without
    gradients on a CPU, one kernel computes the bias of some queries at a time. The bits are the same.

    Args:
        head_dim: dimensions per head.
        max_positions: the number of position embeddings.
        scale: the factor of the product in the gates. Default: ``head_dim ** -0.5``, as in `attend`.

    Limits:
        Counts beyond `max_positions` share one vector.

    Tested against:
        The paper's formula in NumPy, forward and every gradient.

    >>> q, k = torch.randn(1, 8, 5, 64), torch.randn(1, 2, 5, 64)
    >>> Cope(64).bias(q, k, Positions.arange(5)).shape
    torch.Size([1, 8, 5, 5])
    """

    info = EncodingInfo(
        name="cope",
        aliases=("contextual",),
        kind="relative",
        parameters="max_positions x head_dim",
        cost_of_tokens="max_positions x head_dim operations per head",
        cost_of_pairs="a product of head_dim, a sum and two look-ups, all stored in float64",
        extrapolation="good if counted tokens are rare; counts beyond max_positions share one vector",
        used_by="its paper's models",
        paper="Golovneva 2024, arXiv 2405.18719",
    )
    needs_all_keys = True

    def __init__(self, head_dim: int, max_positions: int = 64, *, scale: Real | None = None) -> None:
        super().__init__()
        self.head_dim = whole("head_dim", head_dim, 1, MAX_WIDTH, remedy="pass the width of a head")
        self.max_positions = whole("max_positions", max_positions, 1, remedy="max_positions=64")
        self.scale = scale_of(scale, self.head_dim**-0.5)
        self.weight = nn.Parameter(torch.empty(self.max_positions, self.head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def counts(
        self, q: Queries, k: Keys, positions: OptionalPositions = None, k_positions: OptionalPositions = None
    ) -> Float[Tensor, "batch heads query key"]:
        """Return the contextual position of every key relative to every query, in float64."""
        positions, keys = self._resolve_tokens(q, k, positions, k_positions)
        dtype = bias_dtype(q)
        product = exact_scores(q, k, dtype) * self.scale
        gates = 1 / (1 + torch.exp(-product))  # the rounding of torch.sigmoid depends on the memory layout
        if dtype != torch.float64:
            gates = gates + ((gates / GRID).round() * GRID - gates).detach()
        return _sums_from_key(gates.masked_fill(~positions.mask(k_positions), 0.0), keys)

    def bias(  # pyright: ignore[reportIncompatibleMethodOverride]  # the default without keys only raises an error
        self, q: Queries, k: Keys, positions: OptionalPositions = None, k_positions: OptionalPositions = None
    ) -> Bias:
        """Return the query's product with the interpolated embedding of every count, in float32 or wider."""
        if kernel.supports(q, k, self.weight):
            queries, keys = self._resolve_tokens(q, k, positions, k_positions)
            if keys.start is not None:
                return kernel.contextual_bias(q, k, self.weight, queries.mask(k_positions), self.scale, GRID)
        count = self.counts(q, k, positions, k_positions).clamp(max=self.max_positions - 1)
        products = exact_dot(q, self.weight, bias_dtype(q))
        below, above = count.detach().floor(), count.detach().ceil()
        share = count - below
        upper, lower = (place.nan_to_num().long() for place in (above, below))  # the share keeps NaN
        bias = products.gather(3, upper) * share + products.gather(3, lower) * (1 - share)
        return bias.to(bias_dtype(q))

    def _resolve_tokens(
        self, q: Queries, k: Keys, positions: OptionalPositions, k_positions: OptionalPositions
    ) -> tuple[Positions, Positions]:
        positions, keys = resolve_positions(self, q, k, positions, k_positions)
        require_tokens(self, q, k, positions, keys, self.head_dim)
        require_query_heads(k, q.shape[1])
        return positions, keys

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, max_positions={self.max_positions}, scale={literal(self.scale)}"


def _sums_from_key(gates: Float[Tensor, "batch heads query key"], keys: Positions) -> Tensor:
    """Return the sum of the gates of each key and all later keys, in the order of tokens, not of slots."""
    if keys.start is not None:
        return gates.flip(-1).cumsum(-1).flip(-1)
    last_first = keys.order.argsort(dim=-1, descending=True, stable=True)
    slots = last_first[:, None, None, :].expand(gates.shape)
    back = last_first.argsort(dim=-1)[:, None, None, :].expand(gates.shape)
    return gates.gather(3, slots).cumsum(-1).gather(3, back)
