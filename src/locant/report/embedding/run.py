"""`locant embed`: files in, the table of what flowed and a file of vectors out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from locant.report.console import print_json, talk
from locant.report.embedding.flow import Plan, embed, require_vectors_name, save_vectors
from locant.report.embedding.table import print_flow
from locant.text.corpus import read_corpus

__all__ = ["embed_files"]

VOCAB_SIZE = 4_096


def embed_files(
    files: Sequence[str],
    options: Mapping[str, Any],
    *,
    tokenizer: str | None = None,
    vocab_size: int | None = None,
    download: bool = False,
    path: Path | None = None,
    as_json: bool = False,
) -> None:
    """Embed texts, print what flowed, and write the vectors to `path` if there is one.

    Args:
        files: paths of texts; none for the sample text.
        options: those of `Plan`.
        tokenizer, vocab_size, download: see `read_corpus`.
        path: a .safetensors file; ``None`` to write nothing.
        as_json: print the facts as JSON.
    """
    plan = Plan(**options)
    if path is not None:
        require_vectors_name(path)
    source = read_corpus(
        files, tokenizer=tokenizer, vocab_size=vocab_size, usual_vocab_size=VOCAB_SIZE, download=download
    )
    embedded = embed(source, plan)
    if path is not None:
        save_vectors(embedded, path)
        talk(f"wrote {path}: ids, targets, positions and embeddings of {embedded.flow.embedded_windows:,} windows")
    if as_json:
        print_json({**embedded.flow.to_dict(), "file": None if path is None else str(path)})
    else:
        print_flow(embedded.flow)
