"""FIRE: functional interpolation of relative positions. Li et al. 2023, https://arxiv.org/abs/2310.04418."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from locant.arguments import MAX_WIDTH, real, whole
from locant.positions.base import Bias, EncodingInfo, Keys, PositionEncoding, Queries, bias_matrix, require_tokens
from locant.positions.distances import bias_dtype
from locant.positions.heads import Heads, empty_linear
from locant.positions.positions import Positions
from locant.positions.score_bias import Pairwise

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
    line per head. On a CPU 4.4 times the time of plain causal attention forward (8 192 tokens), and 3.3 times forward
    and backward (4 096).

    Args:
        num_heads, head_slice: as in `DistanceBias`. The hidden layer, c and L are shared by all heads, so ranks have to
            add up their gradients.
        hidden: the width of the MLP.
        c: what c begins with.
        threshold: what L begins with; it is learned as a multiple of this.

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
        self.hidden = empty_linear(1, self.hidden_width)
        self.output = empty_linear(self.hidden_width, len(self.heads))
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

    def score_bias(
        self, q: Queries, k: Keys, queries: Positions, keys: Positions, heads: slice | None = None
    ) -> Pairwise:
        """The function of every pair."""
        self.heads.subset(heads).require(self, q)
        require_tokens(self, q, k, queries, keys)
        dtype = bias_dtype(q)

        def operands() -> dict[str, Tensor]:
            kinks, slopes, offsets = self._pieces(dtype)
            c = self.c[0].to(dtype).abs()
            threshold = (self.threshold_multiple[0].to(dtype) * self.initial_threshold).abs()
            return {"c": c, "threshold": threshold, "kinks": kinks, "slopes": slopes, "offsets": offsets}

        return Pairwise(
            q=q, queries=queries, keys=keys, of_query=queries.index.unsqueeze(1), of_key=keys.index.unsqueeze(1),
            shared=_ratio, of_pair=_of_pairs, of_one_pair=_of_one_pair, operands=operands,
            heads=range(len(self.heads))[heads or slice(None)], sources=tuple(self.parameters()),
            is_for_pairs=q.device.type != "cuda",  # it would compile for minutes, and every pair add to c's gradient
        )  # fmt: skip

    def matrix(self, query_len: int, key_len: int | None = None) -> Float[Tensor, "heads query key"]:
        return bias_matrix(self, len(self.heads), query_len, key_len)

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


def _ratio(query: Tensor, key: Tensor, c: Tensor, threshold: Tensor, **_: Tensor) -> Tensor:
    distance, later = (query - key).abs().to(c.dtype), torch.maximum(query, key).to(c.dtype)
    return torch.log1p(c * distance) / (torch.log1p(c * torch.maximum(later, threshold)) + EPS)


def _of_pairs(ratio: Tensor, head: Tensor, kinks: Tensor, slopes: Tensor, offsets: Tensor, **_: Tensor) -> Bias:
    piece = torch.bucketize(ratio[:, 0].detach(), kinks)
    slope, offset = (_by_head(table[:, head.flatten()], piece) for table in (slopes, offsets))
    return slope * ratio + offset


def _of_one_pair(ratio: Tensor, head: Tensor, kinks: Tensor, slopes: Tensor, offsets: Tensor, **_: Tensor) -> Tensor:
    piece = torch.zeros_like(ratio, dtype=torch.int32)
    for unit in range(kinks.shape[0]):  # one by one: a score function may not reduce over a dimension
        piece = piece + (ratio > kinks.select(0, unit))  # not kinks[unit], which makes a tensor of the number
    return slopes[piece, head] * ratio + offsets[piece, head]


def _by_head(table: Float[Tensor, "pieces heads"], piece: Int[Tensor, "#batch query key"]) -> Bias:
    """Each head's entry for every pair. On a CPU heads come first, which takes half the time where there are gradients.

    Elsewhere those would be atomic additions of all pairs to a few numbers.
    """
    if piece.device.type != "cpu":
        return F.embedding(piece, table).permute(0, 3, 1, 2)
    entries = piece.flatten(1)[:, None].expand(-1, table.shape[1], -1)
    return table.T.expand(len(piece), -1, -1).gather(2, entries).unflatten(2, piece.shape[1:])
