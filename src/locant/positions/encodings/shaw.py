"""Relative key embeddings: Shaw, Uszkoreit and Vaswani 2018, https://arxiv.org/abs/1803.02155."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from locant.arguments import MAX_WIDTH, Real, flag, scale_of, whole
from locant.positions.base import EncodingInfo
from locant.positions.distance_bias import RowBias
from locant.positions.encodings import INIT_STD
from locant.spelling import literal


class Shaw(RowBias):
    r"""Adds the product of the query with a learned vector for each distance, in either direction.

    .. math:: b_{ij} = s \; q_i \cdot a_{\mathrm{clip}(j - i, -D, D)}

    s is `scale` and D is `max_distance`. Keys that are farther away share the last vector. All heads share the table,
    as in the paper. `key_term` also adds ``k_j . a`` (BERT's ``relative_key_query``). The paper's second table, which
    is added to the values, is not included, because it is not a bias. According to the paper's ablation (table 3), the
    keys' table is enough.

    `scale` has to equal the scale of `attend`, which adds a bias to scaled scores. It costs one score per token and row
    of the table (``2 max_distance + 1`` rows, in float64 during the computation) and a look-up per pair of tokens and
    head.

    Args:
        head_dim: dimensions per head.
        max_distance: the largest distance of an earlier key with its own vector.
        max_later: the largest distance of a later key with its own vector. Default: `max_distance`.
        key_term: whether to add the keys' products, too.
        scale: the factor of the products. Default: ``head_dim ** -0.5``, as in `attend`.

    Limits:
        It does not distinguish distances beyond `max_distance`.

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
        cost_of_pairs="one look-up, and one stored number",
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
        scale: Real | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = whole("head_dim", head_dim, 1, MAX_WIDTH, remedy="pass the width of a head")
        self.max_distance = whole("max_distance", max_distance, 0, remedy="pass a number of tokens")
        max_later = self.max_distance if max_later is None else max_later
        self.max_later = whole("max_later", max_later, 0, remedy="pass a number of tokens")
        self.ends = -self.max_later, self.max_distance
        self.key_term = self.of_keys = flag("key_term", key_term)
        self.scale = scale_of(scale, self.head_dim**-0.5)
        self.weight = nn.Parameter(torch.empty(self.max_distance + 1 + self.max_later, self.head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INIT_STD)

    def row_of(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        """Return a function from the distance to the row. Row 0 belongs to the farthest earlier key."""
        return lambda distance: (-distance).clamp(-self.max_distance, self.max_later) + self.max_distance

    def vectors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Return the table for queries, and the same table for keys if `key_term` is set."""
        return self.weight, self.weight if self.key_term else None

    def extra_repr(self) -> str:
        later = "" if self.max_later == self.max_distance else f", max_later={self.max_later}"
        term = ", key_term=True" if self.key_term else ""
        return f"head_dim={self.head_dim}, max_distance={self.max_distance}{later}{term}, scale={literal(self.scale)}"
