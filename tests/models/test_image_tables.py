"""Grids that the rows of `locant.models.image_tables` describe are what the code of `transformers` adds to patches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.clap.modeling_clap import ClapAudioSelfAttention
from transformers.models.videomae.modeling_videomae import get_sinusoid_encoding_table

from locant import InputError, LearnedGrid, Positions
from locant.models import encoding_from_config, image_tables, layer_types
from locant.positions.encodings.grid_bias import DecomposedBias
from tests.models.tiny_models import build, classes_of
from tests.refusal import refuses
from tests.tolerances import assert_close

IMAGE = torch.zeros(1, 3, 8, 8)
VIDEO = torch.zeros(1, 2, 3, 8, 8)
SIZES: dict[str, Any] = {"image_size": 8, "patch_size": 4}


@dataclass(frozen=True, kw_only=True)
class Case:
    """The class that adds positions to patches, by default of images of 8 x 8 in patches of 4 x 4, and its call."""

    cls: str
    options: dict[str, Any] = field(default_factory=lambda: SIZES)
    call: dict[str, Any] = field(default_factory=lambda: {"pixel_values": IMAGE})


CASES: dict[str, Case] = {
    **{
        name: Case(cls=cls)
        for name, cls in {
            "aimv2_vision_model": "Aimv2VisionEmbeddings", "altclip_vision_model": "AltCLIPVisionEmbeddings",
            "blip_2_vision_model": "Blip2VisionEmbeddings", "blip_vision_model": "BlipVisionEmbeddings",
            "bridgetower_vision_model": "BridgeTowerVisionEmbeddings", "dpt": "DPTViTEmbeddings",
            "chinese_clip_vision_model": "ChineseCLIPVisionEmbeddings", "eomt": "EomtEmbeddings",
            "clipseg_vision_model": "CLIPSegVisionEmbeddings", "flava_image_model": "FlavaImageEmbeddings",
            "git_vision_model": "GitVisionEmbeddings", "groupvit_vision_model": "GroupViTVisionEmbeddings",
            "ijepa": "IJepaEmbeddings", "instructblip_vision_model": "InstructBlipVisionEmbeddings",
            "instructblipvideo_vision_model": "InstructBlipVideoVisionEmbeddings",
            "internvl_vision": "InternVLVisionEmbeddings", "janus_vision_model": "JanusVisionEmbeddings",
            "kosmos_2_vision_model": "Kosmos2VisionEmbeddings", "metaclip_2_vision_model": "MetaClip2VisionEmbeddings",
            "ovis2_vision": "Ovis2VisionEmbeddings", "owlv2_vision_model": "Owlv2VisionEmbeddings",
            "owlvit_vision_model": "OwlViTVisionEmbeddings", "pixio": "PixioEmbeddings",
            "qianfan_ocr_vision": "QianfanOCRVisionEmbeddings", "tipsv2_vision_model": "Tipsv2VisionEmbeddings",
            "videomt": "VideomtEmbeddings", "vit_msn": "ViTMSNEmbeddings",
            "xclip_vision_model": "XCLIPVisionEmbeddings",
        }.items()
    },
    "mgp-str": Case(cls="MgpstrEmbeddings", options={"image_size": (8, 8), "patch_size": 4}),
    "timesformer": Case(
        cls="TimesformerEmbeddings", options={**SIZES, "num_frames": 1}, call={"pixel_values": VIDEO[:, :1]}
    ),
    "vit_mae": Case(
        cls="ViTMAEEmbeddings", options={**SIZES, "mask_ratio": 0.0},
        call={"pixel_values": IMAGE, "noise": torch.arange(4.0)[None]},
    ),
    "vitpose_backbone": Case(
        cls="VitPoseBackboneEmbeddings", options={"image_size": (32, 32), "patch_size": (16, 16)},
        call={"pixel_values": torch.zeros(1, 3, 32, 32)},
    ),
    "vivit": Case(
        cls="VivitEmbeddings", options={"image_size": 8, "num_frames": 2, "tubelet_size": (1, 4, 4)},
        call={"pixel_values": VIDEO},
    ),
    "yolos": Case(cls="YolosEmbeddings", options={"image_size": (8, 8), "patch_size": 4, "num_detection_tokens": 5}),
}  # fmt: skip
FAST = {"blip_vision_model", "eomt", "ijepa", "pixio", "vitpose_backbone", "yolos"}


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in sorted(CASES)]
)
def test_a_grid_adds_what_the_embeddings_of_transformers_add(model_type: str) -> None:
    """Of patches, class tokens and biases nothing is left where all weights but those of positions are zero."""
    case = CASES[model_type]
    model, config = build(model_type, case.cls, **case.options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            nn.init.normal_(parameter) if "pos" in name else parameter.zero_()
        output = model(**case.call)
    parts = output.values() if hasattr(output, "values") and not isinstance(output, Tensor) else output
    theirs = output if isinstance(output, Tensor) else next(iter(parts))
    table = next(parameter for name, parameter in model.named_parameters() if "pos" in name)
    rows = table.reshape(-1, table.shape[-1])
    encoding = encoding_from_config(config)
    encoding.load_state_dict({"weight": rows[1:] + rows[:1] if model_type == "vitpose_backbone" else rows})
    tokens = theirs.shape[1]
    is_grid = isinstance(encoding, LearnedGrid)
    positions = Positions.grid(2, 2, prefix=tokens - 4) if is_grid else Positions.arange(tokens)
    assert_close(encoding.embed(torch.zeros(1, tokens, 24), positions), theirs)


def test_a_spectrogram_has_bands_and_frames_after_two_tokens() -> None:
    options = {"num_mel_bins": 16, "max_length": 24, "patch_size": 8, "frequency_stride": 4, "time_stride": 8}
    model, config = build("audio-spectrogram-transformer", "ASTEmbeddings", **options)
    encoding = encoding_from_config(config)
    assert isinstance(encoding, LearnedGrid)
    encoding.load_state_dict({"weight": model.get_parameter("position_embeddings")[0]})
    assert (encoding.height, encoding.width, encoding.prefix) == (3, 3, 2)


@pytest.mark.parametrize("tokens", [3, 17])
def test_videomae_has_the_sines_of_its_own_code(tokens: int) -> None:
    encoding = encoding_from_config({"model_type": "videomae", "hidden_size": 24})
    assert_close(encoding.embed(torch.zeros(1, tokens, 24)), get_sinusoid_encoding_table(tokens, 24))


NEAREST = {
    "granite_docling_vision": "GraniteDoclingVisionEmbeddings", "idefics2_vision": "Idefics2VisionEmbeddings",
    "idefics3_vision": "Idefics3VisionEmbeddings", "minicpmv4_6_vision": "MiniCPMV4_6VisionEmbeddings",
    "phi4_multimodal_vision": "Phi4MultimodalVisionEmbeddings", "smolvlm_vision": "SmolVLMVisionEmbeddings",
}  # fmt: skip


@pytest.mark.parametrize("model_type", NEAREST)
def test_a_table_of_nearest_rows_fits_as_it_is(model_type: str) -> None:
    model, config = build(model_type, NEAREST[model_type], **SIZES)
    encoding = encoding_from_config(config)
    assert isinstance(encoding, LearnedGrid)
    encoding.load_state_dict({"weight": model.get_parameter("position_embedding.weight")})


SAMS = {
    "got_ocr2_vision": "GotOcr2VisionAttention", "pp_formulanet_vision": "PPFormulaNetVisionAttention",
    "slanext_vision": "SLANeXtVisionAttention", "deepseek_ocr2_sam_vision_model": "DeepseekOcr2SamVisionAttention",
    "unlimited_ocr_sam_vision_model": "UnlimitedOcrSamVisionAttention",
}  # fmt: skip


@pytest.mark.parametrize("model_type", SAMS)
@pytest.mark.parametrize("kind", ["global", "window"])
def test_descendants_of_sam_have_its_two_tables_of_rows_and_columns(model_type: str, kind: str) -> None:
    config = AutoConfig.for_model(
        model_type, hidden_size=24, num_attention_heads=2, image_size=12, patch_size=4, window_size=2
    )
    theirs: Any = classes_of(config)[SAMS[model_type]](config, 2 if kind == "window" else 0)
    side = 2 if kind == "window" else 3
    for table in (theirs.rel_pos_h, theirs.rel_pos_w):
        nn.init.normal_(table)
    encoding = encoding_from_config(config, layer_type=kind)
    assert isinstance(encoding, DecomposedBias)
    encoding.load_state_dict({"rows": theirs.rel_pos_h, "columns": theirs.rel_pos_w})
    q = torch.randn(1, 2, side * side, 12)
    wanted = theirs.get_decomposed_rel_pos(q[0], theirs.rel_pos_h, theirs.rel_pos_w, (side, side), (side, side))
    bias = encoding.bias(q, q, Positions.grid(side, side))
    assert bias is not None
    assert_close(bias[0], wanted.reshape(2, side * side, side * side))


def test_clap_has_the_windows_of_swin_with_heads_by_stage() -> None:
    config = AutoConfig.for_model("clap_audio_model")
    assert layer_types(config) == ("stage1", "stage2", "stage3", "stage4")
    for stage, heads in enumerate(config.num_attention_heads):
        theirs = ClapAudioSelfAttention(config, 8 * heads, heads, config.window_size)
        encoding = encoding_from_config(config, layer_type=f"stage{stage + 1}")
        encoding.load_state_dict({"weight": theirs.relative_position_bias_table})


def test_every_row_is_compared() -> None:
    by_name = {"audio-spectrogram-transformer", "clap_audio_model", "videomae"}
    same_code = {"minicpm_ocr_vision", "minicpmv4_7_vision", "pp_chart2table_vision"}  # as MiniCPM-V 4.6 and GOT-OCR 2
    shapes_alone = {"cosmos3_edge_vision", "glm_image_vision", "unlimited_ocr_vision_encoder"}
    compared = CASES.keys() | NEAREST.keys() | SAMS.keys() | by_name
    rows = image_tables.ARCHITECTURES.items()
    refused = {name for name, row in rows if row.encoding and "_unsupported" in row.encoding.__qualname__}
    assert image_tables.ARCHITECTURES.keys() == compared | same_code | shapes_alone | refused


def test_a_scheme_without_an_encoding_is_named() -> None:
    with refuses(InputError, "levit", "pair of offsets"):
        encoding_from_config({"model_type": "levit"})
    with refuses(InputError, "sew", "squeeze_factor"):
        encoding_from_config({"model_type": "sew"})
