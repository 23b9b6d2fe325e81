"""Check that the tensors of a batch agree about positions and documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from locant.arguments import short_repr, whole
from locant.engines.batches.documents import (
    boundary_findings,
    documents_from_batch,
    label_findings,
    mixing_findings,
    only_flash_separates,
    only_ids_separate,
    other_findings,
)
from locant.engines.batches.finding import Batch, Finding
from locant.engines.batches.ids import counts_padding, id_findings, padding_findings
from locant.engines.batches.images import GRIDS, has_grids, image_findings, why_not_compared
from locant.engines.batches.masks import (
    future_findings,
    future_unchecked,
    inverted_findings,
    mask_findings,
    read_mask,
)
from locant.engines.batches.model import ModelFacts, Source, facts_of
from locant.errors import LocantError, Remedy
from locant.position_costs import rank
from locant.positions.batches import AXES, BOUNDARIES, split_position_ids

ROWS = ("input_ids", "labels", "position_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "seq_idx")
PER_TOKEN = ("labels", "token_type_ids", "mm_token_type_ids", "seq_idx")
SINGLE = ("max_length_q", "max_length_k", "use_cache")
MOST_AXES = 4
"""The largest number of axes, which HunYuan-VL has."""


class Findings(tuple[Finding, ...]):
    """The mistakes in a batch, one sentence each. Empty if there are none.

    Args:
        findings: the sentences.
        unchecked: sentences about the checks that could not run, and the reasons.
    """

    unchecked: tuple[str, ...]

    def __new__(cls, findings: Iterable[Finding], unchecked: Iterable[str] = ()) -> Findings:
        new = super().__new__(cls, findings)
        new.unchecked = tuple(unchecked)
        return new

    def __str__(self) -> str:
        lines = [*(self or ["positions and documents agree"]), *(f"not checked: {why}" for why in self.unchecked)]
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        return Findings, (tuple(self), self.unchecked)


def check_batch(batch: Mapping[str, Any], *, axes: int | None = None, model: Source | None = None) -> Findings:
    """Find mistakes in the positions and documents of a batch. The result is empty if the batch is consistent.

    A mistake whose cost was measured in trained models states it. The most costly comes first, after the mistakes
    whose cost is unknown.

    Much depends on the model: whether padding shifts positions, how many ids there are, how images are counted.
    ``unchecked`` in the result lists the checks that need a model. Without an attention mask, padding is found only
    with a model, which has the id of padding. If there is a mask, the check relies on it.

    Args:
        batch: the arguments of a call of a model of `transformers`. The check reads ``input_ids``, ``position_ids``,
            ``attention_mask``, ``labels``, ``token_type_ids``, ``cu_seq_lens_q`` and ``cu_seq_lens_k``,
            ``max_length_q`` and ``max_length_k``, ``seq_idx``, ``image_grid_thw``, ``video_grid_thw``,
            ``second_per_grid_ts`` and ``mm_token_type_ids``, if present.
        axes: 3 for models with positions of time, rows and columns, such as Qwen2-VL. Default: the axes of the model.
        model: the model, its configuration, its folder, or the name of a preset such as ``"gpt2"``.

    Raises:
        LocantError: `batch` is not a mapping with tokens or positions, one of its values is not a tensor of numbers, or
            `model` is of another type. Tensors whose shapes do not fit are findings.
        InputError: the configuration of `model` cannot be read.
        RangeError: `axes` is out of range.

    >>> check_batch({"input_ids": torch.ones(1, 5), "position_ids": torch.tensor([[0, 1, 2, 3, 4]])})
    ()
    >>> left = {"input_ids": torch.ones(1, 3), "attention_mask": torch.tensor([[0, 1, 1]])}
    >>> check_batch(left, model="gpt2")[0].remedy
    'give Positions.from_mask(attention_mask).index for position_ids'
    """
    if axes is not None:
        axes = whole("axes", axes, 1, MOST_AXES, remedy=Remedy("{} for models like Qwen2-VL", axes=AXES))
    facts = facts_of(model)
    tensors = _read(batch)
    axes = axes or facts.axes
    try:
        read = _arrange(tensors, axes, facts)
    except _MisshapenError as error:
        return Findings(error.findings)
    findings = sorted(_findings(read, axes), key=lambda finding: rank(finding.kind))
    return Findings(findings, _find_unchecked(read, axes))


class _MisshapenError(Exception):
    """Tensors whose shapes do not fit each other, which ends the check."""

    def __init__(self, *findings: Finding) -> None:
        super().__init__(*findings)
        self.findings = findings


def _read(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors about positions and documents, with a row for each row of the batch."""
    if not isinstance(batch, Mapping):
        got = f"got {short_repr(batch)} for batch, expected a dictionary"
        raise LocantError(got, "pass the keyword arguments of a model's call")
    tensors = dict[str, Tensor]()
    for name in (*ROWS, *BOUNDARIES, *SINGLE, *GRIDS, "second_per_grid_ts"):
        value = batch.get(name)
        if name == "attention_mask" and isinstance(value, Mapping):  # a mask for each kind of layers
            value = value.get("full_attention", next(iter(value.values()), None))
        if value is not None:
            tensors[name] = _tensor(name, value)
    if not tensors.keys() - {"use_cache"}:
        got = f"got a batch with {', '.join(map(str, batch)) or 'nothing'}"
        raise LocantError(f"{got}, without tokens and positions", f"add {', '.join(ROWS[:4])}")
    return tensors


