"""Report generated tasks in the terminal and on the page, with the effective length of each encoding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from locant.figures.canvas import LIGHT, Theme
from locant.lab.settings import TASK_MULTIPLES
from locant.lab.task_learning import LEARNED
from locant.lab.task_summary import RIGHT, Score, reciprocal_ranks, scores
from locant.report import console
from locant.report.console import MISSING, show
from locant.report.page import OVERLAID, small_axes, style_small
from locant.report.sentences import join_and
from locant.report.tables import CLEARLY, Cell, Row, Table
from locant.spelling import spell

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NOT_LEARNED = "did not learn"
FULL = TASK_MULTIPLES[-1] - 1
"""The excess over the trained length for which a cell has its full colour, as a multiple of the trained length."""

WIDTH, HEIGHT, COLUMNS = 3.4, 2.7, 3
"""The size of a task's picture in inches, and the number of pictures in a row."""


def print_tasks(results: Mapping[str, Any]) -> None:
    """Print the table of effective lengths and the conclusions."""
    conclusions = "\n".join(f"· {sentence}" for sentence in task_sentences(scores(results)))
    show(console.draw(lengths_table(results)), _caption(results), conclusions)


def record_line(record: Mapping[str, Any]) -> str:
    """Return one line about a training on a task, or about its failure."""
    name = f"{record['task']:<12} {record['encoding']:<12} seed {record['seed']:<3}"
    if "failed" in record:
        return f"{name} failed: {record['failed']}"
    right = "  ".join(f"{length}: {share:.2f}" for length, share in record["accuracy_by_length"].items())
    end = f"learned in {record['steps']:,} steps" if record["learned"] else NOT_LEARNED
    return f"{name} {end:<22} {right}   {record['seconds']:.0f} s"


def task_sentences(found: Sequence[Score]) -> list[str]:
    """Return sentences with the conclusions from the scores."""
    sentences = [_sentence(task, [score for score in found if score.task == task]) for task in _tasks(found)]
    if found and min(score.num_seeds for score in found) == 1:
        sentences.append("One seed was trained, so no difference is clear. Small differences may be chance.")
    return sentences


def _sentence(task: str, found: Sequence[Score]) -> str:
    learned = sorted((score for score in found if score.has_learned), key=lambda score: -fmean(score.beyond))
    others = join_and([score.encoding for score in found if not score.has_learned])
    did_not = f" {others} did not learn it." if others else ""
    if not learned:
        return f"{task}: no encoding learned it, so it allows no comparison."
    best, items = learned[0], learned[0].effective_length or 0
    far = f"{spell(items)} items, {spell(items / best.train_length)} times the trained length"
    if len(learned) == 1:
        return f"{task}: {best.encoding} is right up to {far}.{did_not}"
    ties = join_and([score.encoding for score in learned[1:] if not best.is_clear(score, learned)])
    tied = f", not clearly further than {ties}" if ties else ""
    return f"{task}: {best.encoding} goes furthest, up to {far}{tied}.{did_not}"


