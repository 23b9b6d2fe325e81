"""Compare the ids of images and videos with ids that the model's rule computes from the grids.

A document is a sequence of texts, images and videos, according to ``mm_token_type_ids`` (0, 1 and 2).
`Positions.multimodal` has the rule. Models differ in the distance of frames, and in whether a video is one grid or
several. Models with another rule are reported as not checked.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from locant.engines.batches.axes import form_findings
from locant.engines.batches.documents import documents_from_batch
from locant.engines.batches.finding import Batch, Finding, at, first_place
from locant.engines.batches.grid_rules import BY_FRAME, OTHER_RULES, GridRule
from locant.errors import LocantError
from locant.positions.batches import AXES, document_positions
from locant.positions.multimodal import Counting

GRIDS = ("image_grid_thw", "video_grid_thw")
TEXT, IMAGE, VIDEO = 0, 1, 2
KIND_NAMES = {IMAGE: "image", VIDEO: "video"}
USE_ROPE_INDEX = "compute them with the model's get_rope_index"


def has_grids(batch: Batch) -> bool:
    """Return whether the batch has images or videos."""
    return any(name in batch.tensors for name in GRIDS)


def rules_for(batch: Batch) -> Sequence[GridRule]:
    """Return the rule of the model, or all possible rules if there is no model."""
    if batch.facts.is_known:
        return () if batch.facts.rule is None else (batch.facts.rule,)
    sizes = [(merge, frames) for frames in (1, 2) for merge in (2, 1, 3, 4)]
    rules = [GridRule(merge=merge, merge_frames=frames) for merge, frames in sizes]
    if "video_grid_thw" not in batch.tensors:
        return [rule for rule in rules if rule.merge_frames == 1]
    rules += [GridRule(merge=merge, by_frame=True) for merge in (2, 1, 3, 4)]
    if "second_per_grid_ts" in batch.tensors:  # published models, the default of the class, and the Omni models
        rules += [GridRule(per_second=per_second) for per_second in (2, 4, 25)]
    return rules


Run = tuple[int, int]
"""The kind of consecutive tokens, and their number."""


class _Document(NamedTuple):
    """The tokens of one document: their row, their slots, and runs of text, image and video."""

    row: int
    slots: Int[Tensor, " tokens"]
    runs: Sequence[Run]


class _MisfitError(Exception):
    """The number of tokens of an image does not fit its grid."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


