"""Compare encodings beyond their trained lengths.

A comparison consists of training runs and their measurements. There is a training run for every encoding, every seed
and every task. A task is a text or a generated task. The training runs do not depend on one another, so each may run
anywhere and at any time, and training runs in `results.json` are not repeated. If a comparison is killed, the same call
continues it and returns the same numbers.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int

from locant.arguments import short_repr
from locant.errors import InputError, LocantError, Remedy
from locant.lab.candidate import Candidate, preserve_torch_settings
from locant.lab.language_model import device_of
from locant.lab.pool import FAILURES, Pool, describe_error
from locant.lab.results import (
    RESULTS,
    SCHEMA,
    AnyRecord,
    Failure,
    Record,
    Results,
    ResultsFolder,
    TaskRecord,
    damage_error,
    environment,
    plain_settings,
    read_record,
    read_same_run,
)  # fmt: skip
from locant.lab.settings import TEXT, VOCAB_SIZE, Settings, require_one_duration, settings_of_suite
from locant.lab.text_learning import build, shape, split_held_out
from locant.lab.training import SHARE, SWEEP_SEED, Cost, Text, Training, candidates, cost, sweep, trainings
from locant.positions import Positions
from locant.text.corpus import Corpus, read_corpus

INSTANT = 1e-6
"""The assumed time of a step, in seconds, if no step can be timed."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of the whole comparison after one training step."""

    training: Training
    loss: float
    done: int
    total: int


