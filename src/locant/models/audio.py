"""Speech and sound: encoders that rotate as Llama or GPT-J does, with keys of their own."""

from __future__ import annotations

from collections.abc import Mapping

from locant.arguments import shown
from locant.errors import InputError
from locant.models.architecture import Architecture, RotaryKeys, standard
from locant.models.config_values import Config
from locant.models.like_llama import part_of_head, whole_head
from locant.positions.base import PositionEncoding

__all__ = ["ARCHITECTURES"]


def _conformer(config: Config, layer_type: str | None) -> PositionEncoding | None:
    """Rotary positions, if ``position_embeddings_type`` says so; by default they are other ones."""
    kind = config.get("position_embeddings_type")
    if kind != "rotary":
        got = f"got position_embeddings_type={shown(kind)} for {config['model_type']}, expected 'rotary'"
        raise InputError(got, "Rotary.from_config(config) for the rotary positions of such a model")
    return None


CONFORMER = RotaryKeys(base_key="rotary_embedding_base")

ARCHITECTURES: Mapping[str, Architecture] = {
    "dia_decoder": whole_head(1e4, 3072, 128),
    "dia_encoder": whole_head(1e4, 1024, 128),
    "dots3_note_audio_encoder": part_of_head(1e4, 6000, 0.5),
    "glmasr_encoder": part_of_head(1e4, 1500, 0.5),
    "gradium_phonon_tts": whole_head(1e4, 8192, 64),
    "higgs_audio_v2": Architecture(
        rotary=RotaryKeys(scaling_required=True, head_dim_required=True),
        defaults={
            "head_dim": 128,
            "max_position_embeddings": 2048,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 32.0,
                "low_freq_factor": 0.125,
                "high_freq_factor": 0.5,
                "original_max_position_embeddings": 1024,
            },
        },
    ),
    "kyutai_speech_to_text": whole_head(1e4, 750),
    "lasr_encoder": whole_head(1e4, 10000),
    "mimi": whole_head(1e4, 8000),
    "moonshine": Architecture(
        rotary=RotaryKeys(layout="interleaved", share_keys=("partial_rotary_factor",), share_required=True),
        attribute_map={"num_attention_heads": "encoder_num_attention_heads"},
        defaults=standard(1e4, 512, partial_rotary_factor=0.9),
    ),
    **dict.fromkeys(
        ("moonshine_streaming", "moonshine_streaming_encoder"), part_of_head(1e4, 4096, 0.8, interleaved=True)
    ),
    "moshi": whole_head(1e4, 3000),
    "nemotron3_5_transcribe_asr_audio": part_of_head(1e4, 5000, 0.5),
    "nemotron3_diarization_audio": part_of_head(1e4, 5000, None),
    "neucodec": whole_head(1e4, 4096, 64),
    **dict.fromkeys(
        ("pe_audio_encoder", "pe_audio_video_encoder", "pe_video_encoder"),
        whole_head(2e4, 10000, 128, interleaved=True),
    ),
    "pocket_tts": whole_head(1e4, 8192),
    "pocket_tts_audio_tokenizer": whole_head(1e4, 8000),
    "qwen3_omni_moe_talker_code_predictor": whole_head(1e4, 32768, 128),
    "Qwen3OmniMoeCode2WavConfig": whole_head(1e4, 8000),
    "seamless_m4t": Architecture(
        rotary=CONFORMER,
        encoding=_conformer,
        attribute_map={"num_attention_heads": "speech_encoder_attention_heads"},
        defaults={"rotary_embedding_base": 10000.0},
    ),
    "timesfm2_5": whole_head(1e4, 16384, 80),
    "voxtral_realtime_encoder": whole_head(1e4, 1500, 64),
    "voxtral_realtime_text": whole_head(1e4, 131072),
    "xcodec2": whole_head(1e4, 4096, 64),
    **dict.fromkeys(
        ("wav2vec2-bert", "wav2vec2-conformer"),
        Architecture(rotary=CONFORMER, encoding=_conformer, defaults={"rotary_embedding_base": 10000.0}),
    ),
}
