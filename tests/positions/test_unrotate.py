"""The fourth method: attention turns values that were rotated with their keys back by the query's position."""

from __future__ import annotations

import pytest
import torch

from locant import Positions, Rotary, attend
from locant.positions import ModelShape, Pairs
from locant.positions.registry import encodings
from locant.positions.scaling import YaRN
from tests.tolerances import PEER, assert_close

SHAPE = ModelShape(d_model=12, num_heads=3, max_seq_len=8)
ROTARY = {
    "half": Rotary(10, rotary_dim=6),
    "interleaved": Rotary(10, layout="interleaved", angles="float32"),
    "scaled": Rotary(10, scaling=YaRN(factor=4.0, original_max_seq_len=64)),
    "trailing": Rotary(10, pairs=Pairs(dims=[(4, 5), (9, 6)])),
}


LEFT_ALONE = ("dual_chunk", "inkling", "path", "rerope", "self_extend", "fope", "pope")
"""Encodings whose keys are stored as they are; and those under which a key is no rotated one, and never a value."""


@pytest.mark.parametrize("name", encodings())
def test_unrotate_is_the_identity_unless_keys_are_rotated(name: str) -> None:
    encoding, y = encodings()[name].for_model(SHAPE), torch.randn(1, 3, 5, 4)
    positions = encoding.read(torch.randn(1, 5, 12), Positions.arange(5))
    turns = "rotate" in encoding.methods() and name not in LEFT_ALONE
    assert (encoding.unrotate(y, positions) is y) != turns


@pytest.mark.parametrize("name", ROTARY)
def test_unrotate_is_the_inverse_rotation_forward_and_gradient(name: str) -> None:
    rotary, where = ROTARY[name], Positions.of([[5, 0, 70_001], [2, 3, -4]])
    y = torch.randn(2, 3, 3, 10, dtype=torch.float64, requires_grad=True)
    back = rotary.unrotate(y, where)
    factor = rotary.scaling.effective_attention_factor
    held = torch.float32 if rotary.angles.mode == "float32" else torch.float64
    assert_close(rotary.rotate_one(back, where), y, held)
    cotangent = torch.randn_like(y)
    (gradient,) = torch.autograd.grad(back, y, cotangent)
    assert_close(gradient, rotary.rotate_one(cotangent, where) / factor**2, held)  # of R^-1 / m: R / m


def test_unrotate_gives_the_attention_of_deepseek_v4() -> None:
    """Their layer of sliding attention, run and differentiated beside ours with its own weights."""
    code = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    config = code.DeepseekV4Config(
        hidden_size=24, head_dim=16, num_attention_heads=4, q_lora_rank=8, o_groups=2, o_lora_rank=6,
        num_hidden_layers=1, layer_types=["sliding_attention"], mlp_layer_types=["moe"], sliding_window=5,
        partial_rotary_factor=0.5, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    layer = code.DeepseekV4Attention(config, 0)
    torch.nn.init.normal_(layer.sinks)
    tokens = 11
    x = torch.randn(2, tokens, 24, requires_grad=True)
    ids = torch.arange(tokens)[None] + 3
    positions = Positions.after(3, tokens)
    angles = code.DeepseekV4RotaryEmbedding(config)(x, ids, layer_type="main")
    mask = torch.where(positions.mask(window=5), 0.0, -torch.inf)
    theirs, _ = layer(x, {"main": angles}, ids, mask)

    rotary = Rotary.from_config(config, layer_type="main", angles="float32")
    q = layer.q_b_norm(layer.q_b_proj(layer.q_a_norm(layer.q_a_proj(x))).unflatten(-1, (4, 16)).transpose(1, 2))
    q, k = rotary.rotate(q, layer.kv_norm(layer.kv_proj(x))[:, None], positions)
    y = attend(q, k, k, encoding=rotary, positions=positions, window=5, sinks=layer.sinks)
    y = rotary.unrotate(y, positions).transpose(1, 2)
    ours = layer.o_b_proj(layer.o_a_proj(y.reshape(2, tokens, 2, -1)).flatten(2))

    torch.testing.assert_close(ours, theirs, **PEER)
    leaves = [x, layer.sinks, layer.kv_proj.weight, layer.q_b_proj.weight]
    cotangent = torch.randn_like(ours)
    grads = (torch.autograd.grad(out, leaves, cotangent, retain_graph=True) for out in (ours, theirs))
    for mine, other in zip(*grads, strict=True):
        torch.testing.assert_close(mine, other, **PEER)
