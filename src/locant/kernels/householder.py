"""Products of Householder matrices between pairs of tokens, without a matrix for each pair.

Token t has the matrix ``H_t = I - beta_t w_t w_t^T``. A pair (i, j) of a query and an earlier key has the score
``q_i^T H_i H_{i-1} ... H_{j+1} k_j``. The tokens are cut into blocks, and the blocks are joined in pairs, the pairs in
pairs, and so on. Between two neighbours, a score is a plain product of a query that is moved back to the border and a
key that is moved forward to it. So log2(number of blocks) batches of plain products contain all scores.

Within a block of c tokens, the product is ``I - W^T U`` with ``U = (I + tril(diag(beta) W W^T, -1))^-1 diag(beta) W``
(the UT transform of Joffrain et al. 2006, https://doi.org/10.1145/1141885.1141886). A local score is also a plain
product, of vectors that are c wider: ``[q, -tril(Q W^T)]`` and ``[k, C^T]``, where C holds the share of each token in
the key.

It costs ``head_dim`` products per token and level, so n log(n) in all, and all matrices have a norm of at most 1 if w
has length 1 and beta is between 0 and 2. It never divides, so singular matrices (beta of 1) are allowed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

BLOCK = 64
"""The number of tokens in a block. Up to twice as many tokens are one block."""


class Span(NamedTuple):
    """Ranges of queries and keys, repeated: the queries of a range meet the keys of the same range."""

    row: int
    num_rows: int
    column: int
    num_columns: int
    groups: int
    step: int
    """The number of slots from one range to the next."""

    def rows(self, device: torch.device) -> Int[Tensor, "groups num_rows"]:
        return _ranges(self.row, self.num_rows, self, device)

    def columns(self, device: torch.device) -> Int[Tensor, "groups num_columns"]:
        return _ranges(self.column, self.num_columns, self, device)


def _ranges(start: int, length: int, span: Span, device: torch.device) -> Tensor:
    first = start + span.step * torch.arange(span.groups, device=device)
    return first[:, None] + torch.arange(length, device=device)


class Level(NamedTuple):
    """Vectors whose products are the scores of these pairs. Queries begin at the first query, keys at the first key."""

    q: Float[Tensor, "batch heads query width"]
    k: Float[Tensor, "batch kv_heads key width"]
    spans: list[Span]


class HouseholderPath:
    """The queries and keys of some consecutive tokens. The queries belong to the last of them.

    `levels` returns the vectors of each level. After it, `moved_queries`, `moved_keys` and `product` refer to the ends
    of the row.

    Args:
        q: ``batch heads query head_dim``.
        k, w: ``batch kv_heads token head_dim``.
        beta: ``batch kv_heads token``.
    """

    def __init__(self, q: Tensor, k: Tensor, w: Tensor, beta: Tensor) -> None:
        (_, heads, self.num_tokens, width), num_queries = k.shape, q.shape[2]
        self.first = self.num_tokens - num_queries
        self.block = max(self.num_tokens, 1) if self.num_tokens <= 2 * BLOCK else BLOCK
        self.num_blocks = -(-self.num_tokens // self.block)
        self._first_block = self.first // self.block
        after = self.num_blocks * self.block - self.num_tokens
        self._before = self.first - self._first_block * self.block
        q = F.pad(q.unflatten(1, (heads, -1)), (0, 0, self._before, after))
        q = q.unflatten(3, (self.num_blocks - self._first_block, self.block))
        k, w = (F.pad(x, (0, 0, 0, after)).unflatten(2, (self.num_blocks, self.block)) for x in (k, w))
        beta = F.pad(beta, (0, after)).unflatten(2, (self.num_blocks, self.block))[..., None]
        triangle = (beta * (w @ w.mT)).tril(-1)
        weighted = torch.cat([beta * w, (beta * (w @ k.mT)).tril(-1)], dim=-1)
        solved = torch.linalg.solve_triangular(triangle, weighted, upper=False, unitriangular=True)
        u, shares = solved.split([width, self.block], dim=-1)
        products = (q @ self._query_blocks(w).mT).tril()
        self._local = torch.cat([q, -products], dim=-1), torch.cat([k, shares.mT], dim=-1)
        self._q, self._k = q - products @ self._query_blocks(u), k - shares.mT @ w
        self._products = torch.eye(width, dtype=w.dtype, device=w.device) - w.mT @ u

    def _query_blocks(self, x: Tensor) -> Tensor:
        """Return the blocks with queries, with a dimension for the query heads that share a key head."""
        return x[:, :, None, self._first_block :]

    def levels(self) -> Iterator[Level]:
        """Yield the vectors of the blocks, and then those of each pair of neighbours."""
        blocks = range(self._first_block, self.num_blocks)
        q, k = self._local
        yield Level(self._flatten(q, 3), self._flatten(k, 2), self._spans(((i, i) for i in blocks), 1, 1))
        size = 1
        while size < self.num_blocks:
            second = range(1, -(-self.num_blocks // size), 2)
            spans = self._spans(((i, i - 1) for i in second), size, 2 * size)
            yield Level(self._flatten(self._q, 3), self._flatten(self._k, 2), spans)
            self._join(size)
            size *= 2

    def _flatten(self, x: Tensor, dim: int) -> Tensor:
        x = x.flatten(dim, dim + 1)
        return x if dim == 2 else x.flatten(1, 2)[:, :, self._before : self._before + self.num_tokens - self.first]

    def _spans(self, pairs: Iterator[tuple[int, int]], size: int, step: int) -> list[Span]:
        """Return ranges of slots for pairs of joined blocks, which contain `size` blocks each."""
        length = size * self.block
        ranges: list[tuple[int, int, int, int]] = []  # the compiler cannot call `list[tuple[...]]`
        for i, j in pairs:
            row, column = max(i * length, self.first), j * length
            num_rows = min((i + 1) * length, self.num_tokens) - row
            if num_rows > 0:
                ranges.append((row - self.first, num_rows, column, min(length, self.num_tokens - column)))
        spans: list[Span] = []
        for row, num_rows, column, num_columns in ranges:
            span = Span(row, num_rows, column, num_columns, groups=1, step=step * self.block)
            last = spans[-1] if spans else span._replace(groups=0)
            same_sizes = (last.num_rows, last.num_columns) == (num_rows, num_columns)
            if last.groups and same_sizes and last.row - last.column == row - column:
                spans[-1] = last._replace(groups=last.groups + 1)
            else:
                spans.append(span)
        return spans

    def _join(self, size: int) -> None:
        """Join neighbours of `size` blocks: move queries of the second and keys of the first over the other one."""
        device, of_block = self._k.device, [i // size for i in range(self.num_blocks)]
        last = of_block[-1]
        second = [i for i, number in enumerate(of_block) if number % 2 and i >= self._first_block]
        first = [i for i, number in enumerate(of_block) if number % 2 == 0 and number < last]

        def select(blocks: list[int]) -> Tensor:
            return torch.tensor(blocks, dtype=torch.int64, device=device)

        if second:
            slots = select([i - self._first_block for i in second])
            over = self._products.index_select(2, select([of_block[i] - 1 for i in second]))[:, :, None]
            self._q = self._q.index_copy(3, slots, self._q.index_select(3, slots) @ over)
        slots = select(first)
        over = self._products.index_select(2, select([of_block[i] + 1 for i in first]))
        self._k = self._k.index_copy(2, slots, self._k.index_select(2, slots) @ over.mT)
        joined = self._products[:, :, 1::2] @ self._products[:, :, : (last + 1) // 2 * 2 : 2]
        self._products = joined if last % 2 else torch.cat([joined, self._products[:, :, -1:]], dim=2)

    def finish(self) -> HouseholderPath:
        """Join all blocks, without the vectors of the levels."""
        for _ in self.levels():
            pass
        return self

    @property
    def moved_queries(self) -> Float[Tensor, "batch heads query head_dim"]:
        """The queries, moved back to before the first token."""
        return self._flatten(self._q, 3)

    @property
    def moved_keys(self) -> Float[Tensor, "batch kv_heads token head_dim"]:
        """The keys, moved forward over the last token."""
        return self._k.flatten(2, 3)[:, :, : self.num_tokens]

    @property
    def product(self) -> Float[Tensor, "batch kv_heads head_dim head_dim"]:
        """The product of all matrices, the last token's first."""
        return self._products[:, :, 0]
