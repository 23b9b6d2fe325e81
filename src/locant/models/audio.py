"""Speech and sound: encoders that rotate like Llama or GPT-J but have other keys, or that use convolutions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from locant.errors import InputError
from locant.kernels.rotary import Layout
from locant.models.architecture import SHARE, Architecture, RotaryKeys, rotary_row, warn_if
from locant.models.config_values import HEADS, WIDTHS, Config, flag_at, number, required, required_name, required_value
from locant.models.relative_biases import SINES_IN_TURNS
from locant.models.sinusoids import fairseq_encoding
from locant.positions.base import PositionEncoding
from locant.positions.encodings.convolutional import Convolutional
from locant.positions.encodings.shaw import Shaw
from locant.positions.encodings.t5 import T5Bias
from locant.positions.encodings.transformer_xl import TransformerXL
from locant.positions.pair_table import Pairs


def _conformer(config: Config, layer_type: str | None) -> PositionEncoding | None:
    """Return rotary positions (``None``), sines of the distance, a vector for each distance, or no positions."""
    kinds = ("rotary", "relative", "relative_key")
    remedy = f"'position_embeddings_type': {' or '.join(map(repr, kinds))}, as the model was trained with"
    if required_value(config, "position_embeddings_type", remedy) is None:
        return PositionEncoding()
    kind = required_name(config, "position_embeddings_type", kinds, remedy=remedy)
    if kind == "rotary":
        return None
    heads, width = required(config, HEADS[0]), required(config, WIDTHS[0])
    if kind == "relative":
        return TransformerXL(heads, width)
    before, after = (required(config, f"{side}_max_position_embeddings", low=0) for side in ("left", "right"))
    return Shaw(width // heads, before, max_later=after)


def _seamless(config: Config, layer_type: str | None) -> PositionEncoding | None:
    """Return a Conformer for speech, or the sines of M2M100 for text."""
    return _conformer(config, None) if layer_type == "speech" else fairseq_encoding(config, None)


def _time_pairs(config: Config, rope: Config, rotary_dim: int) -> Pairs:
    """Return pairs for frame x window and for frame x place in the window, for features of sound (Music Flamingo)."""
    longest = number("max_position_embeddings", config.get("max_position_embeddings"))
    base = rope.get("rope_theta", config.get("rope_theta"))
    step = 4 * number("audio_frame_step", config.get("audio_frame_step", 0.01), above=0)
    ladder = [number("rope_theta", base) ** (-2 * rung / rotary_dim) for rung in range(rotary_dim // 2)]
    turn = -2 * math.pi * step / longest
    return Pairs(
        dims=Pairs.of(2 * rotary_dim, layout="interleaved").dims,
        axes=[axis for axis in (0, 1) for _ in ladder],
        inv_freq=[turn * each for each in ladder] + [2 * math.pi * turn * each for each in ladder],
    )


def _speech(config: Config, layer_type: str | None) -> PositionEncoding:
    if flag_at(config, "conv_pos_batch_norm"):
        got = "got conv_pos_batch_norm=True, a norm over the batch, which makes rows depend on each other"
        raise InputError(got, "'conv_pos_batch_norm': False, as most have it")
    return _convolutional(config, kernel_size=required(config, "num_conv_pos_embeddings"))


def _reject_squeezed(config: Config, layer_type: str | None) -> PositionEncoding:
    got = f"got {config['model_type']}, whose convolution gives a position only to every squeeze_factor-th frame"
    raise InputError(got, "use locant.Convolutional for the frames before they are squeezed")


def _wavlm(config: Config, layer_type: str | None) -> PositionEncoding:
    """Return a convolution for the input, or T5's buckets for the layers, which multiply them with a gate."""
    if layer_type != "attention":
        return _speech(config, None)
    buckets, distance = required(config, "num_buckets"), required(config, "max_bucket_distance")
    return T5Bias(required(config, *HEADS), num_buckets=buckets, max_distance=distance, bidirectional=True)


def _data2vec(config: Config, layer_type: str | None) -> PositionEncoding:
    kernel_size, depth = (required(config, key) for key in ("conv_pos_kernel_size", "num_conv_pos_embeddings"))
    return _convolutional(config, kernel_size=kernel_size, depth=depth, norm="layer")


def _convolutional(config: Config, **options: Any) -> PositionEncoding:
    released = "'feat_extract_activation': 'gelu', as released models have it"
    required_name(config, "feat_extract_activation", ("gelu",), "gelu", released)
    return Convolutional(required(config, *WIDTHS), groups=required(config, "num_conv_pos_embedding_groups"), **options)


IN_TURNS = warn_if(lambda config, encoding: isinstance(encoding, TransformerXL), SINES_IN_TURNS)
EMBEDDED = (
    "features of sound are rotated before they enter the model, as one head: a position is (frame x window, "
    "frame x place in the window), with frames of 4 x audio_frame_step seconds"
)
GATED = "each layer multiplies the bias of a query by a gate for each head, which it computes from its hidden state"


def _row_with_default_ropes(base: float, share: float, max_seq_len: int, layout: Layout = "half") -> Architecture:
    """Return a row for a class with default rope parameters. These override all keys outside them."""
    return rotary_row(
        max_seq_len=max_seq_len,
        keys=RotaryKeys(layout=layout, share_keys=SHARE),
        defaults={"rope_parameters": {"rope_type": "default", "rope_theta": base, SHARE[0]: share}},
    )


