"""Relative positions: a bias of the scores that depends on the distance between two tokens.

Many models have T5's buckets, with one table for the encoder and one for the decoder. MPNet and LayoutLM v2 and v3 add
such a bias in their layers, and also a table of positions at the input. `layer_types` names both. XLNet, Funnel and
Conformers have Transformer-XL's sines of the distance. Wav2Vec2-BERT and Granite Speech have a vector for each distance
(Shaw), and DeBERTa has disentangled attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from locant.errors import InputError
from locant.models.additive_positions import T5, UNSCALED_SCORES
from locant.models.architecture import Architecture, warn_if
from locant.models.config_values import HEADS, LENGTHS, WIDTHS, Config, flag_at, integer, required
from locant.models.learned_tables import BOXES, LENGTH, NOT_COMPARED, PADDING, EncodingFactory, after_padding, size
from locant.positions.base import PositionEncoding
from locant.positions.encodings.learned import Learned
from locant.positions.encodings.shaw import Shaw
from locant.positions.encodings.t5 import T5Bias
from locant.positions.encodings.transformer_xl import TransformerXL

ATTENTION, INPUT = "attention", "input"


# ------------------------------------------------------------------ buckets


def _mpnet(config: Config, layer_type: str | None) -> PositionEncoding:
    """Return RoBERTa's table for the input, or 32 buckets for the layers.

    The code does not read a key for this number.
    """
    if layer_type == INPUT:
        return after_padding(config, size(config, WIDTHS[0], WIDTHS), padding=1)
    return T5Bias(required(config, *HEADS), num_buckets=32, bidirectional=True)


def _layoutlm(table: Callable[[Config], PositionEncoding]) -> EncodingFactory:
    """Return a table for the input, and T5's buckets for the layers unless a configuration turns them off."""

    def encoding(config: Config, layer_type: str | None) -> PositionEncoding:
        if layer_type == INPUT or not flag_at(config, "has_relative_attention_bias", default=True):
            return table(config)
        buckets, reach = integer("rel_pos_bins", config.get("rel_pos_bins", 32)), config.get("max_rel_pos", 128)
        distance = integer("max_rel_pos", reach)
        return T5Bias(required(config, *HEADS), num_buckets=buckets, max_distance=distance, bidirectional=True)

    return encoding


def _attention_and_input(config: Config) -> tuple[str, ...]:
    return (ATTENTION, INPUT) if flag_at(config, "has_relative_attention_bias", default=True) else ()


def _cpmant(config: Config, layer_type: str | None) -> PositionEncoding:
    buckets, distance = (required(config, f"position_bias_{key}") for key in ("num_buckets", "max_distance"))
    return T5Bias(required(config, *HEADS), num_buckets=buckets, max_distance=distance, bidirectional=True)


# ------------------------------------------------------------------ sines of the distance


def _transformer_xl(heads: str = HEADS[0], width: str = WIDTHS[0], head_dim: str = "") -> EncodingFactory:
    def encoding(config: Config, layer_type: str | None) -> PositionEncoding:
        head_width = integer(head_dim, config[head_dim]) if config.get(head_dim) is not None else None
        return TransformerXL(size(config, heads, HEADS), size(config, width, WIDTHS), head_dim=head_width)

    return encoding


def _xlnet(config: Config, layer_type: str | None) -> PositionEncoding:
    if integer("clamp_len", config.get("clamp_len", -1), -1) > 0:
        got = f"got clamp_len={config['clamp_len']}, which makes all larger distances equal"
        raise InputError(got, "'clamp_len': -1, as released models have it")
    return _transformer_xl(width="d_model", head_dim="d_head")(config, layer_type)


def _fastspeech(config: Config, layer_type: str | None) -> PositionEncoding:
    return TransformerXL(required(config, f"{layer_type}_num_attention_heads"), required(config, WIDTHS[0]))


# ------------------------------------------------------------------ a vector for each distance


def _granite(config: Config, layer_type: str | None) -> PositionEncoding:
    return Shaw(required(config, "dim_head"), required(config, "max_pos_emb"))


