"""FIRE: functional interpolation of relative positions. Li et al. 2023, https://arxiv.org/abs/2310.04418."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from locant.arguments import MAX_WIDTH, real, whole
from locant.kernels.distance_pieces import Pieces, takes_pieces
from locant.positions.base import (
    Bias,
    EncodingInfo,
    Keys,
    PositionEncoding,
    Queries,
    ScoreMod,
    bias_dtype,
    bias_matrix,
    owner_of,
)  # fmt: skip
from locant.positions.heads import Heads, blank_linear
from locant.positions.pairs import distance_mod, distances, require_tokens
from locant.positions.positions import Positions

__all__ = ["Fire", "has_pieces"]

EPS = 1e-6  # added to the denominator, as the authors do


class Fire(PositionEncoding):
    r"""A learned function of the distance, as a share of the length so far.

    .. math:: b_{ij} = \mathrm{MLP}\left( \frac{\psi(|i - j|)}{\psi(\max(L, i, j))} \right), \qquad
        \psi(x) = \log(1 + c \, x)

    The ratio runs from 0 at the query to 1 at the beginning of its document, so a longer context than any trained on
    asks the function nothing new. Up to the threshold L the denominator is constant. c and L are learned. The paper's
    ``max(L, i)`` is the same for keys up to the query; with j, the bias is symmetric where attention is not causal.

    An MLP of one ReLU layer over one number is a function of straight pieces: they are worked out once per call
    (``hidden + 1`` per head), and a pair of tokens costs one search among the ``hidden`` kinks, one look-up and one
    line per head. In causal attention on a CPU, where positions are counted one by one, each piece is a run of keys:
    native code writes the bias of a few rows at a time (`locant.kernels.distance_pieces`), without a search. Values and
    gradients are those of the MLP.

    Args:
        num_heads: the number of query heads.
        hidden: the width of the MLP.
        c: what c begins with.
        threshold: what L begins with; it is learned as a multiple of this.
        head_slice: the heads of this rank under tensor parallelism; default: all. The hidden layer, c and L are
            shared by all heads, so ranks have to add up their gradients.

    Limits:
        The bias depends on both positions, not on their distance alone, so a table of distances cannot hold it.

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
        cost_of_pairs="two logarithms for all heads, then one look-up and line",
        extrapolation="good: distances are divided by the length, so the function sees nothing new",
        used_by="its paper's models",
        paper="Li 2023, arXiv 2310.04418",
    )

    def __init__(
        self,
        num_heads: int,
        *,
        hidden: int = 32,
        c: float = 0.1,
        threshold: float = 512.0,
        head_slice: slice | None = None,
    ) -> None:
        super().__init__()
        self.heads = Heads.of(num_heads, head_slice)
        self.num_heads = self.heads.num_heads
        self.hidden_width = whole("hidden", hidden, 1, MAX_WIDTH, remedy="hidden=32, the width of the MLP")
        self.initial_c = real("c", c, above=0, remedy="c=0.1")
        self.initial_threshold = real("threshold", threshold, above=0, remedy="threshold=512.0")
        self.c = nn.Parameter(torch.empty(1))  # of one dimension: FSDP has no way to shard fewer
        self.threshold_multiple = nn.Parameter(torch.empty(1))
        self.hidden = blank_linear(1, self.hidden_width)
        self.output = blank_linear(self.hidden_width, len(self.heads))
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
        """Where c and L were saved without a dimension, as they were once, they are given one."""
        for name in (prefix + "c", prefix + "threshold_multiple"):
            if name in state_dict:
                state_dict[name] = torch.atleast_1d(state_dict[name])
        super()._load_from_state_dict(state_dict, prefix, *args, **options)

    def bias(self, q: Queries, k: Keys, positions: Positions, k_positions: Positions | None = None) -> Bias:
        """The function of every pair, float32 at least."""
        self.heads.require(self, q)
        keys = require_tokens(self, q, k, positions, k_positions)
        distance = distances(positions, keys)
        ratio = self._ratio_of(bias_dtype(q))(distance, torch.maximum(positions.index[:, :, None], keys.index[:, None]))
        kinks, slopes, offsets = self._pieces(ratio.dtype)
        piece = torch.bucketize(ratio.detach(), kinks)
        slope, offset = (_by_head(table, piece) for table in (slopes, offsets))
        return slope * ratio[:, None] + offset

    def score_mod(self, q: Queries, k: Keys, positions: Positions, k_positions: Positions | None = None) -> ScoreMod:
        self.heads.require(self, q)
        keys = require_tokens(self, q, k, positions, k_positions)
        distance = distance_mod(q, positions, keys)
        q_index, k_index = positions.expand(q.shape[0]).index_mod(), keys.expand(q.shape[0]).index_mod()
        ratio_of = self._ratio_of(bias_dtype(q))
        kinks, slopes, offsets = self._pieces(bias_dtype(q))

        def add(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            ratio = ratio_of(distance(batch, query, key), torch.maximum(q_index(batch, query), k_index(batch, key)))
            piece = torch.zeros_like(ratio, dtype=torch.int32)
            for unit in range(self.hidden_width):  # one by one: a score function may not reduce over a dimension
                piece = piece + (ratio > kinks.select(0, unit))  # not kinks[unit], which makes a tensor of the number
            return score + (slopes[piece, head] * ratio + offsets[piece, head])

        return add

    def has_score_mod(self, positions: Positions, keys: Positions) -> bool:
        """Not on CUDA: comparing with every kink takes minutes to compile, and each pair adds to the gradient of c."""
        return positions.device.type != "cuda"

    def matrix(self, query_len: int, key_len: int | None = None) -> Float[Tensor, "heads query key"]:
        return bias_matrix(self, len(self.heads), query_len, key_len)

    def distance_pieces(
        self, q: Queries, first: int, last: int, index: Int[Tensor, " indices"]
    ) -> tuple[Float[Tensor, "1 distances"], Pieces]:
        """The bias of earlier keys: ψ of the distances from `first` to `last`, and what becomes of it.

        Args:
            q: queries, for their device, dtype and number of heads.
            first, last: distances, query index minus key index.
            index: of the queries; the reach is that of each.
        """
        self.heads.require(self, q)
        of_distance, of_reach = self._parts_of(bias_dtype(q))
        kinks, slopes, offsets = self._pieces(bias_dtype(q))
        table = of_distance(torch.arange(first, last + 1, device=q.device))
        return table[None], Pieces(of_reach(index), kinks, slopes.T, offsets.T)

    def _ratio_of(self, dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
        """``psi(distance) / psi(max(L, later of the two))`` as a function of both."""
        of_distance, of_reach = self._parts_of(dtype)
        return lambda distance, later: of_distance(distance) / of_reach(later)

    def _parts_of(self, dtype: torch.dtype) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        """Numerator and denominator of the ratio, of the distance and of the later index."""
        c = self.c[0].to(dtype).abs()
        threshold = (self.threshold_multiple[0].to(dtype) * self.initial_threshold).abs()

        def of_distance(distance: Tensor) -> Tensor:
            return torch.log1p(c * distance.abs().to(dtype))

        def of_reach(later: Tensor) -> Tensor:
            return torch.log1p(c * torch.maximum(later.to(dtype), threshold)) + EPS

        return of_distance, of_reach

    def _pieces(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Where the MLP has its kinks, and slope and offset before, between and after them (``pieces heads``).

        A hidden unit is on above its kink where its weight is positive, below where negative, and off at the kink, as
        torch's ReLU is: a piece ends with its kink, so that of a negative weight stands one number before. Ratios are
        not negative: below them is as good as anywhere. Added up in float64.
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
        return f"{self.heads}, hidden={self.hidden_width}, threshold={self.initial_threshold:g}"


def has_pieces(encoding: PositionEncoding | None, dtype: torch.dtype) -> bool:
    """Whether its bias in this dtype is that of `Fire.distance_pieces`, and not of a subclass that overrides it."""
    if not isinstance(encoding, Fire) or owner_of(encoding, "bias") is not Fire:
        return False
    return takes_pieces(dtype, encoding.hidden_width + 1)


def _by_head(table: Float[Tensor, "pieces heads"], piece: Int[Tensor, "#batch query key"]) -> Bias:
    """Each head's entry for every pair. On a CPU heads come first, which takes half the time where there are gradients.

    Elsewhere those would be atomic additions of all pairs to a few numbers.
    """
    if piece.device.type != "cpu":
        return F.embedding(piece, table).permute(0, 3, 1, 2)
    entries = piece.flatten(1)[:, None].expand(-1, table.shape[1], -1)
    return table.T.expand(len(piece), -1, -1).gather(2, entries).unflatten(2, piece.shape[1:])
