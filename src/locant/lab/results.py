"""The results of an experiment: its records, settings and environment.

The results include everything that decides the outcome. With them, `changed_settings` detects a different run, and a
stopped run can continue from its records. `locant.lab.resume_state` saves the state of a single training run.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import platform
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import numpy as np
import tokenizers
import torch

from locant._version import __version__
from locant.arguments import short_repr
from locant.errors import InputError, Remedy
from locant.files import FaultError, json_text, lock, strict_json, write_whole
from locant.lab.candidate import Candidate
from locant.lab.settings import ADDED, TEXT, Settings, size_of

RESULTS, LOCK = "results.json", ".lock"
SCHEMA = 2
"""The version of the file format of `RESULTS`. The first version had no tasks and no version number."""

ROUNDED = 1e-6
"""The largest rounding error of a mean. A mean may lie outside the range of its values by this much."""

RECORD = "tuning.json"
"""The file that `tune` writes into the model's folder."""

PAGE, BY_LENGTH, BY_POSITION, BY_TASK = PICTURES = (
    "report.html", "loss_by_length.png", "loss_by_position.png", "accuracy_by_length.png",
)  # fmt: skip


def environment(device: str = "cpu") -> dict[str, str | int]:
    """Return the package versions, the kind of machine and the device, without host names, user names or paths."""
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return {
        "locant": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "tokenizers": tokenizers.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "cpu_count": os.cpu_count() or 0,
        "torch_threads": torch.get_num_threads(),
        **({} if device == "cpu" else {"device": device if name is None else name(device)}),
    }


class Losses(NamedTuple):
    """The mean loss in nats per token over all targets, at each position of the window, and in each window."""

    mean: float
    by_position: list[float]
    by_window: list[float]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of one training run of a candidate."""

    task: str = TEXT
    encoding: str
    seed: int
    rate: float = 1.0
    """The factor by which the learning rates are multiplied."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values. Lengths become strings."""
        return {
            name: {str(key): each for key, each in value.items()} if isinstance(value, dict) else value
            for name, value in vars(self).items()
        }


@dataclass(frozen=True, kw_only=True)
class Failure(Outcome):
    """A training run that ended with an error."""

    failed: str
    """The reason why the training run failed."""


@dataclass(frozen=True, kw_only=True)
class _MeasuredFields(Outcome):
    train_length: int
    train_loss: float | None
    """For a text, the mean loss over the last tenth of the steps. For a task, the last loss. ``None`` if not finite."""
    num_parameters: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Record(_MeasuredFields):
    """The measurements of one model. Losses are nats per token on held-out text, and ``None`` if not finite."""

    loss_by_length: dict[int, float | None]
    loss_by_position: list[float | None]
    """The loss at each position of the longest windows."""
    loss_by_window: dict[int, list[float | None]]
    """For each length, the loss in each window, in the order of the text."""
    context_loss_by_stretch: dict[int, list[float | None]] = field(default_factory=dict)
    """For each context length, the loss in each stretch of the same targets. See `in_context`."""
    steps: int = 0

    @staticmethod
    def losses(measured: Mapping[int, Losses]) -> dict[str, Any]:
        """Return the loss fields of a record, given the losses at each length."""
        return {
            "loss_by_length": {length: finite_or_none(loss.mean) for length, loss in measured.items()},
            "loss_by_position": [finite_or_none(loss) for loss in measured[max(measured)].by_position],
            "loss_by_window": {
                length: [finite_or_none(each) for each in loss.by_window] for length, loss in measured.items()
            },
        }


@dataclass(frozen=True, kw_only=True)
class TaskRecord(_MeasuredFields):
    """The measurements of one model on a task: the shares of correct rows and of correct tokens at each length."""

    steps: int
    learned: bool
    """True if enough rows of the trained length are correct. If not, longer rows show nothing about the encoding."""
    accuracy_by_length: dict[int, float]
    token_accuracy_by_length: dict[int, float]


AnyRecord = Record | TaskRecord


def read_record(facts: Mapping[str, Any]) -> AnyRecord:
    """Return the record that these JSON values describe.

    Raises:
        ValueError: the values are not a record, or they contradict one another.
    """
    if not isinstance(facts, Mapping):
        raise ValueError(f"got {short_repr(facts)} for a record")
    kind = TaskRecord if "accuracy_by_length" in facts else Record
    hints, values = get_type_hints(kind), dict[str, Any]()
    for name, value in facts.items():
        if name not in hints:
            raise ValueError(f"got {short_repr(name)}, which no record has")
        is_by_length = isinstance(value, dict) and all(key.isdecimal() for key in value)
        values[name] = {int(key): each for key, each in value.items()} if is_by_length else value
        if not has_type(values[name], hints[name]):
            raise ValueError(f"got {short_repr(value)} for {name}")
    if missing := [
        each.name for each in fields(kind) if each.default is each.default_factory and each.name not in facts
    ]:
        raise ValueError(f"got a record without {missing[0]}")
    record = kind(**values)
    if min(record.train_length, record.num_parameters) < 1:
        raise ValueError(f"got a record of {short_repr(record.encoding)} with a size below 1")
    _require_agreement(record)
    return record


