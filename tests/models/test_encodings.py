"""The encoding of a whole model's configuration does what the model's own code does."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.models.albert.modeling_albert import AlbertEmbeddings
from transformers.models.bert.modeling_bert import BertEmbeddings
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.deberta_v2.modeling_deberta_v2 import DebertaV2Encoder
from transformers.models.electra.modeling_electra import ElectraEmbeddings
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as build_falcon_alibi
from transformers.models.gpt2.modeling_gpt2 import GPT2Model
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.opt.modeling_opt import OPTLearnedPositionalEmbedding
from transformers.models.roberta.modeling_roberta import RobertaEmbeddings
from transformers.models.t5.modeling_t5 import T5Attention

from locant import ALiBi, InputError, Learned, Positions, Rotary, T5Bias
from locant.models import encoding_from_config, layer_types
from locant.positions.encodings.deberta import Deberta
from locant.positions.encodings.shaw import Shaw
from tests.models.configurations import warns_of_default_or_raises
from tests.positions.published import PRESETS
from tests.refusal import refuses
from tests.tolerances import SUM_IN_BFLOAT16, assert_close

TOKENS = 11
POSITIONS = Positions.arange(TOKENS)


def heads(num_heads: int, head_dim: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(1, num_heads, TOKENS, head_dim), torch.randn(1, num_heads, TOKENS, head_dim)


# ------------------------------------------------------------------ one kind after the other


def test_a_preset_equals_the_configuration_object_of_transformers() -> None:
    for name in PRESETS:
        facts = PRESETS[name]
        if facts["model_type"] not in CONFIG_MAPPING:  # its code is not in transformers
            continue
        config = AutoConfig.for_model(**PRESETS[name])
        for kind in layer_types(facts) or (None,):
            ours = encoding_from_config(facts, layer_type=kind)
            theirs = encoding_from_config(config, layer_type=kind)
            assert repr(ours) == repr(theirs), name
            assert set(layer_types(config)) == set(layer_types(facts))


# ------------------------------------------------------------------ against the models' own code


@pytest.mark.parametrize("num_heads", [1, 8, 12, 16, 28, 32])
def test_bloom_has_the_slopes_of_its_own_code(num_heads: int) -> None:
    encoding = encoding_from_config({"model_type": "bloom", "n_head": num_heads})
    theirs = build_alibi_tensor(torch.ones(1, TOKENS), num_heads, torch.float32)[:, 0]
    bias = encoding.bias(*heads(num_heads), POSITIONS)
    assert bias is not None
    assert_close(bias[0, :, -1], theirs - theirs[:, -1:])  # theirs grows with the key, which a softmax cannot see


@pytest.mark.parametrize("reach", [8, 4, 16])
@pytest.mark.parametrize("num_heads", [8, 12, 20, 32])
def test_mpt_has_the_slopes_of_its_own_code(num_heads: int, reach: int) -> None:
    config = AutoConfig.for_model(
        "mpt", d_model=8 * num_heads, n_heads=num_heads, attn_config={"alibi": True, "alibi_bias_max": reach}
    )
    bias = encoding_from_config(config).bias(*heads(num_heads), POSITIONS)
    assert bias is not None
    assert_close(bias[0, :, -1], build_mpt_alibi_tensor(num_heads, TOKENS, reach)[:, 0])


@pytest.mark.parametrize("num_heads", [8, 12, 71])
def test_falcon_divides_its_slopes_by_the_root_of_the_head(num_heads: int) -> None:
    config = AutoConfig.for_model("falcon", alibi=True, hidden_size=64 * num_heads, num_attention_heads=num_heads)
    encoding = encoding_from_config(config)
    assert isinstance(encoding, ALiBi)
    bias = encoding.bias(*heads(num_heads, 64), POSITIONS)
    theirs = build_falcon_alibi(torch.ones(1, TOKENS), num_heads, torch.float32)[:, 0] / math.sqrt(64)
    # Falcon rounds its bias to bfloat16.
    torch.testing.assert_close(
        bias[0, :, -1], theirs - theirs[:, -1:], rtol=SUM_IN_BFLOAT16, atol=SUM_IN_BFLOAT16 * float(theirs.max())
    )


def test_falcon_without_alibi_has_rotary_positions() -> None:
    assert isinstance(encoding_from_config(PRESETS["falcon-7b"]), Rotary)


@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_t5_has_the_bias_of_its_own_code(part: str) -> None:
    config = AutoConfig.for_model("t5", d_model=32, d_kv=8, num_heads=4, relative_attention_num_buckets=16)
    config.is_decoder = part == "decoder"
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    encoding = encoding_from_config(config, layer_type=part)
    assert isinstance(encoding, T5Bias)
    encoding.load_state_dict({"weight": theirs.relative_attention_bias.weight})
    bias = encoding.bias(*heads(4), POSITIONS)
    assert torch.equal(bias, theirs.compute_bias(TOKENS, TOKENS))


def test_t5_is_read_by_its_encoder_by_default() -> None:
    encoding = encoding_from_config(PRESETS["t5-base"])
    assert isinstance(encoding, T5Bias)
    assert encoding.bidirectional
    assert layer_types(PRESETS["t5-base"]) == ("encoder", "decoder")


def test_t5_without_a_key_has_a_maximum_distance_of_128() -> None:
    old = {k: v for k, v in PRESETS["t5-base"].items() if k != "relative_attention_max_distance"}
    assert repr(encoding_from_config(old)) == repr(encoding_from_config(PRESETS["t5-base"]))


SIZES = {"hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 32}
NARROW = {**SIZES, "hidden_size": 32, "embedding_size": 16}


def behind_padding(roberta: RobertaEmbeddings) -> Tensor:
    rows = roberta.create_position_ids_from_input_ids(torch.full((1, 32), 7), roberta.padding_idx)
    return roberta.position_embeddings(rows)[0]


TABLES: dict[str, tuple[dict[str, Any], Callable[[Any], Any], str, Callable[[Any], Tensor] | None]] = {
    "bert": (SIZES, BertEmbeddings, "position_embeddings", None),
    "gpt2": ({"n_embd": 16, "n_head": 2, "n_layer": 1, "n_positions": 32}, GPT2Model, "wpe", None),
    "albert": (NARROW, AlbertEmbeddings, "position_embeddings", None),
    "electra": (NARROW, ElectraEmbeddings, "position_embeddings", None),
    "roberta": ({**SIZES, "max_position_embeddings": 34}, RobertaEmbeddings, "position_embeddings", behind_padding),
    "opt": (
        {**SIZES, "word_embed_proj_dim": 8}, lambda config: OPTLearnedPositionalEmbedding(32, 16), "",
        lambda opt: opt(torch.ones(1, 32, dtype=torch.long))[0],
    ),
}  # fmt: skip
"""Sizes, the model's own code, where its table is, and what that code adds to 32 tokens; ``None``: its rows."""


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_adds_what_the_models_own_code_adds(kind: str) -> None:
    """Also where it is narrower than the layers (ALBERT, ELECTRA), or begins behind rows of padding (RoBERTa, OPT)."""
    sizes, build, path, added = TABLES[kind]
    config = AutoConfig.for_model(kind, **sizes)
    theirs, encoding = build(config), encoding_from_config(config)
    assert isinstance(encoding, Learned)
    assert encoding.max_seq_len == 32
    weight = theirs.get_submodule(path).weight
    encoding.load_state_dict({"weight": weight})
    embedded = encoding.embed(torch.zeros(1, 32, 16), Positions.arange(32))[0]
    assert torch.equal(embedded, weight if added is None else added(theirs))


