"""Disentangled attention against transformers' DeBERTa-v2: the bucket tables, the bias, whole layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import DebertaV2Config
from transformers.models.deberta_v2 import modeling_deberta_v2 as reference

from locant import Deberta, Positions, RangeError, attend
from tests.refusal import refuses
from tests.tolerances import PEER, assert_close

HEADS, HEAD_DIM, LENGTH = 4, 6, 40
BOTH = ("c2p", "p2c")


def config(terms: tuple[str, ...], buckets: int, share: bool, norm: bool) -> DebertaV2Config:
    return DebertaV2Config(
        hidden_size=HEADS * HEAD_DIM, num_attention_heads=HEADS, num_hidden_layers=2, intermediate_size=12,
        vocab_size=11, relative_attention=True, position_buckets=buckets, max_relative_positions=20,
        pos_att_type=list(terms), share_att_key=share, norm_rel_ebd="layer_norm" if norm else "none",
        position_biased_input=False, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        max_position_embeddings=64,
    )  # fmt: skip


def ours(layer: reference.DisentangledSelfAttention, table: Tensor, settings: DebertaV2Config) -> Deberta:
    buckets = settings.position_buckets if settings.position_buckets > 0 else None
    encoding = Deberta(
        HEADS, HEAD_DIM, num_buckets=buckets, max_distance=settings.max_relative_positions, terms=settings.pos_att_type
    )
    with torch.no_grad():
        encoding.weight.copy_(table)
    if "c2p" in settings.pos_att_type:
        encoding.key_projection = layer.key_proj if settings.share_att_key else layer.pos_key_proj
    if "p2c" in settings.pos_att_type:
        encoding.query_projection = layer.query_proj if settings.share_att_key else layer.pos_query_proj
    return encoding


@pytest.mark.parametrize(
    ("buckets", "longest"),
    [(256, 512), (32, 128), (64, 512), (128, 513), (16, 64), (48, 100),
     (31, 200), (5, 64), (4, 8), (512, 4096), (8, 6)],
)  # fmt: skip
def test_the_bucket_table_is_that_of_transformers(buckets: int, longest: int) -> None:
    """As integers, for every distance from -4096 to 4096, before and after it is made a row."""
    steps = torch.arange(-4096, 4097)
    theirs = reference.make_log_bucket_position(steps, buckets, longest).long()
    encoding = Deberta(1, 2, num_buckets=buckets, max_distance=longest)
    assert torch.equal(encoding.rows(steps), (theirs + buckets).clamp(0, 2 * buckets - 1))
    inside = theirs.abs() < buckets
    assert torch.equal(encoding.buckets(steps)[inside], theirs[inside])


def test_without_buckets_every_distance_has_a_row() -> None:
    encoding = Deberta(1, 2, num_buckets=None, max_distance=5)
    assert encoding.rows(torch.arange(-7, 8)).tolist() == [0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9]


@pytest.mark.parametrize("terms", [BOTH, ("c2p",), ("p2c",)])
@pytest.mark.parametrize("buckets", [8, -1])
@pytest.mark.parametrize("share", [False, True])
def test_bias_and_gradients_are_those_of_transformers(terms: tuple[str, ...], buckets: int, share: bool) -> None:
    settings = config(terms, buckets, share, norm=False)
    layer = reference.DisentangledSelfAttention(settings).eval()
    table = torch.randn(2 * (buckets if buckets > 0 else 20), HEADS * HEAD_DIM, requires_grad=True)
    q, k = (torch.randn(2, HEADS, LENGTH, HEAD_DIM, requires_grad=True) for _ in range(2))
    encoding = ours(layer, table, settings)
    bias = encoding.bias(q, k, Positions.arange(LENGTH))
    theirs = layer.disentangled_attention_bias(q.flatten(0, 1), k.flatten(0, 1), None, table, 1 + len(terms))
    theirs = theirs.view(2, HEADS, LENGTH, LENGTH)
    assert_close(bias.detach(), theirs.detach())
    cotangent = torch.randn_like(bias)
    projections = [p for name, p in layer.named_parameters() if any(p is mine for mine in encoding.parameters())]
    assert len(projections) == 2 * len(terms)
    # A term that is off leaves q or k, and a bias that moves all keys of a query alike, without a gradient.
    mine = torch.autograd.grad(bias, [q, k, encoding.weight, *projections], cotangent, allow_unused=True)
    expected = torch.autograd.grad(theirs, [q, k, table, *projections], cotangent, allow_unused=True)
    for gradient, truth in zip(mine, expected, strict=True):
        assert (gradient is None) == (truth is None)
        if gradient is not None:
            torch.testing.assert_close(gradient, truth, **PEER)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("share", [False, True])
def test_attention_is_that_of_a_deberta_layer(share: bool, norm: bool) -> None:
    """Table, its LayerNorm, projections and scale, each in its place; with padding at the end of one row."""
    settings = config(BOTH, 8, share, norm)
    encoder = reference.DebertaV2Encoder(settings).eval()
    layer = encoder.layer[0].attention.self
    encoding = ours(layer, encoder.rel_embeddings.weight, settings)
    if norm:
        with torch.no_grad():
            encoder.LayerNorm.weight.normal_()
            encoder.LayerNorm.bias.normal_()
        encoding.norm = encoder.LayerNorm
    x = torch.randn(2, LENGTH, HEADS * HEAD_DIM)
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, 31:] = 0
    with torch.no_grad():
        expected, _ = layer(x, encoder.get_attention_mask(mask), rel_embeddings=encoder.get_rel_embedding())
        q, k, v = (
            linear(x).view(2, LENGTH, HEADS, HEAD_DIM).transpose(1, 2)
            for linear in (layer.query_proj, layer.key_proj, layer.value_proj)
        )
        positions = Positions.from_mask(mask)
        y = attend(q, k, v, encoding=encoding, positions=positions, causal=False, scale=encoding.scale)
    real = mask.bool()
    assert_close(y.transpose(1, 2).flatten(-2)[real], expected[real])


def test_mistakes_are_named() -> None:
    with refuses(RangeError, "got 3 for num_buckets"):
        Deberta(2, 4, num_buckets=3)
    for num_buckets, max_distance in ((8, 5), (None, 0)):
        with refuses(RangeError, f"got {max_distance} for max_distance", f"num_buckets={num_buckets}"):
            Deberta(2, 4, num_buckets=num_buckets, max_distance=max_distance)
    for terms in ((), ("p2p",), ("c2p", "c2p")):
        with refuses(RangeError, "for terms", "'p2c'"):
            Deberta(2, 4, terms=terms)  # type: ignore[arg-type]
