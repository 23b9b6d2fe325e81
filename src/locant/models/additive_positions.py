"""Additive positions: learned tables added to the input, biases added to the scores, and models with these or rotation.

GPT-2, OPT (whose row 2 is position 0) and models like BERT have tables, and DeBERTa has disentangled attention. BLOOM
and MPT have linear biases (ALiBi), and Falcon has linear biases or rotary positions. T5 has biases by buckets, with one
table for the encoder and one for the decoder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from locant.arguments import short_repr
from locant.errors import InputError
from locant.models.architecture import Architecture, rotary_row, warn_if
from locant.models.config_values import (
    HEADS,
    LENGTHS,
    WIDTHS,
    Config,
    flag,
    integer,
    number,
    required,
    required_name,
    required_value,
    value_at,
    width_per_head,
)
from locant.models.weights import InputTables, group_by_group
from locant.positions.base import PositionEncoding
from locant.positions.encodings.alibi import ALiBi, alibi_slopes
from locant.positions.encodings.deberta import Deberta
from locant.positions.encodings.learned import Learned
from locant.positions.encodings.shaw import Shaw
from locant.positions.encodings.t5 import T5Bias


def _table_width(config: Config) -> int:
    """Return the width of the position table, which may be narrower than the layers (ALBERT, ELECTRA)."""
    narrow_key = next((key for key in ("embedding_size", "dim") if config.get(key) is not None), None)
    return required(config, *WIDTHS) if narrow_key is None else required(config, narrow_key)


def _table(config: Config, layer_type: str | None = None) -> PositionEncoding:
    """Return a table with one row per position (GPT-2)."""
    return Learned(required(config, *LENGTHS), _table_width(config))


def _projection_reason(config: Config) -> str | None:
    """Return why `InputEmbedding` does not fit, if token rows are narrower than the layers (OPT 350m)."""
    width = value_at(config, "word_embed_proj_dim")
    if width is None or width == value_at(config, *WIDTHS):
        return None
    return f"token rows of word_embed_proj_dim={short_repr(width)} go through a matrix before positions are added"


KEY_TERMS: Mapping[str, bool] = {"relative_key": False, "relative_key_query": True}
"""Names of relative positions, and whether the table also multiplies keys. BERT's table has to be flipped."""


def _bert(config: Config, layer_type: str | None) -> PositionEncoding:
    """Return a table, or the relative positions that ``position_embedding_type`` names (up to transformers 4)."""
    kind = required_name(config, "position_embedding_type", ("absolute", *KEY_TERMS), "absolute")
    if kind == "absolute":
        return _table(config)
    return Shaw(width_per_head(config), required(config, *LENGTHS) - 1, key_term=KEY_TERMS[kind])


def _roberta(config: Config, layer_type: str | None) -> PositionEncoding:
    """Return a table that begins after the row of the padding token: 514 rows are 512 positions."""
    offset = integer("pad_token_id", required_value(config, "pad_token_id", "'pad_token_id': 1, usually"), 0) + 1
    required_name(
        config, "position_embedding_type", ("absolute",), "absolute", "use model_type 'bert', which has the others"
    )
    rows = required(config, *LENGTHS)
    if rows <= offset:
        got = f"got max_position_embeddings={rows}, of which {offset} rows are not positions"
        raise InputError(got, "'max_position_embeddings': 514, usually")
    return Learned(rows - offset, _table_width(config), offset=offset)


def _esm(config: Config, layer_type: str | None) -> PositionEncoding | None:
    """Return ``None`` for rotary positions, or RoBERTa's table, which is ESM's default."""
    published = "'position_embedding_type': 'rotary', as published models have it"
    kind = required_name(config, "position_embedding_type", ("rotary", "absolute"), "absolute", published)
    return None if kind == "rotary" else _roberta(config, layer_type)


def _deberta_kinds(config: Config) -> tuple[str, ...]:
    """Return the two kinds if a model has both disentangled attention and a table at the input.

    Released models have only disentangled attention.
    """
    kinds = {
        "attention": _required_flag(config, "relative_attention"),
        "input": _required_flag(config, "position_biased_input"),
    }
    return tuple(kinds) if all(kinds.values()) else ()