@pytest.mark.parametrize("kind", ["relative_key", "relative_key_query"])
def test_bert_with_relative_keys_scores_as_its_own_code_did(kind: str) -> None:
    # Transcribed from the attention of transformers 4, which is not part of 5 any more.
    longest, width, num_heads = 16, 24, 3
    config = {
        "model_type": "bert", "hidden_size": width, "num_attention_heads": num_heads,
        "max_position_embeddings": longest, "position_embedding_type": kind,
    }  # fmt: skip
    encoding = encoding_from_config(config)
    assert isinstance(encoding, Shaw)
    table = torch.randn(2 * longest - 1, width // num_heads)
    encoding.load_state_dict({"weight": table.flip(0)})
    q, k = heads(num_heads)
    distance = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)[None, :]
    rows = table[distance + longest - 1]
    scores = torch.einsum("bhld,lrd->bhlr", q, rows)
    if kind == "relative_key_query":
        scores = scores + torch.einsum("bhrd,lrd->bhlr", k, rows)
    bias = encoding.bias(q, k, POSITIONS)
    assert bias is not None
    assert_close(bias, scores / math.sqrt(width // num_heads))


@pytest.mark.parametrize("buckets", [8, -1])
@pytest.mark.parametrize("terms", ["p2c|c2p", "c2p", "p2c"])
def test_deberta_scores_as_its_own_code(terms: str, buckets: int) -> None:
    config = AutoConfig.for_model(
        "deberta-v2", hidden_size=24, num_attention_heads=3, num_hidden_layers=1, relative_attention=True,
        position_biased_input=False, pos_att_type=terms, position_buckets=buckets, share_att_key=True,
        max_position_embeddings=32, norm_rel_ebd="layer_norm",
    )  # fmt: skip
    theirs = DebertaV2Encoder(config)
    attention = theirs.layer[0].attention.self
    encoding = encoding_from_config(config)
    assert isinstance(encoding, Deberta)
    state = {
        "weight": theirs.rel_embeddings.weight,
        "norm.weight": theirs.LayerNorm.weight,
        "norm.bias": theirs.LayerNorm.bias,
    }
    for name, source in (("key_projection", attention.key_proj), ("query_projection", attention.query_proj)):
        if getattr(encoding, name) is not None:
            state |= {f"{name}.weight": source.weight, f"{name}.bias": source.bias}
    encoding.load_state_dict(state)
    q, k = heads(3)
    wanted = attention.disentangled_attention_bias(
        q[0], k[0], theirs.get_rel_pos(torch.zeros(1, TOKENS, 24)), theirs.get_rel_embedding(), 1 + len(encoding.terms)
    )
    bias = encoding.bias(q, k, POSITIONS)
    assert bias is not None
    assert_close(bias[0], wanted.reshape(3, TOKENS, TOKENS))


# ------------------------------------------------------------------ bad input


def test_the_error_for_an_unknown_architecture_names_similar_ones_and_how_to_add_it() -> None:
    with refuses(InputError, "lama_4", "llama", "register_architecture", "docs/extending.md"):
        encoding_from_config({"model_type": "lama_4"})
    with refuses(InputError, "without model_type", "llama", "register_architecture"):
        encoding_from_config({"hidden_size": 64})
    with refuses(InputError, "list"):
        encoding_from_config([])


WITHOUT = [
    (name, key)
    for name, keys in {
        "bloom-7b1": ["n_head"], "mpt-7b": ["n_heads", "attn_config"], "gpt2": ["n_positions", "n_embd"],
        "opt-1.3b": ["max_position_embeddings", "hidden_size"], "bert-base": ["max_position_embeddings", "hidden_size"],
        "roberta-base": ["max_position_embeddings", "hidden_size", "pad_token_id"], "falcon-7b": ["alibi"],
        "t5-base": ["num_heads", "relative_attention_num_buckets"],
        "deberta-v3-base": ["relative_attention", "position_biased_input", "max_position_embeddings"],
    }.items()
    for key in keys
]  # fmt: skip


@pytest.mark.parametrize(("name", "key"), WITHOUT)
def test_a_missing_key_is_named(name: str, key: str) -> None:
    named = {"attn_config": "alibi", "n_embd": "hidden_size"}
    named |= {"n_head": "num_attention_heads", "n_heads": "num_attention_heads", "num_heads": "num_attention_heads"}
    named |= {"n_positions": "max_position_embeddings"}
    config = {k: v for k, v in PRESETS[name].items() if k != key}
    warns_of_default_or_raises(config, key, read=encoding_from_config, named=named.get(key, key))


@pytest.mark.parametrize(
    ("name", "change", "word"),
    [
        ("bert-base", {"position_embedding_type": "banana"}, "banana"),
        ("roberta-base", {"position_embedding_type": "relative_key"}, "relative_key"),
        ("mpt-7b", {"attn_config": {"alibi": False, "alibi_bias_max": 8}}, "alibi"),
        ("mpt-7b", {"attn_config": {"alibi": True}}, "alibi_bias_max"),
        ("bert-base", {"position_embedding_type": []}, "position_embedding_type=[]"),
        ("roberta-base", {"position_embedding_type": []}, "position_embedding_type=[]"),
        ("roberta-base", {"pad_token_id": 513}, "514 rows are not positions"),
        ("deberta-v3-base", {"norm_rel_ebd": [5]}, "norm_rel_ebd=[5]"),
        ("deberta-v3-base", {"num_attention_heads": 7}, "hidden_size=768 for 7 heads"),
        ("mistral-7b", {"layer_types": 5}, "layer_types=5"),
        ("mistral-7b", {"model_type": ["mistral"]}, "model_type=['mistral']"),
        ("gpt2", {"max_position_embeddings": 7}, "n_positions=1024"),
    ],
)  # fmt: skip
def test_values_that_a_model_does_not_support_raise(name: str, change: dict[str, Any], word: str) -> None:
    with refuses(InputError, word):
        encoding_from_config({**PRESETS[name], **change})


def test_an_unknown_layer_type_raises() -> None:
    with refuses(InputError, "encoder", "decoder", "middle"):
        encoding_from_config(PRESETS["t5-base"], layer_type="middle")
    with refuses(InputError, "encoder", "gpt2"):
        encoding_from_config(PRESETS["gpt2"], layer_type="encoder")


def test_layers_that_share_one_encoding_may_be_named() -> None:
    config = {**PRESETS["qwen2.5-7b"], "layer_types": ["full_attention"] * 28}
    assert repr(encoding_from_config(config, layer_type="full_attention")) == repr(encoding_from_config(config))
