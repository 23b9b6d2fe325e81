"""`HeadNorm` in `rotate`: against the attention layers of `transformers`, and for every kind of rotary encoding."""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma3TextConfig, Olmo2Config, Qwen3Config
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.olmo2 import modeling_olmo2
from transformers.models.qwen3 import modeling_qwen3

from locant import HeadNorm, Positions, Rotary
from locant.positions import FoPE, MixedRotary, Pairs, RotaryByHead, Temperature
from tests.tolerances import assert_close

SIZES: dict[str, Any] = {
    "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4_096, "num_hidden_layers": 1, "attn_implementation": "eager",
}  # fmt: skip


class Family(NamedTuple):
    module: Any
    attention: Any
    embedding: Any
    config: Any
    options: dict[str, Any]
    """Of `HeadNorm`."""


FAMILIES = {
    "qwen3": Family(
        modeling_qwen3, modeling_qwen3.Qwen3Attention, modeling_qwen3.Qwen3RotaryEmbedding, Qwen3Config(**SIZES), {}
    ),
    "gemma3": Family(
        modeling_gemma3, modeling_gemma3.Gemma3Attention, modeling_gemma3.Gemma3RotaryEmbedding,
        Gemma3TextConfig(**SIZES, layer_types=["full_attention"]), {"plus_one": True},
    ),
    "olmo2": Family(
        modeling_olmo2, modeling_olmo2.Olmo2Attention, modeling_olmo2.Olmo2RotaryEmbedding, Olmo2Config(**SIZES),
        {"round_before_weight": False},
    ),
}  # fmt: skip


class Layer(NamedTuple):
    """An attention layer of `transformers`: what it projects, and what comes to its cache and its scores."""

    attention: nn.Module
    rotary: Rotary
    norm: HeadNorm
    projected: tuple[Tensor, Tensor]
    expected: tuple[Tensor, Tensor]
    positions: Positions


def run(name: str, dtype: torch.dtype, seq: int = 9) -> Layer:
    family = FAMILIES[name]
    attention = family.attention(family.config, layer_idx=0)
    for weight in (attention.q_norm.weight, attention.k_norm.weight):
        nn.init.normal_(weight, 1.0, 0.3)
    attention, x = attention.to(dtype), torch.randn(2, seq, 96).to(dtype)
    index, kind = torch.arange(seq)[None] + 700, {"layer_type": "full_attention"} if name == "gemma3" else {}
    angles = family.embedding(family.config)(x, index, **kind)
    seen: list[Tensor] = []

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, None]:
        seen.extend((q, k))
        return q.transpose(1, 2), None

    with mock.patch.object(family.module, "eager_attention_forward", attend):
        attention(x, position_embeddings=angles, attention_mask=None)
    q, k = (
        project(x).unflatten(-1, (-1, 16)).transpose(1, 2).detach().requires_grad_()
        for project in (attention.q_proj, attention.k_proj)
    )
    norm = HeadNorm(attention.q_norm.weight, attention.k_norm.weight, 1e-5, **family.options)
    layer = {"layer_type": "full_attention"} if name == "gemma3" else {}
    rotary = Rotary.from_config(family.config, angles="float32", **layer)
    return Layer(attention, rotary, norm, (q, k), (seen[0], seen[1]), Positions.after(700, seq))


@pytest.mark.parametrize("name", FAMILIES)
def test_float32_has_the_bits_of_the_layers_of_transformers(name: str) -> None:
    for seq in (1, 9):
        layer = run(name, torch.float32, seq)
        for ours, theirs in zip(
            layer.rotary.rotate(*layer.projected, layer.positions, norm=layer.norm), layer.expected, strict=True
        ):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FAMILIES)
