"""Text with images and videos: positions are those of published models, and arrangements of rows change nothing."""

from __future__ import annotations

import importlib
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from locant import KVCache, LocantError, Positions, RangeError, Rotary, ShapeError, attend
from tests.refusal import refuses
from tests.tolerances import assert_close

VIDEO = [(3, 4, 8)]
IMAGES = [(1, 4, 6), (1, 2, 10)]
TEXT, IMAGE, MOVIE = 0, 1, 2

WHOLE = [
    [3, IMAGES[0], 2, VIDEO[0], 2, IMAGES[1], 4],
    [5, IMAGES[1], 1, IMAGES[0], 1, (6, 2, 4), 1],
]  # fmt: skip
BY_FRAME = [  # the time of a frame is written as text before it
    [3, IMAGES[0], 2, *([1, (1, 4, 8)] * 3), 2, IMAGES[1], 4],
    [5, IMAGES[1], 1, IMAGES[0], *([2, (1, 2, 4)] * 6), 1],
]  # fmt: skip

MODELS: dict[str, tuple[str, str, dict[str, Any], list[list[Any]], dict[str, Any]]] = {
    "Qwen2-VL": ("qwen2_vl", "Qwen2VLModel", {}, WHOLE, {}),
    "Qwen2.5-VL": ("qwen2_5_vl", "Qwen2_5_VLModel", {"tokens_per_second": 25}, WHOLE, {}),
    "Qwen3-VL": ("qwen3_vl", "Qwen3VLModel", {}, BY_FRAME, {}),
    "GLM-4.1V": ("glm4v", "Glm4vModel", {}, BY_FRAME, {}),
    "ERNIE-4.5-VL": (
        "ernie4_5_vl_moe", "Ernie4_5_VLMoeModel", {"temporal_merge_size": 2}, WHOLE[1:], {"merge_frames": 2}
    ),
    "PaddleOCR-VL": ("paddleocr_vl", "PaddleOCRVLModel", {}, WHOLE, {}),
}  # fmt: skip
SECONDS = [0.3, 1.5]


