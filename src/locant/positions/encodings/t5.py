"""T5's relative bias: Raffel et al. 2020, https://arxiv.org/abs/1910.10683, section 2.1."""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from locant.arguments import flag, whole
from locant.positions.base import EncodingInfo
from locant.positions.constant import Constant
from locant.positions.distance_bias import DistanceBias
from locant.positions.distances import MAX_DISTANCE, bias_dtype
from locant.positions.encodings import INIT_STD


class T5Bias(DistanceBias):
    r"""Adds a learned number per head and bucket of distances. Buckets widen logarithmically up to `max_distance`.

    .. math:: b_{hij} = W_{\delta(i - j),\, h}, \qquad
        \delta(n) = \begin{cases} n & n < B/2 \\
        B/2 + \left\lfloor \frac{B}{2} \cdot \frac{\log(2n / B)}{\log(2D / B)} \right\rfloor & \text{beyond} \end{cases}

    B is `num_buckets` and D is `max_distance`. Half of the buckets hold one small distance each. The rest share the
    other distances, and the last bucket holds all distances of D or more. One module serves all layers of a model, as
    in T5. In calls without gradients on a CPU, ``distances x num_heads`` numbers are kept for later calls while the
    parameter has the same values.

    Args:
        num_heads, head_slice: as in `DistanceBias`.
        num_buckets: the number of rows of the table.
        max_distance: the distance from which all distances share a bucket.
        bidirectional: whether earlier and later keys have different buckets, half of the buckets each (encoders).
            Otherwise (decoders) later keys are in the bucket of distance 0, and a causal mask hides them.

    Limits:
        It does not distinguish distances beyond `max_distance`.

    Tested against:
        `transformers`' T5 attention: every distance, both directions, and gradients.

    >>> T5Bias(8).matrix(5).shape
    torch.Size([8, 5, 5])
    """

    info = EncodingInfo(
        name="t5",
        aliases=("relative", "t5_bias", "rel_pos", "relative_bias", "relative_position_bias"),
        kind="relative",
        parameters="num_buckets x num_heads",
        cost_of_tokens="nothing",
        cost_of_pairs="two look-ups and an addition",
        extrapolation="fair: all distances beyond max_distance share one bucket",
        used_by="T5, mT5, Flan-T5, UL2",
        paper="Raffel 2020, arXiv 1910.10683",
    )

    def __init__(
        self,
        num_heads: int,
        *,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = False,
        head_slice: slice | None = None,
    ) -> None:
        super().__init__(num_heads, head_slice=head_slice)
        self.bidirectional = flag("bidirectional", bidirectional)
        sides = 2 if self.bidirectional else 1
        self.num_buckets = whole(
            "num_buckets", num_buckets, 2 * sides, remedy="num_buckets=32, with two or more per side"
        )
        one_sided = self.num_buckets // sides
        nearest = one_sided // 2 + 1
        remedy = f"use {nearest} to {MAX_DISTANCE} for {num_buckets} buckets, or num_buckets=32, max_distance=128"
        self.max_distance = whole("max_distance", max_distance, nearest, MAX_DISTANCE, remedy=remedy)
        self.weight = nn.Parameter(torch.empty(self.num_buckets, len(self.heads)))
        self._bucket_of = Constant(_bucket_table(one_sided, self.max_distance))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        full = self.weight.new_empty(self.num_buckets, self.num_heads).normal_(std=INIT_STD)
        self.heads.fill(self.weight, full, dim=1)

    def buckets(
        self, distance: Int[Tensor, "*shape"], bucket_of: Int[Tensor, " distances"] | None = None
    ) -> Int[Tensor, "*shape"]:
        """Return the bucket of every distance, query index minus key index. `bucket_of` is the table, if available."""
        table = self._bucket_of.on(distance.device) if bucket_of is None else bucket_of
        nearby = (distance.abs() if self.bidirectional else distance).clamp(0, self.max_distance)
        bucket = table.index_select(0, nearby) if nearby.ndim == 1 else table[nearby]  # the former is faster
        return bucket + (distance < 0).long() * (self.num_buckets // 2) if self.bidirectional else bucket

    def operands(self, q: Tensor, largest: int | None) -> dict[str, Tensor]:
        return {"weight": self.weight.to(bias_dtype(q)), "bucket_of": self._bucket_of.on(q.device)}

    def of_distance(self, distance: Tensor, head: Tensor, *, weight: Tensor, bucket_of: Tensor) -> Tensor:
        return weight[self.buckets(distance, bucket_of), self.heads.to_local(head)]

    def along(self, q: Tensor, distance: Int[Tensor, " distances"]) -> Float[Tensor, "heads distances"]:
        """Look up with a single index, because torch starts another thread for two indices."""
        return self.weight.T.index_select(1, self.buckets(distance)).to(bias_dtype(q))

    def extra_repr(self) -> str:
        sizes = f"num_buckets={self.num_buckets}, max_distance={self.max_distance}"
        return f"{self.heads}, {sizes}, bidirectional={self.bidirectional}"


def _bucket_table(num_buckets: int, max_distance: int) -> Int[Tensor, " max_distance_plus_1"]:
    """Return the bucket of each distance, in float32 like the reference, whose rounding decides where buckets begin."""
    exact = num_buckets // 2
    ratio = np.arange(exact, max_distance + 1, dtype=np.float32) / np.float32(exact)
    share = np.log(ratio) / np.float32(math.log(max_distance / exact)) * np.float32(num_buckets - exact)
    buckets = np.minimum(exact + share.astype(np.int64), num_buckets - 1)
    return torch.tensor([*range(exact), *buckets.tolist()], dtype=torch.int64, device="cpu")
