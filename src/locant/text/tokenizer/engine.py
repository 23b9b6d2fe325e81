"""Many documents to ids at once: by the `tokenizers` library, or by `gigatoken` where its ids are the same.

The `tokenizers` library is the reference, as `Tokenizer.encode` runs it: 3 to 6 MB/s on one core. `gigatoken` (60 to
500 MB/s, words seen for the first time or before) is used only where `choose_engine` found its ids equal.

A document of any length is encoded in memory that does not grow with it, because it is cut between two pre-tokens
(`locant.text.tokenizer.pre_tokens`). Where no such place is known, it is encoded as a whole, up to `WHOLE` bytes: the
engine needs some hundred bytes for each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
from jaxtyping import Int32, Int64

from locant.arguments import one_of
from locant.errors import InputError
from locant.text.tokenizer.gigatoken_engine import GigatokenEngine, why_not_gigatoken
from locant.text.tokenizer.pre_tokens import LONGEST_LETTER, last_cut, why_not_cut
from locant.text.tokenizer.tokenizer import Tokenizer

__all__ = ["PART", "PROBE_TEXTS", "WHOLE", "Encoded", "Engine", "EngineChoice", "EngineName", "choose_engine"]

EngineName = Literal["tokenizers", "gigatoken"]
EngineChoice = Literal["auto"] | EngineName

PART = 2**20
"""Longer texts are cut into parts of about so many bytes, where they may be."""

WHOLE = 16 * 2**20
"""The most bytes that are encoded without a cut."""

Rows = tuple[Int32[np.ndarray, " tokens"], Int64[np.ndarray, " documents"]]
"""The ids of documents, one after the other, and how many each has."""


class Encoded(NamedTuple):
    """`Rows`; where `unfinished`, the last document goes on as the first of what follows."""

    ids: Int32[np.ndarray, " tokens"]
    lengths: Int64[np.ndarray, " documents"]
    unfinished: bool


_TEXTS = [
    *("", " ", "  ", "\n", "\n\n\n", "\r\n", "\t\t ", " \n \n", "a", " a", "a ", "a  b", "a\n\n b", "\x00"),
    "a\x00\x00b",
    *("it's they'RE I'Ll 'tis ''s ' s", "don\u2019t", "x'sx 'S's", "'\u017f 'K \u212a's"),  # long s, Kelvin
    *("1234567890 12 345", "3.14e-10", "\u00bd \u00b2 \u0663\u0664 \u2167 \u3007"),
    *("<|endoftext|>", "<s></s>[CLS]<unk>", "<|im_start|>user\n<think>\n\n</think>"),
    *("\ufb01 \ufb00 \u01c6 \u0130 \u0131 \u00df \u1e9e", "e\u0301 \u00e9 a\u0308\u0323", "\ufeffx\ufeff"),
    *("\u2028\u2029\x85\xa0\u3000x", "a\x0bb\x0cc\x1cd\x1ee\u180ef\u200bg\u202fh\u205fi", "\xad \u00a0 \u00a0a"),
    *("\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd", "\u202eabc\u202c \u2066x\u2069"),
    *("\u0645\u0631\u062d\u0628\u0627", "\u0928\u092e\u0938\u094d\u0924\u0947", "\u0e44\u0e17\u0e22 \u0e51"),
    "\u65e5\u672c\u8a9e\u3001\u30c6\u30b9\u30c8\u3002\n\u6b21",
    *("\ud55c\uad6d\uc5b4 \ud14d", "\U0001d518\U0001d52b \U00010348 \U00020000"),
    "\U0001f469\u200d\U0001f467\U0001f1e9\U0001f1ea",
    *("\U000e0001\U0010ffff\ue000", "\u0378\u2fe0", "\u0300\u0300 \u0300a", "\u1b05\ua9cf \U0001e900\U00031350"),
    # Letters of Unicode 15 to 17.
    *("a\u088f's \u0c5cb'll x", "\U0003295c's \U000323b0\U00011f04 \U0001e4d0x", "a\ua7ceb\U00016ec0c\u1acfd"),
    *("a" * 3000, " " * 3000, "\n" * 300, "ab" * 1500, "=-" * 999, "\u00e9" * 2000, "\u65e5" * 999, "0" * 1000),
    *("?!" * 50 + "\n\n x", "\t\n" * 99 + "x", " ".join("ab" * i for i in range(40)), "x" * 63 + " " + "y" * 64 + " z"),
]

# No UTF-8: a stray byte, a character that breaks off, a surrogate, one beyond Unicode, one spelled too long.
_BYTES = [
    *(b"\xff", b"\xc3", b"a\x80b\xfe\xff c", b"\xe6\x97", b"\xf0\x9f\x99 \xed\xa0\x80", b"\xf4\x90\x80\x80x\xc0\xaf")
]

PROBE_TEXTS: tuple[bytes, ...] = (*(text.encode() for text in _TEXTS), *_BYTES)
"""Texts on which two tokenizers that look the same may differ; an engine has to agree on every one of them."""


class Engine:
    """Encodes documents as `Tokenizer.encode` does, special tokens never among them; for one thread at a time.

    `choose_engine` finds out which library can, and says why (`reason`). `parallel` is on all cores; ``None`` for yes,
    but not in a worker process.

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
        """The ids of all documents; an `InputError` for one that is too long and cannot be cut, or be spelled."""
        if all(len(document) <= PART for document in documents):
            return self._run([*documents])
        parts = [self._parts(document) for document in documents]
        ids, lengths = self._run([part for row in parts for part in row])
        first = np.cumsum([0, *map(len, parts[:-1])])
        return ids, np.add.reduceat(lengths, first)

    def stream(self, batches: Iterable[tuple[list[bytes], bool]]) -> Iterator[Encoded]:
        """The ids of batches of documents, and for each batch whether its last one goes on as the first of the next."""
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


