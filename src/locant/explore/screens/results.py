"""The screen Results: the report of a comparison, an evaluation or a tuning, or a comparison that runs here."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from locant.errors import InputError, RangeError
from locant.explore.comparison import Comparison
from locant.explore.screens import Screen, evenly_spaced_numbers
from locant.explore.session import Session, State
from locant.files import FaultError, strict_json
from locant.lab.results import RECORD, RESULTS, require_known_schema
from locant.lab.settings import Settings
from locant.lab.summary import Cell, Row, Summary, summarise
from locant.lab.task_summary import scores
from locant.report.evaluation import evaluation_sentences, tuning_sentences
from locant.report.sentences import sentences
from locant.report.tasks import task_sentences

NOTHING = "none yet"
SAMPLE = "sample text"
POINTS = 200
"""The largest number of points on a training curve, which fits the width of a screen."""
NEIGHBOURS = 16
"""The number of positions whose losses are averaged, because single losses depend on the token there."""

BY_LENGTH = """rows = summarise(report).rows
losses = {row.encoding: [cell.mean if cell else np.nan for cell in row.by_length.values()] for row in rows}
"""
MARGINS = """half = {row.encoding: [row.margin(length) or np.nan for length in row.by_length] for row in rows}
intervals = {name: (np.subtract(losses[name], half[name]), np.add(losses[name], half[name])) for name in losses}
"""
INTERVALS = """intervals = {record["encoding"]: record["interval_by_length"] for record in report["records"]}
"""
BY_POSITION = """from locant.explore.screens.results import by_position

losses = {row.encoding: by_position(row) for row in summarise(report).rows}
"""
RECALLED = """keys = next(each["pass_keys"] for each in report["records"] if each["encoding"] == {!r})
share = {{(each["depth"], each["length"]): each["recalled"] / each["asked"] for each in keys if each["asked"]}}
"""
CODE_OF_TUNING = {
    "training": 'training, held_out = report["train_loss"], dict(report["held_out"])\n',
    "loss-by-length": 'losses = {when: report[f"{when}_by_length"] for when in ("before", "after")}\n',
}
TRAINING = """from locant.lab import Settings, compare
from locant.lab.settings import VOCAB_SIZE
from locant.text.corpus import read_corpus

corpus = read_corpus({files!r}, default_vocab_size=VOCAB_SIZE)
training = {{}}


def heard(progress):
    name = f"{{progress.training.encoding}}, seed {{progress.training.seed}}"
    training.setdefault(name, []).append(progress.loss)


