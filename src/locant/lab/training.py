"""Train a decoder for a comparison, on a text or a task, and take all its measurements.

The numbers depend only on the arguments, so they are the same in every process.
"""

from __future__ import annotations

import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int
from torch import Tensor

from locant.lab.candidate import Candidate, parse_without_scaling
from locant.lab.decoder import Decoder
from locant.lab.results import AnyRecord, Losses, Record, TaskRecord, finite_or_none
from locant.lab.settings import SWEEP_SEED, TEXT, VOCAB_SIZE, Settings
from locant.lab.task_learning import CHOOSING, LEARNED, MEASURED, Accuracy, accuracy, learn, measured_rows
from locant.lab.tasks import task
from locant.lab.text_learning import OVERLAP, STRETCHES, OnStep, build, count, fit, in_context, losses_in_windows, shape
from locant.positions import Positions
from locant.text import Tokenizer

CALIBRATION_STEPS = 4

SHARE = 0.85
"""The share of the minutes that training may take. The rest is for measurements."""


class Training(NamedTuple):
    """The key of a training run in a comparison."""

    task: str
    encoding: str
    """The name of the candidate that is trained, without a scaling."""
    seed: int
    rate: float = 1.0
    """The factor of the learning rates."""


class Text(NamedTuple):
    """The token ids for training, and the held-out token ids."""

    training: Int[np.ndarray, " tokens"]
    held_out: Int[np.ndarray, " more"]
    vocab_size: int

    def facts(self) -> dict[str, Any]:
        """Return the facts about the text for the results."""
        training, held_out = len(self.training), len(self.held_out)
        unigram, bigram = count(self.training, self.held_out, self.vocab_size)
        return {"tokens": training + held_out, "train_tokens": training, "held_out_tokens": held_out,
                "unigram_loss": unigram, "bigram_loss": bigram}  # fmt: skip

    def for_choice(self) -> Text:
        """Split the training part alone. The new held-out part is as long as the old one."""
        return self._replace(
            training=self.training[: -len(self.held_out)], held_out=self.training[-len(self.held_out) :]
        )


class Cost(NamedTuple):
    """The seconds for one training step, and the seconds for all measurements of a model."""

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
    """Train a small decoder on a text, and return it with its tokenizer.

    Args:
        text: the whole training text, or its ids if the tokenizer is given.
        encoding: the name of an encoding. A learned encoding has a position for each token of a training window.
        tokenizer: the tokenizer. Default: byte-pair encoding with `vocab_size` entries, trained on the text.
        settings: arguments of `Settings` for one training run: ``num_steps``, ``train_length``, ``batch_size``,
            ``learning_rate``, ``d_model``, ``num_layers``, ``num_heads``, ``qk_norm``, ``minutes``.

    >>> import torch
    >>> model, tokenizer = train("to be, or not to be. " * 40, "alibi", vocab_size=300, num_steps=2, d_model=32)
    >>> model(torch.from_numpy(tokenizer.encode("to be")).long()[None]).shape[-1] == tokenizer.vocab_size
    True
    """
    candidate = parse_without_scaling(encoding)
    chosen = Settings(encodings=(encoding,), multiples=(1,), seeds=(seed,), **settings)
    tokenizer = Tokenizer.train([text], vocab_size) if tokenizer is None else tokenizer  # type: ignore[list-item]
    ids = np.asarray(tokenizer.encode(text) if isinstance(text, str) else text)
    training, read = Training(TEXT, candidate.name, seed), Text(ids, ids[:0], tokenizer.vocab_size)
    if chosen.minutes is not None:
        steps = int(SHARE * 60 * chosen.minutes / _step_seconds(_OnText(training, chosen, read)))
        chosen = dataclasses.replace(chosen, num_steps=max(1, steps))
    learner = _OnText(training, chosen, read)
    learner.train(on_step=on_step)
    learner.model.train_length = chosen.train_length
    return learner.model.eval(), tokenizer


def trainings(settings: Settings) -> list[Training]:
    """Return all training runs in the order of their records. Candidates that differ only in a scaling share a run."""
    return [training for seed in settings.seeds for training in _trainings_with(settings, seed)]


def _trainings_with(settings: Settings, seed: int) -> list[Training]:
    names = dict.fromkeys(Candidate.of(name).trained.name for name in settings.encodings)
    return [Training(task, name, seed) for task in settings.tasks for name in names]


def sweep(settings: Settings) -> list[Training]:
    """Return the training runs that choose the learning rates, or an empty list if there is only one rate."""
    rates = settings.rates if len(settings.rates) > 1 else ()
    chosen = [each for each in _trainings_with(settings, SWEEP_SEED) if settings.chosen_on(each.task) == each.task]
    return [each._replace(rate=rate) for each in chosen for rate in rates]


def candidates(training: Training, settings: Settings) -> list[Candidate]:
    """Return the candidates that use a training run."""
    named = map(Candidate.of, settings.encodings)
    return [candidate for candidate in named if candidate.trained.name == training.encoding]


def run(training: Training, settings: Settings, text: Text | None, on_step: OnStep | None = None) -> list[AnyRecord]:
    """Train a model, and return a record for every candidate that uses this training run."""
    began = time.perf_counter()
    learner = _learner(training, settings, text)
    facts = {**training._asdict(), **learner.train(on_step=on_step)}
    facts["num_parameters"] = sum(parameter.numel() for parameter in learner.model.parameters())
    taken, records = time.perf_counter() - began, list[AnyRecord]()
    for candidate in candidates(training, settings):
        began = time.perf_counter()
        record = learner.record(candidate, **{**facts, "encoding": candidate.name, "seconds": 0.0})
        seconds = round(taken + time.perf_counter() - began, 3)
        records.append(dataclasses.replace(record, seconds=seconds))
    return records


