"""A comparison in a terminal: what is trained, a line for every measured model, and the table at the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from locant.lab.comparison import Progress, Watcher
from locant.lab.results import ResultsFolder
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


def print_losses(results: Mapping[str, Any]) -> None:
    """The table of losses, best first at the longest length, and what it says."""
    from rich.text import Text

    summary = summarise(results)
    lengths = summary.lengths
    between = " " if out().width >= 21 + 17 * len(lengths) else "\n"
    rows = table(title="Loss (nats per token)" + (", mean ± deviation over seeds" if summary.num_seeds > 1 else ""))
    rows.add_column("encoding", no_wrap=True)
    rows.add_column("train", justify="right", style=QUIET, overflow="fold")
    for length in lengths:
        rows.add_column(f"{length:,}\n{length / summary.train_length:g}×", justify="right", overflow="fold")
    best = {length: summary.best(length) for length in lengths}
    for row in summary.ranked(lengths[-1]):
        cells = [Text(_loss(row, length, between)) for length in lengths]
        for length, cell in zip(lengths, cells, strict=True):
            if best[length] is row:  # a star too, for where there is no colour
                cell.plain, cell.style = f"*{cell.plain}", BEST
        rows.add_row(row.encoding, f"{row.train_loss.mean:.3f}" if row.train_loss else "–", *cells)
    margins = [row.margin(length) if row else None for length, row in best.items()]
    rows.add_section()
    rows.add_row("windows", "", *(f"{summary.num_windows(length):,}" for length in lengths), style=QUIET)
    intervals = ("–" if margin is None else f"{margin:.3f}" for margin in margins)
    rows.add_row("interval ±", "", *intervals, style=QUIET)
    show(rows, "\n".join(f"· {sentence}" for sentence in sentences(summary)))


def _loss(row: Row, length: int, between: str) -> str:
    if (cell := row.by_length.get(length)) is None:
        return "–"
    return f"{cell.mean:.3f}" + (f"{between}±{cell.deviation:.3f}" if row.num_seeds > 1 else "")