compare(corpus.ids, corpus.tokenizer.vocab_size, Settings({options}), on_progress=heard)
"""

COMPARED = "Nats per token on the last tenth of the text, with 95% intervals of the mean over windows as whiskers."
TUNED = "Loss in nats per token before and after the training, on the first tokens of each held-out window."
EVALUATED = "Nats per token without any training, with 95% intervals over windows as whiskers."


def numbers(state: State, session: Session) -> Mapping[str, Any]:
    """Return the losses of a report by length and position, its conclusions, and the progress of a comparison."""
    runs = {key: run.folder for key, run in session.comparisons.items()}
    folder_by_name = {**session.reports, **runs} or {NOTHING: None}
    # A dropped file may be for another screen, so it is opened only if an address names it.
    name, dropped = session.choose(
        state, "report", next(iter(folder_by_name)), [*folder_by_name], {key: str(runs[key]) for key in runs}
    )
    options(state, session)
    run = session.comparisons.get(name)
    title = dropped.name if dropped else str(runs.get(name, name))
    written = title if dropped or run else session.path_in_code(name)
    results = None
    if dropped:
        results = _read(dropped.content, dropped.name)
    elif folder := folder_by_name[name]:
        results = _in_folder(folder, required=run is None)
    if session.is_shared:
        results = _without_folders(results)
    shown = _read_curves(results, written)
    return {
        "folder": "" if name == NOTHING else title,
        "state": None if run is None else run.state,
        "done": 0 if run is None else run.num_steps,
        "total": 0 if run is None else run.total,
        "missing": _missing(results),
        "training": {} if run is None else {label: _thin(losses) for label, losses in run.losses.items()},
        "python": ({} if run is None else {"training": _code_of_run(run, session)})
        | ({} if results is None else _codes(written, shown, results)),
        **shown,
    }


def options(state: State, session: Session) -> dict[str, Any]:
    """Return the options of a new comparison, all of which are settings of this screen."""
    names = tuple(filter(None, map(str.strip, state.text("encodings", "nope, rotary, alibi", 400).split(","))))
    if any(".py:" in name for name in names):  # such a file would be run
        raise RangeError("got an encoding in a Python file, which this page does not run", "use locant compare")
    texts = [SAMPLE, *session.texts]
    return {
        "text": state.one_of("text", texts[-1], texts),
        "encodings": names,
        "num_steps": state.whole("steps", 100, 1, 2000, log=True),
        "train_length": state.whole("train", 64, 8, 256, log=True),
        "seeds": tuple(range(state.whole("seeds", 1, 1, 5))),
    }


def start(state: State, session: Session) -> str:
    """Start a comparison with the settings of an address, and return its key for the screen."""
    chosen = options(state, session)
    text = chosen.pop("text")
    Settings(**chosen)  # raises an error before a process starts
    numbered = (Path(f"explore-report-{number}") for number in itertools.count(1))
    folder = next(folder for folder in numbered if not folder.exists())
    files = [str(session.texts[text])] if text in session.texts else []
    return session.compare(lambda: Comparison(files, chosen, folder))


def _missing(results: dict[str, Any] | None) -> int:
    """Return the number of missing measurements of a comparison, or 0 for an evaluation or a tuning."""
    settings = {} if results is None else results.get("settings", {})
    if results is None or not {"encodings", "tasks", "seeds"} <= settings.keys():
        return 0
    expected = math.prod(len(settings[each]) for each in ("encodings", "tasks", "seeds"))
    return max(0, expected - sum(record["seed"] in settings["seeds"] for record in results["records"]))


def _without_folders(value: Any) -> Any:
    """Return a report with only the names of its texts, without folders."""
    if not isinstance(value, dict):
        return value
    named = {key: _without_folders(each) for key, each in value.items()}
    if files := isinstance(value.get("files"), list) and [Path(str(file)).name for file in value["files"]]:
        named |= {"source": ", ".join(files), "files": files}
    return named


def _in_folder(folder: Path, *, required: bool) -> dict[str, Any] | None:
    """Read the report in a folder. A running comparison may not have written one yet."""
    file = next((folder / name for name in (RESULTS, RECORD) if (folder / name).is_file()), folder / RESULTS)
    file = folder if folder.is_file() else file
    try:
        return _read(file.read_bytes(), str(file))
    except FileNotFoundError:
        if not required:
            return None
        remedy = "use a folder that locant compare, evaluate or tune wrote"
        raise InputError(f"got {folder}, which holds no {RESULTS}", remedy) from None


def _read(content: bytes, name: str) -> dict[str, Any]:
    try:
        report = strict_json(content, name)
    except FaultError:
        raise _no_report(name) from None
    require_known_schema(report, name)
    return report


def _no_report(name: str) -> InputError:
    got = f"got {name}, which is not what locant compare, evaluate or tune writes"
    return InputError(got, f"use {RESULTS} or {RECORD} as written")


def _read_curves(results: dict[str, Any] | None, name: str) -> dict[str, Any]:
    """Return the curves of a report, their intervals and its sentences. All are empty if there is no report yet."""
    nothing = {"said": [], "note": "", "lengths": np.zeros(0), "trained": 0, "rows": [], "pass_keys": []}
    if results is None:
        return nothing
    try:
        if "held_out" in results:
            return _read_tuning(results)
        about_tasks = task_sentences(scores(results))
        if about_tasks and not any("loss_by_length" in record for record in results["records"]):
            return {**nothing, "said": about_tasks}
        summary = summarise(results)
        evaluated = "ways" in results["settings"]
        written = {record["encoding"]: record["interval_by_length"] for record in results["records"] if evaluated}
        return {
            "said": evaluation_sentences(results) if evaluated else [*about_tasks, *sentences(summary)],
            "note": EVALUATED if evaluated else COMPARED,
            "lengths": np.array(summary.lengths),
            "trained": summary.train_length,
            "rows": [_row(row, summary, written.get(row.encoding)) for row in summary.rows],
            "pass_keys": [_recall_table(record) for record in results["records"] if record.get("pass_keys")],
        }
    except (ValueError, LookupError, TypeError, AttributeError):
        raise _no_report(name) from None


def _read_tuning(record: dict[str, Any]) -> dict[str, Any]:
    """Return the curves of a tuning: training and held-out losses over steps, and held-out losses by length."""
    lengths = [*map(int, record["before_by_length"])]
    unknown = np.full(len(lengths), np.nan)
    steps, held_out = np.array(record["held_out"], dtype=np.float64).T
    rows = [
        {"name": when, "by_length": np.array([record[f"{when}_by_length"][str(length)] for length in lengths]),
         "low": unknown, "high": unknown, "by_position": np.zeros(0)}
        for when in ("before", "after")
    ]  # fmt: skip
    return {
        "training": {"training": _thin(record["train_loss"]), "held-out": {"steps": steps, "losses": held_out}},
        "said": tuning_sentences(record),
        "note": TUNED,
        "lengths": np.array(lengths),
        "trained": record["settings"]["length"],
        "rows": rows,
        "pass_keys": [],
    }


def _row(row: Row, summary: Summary, written: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the curves of an encoding and their 95 % intervals by length.

    For an evaluation these are the `written` intervals. For a comparison these are the intervals over windows, if there
    are enough windows.
    """
    means = _cells([row.by_length.get(length) for length in summary.lengths])
    if written is None:
        margins = np.array([row.margin(length) or np.nan for length in summary.lengths])
        low, high = means - margins, means + margins
    else:
        ends = [written.get(str(length)) or (np.nan, np.nan) for length in summary.lengths]
        low, high = np.array(ends, dtype=np.float64).T
    return {"name": row.encoding, "by_length": means, "low": low, "high": high, "by_position": by_position(row)}


