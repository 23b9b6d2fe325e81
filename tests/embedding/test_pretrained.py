"""Embeddings from the folders of published models: the bits of `transformers`, from the tables alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from locant import InputEmbedding, InputError, Positions, RangeError, TokenEmbedding
from locant.models.registry import ARCHITECTURES
from tests.refusal import refuses

SIZES = {"vocab_size": 37, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
LIKE_LLAMA = {**SIZES, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 13, "pad_token_id": 0}
LIKE_BERT = {**SIZES, "max_position_embeddings": 13, "type_vocab_size": 2, "pad_token_id": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 37, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 13},
    "bert": LIKE_BERT,
    "roberta": LIKE_BERT,
    "distilbert": {"vocab_size": 37, "dim": 16, "n_layers": 1, "n_heads": 2, "max_position_embeddings": 13},
    "albert": {**LIKE_BERT, "embedding_size": 6},
    "electra": {**LIKE_BERT, "embedding_size": 6},
    "opt": {**SIZES, "ffn_dim": 8, "word_embed_proj_dim": 16, "max_position_embeddings": 13},
    "llama": LIKE_LLAMA,
    "qwen2": LIKE_LLAMA,
    "qwen3": LIKE_LLAMA,
    "gemma": LIKE_LLAMA,
    "gemma2": LIKE_LLAMA,
    "gemma3_text": LIKE_LLAMA,
    "t5": {"vocab_size": 37, "d_model": 16, "d_kv": 8, "d_ff": 8, "num_layers": 1, "num_heads": 2},
    "gpt_neox": {**SIZES, "max_position_embeddings": 13},
    "gptj": {"vocab_size": 37, "n_embd": 16, "n_layer": 1, "n_head": 2, "rotary_dim": 4},
    "bloom": {"vocab_size": 37, "hidden_size": 16, "n_layer": 1, "n_head": 2},
    "mpt": {"vocab_size": 37, "d_model": 16, "n_layers": 1, "n_heads": 2},
    "granite": {**LIKE_LLAMA, "embedding_multiplier": 12.0},
    "minicpm3": {**LIKE_LLAMA, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4,
                 "v_head_dim": 8},
    "recurrent_gemma": {**LIKE_LLAMA, "lru_width": 16, "block_types": ["attention"]},
    "modernbert": {**LIKE_BERT, "norm_bias": False},
    "nomic_bert": LIKE_BERT,
}  # fmt: skip
WITH_SEGMENTS = ("bert", "albert", "electra", "roberta", "nomic_bert")
NARROW = ("gpt2", "bert", "gemma", "recurrent_gemma")
FIRST_LAYER = {
    **dict.fromkeys(("gpt2", "gptj", "bloom"), "h.0"), "opt": "decoder.layers.0", "t5": "encoder.block.0",
    "mpt": "blocks.0",
}  # fmt: skip


def saved(name: str, folder: Path, dtype: torch.dtype = torch.float32, **others: Any) -> nn.Module:
    """A random model of this family, saved with its own `save_pretrained`."""
    config = transformers.AutoConfig.for_model(name, **{**FAMILIES[name], **others})
    model = transformers.AutoModel.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def first_input(name: str, model: nn.Module, ids: Tensor, segments: Tensor | None) -> Tensor:
    """What enters the model's first layer; of those like BERT, what its embeddings give."""
    seen: list[Tensor] = []
    options = {} if segments is None else {"token_type_ids": segments}
    if hasattr(model, "embeddings"):
        return model.embeddings(ids, **options)
    layer = model.get_submodule(FIRST_LAYER.get(name, "layers.0"))
    layer.register_forward_pre_hook(lambda _, given, named: seen.append((*given, *named.values())[0]), with_kwargs=True)
    model(input_ids=ids, **({"decoder_input_ids": ids} if name == "t5" else {}))
    return seen[0]


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.float32) for name in FAMILIES), *((name, torch.bfloat16) for name in NARROW)]
)
def test_the_input_of_the_first_layer_is_transformers(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    theirs = saved(name, tmp_path, dtype)
    ours = InputEmbedding.from_pretrained(tmp_path)
    ids = torch.randint(2, 37, (3, 7))
    segments = torch.randint(2, (3, 7)) if name in WITH_SEGMENTS else None
    expected = first_input(name, theirs, ids, segments)
    assert torch.equal(ours(ids, segments=segments), expected)
    assert {parameter.dtype for parameter in ours.parameters()} == {dtype}
    token = TokenEmbedding.from_pretrained(tmp_path)
    assert torch.equal(token(ids), ours.token(ids))
    assert token.padding_idx == theirs.get_input_embeddings().padding_idx


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "modernbert"])
def test_missing_values_have_the_defaults_of_the_class(name: str, tmp_path: Path) -> None:
    """A published configuration may lack the padding token and, as in Gemma 3, the size of the vocabulary."""
    options = {key: value for key, value in FAMILIES[name].items() if key != "pad_token_id"}
    config = transformers.AutoConfig.for_model(name, **options)
    theirs = transformers.AutoModel.from_config(config)
    theirs.save_pretrained(tmp_path)
    facts = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    left = {key: value for key, value in facts.items() if key not in ("pad_token_id", "vocab_size")}
    (tmp_path / "config.json").write_text(json.dumps(left), encoding="utf-8")
    token, table = TokenEmbedding.from_pretrained(tmp_path), theirs.get_input_embeddings()
    assert (token.vocab_size, token.padding_idx) == (37, table.padding_idx)
    assert torch.equal(token.weight, table.weight)
    (tmp_path / "config.json").write_text(json.dumps({**left, "pad_token_id": None}), encoding="utf-8")
    assert TokenEmbedding.from_pretrained(tmp_path).padding_idx is None