def cost(training: Training, settings: Settings, text: Text | None) -> Cost:
    """Estimate the cost of a training run by timing some steps and some or all of the measurements."""
    learner = _learner(training, settings, text)
    return Cost(_step_seconds(learner), learner.seconds(candidates(training, settings)))


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
    """A model that learns a text or a task, and its measurements."""

    def __init__(self, training: Training, settings: Settings, vocab_size: int, longest: int) -> None:
        self.training, self.settings, self.longest = training, settings, longest
        self.candidate = Candidate.of(training.encoding)
        self.model = build(
            self.candidate, training.seed, vocab_size, settings, longest=longest, task=training.task
        )  # fmt: skip

    @abstractmethod
    def train(self, num_steps: int | None = None, on_step: OnStep | None = None) -> dict[str, Any]:
        """Train the model for `num_steps`, or for the number in the settings. Return facts for the record."""

    @abstractmethod
    def record(self, candidate: Candidate, **facts: Any) -> AnyRecord:
        """Measure the model for a candidate, and return the record with these facts."""

    @abstractmethod
    def seconds(self, candidates: Sequence[Candidate]) -> float:
        """Estimate the seconds for all measurements of these candidates."""

    def _reading(self, candidate: Candidate, length: int, trained: int) -> AbstractContextManager[Decoder]:
        """Use the encoding of a candidate for rows of `length` tokens until the block ends."""
        encoding = candidate.at_length(
            self.model.encoding, length, trained, shape(self.settings, self.longest)
        )  # fmt: skip
        return self.model.use_encoding(encoding)


class _OnText(_Learner):
    def __init__(self, training: Training, settings: Settings, text: Text) -> None:
        super().__init__(training, settings, text.vocab_size, settings.lengths[-1])
        self.text = text

    def train(self, num_steps: int | None = None, on_step: OnStep | None = None) -> dict[str, Any]:
        steps = num_steps or self.settings.steps_for(len(self.text.training))
        loss = fit(
            self.model, self.candidate, self.text.training, self.settings,
            num_steps=steps, seed=self.training.seed, rate=self.training.rate, on_step=on_step,
        )  # fmt: skip
        return {"train_loss": finite_or_none(loss), "steps": steps}

    def record(self, candidate: Candidate, **facts: Any) -> AnyRecord:
        return Record(train_length=self.settings.train_length, **facts, **self._losses(candidate, self.text.held_out))

    def seconds(self, candidates: Sequence[Candidate]) -> float:
        """Estimate the seconds by timing two windows of the longest length, and one of them with full context."""
        windows, taken = self.text.held_out[: 2 * self.longest + 1], 0.0
        for _ in range(2):  # the first use of an operation takes longer
            began = time.perf_counter()
            for candidate in candidates:
                self._losses(candidate, windows)
            taken = time.perf_counter() - began
        windows_held_out = len(self.text.held_out) / self.longest
        return taken * (windows_held_out + OVERLAP * min(STRETCHES, windows_held_out)) / (2 + OVERLAP)

    def _losses(self, candidate: Candidate, ids: np.ndarray) -> dict[str, Any]:
        losses, trained = dict[int, Losses](), self.settings.train_length
        stretches = dict[int, list[float | None]]()

        def positions(ids: Tensor) -> Positions:
            return candidate.positions(ids, self.longest)

        for length in sorted({trained, *self.settings.lengths}):
            with self._reading(candidate, length, trained) as model:
                if length in self.settings.lengths:
                    losses[length] = losses_in_windows(model, ids, length, positions=positions)
                stretches[length] = [*map(finite_or_none, in_context(model, ids, length, self.longest, positions))]
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
            self.model, self.candidate, self.task, length=self.settings.task_length, longest=self.longest,
            num_steps=num_steps or self.settings.steps_for(), batch_size=self.settings.batch_for(self.training.task),
            rate=self.training.rate, seed=self.training.seed, on_step=on_step,
        )  # fmt: skip
        return {"train_loss": finite_or_none(learned.loss), "steps": learned.steps}

    def record(self, candidate: Candidate, **facts: Any) -> AnyRecord:
        trained, right = self.settings.task_length, self._accuracies(candidate)
        return TaskRecord(
            train_length=trained,
            learned=right[trained].rows >= LEARNED,
            accuracy_by_length={length: share.rows for length, share in right.items()},
            token_accuracy_by_length={length: share.tokens for length, share in right.items()},
            **facts,
        )

    def seconds(self, candidates: Sequence[Candidate]) -> float:
        began = time.perf_counter()
        for candidate in candidates:
            self._accuracies(candidate)
        return time.perf_counter() - began

    def _accuracies(self, candidate: Candidate) -> dict[int, Accuracy]:
        tokens = {length: measured_rows(self.task, length).ids.shape[1] for length in self.lengths}
        right, seed = {}, CHOOSING if self.training.seed == SWEEP_SEED else MEASURED
        for length, row_tokens in tokens.items():
            with self._reading(candidate, row_tokens, tokens[self.settings.task_length]) as model:
                right[length] = accuracy(model, candidate, self.task, length, longest=self.longest, seed=seed)
        return right
