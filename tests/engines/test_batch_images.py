"""Ids of images and videos are compared with the rule of each model, which its own `get_rope_index` has."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_MAPPING

from locant.engines.batches import check_batch
from locant.engines.batches.grid_rules import BY_FRAME, IN_SECONDS, MERGED_FRAMES, ONE_GRID, OTHER_RULES
from locant.engines.batches.model import facts_of
from tests.engines.tiny_models import IMAGE, VIDEO, logits, tiny
from tests.tolerances import DIFFERENT

RULES = (*ONE_GRID, *IN_SECONDS, *BY_FRAME, *MERGED_FRAMES)
Grid = tuple[int, int, int]
Part = int | tuple[int, Grid]
"""So many tokens of text, or the kind of a grid and its patches."""

IMAGES: list[list[Part]] = [[3, (1, (1, 8, 8)), 2, (1, (1, 4, 8)), 5]]
VIDEOS: list[list[Part]] = [[2, (2, (3, 4, 8)), 4, (1, (1, 4, 4)), 1], [4, (2, (2, 8, 4)), 3]]


@cache
def _class_of(kind: str) -> tuple[Any, Any]:
    config = CONFIG_MAPPING[kind]()
    return MODEL_MAPPING[type(config)], config


def require_seconds() -> None:
    """Skip where Qwen2.5-VL counts whole seconds between frames, and pauses of a video between images too."""
    code = inspect.getsource(transformers.models.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VLModel.get_rope_index)
    if "int(next(second_per_grid_ts))" in code:
        pytest.skip(f"transformers {transformers.__version__} cuts the seconds of Qwen2.5-VL, also of images (#45325)")


def rule_in_transformers(kind: str, config: Any, **given: Any) -> Tensor:
    """Return the ids that the class of a model computes from its configuration, without weights."""
    cls, _ = _class_of(kind)
    if kind == "qwen2_5_vl":
        require_seconds()
    model = cls.__new__(cls)
    torch.nn.Module.__init__(model)
    model.config = config
    return model.get_rope_index(**given)[0]


def batch_of(kind: str, rows: Sequence[Sequence[Part]], left: bool = False, seconds: float = 1.5) -> dict[str, Any]:
    """A batch as a processor makes it, without ids: tokens, their types, grids and padding."""
    merge_frames = 2 if kind in MERGED_FRAMES else 1
    types, grids = list[list[int]](), {1: list[Grid](), 2: list[Grid]()}
    for row in rows:
        of_row: list[int] = []
        for part in row:
            if isinstance(part, int):
                of_row += [0] * part
                continue
            modality, (frames, height, width) = part
            grids[modality].append((frames, height, width))
            if modality == 2 and kind in BY_FRAME:
                of_row += ([2] * (height * width // 4) + [0]) * frames  # a time stamp behind each frame
            else:
                taken = frames // merge_frames if modality == 2 else frames
                of_row += [modality] * (taken * height * width // 4)
        types.append(of_row)
    width = max(map(len, types))
    pads = [[0] * (width - len(row)) for row in types]
    kinds = torch.tensor([pad + row if left else row + pad for row, pad in zip(types, pads, strict=True)])
    ones = [[1] * len(row) for row in types]
    mask = torch.tensor([pad + one if left else one + pad for one, pad in zip(ones, pads, strict=True)])
    ids = torch.randint(3, 79, kinds.shape, generator=torch.Generator().manual_seed(0))
    ids = torch.where(mask == 0, 0, torch.where(kinds == 1, IMAGE, torch.where(kinds == 2, VIDEO, ids)))
    batch: dict[str, Any] = {"input_ids": ids, "mm_token_type_ids": kinds, "attention_mask": mask}
    for modality, name in ((1, "image_grid_thw"), (2, "video_grid_thw")):
        if grids[modality]:
            batch[name] = torch.tensor(grids[modality])
    if kind in IN_SECONDS and grids[2]:
        batch["second_per_grid_ts"] = torch.tensor([seconds] * len(grids[2]))
    return batch


def with_ids(kind: str, batch: dict[str, Any], config: Any = None) -> dict[str, Any]:
    """The batch with the ids that the model computes."""
    given = {name: value.clone() for name, value in batch.items()}  # some write into the grids
    config = _class_of(kind)[1] if config is None else config
    return {**batch, "position_ids": rule_in_transformers(kind, config, **given)}


def model_of(kind: str) -> Any:
    """The configuration of a class, whose tokens of images are those of the batches here."""
    config = _class_of(kind)[1].to_dict()
    return {**config, "image_token_id": IMAGE, "video_token_id": VIDEO}


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("kind", RULES)
def test_the_rule_is_equal_to_transformers(kind: str, left: bool) -> None:
    for rows in (IMAGES, VIDEOS):
        batch = with_ids(kind, batch_of(kind, rows, left))
        found = check_batch(batch, model=model_of(kind))
        assert (found, found.unchecked) == ((), ())
        assert check_batch(batch, axes=3) == ()  # what a model that is not named may mean
        assert check_batch({**batch, "position_ids": None}, model=model_of(kind)) == ()


@pytest.mark.slow
def test_every_model_with_a_rule_is_supported_or_listed() -> None:
    """A model of `transformers` that computes ids of several axes is here, or among those that are not compared."""
    folder = Path(transformers.__file__).parent / "models"
    code = {file.parent.name: file.read_text(encoding="utf-8") for file in folder.glob("*/modeling_*.py")}
    with_rule = {name for name, text in code.items() if "def get_rope_index(" in text}
    assert with_rule >= {"qwen2_vl", "hunyuan_vl"}
    assert with_rule - {*RULES, *OTHER_RULES} == set()
    for kind in sorted(with_rule & {*OTHER_RULES}):
        batch = {"input_ids": torch.ones(1, 4), "position_ids": torch.arange(4).expand(3, 1, 4)}
        found = check_batch(batch, axes=3, model={"model_type": kind})
        assert any(kind in each for each in found.unchecked)


def test_each_document_of_a_row_is_counted() -> None:
    """Trainers compute each document alone, and put a row of ids of text before the axes."""
    for kind in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"):
        alone = [with_ids(kind, batch_of(kind, [row])) for row in VIDEOS]
        joined = {name: torch.cat([one[name] for one in alone], -1)
                  for name in ("input_ids", "mm_token_type_ids", "position_ids")}  # fmt: skip
        text = torch.cat([torch.arange(one["input_ids"].shape[1]) for one in alone])[None, None]
        grids = {name: torch.cat([one[name] for one in alone if name in one])
                 for name in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
                 if any(name in one for one in alone)}  # fmt: skip
        packed = {**joined, **grids, "position_ids": torch.cat([text, joined["position_ids"]])}
        assert check_batch(packed, model=model_of(kind)) == ()
        found = check_batch({**packed, "position_ids": packed["position_ids"][1:]}, model=model_of(kind))
        assert any("no ids of text" in each for each in found)


def _text_by_tokens(ids: Tensor, types: Tensor) -> Tensor:
    last = int(types[0].nonzero()[-1])
    ids[:, 0, last + 1 :] = torch.arange(last + 1, types.shape[1])
    return ids


def _of(types: Tensor, change: Callable[[Tensor], Tensor], axis: int) -> Callable[[Tensor], Tensor]:
    def changed(ids: Tensor) -> Tensor:
        here = types[0] != 0
        ids[axis, 0, here] = change(ids[axis, 0, here])
        return ids

    return changed


def _cases(types: Tensor) -> dict[str, tuple[Callable[[Tensor], Tensor], str]]:
    count = types.shape[1]
    return {
        "flattened": (lambda ids: torch.arange(count).expand(3, 1, count).clone(), "counted as text"),
        "flattened to one axis": (lambda ids: torch.arange(count)[None], "counted as text"),
        "time times four": (_of(types, lambda time: time * 4, 0), "time"),
        "time by tokens": (lambda ids: torch.cat([torch.arange(count)[None, None], ids[1:]]), "time"),
        "rows of zeros": (_of(types, torch.zeros_like, 1), "row"),
        "columns of zeros": (_of(types, torch.zeros_like, 2), "column"),
        "rows and columns exchanged": (lambda ids: ids[[0, 2, 1]], "rows and columns are exchanged"),
        "time and rows exchanged": (lambda ids: ids[[1, 0, 2]], "row"),
        "text by tokens": (lambda ids: _text_by_tokens(ids, types), "text continues from the longer side"),
        "all one further": (_of(types, lambda ids: ids + 1, 1), "row"),
        "one token's": (lambda ids: ids + (torch.arange(count) == count - 1), "text"),
    }


FORMS = ("columns of zeros", "rows and columns exchanged", "rows of zeros", "text by tokens", "time by tokens")
"""No texts and grids have such ids. Others are those of other grids, and found beside their own alone."""


@pytest.mark.parametrize("rows", [IMAGES, VIDEOS[:1]], ids=["images", "videos"])
@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_ids_that_differ_from_the_grids_do_harm_and_are_found(kind: str, rows: list[list[Part]]) -> None:
    model = tiny(kind)
    batch = batch_of(kind, rows)
    if kind == "qwen2_5_vl":
        require_seconds()
    own = model.model.get_rope_index(**{name: value.clone() for name, value in batch.items()})[0]
    batch = {**batch, "position_ids": own}
    tokens = batch["input_ids"].shape[1]
    expected = logits(model, _without_grids(batch), [(0, slice(0, tokens))])
    assert check_batch(batch, model=model) == ()
    for name, (change, words) in _cases(batch["mm_token_type_ids"]).items():
        wrong = {**batch, "position_ids": change(own.clone())}
        got = logits(model, _without_grids(wrong), [(0, slice(0, tokens))])
        assert float((got - expected).abs().max()) > DIFFERENT, name
        asked: list[dict[str, Any]] = [{"model": model}, {"model": model.config}, {"axes": 3}]
        for options in asked:
            found = check_batch(wrong, **options)
            assert len(found) == 1, (name, found)
            assert words in found[0], (name, found)
        without = _without_grids(wrong)
        assert check_batch({**without, "position_ids": own}, axes=3) == ()
        if name in FORMS:
            assert len(check_batch(without, axes=3)) == 1, name


def _without_grids(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs of the language model, where images are ordinary tokens."""
    return {name: batch[name] for name in ("input_ids", "position_ids", "attention_mask")}


