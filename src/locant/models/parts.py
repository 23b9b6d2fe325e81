"""The parts of composite models: the key of the language model, and its model type in `transformers`.

A part of a published configuration may lack its ``model_type``. The class of the whole model then implies it.
"""

from __future__ import annotations

from collections.abc import Mapping

PARTS = ("text_config", "thinker_config", "language_config", "llm_config")
"""The keys under which a composite configuration has its language model."""

_COMPOSITES_BY_PART: Mapping[str, str] = {
    "aimv2_text_model": "aimv2",
    "align_text_model": "align",
    "altclip_text_model": "altclip",
    "apertus1p5_text": "apertus1p5",
    "aria_text": "aria",
    "bart": "florence2",
    "bert": "grounding-dino mm-grounding-dino vision-text-dual-encoder",
    "blip_text_model": "blip",
    "blt_local_decoder": "blt",
    "bridgetower_text_model": "bridgetower",
    "canary_decoder": "canary",
    "chinese_clip_text_model": "chinese_clip",
    "clap_text_model": "clap",
    "clip_text_model": "clip omdet-turbo sam3",
    "clipseg_text_model": "clipseg",
    "clvp_decoder": "clvp",
    "clvp_encoder": "clvp",
    "cohere2": "aya_vision cohere2_vision",
    "cohere_compass_text": "cohere_compass",
    "cosmos3_edge_text": "cosmos3_edge",
    "deepseek_ocr2_text": "deepseek_ocr2",
    "deepseek_v3": "kimi_k25",
    "dia_decoder": "dia",
    "diffusion_gemma_text": "diffusion_gemma",
    "dots3_note_text": "dots3_note",
    "embedding_gemma2_text": "embedding_gemma2",
    "emu3_text_model": "emu3",
    "ernie4_5_vl_moe_text": "ernie4_5_vl_moe",
    "exaone4": "exaone4_5",
    "flava_text_model": "flava",
    "gemma": "paligemma",
    "gemma3_text": "gemma3 shieldgemma2",
    "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4 gemma4_assistant",
    "gemma4_unified_text": "gemma4_unified gemma4_unified_assistant",
    "glm4v_moe_text": "glm4v_moe",
    "glm4v_text": "glm46v glm4v glmga",
    "glm5_next_text": "glm5_next",
    "glm_image_text": "glm_image",
    "glm_ocr_text": "glm_ocr",
    "granite": "granite_speech granite_speech_plus",
    "granite4_vision_text": "granite4_vision",
    "granite_docling_text": "granite_docling",
    "groupvit_text_model": "groupvit",
    "hunyuan_vl_text": "hunyuan_vl",
    "hy_v4_vl_text": "hy_v4_vl",
    "hyperclovax": "hyperclovax_vision_v2",
    "inkling2_loop_text": "inkling2_loop",
    "inkling2_text": "inkling2",
    "inkling_text": "inkling_mm_model",
    "kosmos_2_5_text_model": "kosmos-2.5",
    "kosmos_2_text_model": "kosmos-2",
    "lfm2": "lfm2_vl",
    "lfm3": "lfm3_vl",
    "llama": """
        deepseek_vl deepseek_vl_hybrid glmasr idefics3 janus llava llava_next llava_next_video omniasr
        perception_lm smolvlm video_llava vipllava voxtral
    """,
    "llama4_text": "llama4",
    "metaclip_2_text_model": "metaclip_2",
    "minimax_m3_vl_text": "minimax_m3_vl",
    "mistral": "idefics2 mistral3",
    "mistral_large4_text": "mistral_large4",
    "mllama_text_model": "mllama",
    "modernbert": "modernvbert pe_audio pe_audio_video pe_video",
    "molmo2_text": "molmo2",
    "muse_glimmer_text": "muse_glimmer",
    "muse_spark_text": "muse_spark",
    "nemotron_h": "nemo_speechlm nemotron_h_omni",
    "opt": "blip-2 instructblip instructblipvideo",
    "owlv2_text_model": "owlv2",
    "owlvit_text_model": "owlvit",
    "paddleocr_vl_text": "paddleocr_vl",
    "persimmon": "fuyu",
    "pix2struct_text_model": "pix2struct",
    "pp_formulanet_text": "pp_formulanet",
    "qwen2": """
        audioflamingo3 fast_vlm got_ocr2 internvl llava_onevision musicflamingo ovis2 pp_chart2table
        qwen2_audio vibevoice vibevoice_asr video_llama_3
    """,
    "qwen2_5_omni_text": "qwen2_5_omni_thinker",
    "qwen2_5_omni_thinker": "qwen2_5_omni",
    "qwen2_5_vl_text": "qwen2_5_vl",
    "qwen2_vl_text": "qwen2_vl",
    "qwen3": "fun_asr_nano lighton_ocr moss_transcribe_diarize qianfan_ocr qwen3_asr",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen3_5_text": "jev minicpm_ocr minicpmv4_6 minicpmv4_7 qwen3_5",
    "qwen3_omni_moe_text": "qwen3_omni_moe_thinker",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe",
    "qwen3_vl_moe_text": "qwen3_vl_moe",
    "qwen3_vl_text": "cosmos3_omni qwen3_vl",
    "qwen4_exp_text": "qwen4_exp",
    "sam3_lite_text_text_model": "sam3_lite_text",
    "siglip2_text_model": "siglip2",
    "siglip_text_model": "siglip",
    "step3p5": "step3p7",
    "t5gemma2_text": "t5gemma2_encoder",
    "tipsv2_text_model": "tipsv2",
    "ultrabert": "ultravbert",
    "unlimited_ocr_text": "unlimited_ocr",
    "videoprism_text_model": "videoprism",
    "voxtral_realtime_text": "voxtral_realtime",
    "xclip_text_model": "xclip",
}
"""Names of composite models by the ``model_type`` of their language model."""

