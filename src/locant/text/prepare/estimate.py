"""What preparing would do, from a sample: for a look before hours of work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

from locant.errors import InputError
from locant.text.prepare.request import ContentOptions, Paths, Request
from locant.text.prepare.sample import CHECKED_BYTES, TRAINING_BYTES, take_sample
from locant.text.store import token_dtype
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


def estimate(paths: Paths, **options: Unpack[ContentOptions]) -> Estimate:
    """What `prepare` with the same options would make; nothing is written.

    Args:
        paths: what to read.
        options: `tokenizer`, `vocab_size`, `separator`, `field` and `append_end_of_text`, as for `prepare`.

    Raises:
        InputError: as `prepare`; and for standard input, which can be read only once.
    """
    request = Request.of(paths, **options)
    if request.needs_stdin:
        raise InputError("got standard input, which a dry run would use up", "a file")
    sample = take_sample(request.sources, CHECKED_BYTES if request.tokenizer else TRAINING_BYTES)
    tokenizer = request.chosen_tokenizer(lambda: sample)
    documents = sample.all_documents(request.sources)
    tokens = len(Engine(tokenizer).encode(sample.texts)[0])
    if not sample.is_all and sample.size:
        tokens = round(tokens / sample.size * sample.unpacked / sample.read * request.total_bytes)
    tokens += documents * (request.end_of_text(tokenizer) is not None)
    return Estimate(
        files=len(request.sources),
        bytes=request.total_bytes,
        documents=documents,
        tokens=tokens,
        store_bytes=tokens * token_dtype(tokenizer.vocab_size).itemsize,
        exact=sample.is_all,
    )
