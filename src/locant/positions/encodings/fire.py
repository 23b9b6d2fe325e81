"""FIRE: functional interpolation of relative positions. Li et al. 2023, https://arxiv.org/abs/2310.04418."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from locant.arguments import MAX_WIDTH, Real, real, whole
from locant.kernels.transforms import is_plain_eager
from locant.positions.base import Bias, EncodingInfo, Keys, PositionEncoding, Queries, bias_matrix, require_tokens
from locant.positions.distances import bias_dtype
from locant.positions.heads import Heads, empty_linear
from locant.positions.kept_table import KeptTable
from locant.positions.positions import Positions
from locant.positions.score_bias import Pairwise
from locant.spelling import literal

EPS = 1e-6  # added to the denominator, as in the authors' code


class Fire(PositionEncoding):
    r"""A learned function of the distance as a fraction of the length so far.

    .. math:: b_{ij} = \mathrm{MLP}\left( \frac{\psi(|i - j|)}{\psi(\max(L, i, j))} \right), \qquad
        \psi(x) = \log(1 + c \, x)

    The ratio goes from 0 at the query to 1 at the beginning of its document, so longer contexts than in training do not
    add new inputs. Up to the threshold L the denominator is constant. c and L are learned. For keys up to the query,
    the maximum equals the paper's ``max(L, i)``. The additional j makes the bias symmetric without a causal mask.

    An MLP with one ReLU layer and one input is piecewise linear. Its ``hidden + 1`` pieces per head are computed once
    per call. Then a pair of tokens costs one search among the ``hidden`` kinks, one look-up and one linear function per
    head. On a CPU, the forward pass takes 4.4 times the time of plain causal attention (8,192 tokens). Forward and
    backward take 3.3 times the time (4,096 tokens).

    Args:
        num_heads, head_slice: as in `DistanceBias`. All heads share the hidden layer, c and L, so ranks have to sum
            their gradients.
        hidden: the width of the MLP.
        c: the initial value of c.
        threshold: the initial value of L. The learned parameter is a multiple of this value.

    Limits:
        The bias depends on both positions, not on their distance alone, so a table of distances cannot represent it.

    Tested against:
        The paper's MLP in NumPy, pair by pair, forward and every gradient.

    >>> Fire(4).matrix(6).shape
    torch.Size([4, 6, 6])
    """

    info = EncodingInfo(
        name="fire",
        aliases=("functional_interpolation",),
        kind="relative",
        parameters="a small MLP, c and L",
        cost_of_tokens="nothing",
        cost_of_pairs="two logarithms shared by all heads, then one table look-up and an interpolation",
        extrapolation="good: distances are divided by the length, so the function gets no new inputs",
        used_by="its paper's models",
        paper="Li 2023, arXiv 2310.04418",
    )

    def __init__(
        self,
        num_heads: int,
        *,
        hidden: int = 32,
        c: Real = 0.1,
        threshold: Real = 512.0,
        head_slice: slice | None = None,
    ) -> None:
        super().__init__()
        self.heads = Heads.of(num_heads, head_slice)
        self.num_heads = self.heads.num_heads
        self.hidden_width = whole("hidden", hidden, 1, MAX_WIDTH, remedy="hidden=32, the width of the MLP")
        self.initial_c = real("c", c, above=0, remedy="c=0.1")
        self.initial_threshold = real("threshold", threshold, above=0, remedy="threshold=512.0")
        self.c = nn.Parameter(torch.empty(1))  # one dimension, because FSDP cannot shard scalars
        self.threshold_multiple = nn.Parameter(torch.empty(1))
        self.hidden = empty_linear(1, self.hidden_width)
        self.output = empty_linear(self.hidden_width, len(self.heads))
        self._kept = KeptTable[dict[str, Tensor]]()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.c, self.initial_c)
        nn.init.ones_(self.threshold_multiple)
        self.hidden.reset_parameters()
        bound = self.hidden_width**-0.5
        for parameter in (self.output.weight, self.output.bias):
            full = parameter.new_empty(self.num_heads, *parameter.shape[1:]).uniform_(-bound, bound)
            self.heads.fill(parameter, full)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **options: Any) -> None:
        """Add a dimension to c and L of old checkpoints, which saved them as scalars."""
        for name in (prefix + "c", prefix + "threshold_multiple"):
            if name in state_dict:
                state_dict[name] = torch.atleast_1d(state_dict[name])
        super()._load_from_state_dict(state_dict, prefix, *args, **options)

    def score_bias(
        self, q: Queries, k: Keys, queries: Positions, keys: Positions, heads: slice | None = None
    ) -> Pairwise:
        """Return the bias of every pair as a `Pairwise` value."""
        self.heads.subset(heads).require(self, q)
        require_tokens(self, q, k, queries, keys)
        dtype = bias_dtype(q)

        sources = [x for x in self._tensors() if x is not None]

        def compute() -> dict[str, Tensor]:
            kinks, slopes, offsets = self._pieces(dtype)
            c = self.c[0].to(dtype).abs()
            threshold = (self.threshold_multiple[0].to(dtype) * self.initial_threshold).abs()
            return {"c": c, "threshold": threshold, "kinks": kinks, "slopes": slopes, "offsets": offsets}

        def operands() -> dict[str, Tensor]:
            return self._kept.get(sources, dtype, compute)

        return Pairwise(
            q=q, queries=queries, keys=keys, of_query=queries.index.unsqueeze(1), of_key=keys.index.unsqueeze(1),
            shared=_ratio, of_pair=_bias_of_pairs, of_one_pair=_bias_of_one_pair, operands=operands,
            heads=range(len(self.heads))[heads or slice(None)], sources=tuple(sources), reads_only_positions=True,
            is_traceable_per_pair=q.device.type != "cuda",  # compiles for minutes, and every pair adds to c's gradient
        )  # fmt: skip

    def matrix(self, query_len: int, key_len: int | None = None) -> Float[Tensor, "heads query key"]:
        return bias_matrix(self, len(self.heads), query_len, key_len)

    def _pieces(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Return the kinks of the MLP, and the slope and offset of each piece (``pieces heads``).

        A hidden unit with a positive weight is on above its kink. A hidden unit with a negative weight is on below its
        kink. It is off at the kink, like torch's ReLU. A piece includes its right end, so the kink of a negative weight
        moves to the next smaller number. The value of a negative kink does not matter, because ratios are not negative.
        Sums are in float64.
        """
        weight, shift = self.hidden.weight[:, 0].double(), self.hidden.bias.double()
        fixed = weight == 0
        kink = torch.where(fixed, torch.inf, -shift / torch.where(fixed, 1.0, weight)).detach().to(dtype)
        before = torch.where(kink > 0, kink.nextafter(torch.zeros_like(kink)), -1.0)
        kink = torch.where(weight < 0, before, kink)
        kinks, order = kink.sort()
        piece = torch.arange(self.hidden_width + 1, device=weight.device)[:, None]
        above = order.argsort() < piece
        on = torch.where(fixed, shift > 0, above == (weight > 0))
        out = self.output.weight.double().T
        slopes = torch.where(on, weight, 0.0) @ out
        offsets = torch.where(on, shift, 0.0) @ out + self.output.bias.double()
        return kinks, slopes.to(dtype), offsets.to(dtype)

    def extra_repr(self) -> str:
        return f"{self.heads}, hidden={self.hidden_width}, threshold={literal(self.initial_threshold)}"


