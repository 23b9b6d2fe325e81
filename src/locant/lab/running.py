"""A comparison of texts in files, with the results in a folder: what `locant compare` runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from locant.errors import InputError
from locant.lab.comparison import Progress, compare
from locant.lab.folder import ResultsFolder
from locant.lab.results import Results
from locant.lab.settings import VOCAB_SIZE, Settings
from locant.text.corpus import Corpus, read_corpus

__all__ = ["Watcher", "compare_files"]


class Watcher:
    """Called while a comparison runs; a subclass overrides the methods for what it shows."""

    def begin(self, corpus: Corpus, settings: Settings, folder: ResultsFolder) -> None:
        """Before the first training; what can be wrong with the input has been checked."""

    def advance(self, progress: Progress) -> None:
        """After every training step."""

    def record(self, results: Mapping[str, Any]) -> None:
        """After every measured model; `results.json` holds the same."""

    def end(self, results: Mapping[str, Any], folder: ResultsFolder, *, complete: bool) -> None:
        """After the last model, or when interrupted; `results` are empty where no model was finished."""


def compare_files(
    files: Sequence[str],
    options: Mapping[str, Any],
    *,
    tokenizer: str | None = None,
    vocab_size: int | None = None,
    download: bool = False,
    folder: Path | str,
    force: bool = False,
    watcher: Watcher,
) -> dict[str, Any]:
    """Compare encodings on texts; returns what is in `results.json`, which is written anew after every model.

    Args:
        files: paths of texts; none for the sample text.
        options: those of `Settings`.
        tokenizer, vocab_size, download: see `read_corpus`.
        folder, force: see `ResultsFolder`.
    """
    if "minutes" in options and "num_steps" in options:
        raise InputError("got both steps and minutes", "--steps or --minutes alone")
    settings = Settings(**options)
    corpus = read_corpus(
        files, tokenizer=tokenizer, vocab_size=vocab_size, usual_vocab_size=VOCAB_SIZE, download=download
    )
    place = ResultsFolder(folder, force=force)
    so_far: dict[str, Any] = {}

    def keep(results: Results) -> None:
        so_far.update(dataclasses.replace(results, text={**corpus.facts(), **results.text}).to_dict())
        place.write(so_far)
        watcher.record(so_far)

    complete = False
    try:
        watcher.begin(corpus, settings, place)
        compare(corpus.ids, corpus.tokenizer.vocab_size, settings, on_progress=watcher.advance, on_record=keep)
        complete = True
    finally:
        try:
            watcher.end(so_far, place, complete=complete)
        finally:
            place.remove_if_empty()
    return so_far
