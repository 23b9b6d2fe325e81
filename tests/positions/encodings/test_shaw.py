"""Shaw's relative key embeddings against transformers' own, and against the paper."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers import Wav2Vec2BertConfig
from transformers.models.wav2vec2_bert import modeling_wav2vec2_bert as reference

from locant import Positions, Shaw, attend
from tests.positions import claims
from tests.positions.oracles_of_biases import shaw
from tests.tolerances import assert_close

LEFT, RIGHT, HEADS, HEAD_DIM = 5, 3, 4, 6


def test_attention_is_that_of_wav2vec2_bert() -> None:
    """The scale is inside, once."""
    config = Wav2Vec2BertConfig(
        hidden_size=HEADS * HEAD_DIM, num_attention_heads=HEADS, position_embeddings_type="relative_key",
        left_max_position_embeddings=LEFT, right_max_position_embeddings=RIGHT, attention_dropout=0.0,
        attn_implementation="eager",
    )  # fmt: skip
    module, encoding = reference.Wav2Vec2BertSelfAttention(config).eval(), Shaw(HEAD_DIM, LEFT, max_later=RIGHT)
    x = torch.randn(2, 11, HEADS * HEAD_DIM)
    with torch.no_grad():
        encoding.weight.copy_(module.distance_embedding.weight)
        expected, _ = module(x)
        q, k, v = (
            linear(x).view(2, 11, HEADS, HEAD_DIM).transpose(1, 2)
            for linear in (module.linear_q, module.linear_k, module.linear_v)
        )
        y = attend(q, k, v, encoding=encoding, positions=Positions.arange(11), causal=False)
        assert_close(module.linear_out(y.transpose(1, 2).flatten(-2)), expected)


@pytest.mark.parametrize(("key_term", "kv_heads"), [(False, 2), (True, 1), (True, 2)])
def test_values_and_gradients_are_those_of_the_paper(key_term: bool, kv_heads: int) -> None:
    encoding = claims.shaken(Shaw(3, 2, max_later=1, key_term=key_term))
    assert isinstance(encoding, Shaw)
    queries, keys = [0, 4, 5], [1, 2, 3, 5, 90]
    oracle = partial(
        shaw, queries=queries, keys=keys, before=2, after=1, scale=encoding.scale, key_term=key_term
    )  # fmt: skip
    claims.agrees_with_oracle(
        encoding, lambda q, k, weight: oracle(q, k, table=weight), {"weight": encoding.weight},
        torch.randn(2, 4, 3, 3), torch.randn(2, kv_heads, 5, 3), queries, keys, contextual=True,
    )  # fmt: skip


def test_the_farthest_vector_serves_everything_beyond() -> None:
    """At the limit, one before it and one past it, both ways."""
    encoding = Shaw(4, 5, max_later=3)
    assert encoding.rows(torch.tensor([4, 5, 6, 2**31 - 1])).tolist() == [1, 0, 0, 0]
    assert encoding.rows(torch.tensor([0, -2, -3, -4, -(2**31) + 1])).tolist() == [5, 7, 8, 8, 8]
