"""A `tokenizer.json` as data: its special tokens and bytes, and which of its fields decide the ids.

The format is that of the `tokenizers` library, which also runs it. What it does not do is done here: `without` makes
the same tokenizer, to which some special tokens are unknown. The library's own switch for that
(`encode_special_tokens`) keeps it from looking for them in the text, but a Unigram or WordLevel vocabulary, or a merge,
can still make one. So they are renamed, everywhere, to something no text can contain.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import tokenizers

from locant.errors import InputError

__all__ = [
    "BYTE_SPELLING", "END_OF_TEXT", "Definition", "byte_definition", "byte_level", "byte_table", "fingerprint",
    "is_bytes", "is_lossless", "library_errors", "parse", "pre_tokenizers", "without",
]  # fmt: skip

END_OF_TEXT = "<|endoftext|>"

Definition = dict[str, Any]


_PRINTS = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS = iter(range(0x100, 0x200))
BYTE_SPELLING = [chr(byte if byte in _PRINTS else next(_OTHERS)) for byte in range(256)]
"""How byte-level vocabularies spell each byte: as itself where it prints, else as a letter from U+0100 on."""
_BYTE = {letter: byte for byte, letter in enumerate(BYTE_SPELLING)}


@contextmanager
def library_errors(cause: str, remedy: str, kinds: Collection[str] = ("Exception",)) -> Generator[None]:
    """Converts errors of another library, by the names of their types, into an `InputError`.

    `tokenizers` raises the bare `Exception`, and a panic in Rust is none: an ``except`` clause cannot tell them apart.
    """
    try:
        yield
    except BaseException as error:
        if (kind := type(error).__name__) in kinds:
            said = str(error).strip().splitlines()[:1]
            raise InputError(f"{cause}: {''.join(said) or kind}", remedy) from None
        raise


def parse(text: str, source: str) -> tuple[Definition, tokenizers.Tokenizer]:
    """The definition in a `tokenizer.json`, and the library's tokenizer made from it."""
    remedy = "a tokenizer.json written by the tokenizers library, by transformers or by Tokenizer.save"
    try:
        definition = json.loads(text)
        # Written anew, so that the library reads what was read here, where a key stands twice for example.
        text = json.dumps(definition, ensure_ascii=False).encode().decode()
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source} is not JSON: {error}", remedy) from None
    if not isinstance(definition, dict) or not isinstance(definition.get("model"), dict):
        raise InputError(f"{source} is JSON, but no tokenizer: it has no model", remedy)
    if _aborts(definition["model"]):
        raise InputError(f"{source} has merges that do not fit its continuing_subword_prefix", remedy)
    with library_errors(f"{source} is no tokenizer that the tokenizers library can read", remedy):
        library = tokenizers.Tokenizer.from_str(text)
    vocab = definition["model"].get("vocab")
    if definition["model"].get("type") == "BPE" and len({*vocab.values()}) < len(vocab):  # it writes others' merges
        raise InputError(f"{source} gives several entries of its vocabulary one id", remedy)
    for token in definition.get("added_tokens") or []:
        spelling, number = token["content"], library.token_to_id(token["content"])
        if spelling and number != token["id"]:
            cause = f"{source} gives the added token {spelling!r} the id {token['id']}, its vocabulary says {number}"
            raise InputError(cause, "saving the tokenizer again with the program that made it")
    return definition, library


def _aborts(model: Definition) -> bool:
    """Whether the library would end the whole process: it cuts the prefix off each merge's right part, unchecked."""
    prefix, merges = model.get("continuing_subword_prefix"), model.get("merges")
    if not (isinstance(prefix, str) and prefix and isinstance(merges, list)):
        return False
    rights = (merge.split(" ")[-1] if isinstance(merge, str) else merge[-1] for merge in merges if merge)
    return not all(isinstance(right, str) and right.startswith(prefix) for right in rights)


