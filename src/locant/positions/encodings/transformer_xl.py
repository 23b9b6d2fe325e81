"""Transformer-XL's relative positions: Dai et al. 2019, https://arxiv.org/abs/1901.02860, section 3.3."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from locant.arguments import MAX_WIDTH, Real, scale_of, whole
from locant.kernels.exact_dot import MAX_FEW, exact_dot, exact_scores
from locant.positions.angles import Angles
from locant.positions.base import Bias, EncodingInfo, Keys, ModelShape, PositionEncoding, Queries, require_tokens
from locant.positions.distances import bias_dtype, distances
from locant.positions.encodings import INIT_STD
from locant.positions.frequencies import check_base, check_width, inverse_frequencies
from locant.positions.heads import Heads, require_query_heads
from locant.positions.kept_table import KeptTable, RowsByDistance, can_keep
from locant.positions.positions import Positions
from locant.positions.score_bias import Written
from locant.positions.score_bias.by_distance import largest_distance
from locant.spelling import literal
from locant.tensors import host_can_read

CHUNK_ELEMENTS = 2**19
"""The number of products of a head that are stored at a time in calls without gradients."""


class TransformerXL(PositionEncoding):
    r"""Adds the paper's three terms to q . k: query with distance, key alone, and distance alone.

    .. math:: b_{ij} = s \left( q_i \cdot W r_{i-j} + u \cdot k_j + v \cdot W r_{i-j} \right)

    These are terms (b), (c) and (d) of the paper, and (a) is q . k. r is the sinusoidal vector of the distance (sines
    first, then cosines), W projects it for every head, and u and v are learned vectors of each head. `scale` has to
    equal the scale of `attend`, which adds a bias to scaled scores. To use a memory of earlier segments, pass its keys
    with their positions.

    W r is computed once for each distance, in the width of a head, and every query multiplies it. So all pairs at the
    same distance have the same bits, in a prompt, a cache, a padded and a packed row. In float64 they agree up to
    rounding. In calls without gradients on a CPU, W r is kept for later calls while the weight has the same values, but
    not in float64. It has ``distances x num_heads x head_dim`` numbers, as many as the keys of one layer. Layers that
    share the encoding share them. There is no largest distance and no score function.

    In compiled code and on accelerators, if the host does not know the bounds of the positions, sines of ``i - j`` are
    sums of products of sines and cosines of i and of j, with a product of `d_model` for every pair. Such numbers agree
    with the others up to the rounding of float32, not bit for bit.

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
        cost_of_tokens="d_model x head_dim operations per head and distance",
        cost_of_pairs="a product of head_dim, and one stored number",
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
        self._kept = KeptTable[RowsByDistance]()
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
        require_query_heads(k, q.shape[1])
        write, sources = functools.partial(self._write, heads=heads or slice(None)), tuple(self.parameters())
        return Written(q=q, k=k, queries=queries, keys=keys, sources=sources, write=write, reads_only_arguments=True)

    def _write(self, q: Queries, k: Keys, queries: Positions, keys: Positions, *, heads: slice) -> Bias:
        dtype = bias_dtype(q)
        if can_keep([q, k, self.u]) and q.shape[2] > MAX_FEW and queries.start is not None and keys.start is not None:
            return self._write_by_head(q, k, queries.start - keys.start, heads, dtype)
        content = exact_scores(self.u[None, heads, None], k, dtype)
        biased = q.double() + self.v.double()[heads, None]
        return ((content + self._position_term(biased, queries, keys, heads, dtype)) * self.scale).to(dtype)

    def _write_by_head(self, q: Queries, k: Keys, offset: int, heads: slice, dtype: torch.dtype) -> Bias:
        """Return the same numbers as `_write`. Only the products of some queries of a head are stored in float64."""
        (batch, num_heads, queries, _), keys = q.shape, k.shape[2]
        out = q.new_empty(batch, num_heads, queries, keys, dtype=dtype)
        content = exact_scores(self.u[None, heads, None], k, dtype)
        table = self._rows(offset - keys + 1, offset + queries - 1, dtype)[heads]
        size = max(1, CHUNK_ELEMENTS // max(keys, 1))
        for b, head in itertools.product(range(batch), range(num_heads)):
            biased = q[b, head].double() + self.v[heads][head].double()
            for start in range(0, queries, size):
                some = biased[start : start + size]
                distances_of = table[head, queries - start - len(some) : queries - start + keys - 1]
                part = _shift(exact_dot(some, distances_of, dtype), keys).add_(content[b, head])
                out[b, head, start : start + size] = part.mul_(self.scale)
        return out

    def _position_term(
        self, biased: Tensor, queries: Positions, keys: Positions, heads: slice, dtype: torch.dtype
    ) -> Float[Tensor, "batch heads query key"]:
        """Return the products of queries, to which v was added, with the projected distances."""
        rows, columns = queries.seq_len, keys.seq_len
        if queries.start is not None and keys.start is not None and rows and columns:
            # One distance more than needed, or two queries would be compiled separately.
            first = queries.start - keys.start - columns
            table = self._rows(first, first + rows + columns - 1, dtype)[heads]
            return _shift(exact_dot(biased, table, dtype), columns)
        distance, largest = distances(queries, keys), largest_distance(queries, keys)
        if largest is not None and (not host_can_read(distance) or largest < distance.numel()):
            first, last = -largest, largest
        elif distance.numel() and host_can_read(distance):
            first, last = (int(x) for x in distance.aminmax())
        else:
            return self._position_term_by_angles(biased, queries, keys, heads, dtype)
        if last - first < 2 * distance.numel():
            table, entries = self._rows(first, last, dtype), last - distance
        else:  # a table of all distances would be larger than the bias
            unique, entries = distance.unique(return_inverse=True)
            table = self._project(unique, first, last, dtype)
        products = exact_dot(biased, table[heads], dtype)
        return products.gather(3, entries[:, None].expand(*products.shape[:3], columns))

    def _position_term_by_angles(
        self, biased: Tensor, queries: Positions, keys: Positions, heads: slice, dtype: torch.dtype
    ) -> Float[Tensor, "batch heads query key"]:
        weight = self.weight.unflatten(0, (len(self.heads), self.head_dim))
        a, b = exact_dot(biased, weight[heads].mT, dtype).chunk(2, dim=-1)
        (q_cos, q_sin), (k_cos, k_sin) = (
            self._cos_sin(each.index[:, None], each.min_index, each.max_index) for each in (queries, keys)
        )
        # a sin(i - j) + b cos(i - j) = (a sin i + b cos i) cos j + (b sin i - a cos i) sin j
        rotated = torch.cat([b * q_sin - a * q_cos, a * q_sin + b * q_cos], dim=-1)
        return exact_dot(rotated, torch.cat([k_sin, k_cos], dim=-1), dtype)

    def _rows(self, first: int, last: int, dtype: torch.dtype) -> Float[Tensor, "heads distances head_dim"]:
        """Return the projected vectors of the distances from `last` down to `first`."""
        if dtype == torch.float64 or not can_keep([self.weight]):  # float64 products have other bits in other ranges
            distance = torch.arange(last, first - 1, -1, device=self.weight.device)
            bounds = (None, None) if torch.compiler.is_compiling() else (first, last)  # bounds would be guards
            return self._project(distance, *bounds, dtype)
        weight = self.weight
        kept_rows = self._kept.get(
            [weight], dtype, lambda: RowsByDistance(lambda distance: self._project(distance, None, None, dtype))
        )
        return kept_rows.between(first, last)

    def _project(
        self, distance: Int[Tensor, " distances"], first: int | None, last: int | None, dtype: torch.dtype
    ) -> Float[Tensor, "heads distances head_dim"]:
        """Return the projected vectors of these distances. `first` and `last` are bounds of them, if known."""
        cos, sin = self._cos_sin(distance, first, last)
        rows = exact_dot(torch.cat([sin, cos], dim=-1), self.weight, dtype).to(dtype)
        return rows.unflatten(1, (len(self.heads), self.head_dim)).transpose(0, 1)

    def _cos_sin(self, index: Tensor, first: int | None, last: int | None) -> tuple[Tensor, Tensor]:
        return self.angles.cos_sin(index, last, first, torch.float64)

    def extra_repr(self) -> str:
        return f"{self.heads}, d_model={self.d_model}, head_dim={self.head_dim}, scale={literal(self.scale)}"


def _shift(products: Float[Tensor, "*heads query distance"], keys: int) -> Float[Tensor, "*heads query key"]:
    """Return the product of each query and key. Distances decrease, and each query begins one column earlier."""
    queries, columns = products.shape[-2:]
    if queries == 1:
        return products[..., :keys]
    flat = products.flatten(-2)[..., queries - 1 : queries * columns - 1]
    return flat.unflatten(-1, (queries, columns - 1))[..., :keys]
