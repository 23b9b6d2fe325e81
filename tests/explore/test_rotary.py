"""The Rotary screen beside its formulas in many digits, and the Images screen beside Qwen2-VL and Qwen3-VL."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import mpmath
import numpy as np
import pytest
import torch

from locant.errors import RangeError
from tests.explore.screens import executed, numbers_of
from tests.refusal import refuses
from tests.tolerances import ANGLE_IN_DOUBLE, DOUBLE, FEW_ROUNDINGS

mpmath.mp.dps = 40


clocks = partial(numbers_of, "rotary")


@pytest.mark.parametrize("position", [0, 1, 4095, 2**31 - 1])
def test_a_hand_stands_at_position_times_frequency(position: int) -> None:
    numbers = clocks(head_dim="12", base="500", scaling="none", position=str(position))
    for pair in range(6):
        angle = position * mpmath.mpf(500) ** (mpmath.mpf(-pair) / 6)
        assert abs(numbers["cos"][pair] - float(mpmath.cos(angle))) <= ANGLE_IN_DOUBLE
        assert abs(numbers["sin"][pair] - float(mpmath.sin(angle))) <= ANGLE_IN_DOUBLE


def test_wavelengths_are_two_pi_over_the_frequency_and_linear_stretches_them_by_its_factor() -> None:
    numbers = clocks(head_dim="10", base="100", scaling="linear", factor="3", position="50")
    expected = 2 * math.pi * 100.0 ** (2 * np.arange(5) / 10)
    np.testing.assert_allclose(numbers["plain"], expected, rtol=FEW_ROUNDINGS)
    np.testing.assert_allclose(numbers["wavelengths"], 3 * expected, rtol=FEW_ROUNDINGS)
    np.testing.assert_allclose(numbers["rotations"], 50 / (3 * expected), rtol=FEW_ROUNDINGS)
    assert numbers["bands"] == ["stretched"] * 5


def test_yarn_keeps_fast_pairs_and_slows_the_slowest_by_its_factor() -> None:
    numbers = clocks(head_dim="64", scaling="yarn", factor="8")
    stretch = np.array(numbers["wavelengths"]) / np.array(numbers["plain"])
    for band, members in (("kept", 1.0), ("stretched", 8.0)):
        np.testing.assert_allclose(stretch[np.array(numbers["bands"]) == band], members, rtol=FEW_ROUNDINGS)
    assert numbers["bands"][0] == "kept"
    assert numbers["bands"][-1] == "stretched"
    assert numbers["methods"]["names"].index("yarn") == 3
    np.testing.assert_allclose(numbers["methods"]["stretch"][3], stretch, rtol=FEW_ROUNDINGS)


def test_a_cached_key_fits_by_the_cosine_of_what_its_angles_moved() -> None:
    cache = clocks(head_dim="8", base="100", trained="64", factor="4", scaling="none")["cache"]
    base = 100 * (4 * 256 / 64 - 3) ** (8 / 6)
    then, now = (each ** (-2 * np.arange(4) / 8) for each in (100.0, base))
    expected = np.cos(np.arange(64)[:, None] * (now - then)).mean(-1)
    np.testing.assert_allclose(cache["curves"]["dynamic"], expected, rtol=0, atol=DOUBLE)
    assert cache["kept"] == ["linear", "ntk", "yarn", "llama3"]


def test_rounded_angles_miss_what_the_usual_code_misses() -> None:
    position = 12_345
    pairs = clocks(head_dim="16", scaling="none", position=str(position))["precision"]["pairs"]
    exact = [mpmath.cos(position * mpmath.mpf(10_000) ** (mpmath.mpf(-pair) / 8)) for pair in range(8)]
    frequency = 1.0 / (10_000.0 ** (torch.arange(0, 16, 2, dtype=torch.int64).float() / 16))  # as transformers has it
    product = torch.tensor(12_352.0) * frequency.bfloat16().double()  # 12 345 in units of 64
    cosines = {
        "float32": (torch.tensor(float(position)) * frequency).cos(),
        "bfloat16": product.bfloat16().double().cos(),
    }
    for name, rounded in cosines.items():
        expected = [abs(float(cosine) - float(true)) for cosine, true in zip(rounded, exact, strict=True)]
        np.testing.assert_allclose(pairs[name], expected, rtol=0, atol=DOUBLE)


def test_a_position_past_the_sequence_makes_it_longer() -> None:
    assert clocks(scaling="dynamic", position="100000")["length"] == 100_001
    assert clocks(scaling="dynamic", position="1000")["length"] == 32_768


def test_settings_that_no_encoding_has_are_refused() -> None:
    with refuses(RangeError, "head_dim", "even"):
        clocks(head_dim="7")
    with refuses(RangeError, "position"):
        clocks(position=str(2**31))


def test_the_python_of_the_screen_gives_its_clocks() -> None:
    for method in ("longrope", "dynamic", "none"):
        numbers = clocks(scaling=method, position="77", factor="2", trained="50", pair="3")
        for picture in ("clock", "clocks"):
            values = executed(numbers, picture)
            np.testing.assert_array_equal(values["cos"], numbers["cos"])
            np.testing.assert_array_equal(values["sin"], numbers["sin"])
        values = executed(numbers, "wavelengths")
        assert (values["plain"], values["wavelengths"]) == (numbers["plain"], numbers["wavelengths"])
        stretch = executed(numbers, "methods")["stretch"]
        np.testing.assert_array_equal([*stretch.values()], numbers["methods"]["stretch"])
        curves = executed(numbers, "cached-keys")["curves"]
        np.testing.assert_array_equal(curves["dynamic"], numbers["cache"]["curves"]["dynamic"])
        errors = executed(numbers, "precision")["errors"]
        np.testing.assert_array_equal(errors["curves"]["float32"], numbers["precision"]["curves"]["float32"])


SIZES = {"frames": "2", "rows": "3", "columns": "5", "before": "4", "after": "2"}
PAIRS = {"pairs": "8", "frame_pairs": "2", "row_pairs": "3", "base": "100"}


def images(**settings: str) -> dict[str, Any]:
    return numbers_of("images", **{**SIZES, **PAIRS, **settings})


def test_indices_are_those_of_transformers_for_an_image_between_two_texts() -> None:
    transformers = pytest.importorskip("transformers", reason="the independent code beside ours")
    numbers = images(frames="1")
    config = transformers.CONFIG_MAPPING["qwen2_vl"](
        text_config={"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
                     "intermediate_size": 8, "vocab_size": 100},
        vision_config={"depth": 1, "embed_dim": 8, "num_heads": 1, "hidden_size": 32},
        image_token_id=98, video_token_id=99, vision_start_token_id=97, vision_end_token_id=96,
    )  # fmt: skip
    model = transformers.Qwen2VLModel(config)
    merge = config.vision_config.spatial_merge_size
    ids = torch.tensor([[1, 2, 3, 97, *[98] * 15, 4, 5]])
    kinds = (ids == 98).int()
    sizes = torch.tensor([[1, 3 * merge, 5 * merge]])
    try:
        expected, _ = model.get_rope_index(ids, image_grid_thw=sizes, mm_token_type_ids=kinds)
    except TypeError:  # releases that find images by their ids alone
        expected, _ = model.get_rope_index(ids, image_grid_thw=sizes)
    np.testing.assert_array_equal(numbers["index"], expected[:, 0].T.numpy())


ONE_LADDER = -np.arange(8) / 8
A_LADDER_EACH = np.concatenate([-np.arange(count) / count for count in (2, 3, 3)])


@pytest.mark.parametrize(
    ("settings", "axes", "ladder"),
    [
        ({"scheme": "contiguous"}, [0, 0, 1, 1, 1, 2, 2, 2], ONE_LADDER),
        ({"scheme": "turns"}, [1, 2, 1, 2, 1, 2, 0, 0], ONE_LADDER),
        ({"scheme": "turns", "frame_pairs": "1", "row_pairs": "2"}, [1, 2, 1, 2, 2, 2, 2, 0], ONE_LADDER),
        ({"scheme": "stride"}, [0, 1, 2, 0, 1, 2, 0, 1], ONE_LADDER),
        ({"scheme": "axial"}, [0, 0, 1, 1, 1, 2, 2, 2], A_LADDER_EACH),
        ({"scheme": "heads", "group": "column"}, [2] * 8, ONE_LADDER),
        ({"scheme": "contiguous", "frame_pairs": "2", "row_pairs": "6"}, [0, 0, 1, 1, 1, 1, 1, 2], ONE_LADDER),
    ],
)
def test_every_pair_turns_with_its_axis_and_at_its_frequency(
    settings: dict[str, str], axes: list[int], ladder: np.ndarray
) -> None:
    numbers = images(**settings, at="17")
    assert numbers["axis_of_pair"].tolist() == axes
    frequency = 100.0**ladder
    angles = numbers["index"][:, axes] * frequency
    np.testing.assert_allclose(numbers["alike"], np.cos(angles - angles[17]).mean(-1), rtol=0, atol=DOUBLE)
    np.testing.assert_allclose(numbers["wavelengths"], 2 * np.pi / frequency, rtol=DOUBLE, atol=0)


@pytest.mark.parametrize("sections", [(24, 20, 20), (16, 24, 24), (62, 1, 1), (1, 1, 62)])
def test_every_third_pair_is_dealt_out_as_qwen3_vl_does(sections: tuple[int, int, int]) -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_vl.modeling_qwen3_vl", reason="the code beside ours")
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [*sections]}
    rotary = modeling.Qwen3VLTextRotaryEmbedding(modeling.Qwen3VLTextConfig(head_dim=128, rope_parameters=rope))
    places = torch.eye(3, dtype=torch.int64)[:, None]  # of three tokens, each is at 1 on one axis, at 0 on the others
    _, sin = rotary(torch.zeros(1), places)
    expected = sin[0, :, :64].argmax(0).tolist()
    frames, rows, _ = map(str, sections)
    numbers = images(scheme="stride", pairs="64", frame_pairs=frames, row_pairs=rows)
    assert numbers["axis_of_pair"].tolist() == expected


@pytest.mark.parametrize(("continue_from", "step", "behind"), [("largest", 1, 9), ("largest", 7, 12), ("sides", 7, 9)])
def test_frames_are_as_far_apart_as_asked_and_text_goes_on_behind_them(
    continue_from: str, step: int, behind: int
) -> None:
    numbers = images(step=str(step), continue_from=continue_from)
    assert numbers["index"][[4, 4 + 15], 0].tolist() == [4, 4 + step]
    assert numbers["index"][-2].tolist() == [behind] * 3
    assert numbers["next"] == behind


def test_without_text_the_image_stands_alone() -> None:
    numbers = images(before="0", after="0", at="0")
    assert numbers["index"][0].tolist() == [0, 0, 0]
    assert numbers["index"][-1].tolist() == [1, 2, 4]
    assert numbers["image"] == [0, 30]


@pytest.mark.parametrize("scheme", ["contiguous", "stride", "turns", "axial", "heads"])
def test_the_python_of_images_gives_their_indices(scheme: str) -> None:
    numbers = images(scheme=scheme)
    np.testing.assert_array_equal(executed(numbers, "index")["index"], numbers["index"])
    assert executed(numbers, "pairs")["axes"] == numbers["axis_of_pair"].tolist()
    assert executed(numbers, "wavelengths")["wavelengths"] == numbers["wavelengths"]
    for frame, start in (("frame-0", 4), ("frame-1", 19)):
        values = executed(numbers, frame)
        np.testing.assert_array_equal(values["frame"].flatten(), numbers["alike"][start : start + 15])
