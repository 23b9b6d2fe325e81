"""Sinusoidal positions: a vector of sines and cosines for each position, added to the token embeddings.

Models differ in the order of the vector, in the longest wavelength and in the number of the first position. Marian,
Pegasus and CTRL have all sines before all cosines. XLM alternates them, as in the paper. M2M100, FSMT and XGLM come
from fairseq. They count positions from 2, after the row of the padding token, and their last wavelength is exactly 2 pi
times 10 000. MusicGen has cosines before sines.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from locant.errors import InputError
from locant.models.architecture import Architecture, RotaryKeys, rotary_row
from locant.models.config_values import WIDTHS, Config, flag_at, integer, number, required, required_value
from locant.models.learned_tables import LENGTH, NOT_COMPARED, PADDING, EncodingFactory, encoding_row, learned, size
from locant.models.multimodal import VALUES_TOO
from locant.positions.base import PositionEncoding
from locant.positions.encodings.learned import Learned
from locant.positions.encodings.sinusoidal import Sinusoidal

BASE = 10_000.0


def base_with_both_ends(width: int) -> float:
    """Return the base for which the last frequency is 1 / 10,000, as in tensor2tensor and fairseq."""
    return BASE ** (width / (width - 2)) if width > 2 else BASE


def _sines(
    width: str = "d_model", *, both_ends: bool = False, padding: int | None = None, offset: int = 0, **how: Any
) -> EncodingFactory:
    """Return sines before cosines. With `padding`, position 0 comes after the row of the padding token."""

    def encoding(config: Config, layer_type: str | None) -> PositionEncoding:
        dim = size(config, width, WIDTHS)
        first = (
            offset if padding is None else integer(PADDING, required_value(config, PADDING, f"{PADDING!r}: 1"), 0) + 1
        )
        base = base_with_both_ends(dim) if both_ends else BASE
        options: dict[str, Any] = {"base": base, "layout": "half", "offset": first, **how}
        return Sinusoidal(dim, **options)

    return encoding


def _sinusoidal_row(
    encoding: EncodingFactory, max_seq_len: int | None = None, length: str = LENGTH, **row: Any
) -> Architecture:
    return encoding_row(encoding, {} if max_seq_len is None else {length: max_seq_len}, **row)


def _fairseq(max_seq_len: int | None, width: str = "d_model", length: str = LENGTH, **row: Any) -> Architecture:
    """Return a row in which position 0 follows the row of the padding token, which is zero. The default token is 1."""
    encoding = _sines(width, both_ends=True, padding=1)
    return _sinusoidal_row(encoding, max_seq_len, length, defaults={PADDING: 1}, **row)


fairseq_encoding = _sines("hidden_size", both_ends=True, padding=1)
"""The encoding of text in models with the sines of fairseq (Seamless)."""


def _xlm(config: Config, layer_type: str | None) -> PositionEncoding:
    """Return a learned table, unless ``sinusoidal_embeddings`` is true."""
    width = size(config, WIDTHS[0], WIDTHS)
    if flag_at(config, "sinusoidal_embeddings"):
        return Sinusoidal(width)
    return Learned(required(config, LENGTH), width)


def _trocr(config: Config, layer_type: str | None) -> PositionEncoding:
    """Return a learned table like BART's, unless ``use_learned_position_embeddings`` is false."""
    if flag_at(config, "use_learned_position_embeddings", default=True):
        return Learned(required(config, LENGTH), size(config, "d_model", WIDTHS), offset=2)
    return _sines(both_ends=True, padding=1)(config, layer_type)


def _whisper(config: Config, layer_type: str | None) -> PositionEncoding:
    """Return sines for sound, or a learned table for text."""
    width = size(config, "d_model", WIDTHS)
    if layer_type == "encoder":
        return Sinusoidal(width, base=base_with_both_ends(width), layout="half")
    return Learned(required(config, "max_target_positions"), width)


def _canary(config: Config, layer_type: str | None) -> PositionEncoding:
    width = size(config, WIDTHS[0], WIDTHS)
    return Sinusoidal(width, layout="half", scale=1 / math.sqrt(width))


def _timesfm(config: Config, layer_type: str | None) -> PositionEncoding:
    """Return sines with wavelengths between two scales of the configuration, unless the model has no positions."""
    if not flag_at(config, "use_positional_embedding"):
        return PositionEncoding()
    low, high = (number(key, config.get(key, default), above=0) for key, default in SCALES.items())
    if low != 1:
        raise InputError(f"got min_timescale={low:g}, expected frequencies that begin at 1", "'min_timescale': 1")
    width = size(config, WIDTHS[0], WIDTHS)
    return Sinusoidal(width, base=high ** (width / (width - 2)), layout="half")