def _ratio(query: Tensor, key: Tensor, c: Tensor, threshold: Tensor, **_: Tensor) -> Tensor:
    distance, later = (query - key).abs().to(c.dtype), torch.maximum(query, key).to(c.dtype)
    return torch.log1p(c * distance) / (torch.log1p(c * torch.maximum(later, threshold)) + EPS)


def _bias_of_pairs(ratio: Tensor, head: Tensor, kinks: Tensor, slopes: Tensor, offsets: Tensor, **_: Tensor) -> Bias:
    piece = torch.bucketize(ratio[:, 0].detach(), kinks)
    slope, offset = (_by_head(table[:, head.flatten()], piece) for table in (slopes, offsets))
    # For long rows, new memory costs more than the arithmetic.
    return slope.mul_(ratio).add_(offset) if is_plain_eager() else slope * ratio + offset


def _bias_of_one_pair(
    ratio: Tensor, head: Tensor, kinks: Tensor, slopes: Tensor, offsets: Tensor, **_: Tensor
) -> Tensor:
    piece = torch.zeros_like(ratio, dtype=torch.int32)
    for unit in range(kinks.shape[0]):  # a loop, because a score function cannot reduce over a dimension
        piece = piece + (ratio > kinks.select(0, unit))  # kinks[unit] would make a tensor of the number
    return slopes[piece, head] * ratio + offsets[piece, head]


def _by_head(table: Float[Tensor, "pieces heads"], piece: Int[Tensor, "#batch query key"]) -> Bias:
    """Return each head's entry for every pair.

    On a CPU the heads come first, which halves the time with gradients. On other devices the gradients would be atomic
    additions of all pairs to a few numbers.
    """
    if piece.device.type != "cpu":
        return F.embedding(piece, table).permute(0, 3, 1, 2)
    if len(piece) == 1 and is_plain_eager():  # half the time
        return table.T.index_select(1, piece.flatten()).unflatten(1, piece.shape[1:])[None]
    entries = piece.flatten(1)[:, None].expand(-1, table.shape[1], -1)
    return table.T.expand(len(piece), -1, -1).gather(2, entries).unflatten(2, piece.shape[1:])
