"""Speech and sound: encoders that rotate as Llama or GPT-J does, with keys of their own, or convolve."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from locant.errors import InputError
from locant.kernels.rotary import Layout
from locant.models.architecture import SHARE, Architecture, RotaryKeys, rotary_row
from locant.models.config_values import WIDTHS, Config, flag_at, number, one_named, required
from locant.positions.base import PositionEncoding
from locant.positions.encodings.convolutional import Convolutional
from locant.positions.pair_table import Pairs


def _conformer(config: Config, layer_type: str | None) -> None:
    """Rotary positions, if ``position_embeddings_type`` says so; by default they are other ones."""
    remedy = "Rotary.from_config(config) for the rotary positions of such a model"
    one_named(config, "position_embeddings_type", ("rotary",), remedy=remedy)


def _of_seconds(config: Config, rope: Config, rotary_dim: int) -> Pairs:
    """Of a feature of sound: its frame x its window of frames, and its frame x its place there (Music Flamingo)."""
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
        got = "got conv_pos_batch_norm=True, a norm over batches, in which rows depend on each other"
        raise InputError(got, "'conv_pos_batch_norm': False, as most have it")
    return _convolutional(config, kernel_size=required(config, "num_conv_pos_embeddings"))


def _data2vec(config: Config, layer_type: str | None) -> PositionEncoding:
    kernel_size, depth = (required(config, key) for key in ("conv_pos_kernel_size", "num_conv_pos_embeddings"))
    return _convolutional(config, kernel_size=kernel_size, depth=depth, norm="layer")


def _convolutional(config: Config, **options: Any) -> PositionEncoding:
    released = "'feat_extract_activation': 'gelu', as released models have it"
    one_named(config, "feat_extract_activation", ("gelu",), "gelu", released)
    return Convolutional(required(config, *WIDTHS), groups=required(config, "num_conv_pos_embedding_groups"), **options)


EMBEDDED = (
    "features of sound are rotated before they enter the model, as one head: a position is (frame x window, "
    "frame x place in the window), with frames of 4 x audio_frame_step seconds"
)


def _with_own_ropes(base: float, share: float, max_seq_len: int, layout: Layout = "half") -> Architecture:
    """A class with rope parameters of its own: without any in the configuration, keys beside them are not read."""
    return rotary_row(
        max_seq_len=max_seq_len,
        keys=RotaryKeys(layout=layout, share_keys=SHARE),
        defaults={"rope_parameters": {"rope_type": "default", "rope_theta": base, SHARE[0]: share}},
    )


CONFORMER = RotaryKeys(base_key="rotary_embedding_base")
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
        1200.0, 1200, 1280, 0.2, keys=RotaryKeys(pairs=_of_seconds, not_converted="which rotates no queries and keys"),
        warnings=(EMBEDDED,),
    ),
    **dict.fromkeys(
        ("moonshine_streaming", "moonshine_streaming_encoder"), _with_own_ropes(1e4, 0.8, 4096, "interleaved")
    ),
    "moshi": rotary_row(1e4, 3000),
    "nemotron3_5_transcribe_asr_audio": _with_own_ropes(1e4, 0.5, 5000),
    "nemotron3_diarization_audio": rotary_row(1e4, 5000, keys=PART),
    **dict.fromkeys(("neucodec", "xcodec2"), rotary_row(1e4, 4096, 64)),
    **dict.fromkeys(
        ("pe_audio_encoder", "pe_audio_video_encoder", "pe_video_encoder"),
        rotary_row(2e4, 10000, 128, keys=INTERLEAVED),
    ),
    "pocket_tts": rotary_row(1e4, 8192),
    "qwen3_omni_moe_talker_code_predictor": rotary_row(1e4, 32768, 128),
    "seamless_m4t": Architecture(
        rotary=CONFORMER, encoding=_conformer, attribute_map={"num_attention_heads": "speech_encoder_attention_heads"},
        defaults={"rotary_embedding_base": 10000.0},
    ),
    "timesfm2_5": rotary_row(1e4, 16384, 80),
    "voxtral_realtime_encoder": rotary_row(1e4, 1500, 64),
    "voxtral_realtime_text": rotary_row(1e4, 131072),
    **dict.fromkeys(
        ("wav2vec2-bert", "wav2vec2-conformer"),
        Architecture(rotary=CONFORMER, encoding=_conformer, defaults={"rotary_embedding_base": 10000.0}),
    ),
    **dict.fromkeys(
        ("wav2vec2", "hubert", "wavlm", "unispeech", "unispeech-sat"), Architecture(encoding=_speech, defaults=KERNEL)
    ),
    "data2vec-audio": Architecture(
        encoding=_data2vec, defaults={**KERNEL, "conv_pos_kernel_size": 19, "num_conv_pos_embeddings": 5}
    ),
}  # fmt: skip
