"""Encode many documents at once, by the `tokenizers` library, or by `gigatoken` if it gives the same ids.

The `tokenizers` library is the reference, as `Tokenizer.encode` runs it: 3 to 6 MB/s on one core. `gigatoken` (60 MB/s
for new words, 500 MB/s for known ones) is used only if `choose_engine` found its ids equal.

A document is cut at places where a cut changes no id (see `definition`), so memory does not grow with its length. If no
such place is known, the document is encoded as a whole, up to `WHOLE` bytes. The engine needs some hundred bytes of
memory for each of them.

Six facts about gigatoken (version 0.10) decide how it is used here:

* It always recognises special tokens in the text. So it is built from a definition without special tokens.
* It expects UTF-8, and any other byte may end the whole process. So such bytes are encoded here, one by one.
* It composes letters and accents (NFC) by a newer version of Unicode than `tokenizers`. So it never normalizes. It
  gets text only if every version of Unicode leaves the text unchanged.
* It finds all added tokens in one pass, as they are spelled. So it is not used if their flags make `tokenizers` find
  them otherwise, see `_why_not_added`.
* It knows some 4 700 code points as letters, marks or digits that `tokenizers` does not know. So the text around a
  character newer than Unicode 3.2 (2002), except emoji and the like, goes to `tokenizers`, up to the nearest cuts.
* It caches every word it has seen: its memory grows by up to twelve times the text. So it is discarded and built again
  (a twentieth of a second) when it has grown by `GROWTH`. If the system does not report memory, this happens after
  `UNSEEN` bytes of text.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
import mmap
import os
import re
import sys
import threading
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np
from jaxtyping import Bool, Int32, Int64, UInt8

from locant.arguments import one_of
from locant.errors import InputError, Remedy
from locant.extras import install_command, is_installed
from locant.text.reading import well_formed
from locant.text.tokenizer.definition import (
    LONGEST_LETTER,
    Definition,
    first_cut,
    last_cut,
    library_errors,
    normalizers,
    why_not_cut,
)
from locant.text.tokenizer.local_files import ENCODINGS
from locant.text.tokenizer.tokenizer import Tokenizer

EngineName = Literal["tokenizers", "gigatoken"]
EngineChoice = Literal["auto"] | EngineName

PART = 2**20
"""Longer texts are cut into parts of about this many bytes, if they may be cut."""

WHOLE = 16 * 2**20
"""The most bytes that are encoded without a cut."""

Rows = tuple[Int32[np.ndarray, " tokens"], Int64[np.ndarray, " documents"]]
"""The ids of all documents in one array, and the number of ids of each document."""

GROWTH = 192 * 2**20
"""Bytes by which the memory of gigatoken may grow before it is built again."""

UNSEEN = 16 * 2**20
"""Bytes of text after which gigatoken is built again if its growth is not known, which is at most twelve times this."""

ENOUGH = 2**20
"""Characters or bytes of text after which `Tokenizer.encode` chooses an engine, which takes up to a second."""

CHECKED = 2**17
"""Bytes of text on which that engine is checked."""

STRETCH = 2**13
"""Bytes that this check takes from each place of the text."""

SPAN = 2**10
"""The fewest bytes that go to `tokenizers` for a character that gigatoken may read otherwise."""

SCANNED = 2**18
"""Bytes that are searched for such characters at a time."""

LEAST = 4 * 2**20
"""Bytes of text before gigatoken is built again, even if other memory of the same process grows meanwhile."""

# Between these characters nothing is composed, decomposed or put in another order, in any version of Unicode: letters,
# punctuation, currencies, arrows to dingbats but for one, Chinese, emoji; not accents, which could compose with them.
_CHANGED_BY_NFC = re.compile(
    "[^\u0000-\u02ff\u0391-\u03a1\u03a3-\u03ce\u0400-\u0482\u048a-\u052f\u05d0-\u05ea\u0621-\u063a\u0641-\u064a"
    "\u2010-\u2027\u2030-\u205e\u20a0-\u20bf\u2190-\u22ff\u2500-\u27bf\u3001-\u3029\u3030-\u303f\u3041-\u3096"
    "\u30a1-\u30fe\u4e00-\u9fa5\uac00-\ud7a3\uff01-\uff5e\U0001f300-\U0001f6ff\U0001f900-\U0001f9ff]"
)

# The pattern of cl100k_base, as `tokenizers` needs it and as gigatoken does.
_SPELLED = {
    ENCODINGS["cl100k_base"].pattern: (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
        r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s+"
    )
}

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

# Not UTF-8: a stray byte, an incomplete character, a surrogate, one beyond Unicode, an overlong one.
_BYTES = [
    *(b"\xff", b"\xc3", b"a\x80b\xfe\xff c", b"\xe6\x97", b"\xf0\x9f\x99 \xed\xa0\x80", b"\xf4\x90\x80\x80x\xc0\xaf")
]

PROBE_TEXTS: tuple[bytes, ...] = (*(text.encode() for text in _TEXTS), *_BYTES)
"""Texts on which two tokenizers that look the same may differ. An engine must agree on all of them."""


class Encoded(NamedTuple):
    """`Rows`. If `unfinished`, the next `Encoded` begins with the rest of the last document."""

    ids: Int32[np.ndarray, " tokens"]
    lengths: Int64[np.ndarray, " documents"]
    unfinished: bool


class Engine:
    """Encode documents as `Tokenizer.encode` does, without special tokens. One thread at a time may use an engine.

    `choose_engine` finds the library that can do it, and gives the `reason`. `parallel` uses all cores. ``None`` means
    all cores, except in a worker process.

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
        """Why documents are never cut, or ``None`` if they are."""
        self._fast = GigatokenEngine(tokenizer, parallel) if name == "gigatoken" else None

    def encode(self, documents: Sequence[bytes], is_utf8: bool = False) -> Rows:
        """Return the ids of all documents. Raise `InputError` if one is too long and cannot be cut, or has no ids.

        `is_utf8` means that all documents are known to be UTF-8, so they are not checked again.
        """
        if all(len(document) <= PART for document in documents):
            return self._run([*documents], is_utf8)
        parts = [self._parts(document) for document in documents]
        ids, lengths = self._run([part for row in parts for part in row], is_utf8)
        first = np.cumsum([0, *map(len, parts[:-1])])
        return ids, np.add.reduceat(lengths, first)

    def stream(self, batches: Iterable[tuple[list[bytes], bool]]) -> Iterator[Encoded]:
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
            yield Encoded(*self.encode(joined), unfinished)

    def too_long(self, batches: Iterable[tuple[list[bytes], bool]]) -> set[int]:
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
        while len(document) > (end := searched + PART):
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
        if size > WHOLE:
            why = self.why_not_cut or "it has no letter before white space"
            cause = f"a document has {size} bytes or more that can only be encoded as a whole, because {why}"
            remedy = Remedy("pass {} to split it into several documents, or {}", separator=..., skip_bad=True)
            raise InputError(f"{cause}, expected at most {WHOLE}", remedy)


