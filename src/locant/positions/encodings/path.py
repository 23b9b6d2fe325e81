"""PaTH: Householder matrices of the tokens between a query and a key. Yang et al. 2025, arXiv 2505.16381."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from locant.arguments import MAX_WIDTH, flag, whole
from locant.errors import LocantError, ShapeError
from locant.kernels.householder import HouseholderPath, Span
from locant.positions.base import (
    Embeddings,
    EncodingInfo,
    Keys,
    PositionEncoding,
    Queries,
    require_embeddings,
    require_heads,
    resolve_positions,
)
from locant.positions.distances import bias_dtype
from locant.positions.documents import PADDING
from locant.positions.earlier_tokens import require_earlier_tokens
from locant.positions.fields import TokenFeatures
from locant.positions.hidden_bias import REMEDY
from locant.positions.pair_sets import PairSet, PairSets, group, group_positions
from locant.positions.positions import OptionalPositions, Positions, require_positions
from locant.positions.running_sums import last_slot
from locant.tensors import host_can_read

EPS = 1e-6
"""The number that the authors' code adds to the square of a length before dividing by it."""
SETTLE, RECENT = 64, 32
"""A cache moves its keys over at least `SETTLE` tokens at a time. It keeps the features of `RECENT` tokens or more."""
PAST = 2
"""The number of earlier tokens that the convolution reads."""


