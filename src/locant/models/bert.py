"""BERT and its descendants: learned tables; in DeBERTa disentangled attention, in ModernBERT rotary positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from locant.arguments import shown
from locant.errors import InputError
from locant.models.architecture import Architecture, LayerKind, RotaryKeys, rotary_row
from locant.models.config_values import HEADS, LENGTHS, WIDTHS, Config, flag, integer, missing, required, width_per_head
from locant.models.gpt import learned_table, table_width
from locant.models.weights import InputTables, one_after_another
from locant.positions.base import PositionEncoding
from locant.positions.encodings.deberta import Deberta
from locant.positions.encodings.learned import Learned
from locant.positions.encodings.shaw import Shaw

__all__ = ["ARCHITECTURES"]

RELATIVE_KEYS: Mapping[str, bool] = {"relative_key": False, "relative_key_query": True}
"""Whether keys are multiplied with the table as well. BERT counts its rows from the other end: flip its table."""


def _bert(config: Config, layer_type: str | None) -> PositionEncoding:
    """A table, or what ``position_embedding_type`` names instead (up to transformers 4)."""
    kind = config.get("position_embedding_type", "absolute")
    if kind == "absolute":
        return learned_table(config)
    if not isinstance(kind, str) or kind not in RELATIVE_KEYS:
        known = ", ".join(("absolute", *RELATIVE_KEYS))
        got = f"got position_embedding_type={shown(kind)}, expected one of {known}"
        raise InputError(got, "'position_embedding_type': 'absolute'")
    return Shaw(width_per_head(config), required(config, *LENGTHS) - 1, key_term=RELATIVE_KEYS[kind])


def _roberta(config: Config, layer_type: str | None) -> PositionEncoding:
    """A table that begins behind the row of the padding token: 514 rows are 512 positions."""
    if "pad_token_id" not in config:
        raise missing(config, "pad_token_id", "'pad_token_id': 1, usually")
    offset = integer("pad_token_id", config["pad_token_id"], 0) + 1
    kind = config.get("position_embedding_type", "absolute")
    if kind != "absolute":
        got = f"got position_embedding_type={shown(kind)} for {config['model_type']}, expected 'absolute'"
        raise InputError(got, "model_type 'bert', which has the others")
    rows = required(config, *LENGTHS)
    if rows <= offset:
        got = f"got max_position_embeddings={rows}, of which {offset} are no positions"
        raise InputError(got, "'max_position_embeddings': 514, usually")
    return Learned(rows - offset, table_width(config), offset=offset)


def _deberta(config: Config, layer_type: str | None) -> PositionEncoding:
    """Disentangled attention over log buckets (DeBERTa v2 and v3)."""
    relative = flag("relative_attention", config.get("relative_attention", False))
    if not relative or flag("position_biased_input", config.get("position_biased_input", True)):
        raise InputError(
            "got a deberta-v2 configuration with absolute positions (position_biased_input, or no relative_attention)",
            "'relative_attention': True and 'position_biased_input': False, as released models have them",
        )
    heads = required(config, *HEADS)
    buckets, longest = (_positive(config, key) for key in ("position_buckets", "max_relative_positions"))
    return Deberta(
        heads,
        width_per_head(config),
        num_buckets=buckets,
        max_distance=longest or required(config, *LENGTHS),
        terms=_names(config, "pos_att_type"),  # type: ignore[arg-type]  # it knows its terms, and refuses others
        norm="layer_norm" in _names(config, "norm_rel_ebd"),
    )


def _positive(config: Config, key: str) -> int | None:
    """A number of which -1 means none."""
    return integer(key, config.get(key, -1), -1) if config.get(key, -1) not in (-1, 0) else None


def _names(config: Config, key: str) -> list[str]:
    """Names in a list, or in one text with bars between them."""
    value = config.get(key, "")
    names = value.split("|") if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise InputError(f"got {key}={shown(value)}, expected names", "'p2c|c2p', or a list of them")
    return [name.strip().lower() for name in names if name.strip()]


def _esm(config: Config, layer_type: str | None) -> PositionEncoding | None:
    """Rotary positions, or RoBERTa's table, which is what its class takes where nothing is said."""
    kind = config.get("position_embedding_type", "absolute")
    if kind not in ("absolute", "rotary"):
        got = f"got position_embedding_type={shown(kind)} for {config['model_type']}, expected 'rotary' or 'absolute'"
        raise InputError(got, "'position_embedding_type': 'rotary', as published models have it")
    return None if kind == "rotary" else _roberta(config, layer_type)