def _required_flag(config: Config, key: str) -> bool:
    return flag(key, required_value(config, key, f"{key!r}: true or false"))


def _deberta(config: Config, layer_type: str | None) -> PositionEncoding:
    """Return disentangled attention (over log buckets in DeBERTa v2 and v3) or a table, depending on two keys."""
    is_relative, is_biased = (_required_flag(config, key) for key in ("relative_attention", "position_biased_input"))
    if layer_type == "input" or not is_relative:
        return _table(config) if is_biased else PositionEncoding()
    first = config.get("model_type") == "deberta"  # the first version does not read buckets or a norm
    buckets, longest = (  # -1 means none
        integer(key, config.get(key, -1), -1) if config.get(key, -1) not in (-1, 0) else None
        for key in ("position_buckets", "max_relative_positions")
    )
    return Deberta(
        required(config, *HEADS),
        width_per_head(config),
        num_buckets=None if first else buckets,
        max_distance=longest or required(config, *LENGTHS),
        terms=_names(config, "pos_att_type"),  # type: ignore[arg-type]  # Deberta raises an error for unknown terms
        norm=not first and "layer_norm" in _names(config, "norm_rel_ebd"),
    )


def _names(config: Config, key: str) -> list[str]:
    """Return the names in a list, or in one text with bars between them."""
    value = config.get(key, "")
    names = value.split("|") if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise InputError(f"got {key}={short_repr(value)}, expected names", "'p2c|c2p', or a list of them")
    return [name.strip().lower() for name in names if name.strip()]


def _mpt(config: Config, layer_type: str | None) -> PositionEncoding:
    """Return ALiBi, whose smallest slope is ``2 ** -alibi_bias_max``.

    If the number of heads is not a power of two, MPT sorts the slopes of the next power into odd and even places. The
    result equals the rule of the paper.
    """
    attention = config.get("attn_config", {})
    if not isinstance(attention, Mapping):
        raise InputError(f"got attn_config={short_repr(attention)}, expected a dictionary", "{'alibi': True, ...}")
    missing = [key for key in ("alibi", "alibi_bias_max") if attention.get(key) is None]
    if missing or not flag("alibi", attention["alibi"]):
        got = f"without {' and '.join(missing)}" if missing else "with alibi=false, which transformers does not know"
        raise InputError(f"got an attn_config {got}", "{'alibi': True, 'alibi_bias_max': 8}")
    heads = required(config, *HEADS)
    reach = number("alibi_bias_max", attention["alibi_bias_max"]) / 8
    return ALiBi(heads, slopes=[slope**reach for slope in alibi_slopes(heads)])


def _falcon(config: Config, layer_type: str | None) -> PositionEncoding | None:
    """Return ``None`` for rotary positions, or ALiBi, which Falcon adds before it scales by ``1 / sqrt(head_dim)``."""
    if not flag("alibi", required_value(config, "alibi", "'alibi': False for rotary positions")):
        return None
    heads, width = required(config, *HEADS), width_per_head(config)
    return ALiBi(heads, slopes=[slope / math.sqrt(width) for slope in alibi_slopes(heads)])


def _falcon_keys(config: Config, queries: int) -> int | None:
    """Return the number of key/value heads: 1 or `queries`.

    Return ``None`` for the newer architecture, which has a key for this number.
    """
    if config.get("new_decoder_architecture"):
        return None
    shared = required_value(config, "multi_query", "'multi_query': true or false")
    return 1 if flag("multi_query", shared) else queries


def _t5(config: Config, layer_type: str | None) -> PositionEncoding:
    """Return a table of relative buckets. The table of the encoder distinguishes earlier keys from later ones."""
    buckets = required(config, "relative_attention_num_buckets")
    distance = config.get("relative_attention_max_distance", 128)  # the constant in T5's code before there was a key
    return T5Bias(
        required(config, *HEADS),
        num_buckets=buckets,
        max_distance=integer("relative_attention_max_distance", distance),
        bidirectional=layer_type == "encoder",
    )


