"""The settings of a comparison and their defaults. This module does not import torch, because ``--help`` needs it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from locant.arguments import Real, entries, flag, one_of, real, short_repr, whole
from locant.errors import InputError, RangeError, Remedy

VOCAB_SIZE = 512
"""The vocabulary size of a tokenizer trained on the text. It is small, so that the steps of small models are fast."""

MAX_STEPS = 300
MAX_EPOCHS = 16
"""The largest number of epochs. More repetitions hardly help (Muennighoff et al. 2023, arXiv 2305.16264)."""

TEXT_BATCH, TEXT_LAYERS = 32, 2

TASK_STEPS, TASK_BATCH, TASK_LAYERS = 2000, 64, 3
"""The settings for tasks. A training run ends early if the task is learned. Two layers do not learn to copy."""

TASK_MULTIPLES = (0.5, 1, 1.25, 1.5, 2, 3, 4)
"""The lengths at which a model is measured on a task, as multiples of the trained length."""

ENOUGH_WINDOWS = 10
"""The smallest number of held-out windows of a length that allows a conclusion about it."""

SWEEP_SEED = 2**31 - 1
"""The seed of runs that choose learning rates. They read neither the held-out text nor the measured rows."""

TEXT = "text"
"""The name of the task in which a model learns the caller's text."""

SIZES: dict[str, dict[str, int]] = {
    "tiny": {},
    "small": {"d_model": 192, "num_layers": 4, "num_heads": 6},
    "medium": {"d_model": 512, "num_layers": 8, "num_heads": 8},
}
"""Decoders of 0.1 to 0.15, 1.8 and 25 million parameters, without their embeddings."""

SUITES: dict[str, dict[str, Any]] = {
    "v1": {
        "tasks": (TEXT, "copy", "mqar", "pass_key", "flip_flop"),
        "seeds": (0, 1, 2),
        "rates": (0.5, 1.0, 2.0),
    },
}
"""The settings of each suite that differ from the defaults.

The first task after the text is the hardest. The learning rates are chosen on it.
"""

ADDED: dict[str, Any] = {"qk_norm": False}
"""Settings that earlier results do not have, with the values that those runs had."""

CHECKS: dict[str, Callable[..., Any]] = {
    "int": partial(whole, low=1),
    "float": partial(real, above=0),
    "Real": partial(real, above=0),
    "bool": lambda name, value, remedy: flag(name, value),
}
"""The usual checks of settings, by the type in their annotation."""

