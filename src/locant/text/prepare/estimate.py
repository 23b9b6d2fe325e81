"""What preparing would do, from a sample: for a look before hours of work."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locant.errors import InputError
from locant.text.prepare.request import Paths, Request
from locant.text.prepare.run import SHARD_SIZE
from locant.text.prepare.sample import CHECKED_BYTES, TRAINING_BYTES, take_sample
from locant.text.store import token_dtype
from locant.text.tokenizer import Tokenizer
from locant.text.tokenizer.engine import Engine

__all__ = ["Estimate", "estimate"]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What `prepare` would read and make."""

    files: int
    bytes: int
    """Of the input, as it lies on the disk."""
    documents: int
    tokens: int
    """End-of-text ids included."""
    store_bytes: int
    """Of the tokens in the store."""
    exact: bool
    """Whether the sample was all of the input, so that nothing was estimated."""

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return dataclasses.asdict(self)


def estimate(
    paths: Paths,
    *,
    tokenizer: Tokenizer | str | Path | None = None,
    vocab_size: int | None = None,
    separator: str | None = None,
    field: str | None = None,
    append_end_of_text: bool | None = None,
) -> Estimate:
    """What `prepare` with the same options would make; nothing is written.

    Raises:
        InputError: as `prepare`; and for standard input, which can be read only once.
    """
    request = Request.of(
        paths,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        separator=separator,
        field=field,
        shard_size=SHARD_SIZE,
        append_end_of_text=append_end_of_text,
    )
    if request.needs_stdin:
        raise InputError("got standard input, which a dry run would use up", "a file")
    sample = take_sample(request.sources, CHECKED_BYTES if request.tokenizer else TRAINING_BYTES)
    chosen = request.chosen_tokenizer(lambda: sample)
    documents = sample.all_documents(request.sources)
    tokens = len(Engine(chosen).encode(sample.texts)[0])
    if not sample.is_all and sample.size:
        tokens = round(tokens / sample.size * sample.unpacked / sample.read * request.total)
    tokens += documents * (request.end_of_text(chosen) is not None)
    return Estimate(
        files=len(request.sources),
        bytes=request.total,
        documents=documents,
        tokens=tokens,
        store_bytes=tokens * token_dtype(chosen.vocab_size).itemsize,
        exact=sample.is_all,
    )
