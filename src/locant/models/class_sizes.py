"""The default sizes of each architecture in `transformers`, for configurations that do not state any.

The text part of a published multimodal model often states nothing but its ``model_type``.
"""

from __future__ import annotations

from collections.abc import Mapping

_SIZES: Mapping[tuple[int, int], str] = {
    (288, 8): """
        moonshine
    """,
    (320, 8): """
        moonshine_streaming moonshine_streaming_encoder
    """,
    (384, 6): """
        dinov3_vit
    """,
    (512, 8): """
        lasr_encoder mimi nemotron3_diarization_audio pocket_tts_audio_tokenizer
    """,
    (768, 6): """
        nanochat
    """,
    (768, 12): """
        blt_patcher clvp_encoder esm eurobert gte modernbert modernbert-decoder nomic_bert
        video_llama_3_vision wav2vec2-conformer
    """,
    (768, 16): """
        llama4_vision_model
    """,
    (1024, 8): """
        csm_depth_decoder_model doge
    """,
    (1024, 16): """
        blt_local_decoder blt_local_encoder eomt_dinov3 glm5_next_vision glm_ocr_text glm_ocr_vision
        granite_docling_text inkling2_vision jina_embeddings_v3 lfm3_vl_vision pixtral pocket_tts
        qwen3_omni_moe_talker_text sam3_vit_model sapiens2 seamless_m4t vjepa2 wav2vec2-bert
    """,
    (1152, 16): """
        cohere_compass_vision kimi_k25_vision paddleocr_vl_vision qwen3_5_moe_vision qwen3_5_vision
        qwen3_omni_moe_vision_encoder qwen3_vl_moe_vision qwen3_vl_vision qwen4_exp_vision
    """,
    (1280, 10): """
        nemotron3_5_transcribe_asr_audio unlimited_ocr_text
    """,
    (1280, 16): """
        ernie4_5_vl_moe_vision minimax_m3_vl_vision
    """,
    (1280, 20): """
        dots3_note_audio_encoder glmasr_encoder
    """,
    (1536, 12): """
        glm4v_moe_vision glm4v_vision
    """,
    (1536, 16): """
        muse_glimmer_vision muse_spark_vision step3p5_vision
    """,
    (1536, 24): """
        dots3_note_vision_encoder
    """,
    (1664, 16): """
        mlcd_vision_model
    """,
    (2048, 16): """
        blt_global_transformer dbrx olmoe qwen2_moe qwen3_vl_moe_text smollm3
    """,
    (2048, 28): """
        qwen3_omni_moe_text
    """,
    (2048, 32): """
        csm diffllama kyutai_speech_to_text lfm2_moe phi qwen3_moe
    """,
    (2560, 10): """
        recurrent_gemma
    """,
    (2560, 20): """
        bitnet ernie4_5_moe ernie4_5_vl_moe_text granite_swa
    """,
    (2560, 32): """
        arcee gpt_neox_japanese lfm2 stablelm
    """,
    (2560, 40): """
        esmc
    """,
    (3072, 24): """
        starcoder2
    """,
    (3072, 32): """
        phi3 phi4_multimodal
    """,
    (3328, 26): """
        jais2
    """,
    (3584, 16): """
        exaone4_5_vision qwen2_5_omni_vision_encoder qwen2_5_vl_vision
    """,
    (3584, 28): """
        qwen2_5_omni_text
    """,
    (3840, 30): """
        olmo_hybrid
    """,
    (4096, 16): """
        codegen gptj
    """,
    (4096, 32): """
        apertus apertus1p5_text aria_text bamba chameleon deepseek_ocr2_encoder deepseek_ocr2_text emu3_text_model
        evolla exaone4 exaone_moe falcon_h1 flex_olmo glm4v_text glm_image_text granite granite4_vision_text
        granitemoe granitemoe_swa granitemoehybrid granitemoeshared hunyuan_v1_dense hunyuan_v1_moe
        hunyuan_vl_text hyperclovax idefics llama minimax ministral mistral mixtral mllama_text_model moshi
        olmo olmo2 olmo3 phimoe qwen2 ultrabert voxtral_realtime_text
    """,
    (4096, 64): """
        persimmon
    """,
    (4096, 96): """
        glm4_moe glm4v_moe_text
    """,
    (4544, 71): """
        falcon
    """,
    (4608, 32): """
        dots1
    """,
    (6144, 48): """
        nemotron
    """,
    (6144, 64): """
        gpt_neox
    """,
    (8192, 64): """
        cohere cohere2 qwen2_5_vl_text qwen2_vl_text
    """,
}
"""Model types by default width and number of heads."""

CLASS_SIZES: Mapping[str, Mapping[str, int]] = {
    name: {"hidden_size": width, "num_attention_heads": heads}
    for (width, heads), names in _SIZES.items()
    for name in names.split()
}