REMEDIES = {"num_steps": MAX_STEPS, "minutes": 3, "batch_size": TEXT_BATCH, "num_layers": TEXT_LAYERS}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings that decide the outcome of `compare`, apart from the text.

    Args:
        encodings: names of encodings. ``rotary+yarn`` is scaled by YaRN beyond the trained length.
            ``rotary@randomized`` is trained and read at randomised positions.
        tasks: names in `locant.lab.tasks`, or ``text``.
        train_length: tokens per window in training.
        multiples: the lengths of text to measure at, as multiples of the trained length.
        task_length: items in the longest row of a task in training. Models are measured on rows of `TASK_MULTIPLES`
            times this length.
        seeds: every encoding is trained once with each seed.
        num_steps: the number of training steps. For a text, the default is `MAX_STEPS`, or the steps of `MAX_EPOCHS`
            epochs if these are fewer. For a task, it is up to `TASK_STEPS`, until the task is learned.
        minutes: choose `num_steps` so that all training runs together take this time.
        batch_size: windows of a text, or rows of a task, per step. Default: `TEXT_BATCH` and `TASK_BATCH`.
        learning_rate: the peak rate for a text. The rates for tasks are in `locant.lab.task_learning`.
        rates: factors of the learning rates. If there are several, the best factor is found for each encoding, on the
            text and on the first of the other tasks. These training runs use a seed that no measured run has.
        d_model: the width of the decoder. The width of each head must be even.
        num_layers: the number of layers. Default: `TEXT_LAYERS` and `TASK_LAYERS`.
        qk_norm: whether the decoder norms each head of queries and keys before the rotation, as Qwen3 does.
        device: such as ``cuda``, on which models compute in bfloat16. On devices other than a CPU, models train one
            after the other.
        suite: a name in `SUITES`. It fixes all settings except the encodings, the device and the size of the model,
            which is one of `SIZES`.

    >>> Settings(train_length=128).lengths
    (128, 256, 512, 1024)
    """

    encodings: tuple[str, ...] = ("nope", "learned", "sinusoidal", "rotary", "alibi", "t5")
    tasks: tuple[str, ...] = (TEXT,)
    train_length: int = 64
    multiples: tuple[int, ...] = (1, 2, 4, 8)
    task_length: int = 12
    seeds: tuple[int, ...] = (0, 1)
    num_steps: int | None = None
    minutes: Real | None = None
    batch_size: int | None = None
    learning_rate: Real = 6e-3
    rates: tuple[Real, ...] = (1.0,)
    d_model: int = 64
    num_layers: int | None = None
    num_heads: int = 4
    qk_norm: bool = False
    suite: str = ""
    device: str = "cpu"

    def __post_init__(self) -> None:
        from locant.lab.candidate import Candidate
        from locant.lab.tasks import TASKS, require_longer

        if self.suite:
            usual = {field.name: field.default for field in fields(self)}
            changed = {name: value for name, value in vars(self).items() if value != usual[name]}
            for name, value in settings_of_suite(self.suite, changed).items():
                object.__setattr__(self, name, value)
        check_settings(
            self,
            REMEDIES,
            encodings=lambda name, each, remedy: Candidate.of(each).name,
            tasks=lambda name, each, remedy: each if each == TEXT else TASKS.name_of(each),
            seeds=partial(whole, low=0, high=SWEEP_SEED - 1),
        )
        for name in {*self.tasks} - {TEXT}:
            require_longer(name, min(length for length in self.task_lengths if length > self.task_length))
        if self.d_model % (2 * self.num_heads):
            cause = f"got d_model={self.d_model} for num_heads={self.num_heads}, expected heads of an even width"
            raise RangeError(cause, Remedy(d_model=2 * self.num_heads * max(1, self.d_model // (2 * self.num_heads))))
        if self.suite and not size_of(vars(self)):
            cause = f"got a model of no size of the suite {self.suite}, expected {', '.join(SIZES)}"
            raise RangeError(cause, "use a size alone")

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths to measure at, shortest first."""
        return tuple(self.train_length * multiple for multiple in sorted(self.multiples))

    def chosen_on(self, task: str) -> str:
        """Return the task on which the learning rate of a task is chosen."""
        return task if task == TEXT else next(each for each in self.tasks if each != TEXT)

    @property
    def task_lengths(self) -> tuple[int, ...]:
        """The lengths of a task to measure at, shortest first.

        >>> Settings().task_lengths
        (6, 12, 15, 18, 24, 36, 48)
        """
        return tuple(dict.fromkeys(max(1, round(self.task_length * multiple)) for multiple in TASK_MULTIPLES))

    def steps_for(self, num_tokens: int | None = None) -> int:
        """Return the number of training steps for a text of `num_tokens` or, by default, the largest number for a task.

        >>> Settings().steps_for(200_000), Settings().steps_for(5_000), Settings().steps_for()
        (300, 39, 2000)
        >>> Settings(num_steps=9).steps_for(5_000)
        9
        """
        if self.num_steps is not None:
            return self.num_steps
        if num_tokens is None:
            return TASK_STEPS
        return min(MAX_STEPS, max(1, MAX_EPOCHS * num_tokens // (self.batch_for(TEXT) * self.train_length)))

    def batch_for(self, task: str) -> int:
        """Return the number of windows or rows per step."""
        return self.batch_size or (TEXT_BATCH if task == TEXT else TASK_BATCH)

    def layers_for(self, task: str) -> int:
        """Return the number of layers of the decoder that learns a task or a text."""
        return self.num_layers or (TEXT_LAYERS if task == TEXT else TASK_LAYERS)


def check_settings(
    settings: Any, remedies: Mapping[str, Any], *, drop_repeats: bool = False, **checks: Callable[..., Any]
) -> None:
    """Replace the settings of a frozen dataclass by the return values of their checks.

    A check is called with the name, the value and the remedy. For a tuple, it is called with each entry. Numbers
    without a check must be positive. ``None`` and an empty tuple are only allowed if they are the default. A repeated
    entry of a tuple is an error, unless `drop_repeats`.

    Args:
        remedies: a remedy, or the value that a remedy sets, for settings whose default would not help.
    """
    for field in fields(settings):
        name, default, value = field.name, field.default, getattr(settings, field.name)
        by_type = (CHECKS[kind] for kind in re.findall(r"\w+", str(field.type)) if kind in CHECKS)
        check = checks.get(name) or next(by_type, None)
        if check is None or (value is None and default is None):
            continue
        usual = remedies.get(name, default)
        remedy = usual if isinstance(usual, Remedy) else Remedy(**{name: usual})
        if not isinstance(default, tuple):
            object.__setattr__(settings, name, check(name, value, remedy=remedy))
            continue
        checked = [check(name, each, remedy=remedy) for each in entries(name, value, remedy)]
        different = tuple(dict.fromkeys(checked))
        if (default and not checked) or (len(different) < len(checked) and not drop_repeats):
            once = "" if drop_repeats else ", each once"
            raise RangeError(f"got {short_repr(tuple(checked))} for {name}, expected one or more{once}", remedy)
        object.__setattr__(settings, name, different)


def settings_of_suite(suite: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a suite fixes, if any. Raise `RangeError` if `given` contradicts them."""
    if not suite:
        return {}
    fixed_by_suite = SUITES[one_of("suite", suite, (*SUITES,), Remedy(suite=next(iter(SUITES))))]
    free = {"encodings", "suite", "device", *SIZES["medium"]}
    fixed = {
        field.name: fixed_by_suite.get(field.name, field.default)
        for field in fields(Settings)
        if field.name not in free
    }
    for name, value in given.items():
        if name in fixed and value != fixed[name]:
            cause = f"got {short_repr(value)} for what the suite {suite} fixes"
            raise RangeError(cause, Remedy("use {}, or no suite", **{name: fixed[name]}))
    return fixed


def require_one_duration(given: Mapping[str, Any]) -> None:
    """Raise `InputError` if both steps and minutes are given."""
    if None not in (given.get("num_steps"), given.get("minutes")):
        raise InputError("got both steps and minutes", Remedy("use {} or {} alone", num_steps=..., minutes=...))


def size_of(settings: Mapping[str, Any]) -> str:
    """Return the name of a model's size in `SIZES`, or an empty string for any other size.

    >>> size_of(vars(Settings(d_model=192, num_layers=4, num_heads=6))), size_of(vars(Settings(num_layers=1)))
    ('small', '')
    """
    usual = {field.name: field.default for field in fields(Settings) if field.name in SIZES["medium"]}
    mine = {name: settings[name] for name in usual}
    return next((name for name, numbers in SIZES.items() if {**usual, **numbers} == mine), "")