def _tensor(name: str, value: Any) -> Tensor:
    try:
        tensor = torch.as_tensor(value).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        got = f"got {short_repr(value)} for {name}, expected numbers"
        raise LocantError(got, "pass a tensor with one row for each row of the batch") from None
    if (tensor.ndim == 0 and name in ROWS) or (tensor.numel() != 1 and name in SINGLE):
        one = "one number" if name in SINGLE else "a number for each token"
        raise LocantError(f"got {short_repr(value)} for {name}, expected {one}", "see locant check-batch --help")
    if name in GRIDS and (tensor.ndim != 2 or tensor.shape[1] != AXES or tensor.is_floating_point()):
        got = f"got {name} of shape {tuple(tensor.shape)}, expected frames, rows and columns of each"
        raise LocantError(got, f"pass {name} as the processor makes it")
    return tensor[None] if name in ROWS and tensor.ndim == 1 else tensor


def _shape(message: str, remedy: str) -> _MisshapenError:
    return _MisshapenError(Finding("shape", message, remedy))


def _arrange(tensors: Mapping[str, Tensor], axes: int | None, facts: ModelFacts) -> Batch:
    """Return the `Batch` for the checks. Raise `_MisshapenError` if shapes do not fit each other."""
    mask = tensors.get("attention_mask")
    if mask is not None and mask.ndim not in (2, 4):
        raise _shape(f"attention_mask has {mask.ndim} axes", "use (batch, seq), or (batch, heads or 1, seq, seq)")
    if "input_ids" in tensors and tensors["input_ids"].ndim != 2:
        raise _shape(
            f"input_ids are of {tuple(tensors['input_ids'].shape)}", "give a number for each token, (batch, seq)"
        )
    per_token = (tensors.get("input_ids"), tensors.get("labels"), mask if mask is not None and mask.ndim == 2 else None)
    shape = next((tensor.shape[:2] for tensor in per_token if tensor is not None), None)
    text, index = None, None
    if "position_ids" in tensors:
        text, index, shape = _ids(tensors["position_ids"], shape, axes)
    if shape is None and mask is not None:
        shape = torch.Size((mask.shape[0], mask.shape[3]))
    if shape is None and (ends := next((tensors[name] for name in BOUNDARIES if name in tensors), None)) is not None:
        shape = torch.Size((1, int(ends.flatten()[-1]) if ends.numel() else 0))
    if shape is None:
        shape = next((tensors[name].shape[:2] for name in PER_TOKEN if name in tensors), torch.Size((0, 0)))
    for name in PER_TOKEN:
        if name in tensors and tensors[name].shape != shape:
            remedy = "give a number for each token"
            raise _shape(f"{name} are of {tuple(tensors[name].shape)}, and the batch of {tuple(shape)}", remedy)
    real, visible = torch.ones(shape, dtype=torch.bool), None
    if mask is not None:
        fits = mask.shape == shape if mask.ndim == 2 else _fits(mask, shape)
        if not fits:
            wrong = f"attention_mask are of {tuple(mask.shape)}, and the batch of {tuple(shape)}"
            raise _shape(wrong, "give a number for each token, or for each query and key")
        real, visible = read_mask(mask)
        real = real.expand(shape)
        visible = None if visible is None else visible.expand(shape[0], -1, -1)
    return Batch(tensors=tensors, shape=shape, text=text, index=index, real=real, visible=visible, facts=facts)