def test_grids_and_types_of_another_batch_are_found() -> None:
    batch = with_ids("qwen2_vl", batch_of("qwen2_vl", IMAGES))
    model = model_of("qwen2_vl")
    types = batch["mm_token_type_ids"]
    wrong: dict[str, tuple[dict[str, Any], str]] = {
        "a grid too few": ({"image_grid_thw": batch["image_grid_thw"][:1]}, "no grid left"),
        "a grid too many": ({"image_grid_thw": torch.tensor([[1, 8, 8], [1, 4, 8], [1, 2, 2]])}, "1 more than"),
        "a larger grid": ({"image_grid_thw": torch.tensor([[1, 8, 8], [1, 8, 8]])}, "has 16"),
        "a grid on its side": ({"image_grid_thw": torch.tensor([[1, 8, 8], [1, 8, 4]])}, "by the rule of"),
        "a grid in another order": ({"image_grid_thw": batch["image_grid_thw"].flip(0)}, "has 16"),
        "types of text": ({"mm_token_type_ids": torch.zeros_like(types)}, "mm_token_type_ids are 0 at token 3"),
        "types of other tokens": ({"mm_token_type_ids": types.roll(1, 1)}, "mm_token_type_ids are 0 at token 3"),
        "neither ids nor types": ({"position_ids": None, "mm_token_type_ids": None}, "counts images as text"),
        "no ids and other grids": (
            {"position_ids": None, "image_grid_thw": batch["image_grid_thw"].flip(0)}, "has 16",
        ),
    }  # fmt: skip
    for name, (change, words) in wrong.items():
        found = check_batch({**batch, **change}, model=model)
        assert any(words in each for each in found), (name, found)
    by_tokens = {**batch, "mm_token_type_ids": None}
    assert (check_batch(by_tokens, model=model), check_batch(by_tokens, model=model).unchecked) == ((), ())


def test_unchecked_names_ids_that_cannot_be_compared() -> None:
    batch = with_ids("qwen2_vl", batch_of("qwen2_vl", IMAGES))
    for name, words in (
        ("image_grid_thw", "only their form was checked"),
        ("mm_token_type_ids", "which tokens belong"),
    ):
        assert any(words in each for each in check_batch({**batch, name: None}, axes=3).unchecked)
    flat = {**batch, "position_ids": torch.arange(batch["input_ids"].shape[1])[None]}
    assert check_batch(flat) == ()
    assert "depends on the model" in check_batch(flat).unchecked[0]
    assert check_batch(flat, model={"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}) == ()
    videos = with_ids("qwen2_5_vl", batch_of("qwen2_5_vl", VIDEOS))
    assert "any rule that fits" in check_batch(videos).unchecked[0]
    assert facts_of(model_of("qwen2_5_vl")).axes == 3
