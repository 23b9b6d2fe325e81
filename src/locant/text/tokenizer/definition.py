r"""A `tokenizer.json` as data: its special tokens, its bytes, its fingerprint, and the places where a text may be cut.

The `tokenizers` library defines the format and runs the tokenizer. This module adds `hide_tokens`, which makes the same
tokenizer without some of its special tokens. The library has an option for this (`encode_special_tokens`). With this
option, the library does not look for these tokens in the text. But a Unigram or WordLevel vocabulary, or a merge, can
still produce one. So `hide_tokens` renames these tokens everywhere, to names that no text can contain.

A text may be cut **between a letter and the ASCII space, tab or newline after it**, if the pattern that splits its
words is in the table below. Then the parts have the same ids as the whole text, because they have the same pre-tokens
(the pieces into which a text is split before its letters are merged):

* No alternative of these patterns matches a letter and then white space. So a pre-token that begins before the cut
  ends at the cut or before it, whether white space or the end of the part stops it.
* No alternative looks back, so the text after the cut is split independently of the text before it.
* One alternative looks forward: ``\s+(?!\S)``, white space without its last character. It begins at white space, not
  at the letter before the cut, so it matches nothing before the cut.

Other places are not safe. The tests have a text for each of them. A letter is a character that every version of Unicode
since 3.2 counts as a letter (`is_letter`), so all libraries agree about it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import secrets
import unicodedata
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import tokenizers

from locant.errors import InputError, RangeError

END_OF_TEXT = "<|endoftext|>"
STARTS = ("[CLS]", "<s>", "<cls>")
SEPARATORS = ("[SEP]", "</s>", "<sep>")

Definition = dict[str, Any]


_PRINTS = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_SPARE = iter(range(0x100, 0x200))
BYTE_SPELLING = [chr(byte if byte in _PRINTS else next(_SPARE)) for byte in range(256)]
"""The spelling of each byte in byte-level vocabularies: its own character if it is printable, else one above U+00FF."""
_BYTE = {letter: byte for byte, letter in enumerate(BYTE_SPELLING)}


@contextmanager
def library_errors(cause: str, remedy: str, kinds: Collection[str] = ("Exception",)) -> Generator[None]:
    """Convert errors of another library into an `InputError`, selected by the names of their types.

    `tokenizers` raises the bare `Exception`, and a panic in Rust is not an `Exception`, so an ``except`` clause cannot
    select them.
    """
    try:
        yield
    except BaseException as error:
        if (kind := type(error).__name__) in kinds:
            message = str(error).strip().splitlines()[:1]
            raise InputError(f"{cause}: {''.join(message) or kind}", remedy) from None
        raise


def parse(text: str, source: str) -> tuple[Definition, tokenizers.Tokenizer]:
    """Return the definition in a `tokenizer.json`, and the library's tokenizer made from it."""
    remedy = "use a tokenizer.json written by the tokenizers library, by transformers or by Tokenizer.save"
    try:
        definition = json.loads(text)
        # Written again, so that the library reads what `json` has read, for example if a key occurs twice.
        text = json.dumps(definition, ensure_ascii=False).encode().decode()
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source} is not JSON: {error}", remedy) from None
    if not isinstance(definition, dict) or not isinstance(definition.get("model"), dict):
        raise InputError(f"{source} is JSON, but not a tokenizer: it has no model", remedy)
    if _would_abort(definition["model"]):
        raise InputError(f"{source} has merges that do not fit its continuing_subword_prefix", remedy)
    with library_errors(f"{source} is not a tokenizer that the tokenizers library can read", remedy):
        library = tokenizers.Tokenizer.from_str(text)
    vocab = definition["model"].get("vocab")
    if definition["model"].get("type") == "BPE" and len({*vocab.values()}) < len(vocab):  # it would write wrong merges
        raise InputError(f"{source} gives several entries of its vocabulary one id", remedy)
    for token in definition.get("added_tokens") or []:
        spelling, number = token["content"], library.token_to_id(token["content"])
        if spelling and number != token["id"]:
            cause = f"{source} gives the added token {spelling!r} the id {token['id']}, but its vocabulary has {number}"
            raise InputError(cause, "save the tokenizer again with the program that made it")
    return definition, library


