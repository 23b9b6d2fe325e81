"""Encode with `gigatoken`. On one core it reads 60 MB/s with new words, and 500 MB/s with known words.

These facts about gigatoken (version 0.10) decide how it is used here:

* It always recognises special tokens in the text. So it is built from a definition without special tokens.
* It expects UTF-8, and any other byte may end the whole process. So such bytes are encoded here, one by one.
* It composes letters and accents (NFC) with a newer version of Unicode than `tokenizers`. So it is built without its
  normalizer, and receives a text only if no version of Unicode changes it.
* It finds all added tokens in one pass, in their exact spelling. So it is not used if the flags of these tokens make
  `tokenizers` find them in another way (`_why_not_added`).
* It knows about 4,700 letters, marks and digits that `tokenizers` does not know. So `tokenizers` encodes the text
  around a character that is newer than Unicode 3.2 (2002), between the nearest cuts. Emoji and similar signs are
  exceptions.
* It caches every word that it has seen, so its memory grows by up to twelve times the text. When it has grown
  by `MAX_GROWTH`, it is discarded and built again, which takes a twentieth of a second. If the system does not report
  memory, this happens after `MAX_UNMEASURED` bytes of text.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
import mmap
import re
import sys
import unicodedata
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32, Int64, UInt8

from locant.extras import install_command, is_installed
from locant.text.tokenizer.definition import (
    Definition,
    first_cut,
    last_cut,
    library_errors,
    normalizers,
    why_not_cut,
)
from locant.text.tokenizer.local_files import ENCODINGS
from locant.text.tokenizer.tokenizer import Tokenizer

Rows = tuple[Int32[np.ndarray, " tokens"], Int64[np.ndarray, " documents"]]
"""The ids of all documents in one array, and the number of ids of each document."""

MAX_GROWTH = 192 * 2**20
"""Bytes by which the memory of gigatoken may grow before it is built again."""

MAX_UNMEASURED = 16 * 2**20
"""Bytes of text after which gigatoken is built again if its growth is unknown.

The growth is at most twelve times this number.
"""

MIN_SPAN = 2**10
"""The fewest bytes that `tokenizers` encodes around a character that gigatoken may read differently."""

SCAN_BYTES = 2**18
"""Bytes that are searched for such characters at a time."""

MIN_BYTES = 4 * 2**20
"""The fewest bytes of text before gigatoken is built again, because other memory of the process may also grow."""

# This class excludes letters, punctuation, currencies, arrows to dingbats except one, Chinese, and emoji. In any
# version of Unicode, NFC does not compose, decompose or reorder these characters. Accents are not excluded, because
# they could compose with letters.
_CHANGED_BY_NFC = re.compile(
    "[^\u0000-\u02ff\u0391-\u03a1\u03a3-\u03ce\u0400-\u0482\u048a-\u052f\u05d0-\u05ea\u0621-\u063a\u0641-\u064a"
    "\u2010-\u2027\u2030-\u205e\u20a0-\u20bf\u2190-\u22ff\u2500-\u27bf\u3001-\u3029\u3030-\u303f\u3041-\u3096"
    "\u30a1-\u30fe\u4e00-\u9fa5\uac00-\ud7a3\uff01-\uff5e\U0001f300-\U0001f6ff\U0001f900-\U0001f9ff]"
)

# The pattern of cl100k_base in the spelling for `tokenizers`, and in the spelling for gigatoken.
_GIGATOKEN_SPELLING = {
    ENCODINGS["cl100k_base"].pattern: (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
        r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s+"
    )
}


def why_not_gigatoken(tokenizer: Tokenizer) -> str | None:
    """Return why the definition rules out `gigatoken`, or ``None`` if it may be tried."""
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
    """Return why `tokenizers` and `gigatoken` may find these ordinary added tokens at different places, or ``None``.

    `tokenizers` first finds the tokens that are not normalized, in the raw text. Then it normalizes the text between
    them and the names of the other tokens, and finds the other tokens. If a token strips white space, another token
    cannot begin with this white space. `composes` means that the normalizer is NFC.
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


