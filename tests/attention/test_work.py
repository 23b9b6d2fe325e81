"""How much is computed and held, counted where results do not show it: hidden keys, tiles, second passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from locant import ALiBi, Cope, PositionEncoding, Positions, Shaw, attend
from locant.attention.backends import tiled
from locant.attention.inputs import AttentionInputs
from locant.kernels import distance_attention as kernel
from locant.positions.score_bias import Written

HEADS, HEAD_DIM = 2, 8


def drawn(length: int, heads: int = HEADS) -> Tensor:
    return torch.randn(1, heads, length, HEAD_DIM)


class Counter:
    """Pairs of queries and keys that a function is called with."""

    def __init__(self, function: Callable[..., object], first: int = 0) -> None:
        self.function, self.first, self.pairs = function, first, 0

    def __call__(self, *arguments: Any, **options: object) -> object:
        inputs = arguments[0]
        q, k = (inputs.q, inputs.k) if isinstance(inputs, AttentionInputs) else arguments[self.first : self.first + 2]
        self.pairs += q.shape[2] * k.shape[2]
        return self.function(*arguments, **options)


@pytest.fixture
def forward(monkeypatch: pytest.MonkeyPatch) -> Counter:
    monkeypatch.setattr(kernel, "NARROW_TILE", 16)
    counter = Counter(kernel.FLASH)
    monkeypatch.setattr(kernel, "FLASH", counter)
    return counter


@pytest.fixture
def backward(monkeypatch: pytest.MonkeyPatch) -> Counter:
    counter = Counter(kernel.FLASH_BACKWARD, first=1)
    monkeypatch.setattr(kernel, "FLASH_BACKWARD", counter)
    return counter


@pytest.mark.parametrize(
    ("window", "causal", "pairs"),
    [(None, True, 16 * (16 + 32 + 48 + 64)), (None, False, 64 * 64), (9, True, 16 * (16 + 24 * 3))],
    ids=["causal", "both ways", "window"],
)
def test_keys_that_no_query_of_a_tile_sees_are_left_out(
    window: int | None, causal: bool, pairs: int, forward: Counter, backward: Counter
) -> None:
    q = drawn(64).requires_grad_()
    options = {"window": window, "causal": causal, "backend": "tiled", "positions": Positions.arange(64)}
    attend(q, q, q, encoding=ALiBi(HEADS), **options).sum().backward()
    assert forward.pairs == backward.pairs == pairs


@pytest.mark.parametrize(
    ("positions", "pairs"),
    [
        (Positions.packed([32, 32]), 2 * (16 * 16 + 16 * 32)),
        (Positions.from_mask(torch.arange(64)[None] >= 32), 16 * 1 + 16 * 1 + 16 * 16 + 16 * 32),
    ],
    ids=["packed", "padded"],
)
def test_keys_of_other_documents_are_left_out(
    positions: Positions, pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiled, "TILE_BYTES", 0)
    counter = Counter(tiled.sdpa_attention)
    monkeypatch.setattr(tiled, "sdpa_attention", counter)
    q = drawn(64)
    attend(q, q, q, encoding=Cope(q.shape[-1]), positions=positions, backend="tiled")
    assert counter.pairs == pairs


class ByAuthor(PositionEncoding):
    """Answers with a matrix."""

    def score_bias(self, q: Tensor, k: Tensor, queries: Positions, keys: Positions, heads: object = None) -> Written:
        write = lambda q, k, *_: (q * 0.1) @ k.mT  # noqa: E731
        return Written(q=q, k=k, queries=queries, keys=keys, write=write, reads_only_arguments=True)


class Computed(PositionEncoding):
    """Answers with a matrix that is computed already, from the vectors of all tokens."""

    def score_bias(self, q: Tensor, k: Tensor, queries: Positions, keys: Positions, heads: object = None) -> Written:
        matrix = (q @ k.mT).sum(-1, keepdim=True) * k.sum(-1)[:, :, None]
        return Written(q=q, k=k, queries=queries, keys=keys, write=lambda *_: matrix)


LEFT_PADDED = Positions.from_mask(torch.tensor([[0, 0] + [1] * 38, [1] * 40]))
ROWS = {
    "one document": (Positions.arange(40), None),
    "packed": (Positions.packed([[25, 15], [4, 36]]), None),
    "padded": (LEFT_PADDED, None),
    "one query behind a cache": (Positions.after(39, 1), Positions.arange(40)),
    "one query behind a padded cache": (LEFT_PADDED.slice(39, 40), LEFT_PADDED),
}


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("backend", ["auto", "eager", "sdpa"])
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("kind", [lambda: ALiBi(HEADS, learned=True), ByAuthor], ids=["by distance", "a matrix"])
def test_attention_asks_an_encoding_for_its_bias_once(
    kind: Callable[[], PositionEncoding], row: str, backend: str, learns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoding, (positions, keys) = kind(), ROWS[row]
    answered: list[object] = []
    score_bias = encoding.score_bias
    monkeypatch.setattr(encoding, "score_bias", lambda *given: answered.append(score_bias(*given)) or answered[-1])
    q = torch.randn(2, HEADS, positions.seq_len, HEAD_DIM, requires_grad=learns)
    k, v = torch.randn(2, 2, HEADS, (keys or positions).seq_len, HEAD_DIM)
    with torch.set_grad_enabled(learns):
        attend(q, k, v, encoding=encoding, positions=positions, k_positions=keys, backend=backend)
    assert len(answered) == 1


def test_a_bias_that_holds_vectors_is_asked_for_again_with_zeros_at_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    shaw, asked_with = Shaw(HEAD_DIM), list[Tensor]()
    score_bias = shaw.score_bias
    monkeypatch.setattr(shaw, "score_bias", lambda *given: asked_with.append(given[0]) or score_bias(*given))
    q, k, v = torch.randn(3, 2, HEADS, 40, HEAD_DIM)
    q[0, :, :2] = torch.nan
    attend(q, k, v, encoding=shaw, positions=LEFT_PADDED)
    assert not asked_with[-1][0, :, :2].any()


@pytest.mark.parametrize("backend", ["auto", "eager", "sdpa", "tiled"])
def test_a_matrix_that_is_computed_already_holds_zeros_at_padding_too(backend: str) -> None:
    q, k, v = torch.randn(3, 2, HEADS, 40, HEAD_DIM)
    for x in (q, k, v):
        x[0, :, :2] = torch.nan
    y = attend(q, k, v, encoding=Computed(), positions=LEFT_PADDED, backend=backend)
    assert not y[0, :, 2:].isnan().any()