def _would_abort(model: Definition) -> bool:
    """Return True if the library would abort the process, because the right part of a merge lacks the prefix."""
    prefix, merges = model.get("continuing_subword_prefix"), model.get("merges")
    if not (isinstance(prefix, str) and prefix and isinstance(merges, list)):
        return False
    rights = (merge.split(" ")[-1] if isinstance(merge, str) else merge[-1] for merge in merges if merge)
    return not all(isinstance(right, str) and right.startswith(prefix) for right in rights)


def hide_tokens(definition: Definition, hidden: Collection[str]) -> Definition:
    """Return a tokenizer that gives every text the same ids, but never the id of a hidden token.

    It has no post-processor (such as [CLS] around a text), no truncation, no padding and no BPE dropout, so all ids
    come from the text itself. `definition` has the form that the library writes. `hidden` holds spellings of added
    tokens.

    Byte tokens, such as ``<0xE6>``, keep their names, because the model looks them up by name for every character that
    it does not know. A text that spells such a name does not yield the token.
    """
    if _steps(definition)[-1:] == ["ByteLevel"] and (letters := _BYTE.keys() & set(hidden)):
        letter = min(letters)
        cause = f"got the special token {letter!r}, which also spells the byte 0x{_BYTE[letter]:02x} of ordinary text"
        raise InputError(cause, f"pass allowed_special=[{letter!r}]")
    byte_tokens = _byte_tokens(definition["model"]) & set(hidden)
    # Random, so that no text can contain it.
    secret = secrets.token_hex(16)
    names = {name: secret + name for name in hidden if name not in byte_tokens}
    added = [
        {**token, "content": names[token["content"]], "normalized": False} if token["content"] in names else token
        for token in definition["added_tokens"]
        if token["content"] not in byte_tokens
    ]
    off = {"truncation": None, "padding": None, "post_processor": None}
    return {
        **definition,
        **off,
        "added_tokens": added,
        "model": _rename_tokens(definition["model"], names, byte_tokens),
    }


def _byte_tokens(model: Definition) -> set[str]:
    """Return the entries of a vocabulary that spell one byte each, if the model falls back to them."""
    if not model.get("byte_fallback"):
        return set()
    entries = model["vocab"]
    spellings = {spelling for spelling, _ in entries} if isinstance(entries, list) else entries.keys()
    return spellings & {f"<0x{byte:02X}>" for byte in range(256)}


def _rename_tokens(model: Definition, names: dict[str, str], never_merged: Collection[str]) -> Definition:
    vocab = model["vocab"]
    if isinstance(vocab, list):  # Unigram: [spelling, score] in the order of the ids
        return {**model, "vocab": [[names.get(spelling, spelling), score] for spelling, score in vocab]}
    renamed = {**model, "vocab": {names.get(spelling, spelling): number for spelling, number in vocab.items()}}
    if model.get("unk_token") in names:
        renamed["unk_token"] = names[model["unk_token"]]
    if model["type"] == "BPE":
        renamed["dropout"] = None
        prefix = model.get("continuing_subword_prefix") or ""
        unmerged = {*names, *never_merged}
        renamed["merges"] = [
            [left, right]
            for left, right in _merges(model)
            if unmerged.isdisjoint((left, right, left + right.removeprefix(prefix)))
        ]
    return renamed


def _merges(model: Definition) -> list[list[str]]:
    """Return the merges as pairs. Older files write each pair as one string with a space."""
    return [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]


