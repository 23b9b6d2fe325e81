"""Encoding with `gigatoken`, so that its ids are those of the `tokenizers` library and its memory is bounded.

Five things about it (version 0.10) decide how it is used here:

* It always recognises special tokens in the text. So it is built from a definition that has none.
* It expects UTF-8, and may end the whole process at any other byte. So those are encoded here, one by one.
* It composes letters and accents (NFC) by a newer version of Unicode than `tokenizers`. So it never normalizes: it
  gets such texts only where every version of Unicode leaves them as they are.
* Some 4 700 code points are letters, marks or digits to it that `tokenizers` does not know. So texts with a character
  newer than Unicode 3.2 (2002), emoji and the like aside, go to `tokenizers`.
* It caches every word it has seen: its memory grows by up to twelve times the text. So it is discarded and built again
  (a twentieth of a second) when it has grown by `GROWTH`, or where the system does not tell, after `UNSEEN` of text.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import json
import re
import sys
import unicodedata
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int, Int32

from locant.text.tokenizer.definition import Definition, library_errors
from locant.text.tokenizer.local_files import ENCODINGS
from locant.text.tokenizer.tokenizer import Tokenizer

__all__ = ["GROWTH", "UNSEEN", "GigatokenEngine", "why_not_gigatoken"]

GROWTH = 192 * 2**20
"""Bytes that its memory may grow by before it is built anew."""

UNSEEN = 16 * 2**20
"""Bytes of text after which it is built anew where its growth is not known: twelve times that at most."""

LEAST = 4 * 2**20
"""Bytes of text before it is built anew, whatever else grows meanwhile in the same process."""

# Between these characters nothing is composed, decomposed or put in another order, in any version of Unicode: letters,
# punctuation, currencies, arrows to dingbats but for one, Chinese, emoji; not accents, which could compose with them.
_CHANGED_BY_NFC = re.compile(
    "[^\u0000-\u02ff\u0391-\u03a1\u03a3-\u03ce\u0400-\u0482\u048a-\u052f\u05d0-\u05ea\u0621-\u063a\u0641-\u064a"
    "\u2010-\u2027\u2030-\u205e\u20a0-\u20bf\u2190-\u22ff\u2500-\u27bf\u3001-\u3029\u3030-\u303f\u3041-\u3096"
    "\u30a1-\u30fe\u4e00-\u9fa5\uac00-\ud7a3\uff01-\uff5e\U0001f300-\U0001f6ff\U0001f900-\U0001f9ff]"
)

# The beginning, in UTF-8, of what could be a letter that not all versions of Unicode know: below U+0800, from U+2000
# to U+9FFF, in Korean, and from U+1F000 on, only symbols are added.
_MAY_BE_NEW = re.compile(rb"[\xe0\xe1\xea\xf1-\xf4]|\xf0[^\x9f]")

# The pattern of cl100k_base, as `tokenizers` needs it and as gigatoken does.
_SPELLED = {
    ENCODINGS["cl100k_base"].pattern: (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
        r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s+"
    )
}


@functools.cache
def _long_known() -> Bool[np.ndarray, " code_points"]:
    """For every code point, whether all versions of Unicode from 3.2 on agree on what it is."""
    known = np.zeros(sys.maxunicode + 1, dtype=bool)
    category = unicodedata.ucd_3_2_0.category
    known[:0x30000] = [category(chr(code)) != "Cn" for code in range(0x30000)]
    known[0x2000:0x3000] = known[0x1F000:0x20000] = True  # see _MAY_BE_NEW
    return known


def _refusals() -> AbstractContextManager[None]:
    kinds = ("RuntimeError", "ValueError", "PanicException")
    return library_errors("gigatoken refuses", "engine='tokenizers'", kinds)


def why_not_gigatoken(tokenizer: Tokenizer) -> str | None:
    """Why `gigatoken` cannot be used, before anything is tried; ``None`` if it can be tried."""
    if tokenizer.only_bytes:
        return "every byte is an id, so there is nothing to look up"
    if not tokenizer.byte_level:
        return "the tokenizer is no byte-level BPE"
    if (normalizer := tokenizer.plain_definition()["normalizer"]) not in (None, {"type": "NFC"}):
        return f"the tokenizer changes texts first ({normalizer['type']})"
    if importlib.util.find_spec("gigatoken") is None:
        return "gigatoken is not installed: pip install 'locant[fast]'"
    return None


class GigatokenEngine:
    """Ids by `gigatoken`; `resident` gives the bytes of memory of this process, or ``None`` where not known."""

    def __init__(
        self, tokenizer: Tokenizer, parallel: bool | None, resident: Callable[[], int | None] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        definition = tokenizer.plain_definition()
        self._changes = definition["normalizer"] is not None
        plain = {**definition, "normalizer": None, "pre_tokenizer": _respelled(definition["pre_tokenizer"])}
        self._definition = json.dumps(plain, ensure_ascii=False)
        self._parallel = parallel
        self._resident = resident or resident_bytes
        self._library: Any = None
        self._grown = self._seen = 0
        self.builds = 0

    def encode(self, texts: list[bytes]) -> tuple[Int32[np.ndarray, " tokens"], Int[np.ndarray, " documents"]]:
        """The ids of all texts, one after the other, and how many each has."""
        with suppress(UnicodeDecodeError):
            if not self._is_strange(b"\n".join(texts).decode()):
                return self._run(texts)
        rows = self._tokenizer.assemble(texts, self._rows)
        return np.concatenate(rows), np.array([len(row) for row in rows], dtype=np.int64)

    def _is_strange(self, text: str) -> bool:
        """Whether `tokenizers` has to encode it, because versions of Unicode differ about it."""
        if self._changes and _CHANGED_BY_NFC.search(text) is not None:
            return True
        if _MAY_BE_NEW.search(text.encode()) is None:
            return False
        return not _long_known()[np.frombuffer(text.encode("utf-32-le"), dtype="<u4")].all()

    def _rows(self, texts: list[str]) -> list[Int32[np.ndarray, " _"]]:
        strange = [self._is_strange(text) for text in texts]
        ids, lengths = self._run([text.encode() for text, other in zip(texts, strange, strict=True) if not other])
        rows = iter(np.split(ids, np.cumsum(lengths)[:-1]))
        others = iter(self._tokenizer.encode_batch([text for text, other in zip(texts, strange, strict=True) if other]))
        return [next(others if other else rows) for other in strange]

    def _run(self, texts: list[bytes]) -> tuple[Int32[np.ndarray, " tokens"], Int[np.ndarray, " documents"]]:
        library = self._library or self._build()
        before = self._resident()
        with _refusals():
            found = library.encode_batch(texts, parallel=self._parallel)
        if isinstance(found, list):
            raise KeyboardInterrupt  # it was interrupted while it made its array, and has swallowed that
        layout = found.layout
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
        """Count what this call added, the result aside; forget it all where that is too much."""
        after = self._resident()
        self._seen += seen
        if before is None or after is None:
            full = self._seen >= UNSEEN
        else:
            self._grown += max(after - before - result, 0)
            full = self._grown >= GROWTH and self._seen >= LEAST
        if full:
            self._library = None
            # Returned to the system: the allocator of glibc would keep half of it, build after build.
            if sys.platform.startswith("linux") and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
                libc.malloc_trim(0)


def _respelled(step: Definition) -> Definition:
    if step["type"] == "Sequence":
        return {**step, "pretokenizers": [_respelled(one) for one in step["pretokenizers"]]}
    pattern = step["pattern"].get("Regex") if step["type"] == "Split" else None
    return {**step, "pattern": {"Regex": _SPELLED[pattern]}} if pattern in _SPELLED else step


def resident_bytes() -> int | None:
    """How much memory this process holds, or ``None`` where the system does not tell cheaply."""
    if not sys.platform.startswith("linux"):
        return None
    import resource

    return int(Path("/proc/self/statm").read_bytes().split()[1]) * resource.getpagesize()