def theirs(name: str, rows: list[list[Any]], positions: Positions) -> tuple[Tensor, Tensor]:
    """What `get_rope_index` gives, and by how much text that follows is ahead of the number of tokens."""
    folder, cls, vision, _, options = MODELS[name]
    model = getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), cls)
    config = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2, **vision))
    stand_in = SimpleNamespace(config=config)
    stand_in.get_vision_position_ids = MethodType(model.get_vision_position_ids, stand_in)
    kinds, merged = [], options.get("merge_frames", 1)
    for row in rows:
        kinds.append([])
        for part in row:
            count = part if isinstance(part, int) else part[0] * part[1] * part[2] // 4
            kind = TEXT if isinstance(part, int) else IMAGE if part in IMAGES else MOVIE
            kinds[-1] += [kind] * (count // merged if kind == MOVIE else count)
    real = positions.document >= 0
    types = torch.zeros(real.shape, dtype=torch.int64)
    for place, row in enumerate(kinds):
        types[place, real[place]] = torch.tensor(row)
    grids = [part for row in rows for part in row if isinstance(part, tuple)]
    videos = [grid for grid in grids if grid[0] > 1] if rows is not BY_FRAME else [(3, 4, 8), (6, 2, 4)]
    images = [grid for grid in grids if grid in IMAGES]
    seconds = {"second_per_grid_ts": torch.tensor(SECONDS)} if name == "Qwen2.5-VL" else {}
    sizes = torch.tensor(images), torch.tensor(videos)
    found, ahead = model.get_rope_index(stand_in, types, types.clone(), *sizes, attention_mask=real.long(), **seconds)
    return found.movedim(0, -1), ahead[:, 0]


def parts_of(name: str) -> list[list[Any]]:
    rows = MODELS[name][3]
    if name != "Qwen2.5-VL":
        return rows
    seconds = iter(SECONDS)
    return [[(*p, 25 * next(seconds)) if isinstance(p, tuple) and p[0] > 1 else p for p in row] for row in rows]


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_positions_are_those_of_published_models(name: str, padding: str) -> None:
    rows, options = parts_of(name), MODELS[name][4]
    positions = Positions.multimodal(
        [[row] for row in rows], merge=2, continue_from="sides", padding=padding, **options
    )
    assert name == "ERNIE-4.5-VL" or (positions.document < 0).any()
    expected, ahead = theirs(name, MODELS[name][3], positions)
    real = positions.document >= 0
    assert torch.equal(positions.index[real], expected[real])
    cache = KVCache()
    x = torch.zeros(len(rows), 1, positions.seq_len, 2)
    cache.append(x, x, positions)
    behind = real.sum(1) + ahead  # where that code lets generated text go on
    assert torch.equal(cache.next_positions(2).index, (behind[:, None] + torch.arange(2))[..., None].expand(-1, -1, 3))


def test_times_of_qwen_3_omni_are_fractions_and_text_continues_after_the_largest() -> None:
    code = importlib.import_module("transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe")
    model = code.Qwen3OmniMoePreTrainedModelForConditionalGeneration
    config = SimpleNamespace(
        image_token_id=1, video_token_id=2, audio_token_id=3, vision_start_token_id=4, audio_start_token_id=5,
        position_id_per_seconds=13,
    )  # fmt: skip
    stand_in = SimpleNamespace(config=config, spatial_merge_size=2)
    stand_in.get_llm_pos_ids_for_vision = MethodType(model.get_llm_pos_ids_for_vision, stand_in)
    text, image, video = [9] * 3, [4, *[1] * 6, 8], [4, *[2] * 24, 8]
    ids = torch.tensor([text + image + text + video + text])
    found, _ = model.get_rope_index(
        stand_in, ids, torch.tensor([[1, 4, 6]]), torch.tensor([[3, 4, 8]]), torch.ones_like(ids),
        second_per_grids=torch.tensor([0.5]),
    )  # fmt: skip
    ours = Positions.multimodal([4, (1, 4, 6), 5, (3, 4, 8, 6.5), 4], merge=2, denominator=2)
    assert torch.equal(ours.index / ours.denominator, found.movedim(0, -1))


ROTARY = Rotary(16, sections=(2, 3, 3))
DOCUMENTS = [[3, (1, 4, 6), 2], [1, (2, 2, 2, 1.5), 4]]


def tokens(count: int) -> Tensor:
    return torch.randn(1, 2, count, 16, generator=torch.Generator().manual_seed(count))


def alone(parts: list[Any], **options: Any) -> tuple[Positions, Tensor, Tensor]:
    positions = Positions.multimodal(parts, merge=2, **options)
    q = tokens(positions.seq_len)
    return positions, q, ROTARY.rotate(q, q, positions)[0]


@pytest.mark.parametrize("denominator", [1, 2])
def test_packed_padded_sharded_and_cached_rows_equal_rows_alone(denominator: int) -> None:
    each = [alone(parts, denominator=denominator) for parts in DOCUMENTS]
    expected = torch.cat([rotated for _, _, rotated in each], dim=2)
    q = torch.cat([q for _, q, _ in each], dim=2)
    size = expected.shape[2]
    row = Positions.multimodal(DOCUMENTS, merge=2, denominator=denominator, length=size + 3, padding="left")
    assert row.document[0].unique().tolist() == [-1, 0, 1]
    packed = torch.cat([torch.zeros(1, 2, 3, 16), q], dim=2)
    assert torch.equal(ROTARY.rotate_one(packed, row)[:, :, 3:], expected)
    whole = row.slice(3, size + 3)
    slots = torch.arange(size).roll(5)
    assert torch.equal(ROTARY.rotate_one(q[:, :, slots], whole.select(slots)), expected[:, :, slots])
    y = attend(expected, expected, q, encoding=ROTARY, positions=whole)
    for place, (positions, own, rotated) in enumerate(each):
        mine = whole.document[0] == place
        assert_close(attend(rotated, rotated, own, encoding=ROTARY, positions=positions), y[:, :, mine])
    eight = Positions.multimodal([[3, (1, 4, 4), 1], [4, (2, 2, 2), 2]], merge=2, denominator=denominator)
    x = tokens(eight.seq_len)
    of_ranks = [ROTARY.rotate_one(x[:, :, s], eight.select(s)) for s in (eight.shard_slots(r, 2) for r in range(2))]
    back = torch.cat([eight.shard_slots(rank, 2) for rank in range(2)]).argsort()
    assert torch.equal(torch.cat(of_ranks, dim=2)[:, :, back], ROTARY.rotate_one(x, eight))


def test_an_empty_grid_and_an_empty_row_have_no_tokens() -> None:
    assert Positions.multimodal([2, (0, 4, 4), 1]) == Positions.multimodal([3])
    assert Positions.multimodal([]).seq_len == 0
    assert Positions.multimodal([[[2], []], [[]]]).document.tolist() == [[0, 0], [-1, -1]]


REFUSED: dict[str, tuple[Any, type[LocantError], str]] = {
    "no list": ((5,), ShapeError, "parts"),
    "numbers beside lists": ([5, [2]], ShapeError, "mixes lists"),
    "two sizes": ([(1, 2)], ShapeError, "frames, rows, columns"),
    "no multiple": ([(1, 3, 2)], RangeError, "blocks of 2 x 2"),
    "half a token": ([2.5], RangeError, "parts"),
    "beyond the last position": ([(2, 2, 2, 2.0**31 - 1), 2], RangeError, "2**31"),
    "beyond the last token": ([(1, 2**20, 2**20)], RangeError, "tokens"),
    "a text beyond the last position": ([2**31], RangeError, "position 2147483648"),
    "a text behind a far one": ([2**30, 2**30], RangeError, "2**31"),
    "a step backwards": ([(2, 2, 2, -1)], RangeError, "step"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_parts_raise_an_error(name: str) -> None:
    parts, kind, word = REFUSED[name]
    with refuses(kind, word):
        Positions.multimodal(parts, merge=2)


def test_a_step_that_the_denominator_cannot_hold_is_refused() -> None:
    with refuses(RangeError, "1/2", "denominator"):
        Positions.multimodal([(2, 2, 2, 0.3)], merge=2, denominator=2)