def byte_table(definition: Definition) -> list[bytes | None] | None:
    """Return the bytes of every id (``None`` if unused), or ``None`` if the model is not a BPE of all 256 bytes."""
    model, added = definition["model"], definition["added_tokens"]
    if model["type"] != "BPE" or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    if (definition["decoder"] or {}).get("type") != "ByteLevel" or _steps(definition)[-1:] != ["ByteLevel"]:
        return None
    if not set(BYTE_SPELLING) <= model["vocab"].keys() - {token["content"] for token in added}:
        return None
    table: list[bytes | None] = [None] * (1 + max([*model["vocab"].values(), *(token["id"] for token in added)]))
    for spelling, number in model["vocab"].items():
        letters = [_BYTE.get(letter) for letter in spelling]
        table[number] = spelling.encode() if None in letters else bytes(byte for byte in letters if byte is not None)
    for token in added:
        table[token["id"]] = token["content"].encode()
    return table


def is_lossless(definition: Definition) -> bool:
    """Return True if decoding restores the bytes of every text. The definition must have a `byte_table`."""
    ordinary = [token for token in definition["added_tokens"] if not token["special"]]
    if normalizers(definition) or any(token["lstrip"] or token["rstrip"] for token in ordinary):
        return False
    *before, last = pre_tokenizers(definition)
    keep_text = (
        step["type"] in ("Split", "Punctuation", "Digits") and step.get("behavior") != "Removed" for step in before
    )
    return all(keep_text) and not last["add_prefix_space"]


def is_bytes(definition: Definition) -> bool:
    """Return True if every id is the byte of that value or a special token. The definition must be lossless."""
    model, added = definition["model"], definition["added_tokens"]
    names = {token["content"] for token in added}
    learned = {spelling: number for spelling, number in model["vocab"].items() if spelling not in names}
    return learned == _BYTE and all(token["special"] for token in added)


def normalizers(definition: Definition) -> list[Definition]:
    """Return the steps that normalize a text, in order."""
    step = definition["normalizer"]
    if step is None:
        return []
    return (
        [one for part in step["normalizers"] for one in normalizers({"normalizer": part})]
        if (step["type"] == "Sequence")
        else [step]
    )


def pre_tokenizers(definition: Definition) -> list[Definition]:
    """Return the steps that split a text into words, in order."""
    step = definition["pre_tokenizer"]
    if step is None:
        return []
    return step["pretokenizers"] if step["type"] == "Sequence" else [step]


def _steps(definition: Definition) -> list[str]:
    return [step["type"] for step in pre_tokenizers(definition)]


