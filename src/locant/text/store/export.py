"""Writing a store in another format: stores for other programs, and those of other programs as locant stores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from locant.errors import InputError
from locant.files import new_folder, write_whole
from locant.text.store.formats import FORMATS, ExportSource
from locant.text.store.formats.manifest import TOKENIZER
from locant.text.store.store import TokenStore

__all__ = ["Export", "export_store"]

BLOCK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Export:
    """What was written."""

    output: str
    to: str
    files: list[str]
    tokens: int
    dtype: str

    def __str__(self) -> str:
        files = f"{len(self.files)} file{'s' * (len(self.files) != 1)}"
        return f"{self.output}: {self.tokens:,} tokens as {self.dtype}, {self.to}, {files}"


def export_store(
    store: TokenStore, output: Path, *, to: str, progress: Callable[[int], object] | None = None
) -> Export:
    """Write a store in another format, into a new folder that appears when it is complete.

    The tokenizer goes with it where there is one. Every id is checked against its vocabulary.

    `to` is the name of the format, see `locant.formats`; `progress` is told how many tokens are done.

    Raises:
        InputError: the folder is in use, the system refuses to write, or the store does not say what the format needs
            (documents; for ``locant`` a tokenizer). RangeError: an unknown format, or an id not in the vocabulary.
    """
    target = FORMATS.find(to)
    tokenizer = store.tokenizer if store.has_tokenizer else None
    vocab_size = store.vocab_size or _entries_seen(store)
    with new_folder(output) as folder:
        source = ExportSource(store.contents, store.format, vocab_size, tokenizer, progress or (lambda done: None))
        dtype = target.write(source, folder)
        if tokenizer is not None and not (folder / TOKENIZER).exists():
            write_whole(folder / TOKENIZER, tokenizer.to_json())
        files = sorted(path.name for path in folder.iterdir())
    return Export(output=str(output), to=to, files=files, tokens=len(store), dtype=dtype.name)


def _entries_seen(store: TokenStore) -> int:
    """The smallest vocabulary that has every id."""
    largest = 0
    for first in range(0, len(store), BLOCK):
        ids = store[first : first + BLOCK]
        if int(ids.min()) < 0:
            raise InputError(f"{store.path} has negative ids", "another dtype")
        largest = max(largest, int(ids.max()))
    return largest + 1
