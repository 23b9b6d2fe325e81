"""Many documents to ids at once: by the `tokenizers` library, or by `gigatoken` where its ids are the same.

The `tokenizers` library is the reference, as `Tokenizer.encode` runs it. `gigatoken` is ten to a hundred times as fast
and used only where `choose_engine` found its ids equal on a sample of the texts, and on a list of probe texts. On one
core, text in memory: 3 to 6 MB/s, against 60 to 500 MB/s (words seen for the first time, or seen before).

A document of any length is encoded in memory that does not grow with it, because it is cut between two pre-tokens
(`locant.text.tokenizer.pre_tokens`). Where no such place is known, it is encoded as a whole, up to `WHOLE` bytes: the
engine needs some hundred bytes for each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int32, Int64

from locant.arguments import one_of
from locant.errors import InputError
from locant.text.tokenizer.gigatoken_engine import GigatokenEngine, why_not_gigatoken
from locant.text.tokenizer.pre_tokens import LONGEST_LETTER, last_cut, why_not_cut
from locant.text.tokenizer.probe_texts import PROBE_TEXTS
from locant.text.tokenizer.tokenizer import Tokenizer

__all__ = ["PART", "WHOLE", "Encoded", "Engine", "EngineChoice", "EngineName", "choose_engine"]

EngineName = Literal["tokenizers", "gigatoken"]
EngineChoice = Literal["auto"] | EngineName

PART = 2**20
"""Longer texts are cut into parts of about so many bytes, where they may be."""

WHOLE = 16 * 2**20
"""The most bytes that are encoded without a cut."""


Rows = tuple[Int32[np.ndarray, " tokens"], Int64[np.ndarray, " documents"]]
"""The ids of documents, one after the other, and how many each has."""


class Encoded(NamedTuple):
    """The ids of documents, one after the other, and how many each has.

    Where `unfinished`, the last document goes on as the first of what follows.
    """

    ids: Int32[np.ndarray, " tokens"]
    lengths: Int64[np.ndarray, " documents"]
    unfinished: bool


class Engine:
    """Encodes documents as `Tokenizer.encode` does, special tokens never among them.

    It is for one thread at a time.

    Args:
        tokenizer: the tokenizer that decides the ids.
        name: the library that encodes. `choose_engine` finds out which one can.
        reason: why this one, in words.
        parallel: on all cores; ``None`` for yes, but not in a worker process.

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
        self.why_not_cut = None if tokenizer.only_bytes else why_not_cut(tokenizer.plain_definition())
        """Why documents are never cut, or ``None`` if they are."""
        self._fast = GigatokenEngine(tokenizer, parallel) if name == "gigatoken" else None

    def encode(self, documents: Sequence[bytes]) -> Rows:
        """The ids of all documents, one after the other, and how many each has.

        Raises:
            InputError: for a document that cannot be cut and is too long, or that the tokenizer cannot spell.
        """
        if all(len(document) <= PART for document in documents):
            return self._run([*documents])
        parts = [self._parts(document) for document in documents]
        ids, lengths = self._run([part for row in parts for part in row])
        first = np.cumsum([0, *map(len, parts[:-1])])
        return ids, np.add.reduceat(lengths, first)

    def stream(self, batches: Iterable[tuple[list[bytes], bool]]) -> Iterator[Encoded]:
        """The ids of documents that come in batches, in which a document can go on from one batch into the next.

        Each batch has documents, and whether the last of them goes on as the first of the next batch; what comes out
        has the same form.
        """
        kept = b""  # of a document that goes on: what comes after the last cut
        for texts, unfinished in batches:
            if not texts:
                continue
            joined = [kept + texts[0], *texts[1:]]
            known = len(kept) if len(joined) == 1 else 0
            kept = b""
            if unfinished:
                size = self._last_cut(joined[-1], max(known - LONGEST_LETTER, 0))
                joined[-1], kept = joined[-1][:size], joined[-1][size:]
                self._require_short(len(kept))
            yield Encoded(*self.encode(joined), unfinished)

    def _run(self, texts: list[bytes]) -> Rows:
        if self.tokenizer.only_bytes:
            ids = np.frombuffer(b"".join(texts), dtype=np.uint8).astype(np.int32)
            return ids, np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
        if self._fast is not None:
            return self._fast.encode(texts)
        rows = self.tokenizer.encode_batch(texts)
        lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        return np.concatenate([np.empty(0, dtype=np.int32), *rows]), lengths

    def _parts(self, document: bytes) -> list[bytes]:
        """The document in parts that have its ids; one part if it is short or cannot be cut."""
        parts: list[bytes] = []
        begin = known = 0  # no place to cut is there between `begin` and `known`
        while len(document) > (end := known + PART):
            place = self._last_cut(document, max(known - LONGEST_LETTER, begin), end)
            if place > begin:
                parts.append(document[begin:place])
                begin = known = place
            else:
                known = end
                self._require_short(known - begin)
        self._require_short(len(document) - begin)
        return [*parts, document[begin:]]

    def _last_cut(self, text: bytes, begin: int, end: int | None = None) -> int:
        if self.tokenizer.only_bytes:
            return len(text) if end is None else end
        return 0 if self.why_not_cut else last_cut(text, begin, end)

    def _require_short(self, size: int) -> None:
        if size > WHOLE:
            why = self.why_not_cut or "there is no letter before white space in it"
            cause = f"a document has {size} bytes or more that can only be encoded as a whole, because {why}"
            raise InputError(f"{cause}; at most {WHOLE} are", "a separator, which makes several documents of it")