def split_rows(ids: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Return the ids of each row, as views."""
    ends = np.cumsum(lengths).tolist()
    return [ids[begin:end] for begin, end in itertools.pairwise([0, *ends])]


class GigatokenEngine:
    """Encode with `gigatoken`. `resident` returns the memory of this process in bytes, or ``None`` if it is unknown."""

    def __init__(
        self, tokenizer: Tokenizer, parallel: bool | None, resident: Callable[[], int | None] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        definition = tokenizer.plain_definition
        self._may_be_cut = why_not_cut(definition) is None
        composes = bool(normalizers(definition))
        self._is_undisputed = _code_points_that_nfc_keeps() if composes else _undisputed_code_points()
        self._lowest = 0xCC if composes else 0xE0  # the first byte of U+0300 and U+0800
        plain = {**definition, "normalizer": None, "pre_tokenizer": _respell(definition["pre_tokenizer"])}
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
        return split_rows(*self._run_utf8(spelled, b"\n".join(spelled)))

    def _run_utf8(self, texts: list[bytes], joined: bytes) -> Rows:
        """Encode texts that are UTF-8. `joined` holds all of them, with one byte between two texts."""
        places = self._find_disputed_characters(joined)
        if not len(places):
            return self._run(texts)
        ends = np.cumsum([len(text) + 1 for text in texts])
        by_text = np.split(places, np.searchsorted(places, ends[:-1]))
        begins = [0, *ends[:-1].tolist()]
        return self._run_both_engines(
            [self._split_between_engines(*each) for each in zip(texts, map(np.subtract, by_text, begins), strict=True)]
        )

    def _find_disputed_characters(self, text: bytes) -> Int64[np.ndarray, " places"]:
        """Return the offsets in UTF-8 of the characters that differ between versions of Unicode."""
        units = np.frombuffer(b"" if text.isascii() else text, dtype=np.uint8)
        strange = [np.empty(0, dtype=np.int64)]
        for begin in range(0, len(units), SCAN_BYTES):
            places = np.flatnonzero(units[begin : begin + SCAN_BYTES] >= self._lowest) + begin
            strange.append(places[~self._is_undisputed[_code_points(units, places)]])
        return np.concatenate(strange)

    def _split_between_engines(self, text: bytes, places: Int64[np.ndarray, " places"]) -> list[bytes]:
        """Split a text into pieces whose ids, joined, are the ids of the text.

        Every second piece is for `tokenizers`.
        """
        if not len(places):
            return [text]
        if not self._may_be_cut:
            return [b"", text]
        pieces: list[bytes] = []
        done = 0
        for place in places.tolist():
            if place >= done:
                begin = max(last_cut(text, done, place), done)
                end = first_cut(text, max(place, begin + MIN_SPAN))
                pieces += [text[done:begin], text[begin:end]]
                done = end
        return [*pieces, text[done:]]

    def _run_both_engines(self, texts: list[list[bytes]]) -> Rows:
        """Return the ids of texts that `_split_between_engines` has split."""
        fast = iter(split_rows(*self._run([piece for pieces in texts for piece in pieces[::2]])))
        slow = iter(self._tokenizer.encode_by_reference([piece for pieces in texts for piece in pieces[1::2]]))
        rows = [[next(slow if place % 2 else fast) for place in range(len(pieces))] for pieces in texts]
        lengths = np.array([sum(map(len, row)) for row in rows], dtype=np.int64)
        return np.concatenate([part for row in rows for part in row]), lengths

    def _run(self, texts: list[bytes]) -> Rows:
        library = self._library or self._build()
        before = self._resident()
        with _translate_errors():
            encoded = library.encode_batch(texts, parallel=self._parallel)
        if isinstance(encoded, list):
            raise KeyboardInterrupt  # the library swallows an interrupt that comes while it makes its array
        layout = encoded.layout
        offsets, ids = np.asarray(layout.offsets.data), np.asarray(layout.content.data)
        self._count_growth(before, ids.nbytes, sum(map(len, texts)))
        return ids[offsets[0] : offsets[-1]].view(np.int32), np.diff(offsets)

    def _build(self) -> Any:  # an untyped package
        import gigatoken

        with _translate_errors():
            self._library = gigatoken.Tokenizer.from_json(self._definition)
        self._grown = self._seen = 0
        self.builds += 1
        return self._library

    def _count_growth(self, before: int | None, result: int, seen: int) -> None:
        """Count the memory that a call added besides its result, and discard the library if it has grown too much."""
        after = self._resident()
        self._seen += seen
        if before is None or after is None:
            full = self._seen >= MAX_UNMEASURED
        else:
            self._grown += max(after - before - result, 0)
            full = self._grown >= MAX_GROWTH and self._seen >= MIN_BYTES
        if full:
            self._library = None
            # Return the memory to the system: the allocator of glibc would keep half of it after each build.
            if sys.platform.startswith("linux") and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
                libc.malloc_trim(0)


def _translate_errors() -> AbstractContextManager[None]:
    kinds = ("RuntimeError", "ValueError", "PanicException")
    return library_errors("gigatoken fails", "engine='tokenizers'", kinds)


def _code_points(
    units: UInt8[np.ndarray, " bytes"], places: Int64[np.ndarray, " places"]
) -> Int64[np.ndarray, " places"]:
    """Return the code points of the characters at these places. Each has two or more bytes."""
    lead = units[places].astype(np.int64)
    # Three bytes are read for every character. Bytes after the end of a shorter character are not used.
    one, two, three = (units[np.minimum(places + i, len(units) - 1)].astype(np.int64) & 0x3F for i in (1, 2, 3))
    of_three = (lead & 0xF) << 12 | one << 6 | two
    of_four = (lead & 0x7) << 18 | one << 12 | two << 6 | three
    return np.where(lead >= 0xF0, of_four, np.where(lead >= 0xE0, of_three, (lead & 0x1F) << 6 | one))


@functools.cache
def _undisputed_code_points() -> Bool[np.ndarray, " code_points"]:
    """Return a mask of the code points whose category is the same in Unicode 3.2 and in all later versions."""
    is_known = np.zeros(sys.maxunicode + 1, dtype=bool)
    category = unicodedata.ucd_3_2_0.category
    is_known[:0x30000] = [category(chr(code)) != "Cn" for code in range(0x30000)]
    # Below U+0800, from U+2000 to U+2FFF and from U+1F000 to U+1FFFF, both libraries know the same letters.
    is_known[:0x800] = is_known[0x2000:0x3000] = is_known[0x1F000:0x20000] = True
    return is_known


@functools.cache
def _code_points_that_nfc_keeps() -> Bool[np.ndarray, " code_points"]:
    """Return a mask of the undisputed code points that NFC does not change next to any other character."""
    stable = _undisputed_code_points().copy()
    stable[[match.start() for match in _CHANGED_BY_NFC.finditer("".join(map(chr, range(sys.maxunicode + 1))))]] = False
    return stable


def _respell(step: Definition) -> Definition:
    if step["type"] == "Sequence":
        return {**step, "pretokenizers": [_respell(one) for one in step["pretokenizers"]]}
    pattern = step["pattern"].get("Regex") if step["type"] == "Split" else None
    return {**step, "pattern": {"Regex": _GIGATOKEN_SPELLING[pattern]}} if pattern in _GIGATOKEN_SPELLING else step


def resident_bytes() -> int | None:
    """Return the memory of this process in bytes, or ``None`` if the system has no cheap way to ask."""
    if not sys.platform.startswith("linux"):
        return None
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * mmap.PAGESIZE
