"""Transformer-XL's terms against the paper in NumPy, and against the Conformer attention of transformers."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers import Wav2Vec2BertConfig
from transformers.models.wav2vec2_bert import modeling_wav2vec2_bert as reference

from locant import Positions, TransformerXL, attend
from tests.positions import claims
from tests.positions.oracles_of_biases import transformer_xl
from tests.tolerances import assert_close


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_values_and_gradients_are_those_of_the_paper(kv_heads: int) -> None:
    """Queries behind a memory, and one far away."""
    encoding = claims.shaken(TransformerXL(2, 8, head_dim=3))
    assert isinstance(encoding, TransformerXL)
    queries, keys = [4, 5, 60], [0, 1, 2, 5, 40]

    def oracle(q, k, weight, u, v):  # type: ignore[no-untyped-def]
        W = weight.reshape(2, 3, 8)
        return transformer_xl(q, k, queries, keys, W, u, v, encoding.scale)

    claims.agrees_with_oracle(
        encoding, oracle, {"weight": encoding.weight, "u": encoding.u, "v": encoding.v},
        torch.randn(2, 2, 3, 3), torch.randn(2, kv_heads, 5, 3), queries, keys, contextual=True,
    )  # fmt: skip


def test_attention_is_that_of_a_conformer() -> None:
    """Both directions; it interleaves sines and cosines, so columns of W trade places."""
    config = Wav2Vec2BertConfig(
        hidden_size=24, num_attention_heads=4, position_embeddings_type="relative", attention_dropout=0.0,
        max_source_positions=64, attn_implementation="eager",
    )  # fmt: skip
    module, encoding = reference.Wav2Vec2BertSelfAttention(config).eval(), TransformerXL(4, 24)
    with torch.no_grad():
        encoding.weight.copy_(torch.cat([module.linear_pos.weight[:, 0::2], module.linear_pos.weight[:, 1::2]], dim=1))
        encoding.u.copy_(module.pos_bias_u.normal_())
        encoding.v.copy_(module.pos_bias_v.normal_())
        x = torch.randn(2, 19, 24)
        waves = reference.Wav2Vec2BertRelPositionalEmbedding(module.config)(x)
        expected, _ = module(x, relative_position_embeddings=waves)
        q, k, v = (
            linear(x).view(2, 19, 4, 6).transpose(1, 2)
            for linear in (module.linear_q, module.linear_k, module.linear_v)
        )
        y = attend(q, k, v, encoding=encoding, positions=Positions.arange(19), causal=False)
        assert_close(module.linear_out(y.transpose(1, 2).flatten(-2)), expected)


def test_a_memory_is_keys_with_positions() -> None:
    encoding = claims.shaken(TransformerXL(4, 24))
    q, k = torch.randn(2, 4, 12, 6), torch.randn(2, 4, 12, 6)
    segment = encoding.bias(q[:, :, 8:], k, Positions.after(8, 4), Positions.arange(12))
    # The original counts a memory from 0 whatever came before; only distances matter.
    shifted = encoding.bias(q[:, :, 8:], k, Positions.after(10**9, 4), Positions.of(torch.arange(12) + 10**9 - 8))
    assert_close(shifted, segment)


def test_the_default_scale_is_the_scale_of_attend() -> None:
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4)
    told = partial(TransformerXL, 2, 8)
    one, two = told(scale=1.0), told()
    two.load_state_dict(one.state_dict())
    assert two.scale == 0.5
    assert_close(two.bias(q, k, Positions.arange(3)).detach() * 2, one.bias(q, k, Positions.arange(3)).detach())