def has_type(value: object, hint: Any) -> bool:
    """Return whether a JSON value has the annotated type. Floats must be finite, and a ``bool`` is not a number.

    >>> has_type({8: [1.5, None]}, dict[int, list[float | None]]), has_type(True, int)
    (True, False)
    """
    origin, parts = get_origin(hint), get_args(hint)
    if origin is UnionType:
        return any(has_type(value, each) for each in parts)
    if origin is list:
        return isinstance(value, list) and all(has_type(each, parts[0]) for each in value)
    if origin is dict:
        keys, values = parts
        return isinstance(value, dict) and all(has_type(k, keys) and has_type(v, values) for k, v in value.items())
    if hint is float:
        return not isinstance(value, bool) and isinstance(value, (int, float)) and abs(value) < math.inf
    return value is None if hint is NoneType else type(value) is hint


def _require_agreement(record: AnyRecord) -> None:
    """Raise `ValueError` if the values of a record contradict one another.

    The lengths of all fields must agree, and a mean must lie within the range of its windows. Losses must not be
    negative, and accuracies must be from 0 to 1.
    """
    if isinstance(record, TaskRecord):
        shares = record.accuracy_by_length, record.token_accuracy_by_length
        if shares[0].keys() != shares[1].keys() or record.train_length not in shares[0]:
            raise ValueError("got accuracies whose lengths are not the lengths of the record")
        if not all(0 <= share <= 1 for each in shares for share in each.values()):
            raise ValueError("got an accuracy that is not from 0 to 1")
        return
    lengths = {*record.loss_by_length}
    if not lengths or lengths != {*record.loss_by_window} or len(record.loss_by_position) != max(lengths):
        raise ValueError("got losses by window or by position whose lengths are not the lengths of the record")
    for length, mean in record.loss_by_length.items():
        losses = record.loss_by_window[length]
        numbers = [loss for loss in losses if loss is not None]
        is_mean = mean is None or (numbers and min(numbers) - ROUNDED <= mean <= max(numbers) + ROUNDED)
        if (mean is None) != (len(numbers) < len(losses)) or not losses or not is_mean or min(numbers, default=0) < 0:
            raise ValueError(f"got {mean} for the loss at {length}, which is not the mean over its windows")


def finite_or_none(loss: float) -> float | None:
    """Return a loss, or ``None`` if it is not finite, because JSON cannot represent it."""
    return loss if math.isfinite(loss) else None


