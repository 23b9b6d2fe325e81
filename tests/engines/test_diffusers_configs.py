"""Configurations of `diffusers`, read without it: mistakes, folders, and explanations."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from locant import InputError, LocantError, Positions, RangeError, Rotary
from locant.cli import main
from locant.engines.diffusers import encoding_from_diffusers, positions_from_diffusers
from locant.engines.diffusers_rows import TRANSFORMERS
from locant.scaling import DyPE, Linear, YaRN
from tests.refusal import refuses
from tests.tolerances import FEW_ROUNDINGS

FLUX = {"_class_name": "FluxTransformer2DModel"}
WAN = {"_class_name": "WanTransformer3DModel", "attention_head_dim": 128}


def test_a_video_of_wan_has_frames_rows_and_columns() -> None:
    assert positions_from_diffusers(WAN, 2, 3, 4) == Positions.of(Positions.grid(2, 3, 4).index)
    rotary = Rotary(128, layout="interleaved", sections=(22, 21, 21), axial=True)
    assert repr(encoding_from_diffusers(WAN)) == repr(rotary)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, ["_class_name"]),
        ({"_class_name": ["FluxTransformer2DModel"]}, ["_class_name"]),
        ({"_class_name": "UNet2DConditionModel"}, ["UNet2DConditionModel"]),
        ({"_class_name": "LTXVideoTransformer3DModel"}, ["LTXVideoTransformer3DModel", "whole width"]),
        ({"_class_name": "WanTransformer3DModel"}, ["attention_head_dim"]),
        ({**WAN, "attention_head_dim": "128"}, ["attention_head_dim"]),
        ({**FLUX, "axes_dims_rope": 16}, ["axes_dims_rope"]),
        ({**FLUX, "axes_dims_rope": [16, "56", 56]}, ["axes_dims_rope"]),
        ({"_class_name": "CogVideoXTransformer3DModel", "use_rotary_positional_embeddings": False}, ["has no rotary"]),
        ({"_class_name": "Krea2Transformer2DModel", "rope_theta": -1.0}, ["rope_theta"]),
        ({"_class_name": "OmniGenTransformer2DModel", "hidden_size": 64, "num_attention_heads": 2}, ["rope_scaling"]),
    ],
)
def test_an_error_names_the_wrong_key(config: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(LocantError) as caught:
        encoding_from_diffusers(config)
    assert caught.value.remedy
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_an_empty_configuration_is_read_by_defaults_or_raises(name: str) -> None:
    """No class fails on it but by an error of ours."""
    with suppress(LocantError):
        encoding = encoding_from_diffusers({"_class_name": name})
        assert encoding.rotary_dim <= encoding.head_dim


def test_scalings_are_one_for_each_axis() -> None:
    scaled = encoding_from_diffusers(FLUX, scalings=(None, Linear(factor=2.0), Linear(factor=4.0)))
    divisors = encoding_from_diffusers(FLUX).inv_freq / scaled.inv_freq
    assert divisors.tolist() == pytest.approx([1.0] * 8 + [2.0] * 28 + [4.0] * 28, rel=FEW_ROUNDINGS, abs=0)
    same = (DyPE(factor=2.0),) * 3
    assert encoding_from_diffusers(FLUX, scalings=same).scaling == same[0]
    for wrong in ((None, None), (None, None, 2.0)):
        with refuses(RangeError, "each axis"):
            encoding_from_diffusers(FLUX, scalings=wrong)  # type: ignore[arg-type]
    yarn = YaRN(factor=4.0, original_max_seq_len=64)
    with refuses(RangeError, "not a rotation"):
        encoding_from_diffusers(FLUX, scalings=(None, yarn, yarn))


def test_text_that_is_not_rotated_raises() -> None:
    with refuses(RangeError, "text=5", "WanTransformer3DModel"):
        positions_from_diffusers(WAN, text=5)
    for name in ("frames", "rows", "columns"):
        with refuses(RangeError, name):
            positions_from_diffusers(WAN, **{name: 0})
    with refuses(RangeError, "fps"):
        positions_from_diffusers(WAN, fps=0.0)
    with refuses(InputError, "real numbers"):
        positions_from_diffusers({"_class_name": "MiniMaxH3Transformer3DModel", "attention_head_dim": 128})


def test_text_after_an_image_gets_the_angles_of_its_positions() -> None:
    config = {"_class_name": "QwenImageTransformer2DModel"}
    where = positions_from_diffusers(config, rows=3, columns=4, text=2)
    assert where.index[0, :3].tolist() == [[2, 2, 2], [3, 3, 3], [0, -2, -2]]
    q = torch.randn(1, 1, where.seq_len, 128)
    alone = encoding_from_diffusers(config).rotate_one(q[:, :, :1], Positions.of([[[2, 2, 2]]]))
    assert torch.equal(encoding_from_diffusers(config).rotate_one(q, where)[:, :, :1], alone)


@pytest.mark.parametrize("place", ["", "transformer", "transformer/config.json"])
def test_folders_of_pipelines_are_read_and_explained(tmp_path: Path, place: str) -> None:
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "config.json").write_text(json.dumps({**WAN, "attention_head_dim": 96}))
    assert encoding_from_diffusers(str(tmp_path / place)).sections == (16, 16, 16)
    result = CliRunner().invoke(main, ["explain", str(tmp_path / place), "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.output)
    assert told["transformer"] == "WanTransformer3DModel"
    assert "sections=(16, 16, 16)" in told["encoding"]
    assert "not rotated" in CliRunner().invoke(main, ["explain", str(tmp_path / place)]).output


def test_a_folder_without_a_configuration_raises(tmp_path: Path) -> None:
    with refuses(InputError, "config.json"):
        encoding_from_diffusers(tmp_path)


@pytest.mark.parametrize("config", [None, 3, []])
def test_other_values_than_configurations_raise(config: Any) -> None:
    with refuses(InputError, "configuration of diffusers"):
        encoding_from_diffusers(config)
    with refuses(InputError, "configuration of diffusers"):
        positions_from_diffusers(config)