def choose_engine(name: EngineChoice, tokenizer: Tokenizer, sample: Sequence[bytes]) -> Engine:
    """The engine of this name; for ``"auto"``, gigatoken if it is there and has the ids of tokenizers on the sample.

    Raises:
        RangeError: another name. InputError: gigatoken where it cannot run or has other ids.
    """
    one_of("engine", name, ("auto", *get_args(EngineName)))
    if name == "tokenizers":
        return Engine(tokenizer, "tokenizers", "asked for")
    fault = why_not_gigatoken(tokenizer) or _disagreement(tokenizer, sample)
    if fault is None:
        return Engine(tokenizer, "gigatoken", "its ids are those of tokenizers on a sample of the texts")
    if name == "gigatoken":
        raise InputError(f"gigatoken cannot be used here: {fault}", "engine='auto', which uses tokenizers then")
    return Engine(tokenizer, "tokenizers", fault)


def _disagreement(tokenizer: Tokenizer, sample: Sequence[bytes]) -> str | None:
    """Why gigatoken cannot encode these texts, or ``None`` if its ids are the same."""
    # Every special token's name, as a text and within one.
    spelled = [text.encode() for name in tokenizer.special_tokens for text in (name, f"a {name}b\n{name}{name}")]
    texts = [*sample, *PROBE_TEXTS, *spelled]
    found = Engine(tokenizer).encode(texts)
    try:
        fast = Engine(tokenizer, "gigatoken").encode(texts)
    except InputError as error:
        return error.cause
    if all(map(np.array_equal, found, fast)):
        return None
    rows, fast_rows = (np.split(ids, np.cumsum(lengths)[:-1]) for ids, lengths in (found, fast))
    place = next(i for i, pair in enumerate(zip(rows, fast_rows, strict=True)) if not np.array_equal(*pair))
    return f"gigatoken gives other ids for {texts[place][:60]!r}"