def test_padding_tokens_are_the_defaults_of_transformers() -> None:
    checked = 0
    for name, row in ARCHITECTURES.items():
        if row.inputs.default_padding is not None and name in transformers.CONFIG_MAPPING:
            assert row.inputs.default_padding == transformers.AutoConfig.for_model(name).pad_token_id, name
            checked += 1
    assert checked > 20


def test_shards_are_read_as_far_as_they_are_needed(tmp_path: Path) -> None:
    """The last shard is missing, and nothing asks for it."""
    theirs = saved("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    theirs.save_pretrained(tmp_path, max_shard_size="2KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
    others = {file for file in index.values() if file != index["embed_tokens.weight"]}
    for file in others:
        (tmp_path / file).unlink()
    assert others
    assert torch.equal(TokenEmbedding.from_pretrained(tmp_path).weight, theirs.embed_tokens.weight)
    (tmp_path / index["embed_tokens.weight"]).unlink()
    with refuses(InputError, "got no file", index["embed_tokens.weight"]):
        TokenEmbedding.from_pretrained(tmp_path)


def test_a_table_is_mapped_and_its_file_stays_as_it_is(tmp_path: Path) -> None:
    saved("gpt2", tmp_path)
    content = (tmp_path / "model.safetensors").read_bytes()
    embedding = InputEmbedding.from_pretrained(tmp_path)
    with torch.no_grad():
        embedding.token.weight.zero_()
    assert not InputEmbedding.from_pretrained(tmp_path).token.weight.eq(0).any()
    assert (tmp_path / "model.safetensors").read_bytes() == content
    assert embedding.token.weight.untyped_storage().nbytes() == 37 * 16 * 4, "the whole file would be saved with it"


def test_the_sum_has_berts_bits(tmp_path: Path) -> None:
    theirs = saved("bert", tmp_path)
    theirs.embeddings.LayerNorm = nn.Identity()
    ours = InputEmbedding.from_pretrained(tmp_path)
    ours.norm = None
    ids, segments = torch.randint(37, (3, 7)), torch.randint(2, (3, 7))
    assert torch.equal(ours(ids, segments=segments), theirs.embeddings(ids, token_type_ids=segments))


def test_positions_of_roberta_begin_behind_two_rows(tmp_path: Path) -> None:
    theirs = saved("roberta", tmp_path)
    ours = InputEmbedding.from_pretrained(tmp_path)
    ids, late = torch.randint(2, 37, (1, 3)), Positions.after(8, 3)
    assert torch.equal(ours(ids, late), theirs.embeddings(ids, position_ids=late.index + 2))
    with refuses(RangeError, "max_seq_len=11"):
        ours(torch.full((1, 12), 2))


def test_dropout_waits_for_training(tmp_path: Path) -> None:
    saved("gpt2", tmp_path)
    embedding = InputEmbedding.from_pretrained(tmp_path)
    assert (embedding.dropout.p, embedding.training) == (0.1, False)
    embedding.train()(torch.zeros(1, 13, dtype=torch.long)).sum().backward()
    assert embedding.token.weight.grad is not None


def change_config(folder: Path, **changes: Any) -> None:
    facts = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**facts, **changes}), encoding="utf-8")


