"""The encodings of OpenAI, read from what the `tiktoken` package has cached: never from the network.

`tiktoken` keeps each file under the SHA-1 of its address. It holds ranks: the bytes of every token, in the order in
which they merge. A `tokenizer.json` holds merges instead, so each token becomes the list of all pairs of tokens that it
can be made of; the ids come out the same. Reading one takes one to a few seconds.
"""

from __future__ import annotations

import base64
import hashlib
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from locant.errors import InputError
from locant.text.tokenizer.definition import BYTE_SPELLING, END_OF_TEXT, byte_level

__all__ = ["CONTRACTION", "ENCODINGS", "LOWER", "UPPER", "cached_encoding", "cached_name", "tiktoken_cache"]

HOST = "https://openaipublic.blob.core.windows.net/"  # part of the name of a cached file; nothing is fetched

Ranks = dict[bytes, int]


def _from_tiktoken(data: bytes) -> Ranks:
    """Lines of a token in base 64 and its rank."""
    pairs = (line.split() for line in data.splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in pairs}


def _from_merges(data: bytes) -> Ranks:
    """GPT-2's list of merges: the bytes come first, those that print before those that do not."""
    byte = {letter: bytes([number]) for number, letter in enumerate(BYTE_SPELLING)}
    tokens = [byte[letter] for letter in sorted(byte)]
    for line in data.decode().split("\n")[1:]:
        tokens += [b"".join(byte[letter] for letter in line.replace(" ", ""))] if line else []
    return {token: rank for rank, token in enumerate(tokens)}


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """Where the ranks are, how text is split into words, and the special tokens."""

    files: dict[str, str]
    """Where each was published, below `HOST`, and its SHA-256."""
    pattern: str | None = None
    """``None`` for GPT-2's, which the library has built in."""
    special_tokens: dict[str, int] = field(default_factory=dict)


_GPT2 = Encoding(
    files={
        "encodings/r50k_base.tiktoken": "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930",
        "gpt-2/encodings/main/vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    },
    special_tokens={END_OF_TEXT: 50256},
)

# The words of cl100k_base and o200k_base, as OpenAI published them, for the library's regular expressions
# (Oniguruma): possessive quantifiers mean something else there, and the end of the text is \z, not $.
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

ENCODINGS: dict[str, Encoding] = {
    "gpt2": _GPT2,
    "r50k_base": _GPT2,
    "cl100k_base": Encoding(
        files={"encodings/cl100k_base.tiktoken": "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"},
        pattern=CONTRACTION
        + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        + r"|\s+\z|\s*[\r\n]|\s+(?!\S)|\s",
        special_tokens={
            END_OF_TEXT: 100257,
            "<|fim_prefix|>": 100258,
            "<|fim_middle|>": 100259,
            "<|fim_suffix|>": 100260,
            "<|endofprompt|>": 100276,
        },
    ),
    "o200k_base": Encoding(
        files={"encodings/o200k_base.tiktoken": "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"},
        pattern=(
            rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTION}?"
            rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTION}?"
            r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        special_tokens={END_OF_TEXT: 199999, "<|endofprompt|>": 200018},
    ),
}


def tiktoken_cache() -> Path | None:
    """Where `tiktoken` keeps its files; ``None`` if it was told to keep none."""
    for name in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR"):
        if name in os.environ:
            return Path(os.environ[name]) if os.environ[name] else None
    return Path(tempfile.gettempdir()) / "data-gym-cache"


def cached_encoding(name: str) -> dict[str, Any] | None:
    """The definition of this encoding, or ``None`` if there is no encoding of this name or no file of it."""
    folder = tiktoken_cache()
    if name not in ENCODINGS or folder is None:
        return None
    encoding = ENCODINGS[name]
    for published, sha256 in encoding.files.items():
        path = folder / cached_name(published)
        if path.is_file():
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest() != sha256:
                cause = f"{path} is not {published} as it was published"
                raise InputError(cause, "deleting it, and tiktoken.get_encoding to fetch it anew")
            return _definition(_from_merges(data) if published.endswith(".bpe") else _from_tiktoken(data), encoding)
    return None


def cached_name(published: str) -> str:
    """The name under which `tiktoken` keeps a file."""
    return hashlib.sha1((HOST + published).encode(), usedforsecurity=False).hexdigest()


def _definition(ranks: Ranks, encoding: Encoding) -> dict[str, Any]:
    """As a `tokenizer.json`: the tokens that merge, and the special ones at their own ids, gaps included."""
    spelled = {token: "".join(BYTE_SPELLING[byte] for byte in token) for token in ranks}
    regex = encoding.pattern
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": regex is None}
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    model = {
        "type": "BPE",
        "ignore_merges": True,  # a word that is a token is that token, whatever its merges would make of it
        "vocab": {spelled[token]: rank for token, rank in ranks.items()} | encoding.special_tokens,
        "merges": [[spelled[left], spelled[right]] for left, right in _pairs(ranks)],
    }
    return byte_level(level, encoding.special_tokens, model, None if regex is None else split)


def _pairs(ranks: Ranks) -> list[tuple[bytes, bytes]]:
    """Every pair of tokens that makes a token, by the rank of what it makes."""
    whole = sorted(ranks, key=ranks.__getitem__)
    splits = ((token[:cut], token[cut:]) for token in whole for cut in range(1, len(token)))
    return [(left, right) for left, right in splits if left in ranks and right in ranks]
