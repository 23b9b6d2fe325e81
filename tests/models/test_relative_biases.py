"""Biases of the rows in `locant.models.relative_biases` are those that the attention of `transformers` adds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.cpmant.modeling_cpmant import CpmAntSegmentPositionEmbedding
from transformers.models.deberta.modeling_deberta import DebertaEncoder
from transformers.models.fastspeech2_conformer.modeling_fastspeech2_conformer import (
    FastSpeech2ConformerAttention,
    FastSpeech2ConformerRelPositionalEncoding,
)
from transformers.models.funnel.modeling_funnel import FunnelAttentionStructure, FunnelRelMultiheadAttention
from transformers.models.granite_speech.modeling_granite_speech import GraniteSpeechConformerAttention
from transformers.models.layoutlmv2.modeling_layoutlmv2 import LayoutLMv2Encoder
from transformers.models.layoutlmv3.modeling_layoutlmv3 import LayoutLMv3Encoder
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder
from transformers.models.parakeet.modeling_parakeet import (
    ParakeetEncoderAttention,
    ParakeetEncoderRelPositionalEncoding,
)
from transformers.models.speecht5.modeling_speecht5 import SpeechT5Attention, SpeechT5RelativePositionalEncoding
from transformers.models.wavlm.modeling_wavlm import WavLMAttention
from transformers.models.xlnet.modeling_xlnet import XLNetModel, XLNetRelativeAttention

from locant import InputError, Learned, Positions, Shaw, T5Bias, TransformerXL
from locant.models import encoding_from_config, layer_types
from locant.positions.base import PositionEncoding
from locant.positions.encodings.deberta import Deberta
from tests.models.tiny_models import classes_of
from tests.refusal import refuses
from tests.tolerances import assert_close

TOKENS, HEADS, WIDTH = 9, 2, 24
HEAD = WIDTH // HEADS
POSITIONS = Positions.arange(TOKENS)
SIZES = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": 1}


def drawn(module: Any) -> Any:
    """The module with random weights, also where its own are zeros."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    return module.eval()


def bias_of(encoding: PositionEncoding, q: Tensor | None = None, k: Tensor | None = None) -> Tensor:
    some = torch.zeros(1, HEADS, TOKENS, HEAD)
    bias = encoding.bias(some if q is None else q, some if k is None else k, POSITIONS)
    assert bias is not None
    return bias


def in_heads(rows: Tensor) -> Tensor:
    return rows.unflatten(-1, (HEADS, HEAD)).transpose(1, 2)


def weights_with(encoding: PositionEncoding, q: Tensor, k: Tensor) -> Tensor:
    """The weights of attention: scaled products, and the bias."""
    return (q @ k.mT * HEAD**-0.5 + bias_of(encoding, q, k)).softmax(-1)


# ------------------------------------------------------------------ buckets

T5_KIN = {
    "longt5": "LongT5Attention", "pix2struct_text_model": "Pix2StructTextAttention", "pop2piano": "Pop2PianoAttention",
    "switch_transformers": "SwitchTransformersAttention", "udop": "UdopAttention", "umt5": "UMT5Attention",
}  # fmt: skip


@pytest.mark.parametrize("part", ["encoder", "decoder"])
@pytest.mark.parametrize("model_type", T5_KIN)
def test_descendants_of_t5_have_the_bias_of_their_own_code(model_type: str, part: str) -> None:
    config = AutoConfig.for_model(
        model_type, d_model=WIDTH, hidden_size=WIDTH, d_kv=HEAD, num_heads=HEADS, relative_attention_num_buckets=16,
        relative_attention_max_distance=12,
    )  # fmt: skip
    config.is_decoder = part == "decoder"
    theirs = classes_of(config)[T5_KIN[model_type]](config, has_relative_attention_bias=True, layer_idx=0)
    kinds = layer_types(config)
    assert kinds in (("encoder", "decoder"), ())
    if not kinds and part == "encoder":  # it is a decoder
        return
    encoding = encoding_from_config(config, layer_type=part if kinds else None)
    encoding.load_state_dict({"weight": drawn(theirs).relative_attention_bias.weight})
    assert torch.equal(bias_of(encoding), theirs.compute_bias(TOKENS, TOKENS))


