"""T5's bias, against T5."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import T5Config
from transformers.models.t5.modeling_t5 import T5Attention

from locant import Positions, RangeError, T5Bias
from tests.refusal import refuses


def bias(
    encoding: T5Bias, queries: Positions, keys: Positions | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    other = queries if keys is None else keys
    q = torch.zeros(queries.batch, encoding.num_heads, queries.seq_len, 2, dtype=dtype)
    return encoding.bias(q, torch.zeros(other.batch, 1, other.seq_len, 2, dtype=dtype), queries, keys)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(
    ("num_buckets", "max_distance"),
    [(32, 128), (32, 256), (64, 128), (16, 64), (320, 800), (8, 20),
     (6, 11), (33, 100), (9, 128), (18, 128), (40, 640), (80, 640)],
)  # fmt: skip
def test_buckets_are_t5s_from_minus_4096_to_4096(num_buckets: int, max_distance: int, bidirectional: bool) -> None:
    steps = torch.arange(-4096, 4097)
    encoding = T5Bias(1, num_buckets=num_buckets, max_distance=max_distance, bidirectional=bidirectional)
    theirs = T5Attention._relative_position_bucket(-steps, bidirectional, num_buckets, max_distance)
    ours = encoding.buckets(steps)
    different = steps[ours != theirs].tolist()
    assert not different, f"other buckets at distances {different}"


@pytest.mark.parametrize("is_decoder", [True, False])
@pytest.mark.parametrize(("query", "key", "past"), [(7, 7, 0), (150, 150, 0), (1, 11, 10), (3, 13, 10)])
def test_bias_and_its_gradient_are_t5s(query: int, key: int, past: int, is_decoder: bool) -> None:
    config = T5Config(d_model=15, num_heads=3, d_kv=5, is_decoder=is_decoder)
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    ours = T5Bias(3, bidirectional=not is_decoder)
    with torch.no_grad():
        theirs.relative_attention_bias.weight.normal_()
    ours.load_state_dict(theirs.relative_attention_bias.state_dict(), strict=True)
    expected = theirs.compute_bias(query, key, past_seen_tokens=past)
    actual = bias(ours, Positions.after(past, query), Positions.arange(key))
    assert torch.equal(actual, expected)
    cotangent = torch.randint_like(expected, -9, 10)  # whole numbers: thousands are added up, in no fixed order
    actual.backward(cotangent)
    expected.backward(cotangent)
    assert torch.equal(ours.weight.grad, theirs.relative_attention_bias.weight.grad)


@pytest.mark.parametrize(
    "options",
    [{"num_buckets": 1}, {"num_buckets": 3, "bidirectional": True}, {"max_distance": 16}, {"max_distance": 0}],
    ids=str,
)
def test_sizes_that_leave_no_buckets_are_refused(options: dict[str, int]) -> None:
    name, number = next(iter(options.items()))
    with refuses(RangeError, f"got {number} for {name}"):
        T5Bias(**{"num_heads": 3, **options})
