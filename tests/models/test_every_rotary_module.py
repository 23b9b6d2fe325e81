"""Every rotary module of `transformers` is read as it rotates, from its own default configuration, and measured so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import locant
from locant import Positions, Rotary
from locant.models import encoding_from_config, with_defaults
from locant.models.config_values import HEADS, WIDTHS
from locant.models.registry import read_config
from locant.positions import UnequalAngles
from locant.probing.report import RotationReport
from tests.models.configurations import ROTARY_KEYS
from tests.models.rotary_modules import (
    Case,
    called,
    cases,
    folders,
    one_of_each_code,
    outcome,
    said,
    takes_positions,
    theirs,
)
from tests.tolerances import DIFFERENT, LENGTH, SIX_DIGITS

NO_ROTATION = {"hunyuan_vl": "by different axes: not a rotation", "vjepa2": "by different frequencies: not a rotation"}
"""Folders whose module is refused, and a part of the reason."""

OFTEN = {name.removesuffix("_text") for name in ROTARY_KEYS}
"""Those of the most used models; the fast suite has no others."""

MEASURED = sorted({*folders()} - {*NO_ROTATION} - {"musicflamingo"})
"""All but Music Flamingo, whose angles are the product of a frame and a place in it, and so of no position."""
ONE_OF_EACH = one_of_each_code(sorted(MEASURED, key=lambda folder: folder not in OFTEN))


@pytest.mark.filterwarnings("ignore:hy_v4 pairs:UserWarning")  # its code is what is measured here
@pytest.mark.filterwarnings("ignore:.*not the encoding of all layers:UserWarning")
@pytest.mark.parametrize(
    "folder", [folder if folder in OFTEN else pytest.param(folder, marks=pytest.mark.slow) for folder in folders()]
)
def test_every_rotary_module_of_a_folder_is_equal_or_raises_for_a_known_reason(folder: str) -> None:
    """And what is not said is taken from the defaults of its class."""
    found = cases(folder)
    assert found
    for case in found:
        result = outcome(case)
        refused = result.verdict == "refused" and NO_ROTATION.get(folder, "not this") in result.detail
        assert result.verdict in ("same bits", "equal") or refused, (case.name, result)
        if folder not in NO_ROTATION and case.config.to_dict().get("model_type") not in WITHOUT_DEFAULTS:
            ours = Rotary.from_config(with_defaults(sizes(case)), layer_type=case.layer_type)
            assert repr(ours) == repr(Rotary.from_config(said(case), layer_type=case.layer_type)), case.name


def sizes(case: Case) -> dict[str, Any]:
    """Return the keys that its configuration needs besides the defaults of its row: the sizes of the model."""
    values, row = read_config(said(case))
    kept = {"model_type", "layer_types", "per_layer_config", "num_hidden_layers", *SIZES, *row.attribute_map}
    kept |= {row.rotary_keys.head_dim_key} if row.head_dim_required else set()
    kept |= {key for key in values if key.startswith("memory_attention")}
    return {key: value for key, value in values.items() if key in kept and key not in row.defaults}


SIZES = {"projection_dim", "embed_dim", "image_size", "patch_size", *HEADS, *WIDTHS}
WITHOUT_DEFAULTS = {"", "cohere_compass_text", "glm4v_text", "glm_image_text"}
"""Those without a ``model_type``, which no dictionary can name, and those whose own defaults cannot be run."""


def changes_of_length(case: Case) -> Tensor:
    """What the module makes of the length of each pair of dimensions, over what it was; 1 in a rotation."""
    index, turn = theirs(case)
    width = case.config.hidden_size // case.config.num_attention_heads
    q = torch.randn(1, 2, index.shape[1], width, generator=torch.Generator().manual_seed(0))
    return turn(q).norm(dim=-1) / q.norm(dim=-1) - 1


@pytest.mark.parametrize("folder", NO_ROTATION)
def test_modules_that_are_not_read_change_lengths_as_no_rotation_does(folder: str) -> None:
    (rotation,) = cases("llama")
    assert changes_of_length(rotation).abs().max() <= LENGTH
    for case in cases(folder):
        assert changes_of_length(case).abs().max() > DIFFERENT


@pytest.mark.parametrize("folder", NO_ROTATION)
def test_unequal_angles_have_the_same_bits_if_they_are_allowed(folder: str) -> None:
    for case in cases(folder):
        with pytest.warns(UserWarning, match="does not rotate: among 4 positions.* by 0"):
            encoding = encoding_from_config(said(case), angles="float32", allow_no_rotation=True)
        assert isinstance(encoding, UnequalAngles)
        index, turn = theirs(case)
        positions = Positions.of(index)
        width = encoding.head_dim
        q, k = torch.randn(1, 2, index.shape[1], width), torch.randn(1, 2, index.shape[1], width)
        rotated_q, rotated_k = encoding.rotate(q, k, positions)
        assert torch.equal(rotated_q, turn(q))
        assert torch.equal(rotated_k, turn(k))
        low, high = encoding.stretch(positions)  # of a pair; a vector is stretched by no more than one of its pairs
        change = changes_of_length(case) + 1
        assert low - LENGTH <= change.min() < change.max() <= high + LENGTH
        expected = rotated_q.clone()
        assert encoding.rotate(q, k, positions, inplace=True)[0] is q
        assert torch.equal(q, expected)


# ---------------------------------------------------------------------- measured, with no word of a configuration

SWEEP = [pytest.mark.slow, pytest.mark.sweep]
COPIES = [pytest.param(folder, marks=SWEEP) for folder in MEASURED if folder not in ONE_OF_EACH]


def test_folders_have_the_same_code_if_they_differ_in_names_and_docstrings_alone() -> None:
    assert one_of_each_code(["llama", "mistral", "qwen2", "gptj", "phi"]) == {"llama", "gptj", "phi"}
    assert len(ONE_OF_EACH) > len(MEASURED) / 3


def rows(encoding: Rotary) -> dict[tuple[int, int], tuple[int, float]]:
    """Axis and frequency of every pair that turns, by its dimensions in the direction of a positive angle."""
    table = zip(encoding.pairs.dims, encoding.pairs.axes or (), encoding.inv_freq.abs().tolist(), strict=True)
    return {pair: (axis, each) for pair, axis, each in table if each}


def measured(report: RotationReport) -> dict[tuple[int, int], tuple[int, float]]:
    table = [(block.dims, axis, block.frequencies[axis]) for block in report.queries.blocks for axis in block.axes]
    return {dims if each > 0 else dims[::-1]: (axis, abs(each)) for dims, axis, each in table}


ON_A_GRID = ("DINOv3", "Dinov3", "Sapiens2", "Llama4Vision", "EfficientLoFTR")
"""Which make the tables of a whole image: tokens are looked up in it."""


def probed(case: Case, expected: Rotary | None) -> RotationReport:
    name, width = case.cls.__name__, None if expected is None else expected.head_dim
    axes = 3 if "VJEPA2" in name else None if expected is None else expected.pairs.num_axes
    turn = called(case)
    target: Any = case.cls(case.config) if turn is None else turn
    if turn is not None and takes_positions(turn):
        target = lambda x, positions: turn(positions, x)  # noqa: E731
    report = locant.probe(
        target, config=case.config, layer_type=case.layer_type, axes=axes,
        head_dim=width or case.config.hidden_size // 16,
    )  # fmt: skip
    assert isinstance(report, RotationReport)
    return report


@pytest.mark.filterwarnings("ignore:hy_v4 pairs:UserWarning")  # its code is what is measured here
@pytest.mark.filterwarnings("ignore:.*not the encoding of all layers:UserWarning")
@pytest.mark.slow
@pytest.mark.parametrize("folder", [*sorted(ONE_OF_EACH), *COPIES])
def test_every_rotary_module_is_measured_as_its_configuration_states(folder: str) -> None:
    for case in cases(folder):
        if any(part in case.cls.__name__ for part in ON_A_GRID):
            continue
        expected = Rotary.from_config(said(case), layer_type=case.layer_type)
        report = probed(case, expected)
        ours, others = measured(report), rows(expected)
        assert ours.keys() == others.keys(), (case.name, str(report))
        for pair, (axis, each) in others.items():
            assert ours[pair][0] == axis, (case.name, pair)
            assert ours[pair][1] == pytest.approx(each, rel=SIX_DIGITS, abs=0), (case.name, pair)
        factor = expected.scaling.effective_attention_factor
        assert report.queries.factor == pytest.approx(factor, rel=SIX_DIGITS, abs=0)
        assert report.queries.num_heads == expected.pairs.num_heads
        assert report.is_rotation
        assert isinstance(report.encoding, Rotary), (case.name, str(report))
        assert rows(report.encoding).keys() == others.keys()


@pytest.mark.parametrize("folder", NO_ROTATION)
def test_the_probe_names_modules_that_do_not_rotate(folder: str) -> None:
    (case,) = cases(folder)
    report = probed(case, None)
    assert not report.is_rotation
    assert report.encoding is None
    assert any(
        said in warning for warning in report.warnings for said in ("the two members of", "It is not a rotation")
    ), report.warnings
