"""Disentangled attention: He et al. 2021, https://arxiv.org/abs/2006.03654, with the log buckets of DeBERTa-v2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn import functional as F

from locant.arguments import MAX_WIDTH, Real, entries, flag, scale_of, short_repr, whole
from locant.errors import RangeError
from locant.positions.base import EncodingInfo, Keys, Queries
from locant.positions.constant import Constant
from locant.positions.distance_bias import RowBias
from locant.positions.distances import MAX_DISTANCE
from locant.positions.encodings import INIT_STD
from locant.positions.heads import Heads, empty_linear
from locant.positions.kept_table import KeptTable
from locant.positions.positions import Positions
from locant.positions.score_bias import Lookup
from locant.spelling import literal

DebertaTerm = Literal["c2p", "p2c"]


class Deberta(RowBias):
    r"""Adds content-to-position and position-to-content scores.

    .. math:: b_{ij} = s \, \left( q_i \cdot K[\delta(i - j)] + k_j \cdot Q[\delta(i - j)] \right)

    K is the table of relative embeddings, projected per head like keys. Q is the same table, projected like queries. δ
    is the bucket of a distance: exact up to half of `num_buckets` and logarithmic to `max_distance`, in both
    directions. A pair uses the same row as in released checkpoints. (In the second term, the paper has δ(j - i).)

    Content and positions share one scale, ``1 / sqrt(3 head_dim)`` with both terms. Pass it to attention, too:
    ``attend(q, k, v, encoding=deberta, scale=deberta.scale, causal=False, positions=positions)``.

    In DeBERTa-v2 all layers share the table, and each layer projects it with its own key and query projections
    (``share_att_key``). Set `weight`, `key_projection` and `query_projection` of each layer's `Deberta` to these.

    It costs two projections of the table, one score per token and row of the table (in float64 during the computation),
    and two look-ups per pair of tokens and head. With a few queries, each key has one product for each query instead.
    In calls without gradients on a CPU, the projected tables are kept while the parameters have the same values.

    Args:
        num_heads, head_slice: as in `DistanceBias`.
        head_dim: dimensions per head.
        d_model: the width of the table. Default: ``num_heads * head_dim``.
        num_buckets: half the number of rows of the table. ``None``: one row per distance up to `max_distance` (DeBERTa
            v1).
        max_distance: the approximate distance from which all distances share a bucket.
        terms: ``"c2p"``, ``"p2c"`` or both.
        norm: whether the table goes through a LayerNorm first (``norm_rel_ebd``, DeBERTa-v2 and v3).
        scale: the factor of the sum. Default: ``(head_dim * (1 + number of terms)) ** -0.5``.

    Limits:
        Attention has to use the encoding's `scale`.

    Tested against:
        `transformers`' DeBERTa-v2: its bucket tables, the bias, and whole attention layers, with every gradient.

    >>> from locant import Positions
    >>> q = k = torch.randn(1, 4, 5, 16)
    >>> Deberta(4, 16).bias(q, k, Positions.arange(5)).shape
    torch.Size([1, 4, 5, 5])
    """

    info = EncodingInfo(
        name="deberta",
        aliases=("disentangled", "disentangled_attention"),
        kind="relative",
        parameters="a table and two projections",
        cost_of_tokens="4 num_buckets x head_dim operations per head",
        cost_of_pairs="two look-ups, and one stored number",
        extrapolation="fair: all distances beyond max_distance share one bucket",
        used_by="DeBERTa, DeBERTa-v2 and v3",
        paper="He 2021, arXiv 2006.03654",
    )

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        d_model: int | None = None,
        num_buckets: int | None = 256,
        max_distance: int = 512,
        terms: Sequence[DebertaTerm] = ("c2p", "p2c"),
        norm: bool = False,
        scale: Real | None = None,
        head_slice: slice | None = None,
    ) -> None:
        super().__init__()
        self.heads = Heads.of(num_heads, head_slice)
        self.num_heads = self.heads.num_heads
        self.head_dim = whole("head_dim", head_dim, 1, MAX_WIDTH, remedy="pass the width of a head")
        d_model = self.num_heads * self.head_dim if d_model is None else d_model
        self.d_model = whole(
            "d_model", d_model, 1, MAX_WIDTH, remedy="pass the width of the table, num_heads * head_dim"
        )
        remedy = "num_buckets=256, or None for one row per distance"
        self.num_buckets = None if num_buckets is None else whole("num_buckets", num_buckets, 4, remedy=remedy)
        self.max_distance = _check_max_distance(max_distance, self.num_buckets)
        self.terms: tuple[DebertaTerm, ...] = _check_terms(terms)
        self.of_queries, self.of_keys = "c2p" in self.terms, "p2c" in self.terms
        self.scale = scale_of(scale, (self.head_dim * (1 + len(self.terms))) ** -0.5)
        self.span = self.max_distance if self.num_buckets is None else self.num_buckets
        bucket_of = _bucket_table(self.num_buckets, self.max_distance)
        self._bucket_of = Constant(bucket_of)
        self.ends = 1 - len(bucket_of), len(bucket_of) - 1
        self.weight = nn.Parameter(torch.empty(2 * self.span, self.d_model))
        self.norm = nn.LayerNorm(self.d_model, eps=1e-7) if flag("norm", norm) else None
        width = len(self.heads) * self.head_dim
        self.key_projection = empty_linear(self.d_model, width) if "c2p" in self.terms else None
        self.query_projection = empty_linear(self.d_model, width) if "p2c" in self.terms else None
        self._kept = KeptTable[tuple[Tensor | None, Tensor | None]]()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INIT_STD)
        if self.norm is not None:
            self.norm.reset_parameters()
        for projection in filter(None, (self.key_projection, self.query_projection)):
            full = projection.weight.new_empty(self.num_heads, self.head_dim, self.d_model).normal_(std=INIT_STD)
            self.heads.fill(projection.weight, full)
            nn.init.zeros_(projection.bias)

    def buckets(self, distance: Int[Tensor, "*pairs"]) -> Int[Tensor, "*pairs"]:
        """Return the bucket of every distance (query index minus key index), negative for later keys."""
        return _bucket(distance, self._bucket_of.on(distance.device))

    def row_of(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        bucket_of = self._bucket_of.on(device)
        return lambda distance: (_bucket(distance, bucket_of) + self.span).clamp(0, 2 * self.span - 1)

    def vectors(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """Return the projected table for queries (by the key projection), and for keys (by the query projection)."""
        return self._kept.get(tuple(self.parameters()), dtype, lambda: self._project_tables(dtype))

    def score_bias(
        self, q: Queries, k: Keys, queries: Positions, keys: Positions, heads: slice | None = None
    ) -> Lookup:
        self.heads.subset(heads).require(self, q)
        return super().score_bias(q, k, queries, keys, heads)

    def _project_tables(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        return self._project_table(self.key_projection, dtype), self._project_table(self.query_projection, dtype)

    def _project_table(self, projection: nn.Linear | None, dtype: torch.dtype) -> Tensor | None:
        if projection is None:
            return None
        table = self.weight.to(dtype)
        if self.norm is not None:
            gain, shift = self.norm.weight.to(dtype), self.norm.bias.to(dtype)
            table = F.layer_norm(table, (self.d_model,), gain, shift, self.norm.eps)
        rows = F.linear(table, projection.weight.to(dtype), projection.bias.to(dtype))
        return rows.unflatten(1, (len(self.heads), self.head_dim)).transpose(0, 1)

    def extra_repr(self) -> str:
        sizes = f"head_dim={self.head_dim}, num_buckets={self.num_buckets}, max_distance={self.max_distance}"
        return f"{self.heads}, {sizes}, terms={self.terms}, scale={literal(self.scale)}"


def _bucket(distance: Int[Tensor, "*pairs"], bucket_of: Int[Tensor, " distances"]) -> Int[Tensor, "*pairs"]:
    return bucket_of[distance.abs().clamp(max=len(bucket_of) - 1)] * distance.sign()


def _check_terms(terms: Any) -> tuple[DebertaTerm, ...]:
    remedy = "terms=('c2p', 'p2c')"
    checked = entries("terms", terms, remedy)
    if checked not in (("c2p",), ("p2c",), ("c2p", "p2c"), ("p2c", "c2p")):
        raise RangeError(f"got {short_repr(checked)} for terms, expected 'c2p', 'p2c' or both", remedy)
    return checked


def _check_max_distance(max_distance: Any, num_buckets: int | None) -> int:
    least = 1 if num_buckets is None else num_buckets // 2 + 2
    remedy = f"use {least} to {MAX_DISTANCE} for num_buckets={num_buckets}, or num_buckets=256, max_distance=512"
    farthest = whole("max_distance", max_distance, least, MAX_DISTANCE, remedy=remedy)
    if num_buckets is not None and _first_out_of_table(num_buckets, farthest) > MAX_DISTANCE:
        got = f"got {farthest} for max_distance, whose {num_buckets} buckets reach farther than {MAX_DISTANCE}"
        raise RangeError(got, remedy)
    return farthest


def _first_out_of_table(num_buckets: int, max_distance: int) -> float:
    """Return the distance at which the logarithm has used all buckets.

    That is about `max_distance`, but much farther for a small odd number of buckets.
    """
    exact = num_buckets // 2
    return exact * ((max_distance - 1) / exact) ** ((num_buckets - exact - 1) / (exact - 1))


def _bucket_table(num_buckets: int | None, max_distance: int) -> Int[Tensor, " distances"]:
    """Return the buckets of distances up to a little past the table, in float32 like the reference's logarithm."""
    if num_buckets is None:
        return torch.arange(max_distance + 1, device="cpu")
    exact = num_buckets // 2
    growth = (max_distance - 1) / exact
    distance = torch.arange(int(_first_out_of_table(num_buckets, max_distance) * 1.125) + 8, device="cpu")
    share = torch.log(distance / exact) / torch.log(torch.tensor(growth, device="cpu"))
    logarithmic = (torch.ceil(share * (exact - 1)) + exact).clamp(0, num_buckets).long()
    return torch.where(distance <= exact, distance, logarithmic)