def _recall_table(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the share of pass keys that an encoding recalled, with a row per depth and a column per length."""
    lengths, depths = (sorted({each[name] for each in record["pass_keys"]}) for name in ("length", "depth"))
    counts = np.zeros((2, len(depths), len(lengths)))
    for each in record["pass_keys"]:
        place = depths.index(each["depth"]), lengths.index(each["length"])
        counts[:, *place] = each["recalled"], each["asked"]
    recalled, num_rows = counts
    share = np.divide(recalled, num_rows, out=np.full_like(num_rows, np.nan), where=num_rows > 0)
    return {"name": record["encoding"], "lengths": lengths, "depths": depths, "share": share, "recalled": recalled,
            "asked": num_rows}  # fmt: skip


def _cells(cells: Sequence[Cell | None]) -> np.ndarray:
    return np.array([np.nan if cell is None else cell.mean for cell in cells])


def by_position(row: Row) -> np.ndarray:
    """Return the losses of an encoding by position, averaged over `NEIGHBOURS`, or fewer at the ends."""
    values = _cells(row.by_position)
    counts = np.convolve(np.ones(len(values)), np.ones(NEIGHBOURS), "same")
    return np.convolve(values, np.ones(NEIGHBOURS), "same") / counts if len(values) >= NEIGHBOURS else values


def _thin(losses: list[float]) -> dict[str, np.ndarray]:
    steps = evenly_spaced_numbers(len(losses), POINTS)
    return {"steps": steps + 1, "losses": np.array(losses)[steps]}


def _codes(name: str, shown: Mapping[str, Any], results: Mapping[str, Any]) -> dict[str, str]:
    """Return the code of each picture of a report."""
    tuned, evaluated = "held_out" in results, "ways" in results.get("settings", {})
    file = Path(name) if name.endswith(".json") else Path(name) / (RECORD if tuned else RESULTS)
    head = "import json\nfrom pathlib import Path\n\n"
    read = f"report = json.loads(Path({str(file)!r}).read_text('utf-8'))\n"
    if tuned:
        return {picture: head + read + code for picture, code in CODE_OF_TUNING.items()}
    summary = f"{head}import numpy as np\n\nfrom locant.lab.summary import summarise\n\n{read}"
    keys = [head + read + RECALLED.format(each["name"]) for each in shown["pass_keys"]]
    return {
        "loss-by-length": summary + BY_LENGTH + (INTERVALS if evaluated else MARGINS),
        "loss-by-position": summary + BY_POSITION,
        **{f"pass-keys-{at}": code for at, code in enumerate(keys)},
    }


def _code_of_run(run: Comparison, session: Session) -> str:
    """Return code that trains like the comparison that runs here, whose curves are not in a report."""
    files = [session.path_in_code(name) for name, file in session.texts.items() if str(file) in run.files]
    options = ", ".join(f"{name}={value!r}" for name, value in run.options.items())
    return TRAINING.format(files=files, options=options)


ABOUT = "Which encoding works beyond the trained length? Measured on small models, or on yours."
SCREENS = {"results": Screen("Results", 8, ABOUT, numbers)}
