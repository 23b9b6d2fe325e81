r"""Many documents to ids at once: by the `tokenizers` library, or by `gigatoken` where its ids are the same.

The `tokenizers` library is the reference, as `Tokenizer.encode` runs it: 3 to 6 MB/s on one core. `gigatoken` (60 to
500 MB/s, words seen for the first time or before) is used only where `choose_engine` found its ids equal.

A document of any length is encoded in memory that does not grow with it, because it is cut **between a letter and the
ASCII space, tab or newline after it**, where the pattern that splits its words is one of those in the table below. Then
the pre-tokens, into which a text is split before its letters are merged, are those of the whole:

* No alternative of these patterns matches a letter and then white space. So a pre-token that begins before the cut
  ends at it or before it, whether white space stops it or the end of the part.
* None looks back, so what comes after the cut does not depend on what stands before it.
* One looks forward: ``\s+(?!\S)``, white space but its last. It begins at white space, so not at the letter before
  the cut, and none of it stands before the cut.

Other places are not safe: the tests show one text for each. A letter means one that every version of Unicode since 3.0
calls one, so that no two libraries can differ over it. Where no such place is known, a document is encoded as a whole,
up to `WHOLE` bytes: the engine needs some hundred bytes for each of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
from jaxtyping import Int32, Int64

from locant.arguments import one_of
from locant.errors import InputError
from locant.text.tokenizer.definition import Definition, pre_tokenizers
from locant.text.tokenizer.gigatoken_engine import GigatokenEngine, why_not_gigatoken
from locant.text.tokenizer.local_files import CONTRACTION, LOWER, UPPER
from locant.text.tokenizer.tokenizer import Tokenizer

__all__ = [
    "LONGEST_LETTER", "PART", "PROBE_TEXTS", "WHOLE", "Encoded", "Engine", "EngineChoice", "EngineName",
    "choose_engine", "last_cut", "why_not_cut",
]  # fmt: skip

EngineName = Literal["tokenizers", "gigatoken"]
EngineChoice = Literal["auto"] | EngineName

PART = 2**20
"""Longer texts are cut into parts of about so many bytes, where they may be."""

WHOLE = 16 * 2**20
"""The most bytes that are encoded without a cut."""

Rows = tuple[Int32[np.ndarray, " tokens"], Int64[np.ndarray, " documents"]]
"""The ids of documents, one after the other, and how many each has."""

# Letters of the most used scripts, as UTF-8, each before white space. A Zulu, a Greek and a Chinese text of some
# megabytes has such a place; a text that has none is encoded as a whole.
_LETTER = rb"|".join(
    [
        rb"[A-Za-z]",
        rb"\xc3[\xa0-\xb6\xb8-\xbf]",  # à to ö, ø to ÿ
        rb"\xce[\xb1-\xbf]|\xcf[\x80-\x89]",  # Greek, α to ω
        rb"\xd0[\x90-\xbf]|\xd1[\x80-\x8f]",  # Cyrillic, А to я
        rb"\xd7[\x90-\xaa]",  # Hebrew
        rb"\xd8[\xa7-\xba]|\xd9[\x81-\x8a]",  # Arabic
        rb"\xe0\xa4[\x95-\xb9]",  # Devanagari consonants
        rb"\xe0\xb8[\x81-\xae]",  # Thai consonants
        rb"\xe3\x81[\x81-\xbf]|\xe3\x82[\x80-\x96\xa1-\xbf]|\xe3\x83[\x80-\xba]",  # kana
        rb"\xe4[\xb8-\xbf][\x80-\xbf]|[\xe5-\xe8][\x80-\xbf]{2}",  # Chinese, U+4E00 to U+8FFF
        rb"\xea[\xb0-\xbf][\x80-\xbf]|[\xeb\xec][\x80-\xbf]{2}|\xed[\x80-\x9d][\x80-\xbf]",  # Hangul
    ]
)
_CUT = re.compile(rb"(?:" + _LETTER + rb")(?=[ \t\n\r])")

LONGEST_LETTER = 4
"""How far before a place to look for the letter that ends there."""

_LEAD = r"[^\r\n\p{L}\p{N}]?"

# The alternatives of the patterns of GPT-2, GPT-4, GPT-4o, Llama 3, Qwen 2 and 3, DeepSeek and others like them. All of
# the argument above holds for each. Those of the first line match at every letter, those of the second at white space.
_LETTERS = {
    *(r"\p{L}+", r" ?\p{L}+", _LEAD + r"\p{L}+", _LEAD + r"[\p{L}\p{M}]+", r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"),
}
_SPACES = {r"\s+", r"\s"}
_OTHERS = {
    *(f"{_LEAD}{UPPER}*{LOWER}+{end}" for end in ("", CONTRACTION + "?")),
    *(f"{_LEAD}{UPPER}+{LOWER}*{end}" for end in ("", CONTRACTION + "?")),
    *(r"\s+(?!\S)", r"\s+\z", r"\s*[\r\n]+", r"\s*[\r\n]"),
    *(r"\p{N}", r"\p{N}+", r" ?\p{N}+", r"\p{N}{1,2}", r"\p{N}{1,3}", r"[0-9]", r"\d"),
    *(r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n]*"),
    *(r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r" ?[\p{P}\p{S}]+[\r\n]*"),
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
    "[一-龥぀-ゟ゠-ヿ]+",
    *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", CONTRACTION, r"'(?i:[sdmt]|ll|ve|re)"),
}

# These change what comes before white space independently of what comes after it.
_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "BertNormalizer"}


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


def last_cut(text: bytes, begin: int = 0, end: int | None = None) -> int:
    """The last place in ``text[begin:end]`` where a text may be cut, if the tokenizer allows it; 0 if there is none."""
    high = len(text) if end is None else end
    size = 1024
    while True:
        low = max(high - size, begin)
        places = [match.end() for match in _CUT.finditer(text, low, high)]
        if places or low == begin:
            return places[-1] if places else 0
        size *= 8


def why_not_cut(definition: Definition) -> str | None:
    """Why the texts of a tokenizer, as the library writes it, may not be cut, or ``None`` if they may."""
    normalizer: Definition = definition["normalizer"] or {"type": "Sequence", "normalizers": []}
    steps: list[Definition] = normalizer["normalizers"] if normalizer["type"] == "Sequence" else [normalizer]
    if unknown := [step["type"] for step in steps if step["type"] not in _NORMALIZERS]:
        return f"its normalizer {unknown[0]} may join what is separated"
    steps = pre_tokenizers(definition)
    divides = [_divides(step) for step in steps]
    if None in divides:
        return f"how it splits words is not known to end at white space: {steps[divides.index(None)]}"
    if not any(divides):
        return "its words do not end at white space"
    for token in (token for token in definition["added_tokens"] if not token["special"]):
        if token["single_word"] or token["lstrip"] or token["rstrip"] or _CUT.search(token["content"].encode()):
            return f"its token {token['content']!r} may lie across white space"
    return None


def _divides(step: Definition) -> bool | None:
    """Whether a step separates letters from white space; ``None`` where that is unknown."""
    match step["type"]:
        case "ByteLevel":
            return None if step["add_prefix_space"] else step["use_regex"]
        case "WhitespaceSplit" | "Whitespace" | "BertPreTokenizer":
            return True
        case "Digits" | "Punctuation":
            return False
        case "Split" if "Regex" in step["pattern"] and step["behavior"] == "Isolated" and not step["invert"]:
            found = _alternatives(step["pattern"]["Regex"].replace("\r", r"\r").replace("\n", r"\n"))
            return bool(found & (_LETTERS | _SPACES)) if found <= _LETTERS | _SPACES | _OTHERS else None
        case _:
            return None


def _alternatives(pattern: str) -> set[str]:
    """What stands between the bars of a regular expression, those in brackets and parentheses aside."""
    found, depth, in_class, begin, place = set[str](), 0, False, 0, 0
    while place < len(pattern):
        letter = pattern[place]
        if letter == "\\":
            place += 1
        elif in_class or letter == "[":
            in_class = letter != "]"
        elif letter == "|" and not depth:
            found.add(pattern[begin:place])
            begin = place + 1
        else:
            depth += {"(": 1, ")": -1}.get(letter, 0)
        place += 1
    return found | {pattern[begin:]}