def choose_engine(name: EngineChoice, tokenizer: Tokenizer, sample: Sequence[bytes]) -> Engine:
    """Return the engine of this name; ``"auto"`` is gigatoken if it is installed and its ids are right on the sample.

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


def why_not_gigatoken(tokenizer: Tokenizer) -> str | None:
    """Return why `gigatoken` cannot be used, as far as the definition shows it, or ``None`` if it may be tried."""
    if tokenizer.only_bytes:
        return "every byte is an id, so there is nothing to look up"
    if not tokenizer.byte_level:
        return "the tokenizer is not a byte-level BPE"
    steps = normalizers(tokenizer.plain_definition)
    if others := [step["type"] for step in steps if step["type"] != "NFC"]:
        return f"the tokenizer changes texts first ({others[0]})"
    if fault := _why_not_added([token for token in tokenizer.added_tokens if not token["special"]], bool(steps)):
        return fault
    if not is_installed("gigatoken"):
        return f"gigatoken is not installed: {install_command('gigatoken')}"
    return None


def _why_not_added(tokens: Sequence[Definition], composes: bool) -> str | None:
    """Return why `tokenizers` may find these ordinary added tokens at other places than `gigatoken`, or ``None``.

    `tokenizers` first looks in the raw text for the tokens that are not normalized. Then it looks for the others in the
    text between them, and normalizes their names too. If a token strips white space, no other token can begin with that
    white space. `composes` means that the normalizer is NFC.
    """
    if alone := [token for token in tokens if token["single_word"]]:
        return f"its token {alone[0]['content']!r} is only found as a whole word (single_word)"
    if composes and (other := [token for token in tokens if _CHANGED_BY_NFC.search(token["content"])]):
        return f"the name of its token {other[0]['content']!r} may be changed by its normalizer (NFC)"
    if strips := [token for token in tokens if token["lstrip"] or token["rstrip"]]:
        spaced = [token for token in tokens if token["content"] != token["content"].strip()]
        if spaced or len({(token["lstrip"], token["rstrip"]) for token in tokens}) > 1:
            return f"its token {strips[0]['content']!r} strips white space (lstrip, rstrip) that others may begin with"
    first, last = ([token["content"] for token in tokens if token["normalized"] is flag] for flag in (False, True))
    for one, other in ((first, last), (last, first)):
        beginnings = {name[:size]: name for name in other for size in range(1, len(name) + 1)}
        for name in one:
            if (end := next((name[i:] for i in range(len(name)) if name[i:] in beginnings), None)) is not None:
                return f"its tokens {name!r} and {beginnings[end]!r} may overlap, and only one is normalized"
            if (inner := next((each for each in other if each in name), None)) is not None:
                return f"its tokens {name!r} and {inner!r} may overlap, and only one is normalized"
    return None


class EngineOnDemand:
    """The fast engine of a tokenizer, for calls with much text. Any thread may call it.

    It is chosen as in `prepare`, after `ENOUGH` bytes of text.
    """

    is_forked: ClassVar[bool] = False
    """True in a forked process, in which the threads that gigatoken may have started do not exist."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._lock, self._seen = tokenizer, threading.Lock(), 0
        self._engine: Engine | None = None

    def encode(self, texts: Sequence[str | bytes], size: int) -> list[Int32[np.ndarray, " _"]] | None:
        """Return the ids of each text, or ``None`` if `tokenizers` must encode them; `size` is the total length."""
        if self.is_forked or not self._lock.acquire(blocking=False):  # an engine is for one thread at a time
            return None
        try:
            self._seen += size
            if self._engine is None:
                if self._seen < ENOUGH:
                    return None
                self._engine = choose_engine("auto", self._tokenizer, _stretches(texts))
            if self._engine.name != "gigatoken":
                return None
            documents = [text if isinstance(text, bytes) else _utf8(text) for text in texts]
            if max(map(len, documents)) > WHOLE and self._engine.too_long([(documents, False)]):
                return None
            ids, lengths = self._engine.encode(documents, not any(isinstance(text, bytes) for text in texts))
        finally:
            self._lock.release()
        if len(texts) == 1 and ids.base is None:
            return [ids]
        return [row.copy() for row in _split(ids, lengths)]