def test_mpnet_always_has_32_buckets() -> None:
    config = AutoConfig.for_model("mpnet", **SIZES, relative_attention_num_buckets=40)
    theirs = drawn(MPNetEncoder(config))
    encoding = encoding_from_config(config, layer_type="attention")
    encoding.load_state_dict({"weight": theirs.relative_attention_bias.weight[:32]})
    assert torch.equal(bias_of(encoding), theirs.compute_position_bias(torch.zeros(1, TOKENS, WIDTH)))


def test_layoutlm_adds_numbers_of_buckets_and_its_third_version_divides_them() -> None:
    positions = POSITIONS.index
    for name, cls in (("layoutlmv2", LayoutLMv2Encoder), ("layoutlmv3", LayoutLMv3Encoder)):
        config = AutoConfig.for_model(name, **SIZES, has_spatial_attention_bias=False, max_rel_pos=7, rel_pos_bins=8)
        theirs = drawn(cls(config))
        encoding = encoding_from_config(config)
        if name == "layoutlmv2":
            weight, wanted = theirs.rel_pos_bias.weight, theirs._calculate_1d_position_embeddings(positions)
        else:
            weight = theirs.rel_pos_bias.weight / HEAD**0.5
            wanted = theirs._compute_position_bias(positions, None)
        encoding.load_state_dict({"weight": weight.T})
        assert_close(bias_of(encoding), wanted)
        assert layer_types(config) == ("attention", "input")
        assert isinstance(encoding_from_config(config, layer_type="input"), Learned)
        plain = {**config.to_dict(), "has_relative_attention_bias": False}
        assert layer_types(plain) == ()
        assert isinstance(encoding_from_config(plain), Learned)


def test_cpm_ant_has_t5_buckets_within_a_segment() -> None:
    sizes = {"position_bias_num_buckets": 16, "position_bias_max_distance": 20}
    config = AutoConfig.for_model("cpmant", **SIZES, **sizes)
    theirs = drawn(CpmAntSegmentPositionEmbedding(config))
    encoding = encoding_from_config(config)
    encoding.load_state_dict({"weight": theirs.relative_attention_bias[:16]})
    same = torch.zeros_like(POSITIONS.index)
    assert torch.equal(bias_of(encoding), theirs(POSITIONS.index, POSITIONS.index, same, same))


def test_wavlm_has_t5_buckets_before_its_gate() -> None:
    config = AutoConfig.for_model("wavlm", **SIZES, num_buckets=20, max_bucket_distance=17)
    theirs = drawn(WavLMAttention(WIDTH, HEADS, num_buckets=20, max_distance=17))
    encoding = encoding_from_config(config, layer_type="attention")
    assert isinstance(encoding, T5Bias)
    encoding.load_state_dict({"weight": theirs.rel_attn_embed.weight})
    assert torch.equal(bias_of(encoding)[0], theirs.compute_bias(TOKENS, TOKENS))


# ------------------------------------------------------------------ sines of the distance


def xl_state(projection: Tensor, u: Tensor, v: Tensor, *, in_turns: bool) -> dict[str, Tensor]:
    """The parameters of `TransformerXL`, whose sines come before the cosines."""
    weight = torch.cat([projection[:, 0::2], projection[:, 1::2]], dim=1) if in_turns else projection
    return {"weight": weight, "u": u, "v": v}


def test_xlnet_weighs_as_its_own_code() -> None:
    config = AutoConfig.for_model("xlnet", d_model=WIDTH, n_head=HEADS, n_layer=1, d_inner=8, vocab_size=8)
    theirs, x = drawn(XLNetRelativeAttention(config)), torch.randn(TOKENS, 1, WIDTH)
    q, k, v = (torch.einsum("ibh,hnd->ibnd", x, part) for part in (theirs.q, theirs.k, theirs.v))
    r = XLNetModel(config).relative_positional_encoding(TOKENS, TOKENS, bsz=1)
    _, weights = theirs.rel_attn_core(q, k, v, torch.einsum("ibh,hnd->ibnd", r, theirs.r), output_attentions=True)
    encoding = encoding_from_config(config)
    state = xl_state(theirs.r.flatten(1).T, theirs.r_w_bias, theirs.r_r_bias, in_turns=False)
    encoding.load_state_dict(state)
    ours = weights_with(encoding, q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3))
    assert_close(ours, weights.permute(2, 3, 0, 1))
    with refuses(InputError, "clamp_len=8"):
        encoding_from_config({**config.to_dict(), "clamp_len": 8})


