"""A bias of straight pieces in C, against the formula in float64 and its derivatives, for each instruction set."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from locant.kernels import distance_attention as kernel
from locant.kernels import distance_biases, distance_pieces, native
from locant.kernels.distance_attention import distance_attention
from locant.kernels.distance_pieces import MOST_PIECES, Pieces, takes_pieces
from tests.tolerances import assert_close

SCALE = 0.4


@pytest.fixture(scope="module", autouse=True, params=native.runnable())
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    of_library = native.function
    if of_library(distance_pieces.FUNCTION) is None:
        pytest.skip(f"native kernels are {native.status()}")

    def function(name: str) -> Any:
        return of_library(name, request.param)

    with mock.patch.object(native, "function", function):
        yield request.param


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three queries, and a head at a time."""
    monkeypatch.setattr(kernel, "NARROW_TILE", 3)
    monkeypatch.setattr(distance_biases, "HELD_BIAS", 0)


def drawn(heads: int, kv_heads: int, queries: int, keys: int, kinks: list[float]) -> list[Tensor]:
    """q, k, v, the table, reach, kinks, slopes and offsets."""
    q, k, v = torch.randn(2, heads, queries, 5), torch.randn(2, kv_heads, keys, 5), torch.randn(2, kv_heads, keys, 7)
    table = torch.rand(1, queries + keys - 1).cumsum(1) * (2.0 / (queries + keys))
    pieces = (torch.tensor(kinks).reshape(-1), *(torch.randn(len(kinks) + 1, heads).T for _ in range(2)))
    return [q, k, v, table, 0.5 + torch.rand(queries), *pieces]


def written_out(given: list[Tensor], first: int, last: int, softcap: float | None) -> tuple[Tensor, Tensor]:
    """The formula, pair by pair."""
    q, k, v, table, reach, kinks, slopes, offsets = given
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    entry = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2]) + k.shape[2] - 1
    ratio = table[0, entry] / reach[:, None]
    piece = (ratio[..., None] > kinks).sum(-1)
    scores = q @ k.mT * SCALE
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    scores = scores + slopes[:, piece] * ratio + offsets[:, piece]
    scores = scores.masked_fill((entry < first) | (entry > last), -math.inf)
    return scores.softmax(-1).nan_to_num() @ v, scores.logsumexp(-1)


def holds(given: list[Tensor], first: int, last: int, softcap: float | None, learned: bool = True) -> None:
    """Outputs, log-sum-exps and gradients, with random cotangents; the bias is learned or given."""
    leaves, outcomes = [0, 1, 2, *((3, 4, 6, 7) if learned else ())], list[list[Tensor]]()
    cotangents = [torch.randn(*given[0].shape[:3], 7), torch.randn(given[0].shape[:3])]
    for dtype in (torch.float32, torch.float64):
        values = [x.detach().to(dtype).requires_grad_(i in leaves) for i, x in enumerate(given)]
        if dtype == torch.float64:
            y, lse = written_out(values, first, last, softcap)
        else:
            y, lse = distance_attention(*values[:4], first, last, SCALE, softcap, Pieces(*values[4:]))
        sees = ~lse.isneginf()
        total = (y * cotangents[0]).sum() + (lse[sees] * cotangents[1][sees]).sum() * (softcap is not None)
        outcomes.append([y, lse, *torch.autograd.grad(total, [values[i] for i in leaves])])
    for ours, truth in zip(*outcomes, strict=True):
        assert_close(ours, truth)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("learned", [True, False])
@pytest.mark.parametrize(
    ("queries", "keys", "first", "last"),
    [(1, 1, 0, 0), (8, 8, 7, 14), (8, 8, 9, 11), (5, 13, 12, 16), (13, 5, 4, 16), (7, 7, 13, 12)],
    ids=["one pair", "causal", "window, some without a key", "after", "before", "none"],
)
def test_tiles_of_every_shape(
    queries: int, keys: int, first: int, last: int, learned: bool, softcap: float | None
) -> None:
    for heads, kv_heads in ((1, 1), (4, 2)):
        holds(drawn(heads, kv_heads, queries, keys, [0.1, 0.4, 0.9]), first, last, softcap, learned)


@pytest.mark.parametrize(
    "kinks",
    [[], [-1.0], [50.0], [0.2, 0.2, 0.2], [-math.inf, 0.3, math.inf, math.inf], [i / 20 for i in range(40)]],
    ids=["none", "before all", "behind all", "one thrice", "infinite", "many"],
)
def test_kinks_anywhere(kinks: list[float]) -> None:
    holds(drawn(3, 3, 9, 9, kinks), 8, 16, None)


def test_more_diagonals_than_are_taken_together() -> None:
    """512 of them; rows of several instructions, and a rest."""
    holds(drawn(2, 1, 4, 1_100, [0.1, 0.5, 1.1]), 1_099, 1_102, None)


def test_entries_that_are_hidden_may_hold_anything() -> None:
    given = drawn(2, 2, 6, 6, [0.1, 0.4])
    given[3][:, :5] = math.nan
    y, _ = distance_attention(*given[:4], 5, 10, SCALE, None, Pieces(*given[4:]))
    assert y.isfinite().all()


def test_what_it_takes() -> None:
    assert takes_pieces(torch.float32, MOST_PIECES)
    assert not takes_pieces(torch.float32, MOST_PIECES + 1)
    assert not takes_pieces(torch.float64, 3)
    holds(drawn(1, 1, 3, 3, [i / 1_000 for i in range(MOST_PIECES - 1)]), 2, 4, None, learned=False)


@pytest.mark.slow
def test_opcheck() -> None:
    q, k, v, *rest = drawn(4, 2, 7, 9, [0.2, 0.5])
    given = (q, k, v[..., :5].contiguous(), *rest)  # of one width, as the operator has them
    q, k, v, table, *pieces = (x.requires_grad_(i != 5) for i, x in enumerate(given))
    torch.library.opcheck(kernel._attend, (q, k, v, table, 8, 14, SCALE, 0.7, *pieces))
    out, sums = kernel._attend(q, k, v, table, 8, 14, SCALE, None, *pieces)
    saved = [x.detach() for x in (torch.randn_like(out), q, k, v, table, out, sums)]
    for learned in (True, False):
        numbers = (8, 14, SCALE, None, learned, *(x.detach() for x in pieces))
        torch.library.opcheck(kernel._attend_backward, (saved[0], None, *saved[1:], *numbers))