def choose_engine(
    name: EngineChoice, tokenizer: Tokenizer, sample: Sequence[bytes], parallel: bool | None = None
) -> Engine:
    """The engine to use; `Engine.reason` says why.

    Args:
        name: ``"auto"`` takes gigatoken if it is installed and gives the same ids as tokenizers.
        tokenizer: the tokenizer that decides the ids.
        sample: documents from the texts to encode, a few megabytes: the `tokenizers` library encodes them all.
        parallel: as for `Engine`.

    Raises:
        RangeError: another name. InputError: gigatoken where it cannot run or has other ids.
    """
    one_of("engine", name, ("auto", "tokenizers", "gigatoken"))
    if name == "tokenizers":
        return Engine(tokenizer, "tokenizers", "asked for", parallel)
    fault = why_not_gigatoken(tokenizer) or _disagreement(tokenizer, sample, parallel)
    if fault is None:
        return Engine(tokenizer, "gigatoken", "its ids are those of tokenizers on a sample of the texts", parallel)
    if name == "gigatoken":
        raise InputError(f"gigatoken cannot be used here: {fault}", "engine='auto', which uses tokenizers then")
    return Engine(tokenizer, "tokenizers", fault, parallel)


def _disagreement(tokenizer: Tokenizer, sample: Sequence[bytes], parallel: bool | None) -> str | None:
    """Why gigatoken cannot encode these texts, or ``None`` if its ids are the same."""
    # Every special token's name, as a text and within one.
    spelled = [text.encode() for name in tokenizer.special_tokens for text in (name, f"a {name}b\n{name}{name}")]
    texts = [*sample, *PROBE_TEXTS, *spelled]
    found = Engine(tokenizer).encode(texts)
    try:
        fast = Engine(tokenizer, "gigatoken", parallel=parallel).encode(texts)
    except InputError as error:
        return error.cause
    if all(map(np.array_equal, found, fast)):
        return None
    rows, fast_rows = (np.split(ids, np.cumsum(lengths)[:-1]) for ids, lengths in (found, fast))
    place = next(i for i, pair in enumerate(zip(rows, fast_rows, strict=True)) if not np.array_equal(*pair))
    return f"gigatoken gives other ids for {texts[place][:60]!r}"
