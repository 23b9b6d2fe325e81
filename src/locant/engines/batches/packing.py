"""Documents packed into one row, as models of `transformers` read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from locant.arguments import short_repr
from locant.engines.batches.finding import NO_TARGET
from locant.errors import LocantError, ShapeError
from locant.positions import Positions
from locant.positions.batches import BOUNDARIES
from locant.positions.checks import to_int64


def pack_documents(examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Pack the documents of a batch into one row, in which no document sees another. Use it as a ``collate_fn``.

    The result works with models of `transformers` and any attention implementation. It has ``input_ids``, ``labels``
    without a target at the first token of a document, and the keys of `Positions.to_batch`. Call the model with
    ``use_cache=False``, as the trainer does. With a cache, the model does not look for documents, so each document sees
    the earlier documents.

    Args:
        examples: dictionaries with ``input_ids``, and with ``labels`` of the same length if they differ from these.

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
    """Return the ids and the targets of one document, without its padding."""
    if not isinstance(example, Mapping) or example.get("input_ids") is None:
        got = f"got {short_repr(example)} for a document, expected a dictionary with input_ids"
        raise LocantError(got, '{"input_ids": [5, 6, 7]}')
    ids = to_int64("input_ids", example["input_ids"])
    labels = ids if example.get("labels") is None else to_int64("labels", example["labels"])
    mask = example.get("attention_mask")
    real = torch.ones_like(ids) if mask is None else torch.as_tensor(mask)
    if ids.ndim != 1 or not ids.shape == labels.shape == real.shape:
        got = (
            f"got input_ids of shape {tuple(ids.shape)}, labels of {tuple(labels.shape)}, a mask of {tuple(real.shape)}"
        )
        raise ShapeError(f"{got}, expected one number per token", "pass the ids of one document")
    ids, labels = ids[real != 0], labels[real != 0].clone()
    labels[:1] = NO_TARGET
    return ids, labels
