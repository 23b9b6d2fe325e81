"""What was asked for: the sources, as they were found, and the options that decide what the store holds."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locant.arguments import whole
from locant.errors import InputError
from locant.files import NewFile
from locant.text.prepare.pieces import Source
from locant.text.prepare.plan import STDIN_FILE, readable_sources
from locant.text.prepare.sample import Sample
from locant.text.prepare.sources import find_sources
from locant.text.reading import STDIN, standard_input, well_formed
from locant.text.tokenizer import Tokenizer

__all__ = ["VOCAB_SIZE", "Paths", "Request", "Stdin"]

VOCAB_SIZE = 32_768
LARGEST_VOCABULARY = 10_000_000
"""What the trainer can make; it ends the process where memory does not suffice."""
TRAINED = "a BPE trained on the input"
BLOCK = 2**20

Paths = str | Path | Iterable[str | Path]


@dataclass(frozen=True, kw_only=True)
class Stdin:
    """What came from standard input."""

    size: int
    sha256: str

    @classmethod
    def read(cls, folder: Path | None) -> Stdin:
        """Read all of it, and keep it in a file of `folder`, if there is one."""
        if folder is None:
            return cls._passed_on(lambda _: None)
        with NewFile(folder / STDIN_FILE) as file:
            stdin = cls._passed_on(file.write)
            file.settle()
            file.publish()
        return stdin

    @classmethod
    def _passed_on(cls, write: Callable[[bytes], None]) -> Stdin:
        digest, size, stdin = hashlib.sha256(), 0, standard_input()
        while block := stdin.read(BLOCK):
            digest.update(block)
            size += len(block)
            write(block)
        return cls(size=size, sha256=digest.hexdigest())


@dataclass(frozen=True, kw_only=True)
class Request:
    """Everything that decides the store, and nothing of how it is made: no workers, engines or tasks."""

    sources: Sequence[Source]
    options: Mapping[str, Any]
    tokenizer: Tokenizer | None
    """``None`` for one that is trained."""

    @classmethod
    def of(
        cls,
        paths: Paths,
        *,
        tokenizer: Tokenizer | str | Path | None,
        vocab_size: int | None,
        separator: str | None,
        field: str | None,
        shard_size: int,
        append_end_of_text: bool | None,
    ) -> Request:
        """The request of a call of `prepare`; its arguments, and errors, are those."""
        shard_size = whole("shard_size", shard_size, 1, 2**62, remedy="some millions of tokens")
        if vocab_size is not None:
            vocab_size = whole("vocab_size", vocab_size, 257, LARGEST_VOCABULARY, remedy="vocab_size=32_768")
        _require_texts(separator=separator, field=field)
        if append_end_of_text not in (None, True, False):
            raise InputError(f"got {append_end_of_text!r} for append_end_of_text", "True, False or None")
        if tokenizer is not None and vocab_size is not None:
            raise InputError(
                "got both a tokenizer and a vocabulary size, which is for one that is trained here", "one of the two"
            )
        given = _loaded(tokenizer)
        ends = given is None or given.end_of_text is not None
        if append_end_of_text and not ends:
            raise InputError("got a tokenizer without an end-of-text token to append", "append_end_of_text=False")
        options: dict[str, Any] = {"tokenizer": given.fingerprint if given else TRAINED}
        if given is None:
            options["vocab_size"] = VOCAB_SIZE if vocab_size is None else vocab_size
        options |= {
            "separator": separator,
            "field": field,
            "append_end_of_text": ends if append_end_of_text is None else append_end_of_text,
            "shard_size": shard_size,
        }
        sources = find_sources(_paths(paths), separator=separator, field=field)
        return cls(sources=sources, options=options, tokenizer=given)

    @property
    def total(self) -> int:
        """Bytes of all sources whose size is known."""
        return sum(source.size or 0 for source in self.sources)

    @property
    def needs_stdin(self) -> bool:
        """Whether standard input is a source that was not read yet."""
        return any(source.path == STDIN and source.size is None for source in self.sources)

    def with_stdin(self, stdin: Stdin) -> Request:
        """The same, with standard input as it turned out to be."""
        sources = [
            dataclasses.replace(source, size=stdin.size) if source.path == STDIN else source for source in self.sources
        ]
        return dataclasses.replace(self, sources=sources, options={**self.options, "standard_input": stdin.sha256})

    def readable(self, folder: Path) -> list[Source]:
        """The sources, with standard input where `Stdin.read` kept it."""
        return readable_sources(self.sources, folder)

    def chosen_tokenizer(self, sample: Callable[[], Sample]) -> Tokenizer:
        """The tokenizer that was given, or one that is trained on a sample."""
        if self.tokenizer is not None:
            return self.tokenizer
        texts = [text.decode(errors="replace") for text in sample().texts]
        if not any(texts):
            raise InputError("found no text to train a tokenizer on", "other paths, a --separator or a --field")
        return Tokenizer.train(texts, self.options["vocab_size"])

    def end_of_text(self, tokenizer: Tokenizer) -> int | None:
        """The id to put after every document, if there shall be one."""
        return tokenizer.end_of_text if self.options["append_end_of_text"] else None


def _require_texts(**options: object) -> None:
    for name, value in options.items():
        if value is not None and not (isinstance(value, str) and value and value == well_formed(value)):
            raise InputError(f"got {name}={value!r}, expected a text", f"{name}=None for the default")


def _paths(paths: Any) -> Paths:
    """The paths, each of them a str or a Path; one alone is a list of one."""
    if isinstance(paths, (str, Path)):
        return paths
    several: list[Any] = [*paths] if isinstance(paths, Iterable) and not isinstance(paths, bytes) else [paths]
    if odd := [path for path in several if not isinstance(path, (str, Path))]:
        raise InputError(f"got {odd[0]!r} as a path, expected str or Path", "the path of a file or folder")
    return several


def _loaded(tokenizer: object) -> Tokenizer | None:
    if tokenizer is not None and not isinstance(tokenizer, (Tokenizer, str, Path)):
        raise InputError(f"got tokenizer={tokenizer!r}, expected a Tokenizer, a path or a name", 'tokenizer="bytes"')
    if tokenizer is None or isinstance(tokenizer, Tokenizer):
        return tokenizer
    return Tokenizer.bytes() if tokenizer == "bytes" else Tokenizer.load(tokenizer)