class _Grids:
    """The grids of a batch, in the order in which its tokens use them."""

    def __init__(self, batch: Batch, rule: GridRule) -> None:
        self.rule = rule
        self.left = {IMAGE: self._grids_in(batch, "image_grid_thw"), VIDEO: self._grids_in(batch, "video_grid_thw")}
        seconds = batch.tensors.get("second_per_grid_ts")
        steps = itertools.repeat(1.0) if seconds is None else iter(seconds.flatten().float().tolist())
        if rule.by_frame:
            self.left[VIDEO] = [(1, rows, columns) for frames, rows, columns in self.left[VIDEO] for _ in range(frames)]
        elif rule.per_second is not None:
            stepped = zip(self.left[VIDEO], steps, strict=False)
            self.left[VIDEO] = [(*grid, float(np.float32(rule.per_second * step))) for grid, step in stepped]

    @staticmethod
    def _grids_in(batch: Batch, name: str) -> list[tuple[Any, ...]]:
        return [] if name not in batch.tensors else [tuple(grid) for grid in batch.tensors[name].tolist()]

    def tokens_of(self, grid: Sequence[Any], kind: int) -> int:
        """Return the number of tokens of a grid."""
        frames, rows, columns = grid[:3]
        frames = frames // self.rule.merge_frames if kind == VIDEO and frames > 1 else frames
        return frames * (rows // self.rule.merge) * (columns // self.rule.merge)

    def take(self, kind: int, tokens: int, row: int, token: int) -> Iterator[tuple[Any, ...]]:
        """Yield the grids of these tokens, which begin at `token` of `row`, and remove them from `left`."""
        left = tokens
        while left > 0:
            grid = self.left[kind].pop(0) if self.left[kind] else None
            if grid is None or not 0 < (taken := self.tokens_of(grid, kind)) <= left:
                raise _MisfitError(self._misfit(grid, kind, left, row, token + tokens - left))
            yield grid
            left -= taken

    def require_none_left(self) -> None:
        """Raise `_MisfitError` if there are more grids than images and videos."""
        for kind, left in self.left.items():
            if left:
                wrong = f"{GRIDS[kind - 1]} has {len(left)} more than the batch has {KIND_NAMES[kind]}s"
                raise _MisfitError(Finding("images", wrong, f"give {GRIDS[kind - 1]} of this batch"))

    def _misfit(self, grid: Sequence[Any] | None, kind: int, left: int, row: int, token: int) -> Finding:
        what = f"{left} tokens of {KIND_NAMES[kind]} begin {at(row, token)}"
        name = GRIDS[kind - 1]
        if grid is None:
            return Finding(
                "images", f"{what}, and {name} has no grid left for them", f"give {name} of this batch", row, token
            )
        wrong = f"{what}, and the grid {tuple(grid[:3])} of {name} has {self.tokens_of(grid, kind)}"
        return Finding("images", wrong, f"give {name} of this batch, and mm_token_type_ids of these tokens", row, token)


def _types(batch: Batch) -> Int[Tensor, "rows tokens"] | None:
    """Return the type of each token (text, image or video), from the batch or from the model's ids of these tokens."""
    if "mm_token_type_ids" in batch.tensors:
        return batch.tensors["mm_token_type_ids"]
    image, video = (batch.facts.config.get(f"{kind}_token_id") for kind in ("image", "video"))
    ids = batch.tensors.get("input_ids")
    if (
        ids is None
        or not isinstance(image, int)
        or (batch.facts.name in BY_FRAME and "video_grid_thw" in batch.tensors)
    ):
        return None
    is_video = (ids == video) if isinstance(video, int) else torch.zeros_like(ids, dtype=torch.bool)
    return (ids == image).long() * IMAGE + is_video.long() * VIDEO


def image_findings(batch: Batch, axes: int | None) -> Iterator[Finding]:
    """Find ids that differ from the ids of the grids. Without grids, find ids that no grid can have."""
    if not rules_for(batch):
        return
    if not has_grids(batch):
        yield from form_findings(batch)
        return
    yield from _compare_types_with_tokens(batch)
    types = _types(batch)
    if batch.index is None:
        if axes == AXES and "mm_token_type_ids" not in batch.tensors:
            wrong = "there are grids, but neither position_ids nor mm_token_type_ids: the model counts images as text"
            yield Finding("images", wrong, "give mm_token_type_ids, as the processor makes them")
        elif types is not None and batch.facts.is_known:
            yield from _misfits(batch, types)
        return
    if types is None or batch.index.ndim != 3:  # `check` reports ids of one axis
        return
    documents = _documents(batch, types)
    tries = [
        _compare(batch, documents, rule, continue_from)
        for rule in rules_for(batch)
        for continue_from in ("sides", "largest")
    ]
    yield from min(tries, key=lambda tried: tried[0])[1]


def _misfits(batch: Batch, types: Tensor) -> Iterator[Finding]:
    """Find grids that do not fit the tokens, so that the model cannot compute ids."""
    grids = _Grids(batch, rules_for(batch)[0])
    try:
        for document in _documents(batch, types):
            _parts(document, grids)
        grids.require_none_left()
    except _MisfitError as error:
        yield error.finding


def _documents(batch: Batch, types: Tensor) -> list[_Document]:
    document = documents_from_batch(batch)
    numbers = torch.zeros(batch.shape, dtype=torch.int64) if document is None else document_positions(document)
    documents = list[_Document]()
    for row in range(batch.shape[0]):
        for number in numbers[row].unique_consecutive().tolist():
            slots = ((numbers[row] == number) & batch.real[row]).nonzero()[:, 0]
            kinds = itertools.groupby(kind if kind in KIND_NAMES else TEXT for kind in types[row, slots].tolist())
            documents += [_Document(row, slots, [(kind, len(list(run))) for kind, run in kinds])] if len(slots) else []
    return documents


def _parts(document: _Document, grids: _Grids) -> list[int | tuple[Any, ...]]:
    """Return a document in the form of `Positions.multimodal`."""
    parts, first = list[int | tuple[Any, ...]](), 0
    for kind, tokens in document.runs:
        where = document.row, int(document.slots[first])
        parts += [tokens] if kind == TEXT else grids.take(kind, tokens, *where)
        first += tokens
    return parts


def _compare(
    batch: Batch, documents: Sequence[_Document], rule: GridRule, continue_from: str
) -> tuple[int | float, list[Finding]]:
    """Return how many tokens have ids that do not follow the rule, and the finding about the first one."""
    assert batch.index is not None  # noqa: S101  # the caller has checked it
    counting = Counting(merge=rule.merge, merge_frames=rule.merge_frames, continue_from=continue_from, denominator=1)
    grids, wrong, first = _Grids(batch, rule), 0, list[Finding]()
    try:
        for document in documents:
            expected = torch.from_numpy(counting.document(_parts(document, grids)))
            index = batch.index[document.row, document.slots]
            shift = int((index[0] - expected[0]).min())  # a document may continue from the one before it
            differs = (index != expected + shift).any(1)
            wrong += int(differs.sum())
            if not first and bool(differs.any()):
                first = [_difference(index, expected + shift, document, batch.facts.name)]
        grids.require_none_left()
    except _MisfitError as error:
        return math.inf, [error.finding]
    except LocantError as error:
        return math.inf, [Finding("images", error.cause, "give grids of this batch")]
    return wrong, first


def _difference(index: Tensor, expected: Tensor, document: _Document, name: str) -> Finding:
    """Return a finding about the first token with a wrong id. It describes how the ids of its document differ."""
    differs = index != expected
    token = int(differs.any(1).long().argmax())
    kinds = torch.tensor([kind for kind, tokens in document.runs for _ in range(tokens)])
    axes = [axis for axis, differ in zip(("time", "row", "column"), differs.any(0).tolist(), strict=True) if differ]
    if bool((index == index[:, :1]).all()):
        how = "images are counted as text"
    elif bool((index[:, [0, 2, 1]] == expected).all()):
        how = "rows and columns are exchanged"
    elif int(kinds[token]) == TEXT:
        how = "text continues from the longer side of the image before it"
    else:
        how = f"the {' and the '.join(axes)} of the grid {'differs' if len(axes) == 1 else 'differ'}"
    what, slot = {TEXT: "text", **KIND_NAMES}[int(kinds[token])], int(document.slots[token])
    wrong = (
        f"position_ids {at(document.row, slot)} ({what}) are (time, row, column) {tuple(index[token].tolist())}, and"
    )
    wrong += f" by the rule of {name} {tuple(expected[token].tolist())}: {how}"
    return Finding("images", wrong, USE_ROPE_INDEX, document.row, slot)


def _compare_types_with_tokens(batch: Batch) -> Iterator[Finding]:
    """Find types of tokens that do not agree with the model's ids for images and videos."""
    types, ids = batch.tensors.get("mm_token_type_ids"), batch.tensors.get("input_ids")
    image, video = (batch.facts.config.get(f"{kind}_token_id") for kind in ("image", "video"))
    if types is None or ids is None or not isinstance(image, int) or not isinstance(video, int):
        return
    is_patch = (ids == image) | (ids == video)
    differ = (is_patch != ((types == IMAGE) | (types == VIDEO))) & batch.real
    if (place := first_place(differ)) is not None:
        row, token = place
        wrong = f"mm_token_type_ids are {int(types[row, token])} {at(row, token)}"
        wrong += f", and input_ids {int(ids[row, token])}"
        yield Finding("images", wrong, f"use 1 for tokens of images ({image}), 2 for videos ({video})", row, token)


def why_not_compared(batch: Batch, axes: int | None) -> str | None:
    """Return why ids of axes were not compared with a rule, or ``None`` if they were, or if there are none."""
    if batch.facts.name in OTHER_RULES:
        return f"ids of images: locant does not know the rule of {batch.facts.name}; compare with its get_rope_index"
    if has_grids(batch) and batch.index is not None and batch.index.ndim == 2 and axes is None:
        return (
            "whether images may be counted as text, which depends on the model: give the model, or its number of axes"
        )
    if batch.index is None or batch.index.ndim != 3:
        return None
    if batch.facts.is_known and batch.facts.rule is None:
        return f"ids of axes: locant does not know the rule of {batch.facts.name}"
    if not has_grids(batch):
        return "ids of axes by the model's rule: there are no grids, so only their form was checked"
    if _types(batch) is None:
        return "ids of axes: without mm_token_type_ids it is unknown which tokens belong to images"
    if not batch.facts.is_known and "video_grid_thw" in batch.tensors:
        return "the time of videos by the model's rule: without a model any rule that fits was accepted"
    return None
