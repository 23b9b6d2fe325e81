"""The settings of a comparison and their defaults. Loads no torch: the command line's help reads the defaults here."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from locant.arguments import entries, real, shown, whole
from locant.errors import RangeError

VOCAB_SIZE = 512
"""Of a tokenizer trained on the text: small, so that a small model learns from every step, and steps are fast."""

MAX_STEPS = 300
MAX_EPOCHS = 16
"""Beyond about 16 epochs, repeated text teaches nothing new: Muennighoff et al. 2023, arXiv 2305.16264."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides the outcome of `compare`, besides the text.

    Args:
        encodings: names of encodings; ``rotary+yarn`` is rotary, scaled by YaRN beyond the trained length.
        train_length: tokens per window in training.
        multiples: the lengths to measure at, in training lengths.
        seeds: one training of every encoding for each.
        num_steps: default: `MAX_STEPS`, or as many as make `MAX_EPOCHS` epochs where that is fewer.
        minutes: instead of `num_steps`, as many as fit in these, all trainings together.
        batch_size: windows per step.
        learning_rate: the highest, of AdamW.
        d_model: width of the decoder; heads have an even width.

    >>> Settings(train_length=128).lengths
    (128, 256, 512, 1024)
    """

    encodings: tuple[str, ...] = ("nope", "learned", "sinusoidal", "rotary", "alibi", "t5")
    train_length: int = 64
    multiples: tuple[int, ...] = (1, 2, 4, 8)
    seeds: tuple[int, ...] = (0, 1)
    num_steps: int | None = None
    minutes: float | None = None
    batch_size: int = 32
    learning_rate: float = 6e-3
    d_model: int = 64
    num_layers: int = 2
    num_heads: int = 4

    def __post_init__(self) -> None:
        from locant.lab.training import Contestant

        for field in fields(self):
            name, default = field.name, field.default
            value: Any = getattr(self, name)
            remedy = f"{name}={default or {'num_steps': MAX_STEPS, 'minutes': 3}.get(name)}"
            if name in ("learning_rate", "minutes"):
                value = None if value is None else real(name, value, above=0, remedy=remedy)
            elif name == "encodings":
                value = tuple(Contestant.of(each).name for each in entries(name, value, remedy))
            elif isinstance(default, tuple):
                lowest = 0 if name == "seeds" else 1
                value = tuple(whole(name, each, lowest, remedy=remedy) for each in entries(name, value, remedy))
            else:
                value = None if value is None else whole(name, value, 1, remedy=remedy)
            if isinstance(default, tuple) and (not value or len({*value}) < len(value)):
                raise RangeError(f"got {shown(value)} for {name}, expected one or more, each once", remedy)
            object.__setattr__(self, name, value)
        if self.d_model % (2 * self.num_heads):
            cause = f"got d_model={self.d_model} for num_heads={self.num_heads}, expected heads of an even width"
            raise RangeError(cause, f"d_model={2 * self.num_heads * max(1, self.d_model // (2 * self.num_heads))}")

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths to measure at, shortest first."""
        return tuple(self.train_length * multiple for multiple in sorted(self.multiples))

    def steps_for(self, num_tokens: int) -> int:
        """The training steps for a training text of this size.

        >>> Settings().steps_for(200_000), Settings().steps_for(5_000), Settings(num_steps=300).steps_for(5_000)
        (300, 39, 300)
        """
        if self.num_steps is not None:
            return self.num_steps
        return min(MAX_STEPS, max(1, MAX_EPOCHS * num_tokens // (self.batch_size * self.train_length)))
