"""A few queries over a cache on a CPU: which way is taken, and the same numbers as pair by pair in float64."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch

from locant import ALiBi, Kerple, PositionEncoding, Positions, Sandwich, T5Bias, attend
from locant.attention.choice import choose_backend
from locant.attention.inputs import AttentionInputs
from locant.attention.mask import AttentionMask
from locant.kernels import distance_attention, native
from tests.tolerances import assert_close

HEADS, KV_HEADS, KEYS, WIDTH = 4, 2, 50, 16
needs_library = pytest.mark.skipif(
    native.function(distance_attention.FUNCTION) is None, reason=f"native kernels are {native.status()}"
)


def tokens(queries: int, dtype: torch.dtype = torch.float32, batch: int = 2) -> tuple[torch.Tensor, ...]:
    q = torch.randn(batch, HEADS, queries, WIDTH).to(dtype)
    return q, *(torch.randn(batch, KV_HEADS, KEYS, WIDTH).to(dtype) for _ in range(2))


def choice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, encoding: PositionEncoding | None = None) -> Any:
    queries = q.shape[2]
    mask = AttentionMask(Positions.after(KEYS - queries, queries), Positions.arange(KEYS))
    return choose_backend("auto", AttentionInputs(q, k, v, mask, encoding))


@needs_library
@torch.no_grad()
def test_a_few_queries_over_a_cache_read_it_once() -> None:
    for queries in (1, 2, 3):
        assert choice(*tokens(queries)).method.name == "table"
        assert choice(*tokens(queries), ALiBi(HEADS)).method.name == "table"
    assert choice(*tokens(4)).name == "sdpa"  # 50 keys are fewer than 16 to each of 4 queries
    assert choice(*tokens(1, torch.float64)).name == "sdpa"
    with mock.patch.object(native, "has", return_value=False):
        assert choice(*tokens(1)).name == "sdpa"
    with torch.enable_grad():
        q, k, v = tokens(1)
        assert choice(q.requires_grad_(), k, v).name == "sdpa"


WAYS = list(itertools.product([True, False], [None, 1, 7, 200], ["native", "torch"]))
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@torch.no_grad()
@pytest.mark.parametrize(("causal", "window", "path"), WAYS)
def test_every_bias_against_float64(causal: bool, window: int | None, path: str) -> None:
    """Each of the two directions, of the windows and of the paths with every dtype."""
    dtype = DTYPES[WAYS.index((causal, window, path)) % 3]
    encodings = (None, ALiBi(HEADS), T5Bias(HEADS, bidirectional=True), Kerple(HEADS), Sandwich(HEADS))
    positions, keys = Positions.after(40, 1), Positions.arange(KEYS)
    sinks = torch.randn(HEADS)
    context = mock.patch.object(native, "has", return_value=False) if path == "torch" else mock.MagicMock()
    with context:
        for encoding in encodings:
            for beside in ({}, {"sinks": sinks, "softcap": 4.0, "return_lse": True}):
                q, k, v = tokens(1, dtype)
                options = {"encoding": encoding, "positions": positions, "k_positions": keys, "causal": causal}
                options |= {"window": window, **beside}
                wide = attend(q.double(), k.double(), v.double(), **options, backend="eager")  # type: ignore[call-overload]
                for backend in ("auto", "tiled", "sdpa") if not beside else ("auto", "tiled"):
                    ours = attend(q, k, v, **options, backend=backend)  # type: ignore[call-overload]
                    for found, truth in zip(*((x if beside else (x,)) for x in (ours, wide)), strict=True):
                        assert_close(found, truth, dtype)


@needs_library
@torch.no_grad()
def test_keys_outside_of_the_window_are_not_read() -> None:
    q, k, v = tokens(1)
    options: Any = {"positions": Positions.after(49, 1), "k_positions": Positions.arange(KEYS), "window": 7}
    for encoding in (None, ALiBi(HEADS)):
        expected = attend(q, k, v, encoding=encoding, **options)
        hidden = k.clone(), v.clone()
        for x in hidden:
            x[:, :, :43] = torch.nan
        assert torch.equal(attend(q, *hidden, encoding=encoding, **options), expected)


@needs_library
@pytest.mark.unchecked
@torch.no_grad()
def test_a_compiled_step_takes_the_same_way() -> None:
    q, k, v = tokens(1)
    encoding, keys = ALiBi(HEADS), Positions.arange(KEYS)

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, here: Positions) -> torch.Tensor:
        return attend(q, k, v, encoding=encoding, positions=here, k_positions=keys)

    here = Positions.after(49, 1)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v, here), step(q, k, v, here))
