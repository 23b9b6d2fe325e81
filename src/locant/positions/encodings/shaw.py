"""Relative key embeddings: Shaw, Uszkoreit and Vaswani 2018, https://arxiv.org/abs/1803.02155."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from locant.arguments import MAX_WIDTH, flag, scale_of, whole
from locant.positions.base import EncodingInfo
from locant.positions.distance_bias import RowBias
from locant.positions.encodings import INIT_STD
from locant.spelling import literal


class Shaw(RowBias):
    r"""Adds the product of the query and a learned vector for each distance, in either direction.

    .. math:: b_{ij} = s \; q_i \cdot a_{\mathrm{clip}(j - i, -D, D)}

    s is `scale` and D is `max_distance`. Keys farther away than that share the vector at the end; all heads share the
    table, as in the paper. With `key_term` also ``k_j . a`` is added (BERT's ``relative_key_query``). The paper's
    second table, added to the values, is not a bias and not part of this; by its own ablation (table 3) the keys' table
    is enough.

    `scale` has to be that of `attend`, which adds a bias to scaled scores. Costs one row of scores per token over the
    table (``2 max_distance + 1`` wide, float64 while it is computed) and a look-up per pair of tokens and head.

    Args:
        head_dim: dimensions per head.
        max_distance: the farthest key before a query that has a vector of its own.
        max_later: the same for keys after it; default: `max_distance`.
        key_term: also add the keys' products.
        scale: default ``head_dim ** -0.5``, that of `attend`.

    Limits:
        All distances beyond `max_distance` are one.

    Tested against:
        `transformers`' Wav2Vec2-BERT, and the paper's formula in NumPy, forward and every gradient.

    >>> from locant import Positions
    >>> q, k = torch.randn(1, 8, 5, 64), torch.randn(1, 2, 5, 64)
    >>> shaw = Shaw(64, 16)
    >>> shaw.bias(q, k, Positions.arange(5)).shape, shaw.weight.shape
    (torch.Size([1, 8, 5, 5]), torch.Size([33, 64]))
    """

    info = EncodingInfo(
        name="shaw",
        aliases=("relative_key", "relative_key_query"),
        kind="relative",
        parameters="(2 max_distance + 1) x head_dim",
        cost_of_tokens="(2 max_distance + 1) x head_dim operations per head",
        cost_of_pairs="one look-up, held as a number",
        extrapolation="fair: all distances beyond max_distance share one vector",
        used_by="Music Transformer, Wav2Vec2-BERT, SeamlessM4T-v2",
        paper="Shaw 2018, arXiv 1803.02155",
    )

    def __init__(
        self,
        head_dim: int,
        max_distance: int = 16,
        *,
        max_later: int | None = None,
        key_term: bool = False,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = whole("head_dim", head_dim, 1, MAX_WIDTH, remedy="the width of a head")
        self.max_distance = whole("max_distance", max_distance, 0, remedy="a number of tokens")
        max_later = self.max_distance if max_later is None else max_later
        self.max_later = whole("max_later", max_later, 0, remedy="a number of tokens")
        self.ends = -self.max_later, self.max_distance
        self.key_term = self.of_keys = flag("key_term", key_term)
        self.scale = scale_of(scale, self.head_dim**-0.5)
        self.weight = nn.Parameter(torch.empty(self.max_distance + 1 + self.max_later, self.head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INIT_STD)

    def row_of(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        """Row 0 belongs to the farthest key before."""
        return lambda distance: (-distance).clamp(-self.max_distance, self.max_later) + self.max_distance

    def vectors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Queries, and with `key_term` keys, are multiplied with one table."""
        return self.weight, self.weight if self.key_term else None

    def extra_repr(self) -> str:
        later = "" if self.max_later == self.max_distance else f", max_later={self.max_later}"
        term = ", key_term=True" if self.key_term else ""
        return f"head_dim={self.head_dim}, max_distance={self.max_distance}{later}{term}, scale={literal(self.scale)}"
