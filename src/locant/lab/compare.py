"""Which encoding extrapolates? Train each at a short length, then measure it at longer ones."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Int

from locant.errors import InputError, RangeError
from locant.lab.decoder import Decoder
from locant.lab.environment import environment
from locant.lab.train import evaluate, train
from locant.positions.base import ModelShape
from locant.positions.registry import find
from locant.text import Windows

__all__ = ["Progress", "Record", "Results", "Settings", "compare"]

HELD_OUT = 0.1
CALIBRATION_STEPS = 4

OPTIONS: dict[str, dict[str, float]] = {
    "learned": {"init_std": 1.0},  # as large as the decoder's scaled token rows, or they would hardly be heard
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides the outcome of `compare`, besides the text.

    `minutes` replaces `num_steps` by as many steps as fit, the same for every run.
    """

    encodings: tuple[str, ...] = ("nope", "learned", "sinusoidal", "rotary", "alibi", "t5")
    train_length: int = 64
    multiples: tuple[int, ...] = (1, 2, 4, 8)
    seeds: tuple[int, ...] = (0, 1)
    num_steps: int = 300
    minutes: float | None = None
    batch_size: int = 32
    learning_rate: float = 6e-3
    d_model: int = 64
    num_layers: int = 2
    num_heads: int = 4

    def __post_init__(self) -> None:
        for name in ("train_length", "num_steps", "batch_size", "d_model", "num_layers", "num_heads"):
            if getattr(self, name) < 1:
                raise RangeError(
                    f"got {name}={getattr(self, name)}, expected 1 or more", f"{name}={getattr(Settings, name)}"
                )
        for name in ("encodings", "multiples", "seeds"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise RangeError(
                    f"got {name} {values}, expected one or more, each once", f"{name} {getattr(Settings, name)}"
                )
        if min(self.multiples) < 1:
            raise RangeError(f"got multiples {self.multiples}, expected 1 or more", "multiples (1, 2, 4, 8)")
        if self.d_model % (2 * self.num_heads):
            raise RangeError(
                f"got d_model={self.d_model} for num_heads={self.num_heads}, expected heads of an even width",
                f"d_model={2 * self.num_heads * max(1, self.d_model // (2 * self.num_heads))}",
            )
        if not 0 < self.learning_rate < math.inf:
            raise RangeError(
                f"got learning_rate={self.learning_rate}, expected a positive number",
                f"learning_rate={Settings.learning_rate}",
            )
        if self.minutes is not None and not 0 < self.minutes < math.inf:
            raise RangeError(f"got minutes={self.minutes}, expected a positive number", "minutes=3")
        for encoding in self.encodings:
            find(encoding)

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(self.train_length * multiple for multiple in sorted(self.multiples))


@dataclass(frozen=True, kw_only=True)
class Record:
    """One trained model. Losses are nats per token on held-out text; ``None`` where one was not finite."""

    encoding: str
    seed: int
    train_length: int
    loss_by_length: dict[int, float | None]
    loss_by_position: list[float | None]
    """At each position of the longest windows."""
    train_loss: float | None
    num_parameters: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Results:
    """Settings, environment, and the records so far."""

    settings: Settings
    environment: dict[str, str | int] = field(default_factory=environment)
    records: tuple[Record, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, numbers and strings, ready for JSON: lengths become strings there."""
        records = [dataclasses.asdict(record) for record in self.records]
        for record in records:
            record["loss_by_length"] = {str(length): loss for length, loss in record["loss_by_length"].items()}
        settings = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in dataclasses.asdict(self.settings).items()
        }
        return {"settings": settings, "environment": self.environment, "records": records}


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far the whole comparison is, after one training step."""

    encoding: str
    seed: int
    step: int
    num_steps: int
    loss: float
    done: int
    total: int


def compare(
    ids: Int[np.ndarray, " tokens"],
    vocab_size: int,
    settings: Settings | None = None,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    on_record: Callable[[Results], None] | None = None,
) -> Results:
    """Train every encoding with every seed on the first nine tenths of `ids`; measure on the last tenth.

    All runs of a seed see the same windows in the same order, and start from the same weights but for the encoding's
    own. Learned positions get a table for the longest length, whose rows past the training length stay untrained.

    Args:
        ids: the text, as token ids.
        vocab_size: of its tokenizer.
        on_progress: called after every step.
        on_record: called with all results so far after every finished run.
    """
    settings = Settings() if settings is None else settings
    training, held_out = _split(ids, settings)
    if settings.minutes is not None:
        settings = dataclasses.replace(
            settings, num_steps=_steps_that_fit(settings.minutes, training, vocab_size, settings)
        )
    runs = [(seed, name) for seed in settings.seeds for name in settings.encodings]
    results = Results(settings=settings)
    for number, (seed, name) in enumerate(runs):

        def report(
            step: int, loss: float, name: str = name, seed: int = seed, before: int = number * settings.num_steps
        ) -> None:
            if on_progress is not None:
                total = len(runs) * settings.num_steps
                on_progress(
                    Progress(
                        encoding=name,
                        seed=seed,
                        step=step,
                        num_steps=settings.num_steps,
                        loss=loss,
                        done=before + step,
                        total=total,
                    )
                )

        record = _run(name, seed, training, held_out, vocab_size, settings, report)
        results = dataclasses.replace(results, records=(*results.records, record))
        if on_record is not None:
            on_record(results)
    return results


def _split(ids: np.ndarray, settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    cut = int(len(ids) * (1 - HELD_OUT))
    longest = settings.lengths[-1]
    if len(ids) - cut <= longest:
        raise InputError(
            f"got a text of {len(ids)} tokens, too short to hold out a window of {longest}",
            f"a text of at least {math.ceil((longest + 1) / HELD_OUT)} tokens, or a shorter train length",
        )
    return ids[:cut], ids[cut:]


def _run(
    name: str,
    seed: int,
    training: np.ndarray,
    held_out: np.ndarray,
    vocab_size: int,
    settings: Settings,
    report: Callable[[int, float], None],
) -> Record:
    began = time.perf_counter()
    model = _model(name, seed, vocab_size, settings)
    train_loss = train(
        model,
        Windows(training, settings.train_length, stride=1),
        num_steps=settings.num_steps,
        batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        seed=seed,
        on_step=report,
    )
    by_length: dict[int, float | None] = {}
    by_position: list[float] = []
    for length in settings.lengths:
        loss, by_position = evaluate(model, Windows(held_out, length), length)
        by_length[length] = _finite(loss)
    return Record(
        encoding=name,
        seed=seed,
        train_length=settings.train_length,
        loss_by_length=by_length,
        loss_by_position=[_finite(loss) for loss in by_position],
        train_loss=_finite(train_loss),
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        seconds=round(time.perf_counter() - began, 3),
    )


def _model(name: str, seed: int, vocab_size: int, settings: Settings) -> Decoder:
    """The encoding is built last, so that the weights all models share start the same."""
    shape = ModelShape(d_model=settings.d_model, num_heads=settings.num_heads, max_seq_len=settings.lengths[-1])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        bare = find("nope").for_model(shape)
        model = Decoder(
            vocab_size, bare, d_model=settings.d_model, num_layers=settings.num_layers, num_heads=settings.num_heads
        )
        model.embedding.encoding = find(name).for_model(shape, **OPTIONS.get(name, {}))
    return model


def _steps_that_fit(minutes: float, training: np.ndarray, vocab_size: int, settings: Settings) -> int:
    """As many steps as fill the minutes, judged by a few steps of every encoding."""
    seconds = 0.0
    windows = Windows(training, settings.train_length, stride=1)
    for name in settings.encodings:
        model = _model(name, settings.seeds[0], vocab_size, settings)
        steps = partial(
            train, model, windows, batch_size=settings.batch_size, learning_rate=settings.learning_rate, seed=0
        )
        steps(num_steps=2)
        began = time.perf_counter()
        steps(num_steps=CALIBRATION_STEPS)
        seconds += (time.perf_counter() - began) / CALIBRATION_STEPS
    return max(1, int(0.85 * minutes * 60 / (seconds * len(settings.seeds))))


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None