def fingerprint(definition: Definition) -> str:
    """Return a SHA-256 of everything that decides the ids: normalizer, pre-tokenizer, model and added tokens.

    It does not depend on the spelling of the file, the decoder, the post-processor, truncation or padding.
    """
    model = {name: value for name, value in definition["model"].items() if value is not None and name != "dropout"}
    if "merges" in model:
        model["merges"] = _merges(model)
    steps = {name: definition.get(name) for name in ("normalizer", "pre_tokenizer")}
    added = sorted(definition.get("added_tokens") or [], key=lambda token: token["id"])
    text = json.dumps({**steps, "model": model, "added_tokens": added}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


Template = list[tuple[str | list[int], int]]
"""The parts of a sequence, each with its segment. ``"A"`` and ``"B"`` are the texts, and lists are special tokens."""


def pair_template(
    definition: Mapping[str, Any],
    special_tokens: Mapping[str, int],
    is_pair: bool,
    start: str | None,
    separator: str | None,
) -> Template:
    """Return the order of texts and special tokens, for one text or two.

    It is the order that the file defines, or else BERT's (arXiv:1810.04805).
    """
    if start is None and separator is None and (template := own_template(definition, is_pair)) is not None:
        return template
    begin = _special("start", start, STARTS, special_tokens)
    return _bert(begin, _special("separator", separator, SEPARATORS, special_tokens), is_pair, roberta=False)


def own_template(definition: Mapping[str, Any], is_pair: bool) -> Template | None:
    """Return the order that the file defines, or ``None`` if it does not define one."""
    processor: dict[str, Any] = definition["post_processor"] or {"type": ""}
    steps: list[dict[str, Any]] = processor["processors"] if processor["type"] == "Sequence" else [processor]
    for step in steps:
        if step["type"] == "TemplateProcessing":
            template: Template = []
            for part in step["pair" if is_pair else "single"]:
                if "Sequence" in part:
                    template.append((part["Sequence"]["id"], part["Sequence"]["type_id"]))
                else:
                    token = part["SpecialToken"]
                    template.append((step["special_tokens"][token["id"]]["ids"], token["type_id"]))
            return template
        if step["type"] in ("BertProcessing", "RobertaProcessing"):
            return _bert(step["cls"][1], step["sep"][1], is_pair, roberta=step["type"] == "RobertaProcessing")
    return None


def _bert(start: int, end: int, is_pair: bool, *, roberta: bool) -> Template:
    """Return ``start A end B end``. RoBERTa has two tokens in the middle, and one segment."""
    first: Template = [([start], 0), ("A", 0), ([end], 0)]
    if not is_pair:
        return first
    return [*first, ([end], 0), ("B", 0), ([end], 0)] if roberta else [*first, ("B", 1), ([end], 1)]


def _special(option: str, name: str | None, usual: Sequence[str], special_tokens: Mapping[str, int]) -> int:
    names = ", ".join(map(repr, special_tokens)) or "none"
    if name is None:
        name = next((each for each in usual if each in special_tokens), None)
        if name is None:
            raise InputError(
                f"got a tokenizer whose special tokens are {names}, and none of them is {' or '.join(usual)}",
                f"pass one of them as {option}=, or use "
                "Tokenizer.train(..., special_tokens=['[PAD]', '[CLS]', '[SEP]'])",
            )
    if name not in special_tokens:
        raise RangeError(f"got {name!r} for {option}, expected a special token: {names}", f"{option}={usual[0]!r}")
    return special_tokens[name]


def byte_definition() -> Definition:
    """Return a tokenizer whose ids 0 to 255 are the bytes of UTF-8. Id 256 is the end of a text."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocab = {letter: byte for byte, letter in enumerate(BYTE_SPELLING)}
    return byte_level(level, {END_OF_TEXT: 256}, {"type": "BPE", "vocab": vocab, "merges": []})


def byte_level(
    level: Definition, special_tokens: Mapping[str, int], model: Definition, split: Definition | None = None
) -> Definition:
    """Return a byte-level tokenizer with the pre-tokenizer `level`, after an optional pre-tokenizer `split`."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": name, **flags} for name, number in special_tokens.items()],
        "normalizer": None,
        "pre_tokenizer": level if split is None else {"type": "Sequence", "pretokenizers": [split, level]},
        "post_processor": None,
        "decoder": level,
        "model": model,
    }


CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

# A character before white space. It ends a part only if `is_letter` accepts it. In every script that has letters, some
# megabytes of text have such a place. A text without such a place is encoded as a whole.
_BEFORE_SPACE = re.compile(
    rb"(?:[A-Za-z]|[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3})(?=[ \t\n\r])"
)


@functools.cache
def is_letter(character: bytes) -> bool:
    """Return True if this is the UTF-8 of one letter, of any kind, in Unicode 3.2 (2002) and in the current version.

    >>> is_letter("த".encode()), is_letter("ி".encode()), is_letter(b"1")  # a Tamil letter, and a vowel sign
    (True, False, False)
    """
    letter = character.decode(errors="replace")
    if len(letter) != 1:
        return False
    return all(version.category(letter).startswith("L") for version in (unicodedata.ucd_3_2_0, unicodedata))


def _cuts(text: bytes, begin: int, end: int) -> list[int]:
    """Return all places between a letter and white space in ``text[begin:end]``."""
    return [match.end() for match in _BEFORE_SPACE.finditer(text, begin, end) if is_letter(match[0])]


LONGEST_LETTER = 4
"""The largest number of bytes of a letter in UTF-8.

The letter that ends at a place begins at most this many bytes before the place.
"""