class PaTH(PositionEncoding):
    r"""Puts a matrix of every token between a query and a key, so that a token can change how later ones see earlier.

    .. math:: s_{ij} = q_i^\top H_i H_{i-1} \cdots H_{j+1} k_j, \qquad H_t = I - \beta_t w_t w_t^\top, \qquad
        \beta_t = 2 \sigma(b \cdot x_t + c), \qquad w_t = \frac{u_t}{\lVert u_t \rVert}, \qquad
        u = \mathrm{silu}(\mathrm{conv}_3(W x))

    Where rotary rotates by the same angle at every token, each token chooses a direction w and its strength. With a
    strength of 0 it changes nothing, with 1 it removes the direction, and with 2 it reflects it. The convolution reads
    the token and the two before it in its document. The conventions are those of the authors' code.

    A model calls `read` in every layer, with the hidden states from which queries and keys are projected, and passes
    the returned positions to `rotate`, to its cache and to `attend`. `rotate` returns its arguments, because a pair
    has no rotation of its own for the query and the key. `attend` computes attention over sets of pairs
    (`locant.kernels.householder`) and merges them: one set of pairs within blocks of 64 tokens, and one for
    each doubling of the distance. There is no matrix of query x key, forward or backward: plain operations of autograd
    keep n log(n) numbers per head dimension for the backward pass. Query heads share the matrices of their key head.

    **Memory in training.** For heads of 64 in float32, autograd keeps 18 KiB per token and head of a row of 1,024
    tokens, and 20 KiB of a row of 8,192. Plain causal attention keeps 1 KiB. ``torch.utils.checkpoint.checkpoint``
    around `read` and `attend` keeps only their inputs, and computes the forward pass twice.

    In the paper every layer has its own parameters, so build an encoding for each layer.

    **Compilation.** `attend` over whole rows is one graph of `torch.compile`, forward and backward. The number of
    operations depends on the number of blocks, so the compiler makes a new graph for each number, and for rows whose
    last block is full. Use few lengths: the compiler stops after eight graphs by default. Do not compile decoding: a
    step with a cache is one graph, too, but in a test with small blocks almost every step was compiled again.

    **Decoding.** Every new token changes all cached keys. ``KVCache(encoding=encoding)`` changes them in place, 64
    tokens at a time or more, and keeps the features of the last 32 tokens or more. `truncate` can remove these tokens,
    except the first two, which the convolution reads. It raises an error for earlier ones, because a matrix cannot be
    undone. A cache without the encoding stores the features of every token, twice the memory of its keys, and prepares
    all keys again in every step. It can be truncated anywhere.

    Args:
        num_heads: the number of key/value heads. The number of query heads is a multiple.
        head_dim: dimensions per head.
        d_model: the width of the hidden states.
        rank: the rank of W, as in the paper's models, or ``None`` for a full matrix (the authors' code with grouped
            queries).
        convolution: whether there is a convolution.

    Limits:
        It needs a causal mask, and the queries' own tokens among the keys. Rows that are padded, packed or
        cached have the results of the same rows alone up to rounding, because the blocks begin at other tokens. A cache
        that moves its keys does not support documents that continue after another document. There is no forget gate
        (PaTH-FoX). `locant.parallel` and `locant.swap` do not support it.

    Tested against:
        The product of matrices of every pair in NumPy, forward and every gradient, and the blocks of the authors'
        reference.

    >>> import locant
    >>> path, x, q = PaTH(8, 64, 512), torch.randn(2, 5, 512), torch.randn(2, 8, 5, 64)
    >>> positions = path.read(x, Positions.arange(5))
    >>> q, k = path.rotate(q, q, positions)
    >>> locant.attend(q, k, q, encoding=path, positions=positions).shape
    torch.Size([2, 8, 5, 64])
    """

    info = EncodingInfo(
        name="path",
        aliases=("householder", "path_attention"),
        kind="relative",
        parameters="rank x (d_model + num_heads x head_dim) + num_heads x (3 head_dim + d_model + 1)",
        cost_of_tokens="in every layer, a projection of low rank, and head_dim products per head and doubling",
        cost_of_pairs="nothing",
        extrapolation="better than rotary in its paper",
        used_by="its paper's models",
        paper="Yang 2025, arXiv 2505.16381",
    )
    needs_all_keys = True

    def __init__(
        self, num_heads: int, head_dim: int, d_model: int, *, rank: int | None = 32, convolution: bool = True
    ) -> None:
        super().__init__()
        self.num_heads = whole("num_heads", num_heads, 1, MAX_WIDTH, remedy="pass the number of key heads")
        self.head_dim = whole("head_dim", head_dim, 1, MAX_WIDTH, remedy="pass the width of a head")
        self.d_model = whole("d_model", d_model, 1, MAX_WIDTH, remedy="pass the width of the hidden states")
        self.rank = None if rank is None else whole("rank", rank, 1, MAX_WIDTH, remedy="rank=32")
        self.convolution = flag("convolution", convolution)
        out = self.num_heads * self.head_dim
        self.down = None if self.rank is None else nn.Parameter(torch.empty(self.rank, self.d_model))
        self.up = nn.Parameter(torch.empty(out, self.rank or self.d_model))
        self.kernel = nn.Parameter(torch.empty(out, PAST + 1)) if self.convolution else None
        self.strength = nn.Parameter(torch.empty(self.num_heads, self.d_model))
        self.offset = nn.Parameter(torch.empty(self.num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in (self.down, self.up, self.kernel, self.strength):
            if weight is not None:
                nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        nn.init.zeros_(self.offset)  # a strength of 1

    def read(self, x: Embeddings, positions: Positions, past: Positions | None = None) -> Positions:
        """Return `positions` with the direction and the strength of each token, and what the convolution reads.

        Raises:
            LocantError: the convolution needs tokens that are known to be missing, as in a decoding step without
                `past`.
        """
        require_positions(positions)
        require_embeddings(self, x, positions, self.d_model)
        if self.convolution and (past is None or not past.seq_len):
            require_earlier_tokens(
                positions, "the convolution of PaTH", of_cache="past=cache.positions",
                of_shard="read whole rows, and give the ranks different rows or different heads",
            )  # fmt: skip
        rows, dtype = positions.expand(x.shape[0]), bias_dtype(x)
        with _without_autocast(x):
            x = x.to(dtype)
            hidden = x if self.down is None else F.linear(x, self.down.to(dtype))
            u = F.linear(hidden, self.up.to(dtype)).unflatten(-1, (self.num_heads, self.head_dim))
            beta = 2 * torch.sigmoid(F.linear(x, self.strength.to(dtype), self.offset.to(dtype)))[..., None]
            direction = u if self.kernel is None else F.silu(self._convolve(u, self.kernel, rows, past))
            w = direction * (direction.square().sum(-1, keepdim=True) + EPS).rsqrt()
            features = torch.cat([w, beta] if self.kernel is None else [w, beta, u], dim=-1)
        if rows.document_or_none is not None:
            features = features.masked_fill((rows.document_or_none == PADDING)[..., None, None], 0.0)
        return dataclasses.replace(rows, read=TokenFeatures(of_key=features))

    def _convolve(
        self, u: Float[Tensor, "batch seq heads head_dim"], kernel: Tensor, rows: Positions, past: Positions | None
    ) -> Float[Tensor, "batch seq heads head_dim"]:
        """Return the convolution over each token and the two tokens before it in its document."""
        num_new = u.shape[1]
        if past is not None and past.seq_len:
            earlier, u_earlier = self._earlier(past, len(u))
            u = torch.cat([u_earlier.to(u.dtype), u], dim=1)
            rows = Positions.cat([dataclasses.replace(each, read=TokenFeatures()) for each in (earlier, rows)])
        slots = None if rows.start is not None else _token_order(rows)
        ordered, document = (u, None) if slots is None else (_take(u, slots), rows.document.gather(1, slots))
        kernel = kernel.to(u.dtype).unflatten(0, (self.num_heads, self.head_dim))
        convolved = ordered * kernel[..., PAST]
        for distance in range(1, PAST + 1):
            before = F.pad(ordered, (0, 0, 0, 0, distance, 0))[:, : u.shape[1]]
            if document is not None:
                same = F.pad(document, (distance, 0), value=PADDING)[:, : u.shape[1]] == document
                before = before.masked_fill(~same[..., None, None], 0.0)
            convolved = convolved + before * kernel[..., PAST - distance]
        if slots is not None:
            convolved = _take(convolved, slots.argsort(dim=1))
        return convolved[:, u.shape[1] - num_new :]

    def _earlier(self, past: Positions, batch: int) -> tuple[Positions, Tensor]:
        """Return cached tokens, with at least the last two of each row, and what the convolution reads of them."""
        features = past.read.of_key if past.read.recent is None else past.read.recent
        if features is None:
            raise self._without_features("past")
        count = min(features.shape[1], PAST) if past.start is not None else features.shape[1]
        earlier = past.expand(batch).slice(past.seq_len - count, past.seq_len)
        u = features[:, features.shape[1] - count :, :, self.head_dim + 1 :]
        return earlier, u.expand(batch, -1, -1, -1)

    def _without_features(self, name: str) -> LocantError:
        return LocantError(f"got {name} without the features that PaTH reads from hidden states", REMEDY)

    def rotate(
        self,
        q: Queries,
        k: Keys,
        positions: OptionalPositions = None,
        k_positions: OptionalPositions = None,
        *,
        inplace: bool = False,
    ) -> tuple[Queries, Keys]:
        """Return queries and keys unchanged. `attend` moves them for each set of pairs."""
        positions, keys = resolve_positions(self, q, k, positions, k_positions)
        require_heads("q", q, positions, self.head_dim)
        require_heads("k", k, keys, self.head_dim)
        if positions.read.of_key is None:
            raise self._without_features("positions")
        return q, k

    def pair_sets(
        self, q: Queries, k: Keys, v: Float[Tensor, "batch kv_heads key value_dim"], queries: Positions, keys: Positions
    ) -> PairSets:
        """Return the pairs within blocks of tokens, the pairs of each doubling of the distance, and cached keys.

        The keys are either the tokens whose features are known, or a cache that has moved its keys. There only the last
        keys have features.

        Raises:
            LocantError: the features are missing, or a query is not one of the keys.
        """
        for name, x, tokens in (("q", q, queries), ("k", k, keys)):
            require_heads(name, x, tokens, self.head_dim)
            tokens.require_single_axis("PaTH")
        k, v = (self._for_own_heads(x, q.shape[1]) for x in (k, v))
        features = keys.read.of_key if keys.read.recent is None else keys.read.recent
        if features is None:
            raise self._without_features("positions" if queries is keys else "k_positions")
        count, num_keys = features.shape[1], k.shape[2]
        moved, tail = num_keys - count, keys.slice(num_keys - count, num_keys)
        features = features.expand(len(q), -1, -1, -1)
        if tail.document_or_none is not None:  # a cache may have removed tokens of some rows
            features = features.masked_fill((tail.document_or_none == PADDING)[..., None, None], 0.0)
        chunk = _Chunk(q, k[:, :, moved:], v[:, :, moved:], features, tail, count - q.shape[2])
        row_of = column_of = None
        if not (queries is keys or _same_tokens(queries, tail)) or not _is_in_order(tail):
            if moved:
                raise LocantError("got queries that are not the last tokens of the cache", REMEDY)
            chunk, row_of, column_of = chunk.sorted(queries)
        sets = self._sets(chunk, queries, keys.slice(0, moved), k[:, :, :moved], v[:, :, :moved])
        return PairSets(sets, chunk.q.shape[2], row_of, column_of)

    def _sets(self, chunk: _Chunk, queries: Positions, keys: Positions, k: Tensor, v: Tensor) -> Iterator[PairSet]:
        """Yield the sets of pairs within a chunk, and the pairs with keys before it, which later tokens have moved."""
        chunk = chunk.isolated()
        q, dtype, device = chunk.q, bias_dtype(chunk.q), chunk.q.device
        w, beta, _ = chunk.features.to(dtype).transpose(1, 2).split(_widths(self.head_dim, chunk.features), dim=-1)
        path = HouseholderPath(q.to(dtype), chunk.k.to(dtype), w, beta[..., 0])
        for number, level in enumerate(path.levels()):
            narrow = dtype if number == 0 else q.dtype  # within a block, large products cancel
            for span in level.spans:
                rows, columns = span.rows(device), span.columns(device)
                vectors = group(level.q, rows), group(level.k, columns), group(chunk.v, columns)
                q_group, k_group, v_group = (x.to(narrow) for x in vectors)
                q_at, k_at = chunk.positions_of(span)
                yield PairSet(q_group, k_group, v_group, q_at, k_at, rows, columns + k.shape[2])
        if k.shape[2]:
            rows, columns = (torch.arange(x.shape[2], device=device)[None] for x in (q, k))
            yield PairSet(path.moved_queries.to(q.dtype), k, v, queries, keys, rows, columns)

    def _for_own_heads(self, x: Tensor, heads: int) -> Tensor:
        """Return keys or values with a head for each matrix. Fewer heads are repeated."""
        if x.shape[1] == self.num_heads:
            return x
        if self.num_heads % x.shape[1] or heads % self.num_heads:
            got = f"got {heads} query heads and {x.shape[1]} key heads for PaTH with num_heads={self.num_heads}"
            raise ShapeError(got, f"build PaTH with num_heads={x.shape[1]}, the number of key heads")
        return x.repeat_interleave(self.num_heads // x.shape[1], dim=1)

    def settle_keys(self, keys: Keys, cached: Positions, new: Positions) -> Tensor:
        """Move cached keys over the matrices of recent tokens, in place. Return the features that are still needed.

        It happens `SETTLE` tokens at a time or more, because each time rounds the keys to their dtype.
        """
        recent = cached.read.recent
        if recent is None:
            raise self._without_features("the cache")
        if keys.shape[1] != self.num_heads:
            got = f"got a cache of {keys.shape[1]} key heads for PaTH with num_heads={self.num_heads}"
            raise ShapeError(got, f"build PaTH with num_heads={keys.shape[1]}, or use KVCache() without encoding")
        _require_continuing(cached, new)
        num_recent = recent.shape[1]
        count = num_recent - RECENT if num_recent >= SETTLE + RECENT else 0
        if count and cached.document_or_none is not None:
            count = min(count, _first_needed(cached.slice(cached.seq_len - num_recent, cached.seq_len)))
        if count:
            moved, dtype = keys.shape[2] - num_recent, recent.dtype
            settled, settled_keys = recent[:, :count], keys[:, :, moved : moved + count]
            if cached.document_or_none is not None:
                settled, is_not_finite = _split_not_finite(settled)
                keys.masked_fill_(_is_before(is_not_finite, cached.document, moved)[..., None], torch.nan)
            settled = settled.transpose(1, 2)
            w, beta, _ = settled.split(_widths(self.head_dim, settled), dim=-1)
            path = HouseholderPath(settled_keys[:, :, :0].to(dtype), settled_keys.to(dtype), w, beta[..., 0]).finish()
            keys[:, :, :moved] = (keys[:, :, :moved].to(dtype) @ path.product.mT).to(keys.dtype)
            settled_keys.copy_(path.moved_keys)
        return recent[:, count:]

    def truncate_recent(self, cached: Positions, kept: Int[Tensor, " batch"]) -> Tensor | None:
        """Return the features of recent tokens if each row keeps this many of them, with zeros for removed tokens.

        Raises:
            LocantError: keys have moved over removed tokens, or the convolution needs removed tokens.
        """
        if (recent := cached.read.recent) is None:
            return None
        num_recent, slots = recent.shape[1], torch.arange(recent.shape[1], device=recent.device)
        stays = slots < kept[:, None]
        if cached.seq_len > num_recent:
            real = cached.document[:, -num_recent:] != PADDING
            needed = PAST if self.convolution else 0
            if bool(((real & stays).sum(1) < needed).any()) or bool((kept < 0).any()):
                got = f"got a length that removes more than the last {num_recent - needed} tokens of a cache for PaTH"
                words = "whose older keys have moved over the removed tokens, and a matrix cannot be undone"
                remedy = "use cache.clear() and read the tokens again, or KVCache() without encoding"
                raise LocantError(f"{got}, {words}", remedy)
        return recent.masked_fill(~stays[..., None, None], 0.0)[:, : int(kept.amax())]

    def extra_repr(self) -> str:
        sizes = f"num_heads={self.num_heads}, head_dim={self.head_dim}, d_model={self.d_model}, rank={self.rank}"
        return sizes if self.convolution else f"{sizes}, convolution=False"


class _Chunk(NamedTuple):
    """Tokens with features, whose last tokens are the queries."""

    q: Float[Tensor, "batch heads query head_dim"]
    k: Float[Tensor, "batch kv_heads token head_dim"]
    v: Float[Tensor, "batch kv_heads token value_dim"]
    features: Float[Tensor, "batch token kv_heads features"]
    tokens: Positions
    first: int
    """The slot of the first query."""

    def positions_of(self, span: Span) -> tuple[Positions, Positions]:
        """Return the positions of the queries and of the keys of all groups."""
        device = self.q.device
        if self.tokens.start is not None:  # all groups have the same mask
            queries = Positions.after(span.row + self.first - span.column, span.num_rows, device=device)
            return queries, Positions.arange(span.num_columns, device=device)
        slots = span.rows(device) + self.first, span.columns(device)
        queries, keys = (group_positions(self.tokens, len(self.q), each) for each in slots)
        return queries, keys

    def isolated(self) -> _Chunk:
        """Return a chunk in which features that are not finite cannot reach other documents.

        The matrices of a block are multiplied across documents. So such a token gets zeros, the identity, and the
        queries of its document from this token on get NaN.
        """
        if self.tokens.document_or_none is None:
            return self
        features, is_not_finite = _split_not_finite(self.features)
        document, last = self.tokens.document.expand(len(self.q), -1), last_slot(is_not_finite)
        of_last = document.gather(1, last.flatten(1).clamp(min=0)).view_as(last)
        is_after = ((last >= 0) & (of_last == document[..., None]))[:, self.first :].transpose(1, 2)
        is_after = is_after.repeat_interleave(self.q.shape[1] // is_after.shape[1], dim=1)
        return self._replace(q=self.q.masked_fill(is_after[..., None], torch.nan), features=features)

    def sorted(self, queries: Positions) -> tuple[_Chunk, Tensor, Tensor]:
        """Return the tokens by document and order, the slot of each query among the queries, and of each key."""
        batch, num_queries, num_tokens = len(self.q), self.q.shape[2], self.k.shape[2]
        tokens, queries = self.tokens.expand(batch), queries.expand(batch)
        slots = _token_order(tokens)
        ids = _token_ids(tokens).gather(1, slots)
        order = _token_order(queries)
        query_ids = _token_ids(queries).gather(1, order)
        nearest = torch.searchsorted(query_ids, ids).clamp(max=num_queries - 1)
        is_query = (query_ids.gather(1, nearest) == ids) & (ids != NO_ID)
        row_of = torch.searchsorted(ids, _token_ids(queries).contiguous()).clamp(max=num_tokens - 1)
        first = 0
        if host_can_read(ids):
            if not bool(((ids.gather(1, row_of) == _token_ids(queries)) | (queries.document == PADDING)).all()):
                got = "got queries that are not among the keys, and PaTH needs the matrices of all tokens between"
                raise LocantError(got, REMEDY)
            first = num_tokens - num_queries
            first = 0 if bool(is_query[:, :first].any()) else first
        q = _take(self.q, order.gather(1, nearest), dim=2).masked_fill(~is_query[:, None, :, None], 0.0)
        k, v = (_take(x, slots, dim=2) for x in (self.k, self.v))
        features = _take(self.features, slots)
        chosen = dataclasses.replace(
            tokens, index=tokens.index.gather(1, slots), document_or_none=tokens.document.gather(1, slots),
            order_or_none=None if tokens.order_or_none is None else tokens.order.gather(1, slots), start=None,
            read=TokenFeatures(),
        )  # fmt: skip
        chunk = _Chunk(q[:, :, first:], k, v, features, chosen, first)
        return chunk, (row_of - first).clamp(min=0), slots.argsort(dim=1)


def _split_not_finite(
    features: Float[Tensor, "batch token heads features"],
) -> tuple[Float[Tensor, "batch token heads features"], Bool[Tensor, "batch token heads"]]:
    """Return the features with zeros for tokens whose features are not finite, and which tokens these are."""
    is_finite = features.isfinite().all(-1)
    return features.where(is_finite[..., None], 0.0), ~is_finite


def _is_before(
    marked: Bool[Tensor, "batch some heads"], document: Int[Tensor, "batch token"], first: int
) -> Bool[Tensor, "batch heads token"]:
    """Return whether a later token of the same document is marked. The tokens of `marked` begin at the slot `first`."""
    document, slots = document.expand(len(marked), -1), torch.arange(document.shape[1], device=document.device)
    some = slice(first, first + marked.shape[1])
    is_before = (document[:, :, None] == document[:, None, some]) & (slots[:, None] < slots[some])
    return (is_before.float() @ marked.float()).mT > 0


def _widths(head_dim: int, features: Tensor) -> list[int]:
    return [head_dim, 1, features.shape[-1] - head_dim - 1]


def _take(x: Tensor, slots: Int[Tensor, "batch seq"], dim: int = 1) -> Tensor:
    """Return the tokens of each row at its own slots."""
    index = slots.reshape(len(slots), *[1] * (dim - 1), -1, *[1] * (x.ndim - dim - 1))
    return x.gather(dim, index.expand(*x.shape[:dim], -1, *x.shape[dim + 1 :]))


NO_ID = torch.iinfo(torch.int64).min
"""The number of padding, which is smaller than the number of every token."""


def _token_ids(positions: Positions) -> Int[Tensor, "batch seq"]:
    """Return a number for each token that grows with its document and its order."""
    ids = positions.document * 2**32 + positions.order
    return ids.masked_fill(positions.document == PADDING, NO_ID)


def _token_order(positions: Positions) -> Int[Tensor, "batch seq"]:
    """Return the slots of tokens sorted by document and order, after the padding."""
    return _token_ids(positions).argsort(dim=1, stable=True)


def _is_in_order(tokens: Positions) -> bool:
    """Return whether every row is known to have its documents one after the other, in order, with any padding."""
    if tokens.start is not None:
        return True
    if not host_can_read(tokens.index):
        return False
    ids = _token_ids(tokens)
    largest = F.pad(ids.cummax(1).values, (1, 0), value=NO_ID)[:, :-1]
    return bool(((ids > largest) | (ids == NO_ID)).all())


def _same_tokens(queries: Positions, tokens: Positions) -> bool:
    """Return whether the queries are known to be the last of these tokens."""
    n = queries.seq_len
    if n > tokens.seq_len:
        return False
    if queries.start is not None and tokens.start is not None:
        return queries.start + n == tokens.start + tokens.seq_len
    if not (host_can_read(queries.index) and host_can_read(tokens.index)):
        return False
    last = tokens.slice(tokens.seq_len - n, tokens.seq_len)
    return bool((_token_ids(queries) == _token_ids(last)).all())


def _require_continuing(cached: Positions, new: Positions) -> None:
    """Raise if a new token belongs to a cached document that is not the last one of its row."""
    if new.document_or_none is None and cached.document_or_none is None:
        return
    if not (host_can_read(cached.index) and host_can_read(new.index)):
        return
    cached, new = cached.expand_together(new)
    if not _is_in_order(dataclasses.replace(Positions.cat([cached, new]), start=None)):
        got = "got tokens of a document that other documents follow in the cache, whose keys have moved over these"
        raise LocantError(got, "use KVCache() without encoding, or one row for each document")


def _first_needed(tokens: Positions) -> int:
    """Return the number of first slots without which every row keeps its last two tokens."""
    real = tokens.document != PADDING
    later = real.flip(1).cumsum(1).flip(1)
    enough = (later >= later[:, :1].clamp(max=PAST)).all(0)
    return int(enough.sum()) - 1


def _without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Return a context in which products have the dtype of their factors."""
    device = x.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()