def _flipped_table(config: Config, encoding: PositionEncoding) -> str | None:
    if not isinstance(encoding, Shaw):
        return None
    return "BERT counts the rows of its table from the other end: weight.flip(0) of distance_embedding fits"


def _scale_of_deberta(config: Config, encoding: PositionEncoding) -> str | None:
    if not isinstance(encoding, Deberta):
        return None
    return f"content and positions share one scale: attend with scale={encoding.scale:.6g}, and causal=False"


BERT_TABLES = InputTables(
    tokens="embeddings.word_embeddings",
    positions="embeddings.position_embeddings",
    segments="embeddings.token_type_embeddings",
    norm="embeddings.LayerNorm",
    width_keys=("embedding_size", *WIDTHS),
    dropout_key="hidden_dropout_prob",
)
DISTILBERT_TABLES = replace(
    BERT_TABLES, segments=None, width_keys=("dim", *WIDTHS), norm_eps=1e-12, dropout_key="dropout"
)

WITHOUT_POSITIONS = replace(BERT_TABLES, positions=None)
MODERN_BERT = Architecture(
    rotary=RotaryKeys(
        per_layer=True,
        layer_kinds={
            "full_attention": LayerKind(base_key="global_rope_theta"),
            "sliding_attention": LayerKind(base_key="local_rope_theta"),
        },
    ),
    defaults={"global_rope_theta": 160_000.0, "local_rope_theta": 10_000.0, "max_position_embeddings": 8192},
    inputs=InputTables(
        tokens="embeddings.tok_embeddings",
        norm="embeddings.norm",
        norm_eps="norm_eps",
        norm_bias_key="norm_bias",
        dropout_key="embedding_dropout",
    ),
)

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

ESM = rotary_row(
    1e4,
    1026,
    encoding=_esm,
    inputs=replace(BERT_TABLES, why_not="rows are scaled by the share of masked tokens, and zero at padding"),
)
BERT = Architecture(
    encoding=_bert, defaults={"max_position_embeddings": 512}, inputs=BERT_TABLES, warnings=(_flipped_table,)
)
ROBERTA = Architecture(
    encoding=_roberta, defaults={"max_position_embeddings": 512, "pad_token_id": 1}, inputs=BERT_TABLES
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "bert": replace(BERT, presets={"bert-base": BERT_BASE}, vllm=True),
    **dict.fromkeys(("albert", "electra"), BERT),
    "distilbert": Architecture(
        encoding=learned_table, defaults={"max_position_embeddings": 512}, inputs=DISTILBERT_TABLES
    ),
    "roberta": replace(ROBERTA, presets={"roberta-base": ROBERTA_BASE}, vllm=True),
    "xlm-roberta": replace(ROBERTA, vllm=True),
    "camembert": ROBERTA,
    "deberta-v2": Architecture(
        encoding=_deberta, defaults={"max_position_embeddings": 512},
        inputs=replace(BERT_TABLES, why_not="rows at padding are zero, and a matrix may widen the sum"),
        warnings=(_scale_of_deberta,), presets={"deberta-v3-base": DEBERTA_V3_BASE},
    ),
    "esm": ESM,
    "SaProtConfig": ESM,
    "esmc": rotary_row(1e4, 2048),
    "eurobert": rotary_row(1e4, 8192),
    "gte": rotary_row(1.6e5, 8192, inputs=WITHOUT_POSITIONS),
    "jina_embeddings_v3": rotary_row(2e4, 8194, inputs=replace(WITHOUT_POSITIONS, norm="emb_ln")),
    "nomic_bert": rotary_row(1e3, 2048, inputs=replace(WITHOUT_POSITIONS, norm="emb_ln")),
    "ultrabert": rotary_row(
        None, 32768, keys=RotaryKeys(per_layer=True),
        defaults={
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "default", "rope_theta": 2.56e6},
            }
        },
    ),
    "modernbert-decoder": MODERN_BERT,
    "modernbert": replace(MODERN_BERT, projections={"Wqkv": one_after_another}, vllm=True),
}  # fmt: skip