CONFORMER = RotaryKeys(base_key="rotary_embedding_base")
KEY_DISTANCES = {"left_max_position_embeddings": 64, "right_max_position_embeddings": 8}
SEAMLESS = Architecture(
    rotary=CONFORMER, encoding=_seamless, layer_types=lambda config: ("speech", "text"), default_layer_type="speech",
    attribute_map={"num_attention_heads": "speech_encoder_attention_heads"}, warnings=(IN_TURNS,),
    defaults={"rotary_embedding_base": 10000.0, "position_embeddings_type": "relative", "pad_token_id": 0},
)  # fmt: skip
PART = RotaryKeys(share_keys=SHARE)
INTERLEAVED = RotaryKeys(layout="interleaved")
KERNEL = {"num_conv_pos_embeddings": 128, "num_conv_pos_embedding_groups": 16, "feat_extract_activation": "gelu"}
LLAMA_3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 0.125, "high_freq_factor": 0.5,
    "original_max_position_embeddings": 1024,
}  # fmt: skip

ARCHITECTURES: Mapping[str, Architecture] = {
    "dia_decoder": rotary_row(1e4, 3072, 128),
    "dia_encoder": rotary_row(1e4, 1024, 128),
    "dots3_note_audio_encoder": rotary_row(1e4, 6000, None, 0.5),
    "glmasr_encoder": rotary_row(1e4, 1500, None, 0.5),
    "gradium_phonon_tts": rotary_row(1e4, 8192, 64),
    "higgs_audio_v2": rotary_row(
        defaults={"head_dim": 128, "max_position_embeddings": 2048, "rope_parameters": LLAMA_3}
    ),
    "kyutai_speech_to_text": rotary_row(1e4, 750),
    "lasr_encoder": rotary_row(1e4, 10000),
    **dict.fromkeys(("mimi", "pocket_tts_audio_tokenizer", "Qwen3OmniMoeCode2WavConfig"), rotary_row(1e4, 8000)),
    "moonshine": rotary_row(
        1e4, 512, None, 0.9, keys=INTERLEAVED, attribute_map={"num_attention_heads": "encoder_num_attention_heads"},
    ),
    "musicflamingo": rotary_row(
        1200.0, 1200, 1280, 0.2, keys=RotaryKeys(pairs=_time_pairs, not_converted="which rotates no queries and keys"),
        warnings=(EMBEDDED,),
    ),
    **dict.fromkeys(
        ("moonshine_streaming", "moonshine_streaming_encoder"), _row_with_default_ropes(1e4, 0.8, 4096, "interleaved")
    ),
    "moshi": rotary_row(1e4, 3000),
    "nemotron3_5_transcribe_asr_audio": _row_with_default_ropes(1e4, 0.5, 5000),
    "nemotron3_diarization_audio": rotary_row(1e4, 5000, keys=PART),
    **dict.fromkeys(("neucodec", "xcodec2"), rotary_row(1e4, 4096, 64)),
    **dict.fromkeys(
        ("pe_audio_encoder", "pe_audio_video_encoder", "pe_video_encoder"),
        rotary_row(2e4, 10000, 128, keys=INTERLEAVED),
    ),
    "pocket_tts": rotary_row(1e4, 8192),
    "qwen3_omni_moe_talker_code_predictor": rotary_row(1e4, 32768, 128),
    "seamless_m4t": SEAMLESS,
    "seamless_m4t_v2": replace(
        SEAMLESS, defaults={**SEAMLESS.defaults, **KEY_DISTANCES, "position_embeddings_type": "relative_key"}
    ),
    "timesfm2_5": rotary_row(1e4, 16384, 80),
    "voxtral_realtime_encoder": rotary_row(1e4, 1500, 64),
    "voxtral_realtime_text": rotary_row(1e4, 131072),
    "wav2vec2-bert": Architecture(
        rotary=CONFORMER, encoding=_conformer, warnings=(IN_TURNS,),
        defaults={"rotary_embedding_base": 10000.0, "position_embeddings_type": "relative_key", **KEY_DISTANCES},
    ),
    "wav2vec2-conformer": Architecture(
        rotary=CONFORMER, encoding=_conformer, warnings=(IN_TURNS,),
        defaults={"rotary_embedding_base": 10000.0, "position_embeddings_type": "relative"},
    ),
    **dict.fromkeys(
        ("hubert", "omniasr_audio", "unispeech", "unispeech-sat", "wav2vec2"),
        Architecture(encoding=_speech, defaults=KERNEL),
    ),
    "wavlm": Architecture(
        encoding=_wavlm, layer_types=lambda config: ("input", "attention"), default_layer_type="input",
        defaults={**KERNEL, "num_buckets": 320, "max_bucket_distance": 800},
        warnings=(warn_if(lambda config, encoding: isinstance(encoding, T5Bias), GATED),),
    ),
    **dict.fromkeys(("sew", "sew-d"), Architecture(encoding=_reject_squeezed)),
    "data2vec-audio": Architecture(
        encoding=_data2vec, defaults={**KERNEL, "conv_pos_kernel_size": 19, "num_conv_pos_embeddings": 5}
    ),
}  # fmt: skip