@pytest.mark.parametrize("kind", ["relative_shift", "factorized"])
def test_funnel_weighs_as_its_own_code(kind: str) -> None:
    config = AutoConfig.for_model(
        "funnel", d_model=WIDTH, n_head=HEADS, d_head=HEAD, block_sizes=[1], attention_type=kind, separate_cls=False
    )
    theirs, x = drawn(FunnelRelMultiheadAttention(config, 0)), torch.randn(1, TOKENS, WIDTH)
    inputs = FunnelAttentionStructure(config).eval().init_attention_inputs(x)
    _, weights = theirs(x, x, x, inputs, output_attentions=True)
    encoding = encoding_from_config(config)
    state = xl_state(theirs.r_kernel.flatten(1).T, theirs.r_w_bias, theirs.r_r_bias, in_turns=False)
    encoding.load_state_dict(state)
    assert_close(weights_with(encoding, in_heads(theirs.q_head(x)), in_heads(theirs.k_head(x))), weights)


def test_parakeet_weighs_as_its_own_code() -> None:
    config = AutoConfig.for_model("parakeet_encoder", **SIZES, num_key_value_heads=HEADS)
    config._attn_implementation = "eager"
    theirs, x = drawn(ParakeetEncoderAttention(config, 0)), torch.randn(1, TOKENS, WIDTH)
    _, weights = theirs(x, ParakeetEncoderRelPositionalEncoding(config)(x))
    encoding = encoding_from_config(config)
    state = xl_state(theirs.relative_k_proj.weight, theirs.bias_u, theirs.bias_v, in_turns=True)
    encoding.load_state_dict(state)
    assert_close(weights_with(encoding, in_heads(theirs.q_proj(x)), in_heads(theirs.k_proj(x))), weights)


@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_fastspeech_weighs_as_its_own_code(part: str) -> None:
    heads = {"encoder": HEADS, "decoder": 4}
    config = AutoConfig.for_model(
        "fastspeech2_conformer", hidden_size=WIDTH, encoder_num_attention_heads=2, decoder_num_attention_heads=4
    )
    own = getattr(config, f"{part}_config")
    theirs, x = drawn(FastSpeech2ConformerAttention(config, own)), torch.randn(1, TOKENS, WIDTH)
    _, distances = FastSpeech2ConformerRelPositionalEncoding(config, own).eval()(x)
    _, weights = theirs(x, pos_emb=distances, output_attentions=True)
    encoding = encoding_from_config(config, layer_type=part)
    assert isinstance(encoding, TransformerXL)
    assert encoding.num_heads == heads[part]
    state = xl_state(theirs.linear_pos.weight, theirs.pos_bias_u, theirs.pos_bias_v, in_turns=True)
    encoding.load_state_dict(state)
    q, k = (linear(x).unflatten(-1, (heads[part], -1)).transpose(1, 2) for linear in (theirs.linear_q, theirs.linear_k))
    bias = encoding.bias(q, k, POSITIONS)
    assert bias is not None
    assert_close((q @ k.mT * q.shape[-1] ** -0.5 + bias).softmax(-1), weights)


# ------------------------------------------------------------------ a vector for each distance, and both


def test_granite_speech_has_its_table_from_the_other_end() -> None:
    config = AutoConfig.for_model("granite_speech_encoder", hidden_dim=WIDTH, num_heads=HEADS, dim_head=HEAD)
    config.context_size, config.max_pos_emb = TOKENS, 12
    theirs, q = drawn(GraniteSpeechConformerAttention(config)), torch.randn(1, HEADS, TOKENS, HEAD)
    distance = POSITIONS.index[0, :, None] - POSITIONS.index[0] + config.max_pos_emb
    wanted = torch.einsum("bhcd,crd->bhcr", q, theirs.rel_pos_emb(distance)) * theirs.scale
    encoding = encoding_from_config(config)
    encoding.load_state_dict({"weight": theirs.rel_pos_emb.weight.flip(0)})
    assert_close(bias_of(encoding, q), wanted)