_LEAD = r"[^\r\n\p{L}\p{N}]?"

# The alternatives of the patterns of GPT-2, GPT-4, GPT-4o, Llama 3, Qwen 2 and 3, DeepSeek and similar models. The
# whole argument above holds for each of them. `_LETTERS` match at every letter, and `_SPACES` at white space.
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

# These normalizers change the text before white space independently of the text after it.
_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "BertNormalizer"}

# Normalizers that forbid a cut, and the reasons.
_OTHER_NORMALIZERS = {
    "Prepend": "would write its text before every part of a document, but it belongs only before the first",
    "Strip": "would strip white space from every part of a document",
    "Replace": "may replace the white space at which a document is cut",
    "Precompiled": "may change white space together with its neighbours",
}


def last_cut(text: bytes, begin: int = 0, end: int | None = None) -> int:
    """Return the last place in ``text[begin:end]`` where the text may be cut, or 0 if it may not be cut there.

    The tokenizer must allow cuts.
    """
    high = len(text) if end is None else end
    size = 1024
    while True:
        low = max(high - size, begin)
        places = _cuts(text, low, high)
        if places or low == begin:
            return places[-1] if places else 0
        size *= 8


def first_cut(text: bytes, begin: int) -> int:
    """Return the first place at or after `begin` where the text may be cut, or its end.

    The tokenizer must allow cuts.
    """
    matches = _BEFORE_SPACE.finditer(text, begin)
    return next((match.end() for match in matches if is_letter(match[0])), len(text))


def why_not_cut(definition: Definition) -> str | None:
    """Return why the texts of this tokenizer may not be cut, or ``None`` if they may be cut.

    `definition` has the form that the library writes.
    """
    if unknown := [step["type"] for step in normalizers(definition) if step["type"] not in _NORMALIZERS]:
        return f"its normalizer {unknown[0]} {_OTHER_NORMALIZERS.get(unknown[0], 'is not known to leave cuts alone')}"
    steps = pre_tokenizers(definition)
    divides = [_divides(step) for step in steps]
    if None in divides:
        return f"it may split words in a way that does not end at white space: {steps[divides.index(None)]}"
    if not any(divides):
        return "its words do not end at white space"
    for token in (token for token in definition["added_tokens"] if not token["special"]):
        if (
            token["single_word"]
            or token["lstrip"]
            or token["rstrip"]
            or _cuts(name := token["content"].encode(), 0, len(name))
        ):
            return f"its token {token['content']!r} may lie across white space"
    return None


def _divides(step: Definition) -> bool | None:
    """Return whether a step separates letters from white space, or ``None`` if this is unknown."""
    match step["type"]:
        case "ByteLevel":
            return None if step["add_prefix_space"] else step["use_regex"]
        case "WhitespaceSplit" | "Whitespace" | "BertPreTokenizer":
            return True
        case "Digits" | "Punctuation":
            return False
        case "Split" if "Regex" in step["pattern"] and step["behavior"] == "Isolated" and not step["invert"]:
            parts = _alternatives(step["pattern"]["Regex"].replace("\r", r"\r").replace("\n", r"\n"))
            return bool(parts & (_LETTERS | _SPACES)) if parts <= _LETTERS | _SPACES | _OTHERS else None
        case _:
            return None


def _alternatives(pattern: str) -> set[str]:
    """Return the top-level alternatives of a regular expression, between bars outside brackets and parentheses."""
    alternatives, depth, in_class, begin, place = set[str](), 0, False, 0, 0
    while place < len(pattern):
        letter = pattern[place]
        if letter == "\\":
            place += 1
        elif in_class or letter == "[":
            in_class = letter != "]"
        elif letter == "|" and not depth:
            alternatives.add(pattern[begin:place])
            begin = place + 1
        else:
            depth += {"(": 1, ")": -1}.get(letter, 0)
        place += 1
    return alternatives | {pattern[begin:]}