def _has_type(kind: type[PositionEncoding]) -> Callable[[Config, PositionEncoding], bool]:
    return lambda config, encoding: isinstance(encoding, kind)


FLIPPED = warn_if(
    _has_type(Shaw), "BERT counts the rows of its table from the other end: use weight.flip(0) of distance_embedding"
)
ONE_SCALE = warn_if(
    _has_type(Deberta),
    "content and positions share one scale: attend with scale={encoding.scale:.6g}, and causal=False",
)
ROUNDED_SLOPES = warn_if(
    _has_type(ALiBi),
    "the slopes are the paper's divided by sqrt(head_dim), as Falcon adds them before it scales; transformers "
    "rounds them to bfloat16, and long prompts show the difference",
)
UNSCALED_SCORES = (
    "T5 does not divide scores by sqrt(head_dim): attend with scale=1.0. It has no bias in cross-attention"
)

GPT_2_TABLES = InputTables(tokens="wte", positions="wpe", padding=False, dropout_key="embd_pdrop")
OPT_TABLES = InputTables(
    positions="embed_positions",
    width_keys=("word_embed_proj_dim", *WIDTHS),
    default_padding=1,
    why_not=_projection_reason,
)
BERT_TABLES = InputTables(
    tokens="embeddings.word_embeddings",
    positions="embeddings.position_embeddings",
    segments="embeddings.token_type_embeddings",
    norm="embeddings.LayerNorm",
    width_keys=("embedding_size", *WIDTHS),
    default_padding=0,
    dropout_key="hidden_dropout_prob",
)
ROBERTA_TABLES = replace(BERT_TABLES, default_padding=1)
DISTILBERT_TABLES = replace(
    BERT_TABLES, segments=None, width_keys=("dim", *WIDTHS), norm_eps=1e-12, dropout_key="dropout"
)
WITHOUT_POSITIONS = replace(BERT_TABLES, positions=None, default_padding=1)
BLOOM_TABLES = InputTables(
    tokens="word_embeddings", norm="word_embeddings_layernorm", norm_eps="layer_norm_epsilon", padding=False
)

GPT_2 = {"vocab_size": 50257, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024}
OPT_1_3B = {
    "vocab_size": 50272, "hidden_size": 2048, "num_attention_heads": 32, "num_hidden_layers": 24,
    "max_position_embeddings": 2048,
}  # fmt: skip
BERT_BASE = {
    "vocab_size": 30522, "hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12,
    "max_position_embeddings": 512, "type_vocab_size": 2,
}  # fmt: skip
ROBERTA_BASE = {
    **BERT_BASE, "vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1, "pad_token_id": 1,
}  # fmt: skip
DEBERTA_V3_BASE = {
    **BERT_BASE, "vocab_size": 128100, "type_vocab_size": 0, "relative_attention": True, "position_biased_input": False,
    "pos_att_type": "p2c|c2p", "position_buckets": 256, "share_att_key": True, "max_relative_positions": -1,
    "norm_rel_ebd": "layer_norm",
}  # fmt: skip
BLOOM_7B1 = {"vocab_size": 250880, "hidden_size": 4096, "n_head": 32, "n_layer": 30, "seq_length": 2048}
MPT_7B = {
    "vocab_size": 50432, "d_model": 4096, "n_heads": 32, "n_layers": 32, "max_seq_len": 2048,
    "attn_config": {"alibi": True, "alibi_bias_max": 8},
}  # fmt: skip
FALCON_7B = {
    "vocab_size": 65024, "hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32,
    "max_position_embeddings": 2048, "alibi": False, "rope_theta": 10000.0,
}  # fmt: skip
T5_BASE = {
    "vocab_size": 32128, "d_model": 768, "d_kv": 64, "num_heads": 12, "num_layers": 12, "n_positions": 512,
    "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128,
}  # fmt: skip