def test_narrow_dtypes_have_the_norm_of_transformers_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    """Their rotation rounds cosines, sines and products, too, so behind it there are a few roundings between us."""
    layer = run(name, dtype)
    flat = [x.transpose(1, 2).flatten(2) if name == "olmo2" else x for x in layer.projected]
    norms = layer.attention.q_norm, layer.attention.k_norm
    for ours, norm, x in zip(layer.norm.apply(*layer.projected), norms, flat, strict=True):
        theirs = norm(x)  # type: ignore[operator]
        assert torch.equal(ours, theirs.unflatten(-1, (-1, 16)).transpose(1, 2) if name == "olmo2" else theirs)
    rotated = layer.rotary.rotate(*layer.projected, layer.positions, norm=layer.norm)
    for ours, theirs in zip(rotated, layer.expected, strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_are_those_of_the_layers_of_transformers(name: str) -> None:
    layer = run(name, torch.float32)
    cotangents = [torch.randn_like(x) for x in layer.expected]
    weights = [layer.attention.q_norm.weight, layer.attention.k_norm.weight]
    theirs = torch.autograd.grad(layer.expected, [*weights, layer.attention.q_proj.weight], cotangents)  # type: ignore[union-attr,list-item]
    ours = layer.rotary.rotate(*layer.projected, layer.positions, norm=layer.norm)
    found = torch.autograd.grad(ours, [*weights, layer.projected[0]], cotangents)  # type: ignore[list-item]
    for one, other in zip(found[:2], theirs[:2], strict=True):
        assert_close(one / other.abs().max(), other / other.abs().max())


ROTARIES: dict[str, Any] = {
    "interleaved": Rotary(16, layout="interleaved"),
    "partial": Rotary(16, rotary_dim=6),
    "attention factor": Rotary(16, scaling="yarn:8"),
    "temperature": Rotary(16, temperature=Temperature(step=2)),
    "reordered": Rotary(16, pairs=Pairs(dims=[(0, 3), (5, 2)])),
    "some heads": Rotary(16, pairs=Pairs(dims=[(i, i + 8) for i in range(8)], num_heads=1)),
    "mixed": MixedRotary(16, num_heads=2),
    "fope": FoPE(16, num_heads=2, original_max_seq_len=512),
    "by head": RotaryByHead([Rotary(16), Rotary(16, base=500.0)]),
}


@pytest.mark.parametrize("kind", [*ROTARIES, "axes"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()  # some frequencies are parameters, and torch lets no one overwrite two views of a leaf then
def test_the_norm_is_what_rotate_does_first(kind: str, dtype: torch.dtype) -> None:
    rotary = Rotary(16, sections=(3, 5)) if kind == "axes" else ROTARIES[kind]
    positions = Positions.grid(2, 3) if kind == "axes" else Positions.after(70_000, 6)
    q, k = torch.randn(2, 4, 6, 16).to(dtype), torch.randn(2, 2, 6, 16).to(dtype)
    for norm in (HeadNorm(torch.randn(16), torch.randn(16)), HeadNorm(torch.randn(64), None, plus_one=True)):
        expected = rotary.rotate(*norm.apply(q, k), positions)
        for ours, theirs in zip(rotary.rotate(q, k, positions, norm=norm), expected, strict=True):
            assert torch.equal(ours, theirs)
        qkv = torch.cat([x.transpose(1, 2).flatten(2) for x in (q, k)], -1)
        views = [part.unflatten(-1, (-1, 16)).transpose(1, 2) for part in (qkv[..., :64], qkv[..., 64:])]
        written = rotary.rotate(*views, positions, inplace=True, norm=norm)
        for ours, view, theirs in zip(written, views, expected, strict=True):
            assert ours.data_ptr() == view.data_ptr()
            assert torch.equal(view, theirs)


def test_keys_may_have_other_positions_or_dtypes_and_heads_may_be_absent() -> None:
    rotary, norm = Rotary(16), HeadNorm(torch.randn(16), torch.randn(16), plus_one=True)
    q, k = torch.randn(2, 1, 3, 16), torch.randn(2, 1, 5, 16).bfloat16()
    queries, keys = Positions.after(5, 3), Positions.arange(5)
    expected = rotary.rotate(*norm.apply(q, k), queries, keys)
    for ours, theirs in zip(rotary.rotate(q, k, queries, keys, norm=norm), expected, strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(rotary.rotate(q[:, 0], k[:, 0], queries, keys, norm=norm), expected, strict=True):
        assert torch.equal(ours, theirs[:, 0])
    same = q.clone(), k.clone()
    rotary.rotate(*same, queries, keys, norm=norm, inplace=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(same, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_packed_padded_or_cached_have_the_bits_of_the_row_alone(dtype: torch.dtype) -> None:
    rotary, norm = Rotary(64), HeadNorm(torch.randn(64), torch.randn(64))
    rows = [torch.randn(1, 4, length, 64).to(dtype) for length in (5, 3)]
    alone = [rotary.rotate(row, row.clone(), Positions.arange(row.shape[2]), norm=norm) for row in rows]
    packed = torch.cat(rows, 2)
    q, _ = rotary.rotate(packed, packed.clone(), Positions.packed([5, 3]), norm=norm)
    assert torch.equal(q, torch.cat([each for each, _ in alone], 2))
    padded = torch.zeros(2, 4, 5, 64, dtype=dtype)
    padded[:1], padded[1:, :, 2:] = rows[0], rows[1]
    mask = torch.tensor([[1] * 5, [0, 0, 1, 1, 1]])
    q, _ = rotary.rotate(padded, padded.clone(), Positions.from_mask(mask), norm=norm)
    assert torch.equal(q[1:, :, 2:], alone[1][0])
    token = rows[0][:, :, 3:4]
    q, k = rotary.rotate(token, token.clone(), Positions.after(3, 1), norm=norm)
    assert torch.equal(q, alone[0][0][:, :, 3:4])
    assert torch.equal(k, alone[0][1][:, :, 3:4])
