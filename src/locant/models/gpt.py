"""GPT, from the learned tables of GPT-2 to the rotary positions of GPT-J, GPT-NeoX and gpt-oss; and OPT."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from locant.arguments import shown
from locant.models.architecture import Architecture, RotaryKeys
from locant.models.config_values import LENGTHS, WIDTHS, Config, required, value_at
from locant.models.weights import HeadRows, HeadShape, InputTables, group_by_group, key_rows, query_rows, value_rows
from locant.positions.base import PositionEncoding
from locant.positions.encodings.learned import Learned
from locant.positions.scaling import YaRN

__all__ = ["ARCHITECTURES", "learned_table", "table_width"]


def table_width(config: Config) -> int:
    """The width of the position table, which may be narrower than the layers (ALBERT, ELECTRA)."""
    own = next((key for key in ("embedding_size", "dim") if config.get(key) is not None), None)
    return required(config, *WIDTHS) if own is None else required(config, own)


def learned_table(config: Config, layer_type: str | None = None) -> PositionEncoding:
    """A table with one row per position (GPT-2)."""
    return Learned(required(config, *LENGTHS), table_width(config))


def _opt(config: Config, layer_type: str | None) -> PositionEncoding:
    """A table whose row 2 is position 0, by OPT's code; its width is that of the layers, not of the token table."""
    return Learned(required(config, *LENGTHS), required(config, *WIDTHS), offset=2)


def _projected(config: Config) -> str | None:
    """OPT 350m: token rows are narrower than the layers, and go through a matrix before positions are added."""
    own = value_at(config, "word_embed_proj_dim")
    if own is None or own == value_at(config, *WIDTHS):
        return None
    return f"token rows of word_embed_proj_dim={shown(own)} go through a matrix before positions are added"


def _in_four_parts(shape: HeadShape) -> tuple[HeadRows, ...]:
    """CodeGen: cut for four accelerators, and in each part queries, values, keys."""
    share = shape.queries // 4
    return (query_rows(shape, share), value_rows(shape, share), key_rows(shape, share)) * 4


def _rounded_ramp(config: Config, encoding: PositionEncoding) -> str | None:
    scaling = getattr(encoding, "scaling", None)
    if not isinstance(scaling, YaRN) or not scaling.truncate:
        return None
    return "truncate is not false, as it is for released gpt-oss models: their ramp is not rounded to whole pairs"


GPT_J = RotaryKeys(layout="interleaved", fixed_base=10_000.0, share_keys=("rotary_dim",))
GPT_NEOX = RotaryKeys(base_key="rotary_emb_base", share_keys=("rotary_pct",))

GPT_2_TABLES = InputTables(tokens="wte", positions="wpe", padding=False, dropout_key="embd_pdrop")
GPT_NEO_TABLES = replace(GPT_2_TABLES, dropout_key="embed_dropout")
GPT_J_TABLES = replace(GPT_2_TABLES, positions=None)
GPT_NEOX_TABLES = InputTables(tokens="embed_in", padding=False, dropout_key="hidden_dropout")
OPT_TABLES = InputTables(positions="embed_positions", width_keys=("word_embed_proj_dim", *WIDTHS), why_not=_projected)

GPT_2 = {"vocab_size": 50257, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024}
OPT_1_3B = {
    "vocab_size": 50272, "hidden_size": 2048, "num_attention_heads": 32, "num_hidden_layers": 24,
    "max_position_embeddings": 2048,
}  # fmt: skip
GPT_J_6B = {
    "vocab_size": 50400, "n_embd": 4096, "n_head": 16, "n_layer": 28, "n_positions": 2048, "rotary_dim": 64,
    "tie_word_embeddings": False,
}  # fmt: skip
GPT_NEOX_20B = {
    "vocab_size": 50432, "hidden_size": 6144, "num_attention_heads": 64, "num_hidden_layers": 44,
    "max_position_embeddings": 2048, "tie_word_embeddings": False, "rotary_pct": 0.25, "rotary_emb_base": 10000,
}  # fmt: skip
GPT_OSS_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
GPT_OSS_DEFAULTS = {
    "head_dim": 64, "max_position_embeddings": 131072, "rope_parameters": {**GPT_OSS_YARN, "rope_theta": 150000.0},
}  # fmt: skip
GPT_OSS_20B = {
    "vocab_size": 201088, "hidden_size": 2880, "num_attention_heads": 64, "head_dim": 64, "num_hidden_layers": 24,
    "max_position_embeddings": 131072, "tie_word_embeddings": False, "sliding_window": 128, "rope_theta": 150000,
    "rope_scaling": GPT_OSS_YARN,
}  # fmt: skip

ARCHITECTURES: Mapping[str, Architecture] = {
    "gpt2": Architecture(
        encoding=learned_table, defaults={"n_positions": 1024}, inputs=GPT_2_TABLES, presets={"gpt2": GPT_2}, vllm=True,
    ),
    "gpt_bigcode": Architecture(encoding=learned_table, defaults={"n_positions": 1024}, inputs=GPT_2_TABLES, vllm=True),
    "gpt_neo": Architecture(encoding=learned_table, defaults={"max_position_embeddings": 2048}, inputs=GPT_NEO_TABLES),
    "opt": Architecture(
        encoding=_opt, defaults={"max_position_embeddings": 2048}, inputs=OPT_TABLES, presets={"opt-1.3b": OPT_1_3B},
        vllm=True,
    ),
    "gptj": Architecture(
        rotary=GPT_J, defaults={"n_positions": 2048, "rotary_dim": 64}, inputs=GPT_J_TABLES,
        presets={"gpt-j-6b": GPT_J_6B}, vllm=True,
    ),
    "codegen": Architecture(
        rotary=GPT_J, defaults={"n_positions": 2048, "rotary_dim": 64}, inputs=GPT_J_TABLES,
        projections={"qkv_proj": _in_four_parts},
    ),
    "gpt_neox": Architecture(
        rotary=GPT_NEOX, inputs=GPT_NEOX_TABLES,
        defaults={"rotary_emb_base": 10000.0, "rotary_pct": 0.25, "max_position_embeddings": 2048},
        projections={"query_key_value": group_by_group}, presets={"gpt-neox-20b": GPT_NEOX_20B}, vllm=True,
    ),
    "openai_privacy_filter": Architecture(rotary=RotaryKeys(layout="interleaved"), defaults=GPT_OSS_DEFAULTS),
    "gpt_oss": Architecture(
        rotary=RotaryKeys(), full_attention_every=2, defaults=GPT_OSS_DEFAULTS, warnings=(_rounded_ramp,),
        presets={"gpt-oss-20b": GPT_OSS_20B}, vllm=True,
    ),
}  # fmt: skip