def _speecht5(config: Config, layer_type: str | None) -> PositionEncoding:
    """Return 160 vectors for later keys, and 160 for the token itself and earlier keys."""
    reach = integer("encoder_max_relative_position", config.get("encoder_max_relative_position", 160))
    heads = required(config, "encoder_attention_heads")
    return Shaw(required(config, WIDTHS[0]) // heads, reach - 1, max_later=reach)


PER_LAYER = "each layer has its own table"
SEGMENTS = "the score of two tokens also depends on whether they have one segment; this encoding omits that term"
PAIRS_WITH_CLS = "a pair with the first token has no terms of the distance (separate_cls)"
POOLED = "after each block every second token remains, and keeps the position of the first of the two"
SINES_IN_TURNS = (
    "its sines and cosines alternate: for this encoding, reorder the projection of positions to weight[:, 0::2], then "
    "weight[:, 1::2]"
)
COUNTED_BACKWARDS = "its table begins with the farthest later key: use weight.flip(0) of it"
DIVIDED = warn_if(
    lambda config, encoding: isinstance(encoding, T5Bias),
    "its code divides the bias by sqrt(head_dim): divide the weights of a checkpoint by that",
)
WINDOW = (
    "with encoder_attention_type 'local' or 'transient-global' the encoder attends to local_radius tokens on each side"
)
PREPARED = "the input also has positions: sines with a trained factor for text, and a convolution for speech"

MPNET_BASE = {
    "vocab_size": 30527, "hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12,
    "max_position_embeddings": 514, "relative_attention_num_buckets": 32, "pad_token_id": 1,
}  # fmt: skip

T5_LIKE = replace(T5, presets={})
CONFORMER = Architecture(encoding=_transformer_xl(), inputs=NOT_COMPARED, warnings=(SINES_IN_TURNS,))
LAYOUTLM_2 = Architecture(
    encoding=_layoutlm(lambda config: Learned(size(config, LENGTH, LENGTHS), size(config, WIDTHS[0], WIDTHS))),
    layer_types=_attention_and_input, default_layer_type=ATTENTION, inputs=NOT_COMPARED, warnings=(BOXES,),
    defaults={LENGTH: 512, "rel_pos_bins": 32, "max_rel_pos": 128, "has_relative_attention_bias": True},
)  # fmt: skip

ARCHITECTURES: Mapping[str, Architecture] = {
    "mpnet": Architecture(
        encoding=_mpnet, layer_types=lambda config: (ATTENTION, INPUT), default_layer_type=ATTENTION,
        defaults={LENGTH: 512}, inputs=NOT_COMPARED, presets={"mpnet-base": MPNET_BASE},
    ),
    **dict.fromkeys(("layoutlmv2", "layoutxlm"), LAYOUTLM_2),
    "layoutlmv3": replace(
        LAYOUTLM_2, defaults={**LAYOUTLM_2.defaults, PADDING: 1}, warnings=(BOXES, DIVIDED),
        encoding=_layoutlm(lambda config: after_padding(config, size(config, WIDTHS[0], WIDTHS))),
    ),
    **dict.fromkeys(("pop2piano", "switch_transformers"), T5_LIKE),
    "umt5": replace(T5_LIKE, warnings=(UNSCALED_SCORES, PER_LAYER)),
    "longt5": replace(T5_LIKE, warnings=(UNSCALED_SCORES, WINDOW)),
    "udop": replace(T5_LIKE, warnings=(UNSCALED_SCORES, BOXES)),
    "pix2struct_text_model": replace(T5_LIKE, layer_types=lambda config: ()),
    "cpmant": Architecture(
        encoding=_cpmant, inputs=NOT_COMPARED, warnings=(SEGMENTS,),
        defaults={"position_bias_num_buckets": 512, "position_bias_max_distance": 2048},
    ),
    "xlnet": Architecture(encoding=_xlnet, inputs=NOT_COMPARED, warnings=(SEGMENTS,)),
    "funnel": Architecture(
        encoding=_transformer_xl("n_head", "d_model", "d_head"), inputs=NOT_COMPARED,
        warnings=(SEGMENTS, PAIRS_WITH_CLS, POOLED),
    ),
    "parakeet_encoder": CONFORMER,
    "nemotron_asr_streaming_encoder": CONFORMER,
    "fastspeech2_conformer": replace(
        CONFORMER, encoding=_fastspeech, layer_types=lambda config: ("encoder", "decoder"),
        default_layer_type="encoder",
    ),
    **dict.fromkeys(
        ("granite_speech_encoder", "granite_speech_plus_encoder"),
        Architecture(encoding=_granite, inputs=NOT_COMPARED, warnings=(COUNTED_BACKWARDS,)),
    ),
    "speecht5": Architecture(encoding=_speecht5, inputs=NOT_COMPARED, warnings=(COUNTED_BACKWARDS, PREPARED)),
}  # fmt: skip