def without(definition: Definition, hidden: Collection[str]) -> Definition:
    """The same ids for every text, but never the id of a hidden token, however the text is spelled.

    What adds or removes ids besides the text itself is switched off too: post-processors (such as [CLS] around it),
    truncation, padding, and BPE dropout. `definition` is as the library writes it, `hidden` spellings of added tokens.
    """
    if _steps(definition)[-1:] == ["ByteLevel"] and (letters := _BYTE.keys() & set(hidden)):
        letter = min(letters)
        cause = f"got the special token {letter!r}, which also spells the byte 0x{_BYTE[letter]:02x} of ordinary text"
        raise InputError(cause, f"allowed_special=[{letter!r}]")
    # Random, so that no text can contain it.
    secret = secrets.token_hex(16)
    names = {name: secret + name for name in hidden}
    added = [
        {**token, "content": names[token["content"]], "normalized": False} if token["content"] in names else token
        for token in definition["added_tokens"]
    ]
    off = {"truncation": None, "padding": None, "post_processor": None}
    return {**definition, **off, "added_tokens": added, "model": _renamed(definition["model"], names)}


def _renamed(model: Definition, names: dict[str, str]) -> Definition:
    vocab = model["vocab"]
    if isinstance(vocab, list):  # Unigram: [spelling, score] in the order of the ids
        return {**model, "vocab": [[names.get(spelling, spelling), score] for spelling, score in vocab]}
    renamed = {**model, "vocab": {names.get(spelling, spelling): number for spelling, number in vocab.items()}}
    if model.get("unk_token") in names:
        renamed["unk_token"] = names[model["unk_token"]]
    if model["type"] == "BPE":
        renamed["dropout"] = None
        prefix = model.get("continuing_subword_prefix") or ""
        renamed["merges"] = [
            [left, right]
            for left, right in _merges(model)
            if not names.keys() & {left, right, left + right.removeprefix(prefix)}
        ]
    return renamed


def _merges(model: Definition) -> list[list[str]]:
    """Pairs; older files write each as one string with a space."""
    return [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]


def byte_table(definition: Definition) -> list[bytes | None] | None:
    """The bytes of every id (``None`` for an unused one), or ``None`` if this is no byte-level BPE of all 256 bytes."""
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
    """Whether the bytes of every text come back, for a definition that has a `byte_table`."""
    ordinary = [token for token in definition["added_tokens"] if not token["special"]]
    if definition["normalizer"] is not None or any(token["lstrip"] or token["rstrip"] for token in ordinary):
        return False
    *before, last = pre_tokenizers(definition)
    kept = [step["type"] in ("Split", "Punctuation", "Digits") and step.get("behavior") != "Removed" for step in before]
    return all(kept) and not last["add_prefix_space"]


def is_bytes(definition: Definition) -> bool:
    """Whether every id is the byte of that value or a special token's, for a lossless definition."""
    model, added = definition["model"], definition["added_tokens"]
    names = {token["content"] for token in added}
    learned = {spelling: number for spelling, number in model["vocab"].items() if spelling not in names}
    return learned == _BYTE and all(token["special"] for token in added)


def pre_tokenizers(definition: Definition) -> list[Definition]:
    """The steps that split a text into words, in their order."""
    step = definition["pre_tokenizer"]
    if step is None:
        return []
    return step["pretokenizers"] if step["type"] == "Sequence" else [step]


def _steps(definition: Definition) -> list[str]:
    return [step["type"] for step in pre_tokenizers(definition)]


def fingerprint(definition: Definition) -> str:
    """SHA-256 of what decides the ids: normalizer, pre-tokenizer, model and added tokens, however they are written.

    The decoder, the post-processor, truncation and padding have no part in it.
    """
    model = {name: value for name, value in definition["model"].items() if value is not None and name != "dropout"}
    if "merges" in model:
        model["merges"] = _merges(model)
    steps = {name: definition.get(name) for name in ("normalizer", "pre_tokenizer")}
    added = sorted(definition.get("added_tokens") or [], key=lambda token: token["id"])
    text = json.dumps({**steps, "model": model, "added_tokens": added}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def byte_definition() -> Definition:
    """Ids 0 to 255 are the bytes of UTF-8, 256 is the end of a text."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocab = {letter: byte for byte, letter in enumerate(BYTE_SPELLING)}
    return byte_level(level, {END_OF_TEXT: 256}, {"type": "BPE", "vocab": vocab, "merges": []})


def byte_level(
    level: Definition, special_tokens: Mapping[str, int], model: Definition, split: Definition | None = None
) -> Definition:
    """A byte-level tokenizer: its pre-tokenizer `level`, before which `split` may split the text."""
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