def _note_fork() -> None:
    EngineOnDemand.is_forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def _stretches(texts: Sequence[str | bytes]) -> list[bytes]:
    """Return about `CHECKED` characters or bytes of the texts, from evenly spaced places."""
    step = max(sum(map(len, texts)) * STRETCH // CHECKED, STRETCH)
    pieces: list[bytes] = []
    place = 0
    for text in texts:
        while place < len(text):
            piece = text[place : place + STRETCH]
            pieces.append(piece if isinstance(piece, bytes) else _utf8(piece))
            place += step
        place -= len(text)
    return pieces


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        return well_formed(text).encode()


def _split(ids: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Return the ids of each row, as views."""
    ends = np.cumsum(lengths).tolist()
    return [ids[begin:end] for begin, end in itertools.pairwise([0, *ends])]


class GigatokenEngine:
    """Encode by `gigatoken`. `resident` returns the memory of this process in bytes, or ``None`` if it is not known."""

    def __init__(
        self, tokenizer: Tokenizer, parallel: bool | None, resident: Callable[[], int | None] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        definition = tokenizer.plain_definition
        self._may_be_cut = why_not_cut(definition) is None
        composes = bool(normalizers(definition))
        self._is_same = _stable() if composes else _long_known()
        self._lowest = 0xCC if composes else 0xE0  # the first byte of U+0300 and U+0800
        plain = {**definition, "normalizer": None, "pre_tokenizer": _respelled(definition["pre_tokenizer"])}
        self._definition = json.dumps(plain, ensure_ascii=False)
        self._parallel = parallel
        self._resident = resident or resident_bytes
        self._library: Any = None
        self._grown = self._seen = 0
        self.builds = 0

    def encode(self, texts: list[bytes], is_utf8: bool = False) -> Rows:
        """Return the ids of all texts in one array, and the number of ids of each text."""
        joined = b"\n".join(texts)
        if not (is_utf8 or joined.isascii()):
            try:
                joined.decode()
            except UnicodeDecodeError:
                rows = self._tokenizer.assemble(texts, self._rows)
                return np.concatenate(rows), np.array([len(row) for row in rows], dtype=np.int64)
        return self._run_utf8(texts, joined)

    def _rows(self, texts: list[str]) -> list[Int32[np.ndarray, " _"]]:
        spelled = [text.encode() for text in texts]
        return _split(*self._run_utf8(spelled, b"\n".join(spelled)))

    def _run_utf8(self, texts: list[bytes], joined: bytes) -> Rows:
        """Encode texts that are UTF-8; `joined` has one byte between two texts."""
        places = self._strange_places(joined)
        if not len(places):
            return self._run(texts)
        ends = np.cumsum([len(text) + 1 for text in texts])
        by_text = np.split(places, np.searchsorted(places, ends[:-1]))
        begins = [0, *ends[:-1].tolist()]
        return self._run_apart(
            [self._apart(*each) for each in zip(texts, map(np.subtract, by_text, begins), strict=True)]
        )

    def _strange_places(self, text: bytes) -> Int64[np.ndarray, " places"]:
        """Return where characters begin on which versions of Unicode differ, as offsets in UTF-8."""
        units = np.frombuffer(b"" if text.isascii() else text, dtype=np.uint8)
        strange = [np.empty(0, dtype=np.int64)]
        for begin in range(0, len(units), SCANNED):
            places = np.flatnonzero(units[begin : begin + SCANNED] >= self._lowest) + begin
            strange.append(places[~self._is_same[_code_points(units, places)]])
        return np.concatenate(strange)

    def _apart(self, text: bytes, places: Int64[np.ndarray, " places"]) -> list[bytes]:
        """Split a text into pieces with the same ids. The second, fourth, ... piece is for `tokenizers`."""
        if not len(places):
            return [text]
        if not self._may_be_cut:
            return [b"", text]
        pieces: list[bytes] = []
        done = 0
        for place in places.tolist():
            if place >= done:
                begin = max(last_cut(text, done, place), done)
                end = first_cut(text, max(place, begin + SPAN))
                pieces += [text[done:begin], text[begin:end]]
                done = end
        return [*pieces, text[done:]]

    def _run_apart(self, texts: list[list[bytes]]) -> Rows:
        """Return the ids of texts that `_apart` has split."""
        fast = iter(_split(*self._run([piece for pieces in texts for piece in pieces[::2]])))
        slow = iter(self._tokenizer.encode_by_reference([piece for pieces in texts for piece in pieces[1::2]]))
        rows = [[next(slow if place % 2 else fast) for place in range(len(pieces))] for pieces in texts]
        lengths = np.array([sum(map(len, row)) for row in rows], dtype=np.int64)
        return np.concatenate([part for row in rows for part in row]), lengths

    def _run(self, texts: list[bytes]) -> Rows:
        library = self._library or self._build()
        before = self._resident()
        with _refusals():
            encoded = library.encode_batch(texts, parallel=self._parallel)
        if isinstance(encoded, list):
            raise KeyboardInterrupt  # the library swallows an interrupt that comes while it makes its array
        layout = encoded.layout
        offsets, ids = np.asarray(layout.offsets.data), np.asarray(layout.content.data)
        self._account(before, ids.nbytes, sum(map(len, texts)))
        return ids[offsets[0] : offsets[-1]].view(np.int32), np.diff(offsets)

    def _build(self) -> Any:  # an untyped package
        import gigatoken

        with _refusals():
            self._library = gigatoken.Tokenizer.from_json(self._definition)
        self._grown = self._seen = 0
        self.builds += 1
        return self._library

    def _account(self, before: int | None, result: int, seen: int) -> None:
        """Count the memory that this call added, without its result, and discard the library if it is too much."""
        after = self._resident()
        self._seen += seen
        if before is None or after is None:
            full = self._seen >= UNSEEN
        else:
            self._grown += max(after - before - result, 0)
            full = self._grown >= GROWTH and self._seen >= LEAST
        if full:
            self._library = None
            # Return the memory to the system: the allocator of glibc would keep half of it after each build.
            if sys.platform.startswith("linux") and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
                libc.malloc_trim(0)


def _refusals() -> AbstractContextManager[None]:
    kinds = ("RuntimeError", "ValueError", "PanicException")
    return library_errors("gigatoken fails", "engine='tokenizers'", kinds)


def _code_points(
    units: UInt8[np.ndarray, " bytes"], places: Int64[np.ndarray, " places"]
) -> Int64[np.ndarray, " places"]:
    """Return the code points of the characters of two or more bytes that begin at these places."""
    lead = units[places].astype(np.int64)
    # Bytes that are read beyond the end of a shorter character are not used.
    one, two, three = (units[np.minimum(places + i, len(units) - 1)].astype(np.int64) & 0x3F for i in (1, 2, 3))
    of_three = (lead & 0xF) << 12 | one << 6 | two
    of_four = (lead & 0x7) << 18 | one << 12 | two << 6 | three
    return np.where(lead >= 0xF0, of_four, np.where(lead >= 0xE0, of_three, (lead & 0x1F) << 6 | one))


@functools.cache
def _long_known() -> Bool[np.ndarray, " code_points"]:
    """Return a mask of the code points on whose category all versions of Unicode from 3.2 on agree."""
    is_known = np.zeros(sys.maxunicode + 1, dtype=bool)
    category = unicodedata.ucd_3_2_0.category
    is_known[:0x30000] = [category(chr(code)) != "Cn" for code in range(0x30000)]
    # Below U+0800, from U+2000 to U+2FFF, and from U+1F000 on both libraries know the same letters.
    is_known[:0x800] = is_known[0x2000:0x3000] = is_known[0x1F000:0x20000] = True
    return is_known


@functools.cache
def _stable() -> Bool[np.ndarray, " code_points"]:
    """Return a mask of the code points of `_long_known` that NFC never changes, whatever their neighbours."""
    stable = _long_known().copy()
    stable[[match.start() for match in _CHANGED_BY_NFC.finditer("".join(map(chr, range(sys.maxunicode + 1))))]] = False
    return stable


def _respelled(step: Definition) -> Definition:
    if step["type"] == "Sequence":
        return {**step, "pretokenizers": [_respelled(one) for one in step["pretokenizers"]]}
    pattern = step["pattern"].get("Regex") if step["type"] == "Split" else None
    return {**step, "pattern": {"Regex": _SPELLED[pattern]}} if pattern in _SPELLED else step


def resident_bytes() -> int | None:
    """Return the memory of this process in bytes, or ``None`` if the system has no cheap way to ask."""
    if not sys.platform.startswith("linux"):
        return None
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * mmap.PAGESIZE
