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

from locant.errors import InputError, LocantError, ShapeError
from locant.positions import Positions
from locant.positions.batches import BOUNDARIES, counted, documents_of_boundaries, documents_of_ids, ids_of

__all__ = ["check_batch", "pack_documents", "read_batch"]

NO_TARGET = -100


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
    documents = [torch.as_tensor(example["input_ids"], dtype=torch.int64) for example in examples]
    labels = [
        torch.as_tensor(example.get("labels", ids)).clone() for example, ids in zip(examples, documents, strict=True)
    ]
    for ids, targets in zip(documents, labels, strict=True):
        if ids.ndim != 1 or ids.shape != targets.shape:
            got = f"got input_ids of shape {tuple(ids.shape)} and labels of shape {tuple(targets.shape)}"
            raise ShapeError(f"{got}, expected one number per token", "the ids of one document, unpadded")
        targets[:1] = NO_TARGET
    positions = Positions.packed([len(ids) for ids in documents])
    return {"input_ids": torch.cat(documents)[None], "labels": torch.cat(labels)[None], **positions.to_batch()}


def read_batch(path: Path | str) -> dict[str, Any]:
    """A batch from a file of safetensors, of NumPy's ``.npz``, or of JSON; a pickle is not opened.

    Raises:
        InputError: no such file, or none that can be read.
    """
    path = Path(path)
    try:
        match path.suffix:
            case ".safetensors":
                batch: Any = load_file(path)
            case ".npz":
                with np.load(path, allow_pickle=False) as arrays:
                    batch = {name: torch.from_numpy(arrays[name]) for name in arrays}
            case ".json":
                batch = json.loads(path.read_bytes())
            case suffix:
                raise InputError(f"got {path} of kind {suffix!r}", "a batch saved as .safetensors, .npz or .json")
        numbers = (int, torch.Tensor, list)
        if not isinstance(batch, dict) or not all(isinstance(value, numbers) for value in batch.values()):
            raise ValueError("it holds other things than arrays by name")
        return {name: torch.as_tensor(value) for name, value in batch.items()}
    except (SafetensorError, OSError, ValueError, TypeError, zipfile.BadZipFile) as error:
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
    return tuple(_findings({key: value for key, value in batch.items() if value is not None}, axes))


def _findings(batch: Mapping[str, Any], axes: int) -> Iterator[str]:
    shape = next((torch.as_tensor(batch[name]).shape[:2] for name in ("input_ids", "labels") if name in batch), None)
    text = None
    if "position_ids" in batch:
        try:
            text, index = ids_of(batch["position_ids"])
        except LocantError as error:
            yield str(error)
            return
        if shape is not None and index.shape[1] != shape[1]:
            yield f"position_ids are for {index.shape[1]} tokens, and the batch has {shape[1]}"
            return
        ids = torch.as_tensor(batch["position_ids"])
        if axes > 1 and index.ndim == 2:
            yield f"position_ids have one axis, and the model has {axes}: images are counted as text"
        text = None if index.ndim == 3 and ids.shape[0] == 3 else text
    mask = torch.as_tensor(batch["attention_mask"]) if "attention_mask" in batch else None
    if mask is not None and mask.ndim == 2:
        yield from _of_mask(mask, text, shape)
    documents = None
    for name in BOUNDARIES:
        if name in batch:
            try:
                documents = documents_of_boundaries(batch[name], None if shape is None else shape[0] * shape[1])
            except LocantError as error:
                yield str(error).replace(BOUNDARIES[0], name)
                return
            yield from _of_lengths(batch, name)
    if documents is not None and text is not None and not torch.equal(documents_of_ids(text.reshape(1, -1)), documents):
        slot = int((documents_of_ids(text.reshape(1, -1)) != documents)[0].nonzero()[0])
        yield f"position_ids and {BOUNDARIES[0]} tell different documents from token {slot} on"
    if axes > 1 and documents is not None and text is None:
        yield "position_ids have no ids of text before those of the axes, in which the model looks for documents"
    found = documents_of_ids(text) if documents is None and text is not None else documents
    if found is not None and "labels" in batch:
        yield from _of_labels(torch.as_tensor(batch["labels"]).reshape(found.shape), found)


def _of_mask(mask: Tensor, text: Tensor | None, shape: Sequence[int] | None) -> Iterator[str]:
    if shape is not None and mask.shape[1] != shape[1]:
        yield f"attention_mask is for {mask.shape[1]} tokens, and the batch has {shape[1]}"
        return
    if bool((mask > 1).any()):
        yield "attention_mask numbers documents, and code that looks for ones sees the first alone"
    elif text is not None and bool((documents_of_ids(text) * (mask != 0)).any()) and _restarts(text, mask):
        yield "attention_mask stands beside ids of several documents: models then do not look for documents in the ids"


def _restarts(text: Tensor, mask: Tensor) -> bool:
    """Whether an id falls between two tokens that are no padding."""
    real = (mask[:, 1:] != 0) & (mask[:, :-1] != 0)
    return bool(((text.diff(dim=1) <= 0) & real).any())


def _of_lengths(batch: Mapping[str, Any], name: str) -> Iterator[str]:
    other, longest = BOUNDARIES[1 - BOUNDARIES.index(name)], f"max_length_{name[-1]}"
    ends = torch.as_tensor(batch[name])
    if other not in batch:
        yield f"{name} is there and {other} is not: both are needed"
    elif name == BOUNDARIES[0] and not torch.equal(ends, torch.as_tensor(batch[other])):
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
