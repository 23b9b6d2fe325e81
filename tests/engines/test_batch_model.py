"""The facts about models are true: tiny models of `transformers` are padded and packed, and compared."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModel, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from locant.checkpoints.explanation import explain
from locant.engines.batches import check_batch
from locant.engines.batches.model import (
    CARRY_STATE,
    COUNT_THE_MASK,
    COUNT_TOKENS,
    ENCODERS,
    FIND_NO_DOCUMENTS,
    READ_ROWS,
    READ_SEQ_IDX,
    TAKE_NO_IDS,
    facts_of,
)
from tests.engines.tiny_models import SIZES, SMALL
from tests.tolerances import DIFFERENT, LOGITS, assert_close

MORE: dict[str, dict[str, Any]] = {
    **SIZES,
    "biogpt": {**SMALL},
    "xglm": {**SMALL, "d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4, "scale_embedding": False},
    "distilbert": {"vocab_size": 90, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "pad_token_id": 0},
    "longformer": {**SMALL, "attention_window": 8},
    "gpt_neo": {"vocab_size": 90, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 48,
                "max_position_embeddings": 64, "attention_types": [[["global"], 2]]},
    "gpt_bigcode": SIZES["gpt2"],
    "gptj": {**SIZES["gpt2"], "rotary_dim": 4},
    "esm": {**SMALL, "mask_token_id": 3, "position_embedding_type": "absolute"},
    "xmod": {**SMALL, "languages": ["en_XX"], "default_language": "en_XX"},
    "luke": {**SMALL, "entity_vocab_size": 9, "entity_emb_size": 32},
    "mpnet": {**SMALL, "pad_token_id": 1},  # whatever its configuration holds
    **{kind: {**SMALL, "num_key_value_heads": 2, "head_dim": 8} for kind in ("gemma", "mistral", "qwen3")},
    "albert": {**SMALL, "embedding_size": 32},
    "electra": {**SMALL, "embedding_size": 32},
}  # fmt: skip
MIXERS: dict[str, dict[str, Any]] = {
    kind: {**SMALL, **more}
    for kind, more in {
        "jamba": {"num_experts": 2, "mamba_d_state": 4},
        "mamba": {"state_size": 4},
        "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1, "state_size": 8},
        "minimax": {"num_key_value_heads": 2, "num_local_experts": 2, "head_dim": 16,
                    "layer_types": ["linear_attention", "full_attention"]},
        "lfm2": {"num_key_value_heads": 2, "layer_types": ["conv", "full_attention"],
                 "block_auto_adjust_ff_dim": False},
        "nemotron_h": {"layers_block_type": ["mamba", "attention"], "num_key_value_heads": 2, "mamba_num_heads": 4,
                       "mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 8, "head_dim": 16},
        "qwen3_next": {"head_dim": 16, "num_key_value_heads": 2, "linear_num_value_heads": 2, "linear_num_key_heads": 2,
                       "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1,
                       "layer_types": ["linear_attention", "full_attention"]},
        "zamba2": {"num_key_value_heads": 2, "mamba_d_state": 8, "n_mamba_heads": 4, "num_mem_blocks": 1,
                   "layers_block_type": ["mamba", "hybrid"], "hybrid_layer_ids": [1], "use_mem_rope": True},
        "recurrent_gemma": {"block_types": ["recurrent", "attention"], "num_key_value_heads": 1},
        "xlstm": {"num_heads": 2},
        "rwkv": {},
        "roformer": {},
        "modernbert": {"cls_token_id": 1, "sep_token_id": 2},
        "bloom": {},
        "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2},
        "granitemoehybrid": {"layer_types": ["attention"] * 2, "num_local_experts": 0, "shared_intermediate_size": 48,
                             "mamba_n_heads": 4, "mamba_d_head": 16},
        "llama": {},
        "falcon": {},
    }.items()
}  # fmt: skip
"""Models whose documents mix, and two whose documents do not."""
DOCUMENTS = [torch.randint(5, 80, (n,), generator=torch.Generator().manual_seed(n)) for n in (5, 4)]
TEXT_CLASSES = {
    "altclip_text_model": "AltCLIPTextModel", "bridgetower_text_model": "BridgeTowerTextModel",
    "clap_text_model": "ClapTextModel", "trocr": "TrOCRForCausalLM",
}  # fmt: skip
"""Models without a class for `AutoModel`."""
LAYOUTS = ("layoutlmv3", "lilt", "markuplm")
"""Models that also need boxes or paths."""


def _model(kind: str, **more: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{**MORE.get(kind, SMALL), **more})
    module = import_module(type(config).__module__.replace("configuration", "modeling"))
    model = getattr(module, TEXT_CLASSES[kind])(config) if kind in TEXT_CLASSES else AutoModel.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval().requires_grad_(False)


def _hidden(model: PreTrainedModel, ids: Tensor, **more: Any) -> Tensor:
    return model(input_ids=ids, **more)[0]


@pytest.mark.parametrize(
    "kind",
    sorted({*COUNT_THE_MASK, *COUNT_TOKENS, "gpt2", "gpt_neo", "gpt_bigcode", "bert", "distilbert"} - {*LAYOUTS}),
)
def test_the_list_of_models_that_count_padding(kind: str) -> None:
    model, ids = _model(kind), DOCUMENTS[1]
    alone = _hidden(model, ids[None])[0]
    mask = torch.tensor([[0, 1, 1, 1, 1]])
    pad = MORE.get(kind, SMALL).get("pad_token_id", 0)
    padded = _hidden(model, torch.nn.functional.pad(ids, (1, 0), value=pad)[None], attention_mask=mask)[0, 1:]
    off = float((padded - alone).abs().max())
    facts = facts_of(model)
    if facts.counting == "slots":
        assert facts.adds_positions
        assert off > DIFFERENT
    else:
        assert off <= LOGITS * max(1.0, float(alone.abs().max()))


@pytest.mark.parametrize(
    "kind",
    ["albert", "bert", "biogpt", "camembert", "distilbert", "electra", "mpt", "opt", "roberta", "xglm", "xlm-roberta",
     "gemma", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "llama", "mistral", "phi", "qwen3"],
)  # fmt: skip
def test_the_list_of_models_that_find_documents_in_ids(kind: str) -> None:
    model = _model(kind)
    first = facts_of(model).first_id
    index = torch.cat([torch.arange(len(ids)) + first for ids in DOCUMENTS])[None]
    packed = _hidden(model, torch.cat(DOCUMENTS)[None], position_ids=index, use_cache=False)[0]
    alone = torch.cat([_hidden(model, ids[None])[0] for ids in DOCUMENTS])
    off = float((packed - alone).abs().max())
    if facts_of(model).finds_documents:
        assert off <= LOGITS * max(1.0, float(alone.abs().max()))
    else:
        assert kind in FIND_NO_DOCUMENTS
        assert off > DIFFERENT


@pytest.mark.slow  # it imports the code of many models
def test_the_list_of_models_without_position_ids() -> None:
    kinds = {*TAKE_NO_IDS, *ENCODERS, *CARRY_STATE, *READ_SEQ_IDX, "llama", "gpt2", "opt"} & MODEL_MAPPING_NAMES.keys()
    classes = {kind: MODEL_MAPPING_NAMES[kind] for kind in kinds}
    first = {kind: name if isinstance(name, str) else name[0] for kind, name in classes.items()}
    forwards = {kind: inspect.signature(getattr(transformers, name).forward) for kind, name in first.items()}
    without = {kind for kind, forward in forwards.items() if "position_ids" not in forward.parameters}
    assert without == {*TAKE_NO_IDS} & kinds


def _effect(model: PreTrainedModel, index: Tensor, **more: Any) -> float:
    """How far the tokens of the second document change with the last token of the first."""
    ids = torch.cat(DOCUMENTS)[None]
    other = ids.clone()
    other[0, 4] = 3 if int(other[0, 4]) != 3 else 4
    one, two = (_hidden(model, each, position_ids=index, use_cache=False, **more) for each in (ids, other))
    return float((one - two)[0, 5:].abs().max())


@pytest.mark.parametrize("kind", MIXERS)
def test_the_list_of_models_that_mix_documents(kind: str) -> None:
    torch.manual_seed(0)
    model = AutoModel.from_config(CONFIG_MAPPING[kind](**MIXERS[kind]))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.eval().requires_grad_(False)
    batch = {
        "input_ids": torch.cat(DOCUMENTS)[None],
        "position_ids": torch.cat([torch.arange(len(ids)) for ids in DOCUMENTS])[None],
    }
    mixes = _effect(model, batch["position_ids"]) > DIFFERENT
    sources = (model, model.config, model.config.to_dict())
    found = [[each.to_dict() for each in check_batch({**batch, "use_cache": False}, model=one)] for one in sources]
    assert [[(one["check"], one["token"]) for one in each] for each in found] == [[("documents", 5)] * mixes] * 3
    if mixes and "seq_idx" in found[0][0]["remedy"]:  # read, and refused as this machine has no kernel for it
        numbers = torch.tensor([[0] * 5 + [1] * 4], dtype=torch.int32)
        with pytest.raises(ValueError, match="packed sequences"):
            _effect(model, batch["position_ids"], seq_idx=numbers)
        assert check_batch({**batch, "seq_idx": numbers}, model=model) == ()
    elif mixes:
        assert "attention_mask" not in found[0][0]["remedy"] or facts_of(model).takes_blocks


@pytest.mark.parametrize("kind", ["bert", "electra", "modernbert"])
def test_the_remedy_for_a_mask_separates_documents(kind: str) -> None:
    model = _model(kind)
    index = torch.cat([torch.arange(len(ids)) for ids in DOCUMENTS])[None]
    batch = {"input_ids": torch.cat(DOCUMENTS)[None], "position_ids": index}
    blocks = torch.block_diag(*(torch.ones(len(ids), len(ids)) for ids in DOCUMENTS)).bool()[None, None]
    for more in ({}, {"attention_mask": torch.ones(1, 9, dtype=torch.int64)}):
        assert _effect(model, index, **more) > DIFFERENT
        assert "four axes" in check_batch({**batch, **more}, model=model)[0].remedy
    assert _effect(model, index, attention_mask=blocks) <= LOGITS
    assert check_batch({**batch, "attention_mask": blocks}, model=model) == ()


TABLES = sorted(
    {*READ_ROWS, *COUNT_THE_MASK, "bart", "bert", "biogpt", "gpt2", "mbart", "mvp", "plbart", "trocr"}
    - {*LAYOUTS, "esm", "luke", "xmod"}
)
"""Models with a table of positions, most of which have rows that are not positions, without what needs other inputs."""


@pytest.mark.parametrize("kind", TABLES)
def test_the_number_of_positions_is_that_of_the_tokens_that_a_model_can_read(kind: str) -> None:
    sizes = {"max_position_embeddings": 12, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "ffn_dim": 48}
    model = _model(kind, **sizes, n_positions=12, decoder_attention_heads=4)
    config = model.config
    facts, longest = facts_of(config), explain(config).longest
    assert longest is not None
    rows = torch.full((1, longest + 1), 5)
    with torch.no_grad():
        expected = _hidden(model, rows[:, :longest])
        with pytest.raises((IndexError, RuntimeError)):
            _hidden(model, rows)
        assert not check_batch({"input_ids": rows[:, :longest]}, model=config)
        assert [each.check for each in check_batch({"input_ids": rows}, model=config)] == ["length"]
        if facts.counting == "tokens":
            rows[0, -1] = facts.first_id - 1  # padding
            _hidden(model, rows)
            assert not check_batch({"input_ids": rows}, model=config)
        if facts.takes_ids and "position_ids" in inspect.signature(model.forward).parameters:
            assert facts.num_ids == facts.first_id + longest
            index = torch.arange(facts.first_id, facts.num_ids)[None]
            assert_close(_hidden(model, rows[:, :longest], position_ids=index), expected)
            with pytest.raises((IndexError, RuntimeError)):
                _hidden(model, rows[:, :longest], position_ids=index + 1)


def test_lengths_and_axes_are_those_of_the_configuration() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6}
    qwen = {"model_type": "qwen2", "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 32768}
    assert facts_of(qwen).num_ids == 32768
    assert facts_of({**qwen, "rope_parameters": yarn}).num_ids == 131072
    assert (facts_of("gpt2").num_ids, facts_of("opt-1.3b").num_ids, facts_of("roberta-base").num_ids) == (
        1024,
        2048,
        514,
    )
    assert (facts_of("bloom-7b1").num_ids, facts_of("t5-base").num_ids) == (None, None)
    assert (facts_of("qwen2-vl-7b").axes, facts_of("llama-3.1-8b").axes) == (3, 1)
    assert facts_of(None).is_known is False
