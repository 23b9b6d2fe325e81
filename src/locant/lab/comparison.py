"""Which encoding extrapolates? Train each at a short length, then measure it at longer ones."""

from __future__ import annotations

import dataclasses
import heapq
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int

from locant.errors import InputError
from locant.lab.decoder import Decoder
from locant.lab.results import Record, Results, ResultsFolder, finite
from locant.lab.settings import VOCAB_SIZE, Settings
from locant.lab.training import (
    Contestant,
    build,
    fit,
    losses_in_windows,
    num_steps,
    shape,
    split_off,
    timed,
    unigram_loss,
)
from locant.text.corpus import Corpus, read_corpus


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far the whole comparison is, after one training step."""

    encoding: str
    seed: int
    loss: float
    done: int
    total: int


def compare(
    ids: Int[np.ndarray, " tokens"],
    vocab_size: int,
    settings: Settings | None = None,
    *,
    on_plan: Callable[[Results, float], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    on_record: Callable[[Results], None] | None = None,
) -> Results:
    """Train every encoding with every seed on the first nine tenths of `ids`; measure on the last tenth.

    As many models train at once as torch has threads, each in one: operations of small models gain little by more, and
    the numbers are the same however many there are.

    All trainings of a seed see the same windows in the same order, and start from the same weights but for those of
    the encoding. Learned positions get a table for the longest length, whose rows past the training length stay
    untrained. An encoding that takes part with several scalings is trained once: see `Contestant`.

    Args:
        ids: the text, as token ids.
        vocab_size: of its tokenizer.
        on_plan: called before the first training, with the results that have no record yet, and about how many seconds
            it all will take; for this, some steps of each encoding are timed, and the longest of the windows.
        on_progress: called after every step, in the thread of the training, one call at a time.
        on_record: called with all results so far after every measured model, in the thread of the caller.

    Raises:
        InputError: a text too short to hold out a window of the longest length.

    >>> settings = Settings(encodings=("rotary", "rotary+ntk"), seeds=(0,), num_steps=2, train_length=8, d_model=16)
    >>> results = compare(np.arange(900) % 7, 7, settings)
    >>> [(record.encoding, len(record.loss_by_window[64])) for record in results.records]
    [('rotary', 2), ('rotary+ntk', 2)]
    """
    chosen = Settings() if settings is None else settings
    training, held_out = split_off(ids, chosen.lengths[-1])
    contestants = [Contestant.of(name) for name in chosen.encodings]
    with torch.random.fork_rng(devices=()):  # what cannot be built is refused before the first is trained
        for contestant in contestants:
            contestant.build(shape(chosen))
    encodings = list(dict.fromkeys(contestant.encoding for contestant in contestants))
    one_at_a_time, interrupted, done = threading.Lock(), threading.Event(), 0

    def measured(encoding: str, seed: int) -> dict[Contestant, Record]:
        def report(step: int, loss: float) -> None:
            nonlocal done
            if interrupted.is_set():
                raise CancelledError
            with one_at_a_time:
                done += 1
                if on_progress is not None:
                    on_progress(Progress(encoding=encoding, seed=seed, loss=loss, done=done, total=total))

        began = time.perf_counter()
        model = build(Contestant(encoding), seed, vocab_size, chosen)
        loss = fit(model, training, chosen, seed=seed, on_step=report)
        facts: dict[str, Any] = {"seed": seed, "train_loss": finite(loss), "seconds": time.perf_counter() - began}
        of_it = [each for each in contestants if each.encoding == encoding]
        return {contestant: _measured(model, contestant, held_out, chosen, **facts) for contestant in of_it}

    text = {
        "tokens": len(ids), "train_tokens": len(training), "held_out_tokens": len(held_out),
        "unigram_loss": unigram_loss(training, held_out, vocab_size),
    }  # fmt: skip
    with _one_thread_each(len(encodings) * len(chosen.seeds)) as at_once, ThreadPoolExecutor(at_once) as pool:
        chosen = dataclasses.replace(chosen, num_steps=num_steps(training, vocab_size, chosen, at_once))
        total = chosen.steps_for(len(training)) * len(chosen.seeds) * len(encodings)
        results = Results(settings=chosen, text=text)
        if on_plan is not None:
            seconds = list(pool.map(lambda each: _seconds(each, training, held_out, vocab_size, chosen), encodings))
            on_plan(results, _in_turn(seconds * len(chosen.seeds), at_once))
        try:
            models = {(seed, each): pool.submit(measured, each, seed) for seed in chosen.seeds for each in encodings}
            for seed in chosen.seeds:
                for contestant in contestants:
                    record = models[seed, contestant.encoding].result()[contestant]
                    results = dataclasses.replace(results, records=(*results.records, record))
                    if on_record is not None:
                        on_record(results)
        finally:
            interrupted.set()
            pool.shutdown(cancel_futures=True)
    return results


def _measured(
    model: Decoder, contestant: Contestant, held_out: np.ndarray, settings: Settings, *,
    seed: int = 0, train_loss: float | None = None, seconds: float = 0.0,
) -> Record:  # fmt: skip
    """The losses of a trained model; `seconds` is how long the training took."""
    began, plain, losses = time.perf_counter(), model.embedding.encoding, {}
    for length in settings.lengths:
        model.embedding.encoding = contestant.at_length(plain, length, settings.train_length, shape(settings))
        losses[length] = losses_in_windows(model, held_out, length)
    model.embedding.encoding = plain
    return Record.of(
        losses,
        encoding=contestant.name,
        seed=seed,
        train_length=settings.train_length,
        train_loss=train_loss,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        seconds=round(seconds + time.perf_counter() - began, 3),
    )


def _seconds(encoding: str, training: np.ndarray, held_out: np.ndarray, vocab_size: int, settings: Settings) -> float:
    """About how long one training and all that is measured with it will take: some steps and one window are timed."""
    model, step = timed(encoding, training, vocab_size, settings)
    contestants = [each for each in map(Contestant.of, settings.encodings) if each.encoding == encoding]
    longest, window = settings.lengths[-1], 0.0
    for _ in range(2):  # the first use of an operation takes longer
        began = time.perf_counter()
        for contestant in contestants:
            _measured(model, contestant, held_out[: longest + 1], settings)
        window = time.perf_counter() - began
    return step * settings.steps_for(len(training)) + window * (len(held_out) - 1) / longest


def _in_turn(seconds: Sequence[float], at_once: int) -> float:
    """When the last of these ends, where each begins as soon as there is room for it.

    >>> _in_turn([3.0, 1.0, 1.0, 1.0], 2), _in_turn([1.0, 1.0, 1.0, 3.0], 2)
    (3.0, 4.0)
    """
    ends = [0.0] * at_once
    for each in seconds:
        heapq.heapreplace(ends, ends[0] + each)
    return max(ends)


@contextmanager
def _one_thread_each(trainings: int) -> Generator[int]:
    """How many of these trainings go on at once."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield min(threads, trainings)
    finally:
        torch.set_num_threads(threads)