SCALES = {"min_timescale": 1, "max_timescale": BASE}
ONE_FOR_BOTH = "encoder and decoder add the same vectors"
AT_PADDING = "padding tokens get zeros, and do not count as positions"
FROM_THE_CONTEXT = "positions of the decoder begin at context_length, and not at 0"

XLM = Architecture(encoding=_xlm, attribute_map={"hidden_size": "emb_dim"}, defaults={LENGTH: 512}, inputs=NOT_COMPARED)
M2M100 = _fairseq(1024, warnings=(ONE_FOR_BOTH, AT_PADDING))
PAPER_IN_HALVES = _sinusoidal_row(_sines(), 1024, warnings=(ONE_FOR_BOTH,))
MUSICGEN = _sinusoidal_row(_sines("hidden_size", both_ends=True, first="cosine"), 2048)
KOSMOS = _fairseq(2048, "embed_dim", warnings=(AT_PADDING,), attribute_map={"num_attention_heads": "attention_heads"})
TIME_SERIES = _sinusoidal_row(_sines(), warnings=(FROM_THE_CONTEXT,))
WHISPER_ENCODER = _sinusoidal_row(_sines(both_ends=True), 1500, "max_source_positions")
WHISPER_TABLE = learned(1500, length="max_source_positions", width="d_model")

M2M100_418M = {
    "vocab_size": 128112, "d_model": 1024, "encoder_attention_heads": 16, "decoder_attention_heads": 16,
    "encoder_layers": 12, "decoder_layers": 12, "max_position_embeddings": 1024, "pad_token_id": 1,
}  # fmt: skip
WHISPER_SMALL = {
    "vocab_size": 51865, "d_model": 768, "encoder_attention_heads": 12, "decoder_attention_heads": 12,
    "encoder_layers": 12, "decoder_layers": 12, "max_source_positions": 1500, "max_target_positions": 448,
}  # fmt: skip

ARCHITECTURES: Mapping[str, Architecture] = {
    "m2m_100": replace(M2M100, presets={"m2m100-418m": M2M100_418M}),
    "nllb-moe": M2M100,
    "fsmt": M2M100,
    "speech_to_text": _fairseq(6000, length="max_source_positions", warnings=(ONE_FOR_BOTH, AT_PADDING)),
    "speech_to_text_2": _fairseq(1024, length="max_target_positions", warnings=(AT_PADDING,)),
    **dict.fromkeys(("marian", "pegasus"), PAPER_IN_HALVES),
    "pegasus_x": _sinusoidal_row(_sines(both_ends=True), 16384, warnings=(ONE_FOR_BOTH,)),
    "xglm": _sinusoidal_row(
        _sines(both_ends=True, offset=2), 2048, attribute_map={"num_attention_heads": "attention_heads"}
    ),
    "kosmos_2_text_model": KOSMOS,
    "kosmos_2_5_text_model": replace(KOSMOS, defaults={LENGTH: 4096, PADDING: 1}),
    **dict.fromkeys(("musicgen_decoder", "musicgen_melody_decoder"), MUSICGEN),
    "trocr": _sinusoidal_row(_trocr, 512, defaults={PADDING: 1}),
    "canary_decoder": _sinusoidal_row(_canary, 1024),
    "tipsv2_text_model": _sinusoidal_row(_sines("hidden_size", both_ends=True), 64),
    "videoprism_text_model": _sinusoidal_row(_sines("hidden_size"), 64),
    "ctrl": _sinusoidal_row(_sines("n_embd"), 256, "n_positions"),
    **dict.fromkeys(("flaubert", "xlm"), XLM),
    "whisper": Architecture(
        encoding=_whisper, layer_types=lambda config: ("encoder", "decoder"), default_layer_type="decoder",
        defaults={"max_source_positions": 1500, "max_target_positions": 448}, inputs=NOT_COMPARED,
    ),
    "qwen2_5_omni_audio_encoder": WHISPER_ENCODER,
    "qwen3_omni_moe_audio_encoder": WHISPER_ENCODER,
    "qwen3_asr_encoder": _sinusoidal_row(_sines(both_ends=True), 13),
    **dict.fromkeys(
        ("audioflamingo3_encoder", "moss_transcribe_diarize_audio", "qwen2_audio_encoder", "voxtral_encoder"),
        WHISPER_TABLE,
    ),
    "fun_asr_nano_encoder": _sinusoidal_row(_sines("input_size", both_ends=True, offset=1)),
    **dict.fromkeys(("autoformer", "informer", "time_series_transformer"), TIME_SERIES),
    "timesfm": _sinusoidal_row(_timesfm),
    "roformer": rotary_row(
        defaults={LENGTH: 1536}, inputs=NOT_COMPARED,
        keys=RotaryKeys(fixed_base=BASE, layout="interleaved", other_keys=("rotary_value",)),
        warnings=(lambda config, encoding: VALUES_TOO if flag_at(config, "rotary_value") else None,),
    ),
}  # fmt: skip
