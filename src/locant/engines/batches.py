"""Batches of trainers: documents packed into one row, and what is wrong with a batch that somebody else packed."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from locant.arguments import shown, whole
from locant.errors import InputError, LocantError, Remedy, ShapeError
from locant.positions import Positions
from locant.positions.batches import (
    AXES,
    BOUNDARIES,
    counted,
    documents_of_boundaries,
    documents_of_ids,
    ids_of,
    restarts,
)
from locant.positions.checks import integers

NO_TARGET = -100
ROWS = ("input_ids", "labels", "position_ids", "attention_mask")
LONGEST = ("max_length_q", "max_length_k")


def pack_documents(examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A ``collate_fn`` that packs the documents of a batch into one row, so that none sees another.

    Models of `transformers` read what it makes, with any attention implementation: ``input_ids``, ``labels``, which
    have no target at the first token of a document, and `Positions.to_batch`. Call them with ``use_cache=False``, as
    their trainer does: with a cache they do not look for documents, and each sees those before it.

    Args:
        examples: each with ``input_ids``, and with ``labels`` of the same length where they differ from these.

    >>> batch = pack_documents([{"input_ids": [5, 6]}, {"input_ids": [7, 8, 9]}])
    >>> batch["labels"], batch["position_ids"]
    (tensor([[-100,    6, -100,    8,    9]]), tensor([[0, 1, 0, 1, 2]]))
    """
    documents = [_document(example) for example in examples]
    positions = Positions.packed([len(ids) for ids, _ in documents])
    boundaries = positions.cu_seqlens()
    longest = max((len(ids) for ids, _ in documents), default=0)
    return {
        "input_ids": torch.cat([torch.zeros(0, dtype=torch.int64), *(ids for ids, _ in documents)])[None],
        "labels": torch.cat([torch.zeros(0, dtype=torch.int64), *(labels for _, labels in documents)])[None],
        "position_ids": positions.index,
        **dict.fromkeys(BOUNDARIES, boundaries),
        "max_length_q": longest,
        "max_length_k": longest,
    }


