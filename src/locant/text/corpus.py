"""A text as token ids, with its tokenizer, for `locant embed` and `locant compare`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from locant.errors import InputError
from locant.text.reading import read_texts, sample_text
from locant.text.tokenizer import Tokenizer

SAMPLE = "the sample text (Python's own documentation)"


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A text as token ids. `documents` holds the index of the first id of each file, and the number of ids.

    `asked_tokenizer` is ``None`` if the tokenizer was trained on the text.
    """

    name: str
    files: tuple[str, ...]
    characters: int
    sha256: str
    tokenizer: Tokenizer
    asked_tokenizer: str | None
    asked_vocab_size: int | None
    ids: Int[np.ndarray, " tokens"]
    documents: tuple[int, ...]

    def facts(self) -> dict[str, Any]:
        """Return the facts about the text for a report, as JSON."""
        return {
            "source": self.name,
            "files": list(self.files),
            "characters": self.characters,
            "sha256": self.sha256,
            "tokens": len(self.ids),
            "tokenizer": self.asked_tokenizer,
            "asked_vocab_size": self.asked_vocab_size,
            "vocab_size": self.tokenizer.vocab_size,
            "tokenizer_fingerprint": self.tokenizer.fingerprint,
        }


def read_corpus(
    files: Sequence[str],
    *,
    tokenizer: str | None = None,
    vocab_size: int | None = None,
    default_vocab_size: int,
    download: bool = False,
) -> Corpus:
    """Read the files (``-`` is standard input), or the sample text if there are no files, and encode them.

    `tokenizer` is ``"bytes"`` or an argument of `Tokenizer.load`, and `download` is passed to it. Without a tokenizer,
    a byte-level BPE with `vocab_size` entries (default: `default_vocab_size`) is trained on this text.
    """
    if tokenizer is not None and vocab_size is not None:
        cause = "got both a tokenizer and a vocabulary size, which is only for a tokenizer that is trained here"
        raise InputError(cause, "pass one of the two")
    texts = read_texts(files) if files else [sample_text()]
    vocab_size = default_vocab_size if vocab_size is None else vocab_size
    if tokenizer is None:
        chosen = Tokenizer.train(texts, vocab_size)
    else:
        chosen = Tokenizer.bytes() if tokenizer == "bytes" else Tokenizer.load(tokenizer, download=download)
    encoded = [np.asarray(chosen.encode(text)) for text in texts]
    return Corpus(
        name=", ".join("standard input" if name == "-" else name for name in files) or SAMPLE,
        files=tuple(files),
        characters=sum(map(len, texts)),
        sha256=hashlib.sha256("".join(texts).encode("utf-8", "surrogatepass")).hexdigest(),
        tokenizer=chosen,
        asked_tokenizer=tokenizer,
        asked_vocab_size=vocab_size if tokenizer is None else None,
        ids=np.concatenate(encoded),
        documents=(0, *np.cumsum([len(ids) for ids in encoded]).tolist()),
    )
