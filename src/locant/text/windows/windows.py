"""`Windows`: sliding windows over a text's token ids, as inputs and targets for training and evaluation.

A window holds `length` inputs, and for each input its target, the next id. If ``stride == length``, every target of the
text, ``ids[1:]``, is in exactly one window. The last window is padded on the right. In padding the target is -100
(which `torch.nn.functional.cross_entropy` ignores), the input is `pad_id`, and the position is padding (document -1).

No window is made in advance. Building `Windows` has no cost per token, a memory-mapped array stays on disk, and ids are
widened to int64 only when they are read.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal, SupportsIndex, get_args

import numpy as np
from jaxtyping import Int, Integer
from torch import Tensor
from torch.utils.data import Dataset

from locant.arguments import flag, one_of, whole
from locant.errors import InputError, RangeError
from locant.text.store import TokenStore
from locant.text.windows.layouts import Batch, BatchOfWindows, DocumentWindows, Packing, collate, document_offsets
from locant.text.windows.loader import BatchSampler, Loader
from locant.text.windows.tokens import tokens_of

Mode = Literal["flat", "document", "packed"]


class Windows(Dataset[Any]):
    """A map-style dataset of sliding windows over token ids.

    Args:
        store_or_ids: a `TokenStore`, NumPy array, memory-mapped array, tensor or list of integers. Only a list is
            copied.
        length: number of inputs per window.
        stride: tokens between the starts of consecutive windows. Default: `length`. A smaller stride makes windows
            overlap, and a larger stride skips the targets between them. Packed rows have no stride.
        mode: ``"flat"`` reads the whole text as one document. ``"document"`` keeps each window within one document.
            ``"packed"`` fills each row with as many documents, or last pieces of documents, as fit. No target crosses
            documents, and no target occurs twice. A document longer than `length` is cut as in document mode.
        documents: the start of each document, and the end: n + 1 offsets for n documents, from 0 to the number of ids.
            Default: the documents of the store. A document of fewer than two tokens has no target and no window.
        drop_last: drop the windows that would have to be padded: the last window of the text, or of each document. Not
            allowed for packed rows, which are hardly ever full.
        pad_id: the input id of padding. No token attends to it, but the embedding looks it up.
        as_tuple: return a window or a batch as a pair ``(inputs, targets)`` instead of a dict. Without positions a
            model counts from 0 and attends causally, which is wrong for packed rows, so they reject this option.

    A window or a batch is a dict of ``ids``, ``targets`` and ``positions``, for `locant.attend` and every encoding.
    Positions count from 0 in each window (in document mode, too), and in each piece of a packed row, because
    tokens cannot attend to tokens before their window or piece. So a table of `length` positions suffices. In a batch,
    positions have one row if no window is padded, else one row per window.

    Raises:
        InputError: there are fewer than two tokens, or no windows, or the documents do not fit the ids.
        RangeError: a length or stride is below 1, the mode is unknown, or ``as_tuple`` is given with packed rows. On
            reading: an id is negative. ShapeError: the ids are not one axis of integers.

    Building needs one or two integers of memory per document, and three for packed rows. `Windows` can be pickled for
    the workers of a `DataLoader`. A store, or a contiguous part of a memory-mapped file, is not sent, but opened again
    by its name.

    >>> windows = Windows([10, 11, 12, 13, 14, 15], length=4)
    >>> len(windows), windows[0]["ids"].tolist(), windows[0]["targets"].tolist()
    (2, [10, 11, 12, 13], [11, 12, 13, 14])
    >>> windows[1]["ids"].tolist(), windows[1]["targets"].tolist(), windows[1]["positions"].document.tolist()
    ([14, 0, 0, 0], [15, -100, -100, -100], [[0, -1, -1, -1]])

    Batches come from `loader` or from a `torch.utils.data.DataLoader`, as dicts or as pairs:

    >>> from torch.utils.data import DataLoader
    >>> for batch in windows.loader(batch_size=2):
    ...     batch["ids"].shape, batch["targets"].shape
    (torch.Size([2, 4]), torch.Size([2, 4]))
    >>> overlapping = Windows([10, 11, 12, 13, 14, 15], length=4, stride=1, drop_last=True, as_tuple=True)
    >>> for inputs, targets in DataLoader(overlapping, batch_size=2, shuffle=False, drop_last=True):
    ...     inputs.tolist(), targets.tolist()
    ([[10, 11, 12, 13], [11, 12, 13, 14]], [[11, 12, 13, 14], [12, 13, 14, 15]])

    Packed documents have separate positions and attention masks in one row:

    >>> packed = Windows([1, 2, 3, 4, 5, 6, 7], length=4, mode="packed", documents=[0, 3, 4, 7])
    >>> packed[0]["ids"].tolist(), packed[0]["positions"].index.tolist(), packed[0]["positions"].document.tolist()
    ([1, 2, 5, 6], [[0, 1, 0, 1]], [[0, 0, 1, 1]])
    """

    def __init__(
        self,
        store_or_ids: TokenStore | Integer[np.ndarray, " n"] | Integer[Tensor, " n"] | Sequence[int],
        length: int,
        stride: int | None = None,
        mode: Mode = "flat",
        *,
        documents: Integer[np.ndarray, " offsets"] | Integer[Tensor, " offsets"] | Sequence[int] | None = None,
        drop_last: bool = False,
        pad_id: int = 0,
        as_tuple: bool = False,
    ) -> None:
        remedy = "pass a number of tokens"
        self.length = whole("length", length, 1, remedy=remedy)
        self.stride = self.length if stride is None else whole("stride", stride, 1, 2**62, remedy=remedy)
        self.mode = mode
        self.drop_last = drop_last = flag("drop_last", drop_last)
        self.pad_id = whole("pad_id", pad_id, 0, 2**63 - 1, remedy="pass an id of the tokenizer")
        self.as_tuple = flag("as_tuple", as_tuple)
        self._tokens = tokens_of(store_or_ids)
        if one_of("mode", mode, get_args(Mode)) == "flat":
            if documents is not None:
                raise InputError("got documents in flat mode, which ignores boundaries", "pass mode='document'")
            offsets = np.array([0, len(self._tokens)])  # everything is one document
        else:
            if documents is None and isinstance(store_or_ids, TokenStore):
                documents = store_or_ids.documents
            if documents is None:
                cause = f"got mode={mode!r} without documents"
                raise InputError(cause, "pass documents=[0, ..., len(ids)], the start of each document and the end")
            offsets = document_offsets(documents, len(self._tokens))
        if mode == "packed":
            if self.stride != self.length:
                cause = f"got stride={self.stride} for packed rows, in which every target occurs once"
                raise InputError(cause, "pass mode='document' for overlaps")
            if self.drop_last:
                raise InputError("got drop_last for packed rows, which are hardly ever full", "pass drop_last=False")
            if self.as_tuple:
                cause = "got as_tuple=True for packed rows, which need their positions to keep documents apart"
                raise RangeError(cause, "pass as_tuple=False")
            self._layout = Packing(offsets, self.length, pad_id=self.pad_id)
        else:
            self._layout = DocumentWindows(offsets, self.length, self.stride, drop_last=drop_last, pad_id=self.pad_id)
        self._count = len(self._layout)
        if not self._count:
            longest = int(np.diff(offsets).max(initial=0))
            needed = self.length + 1 if drop_last else 2
            cause = f"got a longest document of {longest} tokens, expected {needed} or more for a window"
            raise InputError(cause, "use a longer text, or a shorter length" if drop_last else "use longer documents")

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: SupportsIndex) -> Any:
        """Return one window, as a dict or a pair.

        ``ids`` and ``targets`` have shape ``[length]``, and ``positions`` have one row.
        """
        batch = self._batch([index])
        ids, targets = batch["ids"][0], batch["targets"][0]
        return (ids, targets) if self.as_tuple else Batch(ids=ids, targets=targets, positions=batch["positions"])

    def __getitems__(
        self, indices: Sequence[SupportsIndex] | Integer[np.ndarray, " batch"] | Integer[Tensor, " batch"]
    ) -> BatchOfWindows:
        """Read several windows by one call. In the result, ``["ids"]`` has all ids, of shape ``[batch, length]``."""
        return BatchOfWindows(self._batch(indices), self.as_tuple)

    def _batch(self, indices: Sequence[SupportsIndex] | np.ndarray | Tensor) -> Batch:
        if isinstance(indices, np.ndarray):
            numbers = indices
        elif isinstance(indices, Tensor):
            numbers = indices.numpy(force=True)
        else:
            try:
                numbers = np.array(indices)
            except (ValueError, TypeError, OverflowError):  # `_resolve` names the wrong index
                numbers = np.array(None)
        if numbers.ndim != 1 or numbers.dtype.kind != "i" or not len(numbers):
            return self._layout.batch(self._tokens, self._resolve(indices))
        numbers = numbers.astype(np.int64, copy=False)
        if isinstance(self._layout, DocumentWindows) and (batch := self._layout.full_batch(self._tokens, numbers)):
            return batch
        highest = np.maximum.reduce(numbers.view(np.uint64))  # as unsigned, negative numbers are the largest
        return self._layout.batch(self._tokens, numbers if highest < self._count else self._resolve(numbers))

    def collate(self, batch: Any) -> Any:
        """Return a batch as it was read, or stack windows. Use ``DataLoader(windows, collate_fn=windows.collate)``."""
        return collate(batch)

    def loader(
        self,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = False,
        **options: Any,
    ) -> Loader:
        """Return a loader of batches. The order depends on epoch and seed, and every step is split over the ranks.

        The loader can be resumed in the middle of an epoch.

        Args:
            batch_size: number of windows per batch and rank.
            shuffle: shuffle the windows in each epoch. If False, they are in the order of the text.
            seed: seed of the orders.
            rank, world_size: the part of every step that this process gets. Default: the values of `torch.distributed`
                if it is initialised. Otherwise the process gets everything.
            drop_last: drop the last step if it is incomplete, so that all ranks have the same number of equal batches.
            options: options of `torch.utils.data.DataLoader`: ``num_workers``, ``pin_memory``, ``prefetch_factor`` ...
                Batches always come in order, because a state counts them.

        Raises:
            InputError: a `DataLoader` does not have an option, or an option has no meaning without workers.
            RangeError: a number is out of range, or a flag is not a bool.

        >>> loader = Windows(range(10), length=2).loader(batch_size=2, seed=7)
        >>> first = next(iter(loader))
        >>> again = Windows(range(10), length=2).loader(batch_size=2, seed=7)
        >>> again.load_state_dict(loader.state_dict())
        >>> len(loader), sum(len(batch["ids"]) for batch in again)
        (3, 3)
        """
        sampler = BatchSampler(
            self, batch_size, shuffle=shuffle, seed=seed, rank=rank, world_size=world_size, drop_last=drop_last
        )
        return Loader(self, sampler, **options)

    @property
    def fill(self) -> float:
        """The share of slots that hold a token and its target, not padding."""
        return self._layout.slots_used / (self._count * self.length)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the options, and of a cheap sample of the text."""
        options = [self.length, self.stride, self.mode, self.drop_last, self.pad_id, self._count, len(self._tokens)]
        facts = json.dumps([*options, self._tokens.fingerprint, self._layout.digest])
        return hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()

    def __repr__(self) -> str:
        shape = f"{len(self)} of length {self.length}, stride {self.stride}, {self.mode}"
        return f"Windows({shape}, over {len(self._tokens):,} tokens)"

    def _resolve(self, indices: Sequence[SupportsIndex] | np.ndarray | Tensor) -> Int[np.ndarray, " batch"]:
        """Return the numbers of these indices. Negative indices count from the end. Raise an error if one is wrong."""
        numbers: list[int] = []
        for index in indices:
            try:
                number = operator.index(index)
            except TypeError:
                remedy = "use windows.__getitems__([0, 1]) for several, or Subset(windows, range(10))"
                raise _IndexTypeError(f"got {index!r} for a window, expected an integer", remedy) from None
            if not -self._count <= number < self._count:
                raise _WindowError(f"got window {number}, expected one of {self._count}", f"use 0..{self._count - 1}")
            numbers.append(number % self._count)
        return np.array(numbers, dtype=np.int64)


class _WindowError(RangeError, IndexError):
    """A `RangeError` that is also an `IndexError`, by which Python detects the end of a sequence."""


class _IndexTypeError(InputError, TypeError):
    """An `InputError` that is also a `TypeError`, as sequences raise."""
