"""Every rotary module of `diffusers`, from the default configuration of its transformer, beside the row of it here."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from locant import InputError, Positions
from locant.engines.diffusers import encoding_from_diffusers, positions_from_diffusers
from locant.engines.diffusers_rows import TRANSFORMERS
from locant.scaling import NTK, Linear, RIFLEx
from tests.engines.record import record
from tests.refusal import refuses
from tests.tolerances import DIFFERENT, FEW_ROUNDINGS, OF_FLOAT32_ANGLES, PEER

pytest.importorskip("diffusers", reason="diffusers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # those of other packages

from tests.engines.diffusers_modules import (  # noqa: E402
    CASES,
    DIFFERS,
    GRID,
    OPTIONS,
    TEXT,
    arguments_of,
    built,
    class_of,
    defaults,
    files,
    found,
    nested,
    outcome,
    root,
    table,
)

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "diffusers.md"

# ---------------------------------------------------------------------- all of them

BESIDE = {
    "transformer_bria:BriaPosEmbed", "controlnet_z_image:RopeEmbedder", "transformer_ernie_image:ErnieImageEmbedND3",
    "transformer_mochi:MochiRoPE", "transformer_ltx:LTXVideoRotaryPosEmbed",
    "transformer_ltx2:LTX2AudioVideoRotaryPosEmbed", "transformer_sana_wm_refiner:SanaWMLTX2AudioVideoRotaryPosEmbed",
    "connectors:LTX2RotaryPosEmbed1d", "transformer_qwenimage:QwenEmbedLayer3DRope",
    "transformer_kandinsky:Kandinsky5RoPE1D", "transformer_kandinsky6:Kandinsky6RoPE1D",
    "autoencoder_same:RotaryEmbedding", "autoencoder_kl_minimax_h3:MiniMaxH3VideoRotaryPosEmbed",
    "ltx2_diffusion_decoder:LTX2VideoVaeRotaryPosEmbed3D", "condition_embedder_anima:AnimaRotaryEmbedding",
    "text_encoder:RotaryEmbedding",
}  # fmt: skip
"""Modules without a row, which have a test below."""

PARTS = {
    "embeddings:get_1d_rotary_pos_embed", "embeddings:get_2d_rotary_pos_embed_from_grid", "embeddings:FluxPosEmbed",
    "transformer_bria:get_1d_rotary_pos_embed", "transformer_ernie_image:rope", "transformer_hidream_image:rope",
    "ace_step_transformer:AceStepTransformer1DModel.forward", "modeling_ace_step:AceStepLyricEncoder.forward",
    "modeling_ace_step:AceStepTimbreEncoder.forward",
}  # fmt: skip
"""Parts of these modules, or callers of them."""

NO_ROTATION = re.compile(
    r"Time|Fourier|GLIGEN|sincos|Sin\w*Pos|camera|compute_fx|DurationEmbedder|StableAudioPositional|LearnablePositional|"
    r"PatchEmbed|ImagePositional|TextImage|EmbedSequential|ConvPos|AddedPos|CogVideoXPatch"
)
"""Other uses of cosines and of positions: the time of the diffusion, tables that are added, cameras."""


@pytest.mark.slow
def test_no_rotary_module_is_forgotten() -> None:
    home = {name: files()[name].rpartition(".")[2] for name in CASES}
    known = {f"{home[name]}:{rotary}" for name, (rotary, _) in CASES.items()}
    known |= {f"embeddings:{rotary}" for rotary, _ in CASES.values()}
    known |= {f"{home[name]}:{name}.{rotary}" for name, (rotary, _) in CASES.items()}
    missing = {name for name in found() - known - BESIDE - PARTS if not NO_ROTATION.search(name)}
    assert not missing
    assert found() >= BESIDE
    assert len(found() & (known | BESIDE)) == 69


def test_every_row_is_compared() -> None:
    assert set(CASES) == {name for name, row in TRANSFORMERS.items() if not row.refused}


def transformers() -> Iterator[str]:
    """Those that have a configuration."""
    for name in files():
        if name.endswith(("Model", "Transformer", "Decoder")) and hasattr(class_of(name), "config_name"):
            yield name


@pytest.mark.slow
def test_every_other_transformer_has_no_rotary_positions() -> None:
    others = {name for name in transformers() if name not in TRANSFORMERS}
    assert others == {
        "AuraFlowTransformer2DModel", "CogView3PlusTransformer2DModel", "DiTTransformer2DModel",
        "DreamLiteTransformer2DModel", "LatteTransformer3DModel", "MiniMaxMusic3RVQDepthDecoder",
        "PixArtTransformer2DModel", "PriorTransformer", "RFD4ProteinaTransformer", "SD3Transformer2DModel",
        "SanaTransformer2DModel", "T5FilmDecoder", "Transformer2DModel", "TransformerTemporalModel",
    }  # fmt: skip
    for name in others:
        with refuses(InputError, "_class_name"):
            encoding_from_diffusers({"_class_name": name})


@pytest.mark.parametrize("name", CASES)
def test_a_transformer_is_rotated_as_diffusers_does(name: str) -> None:
    assert outcome(name).verdict != "differs" or name in ("Kandinsky5Transformer3DModel", "BriaFibo2Transformer2DModel")


def test_documented_differences_are_real() -> None:
    """Queries of bfloat16, and angles of up to 513 radians of float32, whose last bits are 3e-5 of one."""
    assert 2.0**-9 <= outcome("Kandinsky5Transformer3DModel").exact <= 2.0**-8
    assert outcome("BriaFibo2Transformer2DModel").exact <= OF_FLOAT32_ANGLES[520]


def test_a_wrong_row_would_be_noticed() -> None:
    for name, other in (("WanTransformer3DModel", "CosmosTransformer3DModel"), ("FluxTransformer2DModel", "Krea2")):
        config, where = defaults(name), positions_from_diffusers(defaults(name), *GRID)
        turn = CASES[name][1](name, CASES[name][0], config, where.index[0])
        wrong = {**config, "_class_name": next(key for key in TRANSFORMERS if key.startswith(other))}
        wrong |= {"axes_dims_rope": [16, 56, 56], "rope_theta": 1e3} if other == "Krea2" else {}
        q = torch.randn(1, 2, where.seq_len, 128)
        assert (encoding_from_diffusers(wrong).rotate_one(q, where) - turn(q)).abs().max() > DIFFERENT


def test_the_guide_has_the_table() -> None:
    assert table() in GUIDE.read_text(encoding="utf-8")
    largest = max(min(one.exact, one.float32) for one in map(outcome, CASES) if one.verdict != "differs")
    record("diffusers", f"rotation of {len(CASES)} transformers", largest, package="diffusers", unit="queries below 1")
    assert set(DIFFERS) <= set(CASES)


def test_a_saved_folder_is_read(tmp_path: Path) -> None:
    cls = class_of("FluxTransformer2DModel")
    with torch.device("meta"):
        model = cls(num_layers=0, num_single_layers=0, axes_dims_rope=(16, 24, 24), attention_head_dim=64)
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "config.json").write_text(model.to_json_string())
    assert json.loads(model.to_json_string())["_class_name"] == "FluxTransformer2DModel"
    assert encoding_from_diffusers(tmp_path).sections == (8, 12, 12)


# ---------------------------------------------------------------------- where tokens stand


def of_pipeline(file: str, function: str, inside: str = "") -> Any:
    """A function of a pipeline, which is not imported."""
    return nested(root() / "pipelines" / file, function, inside, torch=torch, math=math, **CONSTANTS)


CONSTANTS = {
    "IMAGE_POSITION_OFFSET": 65_536, "SEQUENCE_PADDING_INDICATOR": -1, "LLM_TOKEN_INDICATOR": 3,
    "OUTPUT_IMAGE_INDICATOR": 2,
}  # fmt: skip
"""Of Ideogram 4."""


def joined(*parts: Tensor) -> Tensor:
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts]).double()


def of_flux_2() -> Tensor:
    make = [of_pipeline("flux2/pipeline_flux2.py", f"_prepare_{name}_ids", "Flux2Pipeline") for name in WHAT]
    return joined(make[0](torch.zeros(1, TEXT, 1)), make[1](torch.zeros(1, 1, *GRID[1:])))


WHAT = ("text", "latent")


def of_flux(file: str, pipeline: str, text: Tensor) -> Tensor:
    make = of_pipeline(f"{file}", "_prepare_latent_image_ids", pipeline)
    return joined(text, make(1, *GRID[1:], "cpu", torch.float32))


def of_longcat() -> Tensor:
    make = of_pipeline("longcat_image/pipeline_longcat_image.py", "prepare_pos_ids")
    _, rows, columns = GRID
    return joined(make(0, num_token=TEXT), make(1, "image", (512, 512), height=rows, width=columns))


def of_ideogram() -> Tensor:
    make = of_pipeline("ideogram4/pipeline_ideogram4.py", "_prepare_ids", "Ideogram4Pipeline")
    return joined(make([TEXT], *GRID[1:], TEXT, "cpu")[0])


def of_cosmos_3(fps: float | None) -> Tensor:
    file = "cosmos/pipeline_cosmos3_omni.py"
    text, after = of_pipeline(file, "get_3d_mrope_ids_text_tokens")(TEXT, 0)
    picture, _ = of_pipeline(file, "get_3d_mrope_ids_vae_tokens")(*GRID, after + 15_000, fps=fps)
    return joined(text.T, picture.T)


def of_z_image() -> Tensor:
    """Whose text and picture are filled up to 32 tokens, which these are."""
    cls = class_of("ZImageTransformer2DModel")
    picture, words = torch.zeros(1, 1, 8, 16), torch.zeros(32, 1)
    made = cls.patchify_and_embed(cls.__new__(cls), [picture], [words], 2, 1)
    return joined(*made[3], *made[4])


def of_krea() -> Tensor:
    make = of_pipeline("krea2/pipeline_krea2.py", "prepare_position_ids", "Krea2Pipeline")
    return joined(make(TEXT, *GRID[1:], "cpu"))


ZEROS = torch.zeros(TEXT, 3)
COUNTED = torch.arange(TEXT)[:, None] * torch.tensor([0, 1, 1])
PLACES = {
    "FluxTransformer2DModel": lambda: of_flux("flux/pipeline_flux.py", "FluxPipeline", ZEROS),
    "ChromaTransformer2DModel": lambda: of_flux("chroma/pipeline_chroma.py", "ChromaPipeline", ZEROS),
    "BriaTransformer2DModel": lambda: of_flux("bria/pipeline_bria.py", "BriaPipeline", ZEROS),
    "BriaFiboTransformer2DModel": lambda: of_flux("bria_fibo/pipeline_bria_fibo.py", "BriaFiboPipeline", ZEROS),
    "OvisImageTransformer2DModel": lambda: of_flux("ovis_image/pipeline_ovis_image.py", "OvisImagePipeline", COUNTED),
    "Flux2Transformer2DModel": of_flux_2,
    "LongCatImageTransformer2DModel": of_longcat,
    "Ideogram4Transformer2DModel": of_ideogram,
    "Krea2Transformer2DModel": of_krea,
    "ZImageTransformer2DModel": of_z_image,
    "Cosmos3OmniTransformer": lambda: of_cosmos_3(None),
}
"""Where pipelines place tokens; of all others the module of the transformer does it itself, and is run above."""


@pytest.mark.parametrize("name", PLACES)
def test_tokens_have_the_positions_of_the_pipeline(name: str) -> None:
    sizes, text = ((1, 4, 8), 32) if name.startswith("ZImage") else ((1, *GRID[1:]), TEXT)
    sizes = GRID if name.startswith("Cosmos3") else sizes
    ours = positions_from_diffusers({**defaults(name), **OPTIONS.get(name, {})}, *sizes, text=text)
    assert torch.equal(ours.index[0].double(), PLACES[name]())


@pytest.mark.parametrize("fps", [24.0, 30.0, 12.5])
def test_frames_are_counted_in_time(fps: float) -> None:
    ours = positions_from_diffusers(defaults("Cosmos3OmniTransformer"), *GRID, text=TEXT, fps=fps)
    torch.testing.assert_close(ours.index[0] / ours.denominator, of_cosmos_3(fps).float(), **PEER)
    name, config = "CosmosTransformer3DModel", defaults("CosmosTransformer3DModel")
    cos, _ = built(name, "CosmosRotaryPosEmbed", config)(torch.zeros(1, 1, 3, 8, 12), fps=fps)
    where = positions_from_diffusers(config, *GRID, fps=fps)
    torch.testing.assert_close(encoding_from_diffusers(config).cos_sin(where)[0][0], cos[:, :64], **PEER)


# ---------------------------------------------------------------------- scalings


@pytest.mark.parametrize("factor", [1.5, 2.0])
def test_lumina_scales_by_the_time(factor: float) -> None:
    """Its pipeline interpolates up to a time, and has a larger base from then on."""
    from diffusers.models.embeddings import get_2d_rotary_pos_embed_lumina

    config, where = defaults("LuminaNextDiT2DModel"), Positions.grid(5, 7)
    for scaling, options in (
        (Linear(factor=factor), {"linear_factor": factor}),
        (NTK(factor=factor, form="base"), {"ntk_factor": factor}),
    ):
        ours = encoding_from_diffusers(config, scalings=(scaling, scaling)).cos_sin(where)
        theirs = get_2d_rotary_pos_embed_lumina(72, 5, 7, **options).reshape(1, 35, -1)
        for one, other in zip(ours, (theirs.real, theirs.imag), strict=True):
            torch.testing.assert_close(one, other, **PEER)


def test_riflex_is_only_for_frames() -> None:
    config = defaults("HunyuanVideoTransformer3DModel")
    scaled = encoding_from_diffusers(config, scalings=(RIFLEx(num_frames=66, pair=3), None, None))
    changed = (scaled.inv_freq != encoding_from_diffusers(config).inv_freq).nonzero().flatten()
    assert changed.tolist() == [3]
    assert float(scaled.inv_freq[3]) == pytest.approx(0.9 * 2 * math.pi / 66, rel=FEW_ROUNDINGS, abs=0)


def test_constructors_are_inspected_but_not_called() -> None:
    args, kwargs = arguments_of("FluxTransformer2DModel", "FluxPosEmbed", defaults("FluxTransformer2DModel"))
    assert (args, kwargs) == ((), {"theta": 10_000, "axes_dim": (16, 56, 56)})
    assert callable(built("FluxTransformer2DModel", "FluxPosEmbed", defaults("FluxTransformer2DModel")))
