"""What was asked for, checked: the sources, as they were found, and the options that decide what the store holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypedDict

from locant.arguments import flag, shown, whole
from locant.errors import InputError, RangeError
from locant.text.prepare.byte_ranges import Source
from locant.text.prepare.inputs import find_sources, read_stdin
from locant.text.prepare.sample import Sample
from locant.text.reading import STDIN, well_formed
from locant.text.tokenizer import Tokenizer
from locant.text.tokenizer.training import LARGEST_VOCABULARY

__all__ = ["SHARD_SIZE", "VOCAB_SIZE", "ContentOptions", "Paths", "Request", "store_folder"]

SHARD_SIZE = 2**26
VOCAB_SIZE = 32_768
TRAINED = "a BPE trained on the input"
NAMED = 3
"""How many differences are told; the others are counted."""

Paths = str | Path | Iterable[str | Path]


class ContentOptions(TypedDict, total=False):
    """The options of `prepare` that decide what is in a store."""

    tokenizer: Tokenizer | str | Path | None
    shard_size: int
    vocab_size: int | None
    separator: str | None
    field: str | None
    append_end_of_text: bool | None


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
        tokenizer: Tokenizer | str | Path | None = None,
        shard_size: int = SHARD_SIZE,
        vocab_size: int | None = None,
        separator: str | None = None,
        field: str | None = None,
        append_end_of_text: bool | None = None,
    ) -> Request:
        """The request of a call of `prepare`; its arguments, and errors, are those."""
        shard_size = whole("shard_size", shard_size, 1, 2**62, remedy=f"shard_size={SHARD_SIZE}")
        if vocab_size is not None:
            vocab_size = whole("vocab_size", vocab_size, 257, LARGEST_VOCABULARY, remedy=f"vocab_size={VOCAB_SIZE}")
        _require_texts(separator=separator, field=field)
        if append_end_of_text is not None:
            append_end_of_text = flag("append_end_of_text", append_end_of_text)
        if tokenizer is not None and vocab_size is not None:
            cause = "got both a tokenizer and a vocabulary size, which is for one that is trained here"
            raise RangeError(cause, "vocab_size=None")
        given = _loaded(tokenizer)
        ends = given is None or given.end_of_text is not None
        if append_end_of_text and not ends:
            raise RangeError("got a tokenizer without an end-of-text token to append", "append_end_of_text=False")
        trained = {"tokenizer": TRAINED, "vocab_size": VOCAB_SIZE if vocab_size is None else vocab_size}
        options = {
            **(trained if given is None else {"tokenizer": given.fingerprint}),
            "separator": separator,
            "field": field,
            "append_end_of_text": ends if append_end_of_text is None else append_end_of_text,
            "shard_size": shard_size,
        }
        sources = find_sources(paths, separator=separator, field=field)
        return cls(sources=sources, options=options, tokenizer=given)

    @property
    def total_bytes(self) -> int:
        """Of all sources whose size is known."""
        return sum(source.size or 0 for source in self.sources)

    @property
    def needs_stdin(self) -> bool:
        """Whether standard input is a source that was not read yet."""
        return any(source.size is None for source in self.sources)

    def with_stdin(self, place: Path | None) -> Request:
        """The same, with standard input read; it is kept in the file `place`, if there is one."""
        number = next(i for i, source in enumerate(self.sources) if source.path == STDIN)
        stdin, sha256 = read_stdin(self.sources[number], place)
        sources = [*self.sources[:number], stdin, *self.sources[number + 1 :]]
        return dataclasses.replace(self, sources=sources, options={**self.options, "standard_input": sha256})

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

    def changes_from(self, options: Mapping[str, Any], sources: Sequence[Source]) -> list[str]:
        """What is different from an earlier request, in words; nothing if both give the same store."""
        pairs = {name: (options.get(name), self.options.get(name)) for name in {**options, **self.options}}
        found = [f"{name} was {old!r} and is {new!r}" for name, (old, new) in pairs.items() if old != new]
        found += _changed_sources(sources, self.sources)
        return [*found[:NAMED], f"{len(found) - NAMED} more"] if len(found) > NAMED else found


def store_folder(out: object) -> Path:
    """Where the store shall be, if that can be the name of a folder; an empty one would be the current folder."""
    if not isinstance(out, (str, Path)) or not str(out) or "\0" in str(out):
        raise InputError(f"got {shown(out)} as the folder of a store, expected a path", "out='store'")
    return Path(out)


def _require_texts(**options: object) -> None:
    for name, value in options.items():
        if value is not None and not (isinstance(value, str) and value and value == well_formed(value)):
            raise RangeError(f"got {shown(value)} for {name}, expected a text", f"{name}=None for the default")


def _loaded(tokenizer: object) -> Tokenizer | None:
    if tokenizer is None or isinstance(tokenizer, Tokenizer):
        return tokenizer
    if not isinstance(tokenizer, (str, Path)):
        cause = f"got {shown(tokenizer)} for tokenizer, expected a Tokenizer, a path or a name"
        raise RangeError(cause, 'tokenizer="bytes"')
    return Tokenizer.bytes() if tokenizer == "bytes" else Tokenizer.load(tokenizer)


def _changed_sources(old: Sequence[Source], new: Sequence[Source]) -> list[str]:
    before, after = ({source.path: source for source in sources} for sources in (old, new))
    found = [f"{path} is no longer an input" for path in before if path not in after]
    found += [f"{path} is a new input" for path in after if path not in before]
    changed = [path for path in before if path in after and before[path] != after[path]]
    found += [f"{path} changed from {_state(before[path])} to {_state(after[path])}" for path in changed]
    if not found and [*before] != [*after]:
        found.append("the inputs come in another order")
    return found


def _state(source: Source) -> str:
    if source.mtime_ns is None:
        return f"{source.size} bytes"
    # The zone of the reader, who compares it with what `ls --full-time` says, to the last digit.
    seconds, rest = divmod(source.mtime_ns, 10**9)
    when = f"{datetime.fromtimestamp(seconds).astimezone():%Y-%m-%d %H:%M:%S}.{rest:09d}"
    how = f"{source.kind}, separator {source.separator!r}, field {source.field!r}"
    return f"{source.size} bytes of {when} ({how})"
