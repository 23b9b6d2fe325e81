"""Attention of few queries over many keys in C, against NumPy in float64, for each instruction set of this machine."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from locant.kernels import native
from locant.kernels.distance_attention import decode, supports
from tests.threads import threads
from tests.tolerances import assert_close

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
PART = 1_024
"""Keys of one part, as C has it."""


pytestmark = pytest.mark.usefixtures("variant")


def in_numpy(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, first: int, last: int, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """The formula, pair by pair; zeros and minus infinity where a query has no key."""
    group = q.shape[1] // k.shape[1]
    q64, k64, v64, bias = (x.double().numpy() for x in (q, k, v, table))
    k64, v64 = (x.repeat(group, axis=1) for x in (k64, v64))
    i, j = np.ogrid[: q.shape[2], : k.shape[2]]
    entry = i - j + k.shape[2] - 1
    scores = np.einsum("bhid,bhjd->bhij", q64, k64) * scale
    scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
    scores = np.where((first <= entry) & (entry <= last), scores + bias[:, entry], -np.inf)
    largest = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isneginf(largest), 0, largest))
    total = weights.sum(-1, keepdims=True)
    y = np.einsum("bhij,bhjd->bhid", weights / np.where(total == 0, 1, total), v64)
    with np.errstate(divide="ignore"):
        sums = (np.log(total) + largest)[..., 0]
    return torch.from_numpy(y), torch.from_numpy(sums)


def drawn(
    dtype: torch.dtype, batch: int, kv_heads: int, group: int, queries: int, keys: int, width: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q = torch.randn(batch, kv_heads * group, queries, width).to(dtype)
    k, v = (torch.randn(batch, kv_heads, keys, each).to(dtype) for each in (width, value_dim))
    return q, k, v, torch.randn(kv_heads * group, queries + keys - 1)


def holds(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> None:
    y, sums = decode(q, k, v, *rest)
    expected, expected_sums = in_numpy(q, k, v, *rest)
    assert y.dtype == q.dtype
    assert_close(y, expected)
    assert_close(sums, expected_sums)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("keys", [1, 31, 32, 33, PART - 1, PART, PART + 1, 2 * PART + 7])
def test_numbers_of_keys_around_those_of_a_part(keys: int, dtype: torch.dtype) -> None:
    holds(*drawn(dtype, 2, 2, 3, 1, keys, 16, 16), 0, keys - 1, 0.25, None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 3, 4, 7, 8, 15, 16, 17, 33, 80, 128, 576])
def test_heads_of_every_width(width: int, dtype: torch.dtype) -> None:
    for value_dim in {1, width, 24}:
        holds(*drawn(dtype, 1, 2, 2, 1, 70, width, value_dim), 0, 69, width**-0.5, None)


@given(
    st.sampled_from(DTYPES), st.integers(1, 3), st.integers(1, 3), st.integers(1, 9), st.integers(1, 8),
    st.integers(1, 90), st.integers(1, 20), st.integers(0, 97), st.integers(0, 97),
    st.sampled_from([None, 0.3, 30.0]),
)  # fmt: skip
def test_groups_queries_and_bounds(
    dtype: torch.dtype, batch: int, kv_heads: int, group: int, queries: int, keys: int, width: int, one: int, two: int,
    softcap: float | None,
) -> None:  # fmt: skip
    """Of the bounds some hide every key of some queries, or of all."""
    first, last = sorted(min(bound, queries + keys - 2) for bound in (one, two))
    holds(*drawn(dtype, batch, kv_heads, group, queries, keys, width, width + 1), first, last, 0.3, softcap)


def test_more_rows_than_are_taken_together() -> None:
    """64 rows, or fewer of wide heads."""
    for group, queries, width in ((9, 8, 8), (65, 1, 8), (40, 1, 576)):
        holds(*drawn(torch.float32, 1, 2, group, queries, 50, width, 8), 0, queries + 48, width**-0.5, None)


def test_one_table_for_all_heads() -> None:
    q, k, v, table = drawn(torch.float32, 2, 2, 2, 3, 40, 8, 8)
    holds(q, k, v, table[1:2], 0, 41, 1.0, None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_caches_and_projections_in_any_memory(dtype: torch.dtype) -> None:
    qkv = torch.randn(2, 40, 8, 24).to(dtype)
    q, k, v = (x.transpose(1, 2) for x in qkv.split([4, 2, 2], dim=2))
    table = torch.randn(4, 40)
    holds(q[:, :, -1:], k, v, table, 0, 39, 0.2, None)
    holds(q[:, :, -1:, ::2], k[..., 1::2], v[..., 3:], table, 0, 39, 0.2, None)
    cache = torch.randn(2, 2, 100, 24).to(dtype)
    holds(q[:, :, -1:], cache[:, :, 7:47], cache[:, :, 50:90, :5], table, 0, 39, 0.2, None)
    sparse = torch.randn(2, 2, 40, 48).to(dtype)[..., ::2]
    holds(q[:, :, -1:], sparse, torch._neg_view(v), table.T.contiguous().T, 0, 39, 0.2, None)
    nothing = torch._efficientzerotensor(v.shape, dtype=dtype)
    assert not decode(q[:, :, -1:], k, nothing, table, 0, 39, 0.2, None)[0].any()


@pytest.mark.parametrize("scale", [-0.5, 0.0, 1e-6, 2.0**10, 2.0**60])
def test_scores_of_every_size(scale: float) -> None:
    """Small whole numbers, so that scores are exact, and differ by more than weights can tell, or not at all."""
    q, k = (torch.randint(-3, 4, (1, 1, length, 4)).float() for length in (1, 60))
    v, table = torch.randn(1, 1, 60, 8), torch.zeros(1, 60)
    holds(q, k, v, table, 0, 59, scale, None)
    holds(q, k, v, table, 0, 59, scale, 16.0)


def test_minus_infinity_in_the_table_hides_keys() -> None:
    q, k, v, table = drawn(torch.float32, 1, 2, 1, 1, 2 * PART, 8, 8)
    table[0, : PART + 5] = -torch.inf
    table[1] = -torch.inf
    holds(q, k, v, table, 0, 2 * PART - 1, 0.3, None)


def test_what_is_hidden_is_not_read_and_what_is_seen_may_be_nan() -> None:
    q, k, v, table = drawn(torch.float32, 1, 1, 2, 1, 200, 8, 8)
    k[:, :, :150], v[:, :, :150] = torch.nan, torch.nan
    ours, _ = decode(q, k, v, table, 0, 49, 0.3, None)
    assert_close(ours, in_numpy(q, k[:, :, 150:], v[:, :, 150:], table[:, :50], 0, 49, 0.3, None)[0])
    assert decode(q, k, v, table, 0, 50, 0.3, None)[0].isnan().all()


def test_the_number_of_threads_changes_no_bit() -> None:
    q, k, v, table = drawn(torch.bfloat16, 2, 2, 4, 1, 3 * PART + 1, 64, 64)
    found = []
    for count in (1, 2, 5):
        with threads(count):
            found.append(decode(q, k, v, table, 0, 3 * PART, 0.3, None))
    for (y, sums), (other, other_sums) in itertools.pairwise(found):
        assert torch.equal(y, other)
        assert torch.equal(sums, other_sums)


def test_what_it_takes() -> None:
    def taken(queries: int = 1, keys: int = 16, width: int = 8, dtype: torch.dtype = torch.float32) -> bool:
        q, _, v, _ = drawn(dtype, 1, 1, 1, queries, keys, width, 8)
        return supports(q, v)

    assert [taken(queries=queries, keys=1_000) for queries in (7, 8, 9)] == [True, True, False]
    assert [taken(keys=keys) for keys in (15, 16, 17)] == [False, True, True]
    assert [taken(width=width) for width in (1_023, 1_024, 1_025)] == [True, True, False]
    assert [taken(dtype=dtype) for dtype in (*DTYPES, torch.float64)] == [True, True, True, False]
    with mock.patch.object(native, "has", return_value=False):
        assert not taken()