@dataclass(frozen=True, kw_only=True)
class Results:
    """The settings, the environment, facts about the text, and the records so far."""

    settings: Settings
    environment: dict[str, str | int] = field(default_factory=environment)
    text: dict[str, Any] = field(default_factory=dict)
    records: tuple[AnyRecord | Failure, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values. Lengths become strings, and `text` becomes one of the settings."""
        files = {name: digest for name in self.settings.encodings if (digest := Candidate.of(name).source)}
        return {
            "schema": SCHEMA, "settings": plain_settings(self.settings, self.text), "environment": self.environment,
            **({"files": files} if files else {}), "records": [record.to_dict() for record in self.records],
        }  # fmt: skip


def plain_settings(settings: object, text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an experiment and the facts about its text as JSON values."""
    values = {name: [*value] if isinstance(value, tuple) else value for name, value in vars(settings).items()}
    return {**values, "text": text}


RECORDED = (Path(__file__).parent / "recorded", Path(__file__).parents[3] / "docs" / "results")
"""The folders of recorded results: in an installed package, and in a checkout."""


def read_recorded(name: str) -> dict[str, Any] | None:
    """Return the results of a comparison that ``benchmarks/suite.py`` recorded, or ``None`` if they do not exist.

    They include only the tasks that every encoding finished with every seed. The entry ``late`` lists the other tasks.
    """
    file = next((place / f"{name}.json" for place in RECORDED if (place / f"{name}.json").is_file()), None)
    if file is None:
        return None
    results = json.loads(file.read_text(encoding="utf-8"))
    settings, records = results["settings"], results["records"]
    finished = {(each.get("task", TEXT), each["encoding"], each["seed"]) for each in records}
    pairs = [*itertools.product(settings["encodings"], settings["seeds"])]
    whole = [task for task in settings["tasks"] if finished >= {(task, *pair) for pair in pairs}]
    late = [task for task in settings["tasks"] if task not in whole]
    records = [each for each in records if each.get("task", TEXT) in whole]
    return {**results, "settings": {**settings, "tasks": whole}, "records": records, "late": late}


def read_recorded_suite(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the recorded results for the suite and model size of these settings, or ``None`` if they do not exist."""
    return read_recorded(f"{settings['suite']}-{size_of(settings)}") if settings.get("suite") else None


def add_recorded(results: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add the recorded results of the suite for encodings that these results do not contain.

    Losses on a text are added only if both comparisons read the same text.
    """
    recorded = read_recorded_suite(results["settings"])
    if recorded is None:
        return results
    text, encodings = results["settings"]["text"].get("sha256"), {*results["settings"]["encodings"]}
    same_text = text == recorded["settings"]["text"]["sha256"]
    others = [
        record | {"encoding": f"{record['encoding']} (recorded)"}
        for record in recorded["records"]
        if record["encoding"] not in encodings and (same_text or record.get("task", TEXT) != TEXT)
    ]
    return {**results, "records": [*results["records"], *others]}


class ResultsFolder:
    """A folder for results. It is created if necessary. Files that a comparison did not write are never changed.

    An earlier report stays until the new comparison has its first result. Any other folder must be empty, unless
    `force` allows adding files to it. The context locks the folder for this process. At its end, folders that were
    created for the results are removed if they are empty.
    """

    def __init__(self, path: Path | str, *, force: bool = False) -> None:
        self.path = Path(path)
        self.holds_earlier = {"settings", "environment", "records"} <= read_earlier(self.path / RESULTS).keys()
        self._stale = PICTURES if self.holds_earlier else ()
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"got {self.path}, which is a file, as the folder of the report", "use another folder")
        others = self.path.is_dir() and any(file.name != LOCK for file in self.path.iterdir())
        if others and not (self.holds_earlier or force):
            remedy = Remedy("use another folder, or {} to add the report to its files", force=True)
            raise InputError(f"{self.path} holds other things than a report", remedy)
        self._new = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"cannot make {self.path}: {error.strerror}", "use a folder that you may write to"
            ) from None
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise InputError(f"got {self.path}, which is not writable", "use a folder that you may write to")

    def write(self, results: Mapping[str, Any]) -> None:
        """Replace the results, and remove the pages and figures of earlier results."""
        write_whole(self.path / RESULTS, json_text(results))
        for name in self._stale:
            (self.path / name).unlink(missing_ok=True)
        self._stale = ()

    def __enter__(self) -> ResultsFolder:
        self._lock = (self.path / LOCK).open("wb")
        if lock(self._lock) is False:
            self._lock.close()
            got = f"got {self.path}, which another run writes"
            raise InputError(got, "use another folder, or wait until the other run has ended")
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.close()
        (self.path / LOCK).unlink(missing_ok=True)
        for folder in self._new:
            if any(folder.iterdir()):
                return
            folder.rmdir()


def read_earlier(path: Path) -> dict[str, Any]:
    """Return the contents of an earlier run's JSON file, or an empty dictionary if it is missing or unreadable.

    Raises:
        InputError: a newer release wrote the file in a format that this release does not know.
    """
    try:
        report = strict_json(path.read_bytes(), path.name)
    except (OSError, FaultError):
        return {}
    require_known_schema(report, str(path))
    return report


def require_known_schema(report: Mapping[str, Any], name: str) -> None:
    """Raise `InputError` if a results file has a newer format than this release knows."""
    if isinstance(schema := report.get("schema"), int) and schema > SCHEMA:
        got = f"got {name}, which a newer release of locant wrote: it has schema {schema}, expected {SCHEMA} at most"
        raise InputError(got, "pip install -U locant, or use another folder")


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the names of the settings that differ between `before`, which was read from JSON, and `now`.

    >>> changed_settings({"seed": 0, "lengths": [8, 16]}, {"seed": 1, "lengths": (8, 16)})
    ['seed']
    """
    plain = json.loads(json.dumps(now))
    return [name for name in {**plain, **before} if before.get(name, ...) != plain.get(name, ...)]


def read_same_run(path: Path, settings: Mapping[str, Any], free: Collection[str]) -> dict[str, Any]:
    """Return the report of an earlier run if it is the same run as this one, else an empty dictionary.

    Two runs are the same if only `free` settings differ, and if they have the same version of locant, the same version
    of torch and the same kind of machine. Facts about the text are compared only if `settings` contains them.
    """
    report, now = read_earlier(path), environment()
    try:
        added = {name: value for name, value in ADDED.items() if name in settings}
        before, versions = {**added, **report["settings"]}, report["environment"]
        text = {name: before["text"].get(name) for name in settings["text"]}
        others = {*changed_settings({**before, "text": text}, settings)} - {*free}
        is_same = not others and all(versions[name] == now[name] for name in ("locant", "torch", "machine"))
        records = report["records"]
    except (LookupError, TypeError, AttributeError):
        return {}
    if is_same and not isinstance(records, list):
        raise damage_error(path, f"got {short_repr(records)} for records")
    return report if is_same else {}


def damage_error(path: Path, why: object) -> InputError:
    """Return the error to raise if results of the same run cannot be read."""
    return InputError(f"got {path}, which holds damaged records: {why}", "use another folder, or delete this file")
