"""Show the progress of a comparison in the terminal, its tables at the end, and its page."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from locant.arguments import Real
from locant.lab.candidate import Candidate
from locant.lab.comparison import Progress, Watcher
from locant.lab.results import BY_TASK, Results, ResultsFolder, add_recorded
from locant.lab.settings import TEXT, Settings
from locant.lab.summary import Row, Summary, summarise
from locant.lab.task_summary import scores
from locant.lab.text_learning import split_held_out
from locant.lab.training import Training
from locant.report import console, tasks
from locant.report.commands import command
from locant.report.console import MISSING, log_line, out, pluralize, show
from locant.report.page import Picture, curves, picture, render, write_page, write_picture
from locant.report.sentences import sentences, signed
from locant.report.tables import CLEARLY, Cell, Table
from locant.text.corpus import Corpus

SMALL_PRINT = "small print"


class Screen(Watcher):
    """A watcher that shows the progress of a comparison on stderr, and writes the report at the end.

    It shows a bar only in a terminal.
    """

    def __init__(self) -> None:
        from tqdm import tqdm

        self._shown: set[tuple[Any, ...]] = set()
        self._new = functools.partial(tqdm, disable=None, unit="step", leave=False, dynamic_ncols=True, delay=0.1)
        self._bar: Any = self._new()
        self._lines: dict[Training, Any] = {}
        self._results: Results | None = None
        self._trained: dict[str, str] = {}

    def begin(self, corpus: Corpus | None, settings: Settings, folder: ResultsFolder, finished: int) -> None:
        if finished:
            log_line(
                f"{folder.path} holds {pluralize(finished, 'record')} of this comparison, which are not measured again"
            )
        elif folder.holds_earlier:
            log_line(f"{folder.path} holds an earlier report, which is overwritten when the first result is ready")
        tasks = [task for task in settings.tasks if task != TEXT]
        if tasks:
            seeds = pluralize(len(settings.seeds), "seed")
            log_line(f"training {pluralize(len(settings.encodings), 'encoding')} with {seeds} on {', '.join(tasks)}")
            log_line(f"rows of 1 to {settings.task_length} items, measured up to {settings.task_lengths[-1]}")
        if corpus is not None:
            self._log_text(corpus, settings)

    def _log_text(self, corpus: Corpus, settings: Settings) -> None:
        training, held_out = (len(part) for part in split_held_out(corpus.ids, settings.lengths[-1]))
        windows = ", ".join(f"{-(-(held_out - 1) // length):,} of {length:,}" for length in settings.lengths)
        steps = settings.steps_for(training)
        epochs = steps * settings.batch_for(TEXT) * settings.train_length / training
        each = f"{steps:,} steps each, {epochs:.1f} epochs"
        amount = f"{settings.minutes:g} minutes in all" if settings.minutes else each
        models = f"{pluralize(len(settings.encodings), 'encoding')} with {pluralize(len(settings.seeds), 'seed')}"
        tokens = f"{len(corpus.ids):,} tokens of a vocabulary of {corpus.tokenizer.vocab_size:,}"
        log_line(f"{corpus.name}: {corpus.characters:,} characters, {tokens}")
        log_line(f"training {models} on {training:,} tokens, in windows of {settings.train_length:,} ({amount})")
        log_line(f"measuring on the last {held_out:,} tokens, in windows: {windows}")

    def plan(self, results: Results, seconds: float) -> None:
        if "unigram_loss" in results.text:
            unigram, bigram = results.text["unigram_loss"], results.text["bigram_loss"]
            log_line(
                f"a unigram count (how often each token is in the training text) has a loss of {unigram:.3f} there"
            )
            log_line(f"a bigram count (how often each token follows the one before it) has a loss of {bigram:.3f}")
        self._results = results
        self._trained = {name: Candidate.of(name).trained.name for name in results.settings.encodings}
        limit = "at most " if {*results.settings.tasks} != {TEXT} else ""
        log_line(f"this takes {limit}about {_duration(seconds)}")

    def advance(self, progress: Progress) -> None:
        self._bar.total = progress.total
        self._bar.update(progress.done - self._bar.n)
        training = progress.training
        if training not in self._lines:
            self._lines[training] = self._new(total=self._steps(training))
        line = self._lines[training]
        words = f"{training.task}, {training.encoding}, seed {training.seed}, loss {progress.loss:.2f}"
        line.set_description(words, refresh=False)
        line.update()

    def _steps(self, training: Training) -> int | None:
        """Return the largest number of steps of a training, or ``None`` if it is unknown."""
        if self._results is None:
            return None
        tokens = self._results.text["train_tokens"] if training.task == TEXT else None
        return self._results.settings.steps_for(tokens)

    def record(self, results: Mapping[str, Any]) -> None:
        with self._bar.external_write_mode():
            for record in results["records"]:
                key = record["task"], record["encoding"], record["seed"], record["rate"]
                if key not in self._shown:
                    self._shown.add(key)
                    trained = self._trained.get(record["encoding"], "")  # recorded results may have other names
                    if line := self._lines.pop(Training(key[0], trained, *key[2:]), None):
                        line.close()
                    log_line(record_line(record) if "loss_by_length" in record else tasks.record_line(record))

    def end(self, results: Mapping[str, Any], folder: ResultsFolder, *, complete: bool) -> None:
        for line in (*self._lines.values(), self._bar):
            line.close()
        if results:
            page = write_report(results, folder.path)
            if not complete:
                log_line(f"report of the finished part: {page}")


def record_line(record: Mapping[str, Any]) -> str:
    """Return one line about a trained model."""
    losses = {"train": record["train_loss"], **record["loss_by_length"]}
    cells = [f"{name}: {MISSING if loss is None else f'{loss:.3f}':<5}" for name, loss in losses.items()]
    return f"{record['encoding']:<12} seed {record['seed']:<3} {'   '.join(cells)}   {record['seconds']:.0f} s"


def _duration(seconds: Real) -> str:
    """Format a duration in seconds if it is below two minutes, or else in minutes or hours.

    >>> [_duration(seconds) for seconds in (0.2, 41.7, 130, 9000)]
    ['1 s', '42 s', '2 minutes', '2.5 hours']
    """
    if seconds < 120:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


def print_comparison(results: Mapping[str, Any]) -> None:
    """Print the tables of a comparison and its conclusions."""
    results = add_recorded(results)
    if _has(results, "accuracy_by_length"):
        tasks.print_tasks(results)
    if _has(results, "loss_by_length"):
        print_losses(results)


def _has(results: Mapping[str, Any], key: str) -> bool:
    return any(key in record for record in results["records"])


def print_losses(results: Mapping[str, Any]) -> None:
    """Print the table of losses, sorted by the loss at the longest length, and the conclusions."""
    summary = summarise(results)
    lengths, losses, context = summary.lengths, losses_table(summary), context_table(summary)
    margins = [row.margin(length) if (row := summary.best(length)) else None for length in lengths]
    intervals = ["interval ±", "", *(MISSING if margin is None else f"{margin:.3f}" for margin in margins)]
    windows, *counts = losses.below
    shown = replace(losses, head=["encoding", "train", *losses.head[2:]], below=[windows, intervals, *counts])
    between = " " if out().width >= 21 + 17 * len(lengths) else "\n"
    star = "* the lowest value in its column, and values not clearly different from it"
    legend: list[Any] = [star] if any(map(summary.leaders, lengths)) else []
    legend += [console.draw(context)] if context else []
    conclusions = "\n".join(f"· {sentence}" for sentence in sentences(summary))
    show(console.draw(shown, between), *legend, conclusions)


def losses_table(summary: Summary) -> Table:
    """Return means and standard deviations by encoding and length, sorted by the loss at the longest length."""
    leaders = {length: summary.leaders(length) for length in summary.lengths}
    rows = [
        [row.encoding, Cell(text=f"{row.train_loss.mean:.3f}" if row.train_loss else MISSING, look="quiet")]
        + [_loss(summary, row, length, row in leaders[length]) for length in summary.lengths]
        for row in summary.rank(summary.lengths[-1])
    ]
    counts = {"unigram": summary.unigram_loss, "bigram": summary.bigram_loss}
    losses = {name: [f"{loss:.3f}"] * len(summary.lengths) for name, loss in counts.items() if loss is not None}
    windows = [f"{summary.num_windows(length):,}" for length in summary.lengths]
    multiples = [Cell(text=f"{length:,}", small=f"{length / summary.train_length:g}×") for length in summary.lengths]
    several = summary.num_seeds > 1
    note = f"Loss in nats per token{': the mean ± the standard deviation over seeds' if several else ''}."
    terms = {
        "training": "The loss over the last steps of training. All other columns show losses on held-out text.",
        SMALL_PRINT: f"Half of the 95% interval over windows, and the ratio to the loss at {summary.base_length:,}.",
    }
    if losses:
        terms["unigram, bigram"] = (
            "The losses of counts: how often each token is in the training text, and how often it follows the previous "
            "token."
        )
    if any(leaders.values()):
        note += " Bold: the lowest value in a column and all values not clearly different from it."
        terms["clearly"] = CLEARLY
    return Table(
        title="Loss (nats per token)" + (", mean ± deviation over seeds" if several else ""),
        head=["encoding", "training", *multiples],
        rows=rows,
        below=[[name, "", *cells] for name, cells in {"windows": windows, **losses}.items()],
        note=note,
        terms=terms,
    )


def without_small_print(table: Table) -> Table:
    """Return a table of losses with one line in each cell."""
    rows = [[cell if isinstance(cell, str) else replace(cell, small="") for cell in row] for row in table.rows]
    return replace(table, rows=rows, terms={name: words for name, words in table.terms.items() if name != SMALL_PRINT})


def _loss(summary: Summary, row: Row, length: int, leads: bool) -> Cell:
    cell = row.by_length.get(length)
    if cell is None:
        return Cell(text=MISSING, hint="not finite, or not measured")
    ratio, margin = row.ratio(length, summary.base_length), row.margin(length)
    small = ["" if margin is None else f"±{margin:.3f}", f"×{ratio:.3f}" if ratio else "", "best" if leads else ""]
    return Cell(
        text=f"{cell.mean:.3f}",
        spread=f"±{cell.deviation:.3f}" if row.num_seeds > 1 else "",
        small=" · ".join(filter(None, small)),
        look="best" if leads else "",
    )


def context_table(summary: Summary) -> Table | None:
    """Return the losses of tokens that have their full context, if they were measured."""
    measured = next((row for row in summary.rows if row.far), None)
    if measured is None:
        return None
    rows = []
    for row in summary.rank(summary.lengths[-1]):
        losses = [MISSING if (loss := row.in_context(length)) is None else f"{loss:.3f}" for length in row.by_stretch]
        clear = "" if row.far_is_clear else " (not clear)"
        rows.append([row.encoding, *losses, f"{signed(row.far.mean)}{clear}" if row.far else MISSING])
    note = (
        "Loss in nats per token on the same tokens, by the number of tokens before each of them. A negative difference "
        "means that distant tokens help."
    )
    terms = {
        "number of tokens": (
            "Windows overlap, so that each token has the given number of tokens before it, or up to an eighth fewer. "
            "In the windows above, which do not overlap, the first tokens have little context."
        ),
        "difference": "The loss with the longest context minus the loss with the training context.",
        "clear": (
            "A difference is clear if it does not round to zero, and if zero lies outside its 95% intervals over seeds "
            "and over the text."
        ),
    }
    head = ["encoding", *(f"{length:,}" for length in measured.by_stretch), "difference"]
    return Table(title="Loss with full context", head=head, rows=rows, note=note, terms=terms)


def write_report(results: Mapping[str, Any], folder: Path) -> Path:
    """Write the pictures and the page next to `results.json`, and return the path of the page."""
    results = add_recorded(results)
    if _has(results, "accuracy_by_length"):
        write_picture(functools.partial(tasks.draw_tasks, results), folder / BY_TASK)
    summary = summarise(results) if _has(results, "loss_by_length") else None
    return write_page(page(results), summary, folder)


def page(results: Mapping[str, Any]) -> str:
    """Return the whole page, from `Results.to_dict()` or a `results.json`."""
    settings, title, facts, sections = results["settings"], list[str](), list[str](), dict[str, Any]()
    counts = f"{pluralize(len(settings['encodings']), 'encoding')}, {pluralize(len(settings['seeds']), 'seed')} each"
    if _has(results, "accuracy_by_length"):
        caption = "Share of correct rows by number of items. The dotted line is the trained length."
        sections["tasks"] = {
            "table": tasks.lengths_table(results),
            "sentences": tasks.task_sentences(scores(results)),
            "picture": picture(functools.partial(tasks.draw_tasks, results), caption),
        }
        title.append(f"Trained to {settings['task_length']:,} items, read at more")
        facts.append(pluralize(len({*settings["tasks"]} - {TEXT}), "task"))
    if _has(results, "loss_by_length"):
        summary, text = summarise(results), settings["text"]
        sections["text"] = {
            "sentences": sentences(summary),
            "table": losses_table(summary),
            "context": context_table(summary),
            "curves": _curves(summary),
        }
        title.append(f"Trained at {summary.train_length:,} tokens, read at {summary.lengths[-1]:,}")
        split = f"trained on {text['train_tokens']:,} tokens, measured on the last {text['held_out_tokens']:,}"
        facts += [text["source"], split]
    shown_settings = {name: value for name, value in settings.items() if name != "text"}
    shown_settings |= {f"text: {name}": value for name, value in settings.get("text", {}).items()}
    return render(
        "comparison.html",
        title=". ".join(title) or "Nothing was measured",
        facts=" · ".join([counts, *facts]),
        sections=sections,
        command=command(settings),
        settings=_words(shown_settings),
        versions=_words(results["environment"]),
        models=_models_table(results),
        lines=[tasks.record_line(each) for each in results["records"] if "loss_by_length" not in each],
    )


def _curves(summary: Summary) -> list[Picture]:
    seeds = ", with whiskers from the lowest to the highest seed" if summary.num_seeds > 1 else ""
    return curves(
        summary,
        f"Loss by the length of the window{seeds}. The dotted line is the training length, and the hollow marks on it "
        "are the training losses.",
        f"Loss by the position within windows of {summary.lengths[-1]:,} tokens{seeds}. Positions to the right of the "
        "dotted line did not occur in training.",
    )


def _models_table(results: Mapping[str, Any]) -> Table:
    """Return the losses of every model that read a text."""
    records = [record for record in results["records"] if "loss_by_length" in record]
    lengths = sorted({int(length) for record in records for length in record["loss_by_length"]})
    rows = []
    for record in records:
        losses = [record["train_loss"], *(record["loss_by_length"].get(str(length)) for length in lengths)]
        cells = (MISSING if loss is None else f"{loss:.4f}" for loss in losses)
        rows.append([record["encoding"], str(record["seed"]), *cells])
    return Table(head=["encoding", "seed", "training", *(f"{length:,}" for length in lengths)], rows=rows)


def _words(facts: Mapping[str, Any]) -> dict[str, str]:
    return {name.replace("_", " "): _plain(value) for name, value in facts.items()}


def _plain(value: object) -> str:
    if value is None or value in ("", [], ()):
        return MISSING
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)