LONGEST_512 = {"max_position_embeddings": 512}
BERT = Architecture(encoding=_bert, defaults=LONGEST_512, inputs=BERT_TABLES, warnings=(FLIPPED,))
ROBERTA = Architecture(encoding=_roberta, defaults={**LONGEST_512, "pad_token_id": 1}, inputs=ROBERTA_TABLES)
MASKED = "rows are scaled by the share of masked tokens, and zero at padding"
ESM = rotary_row(1e4, 1026, encoding=_esm, inputs=replace(BERT_TABLES, default_padding=None, why_not=MASKED))
DEBERTA = Architecture(
    encoding=_deberta, layer_types=_deberta_kinds, default_layer_type="attention", warnings=(ONE_SCALE,),
    defaults={**LONGEST_512, "relative_attention": False, "position_biased_input": True},
    inputs=replace(BERT_TABLES, why_not="rows at padding are zero, and a matrix may widen the sum"),
)  # fmt: skip
T5 = Architecture(
    encoding=_t5, layer_types=lambda config: ("encoder", "decoder"), default_layer_type="encoder",
    inputs=InputTables(tokens="shared", padding=False, dropout_key="dropout_rate"),
    defaults={"relative_attention_num_buckets": 32}, warnings=(UNSCALED_SCORES,),
)  # fmt: skip

ARCHITECTURES: Mapping[str, Architecture] = {
    "gpt2": Architecture(
        encoding=_table, defaults={"n_positions": 1024}, inputs=GPT_2_TABLES, presets={"gpt2": GPT_2}, vllm=True
    ),
    "gpt_bigcode": Architecture(encoding=_table, defaults={"n_positions": 1024}, inputs=GPT_2_TABLES, vllm=True),
    "gpt_neo": Architecture(
        encoding=_table, defaults={"max_position_embeddings": 2048},
        inputs=replace(GPT_2_TABLES, dropout_key="embed_dropout"),
    ),
    "opt": Architecture(
        encoding=lambda config, _: Learned(required(config, *LENGTHS), required(config, *WIDTHS), offset=2),
        defaults={"max_position_embeddings": 2048}, inputs=OPT_TABLES, presets={"opt-1.3b": OPT_1_3B}, vllm=True,
    ),
    "bert": replace(BERT, presets={"bert-base": BERT_BASE}, vllm=True),
    **dict.fromkeys(("albert", "electra"), BERT),
    "distilbert": Architecture(encoding=_table, defaults=LONGEST_512, inputs=DISTILBERT_TABLES),
    "roberta": replace(ROBERTA, presets={"roberta-base": ROBERTA_BASE}, vllm=True),
    "xlm-roberta": replace(ROBERTA, vllm=True),
    "camembert": ROBERTA,
    "deberta": DEBERTA,
    "deberta-v2": replace(DEBERTA, presets={"deberta-v3-base": DEBERTA_V3_BASE}),
    **dict.fromkeys(("esm", "SaProtConfig"), ESM),
    "gte": rotary_row(1.6e5, 8192, inputs=WITHOUT_POSITIONS),
    "jina_embeddings_v3": rotary_row(2e4, 8194, inputs=replace(WITHOUT_POSITIONS, norm="emb_ln")),
    "nomic_bert": rotary_row(1e3, 2048, inputs=replace(WITHOUT_POSITIONS, norm="emb_ln", default_padding=0)),
    "t5": replace(T5, presets={"t5-base": T5_BASE}),
    "mt5": T5,
    "bloom": Architecture(
        encoding=lambda config, _: ALiBi(required(config, *HEADS)), inputs=BLOOM_TABLES,
        presets={"bloom-7b1": BLOOM_7B1}, vllm=True,
    ),
    "mpt": Architecture(
        encoding=_mpt, defaults={"max_seq_len": 2048, "attn_config": {"alibi": True, "alibi_bias_max": 8}},
        inputs=InputTables(tokens="wte", padding=False), presets={"mpt-7b": MPT_7B}, vllm=True,
    ),
    "falcon": rotary_row(
        1e4, 2048, encoding=_falcon, defaults={"alibi": False},
        inputs=InputTables(tokens="word_embeddings", padding=False), projections={"query_key_value": group_by_group},
        key_heads=_falcon_keys, warnings=(ROUNDED_SLOPES,), presets={"falcon-7b": FALCON_7B}, vllm=True,
    ),
}  # fmt: skip