def test_speecht5_has_its_table_from_the_other_end() -> None:
    config = AutoConfig.for_model("speecht5", hidden_size=WIDTH, encoder_attention_heads=HEADS)
    config.encoder_max_relative_position = 4  # shorter than the text
    distances = drawn(SpeechT5RelativePositionalEncoding(HEAD, 4))
    theirs, x = drawn(SpeechT5Attention(WIDTH, HEADS)), torch.randn(1, TOKENS, WIDTH)
    _, weights, *_ = theirs(x, position_bias=distances(x), output_attentions=True)
    encoding = encoding_from_config(config)
    assert isinstance(encoding, Shaw)
    encoding.load_state_dict({"weight": distances.pe_k.weight.flip(0)})
    assert_close(weights_with(encoding, in_heads(theirs.q_proj(x)), in_heads(theirs.k_proj(x))), weights)


@pytest.mark.parametrize("terms", ["p2c|c2p", "c2p", "p2c"])
def test_the_first_deberta_scores_as_its_own_code(terms: str) -> None:
    config = AutoConfig.for_model(
        "deberta", **SIZES, relative_attention=True, position_biased_input=False, pos_att_type=terms,
        max_position_embeddings=32,
    )  # fmt: skip
    theirs = drawn(DebertaEncoder(config))
    attention = theirs.layer[0].attention.self
    encoding = encoding_from_config(config)
    assert isinstance(encoding, Deberta)
    state = {"weight": theirs.rel_embeddings.weight}
    if encoding.key_projection is not None:
        state |= {"key_projection.weight": attention.pos_proj.weight, "key_projection.bias": torch.zeros(WIDTH)}
    if encoding.query_projection is not None:
        projection = attention.pos_q_proj
        state |= {"query_projection.weight": projection.weight, "query_projection.bias": projection.bias}
    encoding.load_state_dict(state)
    q, k = (torch.randn(1, HEADS, TOKENS, HEAD) for _ in range(2))
    wanted = attention.disentangled_att_bias(
        q * encoding.scale, k, theirs.get_rel_pos(torch.zeros(1, TOKENS, WIDTH)), theirs.get_rel_embedding(),
        1 + len(encoding.terms),
    )  # fmt: skip
    q_scaled_once = bias_of(encoding, q, k)
    assert_close(q_scaled_once, wanted)


@pytest.mark.parametrize("model_type", ["deberta", "deberta-v2"])
def test_deberta_with_a_table_at_the_input_has_both_kinds(model_type: str) -> None:
    config = {"model_type": model_type, **SIZES, "max_position_embeddings": 32, "pos_att_type": "c2p"}
    both = {**config, "relative_attention": True, "position_biased_input": True}
    assert layer_types(both) == ("attention", "input")
    assert isinstance(encoding_from_config(both), Deberta)
    assert isinstance(encoding_from_config(both, layer_type="input"), Learned)
    assert isinstance(encoding_from_config({**both, "relative_attention": False}), Learned)


# ------------------------------------------------------------------ conformers, whose configuration names the kind

CONFORMERS = ["wav2vec2-bert", "wav2vec2-conformer", "seamless_m4t", "seamless_m4t_v2"]


@pytest.mark.parametrize("model_type", CONFORMERS)
def test_a_conformer_has_the_kind_that_its_configuration_names(model_type: str) -> None:
    heads = "speech_encoder_attention_heads" if model_type.startswith("seamless") else "num_attention_heads"
    sizes = {"model_type": model_type, "hidden_size": WIDTH, heads: HEADS, "rotary_embedding_base": 10_000}
    sides = {"left_max_position_embeddings": 5, "right_max_position_embeddings": 2}
    found = {
        kind: encoding_from_config({**sizes, **sides, "position_embeddings_type": kind})
        for kind in ("rotary", "relative", "relative_key", None)
    }
    assert repr(found["rotary"]) == "Rotary(head_dim=12, base=10000, layout='half', angles='exact')"
    assert repr(found["relative"]) == repr(TransformerXL(HEADS, WIDTH))
    assert repr(found["relative_key"]) == repr(Shaw(HEAD, 5, max_later=2))
    assert type(found[None]) is PositionEncoding
