"""Tokens of images stand where Qwen2-VL has them, and their pairs turn with the axis that its sections say."""

from __future__ import annotations

import numpy as np
import pytest

from locant.explore.screens import answer
from locant.explore.session import Session
from tests.tolerances import DOUBLE

SIZES = {"frames": "2", "rows": "3", "columns": "5", "before": "4", "after": "2"}
PAIRS = {"pairs": "8", "frame_pairs": "2", "row_pairs": "3", "base": "100"}


def numbers(**settings: str) -> dict:
    return answer("images", {**SIZES, **PAIRS, **settings}, Session())["numbers"]


def test_indices_are_those_of_transformers_for_an_image_between_two_texts() -> None:
    transformers = pytest.importorskip("transformers", reason="the independent code beside ours")
    torch = pytest.importorskip("torch")
    shown = numbers(frames="1")
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
    np.testing.assert_array_equal(shown["index"], expected[:, 0].T.numpy())


def test_every_pair_turns_with_the_axis_of_its_section() -> None:
    shown = numbers(scheme="contiguous", at="17")
    assert shown["axis_of_pair"].tolist() == [0, 0, 1, 1, 1, 2, 2, 2]
    frequency = 100.0 ** (-np.arange(8) / 8)
    angles = shown["index"][:, shown["axis_of_pair"]] * frequency
    np.testing.assert_allclose(shown["alike"], np.cos(angles - angles[17]).mean(-1), rtol=0, atol=DOUBLE)
    np.testing.assert_allclose(shown["wavelengths"], 2 * np.pi / frequency, rtol=DOUBLE, atol=0)


@pytest.mark.parametrize("sections", [(24, 20, 20), (16, 24, 24), (62, 1, 1), (1, 1, 62)])
def test_every_third_pair_is_dealt_out_as_qwen3_vl_does(sections: tuple[int, int, int]) -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_vl.modeling_qwen3_vl", reason="the code beside ours")
    torch = pytest.importorskip("torch")
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [*sections]}
    rotary = modeling.Qwen3VLTextRotaryEmbedding(modeling.Qwen3VLTextConfig(head_dim=128, rope_parameters=rope))
    places = torch.eye(3, dtype=torch.int64)[:, None]  # of three tokens, each is at 1 on one axis, at 0 on the others
    _, sin = rotary(torch.zeros(1), places)
    expected = sin[0, :, :64].argmax(0).tolist()
    frames, rows, _ = map(str, sections)
    shown = numbers(scheme="stride", pairs="64", frame_pairs=frames, row_pairs=rows)
    assert shown["axis_of_pair"].tolist() == expected


def test_rows_and_columns_take_turns_before_frames() -> None:
    assert numbers(scheme="turns")["axis_of_pair"].tolist() == [1, 2, 1, 2, 1, 2, 0, 0]
    assert numbers(scheme="turns", frame_pairs="1", row_pairs="2")["axis_of_pair"].tolist() == [1, 2, 1, 2, 2, 2, 2, 0]


def test_a_group_of_heads_turns_with_one_axis_alone() -> None:
    shown = numbers(scheme="heads", group="column", at="17")
    angles = shown["index"][:, [2]] * 100.0 ** (-np.arange(8) / 8)
    np.testing.assert_allclose(shown["alike"], np.cos(angles - angles[17]).mean(-1), rtol=0, atol=DOUBLE)


@pytest.mark.parametrize(("goes_on", "step", "behind"), [("largest", 1, 9), ("largest", 7, 12), ("sides", 7, 9)])
def test_frames_are_as_far_apart_as_asked_and_text_goes_on_behind_them(goes_on: str, step: int, behind: int) -> None:
    shown = numbers(step=str(step), goes_on=goes_on)
    assert shown["index"][[4, 4 + 15], 0].tolist() == [4, 4 + step]
    assert shown["index"][-2].tolist() == [behind] * 3
    assert shown["next"] == behind


@pytest.mark.parametrize("scheme", ["stride", "turns"])
def test_a_table_of_pairs_turns_as_it_says(scheme: str) -> None:
    shown = numbers(scheme=scheme, at="17")
    angles = shown["index"][:, shown["axis_of_pair"]] * 100.0 ** (-np.arange(8) / 8)
    np.testing.assert_allclose(shown["alike"], np.cos(angles - angles[17]).mean(-1), rtol=0, atol=DOUBLE)


def test_an_axial_ladder_begins_anew_on_every_axis() -> None:
    shown = numbers(scheme="axial", at="3")
    frequency = np.concatenate([100.0 ** (-np.arange(count) / count) for count in (2, 3, 3)])
    angles = shown["index"][:, shown["axis_of_pair"]] * frequency
    np.testing.assert_allclose(shown["alike"], np.cos(angles - angles[3]).mean(-1), rtol=0, atol=DOUBLE)


def test_without_text_the_image_stands_alone() -> None:
    shown = numbers(before="0", after="0", at="0")
    assert shown["index"][0].tolist() == [0, 0, 0]
    assert shown["index"][-1].tolist() == [1, 2, 4]
    assert shown["image"] == [0, 30]


def test_sections_leave_a_pair_for_columns() -> None:
    shown = numbers(frame_pairs="2", row_pairs="6")
    assert [int((shown["axis_of_pair"] == axis).sum()) for axis in range(3)] == [2, 5, 1]


@pytest.mark.parametrize("scheme", ["contiguous", "stride", "turns", "axial", "heads"])
def test_the_python_of_the_screen_gives_its_indices(scheme: str) -> None:
    shown = numbers(scheme=scheme)
    values: dict = {}
    exec(shown["python"], values)  # noqa: S102
    np.testing.assert_array_equal(values["positions"].index[0].numpy(), shown["index"])
    assert values["cos"].shape == (1, 36, 8)