def compare(
    ids: Int[np.ndarray, " tokens"] | None = None,
    vocab_size: int = 0,
    settings: Settings | None = None,
    *,
    ray: str | None = None,
    finished: Iterable[AnyRecord] = (),
    on_plan: Callable[[Results, float], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    on_record: Callable[[Results], None] | None = None,
) -> Results:
    """Train every encoding with every seed, and measure each model beyond its trained length.

    Models train on the first nine tenths of a text, and are measured on the last tenth. For a task, they train on rows
    of every length up to the trained length, until they have learned the task. See `locant.lab.task_learning`.

    On a CPU, each of torch's threads trains one model, because small models gain little from more threads. The numbers
    do not depend on the number of threads.

    All training runs with the same seed read the same windows or rows in the same order. They start from the same
    weights, except for the weights of the encoding. Tables of learned positions are as long as the longest length, and
    rows beyond the trained length stay untrained. An encoding with several scalings is trained once. See `Candidate`.

    Args:
        ids: the text, as token ids. It is required if ``text`` is one of the tasks.
        vocab_size: the vocabulary size of the tokenizer.
        ray: the address of a Ray cluster to train on, or ``"local"`` for a new one with a process for each of torch's
            threads.
        finished: the records of an earlier call with these settings. They are not measured again.
        on_plan: called before the first training run, with the results so far and the most seconds that the rest may
            take. For this estimate, some steps of each encoding are timed.
        on_progress: called after every step, in the thread of the training run, one call at a time. It is not called
            with Ray.
        on_record: called with all results so far after every training run, in the thread of the caller.

    Raises:
        InputError: an encoding cannot be built, there is no text, the text is too short to hold out a window of the
            longest length, or all training runs failed.
        RangeError: torch does not find the device.

    >>> settings = Settings(encodings=("rotary", "rotary+ntk"), seeds=(0,), num_steps=2, train_length=8, d_model=16)
    >>> results = compare(np.arange(900) % 7, 7, settings)
    >>> [(record.encoding, len(record.loss_by_window[64])) for record in results.records]
    [('rotary', 2), ('rotary+ntk', 2)]
    >>> settings = Settings(encodings=("alibi",), tasks=("copy",), seeds=(0,), num_steps=2, task_length=4, d_model=16)
    >>> [record.learned for record in compare(settings=settings).records]
    [False]
    """
    chosen = Settings() if settings is None else settings
    if ray is None:
        device_of(chosen.device)
    with torch.random.fork_rng(devices=()):  # report an encoding that cannot be built before the first training run
        for name in chosen.encodings:
            try:
                with preserve_torch_settings(name):
                    _try_once(Candidate.of(name), chosen)
            except LocantError:
                raise
            except FAILURES as error:  # from a class outside this package
                raise InputError(
                    f"got {name}, which cannot be built: {describe_error(error)}", "correct its class"
                ) from error
    text = _text(ids, vocab_size, chosen)
    table = _Table(chosen, text, finished)
    waiting = [*table.missing(sweep(chosen)), *table.missing(trainings(chosen))]
    with Pool(len(waiting) if chosen.device == "cpu" else 1, ray if waiting else None) as pool:
        if on_plan is not None or (chosen.minutes is not None and chosen.num_steps is None):
            seconds = table.plan(waiting, pool)
            if on_plan is not None:
                on_plan(table.results(), seconds)
        report = _reporter(sum(map(table.steps, waiting)), on_progress)
        for phase in (sweep, trainings):  # the first phase finds the learning rates of the second
            for records in pool.outcomes(table.missing(phase(chosen)), table.settings, text, report):
                table.add(records)
                if on_record is not None:
                    on_record(table.results())
        results = table.results()
    failed = [record.failed for record in results.records if isinstance(record, Failure)]
    if failed and len(failed) == len(results.records):
        raise InputError(f"every training failed, the first with {failed[0]}", "use other encodings or other tasks")
    return results


def _try_once(candidate: Candidate, settings: Settings) -> None:
    """Build the encoding, and compute a gradient with it. If only the gradient fails, the training run reports it."""
    candidate.build(shape(settings, settings.lengths[-1]))
    with suppress(*FAILURES):
        model, ids = build(candidate, 0, 2, settings, longest=settings.lengths[-1]), torch.zeros(1, 2).long()
        model.losses(ids, ids, Positions.arange(2)).mean().backward()


def _cost(kind: Training, settings: Settings, text: Text | None) -> Cost:
    try:
        return cost(kind, settings, text)
    except FAILURES:  # the training run fails, too, and gives the reason
        return Cost(0.0, 0.0)


class _Table:
    """The training runs of a comparison, and their records so far."""

    def __init__(self, settings: Settings, text: Text | None, finished: Iterable[AnyRecord]) -> None:
        self.settings, self.text = settings, text
        self.facts = {} if text is None else text.facts()
        self.records: dict[Training, AnyRecord | Failure] = {}
        self.add(finished)

    def add(self, records: Iterable[AnyRecord | Failure]) -> None:
        for record in records:
            self.records[Training(record.task, record.encoding, record.seed, record.rate)] = record

    def steps(self, training: Training) -> int:
        """Return the largest number of steps that a training run may take."""
        text = self.text if training.task == TEXT else None
        return self.settings.steps_for(None if text is None else len(text.training))

    def plan(self, waiting: Sequence[Training], pool: Pool) -> float:
        """Return an upper estimate of the seconds for these training runs. With `minutes`, first choose the steps."""
        kind_of = {each: each._replace(seed=0, rate=1.0) for each in waiting}  # a step takes equally long with any seed
        kinds = list(dict.fromkeys(kind_of.values()))
        costs = dict(zip(kinds, pool.map(lambda kind: _cost(kind, self.settings, self.text), kinds), strict=True))
        if self.settings.minutes is not None and self.settings.num_steps is None and waiting:
            one_each = sum(costs[kind_of[each]].step for each in waiting) / pool.size
            steps = max(1, int(SHARE * 60 * self.settings.minutes / max(one_each, INSTANT)))
            self.settings = dataclasses.replace(self.settings, num_steps=steps)
        seconds = [self.steps(each) * costs[kind_of[each]].step + costs[kind_of[each]].measuring for each in waiting]
        return max([sum(seconds) / pool.size, *seconds])

    def results(self) -> Results:
        """Return all results so far, in the order of the settings."""
        keys = [key for each in (*sweep(self.settings), *trainings(self.settings)) for key in self._keys(each)]
        records = tuple(self.records[key] for key in keys if key in self.records)
        machine = environment(self.settings.device)
        return Results(settings=self.settings, environment=machine, text=self.facts, records=records)

    def missing(self, expected: Iterable[Training]) -> list[Training]:
        """Return the training runs that lack a record, each with its learning rate."""
        rated = [self._with_best_rate(each) for each in expected]
        return [each for each in rated if any(key not in self.records for key in self._keys(each))]

    def _keys(self, training: Training) -> list[Training]:
        """Return the keys of a training run's records, with one key for each candidate that uses the run."""
        rated = self._with_best_rate(training)
        return [rated._replace(encoding=candidate.name) for candidate in candidates(rated, self.settings)]

    def _with_best_rate(self, training: Training) -> Training:
        """Return a training run with the best rate tried for its encoding, or with the first rate if none was tried."""
        if training.seed == SWEEP_SEED:
            return training
        name = candidates(training, self.settings)[
            0
        ].name  # all candidates of a training run are equal at the trained length
        first = training._replace(task=self.settings.chosen_on(training.task), encoding=name, seed=SWEEP_SEED)
        tried = {rate: first._replace(rate=rate) for rate in self.settings.rates}
        return training._replace(rate=min(tried, key=lambda rate: _score(self.records.get(tried[rate]))))


def _score(record: AnyRecord | Failure | None) -> tuple[float, float]:
    """Return the score of a learning rate from the loss or accuracy at the trained length. A lower score is better."""
    if isinstance(record, Record):
        tables = record.loss_by_length, record.context_loss_by_stretch
        loss = next(losses[record.train_length] for losses in tables if record.train_length in losses)
        every = loss if isinstance(loss, list) else [loss]
        return math.fsum(math.inf if each is None else each for each in every), 0.0
    if isinstance(record, TaskRecord):
        return -record.accuracy_by_length[record.train_length], float(record.steps)
    return math.inf, 0.0


def _reporter(total: int, on_progress: Callable[[Progress], None] | None) -> Callable[[Training, float], None]:
    """Return a function that counts the steps of all training runs, one call at a time."""
    lock, done = threading.Lock(), 0

    def report(training: Training, loss: float) -> None:
        nonlocal done
        with lock:
            done += 1
            if on_progress is not None:
                on_progress(Progress(training=training, loss=loss, done=done, total=total))

    return report


def _text(ids: np.ndarray | None, vocab_size: int, settings: Settings) -> Text | None:
    if TEXT not in settings.tasks:
        return None
    if ids is None:
        raise InputError("got no text to train on", Remedy("pass ids=..., or {} alone", tasks=("copy",)))
    return Text(*split_held_out(ids, settings.lengths[-1]), vocab_size)


class Watcher:
    """An observer of a comparison. A subclass overrides the methods for the events that it shows."""

    def begin(self, corpus: Corpus | None, settings: Settings, folder: ResultsFolder, finished: int) -> None:
        """Handle the start, after all checks of the input and before the first training run.

        Args:
            finished: the number of records from an earlier call.
        """

    def plan(self, results: Results, seconds: float) -> None:
        """Handle the results so far and the most seconds for the rest, before the first training run."""

    def advance(self, progress: Progress) -> None:
        """Handle a training step."""

    def record(self, results: Mapping[str, Any]) -> None:
        """Handle the end of a training run. `results` are the contents of `results.json`."""

    def end(self, results: Mapping[str, Any], folder: ResultsFolder, *, complete: bool) -> None:
        """Handle the end, after the last training run or an interruption. Without a record, `results` are empty."""


def compare_files(
    files: Sequence[str], options: Mapping[str, Any], *, folder: Path, force: bool, watcher: Watcher,
    ray: str | None = None, **text: Any,
) -> dict[str, Any]:  # fmt: skip
    """Compare encodings. Return the contents of `results.json`, which is rewritten after every training run.

    Records of an earlier call with the same settings and text are reused. Records that this call does not ask for stay
    in the results.

    Args:
        options: the arguments of `Settings`.
        text: ``tokenizer``, ``vocab_size`` and ``download`` of `read_corpus`.
    """
    require_one_duration(options)
    settings_of_suite(options.get("suite", ""), options)  # also checks given defaults, which `Settings` cannot see
    settings = Settings(**options)
    if settings.suite and (files or any(text.values())):
        got = f"got a text or a tokenizer for the suite {settings.suite}, which fixes it"
        raise InputError(got, "use the suite alone, or no suite")
    corpus = read_corpus(files, default_vocab_size=VOCAB_SIZE, **text) if TEXT in settings.tasks else None
    if corpus is None and (files or any(text.values())):
        raise InputError("got a text, or a tokenizer, that no task reads", Remedy(tasks=(TEXT, *settings.tasks)))
    facts = {} if corpus is None else corpus.facts()
    settings, finished = _read_earlier(folder / RESULTS, settings, facts)
    so_far: dict[str, Any] = {}
    with ResultsFolder(folder, force=force) as place:

        def keep(results: Results) -> None:
            so_far.update(_with_others(dataclasses.replace(results, text={**facts, **results.text}), finished))
            place.write(so_far)
            watcher.record(so_far)

        complete = False
        try:
            watcher.begin(corpus, settings, place, len(finished))
            ids, vocab_size = (None, 0) if corpus is None else (corpus.ids, corpus.tokenizer.vocab_size)
            results = compare(
                ids, vocab_size, settings, ray=ray, finished=finished,
                on_plan=watcher.plan, on_progress=watcher.advance, on_record=keep,
            )  # fmt: skip
            if not so_far:  # all records are from an earlier call
                keep(results)
            complete = True
        finally:
            watcher.end(so_far, place, complete=complete)
    return so_far


def _read_earlier(path: Path, settings: Settings, facts: Mapping[str, Any]) -> tuple[Settings, list[AnyRecord]]:
    """Return the settings, and the records of an earlier call that this call can use.

    If minutes are set, the settings have the number of steps that the earlier call chose. This call may ask for other
    encodings, tasks or seeds, because training runs do not depend on one another.
    """
    free = {"encodings", "tasks", "seeds"} | ({"num_steps"} if settings.minutes is not None else set[str]())
    report = read_same_run(path, plain_settings(settings, facts), free)
    if report.get("schema") != SCHEMA:
        return settings, []
    if settings.minutes is not None:
        settings = dataclasses.replace(settings, num_steps=report["settings"]["num_steps"])
    files, now = report.get("files", {}), {name: Candidate.of(name).source for name in settings.encodings}
    try:
        records = [read_record(each) for each in report["records"] if "failed" not in each]
        _require_fit(settings, report["settings"]["text"], records)
    except (TypeError, ValueError) as error:
        raise damage_error(path, error) from None
    return settings, [each for each in records if files.get(each.encoding, "") == now.get(each.encoding, "")]


def _require_fit(settings: Settings, text: Mapping[str, Any], records: Sequence[AnyRecord]) -> None:
    """Raise `ValueError` if a record does not fit these settings, or if two records belong to one training run."""
    seen = set[Training]()
    for each in records:
        name = f"a record of {short_repr(each.encoding)}"
        if isinstance(each, Record):
            length, lengths = settings.train_length, {*each.loss_by_length} == {*settings.lengths}
            tokens = text.get("held_out_tokens", 0) - 1
            counts = ((len(losses), -(-tokens // length)) for length, losses in each.loss_by_window.items())
            if tokens > 0 and any(count != expected for count, expected in counts):
                raise ValueError(f"got {name} with another number of windows than its text has")
        else:
            length, lengths = settings.task_length, {*each.accuracy_by_length} <= {*settings.task_lengths}
        if each.train_length != length or not lengths:
            raise ValueError(f"got {name} with other lengths than its settings have")
        training = Training(each.task, each.encoding, each.seed, each.rate)
        if training in seen:
            raise ValueError(f"got {name} and seed {each.seed} twice")
        seen.add(training)


def _with_others(results: Results, finished: Sequence[AnyRecord]) -> dict[str, Any]:
    """Return the results as JSON values. They include earlier records that this call did not ask for."""
    keys = {(each.task, each.encoding, each.seed, each.rate) for each in results.records}
    others = [each for each in finished if (each.task, each.encoding, each.seed, each.rate) not in keys]
    whole = dataclasses.replace(results, records=(*results.records, *others)).to_dict()
    for name, field in (("encodings", "encoding"), ("tasks", "task"), ("seeds", "seed")):
        more = [each for each in dict.fromkeys(getattr(record, field) for record in others) if each != SWEEP_SEED]
        whole["settings"][name] = list(dict.fromkeys([*whole["settings"][name], *more]))
    return whole