def _fits(mask: Tensor, shape: torch.Size) -> bool:
    """Return whether a mask of four axes fits these tokens."""
    return mask.shape[0] in (1, shape[0]) and mask.shape[2:] == (shape[1], shape[1])


def _ids(ids: Tensor, shape: torch.Size | None, axes: int | None) -> tuple[Tensor | None, Tensor, torch.Size]:
    """Return the ids of text, the ids of all axes, and the numbers of rows and tokens."""
    try:
        text, index = split_position_ids(ids)
    except LocantError as error:
        raise _MisshapenError(
            Finding("shape", error.cause, "give (batch, seq), or (3 or 4, batch, seq) for images")
        ) from None
    if ids.ndim == 3 and len(ids) == axes == MOST_AXES:  # all of them are axes
        text, index = None, ids.long().movedim(0, -1)
    if shape is not None and (index.shape[1] != shape[1] or index.shape[0] not in (1, shape[0])):
        ids_size, batch_size = (f"{rows} x {tokens}" for rows, tokens in (index.shape[:2], shape))
        wrong = f"position_ids are for {ids_size} tokens, and the batch has {batch_size}"
        raise _shape(wrong, "make them of the same tokens, padding included")
    shape = index.shape[:2] if shape is None else shape
    text = None if text is None or (ids.ndim == 3 and len(ids) == AXES) else text.expand(shape)
    return text, index.expand(*shape, *index.shape[2:]), torch.Size(shape)


def _findings(batch: Batch, axes: int | None) -> Iterator[Finding]:
    mask = batch.tensors.get("attention_mask")
    if mask is not None:
        yield from mask_findings(mask, batch.facts)
        if inverted := list(inverted_findings(batch)):
            yield from inverted
            return  # the intended meaning of the mask is unknown
        yield from future_findings(batch)
    yield from _axes_findings(batch, axes)
    yield from id_findings(batch)
    yield from mixing_findings(batch)
    misread = list(boundary_findings(batch))
    yield from misread
    if batch.has_boundaries and any(finding.check == "lengths" for finding in misread):
        return  # the intended meaning of the lengths is unknown
    yield from padding_findings(batch)
    yield from label_findings(batch)
    yield from other_findings(batch)
    yield from image_findings(batch, axes)


def _axes_findings(batch: Batch, axes: int | None) -> Iterator[Finding]:
    index = batch.index
    if index is None or axes is None:
        return
    num_axes = index.shape[2] if index.ndim == 3 else 1
    if num_axes == 1 < axes:
        wrong = f"position_ids have one axis, and the model has {axes}: images are counted as text"
        if has_grids(batch) or not batch.facts.is_known:
            yield Finding("axes", wrong, "compute them with the model's get_rope_index")
    elif num_axes > 1 and num_axes != axes and batch.facts.is_known:
        wrong = f"position_ids have {num_axes} axes, and {batch.facts.name} has {axes}"
        yield Finding("axes", wrong, "give (batch, seq)" if axes == 1 else f"give ({axes}, batch, seq)")


def _find_unchecked(batch: Batch, axes: int | None) -> Iterator[str]:
    """Yield a sentence about each check that could not run, with the reason."""
    facts = batch.facts
    if facts.adds_positions is None and counts_padding(batch):
        why = f"{facts.name} may be one ({facts.doubt})" if facts.doubt else "give the model"
        yield f"padding before tokens, which models with absolute positions count (GPT-2): {why}"
    document = documents_from_batch(batch)
    if document is not None and facts.attention is None and only_flash_separates(document, batch):
        yield "documents in cu_seq_lens_q, which only FlashAttention reads: give the model"
    several = document is not None and bool((document.diff(dim=1) != 0).any())
    if several and batch.shape[0] > 1 and facts.attention is None and not batch.has_boundaries and not batch.has_mask:
        yield "documents in several rows, which only sdpa and eager attention look for, not FlashAttention"
    if facts.makes_cache and "use_cache" not in batch.tensors and only_ids_separate(batch):
        yield "whether a cache is made, because then a model looks for no documents in ids: set use_cache=False"
    for why in (future_unchecked(batch), why_not_compared(batch, axes)):
        if why is not None:
            yield why