def draw_tasks(results: Mapping[str, Any], theme: Theme = LIGHT) -> Figure:
    """Draw the share of right rows by length, as the median over seeds with whiskers for the range.

    Up to `OVERLAID` encodings share a picture for each task. More of them get a picture each, with a curve for a task.
    """
    task_scores = scores(results)
    names = [str(name) for name, *_ in lengths_table(results).rows]
    tasks, trained = _tasks(task_scores), results["settings"]["task_length"]
    if len(names) <= OVERLAID:
        figure, curves = _by_task(task_scores, tasks, names, theme)
    else:
        figure, curves = _by_encoding(task_scores, tasks, names, trained, theme)
    for axes, number, score in curves:
        color, linestyle, marker = theme.stroke(number)
        middle = [median(each) for each in score.by_length.values()]
        label = score.encoding if len(names) <= OVERLAID else score.task
        look: dict[str, Any] = {"color": color, "linestyle": linestyle, "marker": marker, "label": label}
        axes.plot([*score.by_length], middle, markersize=4, **look)
        ends = [
            [half - min(each), max(each) - half] for half, each in zip(middle, score.by_length.values(), strict=True)
        ]
        axes.errorbar([*score.by_length], middle, [*zip(*ends, strict=True)], fmt="none", ecolor=color, elinewidth=1)
    for axes in figure.axes:
        axes.axvline(trained, color=theme.muted, linewidth=1, linestyle=(0, (2, 3)), zorder=0)
        axes.set_xlim(0, trained * (FULL + 1.2))
        axes.set_ylim(-0.03, 1.03)
        if not any(drawn is axes for drawn, _, _ in curves):
            words = {"ha": "center", "color": theme.muted, "fontsize": 9}
            axes.text(0.5, 0.5, NOT_LEARNED, transform=axes.transAxes, **words)  # type: ignore[arg-type]
    drawn = [pair for axes in figure.axes for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
    handles = {label: handle for handle, label in drawn}
    legend = figure.legend(handles.values(), handles, loc="outside right upper", frameon=False, fontsize=9)
    for text in legend.get_texts():
        text.set_color(theme.ink)
    return figure


Curves = list[tuple["Axes", int, Score]]
"""The axes, the number of the stroke, and the score of each curve."""


def _by_task(found: Sequence[Score], tasks: Sequence[str], names: Sequence[str], theme: Theme) -> tuple[Figure, Curves]:
    columns = min(COLUMNS, len(tasks))
    lines = -(-len(tasks) // columns)
    figure = theme.blank(WIDTH * columns + 1.8, HEIGHT * lines)
    curves = Curves()
    for number, task in enumerate(tasks):
        axes = figure.add_subplot(lines, columns, number + 1)
        theme.style_axes(axes, title=task, x="items", y="rows right" if number % columns == 0 else "", grid=True)
        learned = [score for score in found if score.task == task and score.has_learned]
        curves += [(axes, names.index(score.encoding), score) for score in learned]
    return figure, curves


def _by_encoding(
    found: Sequence[Score], tasks: Sequence[str], names: Sequence[str], trained: int, theme: Theme
) -> tuple[Figure, Curves]:
    title = f"Rows right by number of items, trained to {trained}. Most tasks learned first"
    figure, all_axes = small_axes(len(names), title, theme)
    curves = Curves()
    for number, (axes, name) in enumerate(zip(all_axes, names, strict=True)):
        style_small(axes, number, len(names), name, "items", "rows right", theme)
        learned = [score for score in found if score.encoding == name and score.has_learned]
        curves += [(axes, tasks.index(score.task), score) for score in learned]
    return figure, curves


def _tasks(found: Sequence[Score]) -> list[str]:
    return list(dict.fromkeys(score.task for score in found))


def lengths_table(results: Mapping[str, Any]) -> Table:
    """Return the effective length of each encoding in each task, and the rank of the encoding.

    Encodings are ordered by the number of learned tasks, then by rank, because a rank over fewer tasks is less certain.
    """
    task_scores = scores(results)
    tasks, ranks = _tasks(task_scores), reciprocal_ranks(task_scores)
    by_name = {(score.encoding, score.task): score for score in task_scores}
    learned = Counter(score.encoding for score in task_scores if score.has_learned)
    names = sorted(dict.fromkeys(name for name, _ in by_name), key=lambda name: (-learned[name], -ranks.get(name, 0.0)))
    rows = list[Row]()
    for name in names:
        rank = f"{ranks[name]:.2f}" if name in ranks else MISSING
        rows.append([name, *(_cell(by_name.get((name, task))) for task in tasks), rank])
    terms = {
        "right": "A row is right if every token of its answer that counts is correct.",
        "median": "The median is over the seeds that learned the task. Brackets show how many did, if not all.",
        "grey": f"At most half of the seeds had {LEARNED:.0%} of the rows of the trained length right.",
        "rank": (
            "The mean of 1 / place over the tasks that an encoding learned. Encodings that are not clearly different "
            "share a place."
        ),
        "clearly": CLEARLY,
    }
    head = ["encoding", *tasks, "rank"]
    return Table(title="Effective length (items)", head=head, rows=rows, note=_caption(results), terms=terms)


def _cell(score: Score | None) -> Cell:
    if score is None or score.failed:
        return Cell(text="failed" if score else MISSING, look="quiet", hint=score.failed if score else "")
    of = f" ({score.num_learned}/{score.num_seeds})" if 0 < score.num_learned < score.num_seeds else ""
    if score.effective_length is None:
        return Cell(text=f"{NOT_LEARNED}{of}", look="quiet")
    shade = min(1.0, (score.effective_length / score.train_length - 1) / FULL)
    return Cell(text=f"{spell(score.effective_length)}{of}", shade=shade)


def _caption(results: Mapping[str, Any]) -> str:
    return (
        f"The effective length is the number of items up to which {RIGHT:.0%} of the rows are right, as the median "
        f"over seeds. All models were trained on rows of up to {results['settings']['task_length']} items."
    )