class Watcher:
    """Called while a comparison runs; a subclass overrides the methods for what it shows."""

    def begin(self, corpus: Corpus, settings: Settings, folder: ResultsFolder) -> None:
        """Before the first training; what can be wrong with the input has been checked."""

    def plan(self, results: Results, seconds: float) -> None:
        """Before the first training, with the results so far, which have no record, and how long it will about take."""

    def advance(self, progress: Progress) -> None:
        """After every training step."""

    def record(self, results: Mapping[str, Any]) -> None:
        """After every measured model; `results.json` holds the same."""

    def end(self, results: Mapping[str, Any], folder: ResultsFolder, *, complete: bool) -> None:
        """After the last model, or when interrupted; `results` are empty where no model was finished."""


def compare_files(
    files: Sequence[str], options: Mapping[str, Any], *, folder: Path, force: bool, watcher: Watcher, **text: Any
) -> dict[str, Any]:
    """Compare encodings on texts; returns what is in `results.json`, which is written anew after every model.

    `options` are those of `Settings`; `text` are ``tokenizer``, ``vocab_size`` and ``download`` of `read_corpus`.
    """
    if "minutes" in options and "num_steps" in options:
        raise InputError("got both steps and minutes", "--steps or --minutes alone")
    settings = Settings(**options)
    corpus = read_corpus(files, usual_vocab_size=VOCAB_SIZE, **text)
    so_far: dict[str, Any] = {}
    with ResultsFolder(folder, force=force) as place:

        def keep(results: Results) -> None:
            so_far.update(dataclasses.replace(results, text={**corpus.facts(), **results.text}).to_dict())
            place.write(so_far)
            watcher.record(so_far)

        complete = False
        try:
            watcher.begin(corpus, settings, place)
            compare(
                corpus.ids, corpus.tokenizer.vocab_size, settings,
                on_plan=watcher.plan, on_progress=watcher.advance, on_record=keep,
            )  # fmt: skip
            complete = True
        finally:
            watcher.end(so_far, place, complete=complete)
    return so_far
