"""A comparison in a terminal: what is trained, a line for every measured model, the table at the end; and its page."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from locant.arguments import Real
from locant.figures.canvas import save
from locant.lab.comparison import Progress, Watcher
from locant.lab.contestant import Contestant
from locant.lab.results import BY_TASK, Results, ResultsFolder, command, recorded_suite
from locant.lab.settings import TEXT, Settings
from locant.lab.summary import Row, Summary, summarise
from locant.lab.text_learning import split_off
from locant.lab.training import Training
from locant.report import console, tasks
from locant.report.console import BEST, MISSING, QUIET, counted, out, show, talk
from locant.report.page import bullets, curves, picture, report, scrolling, settings_table, table, write_page
from locant.report.sentences import sentences
from locant.text.corpus import Corpus


class Screen(Watcher):
    """Shows on stderr how far a comparison is, with a bar only where a person watches; draws the report at its end."""

    def __init__(self) -> None:
        from tqdm import tqdm

        self._told: set[tuple[Any, ...]] = set()
        self._new = functools.partial(tqdm, disable=None, unit="step", leave=False, dynamic_ncols=True, delay=0.1)
        self._bar: Any = self._new()
        self._lines: dict[Training, Any] = {}
        self._planned: Results | None = None
        self._trained: dict[str, str] = {}

    def begin(self, corpus: Corpus | None, settings: Settings, folder: ResultsFolder, finished: int) -> None:
        if finished:
            talk(f"{folder.path} holds {counted(finished, 'record')} of this comparison, not measured again")
        elif folder.holds_earlier:
            talk(f"{folder.path} holds an earlier report, which is replaced once the first result is in")
        tasks = [task for task in settings.tasks if task != TEXT]
        if tasks:
            seeds = counted(len(settings.seeds), "seed")
            talk(f"training {counted(len(settings.encodings), 'encoding')} with {seeds} on {', '.join(tasks)}")
            talk(f"rows of 1 to {settings.task_length} items, measured up to {settings.task_lengths[-1]}")
        if corpus is not None:
            self._tell_text(corpus, settings)

    def _tell_text(self, corpus: Corpus, settings: Settings) -> None:
        training, held_out = (len(part) for part in split_off(corpus.ids, settings.lengths[-1]))
        windows = ", ".join(f"{-(-(held_out - 1) // length):,} of {length:,}" for length in settings.lengths)
        steps = settings.steps_for(training)
        epochs = steps * settings.batch_for(TEXT) * settings.train_length / training
        amount = f"{steps:,} steps each, {epochs:.1f} epochs"
        if settings.minutes:
            amount = f"{settings.minutes:g} minutes in all"
        contestants = f"{counted(len(settings.encodings), 'encoding')} with {counted(len(settings.seeds), 'seed')}"
        tokens = f"{len(corpus.ids):,} tokens of a vocabulary of {corpus.tokenizer.vocab_size:,}"
        talk(f"{corpus.name}: {corpus.characters:,} characters, {tokens}")
        talk(f"training {contestants} on {training:,} tokens, in windows of {settings.train_length:,} ({amount})")
        talk(f"measuring on the last {held_out:,} tokens, in windows: {windows}")

    def plan(self, results: Results, seconds: float) -> None:
        if "unigram_loss" in results.text:
            unigram, bigram = results.text["unigram_loss"], results.text["bigram_loss"]
            talk(f"a unigram count (how often each token is in the training text) has a loss of {unigram:.3f} there")
            talk(f"a bigram count (how often each token follows the one before it) has a loss of {bigram:.3f}")
        self._planned = results
        self._trained = {name: Contestant.of(name).trained.name for name in results.settings.encodings}
        most = "at the most " if {*results.settings.tasks} != {TEXT} else ""
        talk(f"this takes {most}about {_duration(seconds)}")

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
        """The most that it may take."""
        if self._planned is None:
            return None
        tokens = self._planned.text["train_tokens"] if training.task == TEXT else None
        return self._planned.settings.steps_for(tokens)

    def record(self, results: Mapping[str, Any]) -> None:
        with self._bar.external_write_mode():
            for record in results["records"]:
                key = record["task"], record["encoding"], record["seed"], record["rate"]
                if key not in self._told:
                    self._told.add(key)
                    trained = self._trained.get(record["encoding"], "")  # of others a file may have the name
                    if line := self._lines.pop(Training(key[0], trained, *key[2:]), None):
                        line.close()
                    talk(record_line(record) if "loss_by_length" in record else tasks.record_line(record))

    def end(self, results: Mapping[str, Any], folder: ResultsFolder, *, complete: bool) -> None:
        for line in (*self._lines.values(), self._bar):
            line.close()
        if results:
            page = write_report(results, folder.path)
            if not complete:
                talk(f"the report of what was finished: {page}")


def record_line(record: Mapping[str, Any]) -> str:
    """One model in one line."""
    losses = {"train": record["train_loss"], **record["loss_by_length"]}
    cells = [f"{name}: {MISSING if loss is None else f'{loss:.3f}':<5}" for name, loss in losses.items()]
    return f"{record['encoding']:<12} seed {record['seed']:<3} {'   '.join(cells)}   {record['seconds']:.0f} s"


def _duration(seconds: Real) -> str:
    """For a person who waits: seconds below two minutes, then minutes, then hours.

    >>> [_duration(seconds) for seconds in (0.2, 41.7, 130, 9000)]
    ['1 s', '42 s', '2 minutes', '2.5 hours']
    """
    if seconds < 120:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


def print_comparison(results: Mapping[str, Any]) -> None:
    """The tables of what was compared, and what they say."""
    results = with_recorded(results)
    if _has(results, "accuracy_by_length"):
        tasks.print_tasks(results)
    if _has(results, "loss_by_length"):
        print_losses(results)


def with_recorded(results: Mapping[str, Any]) -> Mapping[str, Any]:
    """With what is recorded of a suite, for the encodings that these results have not; of a text, for the same text."""
    recorded = recorded_suite(results["settings"])
    if recorded is None:
        return results
    text, own = results["settings"]["text"].get("sha256"), {*results["settings"]["encodings"]}
    same_text = text == recorded["settings"]["text"]["sha256"]
    others = [
        record | {"encoding": f"{record['encoding']} (recorded)"}
        for record in recorded["records"]
        if record["encoding"] not in own and (same_text or record.get("task", TEXT) != TEXT)
    ]
    return {**results, "records": [*results["records"], *others]}


def _has(results: Mapping[str, Any], measured: str) -> bool:
    return any(measured in record for record in results["records"])


def print_losses(results: Mapping[str, Any]) -> None:
    """The table of losses, the lowest at the longest length first, and what it says."""
    from rich.text import Text

    summary = summarise(results)
    lengths = summary.lengths
    between = " " if out().width >= 21 + 17 * len(lengths) else "\n"
    rows = console.table(
        title="Loss (nats per token)" + (", mean ± deviation over seeds" if summary.num_seeds > 1 else "")
    )
    rows.add_column("encoding", no_wrap=True)
    rows.add_column("train", justify="right", style=QUIET, overflow="fold")
    for length in lengths:
        rows.add_column(f"{length:,}\n{length / summary.train_length:g}×", justify="right", overflow="fold")
    leaders = {length: summary.leaders(length) for length in lengths}
    for row in summary.ranked(lengths[-1]):
        cells = [Text(_mean(row, length, between)) for length in lengths]
        for length, cell in zip(lengths, cells, strict=True):
            if row in leaders[length]:  # a star too, for where there is no colour
                cell.plain, cell.style = f"*{cell.plain}", BEST
        rows.add_row(row.encoding, f"{row.train_loss.mean:.3f}" if row.train_loss else MISSING, *cells)
    margins = [row.margin(length) if (row := summary.best(length)) else None for length in lengths]
    rows.add_section()
    rows.add_row("windows", "", *(f"{summary.num_windows(length):,}" for length in lengths), style=QUIET)
    intervals = (MISSING if margin is None else f"{margin:.3f}" for margin in margins)
    rows.add_row("interval ±", "", *intervals, style=QUIET)
    for name, loss in _counts(summary).items():
        rows.add_row(name, "", *[f"{loss:.3f}"] * len(lengths), style=QUIET)
    legend: list[Any] = (
        ["* the lowest of its column, and what is not clearly different from it"] if any(leaders.values()) else []
    )
    if any(row.far for row in summary.rows):
        contexts = console.table(*_context_head(summary), name="encoding", title="Loss with full context")
        for row in summary.ranked(lengths[-1]):
            contexts.add_row(row.encoding, *_context_cells(row))
        legend.append(contexts)
    show(rows, *legend, "\n".join(f"· {sentence}" for sentence in sentences(summary)))


def _mean(row: Row, length: int, between: str) -> str:
    if (cell := row.by_length.get(length)) is None:
        return MISSING
    return f"{cell.mean:.3f}" + (f"{between}±{cell.deviation:.3f}" if row.num_seeds > 1 else "")


def write_report(results: Mapping[str, Any], folder: Path) -> Path:
    """Write the pictures and the page beside `results.json`; returns where the page is."""
    results = with_recorded(results)
    if _has(results, "accuracy_by_length"):
        save(tasks.draw_tasks(results), folder / BY_TASK)
    summary = summarise(results) if _has(results, "loss_by_length") else None
    return write_page(page(results), summary, folder)


def page(results: Mapping[str, Any]) -> str:
    """The whole page, from `Results.to_dict()` or a `results.json`."""
    settings, sections, title, facts = results["settings"], dict[str, str](), list[str](), list[str]()
    counts = f"{counted(len(settings['encodings']), 'encoding')}, {counted(len(settings['seeds']), 'seed')} each"
    if _has(results, "accuracy_by_length"):
        caption = "The share of rows that are right, by items. On the dotted line is the trained length."
        sections |= tasks.task_sections(results, picture(functools.partial(tasks.draw_tasks, results), caption))
        title.append(f"Trained to {settings['task_length']:,} items, read at more")
        facts.append(counted(len({*settings["tasks"]} - {TEXT}), "task"))
    if _has(results, "loss_by_length"):
        summary, text = summarise(results), settings["text"]
        sections |= _of_text(summary)
        title.append(f"Trained at {summary.train_length:,} tokens, read at {summary.lengths[-1]:,}")
        read = f"trained on {text['train_tokens']:,} tokens, measured on the last {text['held_out_tokens']:,}"
        facts += [text["source"], read]
    sections["How it was made"] = _how(results)
    return report(". ".join(title) or "Nothing was measured", " · ".join([counts, *facts]), sections)


def _of_text(summary: Summary) -> dict[str, str]:
    seeds = "Whiskers go from the lowest to the highest seed. " if summary.num_seeds > 1 else ""
    pictures = curves(
        summary,
        f"Loss against the length of the window. {seeds}The dotted line is the training length; on it, hollow "
        "marks are the training losses.",
        f"Loss against the position within windows of {summary.lengths[-1]:,} tokens. {seeds}Right of the dotted line "
        "are positions that did not occur in training.",
    )
    return {
        "What the numbers say": bullets(sentences(summary)),
        "Loss by length": losses_table(summary),
        **context_section(summary),
        "The two curves": pictures,
    }


def losses_table(summary: Summary) -> str:
    """Mean and standard deviation of every encoding at every length, the lowest at the longest first."""
    lengths = summary.lengths
    leaders = {length: summary.leaders(length) for length in lengths}
    multiples = [f"{length:,}<small>{length / summary.train_length:g}×</small>" for length in lengths]
    rows = []
    for row in summary.ranked(lengths[-1]):
        cells = [_loss(row, length, summary, marked=row in leaders[length]) for length in lengths]
        rows.append([escape(row.encoding), f"{row.train_loss.mean:.3f}" if row.train_loss else MISSING, *cells])
    rows.append(["windows", "", *(f"{summary.num_windows(length):,}" for length in lengths)])
    rows += [[name, "", *[f"{loss:.3f}"] * len(lengths)] for name, loss in _counts(summary).items()]
    spread = " ± standard deviation over seeds" if summary.num_seeds > 1 else ""
    note = (
        f"Nats per token, mean{spread}: over the last steps of training, and on held-out text in windows. "
        f"Below, half of the 95% interval over the windows, and the ratio to the loss at {summary.base_length:,}. "
    )
    if summary.unigram_loss is not None:
        note += "Unigram and bigram are losses of counts: how often each token is in the training text, and how often "
        note += "it follows the one before it. "
    if any(leaders.values()):
        note += "Best, and bold, are the lowest of a column and what is not clearly different from it."
    losses = scrolling(table(["encoding", "training", *multiples], rows, "losses"))
    return f'{losses}\n<p class="note">{escape(note)}</p>'


def _counts(summary: Summary) -> dict[str, float]:
    """The losses of counts that there are."""
    counts = {"unigram": summary.unigram_loss, "bigram": summary.bigram_loss}
    return {name: loss for name, loss in counts.items() if loss is not None}


def _context_head(summary: Summary) -> list[str]:
    row = next(row for row in summary.rows if row.far)
    return [*(f"{length:,}" for length in row.by_stretch), "difference"]


def _context_cells(row: Row) -> list[str]:
    """The loss with so many tokens before every token, and what the most do against the fewest."""
    losses = [MISSING if (loss := row.in_context(length)) is None else f"{loss:.3f}" for length in row.by_stretch]
    return [*losses, f"{row.far.mean:+.3f}{'' if row.far_is_clear else ' (not clear)'}" if row.far else MISSING]


def context_section(summary: Summary) -> dict[str, str]:
    """The section of losses where every token has its full context."""
    if not any(row.far for row in summary.rows):
        return {}
    rows = [[escape(row.encoding), *_context_cells(row)] for row in summary.ranked(summary.lengths[-1])]
    note = (
        "Nats per token, of the same tokens, each with so many before it, or an eighth less: windows overlap. In "
        "windows that do not, as above, tokens at the beginning have little context. The difference is what the most "
        "tokens do against as many as in training: below zero, what is far is used. It is clear beyond the deviation "
        "over seeds and the 95% interval."
    )
    losses = scrolling(table(["encoding", *_context_head(summary)], rows, "losses"))
    return {"Loss with full context": f'{losses}\n<p class="note">{escape(note)}</p>'}


def _loss(row: Row, length: int, summary: Summary, *, marked: bool) -> str:
    cell = row.by_length.get(length)
    if cell is None:
        return f'<td title="not finite, or not measured">{MISSING}</td>'
    spread = f" ± {cell.deviation:.3f}" if row.num_seeds > 1 else ""
    ratio, margin = row.ratio(length, summary.base_length), row.margin(length)
    below = ["" if margin is None else f"±{margin:.3f}", f"×{ratio:.3f}" if ratio else "", "best" if marked else ""]
    kind = ' class="best"' if marked else ""
    return f"<td{kind}>{cell.mean:.3f}{spread}<small>{' · '.join(filter(None, below))}</small></td>"


def _how(results: Mapping[str, Any]) -> str:
    """The command, every setting, every version, every single model."""
    text = {f"text: {name}": value for name, value in results["settings"].get("text", {}).items()}
    settings = {name: value for name, value in results["settings"].items() if name != "text"}
    line = escape(command(results["settings"])).replace(" --", "</span> <span>--")  # lines may break there
    tables = "".join(
        settings_table({name.replace("_", " "): _plain(value) for name, value in facts.items()})
        for facts in ({**settings, **text}, results["environment"])
    )
    records = [record for record in results["records"] if "loss_by_length" in record]
    lengths = sorted({int(length) for record in records for length in record["loss_by_length"]})
    rows = []
    for record in records:
        losses = [record["train_loss"], *(record["loss_by_length"].get(str(length)) for length in lengths)]
        cells = (MISSING if loss is None else f"{loss:.4f}" for loss in losses)
        rows.append([escape(record["encoding"]), str(record["seed"]), *cells])
    models = scrolling(table(["encoding", "seed", "training", *(f"{length:,}" for length in lengths)], rows))
    others = "\n".join(escape(tasks.record_line(each)) for each in results["records"] if each not in records)
    models = (f"<pre>{others}</pre>\n" if others else "") + (models if records else "")
    return (
        f'<p>To make it again:</p>\n<pre><span>{line}</span></pre>\n<div class="pair">\n{tables}\n</div>\n'
        f"<details><summary>Every model</summary>\n{models}\n</details>"
    )


def _plain(value: object) -> str:
    if value is None or value in ("", [], ()):
        return MISSING
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)
