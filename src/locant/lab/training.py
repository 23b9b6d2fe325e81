"""One training of a comparison: a decoder with an encoding, on a text or a task, and all that is measured with it.

It depends on nothing but its arguments, so any process, here or on another machine, has the same numbers.
"""

from __future__ import annotations

import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int
from torch import Tensor

from locant.lab.contestant import Contestant, unscaled
from locant.lab.decoder import Decoder
from locant.lab.results import AnyRecord, Losses, Record, TaskRecord, finite
from locant.lab.settings import SWEEP_SEED, TEXT, VOCAB_SIZE, Settings
from locant.lab.task_learning import CHOOSING, LEARNED, MEASURED, Accuracy, accuracy, learn, measured_rows
from locant.lab.tasks import task
from locant.lab.text_learning import OVERLAP, STRETCHES, OnStep, build, count, fit, in_context, losses_in_windows, shape
from locant.positions import Positions
from locant.text import Tokenizer

CALIBRATION_STEPS = 4

SHARE = 0.85
"""Of the minutes, what training is planned for: the rest is for measuring."""


class Training(NamedTuple):
    """Which training of a comparison."""

    task: str
    encoding: str
    """The name of a contestant, as it is trained: without a scaling."""
    seed: int
    rate: float = 1.0
    """The factor of the learning rates."""


class Text(NamedTuple):
    """Token ids: what is trained on, and what is held out."""

    training: Int[np.ndarray, " tokens"]
    held_out: Int[np.ndarray, " more"]
    vocab_size: int

    def facts(self) -> dict[str, Any]:
        """What is told of it in the results."""
        trained, held_out = len(self.training), len(self.held_out)
        unigram, bigram = count(self.training, self.held_out, self.vocab_size)
        return {"tokens": trained + held_out, "train_tokens": trained, "held_out_tokens": held_out,
                "unigram_loss": unigram, "bigram_loss": bigram}  # fmt: skip

    def for_choice(self) -> Text:
        """Without what is held out: the end of the training part takes its place, as long."""
        return self._replace(
            training=self.training[: -len(self.held_out)], held_out=self.training[-len(self.held_out) :]
        )


class Cost(NamedTuple):
    """Seconds of one training step, and of all that is measured with a model."""

    step: float
    measuring: float


def train(
    text: str | Int[np.ndarray, " tokens"],
    encoding: str = "rotary",
    *,
    tokenizer: Tokenizer | None = None,
    vocab_size: int = VOCAB_SIZE,
    seed: int = 0,
    on_step: OnStep | None = None,
    **settings: Any,
) -> tuple[Decoder, Tokenizer]:
    """A small decoder trained on a text, and its tokenizer.

    Args:
        text: all of it is trained on; or its ids, beside their tokenizer.
        encoding: the name of an encoding; a learned one has a position for each token of a training window.
        tokenizer: default: byte-pair encoding with `vocab_size` entries, trained on the text.
        settings: those of `Settings` for one training: ``num_steps``, ``train_length``, ``batch_size``,
            ``learning_rate``, ``d_model``, ``num_layers``, ``num_heads``, ``minutes``.

    >>> import torch
    >>> model, tokenizer = train("to be, or not to be. " * 40, "alibi", vocab_size=300, num_steps=2, d_model=32)
    >>> model(torch.from_numpy(tokenizer.encode("to be")).long()[None]).shape[-1] == tokenizer.vocab_size
    True
    """
    contestant = unscaled(encoding)
    chosen = Settings(encodings=(encoding,), multiples=(1,), seeds=(seed,), **settings)
    tokenizer = Tokenizer.train([text], vocab_size) if tokenizer is None else tokenizer  # type: ignore[list-item]
    ids = np.asarray(tokenizer.encode(text) if isinstance(text, str) else text)
    training, read = Training(TEXT, contestant.name, seed), Text(ids, ids[:0], tokenizer.vocab_size)
    if chosen.minutes is not None:
        steps = int(SHARE * 60 * chosen.minutes / _step_seconds(_OnText(training, chosen, read)))
        chosen = dataclasses.replace(chosen, num_steps=max(1, steps))
    learner = _OnText(training, chosen, read)
    learner.train(on_step=on_step)
    return learner.model.eval(), tokenizer


