"""Tables and sines that the rows of `locant.models` describe are what the code of `transformers` adds to the input."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding

from locant import Learned, Positions, Sinusoidal
from locant.models import encoding_from_config, learned_tables, sinusoids
from locant.positions.base import PositionEncoding
from tests.models.tiny_models import TOKENS, added, build
from tests.tolerances import assert_close

IDS = torch.arange(5, 5 + TOKENS)[None]
POSITIONS = Positions.arange(TOKENS)
SOUND = torch.zeros(1, 16, 24)


@dataclass(frozen=True, kw_only=True)
class Case:
    """How the position module of a model is heard: its path, the class to build, and how that is called."""

    path: str = "position_embeddings"
    cls: str | None = None
    layer_type: str | None = None
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    call: dict[str, Any] = field(default_factory=lambda: {"input_ids": IDS})


TEXT = Case()
CLIP = Case(path="position_embedding")
EMBED = Case(path="embed_positions")
BOTH = {"input_ids": IDS, "decoder_input_ids": IDS}
ENCODER = Case(path="encoder.embed_positions", call=BOTH)
DECODER = replace(ENCODER, path="decoder.embed_positions")
BOXES = {"input_ids": IDS, "bbox": torch.zeros(1, TOKENS, 4, dtype=torch.long)}
TEXT_1 = {"layer_type": "text", "pad_token_id": 1}
SHAPES = {"coordinate_size": 4, "shape_size": 4}
CODES = Case(path="embed_positions", cls="MusicgenDecoder", call={"input_ids": IDS.expand(4, -1)})

CASES: dict[str, Case] = {
    **dict.fromkeys(
        (
            "align_text_model", "altclip_text_model", "big_bird", "bridgetower_text_model",
            "chinese_clip_text_model", "clap_text_model", "convbert", "data2vec-text", "ernie", "flava_text_model",
            "flaubert", "fnet", "git", "ibert", "instructblip_qformer", "layoutlm", "markuplm",
            "megatron-bert", "mobilebert", "mra", "nystromformer", "rembert", "roberta-prelayernorm", "roc_bert",
            "splinter", "squeezebert", "tapas", "visual_bert", "xlm", "xlm-roberta-xl", "yoso",
        ),
        TEXT,
    ),
    **dict.fromkeys(
        (
            "aimv2_text_model", "clip_text_model", "clipseg_text_model", "groupvit_text_model",
            "metaclip_2_text_model", "owlv2_text_model", "owlvit_text_model", "siglip2_text_model",
            "siglip_text_model", "tipsv2_text_model", "xclip_text_model",
        ),
        CLIP,
    ),
    **dict.fromkeys(
        (
            "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "fsmt", "m2m_100", "marian", "mbart", "mvp",
            "nllb-moe", "pegasus", "pegasus_x", "plbart",
        ),
        DECODER,
    ),
    **dict.fromkeys(("biogpt", "kosmos_2_5_text_model", "kosmos_2_text_model", "xglm"), EMBED),
    "bert-generation": Case(cls="BertGenerationEncoder"),
    "blip_text_model": Case(cls="BlipTextModel"),
    "bros": Case(cls="BrosTextEmbeddings"),
    "canine": Case(path="char_position_embeddings", cls="CanineEmbeddings"),
    "blip_2_qformer": Case(
        cls="Blip2TextEmbeddings", options={"use_qformer_text_input": True}, call={"input_ids": IDS}
    ),
    "clvp_decoder": Case(path="position_embeds_layer"),
    "cohere_asr": Case(
        path="pos_emb", cls="CohereAsrDecoder",
        call={"input_ids": IDS, "encoder_hidden_states": torch.zeros(1, 3, 1280)},
    ),
    "decision_transformer": Case(
        path="embed_timestep", cls="DecisionTransformerModel", options={"max_ep_len": 48},
        call={
            "states": torch.zeros(1, TOKENS, 17), "actions": torch.zeros(1, TOKENS, 4), "rewards": None,
            "returns_to_go": torch.zeros(1, TOKENS, 1), "timesteps": torch.arange(TOKENS)[None],
            "attention_mask": torch.ones(1, TOKENS, dtype=torch.long),
        },
    ),
    "dpr": Case(cls="DPRQuestionEncoder"),
    "imagegpt": Case(path="wpe"),
    "instructblipvideo_qformer": TEXT,
    "layoutlmv3": Case(cls="LayoutLMv3TextEmbeddings", layer_type="input", options=SHAPES, call=BOXES),
    "led": replace(ENCODER, layer_type="encoder", options={"attention_window": [4]}),
    "lilt": Case(cls="LiltTextEmbeddings", options={"pad_token_id": 1}),
    "longformer": Case(options={"attention_window": [4]}),
    "luke": Case(options={"entity_vocab_size": 8}),
    "lxmert": Case(
        call={"input_ids": IDS, "visual_feats": torch.zeros(1, 2, 2048), "visual_pos": torch.zeros(1, 2, 4)}
    ),
    "mpnet": replace(TEXT, layer_type="input"),
    "musicgen_decoder": CODES,
    "musicgen_melody_decoder": replace(CODES, cls="MusicgenMelodyDecoder"),
    "openai-gpt": Case(path="positions_embed"),
    "perceiver": Case(cls="PerceiverTextPreprocessor", call={"inputs": IDS}),
    "pp_formulanet_text": Case(path="embed_positions", cls="PPFormulaNetTextModel"),
    "prophetnet": replace(TEXT, path="encoder.position_embeddings", call=BOTH),
    "reformer": Case(
        path="position_embeddings.embedding",
        cls="ReformerModel",
        options={
            "axial_pos_embds": False, "attn_layers": ["local"], "local_attn_chunk_length": 4,
            "max_position_embeddings": 48, "is_decoder": False,
        },
    ),
    "speech_to_text": Case(path="embed_positions", cls="Speech2TextDecoder"),
    "trocr": Case(path="embed_positions", cls="TrOCRDecoder"),
    "vilt": Case(cls="TextEmbeddings"),
    "whisper": Case(path="embed_positions", cls="WhisperDecoder", layer_type="decoder", call={"input_ids": IDS}),
    "xmod": Case(options={"default_language": "en_XX"}),
}  # fmt: skip


MODULES: dict[str, tuple[str, str, Callable[[Any], Tensor], dict[str, Any]]] = {
    **{
        name: (name, f"{prefix}SinusoidalPositionalEmbedding", lambda cls: cls(16, 24).create_weight(), {})
        for name, prefix in (
            ("autoformer", "Autoformer"), ("informer", "Informer"), ("time_series_transformer", "TimeSeries")
        )
    },
    "canary_decoder": ("canary", "CanaryPositionalEmbedding", lambda cls: cls(16, 24)(POSITIONS.index), {}),
    "ctrl": ("ctrl", "positional_encoding", lambda function: function(16, 24, torch.float), {}),
    "fun_asr_nano_encoder": (
        "fun_asr_nano", "FunAsrNanoPositionEmbedding", lambda cls: cls(16, 24)(SOUND), {"input_size": 24}
    ),
    **{
        name: (folder, "SinusoidsPositionEmbedding", lambda cls: cls(16, 24)(TOKENS), {})
        for name, folder in (
            ("qwen2_5_omni_audio_encoder", "qwen2_5_omni"), ("qwen3_asr_encoder", "qwen3_asr"),
            ("qwen3_omni_moe_audio_encoder", "qwen3_omni_moe"),
        )
    },
    "seamless_m4t": (
        "seamless_m4t", "SeamlessM4TSinusoidalPositionalEmbedding", lambda cls: cls(16, 24, 1)(IDS), TEXT_1
    ),
    "seamless_m4t_v2": (
        "seamless_m4t_v2", "SeamlessM4Tv2SinusoidalPositionalEmbedding", lambda cls: cls(16, 24, 1)(IDS), TEXT_1
    ),
    "timesfm": (
        "timesfm", "TimesFmPositionalEmbedding",
        lambda cls: cls(AutoConfig.for_model("timesfm", hidden_size=24))(TOKENS),
        {"use_positional_embedding": True},
    ),
    "trocr": (
        "trocr", "TrOCRSinusoidalPositionalEmbedding", lambda cls: cls(16, 24, 1)(IDS),
        {"use_learned_position_embeddings": False, "pad_token_id": 1},
    ),
    "videoprism_text_model": ("videoprism", "create_sinusoidal_positions", lambda function: function(16, 24), {}),
    "whisper": ("whisper", "sinusoids", lambda function: function(16, 24), {"layer_type": "encoder"}),
    **{
        name: (
            name, "create_sinusoidal_embeddings", lambda function: function(16, 24, torch.zeros(16, 24)),
            {"sinusoidal_embeddings": True},
        )
        for name in ("flaubert", "xlm")
    },
}  # fmt: skip
"""The folder, the name of what makes the vectors, how it is called, and what the configuration holds beside widths."""

OF_NO_MODEL = {"coarse_acoustics", "fine_acoustics", "semantic", "speech_to_text_2"}
"""Parts of Bark, and a decoder that `transformers` had up to version 4."""


FAST = {"bart", "ctrl", "fsmt", "fun_asr_nano_encoder", "markuplm", "mpnet", "musicgen_decoder", "whisper", "yoso"}
"""The kinds; the others are among the slow tests."""


def _some(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in sorted(names)]


def vectors(encoding: PositionEncoding, width: int) -> Tensor:
    """Return what an encoding adds to tokens that are zero."""
    return encoding.embed(torch.zeros(1, TOKENS, width), POSITIONS)[0]


@pytest.mark.parametrize("model_type", _some(CASES))
def test_a_row_adds_what_the_module_of_transformers_gives(model_type: str) -> None:
    case = CASES[model_type]
    model, config = build(model_type, case.cls, **case.options)
    theirs = added(model, case.path, **case.call)
    encoding = encoding_from_config(config, layer_type=case.layer_type)
    if isinstance(encoding, Learned):
        encoding.load_state_dict({"weight": table_of(model, case.path)})
        assert torch.equal(vectors(encoding, theirs.shape[1]), theirs)
    else:
        assert isinstance(encoding, Sinusoidal)
        assert_close(vectors(encoding, theirs.shape[1]), theirs)


@pytest.mark.parametrize("model_type", _some(MODULES))
def test_sines_are_those_of_the_function_or_module_of_transformers(model_type: str) -> None:
    folder, name, call, options = MODULES[model_type]
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    theirs = call(getattr(module, name)).reshape(-1, 24)[:TOKENS]
    sizes = {"model_type": model_type, "hidden_size": 24, "d_model": 24}
    others = {key: value for key, value in options.items() if key != "layer_type"}
    encoding = encoding_from_config({**sizes, **others}, layer_type=options.get("layer_type"))
    assert_close(vectors(encoding, 24), theirs)


SOUNDS = {
    "audioflamingo3_encoder": "AudioFlamingo3Encoder", "qwen2_audio_encoder": "Qwen2AudioEncoder",
    "moss_transcribe_diarize_audio": "MossTranscribeDiarizeAudioModel", "voxtral_encoder": "VoxtralEncoder",
}  # fmt: skip


@pytest.mark.parametrize("model_type", SOUNDS)
def test_a_table_of_sound_has_the_rows_that_are_added_as_they_are(model_type: str) -> None:
    model, config = build(model_type, SOUNDS[model_type])
    encoding = encoding_from_config(config)
    encoding.load_state_dict({"weight": table_of(model, "embed_positions")})


def test_the_two_tables_of_reformer_make_the_rows_of_one() -> None:
    model, config = build(
        "reformer", "ReformerModel", axial_pos_shape=(4, 6), axial_pos_embds_dim=(8, 16), attn_layers=["local"],
        local_attn_chunk_length=4, is_decoder=False,
    )  # fmt: skip
    table = model.get_submodule("embeddings.position_embeddings")
    for weight in table.parameters():
        torch.nn.init.normal_(weight)
    rows, columns = (weight.flatten(0, -2) for weight in table.parameters())
    encoding = encoding_from_config(config)
    both = torch.cat([rows.repeat_interleave(6, 0), columns.repeat(4, 1)], dim=1)
    encoding.load_state_dict({"weight": both})
    assert torch.equal(vectors(encoding, 24), table(POSITIONS.index)[0])


def test_a_table_of_text_is_stretched_over_it_where_its_model_does() -> None:
    from transformers.models.sam3_lite_text.modeling_sam3_lite_text import Sam3LiteTextTextPositionEmbedding

    table = Sam3LiteTextTextPositionEmbedding(48, 24)
    torch.nn.init.normal_(table.position_embedding)
    sizes = {"hidden_size": 24, "max_position_embeddings": 48}
    encoding = encoding_from_config({"model_type": "sam3_lite_text_text_model", **sizes})
    encoding.load_state_dict({"weight": table.position_embedding[0, 0]})
    stretched = encoding.embed(torch.zeros(1, TOKENS, 24), Positions.grid(1, TOKENS))
    assert_close(stretched, table(TOKENS))


def test_every_row_is_compared() -> None:
    rows = learned_tables.ARCHITECTURES.keys() | sinusoids.ARCHITECTURES.keys()
    compared = CASES.keys() | MODULES.keys() | SOUNDS.keys() | {"roformer", "sam3_lite_text_text_model"}
    assert rows - compared == OF_NO_MODEL


@pytest.mark.parametrize("token", [0, 1, 5])
def test_positions_of_fairseq_begin_after_the_row_of_the_padding_token(token: int) -> None:
    theirs = M2M100SinusoidalPositionalEmbedding(48, 24, token)(IDS + 5)[0]
    sizes = {"d_model": 24, "max_position_embeddings": 48, "pad_token_id": token}
    assert_close(vectors(encoding_from_config({"model_type": "m2m_100", **sizes}), 24), theirs)


def table_of(model: nn.Module, path: str) -> Tensor:
    return next(one for name, one in model.named_parameters() if f".{name}".endswith(f".{path}.weight"))
