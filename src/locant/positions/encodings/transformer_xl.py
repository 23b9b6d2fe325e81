"""Transformer-XL's relative positions: Dai et al. 2019, https://arxiv.org/abs/1901.02860, section 3.3."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from locant.arguments import MAX_WIDTH, Real, scale_of, whole
from locant.kernels.exact_dot import exact_dot
from locant.positions.angles import Angles
from locant.positions.base import Bias, EncodingInfo, Keys, ModelShape, PositionEncoding, Queries, require_tokens
from locant.positions.distances import bias_dtype
from locant.positions.encodings import INIT_STD
from locant.positions.frequencies import check_base, check_width, inverse_frequencies
from locant.positions.heads import Heads, for_query_heads
from locant.positions.positions import Positions
from locant.positions.score_bias import Written
from locant.spelling import literal


class TransformerXL(PositionEncoding):
    r"""Adds the paper's three terms to q . k: query with distance, key alone, and distance alone.

    .. math:: b_{ij} = s \left( q_i \cdot W r_{i-j} + u \cdot k_j + v \cdot W r_{i-j} \right)

    These are terms (b), (c) and (d) of the paper, and (a) is q . k. r is the sinusoidal vector of the distance (sines
    first, then cosines), W projects it for every head, and u and v are learned vectors of each head. `scale` has to
    equal the scale of `attend`, which adds a bias to scaled scores. To use a memory of earlier segments, pass its keys
    with their positions.

    A sine of ``i - j`` is a sum of products of sines and cosines of i and of j. So ``W^T (q + v)`` is rotated by the
    query's angles and multiplied with the cosines and sines of the key. This costs a product over `d_model` in float64
    for every pair, and ``batch x heads x query x d_model`` numbers of memory in addition to the result. There is no
    largest distance and no score function. Two pairs at the same distance agree up to the rounding of float32, not bit
    for bit.

    Args:
        num_heads, head_slice: as in `DistanceBias`.
        d_model: the width of the sinusoidal vectors, an even number.
        head_dim: dimensions per head. Default: ``d_model // num_heads``.
        base: as in `Sinusoidal`.
        scale: the factor of the sum. Default: ``head_dim ** -0.5``, as in `attend`.

    Limits:
        Attention has to use the encoding's `scale`.

    Tested against:
        The paper's terms in NumPy with every gradient, and the Conformer attention of `transformers`.

    >>> q, memory_and_k = torch.randn(1, 4, 5, 16), torch.randn(1, 4, 12, 16)
    >>> xl = TransformerXL(4, 64)
    >>> xl.bias(q, memory_and_k, Positions.after(7, 5), Positions.arange(12)).shape
    torch.Size([1, 4, 5, 12])
    """

    info = EncodingInfo(
        name="transformer_xl",
        aliases=("xl", "txl", "xlnet"),
        kind="relative",
        parameters="d_model x d_model, u and v",
        cost_of_tokens="d_model x head_dim operations per head",
        cost_of_pairs="a product of d_model, and one stored number",
        extrapolation="fair with a memory of earlier segments, for which it was designed",
        used_by="Transformer-XL, XLNet, Conformer",
        paper="Dai 2019, arXiv 1901.02860",
    )

    def __init__(
        self,
        num_heads: int,
        d_model: int,
        *,
        head_dim: int | None = None,
        base: Real = 10_000.0,
        scale: Real | None = None,
        head_slice: slice | None = None,
    ) -> None:
        super().__init__()
        self.heads = Heads.of(num_heads, head_slice)
        self.num_heads = self.heads.num_heads
        self.d_model = check_width("d_model", d_model, remedy="TransformerXL(num_heads=8, d_model=512)")
        head_dim = self.d_model // self.num_heads if head_dim is None else head_dim
        self.head_dim = whole(
            "head_dim", head_dim, 1, MAX_WIDTH, remedy="use d_model of num_heads or more, or pass head_dim"
        )
        self.base = check_base(base)
        self.scale = scale_of(scale, self.head_dim**-0.5)
        self.angles = Angles(inverse_frequencies(self.d_model, self.base))
        num_held = len(self.heads)
        self.weight = nn.Parameter(torch.empty(num_held * self.head_dim, self.d_model))
        self.u = nn.Parameter(torch.empty(num_held, self.head_dim))
        self.v = nn.Parameter(torch.empty(num_held, self.head_dim))
        self.reset_parameters()

    @classmethod
    def for_model(cls, shape: ModelShape, **options: Any) -> PositionEncoding:
        """Build the encoding with the model's `head_dim`, which may differ from ``d_model // num_heads``."""
        return super().for_model(shape, **{"head_dim": shape.head_dim} | options)

    def reset_parameters(self) -> None:
        for parameter, width in ((self.u, ()), (self.v, ()), (self.weight, (self.d_model,))):
            full = parameter.new_empty(self.num_heads, self.head_dim, *width)
            self.heads.fill(parameter, full.normal_(std=INIT_STD))

    def score_bias(
        self, q: Queries, k: Keys, queries: Positions, keys: Positions, heads: slice | None = None
    ) -> Written:
        """Return the scaled sum of the three terms for every pair of tokens, in float32 or wider."""
        self.heads.subset(heads).require(self, q)
        require_tokens(self, q, k, queries, keys, self.head_dim)
        write, sources = functools.partial(self._write, heads=heads or slice(None)), tuple(self.parameters())
        return Written(q=q, k=k, queries=queries, keys=keys, sources=sources, write=write, reads_only_arguments=True)

    def _write(self, q: Queries, k: Keys, queries: Positions, keys: Positions, *, heads: slice) -> Bias:
        dtype, weight = bias_dtype(q), self.weight.unflatten(0, (len(self.heads), self.head_dim))
        content = exact_dot(self.u[heads, None], for_query_heads(k, q.shape[1]), dtype)
        a, b = exact_dot(q.double() + self.v.double()[heads, None], weight[heads].mT, dtype).chunk(2, dim=-1)
        (q_cos, q_sin), (k_cos, k_sin) = self._cos_sin(queries), self._cos_sin(keys)
        # a sin(i - j) + b cos(i - j) = (a sin i + b cos i) cos j + (b sin i - a cos i) sin j
        rotated = torch.cat([b * q_sin - a * q_cos, a * q_sin + b * q_cos], dim=-1)
        position = exact_dot(rotated, torch.cat([k_sin, k_cos], dim=-1), dtype)
        return ((content + position) * self.scale).to(dtype)

    def _cos_sin(self, positions: Positions) -> tuple[Tensor, Tensor]:
        cos, sin = self.angles.cos_sin(positions.index, positions.max_index, positions.min_index, torch.float64)
        return cos[:, None], sin[:, None]

    def extra_repr(self) -> str:
        return f"{self.heads}, d_model={self.d_model}, head_dim={self.head_dim}, scale={literal(self.scale)}"