def trainings(settings: Settings) -> list[Training]:
    """All of a comparison, in the order of its records: contestants that differ in a scaling alone share one."""
    return [training for seed in settings.seeds for training in _of_a_seed(settings, seed)]


def _of_a_seed(settings: Settings, seed: int) -> list[Training]:
    names = dict.fromkeys(Contestant.of(name).trained.name for name in settings.encodings)
    return [Training(task, name, seed) for task in settings.tasks for name in names]


def sweep(settings: Settings) -> list[Training]:
    """The trainings that the learning rates are chosen by; none where there is one rate."""
    rates = settings.rates if len(settings.rates) > 1 else ()
    of_a_seed = [each for each in _of_a_seed(settings, SWEEP_SEED) if settings.chosen_on(each.task) == each.task]
    return [each._replace(rate=rate) for each in of_a_seed for rate in rates]


def contestants(training: Training, settings: Settings) -> list[Contestant]:
    """Those that a training serves."""
    named = map(Contestant.of, settings.encodings)
    return [contestant for contestant in named if contestant.trained.name == training.encoding]


def run(training: Training, settings: Settings, text: Text | None, on_step: OnStep | None = None) -> list[AnyRecord]:
    """Train, and measure for every contestant that this training is for."""
    began = time.perf_counter()
    learner = _learner(training, settings, text)
    facts = {**training._asdict(), **learner.train(on_step=on_step)}
    facts["num_parameters"] = sum(parameter.numel() for parameter in learner.model.parameters())
    taken, records = time.perf_counter() - began, list[AnyRecord]()
    for contestant in contestants(training, settings):
        began = time.perf_counter()
        record = learner.record(contestant, **{**facts, "encoding": contestant.name, "seconds": 0.0})
        seconds = round(taken + time.perf_counter() - began, 3)
        records.append(dataclasses.replace(record, seconds=seconds))
    return records


def cost(training: Training, settings: Settings, text: Text | None) -> Cost:
    """About what a training will take: some steps are timed, and what is measured, or a part of it."""
    learner = _learner(training, settings, text)
    return Cost(_step_seconds(learner), learner.seconds(contestants(training, settings)))


def _step_seconds(learner: _Learner) -> float:
    learner.train(2)  # the first use of an operation takes longer
    began = time.perf_counter()
    learner.train(CALIBRATION_STEPS)
    return (time.perf_counter() - began) / CALIBRATION_STEPS


def _learner(training: Training, settings: Settings, text: Text | None) -> _Learner:
    if text is None or training.task != TEXT:
        return _OnTask(training, settings)
    return _OnText(training, settings, text.for_choice() if training.seed == SWEEP_SEED else text)


class _Learner(ABC):
    """A model, what it learns, and what is measured with it."""

    def __init__(self, training: Training, settings: Settings, vocab_size: int, longest: int) -> None:
        self.training, self.settings, self.longest = training, settings, longest
        self.contestant = Contestant.of(training.encoding)
        self.model = build(
            self.contestant, training.seed, vocab_size, settings, longest=longest, task=training.task
        )  # fmt: skip

    @abstractmethod
    def train(self, num_steps: int | None = None, on_step: OnStep | None = None) -> dict[str, Any]:
        """Train it, as long as the settings say or for so many steps; returns what a record tells of that."""

    @abstractmethod
    def record(self, contestant: Contestant, **facts: Any) -> AnyRecord:
        """What is measured for a contestant, with these facts."""

    @abstractmethod
    def seconds(self, contestants: Sequence[Contestant]) -> float:
        """About how long it takes to measure for all of these."""

    @contextmanager
    def _reading(self, contestant: Contestant, length: int, trained: int) -> Generator[Decoder]:
        """The model with its encoding as a contestant uses it in rows of `length` tokens."""
        plain = self.model.encoding
        self.model.embedding.encoding = contestant.at_length(plain, length, trained, shape(self.settings, self.longest))
        try:
            yield self.model
        finally:
            self.model.embedding.encoding = plain


