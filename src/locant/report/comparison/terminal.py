"""A comparison in a terminal: what is trained, a line for every measured model, and the table at the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from locant.arguments import Real
from locant.lab.comparison import Progress, Watcher
from locant.lab.results import Results, ResultsFolder
from locant.lab.settings import Settings
from locant.lab.summary import Row, summarise
from locant.lab.training import split_off
from locant.report.comparison.page import write_report
from locant.report.comparison.sentences import sentences
from locant.report.console import BEST, QUIET, counted, out, show, table, talk
from locant.text.corpus import Corpus

__all__ = ["Screen", "print_losses", "record_line"]


class Screen(Watcher):
    """Shows on stderr how far a comparison is, with a bar only where a person watches; draws the report at its end."""

    def __init__(self) -> None:
        from tqdm import tqdm

        self._bar: Any = tqdm(disable=None, unit="step", leave=False, dynamic_ncols=True, delay=0.1)

    def begin(self, corpus: Corpus, settings: Settings, folder: ResultsFolder) -> None:
        if folder.holds_earlier:
            talk(f"{folder.path} holds an earlier report, which is replaced once the first result is in")
        training, held_out = (len(part) for part in split_off(corpus.ids, settings.lengths[-1]))
        windows = ", ".join(f"{-(-(held_out - 1) // length):,} of {length:,}" for length in settings.lengths)
        steps = settings.steps_for(training)
        epochs = steps * settings.batch_size * settings.train_length / training
        amount = f"{steps:,} steps each, {epochs:.1f} epochs"
        if settings.minutes:
            amount = f"{settings.minutes:g} minutes in all"
        contestants = f"{counted(len(settings.encodings), 'encoding')} with {counted(len(settings.seeds), 'seed')}"
        tokens = f"{len(corpus.ids):,} tokens of a vocabulary of {corpus.tokenizer.vocab_size:,}"
        talk(f"{corpus.name}: {corpus.characters:,} characters, {tokens}")
        talk(f"training {contestants} on {training:,} tokens, in windows of {settings.train_length:,} ({amount})")
        talk(f"measuring on the last {held_out:,} tokens, in windows: {windows}")

    def plan(self, results: Results, seconds: float) -> None:
        loss = results.text["unigram_loss"]
        talk(f"a unigram count (how often each token is in the training text) has a loss of {loss:.3f} there")
        talk(f"this takes about {_duration(seconds)}")

    def advance(self, progress: Progress) -> None:
        self._bar.total = progress.total
        self._bar.set_description(f"{progress.encoding}, seed {progress.seed}, loss {progress.loss:.2f}", refresh=False)
        self._bar.update(progress.done - self._bar.n)

    def record(self, results: Mapping[str, Any]) -> None:
        with self._bar.external_write_mode():
            talk(record_line(results["records"][-1]))

    def end(self, results: Mapping[str, Any], folder: ResultsFolder, *, complete: bool) -> None:
        self._bar.close()
        if results:
            page = write_report(results, folder.path)
            if not complete:
                talk(f"the report of what was finished: {page}")


def record_line(record: Mapping[str, Any]) -> str:
    """One model in one line."""
    losses = {"train": record["train_loss"], **record["loss_by_length"]}
    cells = [f"{name}: {'–' if loss is None else f'{loss:.3f}':<5}" for name, loss in losses.items()]
    return f"{record['encoding']:<12} seed {record['seed']:<3} {'   '.join(cells)}   {record['seconds']:.0f} s"


def _duration(seconds: Real) -> str:
    """For a person who waits: seconds below two minutes, then minutes, then hours.

    >>> [_duration(seconds) for seconds in (0.2, 41.7, 130, 9000)]
    ['1 s', '42 s', '2 minutes', '2.5 hours']
    """
    if seconds < 120:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


def print_losses(results: Mapping[str, Any]) -> None:
    """The table of losses, the lowest at the longest length first, and what it says."""
    from rich.text import Text

    summary = summarise(results)
    lengths = summary.lengths
    between = " " if out().width >= 21 + 17 * len(lengths) else "\n"
    rows = table(title="Loss (nats per token)" + (", mean ± deviation over seeds" if summary.num_seeds > 1 else ""))
    rows.add_column("encoding", no_wrap=True)
    rows.add_column("train", justify="right", style=QUIET, overflow="fold")
    for length in lengths:
        rows.add_column(f"{length:,}\n{length / summary.train_length:g}×", justify="right", overflow="fold")
    leaders = {length: summary.leaders(length) for length in lengths}
    for row in summary.ranked(lengths[-1]):
        cells = [Text(_loss(row, length, between)) for length in lengths]
        for length, cell in zip(lengths, cells, strict=True):
            if row in leaders[length]:  # a star too, for where there is no colour
                cell.plain, cell.style = f"*{cell.plain}", BEST
        rows.add_row(row.encoding, f"{row.train_loss.mean:.3f}" if row.train_loss else "–", *cells)
    margins = [row.margin(length) if (row := summary.best(length)) else None for length in lengths]
    rows.add_section()
    rows.add_row("windows", "", *(f"{summary.num_windows(length):,}" for length in lengths), style=QUIET)
    intervals = ("–" if margin is None else f"{margin:.3f}" for margin in margins)
    rows.add_row("interval ±", "", *intervals, style=QUIET)
    if summary.unigram_loss is not None:
        rows.add_row("unigram", "", *[f"{summary.unigram_loss:.3f}"] * len(lengths), style=QUIET)
    legend = ["* the lowest of its column, and what is not clearly different from it"] if any(leaders.values()) else []
    show(rows, *legend, "\n".join(f"· {sentence}" for sentence in sentences(summary)))


def _loss(row: Row, length: int, between: str) -> str:
    if (cell := row.by_length.get(length)) is None:
        return "–"
    return f"{cell.mean:.3f}" + (f"{between}±{cell.deviation:.3f}" if row.num_seeds > 1 else "")
