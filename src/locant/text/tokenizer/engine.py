"""Encode many documents at once, with the `tokenizers` library, or with `gigatoken` if it gives the same ids.

The `tokenizers` library is the reference, called as in `Tokenizer.encode`. It encodes 3 to 6 MB/s on one core.
`gigatoken` (`gigatoken_engine`) is some ten times faster. It is used only if `choose_engine` found its ids equal.

A document is cut where this does not change its ids (see `definition`), so memory does not grow with its length. If no
such place is known, the document is encoded as a whole, up to `MAX_UNCUT_BYTES` bytes. The engine needs some hundred
bytes of memory for each of these bytes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Literal, NamedTuple, get_args

import numpy as np
from jaxtyping import Int32, Int64

from locant.arguments import one_of
from locant.errors import InputError, Remedy
from locant.text.reading import well_formed
from locant.text.tokenizer.definition import (
    LONGEST_LETTER,
    last_cut,
    why_not_cut,
)
from locant.text.tokenizer.gigatoken_engine import GigatokenEngine, Rows, split_rows, why_not_gigatoken
from locant.text.tokenizer.probe_texts import PROBE_TEXTS
from locant.text.tokenizer.tokenizer import Tokenizer

EngineName = Literal["tokenizers", "gigatoken"]

EngineChoice = Literal["auto"] | EngineName

PART_BYTES = 2**20
"""Longer texts are cut into parts of about this many bytes, if they may be cut."""

MAX_UNCUT_BYTES = 16 * 2**20
"""The largest number of bytes that are encoded without a cut."""

CHOICE_BYTES = 2**20
"""Characters or bytes of text after which `Tokenizer.encode` chooses an engine. The choice takes up to a second."""

CHECKED_BYTES = 2**17
"""Bytes of text on which this engine is checked."""

BYTES_PER_PLACE = 2**13
"""Bytes that this check takes from each place of the text."""


class EncodedBatch(NamedTuple):
    """`Rows` of a batch. If `unfinished`, the next `EncodedBatch` begins with the rest of the last document."""

    ids: Int32[np.ndarray, " tokens"]
    lengths: Int64[np.ndarray, " documents"]
    unfinished: bool


class Engine:
    """Encode documents as `Tokenizer.encode` does, without special tokens. One thread at a time may use an engine.

    `choose_engine` chooses the library, and gives the `reason`. ``parallel=True`` uses all cores. ``None`` does the
    same, except in a worker process.

    >>> ids, lengths = Engine(Tokenizer.bytes()).encode([b"one", b"", "né".encode()])
    >>> ids.tolist(), lengths.tolist()
    ([111, 110, 101, 110, 195, 169], [3, 0, 3])
    """

    def __init__(
        self, tokenizer: Tokenizer, name: EngineName = "tokenizers", reason: str = "", parallel: bool | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.name: EngineName = name
        self.reason = reason
        self.why_not_cut = None if tokenizer.only_bytes else why_not_cut(tokenizer.plain_definition)
        """The reason why documents are never cut, or ``None`` if they may be cut."""
        self._fast = GigatokenEngine(tokenizer, parallel) if name == "gigatoken" else None

    def encode(self, documents: Sequence[bytes], is_utf8: bool = False) -> Rows:
        """Return the ids of all documents. Raise `InputError` if one is too long and cannot be cut, or has no ids.

        `is_utf8` means that all documents are known to be UTF-8, so they are not checked again.
        """
        if all(len(document) <= PART_BYTES for document in documents):
            return self._run([*documents], is_utf8)
        parts = [self._parts(document) for document in documents]
        ids, lengths = self._run([part for row in parts for part in row], is_utf8)
        first = np.cumsum([0, *map(len, parts[:-1])])
        return ids, np.add.reduceat(lengths, first)

    def stream(self, batches: Iterable[tuple[list[bytes], bool]]) -> Iterator[EncodedBatch]:
        """Yield the ids of each batch. If a batch is unfinished, the next one continues its last document."""
        rest = b""  # the bytes after the last cut of an unfinished document
        for texts, unfinished in batches:
            if not texts:
                continue
            joined = [rest + texts[0], *texts[1:]]
            searched = len(rest) if len(joined) == 1 else 0
            rest = b""
            if unfinished:
                size = self._last_cut(joined[-1], max(searched - LONGEST_LETTER, 0))
                joined[-1], rest = joined[-1][:size], joined[-1][size:]
                self._require_short(len(rest))
            yield EncodedBatch(*self.encode(joined), unfinished)

    def find_too_long(self, batches: Iterable[tuple[list[bytes], bool]]) -> set[int]:
        """Return the numbers of the documents that `stream` rejects, because they can only be encoded as a whole."""
        too_long, number, rest = set[int](), 0, b""
        for texts, unfinished in batches:
            for i, text in enumerate(texts):
                searched, joined = len(rest), rest + text
                rest = b""
                if number + i in too_long:
                    continue
                try:
                    if unfinished and i == len(texts) - 1:
                        size = self._last_cut(joined, max(searched - LONGEST_LETTER, 0))
                        joined, rest = joined[:size], joined[size:]
                        self._require_short(len(rest))
                    self._parts(joined)
                except InputError:
                    too_long.add(number + i)
                    rest = b""
            number += len(texts) - unfinished
        return too_long

    def _run(self, texts: list[bytes], is_utf8: bool) -> Rows:
        if self.tokenizer.only_bytes:
            ids = np.frombuffer(b"".join(texts), dtype=np.uint8).astype(np.int32)
            return ids, np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
        if self._fast is not None:
            return self._fast.encode(texts, is_utf8)
        rows = self.tokenizer.encode_by_reference(texts)
        lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        return np.concatenate([np.empty(0, dtype=np.int32), *rows]), lengths

    def _parts(self, document: bytes) -> list[bytes]:
        """Split a document into parts with the same ids, or into one part if it is short or cannot be cut."""
        parts: list[bytes] = []
        begin = searched = 0  # there is no place to cut between `begin` and `searched`
        while len(document) > (end := searched + PART_BYTES):
            place = self._last_cut(document, max(searched - LONGEST_LETTER, begin), end)
            if place > begin:
                parts.append(document[begin:place])
                begin = searched = place
            else:
                searched = end
                self._require_short(searched - begin)
        self._require_short(len(document) - begin)
        return [*parts, document[begin:]]

    def _last_cut(self, text: bytes, begin: int, end: int | None = None) -> int:
        if self.tokenizer.only_bytes:
            return len(text) if end is None else end
        return 0 if self.why_not_cut else last_cut(text, begin, end)

    def _require_short(self, size: int) -> None:
        if size > MAX_UNCUT_BYTES:
            why = self.why_not_cut or "it has no letter before white space"
            cause = f"a document has {size} bytes or more that can only be encoded as a whole, because {why}"
            remedy = Remedy("pass {} to split it into several documents, or {}", separator=..., skip_bad=True)
            raise InputError(f"{cause}, expected at most {MAX_UNCUT_BYTES}", remedy)


def choose_engine(name: EngineChoice, tokenizer: Tokenizer, sample: Sequence[bytes]) -> Engine:
    """Return the engine of this name. ``"auto"`` is gigatoken if it is installed and its ids are right on the sample.

    Raises:
        RangeError: the name is unknown. InputError: gigatoken cannot run, or gives other ids than tokenizers.
    """
    one_of("engine", name, ("auto", *get_args(EngineName)))
    if name == "tokenizers":
        return Engine(tokenizer, "tokenizers", "asked for")
    fault = why_not_gigatoken(tokenizer)
    if fault is None:
        fast = Engine(tokenizer, "gigatoken", "its ids are those of tokenizers on a sample of the texts")
        fault = _disagreement(fast, sample)
        if fault is None:
            return fast
    if name == "gigatoken":
        raise InputError(f"gigatoken cannot be used here: {fault}", Remedy("pass {} to use tokenizers", engine="auto"))
    return Engine(tokenizer, "tokenizers", fault)


def _disagreement(engine: Engine, sample: Sequence[bytes]) -> str | None:
    """Return why gigatoken cannot encode these texts, or ``None`` if its ids are the same."""
    # The name of every added token, as a whole text and within a text.
    names = [token["content"] for token in engine.tokenizer.added_tokens]
    spelled = [text.encode() for name in names for text in (name, f"a {name}b\n{name}{name}", f"x{name}1 {name} x")]
    texts = [*sample, *PROBE_TEXTS, *spelled]
    reference = Engine(engine.tokenizer).encode(texts)
    try:
        fast = engine.encode(texts)
    except InputError as error:
        return error.cause
    if all(map(np.array_equal, reference, fast)):
        return None
    rows, fast_rows = (np.split(ids, np.cumsum(lengths)[:-1]) for ids, lengths in (reference, fast))
    place = next(i for i, pair in enumerate(zip(rows, fast_rows, strict=True)) if not np.array_equal(*pair))
    return f"gigatoken gives other ids for {texts[place][:60]!r}"


class EngineOnDemand:
    """The fast engine of a tokenizer, for calls with much text. Any thread may call it.

    The engine is chosen as in `prepare`, after `CHOICE_BYTES` bytes of text.
    """

    is_forked: ClassVar[bool] = False
    """True in a forked process. Threads that gigatoken may have started do not exist there."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._lock, self._seen = tokenizer, threading.Lock(), 0
        self._engine: Engine | None = None

    def encode(self, texts: Sequence[str | bytes], size: int) -> list[Int32[np.ndarray, " _"]] | None:
        """Return the ids of each text, or ``None`` if `tokenizers` must encode them. `size` is the total length."""
        if self.is_forked or not self._lock.acquire(blocking=False):  # an engine is for one thread at a time
            return None
        try:
            self._seen += size
            if self._engine is None:
                if self._seen < CHOICE_BYTES:
                    return None
                self._engine = choose_engine("auto", self._tokenizer, _sample_texts(texts))
            if self._engine.name != "gigatoken":
                return None
            documents = [text if isinstance(text, bytes) else _utf8(text) for text in texts]
            if max(map(len, documents)) > MAX_UNCUT_BYTES and self._engine.find_too_long([(documents, False)]):
                return None
            ids, lengths = self._engine.encode(documents, not any(isinstance(text, bytes) for text in texts))
        finally:
            self._lock.release()
        if len(texts) == 1 and ids.base is None:
            return [ids]
        return [row.copy() for row in split_rows(ids, lengths)]


def _note_fork() -> None:
    EngineOnDemand.is_forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def _sample_texts(texts: Sequence[str | bytes]) -> list[bytes]:
    """Return about `CHECKED_BYTES` characters or bytes of the texts, from evenly spaced places."""
    step = max(sum(map(len, texts)) * BYTES_PER_PLACE // CHECKED_BYTES, BYTES_PER_PLACE)
    pieces: list[bytes] = []
    place = 0
    for text in texts:
        while place < len(text):
            piece = text[place : place + BYTES_PER_PLACE]
            pieces.append(piece if isinstance(piece, bytes) else _utf8(piece))
            place += step
        place -= len(text)
    return pieces


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        return well_formed(text).encode()