class _OnText(_Learner):
    def __init__(self, training: Training, settings: Settings, text: Text) -> None:
        super().__init__(training, settings, text.vocab_size, settings.lengths[-1])
        self.text = text

    def train(self, num_steps: int | None = None, on_step: OnStep | None = None) -> dict[str, Any]:
        steps = num_steps or self.settings.steps_for(len(self.text.training))
        loss = fit(
            self.model, self.contestant, self.text.training, self.settings,
            num_steps=steps, seed=self.training.seed, rate=self.training.rate, on_step=on_step,
        )  # fmt: skip
        return {"train_loss": finite(loss), "steps": steps}

    def record(self, contestant: Contestant, **facts: Any) -> AnyRecord:
        return Record(train_length=self.settings.train_length, **facts, **self._losses(contestant, self.text.held_out))

    def seconds(self, contestants: Sequence[Contestant]) -> float:
        """By what two windows of the longest length take, with one of them in its full context."""
        windows, taken = self.text.held_out[: 2 * self.longest + 1], 0.0
        for _ in range(2):  # the first use of an operation takes longer
            began = time.perf_counter()
            for contestant in contestants:
                self._losses(contestant, windows)
            taken = time.perf_counter() - began
        there = len(self.text.held_out) / self.longest
        return taken * (there + OVERLAP * min(STRETCHES, there)) / (2 + OVERLAP)

    def _losses(self, contestant: Contestant, ids: np.ndarray) -> dict[str, Any]:
        losses, trained = dict[int, Losses](), self.settings.train_length
        stretches = dict[int, list[float | None]]()

        def positions(ids: Tensor) -> Positions:
            return contestant.positions(ids, self.longest)

        for length in sorted({trained, *self.settings.lengths}):
            with self._reading(contestant, length, trained) as model:
                if length in self.settings.lengths:
                    losses[length] = losses_in_windows(model, ids, length, positions=positions)
                stretches[length] = [*map(finite, in_context(model, ids, length, self.longest, positions))]
        return {**Record.losses(losses), "context_loss_by_stretch": stretches}


class _OnTask(_Learner):
    def __init__(self, training: Training, settings: Settings) -> None:
        self.task = task(training.task)
        most = self.task.longest or settings.task_lengths[-1]
        self.lengths = [length for length in settings.task_lengths if length <= most]
        longest = measured_rows(self.task, self.lengths[-1]).ids.shape[1]
        super().__init__(training, settings, self.task.vocab_size, longest)

    def train(self, num_steps: int | None = None, on_step: OnStep | None = None) -> dict[str, Any]:
        learned = learn(
            self.model, self.contestant, self.task, length=self.settings.task_length, longest=self.longest,
            num_steps=num_steps or self.settings.steps_for(), batch_size=self.settings.batch_for(self.training.task),
            rate=self.training.rate, seed=self.training.seed, on_step=on_step,
        )  # fmt: skip
        return {"train_loss": finite(learned.loss), "steps": learned.steps}

    def record(self, contestant: Contestant, **facts: Any) -> AnyRecord:
        trained, right = self.settings.task_length, self._accuracies(contestant)
        return TaskRecord(
            train_length=trained,
            learned=right[trained].rows >= LEARNED,
            accuracy_by_length={length: share.rows for length, share in right.items()},
            token_accuracy_by_length={length: share.tokens for length, share in right.items()},
            **facts,
        )

    def seconds(self, contestants: Sequence[Contestant]) -> float:
        began = time.perf_counter()
        for contestant in contestants:
            self._accuracies(contestant)
        return time.perf_counter() - began

    def _accuracies(self, contestant: Contestant) -> dict[int, Accuracy]:
        tokens = {length: measured_rows(self.task, length).ids.shape[1] for length in self.lengths}
        right, seed = {}, CHOOSING if self.training.seed == SWEEP_SEED else MEASURED
        for length, its in tokens.items():
            with self._reading(contestant, its, tokens[self.settings.task_length]) as model:
                right[length] = accuracy(model, contestant, self.task, length, longest=self.longest, seed=seed)
        return right
