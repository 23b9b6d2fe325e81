"""Training a byte-level BPE on texts: what `Tokenizer.train` does.

The special tokens are added after training: if the library knew them while it learned, merges could come to make them
out of ordinary words.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers

from locant.arguments import whole
from locant.errors import InputError
from locant.text.reading import read_texts, well_formed
from locant.text.tokenizer.definition import END_OF_TEXT

__all__ = ["LARGEST_VOCABULARY", "learn"]

LARGEST_VOCABULARY = 10_000_000
"""The trainer ends the process where memory does not suffice."""


def learn(
    texts_or_paths: str | Path | Iterable[str | Path], vocab_size: int, special_tokens: Sequence[str]
) -> tokenizers.Tokenizer:
    """The library's tokenizer, trained; arguments and errors are those of `Tokenizer.train`."""
    names = _special_names(special_tokens)
    least = 256 + len(names)
    remedy = f"vocab_size={least}: the 256 bytes and the special tokens"
    size = whole("vocab_size", vocab_size, least, LARGEST_VOCABULARY, remedy=remedy)
    library = _trained(_texts(texts_or_paths), size - len(names))
    for name in names:
        if library.token_to_id(name) is not None:
            raise InputError(f"got the special token {name!r}, which is also a token of the texts", repr(f"<|{name}|>"))
    library.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in names])
    return library


def _trained(texts: list[str], vocab_size: int) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,  # a pair that occurs once saves no token elsewhere
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer=trainer, length=len(texts))
    return library


def _texts(texts_or_paths: str | Path | Iterable[str | Path]) -> list[str]:
    several = [texts_or_paths] if isinstance(texts_or_paths, (str, Path)) else texts_or_paths
    texts = [_text(one) for one in several]
    if not any(texts):
        raise InputError("got no text to train on", "a text, or the pathlib.Path of a file with one")
    return texts


def _text(text_or_path: str | Path) -> str:
    if isinstance(text_or_path, Path):
        return read_texts(text_or_path)[0]
    if not isinstance(text_or_path, str):
        kind = type(text_or_path).__name__
        raise InputError(f"got a {kind} to train on, expected a text or a pathlib.Path", "data.decode(), for bytes")
    text = well_formed(text_or_path)
    # A short text that is also the name of a file is most likely meant as one. Longer ones cannot be names.
    if 0 < len(text.encode()) < 256 and Path(text).is_file():
        raise InputError(f"got the text {text!r}, which is the name of a file", f"pathlib.Path({text!r})")
    return text


def _special_names(special_tokens: Sequence[str]) -> list[str]:
    names = [special_tokens] if isinstance(special_tokens, str) else [*special_tokens]
    for name in names:
        if not isinstance(name, str) or not name or name != well_formed(name) or names.count(name) > 1:
            raise InputError(f"got the special token {name!r}, expected different spellings", f"{END_OF_TEXT!r}")
    return names