def _document(example: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The ids and the targets of one document, without its padding."""
    if not isinstance(example, Mapping) or example.get("input_ids") is None:
        got = f"got {shown(example)} for a document, expected a dictionary with input_ids"
        raise LocantError(got, '{"input_ids": [5, 6, 7]}')
    ids = integers("input_ids", example["input_ids"])
    labels = ids if example.get("labels") is None else integers("labels", example["labels"])
    mask = example.get("attention_mask")
    real = torch.ones_like(ids) if mask is None else torch.as_tensor(mask)
    if ids.ndim != 1 or not ids.shape == labels.shape == real.shape:
        got = (
            f"got input_ids of shape {tuple(ids.shape)}, labels of {tuple(labels.shape)}, a mask of {tuple(real.shape)}"
        )
        raise ShapeError(f"{got}, expected one number per token", "the ids of one document")
    ids, labels = ids[real != 0], labels[real != 0].clone()
    labels[:1] = NO_TARGET
    return ids, labels


def read_batch(path: Path | str) -> dict[str, Any]:
    """A batch from a file of safetensors, of NumPy's ``.npz``, or of JSON; a pickle is not opened.

    Raises:
        InputError: no such file, or none that can be read.
    """
    path, kinds = Path(path), "a batch saved as .safetensors, .npz or .json"
    if not path.is_file():
        raise InputError(f"got no file {path}", kinds)
    if path.suffix not in (".safetensors", ".npz", ".json"):
        raise InputError(f"got {path} of kind {path.suffix!r}", kinds)
    try:
        match path.suffix:
            case ".safetensors":
                batch: Any = load_file(path)
            case ".npz":
                with np.load(path, allow_pickle=False) as arrays:
                    batch = {name: torch.from_numpy(arrays[name]) for name in arrays}
            case _:
                batch = json.loads(path.read_bytes())
        numbers = (int, torch.Tensor, list)
        if not isinstance(batch, dict) or not all(isinstance(value, numbers) for value in batch.values()):
            raise ValueError("it holds other things than arrays by name")
        return {name: torch.as_tensor(value) for name, value in batch.items()}
    except (SafetensorError, OSError, ValueError, TypeError, RuntimeError, zipfile.BadZipFile) as error:
        raise InputError(
            f"got {path}, which is no batch that can be read: {error}", "a file of arrays by name"
        ) from None


def check_batch(batch: Mapping[str, Any], *, axes: int = 1) -> tuple[str, ...]:
    """What is wrong with the positions and documents of a batch, in words; nothing: it is consistent.

    Args:
        batch: as a model of `transformers` is called with: ``input_ids``, ``position_ids``, ``attention_mask``,
            ``labels``, ``cu_seq_lens_q`` and ``cu_seq_lens_k``, ``max_length_q`` and ``max_length_k``, as far as there.
        axes: 3 for models with positions of time, rows and columns, such as Qwen2-VL.

    >>> check_batch({"input_ids": torch.ones(1, 5), "position_ids": torch.tensor([[0, 1, 2, 3, 4]])})
    ()
    """
    whole("axes", axes, 1, AXES, remedy=Remedy("{} for Qwen2-VL and its kin", axes=3))
    return tuple(_findings(_read(batch), axes))


def _read(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """What says something of positions and documents, each with a row for each row of the batch."""
    if not isinstance(batch, Mapping):
        raise LocantError(f"got {shown(batch)} for batch, expected a dictionary", "the keywords of a model's call")
    tensors = dict[str, Tensor]()
    for name in (*ROWS, *BOUNDARIES, *LONGEST):
        if batch.get(name) is not None:
            try:
                tensor = torch.as_tensor(batch[name])
            except (TypeError, ValueError, RuntimeError):
                got = f"got {shown(batch[name])} for {name}, expected numbers"
                raise LocantError(got, "a tensor, one row for each row of the batch") from None
            if (tensor.ndim == 0 and name in ROWS) or (tensor.numel() != 1 and name in LONGEST):
                one = "one number" if name in LONGEST else "a number for each token"
                raise LocantError(f"got {shown(batch[name])} for {name}, expected {one}", "locant check-batch --help")
            tensors[name] = tensor[None] if name in ROWS and tensor.ndim == 1 else tensor
    if not tensors:
        got = f"got a batch with {', '.join(map(str, batch)) or 'nothing'}"
        raise LocantError(f"{got}, which says nothing of tokens and positions", f"{', '.join(ROWS)} in it")
    return tensors


def _findings(batch: Mapping[str, Tensor], axes: int) -> Iterator[str]:
    mask = batch.get("attention_mask")
    given = (batch.get("input_ids"), batch.get("labels"), mask if mask is not None and mask.ndim == 2 else None)
    shape = next((tensor.shape[:2] for tensor in given if tensor is not None), None)
    text = None
    if "position_ids" in batch:
        try:
            text, index = ids_of(batch["position_ids"])
        except LocantError as error:
            yield str(error)
            return
        if shape is not None and (index.shape[1] != shape[1] or index.shape[0] not in (1, shape[0])):
            of_ids, of_batch = (f"{rows} x {tokens}" for rows, tokens in (index.shape[:2], shape))
            yield f"position_ids are for {of_ids} tokens, and the batch has {of_batch}"
            return
        shape = index.shape[:2] if shape is None else shape
        if axes > 1 and index.ndim == 2:
            yield f"position_ids have one axis, and the model has {axes}: images are counted as text"
        text = None if index.ndim == 3 and len(batch["position_ids"]) == AXES else text
        text = text if text is None else text.expand(shape[0], -1)
    for name in ("labels", "attention_mask"):
        one_per_token = name in batch and (name == "labels" or batch[name].ndim == 2)
        if one_per_token and shape is not None and batch[name].shape != shape:
            yield f"{name} are of {tuple(batch[name].shape)}, and the batch of {tuple(shape)}"
            return
    if mask is not None and mask.ndim == 2:
        yield from _of_mask(mask, text)
        if "labels" in batch and bool(((mask == 0) & (batch["labels"] != NO_TARGET)).any()):
            yield "labels have targets at padding"
    documents = None
    for name in BOUNDARIES:
        if name in batch:
            try:
                documents = documents_of_boundaries(batch[name], None if shape is None else shape[0] * shape[1])
            except LocantError as error:
                yield str(error).replace(BOUNDARIES[0], name)
                return
            yield from _of_lengths(batch, name)
    if documents is not None and text is not None:
        differ = documents_of_ids(text.reshape(1, -1)) != documents
        if bool(differ.any()):
            slot = int(differ[0].nonzero()[0])
            yield f"position_ids and {BOUNDARIES[0]} tell different documents from token {slot} on"
    if axes > 1 and documents is not None and text is None:
        yield "position_ids have no ids of text before those of the axes, in which the model looks for documents"
    found = documents_of_ids(text) if documents is None and text is not None and mask is None else documents
    if found is not None and "labels" in batch:
        yield from _of_labels(batch["labels"].reshape(found.shape), found)


def _of_mask(mask: Tensor, text: Tensor | None) -> Iterator[str]:
    if bool((mask > 1).any()):
        yield "attention_mask numbers documents, and code that looks for ones sees the first alone"
    elif text is not None and text.shape == mask.shape and restarts(text, (mask != 0).long() - 1):
        yield "attention_mask stands beside ids of several documents: models then do not look for documents in the ids"


def _of_lengths(batch: Mapping[str, Tensor], name: str) -> Iterator[str]:
    other, longest = BOUNDARIES[1 - BOUNDARIES.index(name)], f"max_length_{name[-1]}"
    ends = batch[name]
    if other not in batch:
        yield f"{name} is there and {other} is not: both are needed"
    elif name == BOUNDARIES[0] and not torch.equal(ends, batch[other]):
        yield f"{name} and {other} differ: tokens would see those of other documents"
    if longest in batch and int(batch[longest]) < int(ends.diff().max()):
        yield f"{longest} is {int(batch[longest])}, and a document has {int(ends.diff().max())} tokens"


def _of_labels(labels: Tensor, documents: Tensor) -> Iterator[str]:
    begins = counted(documents).diff(dim=1) != 0
    leaking = begins & (labels[:, 1:] != NO_TARGET)
    if bool(leaking.any()):
        row, slot = (int(each) for each in leaking.nonzero()[0])
        place = f"token {slot + 1} of row {row}"
        yield f"labels have a target at {place}, the first of a document, which is predicted from another document"