def only_a_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def without_table(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({name: weight for name, weight in weights.items() if "word" not in name}, folder / "model.safetensors")


def quantised(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({name: weight.to(torch.int8) for name, weight in weights.items()}, folder / "model.safetensors")


def cut_off(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-1])


WRONG: dict[str, tuple[Callable[[Path], None], str]] = {
    "more rows said": (lambda folder: change_config(folder, vocab_size=38), "(38, 16)"),
    "another width said": (lambda folder: change_config(folder, hidden_size=8), "(37, 8)"),
    "more positions said": (lambda folder: change_config(folder, max_position_embeddings=512), "(512, 16)"),
    "more segments said": (lambda folder: change_config(folder, type_vocab_size=3), "(3, 16)"),
    "another dtype said": (lambda folder: change_config(folder, dtype="bfloat16"), "dtype='float32'"),
    "no dtype said": (lambda folder: change_config(folder, dtype="float8"), "got dtype='float8'"),
    "no epsilon said": (lambda folder: change_config(folder, layer_norm_eps=None), "layer_norm_eps"),
    "padding outside said": (lambda folder: change_config(folder, pad_token_id=37), "pad_token_id=37"),
    "another model said": (lambda folder: change_config(folder, model_type="gpt2"), "wte.weight, which a gpt2 needs"),
    "code of its own": (
        lambda folder: change_config(folder, model_type="mine", auto_map={"AutoModel": "mine.Model"}), "code of its own"
    ),
    "an unknown model": (lambda folder: change_config(folder, model_type="mine"), "model_type='mine'"),
    "a pickle": (only_a_pickle, "pickle"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
    "no configuration": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "no table": (without_table, "word_embeddings"),
    "quantised": (quantised, "of dtype int8"),
    "cut off": (cut_off, "not an intact safetensors"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_folder_that_cannot_be_read_costs_one_line(what: str, tmp_path: Path) -> None:
    saved("bert", tmp_path)
    spoil, words = WRONG[what]
    spoil(tmp_path)
    with refuses(InputError, words):
        InputEmbedding.from_pretrained(tmp_path)


@pytest.mark.unchecked
def test_what_is_no_folder_and_no_dtype_costs_one_line(tmp_path: Path) -> None:
    for wrong in (None, 5, b"", "", "x" * 5000, "\0"):
        with refuses(InputError, "folder of a model" if not wrong or wrong == 5 else "not a folder"):
            TokenEmbedding.from_pretrained(wrong)  # type: ignore[arg-type]
    for dtype in ("int8", torch.int8, torch.complex64, torch.float8_e4m3fn):
        with refuses(RangeError, "for dtype", "dtype='float32'"):
            TokenEmbedding.from_pretrained(tmp_path, dtype=dtype)  # type: ignore[arg-type]


def test_a_name_on_the_hub_is_no_folder() -> None:
    with refuses(InputError, "bert-base-uncased", "not a folder"):
        TokenEmbedding.from_pretrained("bert-base-uncased")


def test_a_dtype_is_converted_when_asked(tmp_path: Path) -> None:
    theirs = saved("bert", tmp_path)
    change_config(tmp_path, dtype="float16")
    weight = TokenEmbedding.from_pretrained(tmp_path, dtype=torch.bfloat16).weight
    assert torch.equal(weight, theirs.get_input_embeddings().weight.bfloat16())


def test_what_is_no_sum_of_tables_has_a_token_table(tmp_path: Path) -> None:
    """OPT 350m projects its token rows."""
    theirs = saved("opt", tmp_path, word_embed_proj_dim=8)
    with refuses(InputError, "word_embed_proj_dim=8", "TokenEmbedding.from_pretrained"):
        InputEmbedding.from_pretrained(tmp_path)
    assert torch.equal(TokenEmbedding.from_pretrained(tmp_path).weight, theirs.get_input_embeddings().weight)