TYPE_OF_PART: Mapping[str, str] = {name: part for part, names in _COMPOSITES_BY_PART.items() for name in names.split()}

PART_WITHOUT_TEXT: Mapping[str, str] = {
    **dict.fromkeys(("encoder-decoder", "speech-encoder-decoder", "vision-encoder-decoder"), "decoder"),
    **dict.fromkeys(("musicgen", "musicgen_melody", "t5gemma"), "decoder"),
    **dict.fromkeys(("blt", "canary", "dia"), "decoder_config"),
    "bark": "semantic_config",
    "rag": "generator",
    **dict.fromkeys(
        (
            "granite_speech5_ctc", "lasr_ctc", "nemotron3_5_asr", "nemotron_asr_streaming", "parakeet_ctc",
            "parakeet_rnnt", "parakeet_tdt",
        ),
        "encoder_config",
    ),
    **dict.fromkeys(("nemotron3_diarization", "omniasr_ctc"), "audio_config"),
    "nemotron3_5_transcribe_audio": "asr_config",
    "fastspeech2_conformer_with_hifigan": "model_config",
    "esmfold2": "esmc_config",
    **dict.fromkeys(("colmodernvbert", "colpali", "colqwen2", "pi0"), "vlm_config"),
    "qwen2_5_omni_token2wav": "dit_config",
    "sam3_video": "detector_config",
    **dict.fromkeys(
        ("edgetam", "nougat", "sam", "sam2", "sam3_tracker", "sam_hq", "slanext"), "vision_config"
    ),
    "depth_pro": "image_model_config",
    **dict.fromkeys(
        (
            "chmv2", "depth_anything", "mask2former", "maskformer", "oneformer", "prompt_depth_anything", "tipsv2_dpt",
            "upernet", "vitmatte", "vitpose", "zoedepth",
        ),
        "backbone_config",
    ),
}  # fmt: skip
"""The key of the part to read in a composite configuration without any of `PARTS`: a text decoder, or an encoder."""
