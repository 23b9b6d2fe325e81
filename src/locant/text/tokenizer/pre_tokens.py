r"""Where a text may be cut so that its parts have the ids of the whole: between two pre-tokens.

A document of gigabytes has to be encoded in parts. That is only right where the tokenizer would separate them anyway:
the pre-tokens into which it splits a text before it merges letters must come out the same. For the patterns in the
table below this is so **between a letter and the ASCII space, tab or newline after it**:

* No alternative of these patterns matches a letter and then white space. So a pre-token that begins before the cut
  ends at it or before it, whether white space stops it or the end of the part.
* None looks back, so what comes after the cut does not depend on what stands before it.
* One looks forward: ``\s+(?!\S)``, white space but its last. It begins at white space, so not at the letter before
  the cut, and none of it stands before the cut.

Other places are not safe: the tests show one text for each. A letter means one that every version of Unicode since 3.0
calls one, so that no two libraries can differ over it.
"""

from __future__ import annotations

import re

from locant.text.tokenizer.definition import Definition, pre_tokenizers
from locant.text.tokenizer.tiktoken_files import CONTRACTION, LOWER, UPPER

__all__ = ["LONGEST_LETTER", "last_cut", "why_not_cut"]

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
