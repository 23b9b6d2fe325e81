"""`locant compare`: a text in, a folder with results, pictures and the page out; and progress in between."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locant.errors import InputError
from locant.figures.canvas import require_matplotlib
from locant.lab import Progress, Results, Settings, compare
from locant.report.comparison.folder import ReportFolder
from locant.report.comparison.losses import print_losses, record_line
from locant.report.comparison.summary import summarise
from locant.report.console import print_json, talk
from locant.text.corpus import Corpus, read_corpus

if TYPE_CHECKING:
    from tqdm import tqdm

__all__ = ["compare_files"]

VOCAB_SIZE = 512
"""Of the tokenizer trained on the text: small, so that a small model learns from every step, and steps are fast."""


def compare_files(
    files: Sequence[str],
    options: Mapping[str, Any],
    *,
    tokenizer: str | None = None,
    vocab_size: int | None = None,
    download: bool = False,
    folder: Path | str,
    force: bool = False,
    as_json: bool = False,
) -> None:
    """Compare encodings on texts. Whatever is wrong with the input is found before the first training begins.

    After every training, `results.json` holds all results so far. When interrupted, the report is made of those.

    Args:
        files: paths of texts; none for the sample text.
        options: those of `locant.lab.Settings`.
        tokenizer, vocab_size, download: see `read_corpus`.
        folder: of the report.
        force: write into a folder that holds other things.
        as_json: print the results as JSON instead of tables.
    """
    require_matplotlib()
    if "minutes" in options and "num_steps" in options:
        raise InputError("got both steps and minutes", "one of the two")
    settings = Settings(**options)
    source = read_corpus(
        files, tokenizer=tokenizer, vocab_size=vocab_size, usual_vocab_size=VOCAB_SIZE, download=download
    )
    place = ReportFolder(folder, force=force)
    try:
        results = _run(source, settings, place)
    finally:
        place.leave()
    if as_json:
        print_json({**results, "report": str(place.page)})
    else:
        print_losses(summarise(results))
        sys.stdout.write(f"\nThe report: {place.page}\n")


def _run(source: Corpus, settings: Settings, place: ReportFolder) -> dict[str, Any]:
    _announce(source, settings, place)
    so_far: dict[str, Any] = {}
    bar = _bar()

    def keep(results: Results) -> None:
        so_far.update(_with_text(results, source))
        place.write_results(so_far)
        with bar.external_write_mode():
            talk(record_line(so_far["records"][-1]))

    try:
        compare(
            source.ids,
            source.tokenizer.vocab_size,
            settings,
            on_progress=lambda progress: _advance(bar, progress),
            on_record=keep,
        )
    except BaseException:
        bar.close()
        if so_far:
            talk(f"the report of what was finished: {place.write_report(so_far)}")
        raise
    bar.close()
    place.write_report(so_far)
    return so_far


def _with_text(results: Results, source: Corpus) -> dict[str, Any]:
    plain = results.to_dict()
    return {**plain, "settings": {**plain["settings"], "text": source.facts()}}


def _announce(source: Corpus, settings: Settings, place: ReportFolder) -> None:
    if place.replaces:
        talk(f"{place.path} holds an earlier report, which is replaced once the first result is in")
    vocabulary = f"a vocabulary of {source.tokenizer.vocab_size:,}"
    talk(f"{source.name}: {source.characters:,} characters, {len(source.ids):,} tokens of {vocabulary}")
    steps = f"{settings.num_steps:,} steps each" if settings.minutes is None else f"{settings.minutes:g} minutes in all"
    lengths = ", ".join(f"{length:,}" for length in settings.lengths)
    runs = f"{_count(len(settings.encodings), 'encoding')} with {_count(len(settings.seeds), 'seed')}"
    talk(f"training {runs} at {settings.train_length:,} tokens ({steps}), measuring at {lengths}")


def _count(number: int, what: str) -> str:
    """A number of things.

    >>> _count(1, "seed"), _count(2, "seed")
    ('1 seed', '2 seeds')
    """
    return f"{number} {what}" + ("" if number == 1 else "s")


def _bar() -> tqdm[Any]:
    """On stderr, and only where a person watches."""
    from tqdm import tqdm

    return tqdm(disable=None, unit="step", leave=False, dynamic_ncols=True)


def _advance(bar: tqdm[Any], progress: Progress) -> None:
    bar.total = progress.total
    bar.set_description(f"{progress.encoding}, seed {progress.seed}, loss {progress.loss:.2f}", refresh=False)
    bar.update(progress.done - bar.n)
