"""Check whether weights were trained with the positions that their configuration states.

Weights do not show how their positions were rotated, and a model with the wrong positions still writes words. So the
model reads one text under each plausible hypothesis about its positions, and the losses are compared window by window.
At first, a hypothesis differs from the configuration in one thing. If a hypothesis clearly fits better, the search
continues from it, because a configuration may be wrong in two things. Nothing is trained and nothing is written.

A hypothesis is dropped if it is clearly worse than the best so far, but not before two windows, or one of 512 tokens,
are measured. It is clearly worse if the mean of the paired differences, over parts of 32 tokens, exceeds the half-width
of a 95 % interval by Student's t. The interval holds for all looks at all hypotheses of one round at once (Bonferroni).
The configuration and the hypotheses near the best are always measured in full, and the verdict compares whole windows.

The audit costs one forward pass over the text for the configuration, and one for each hypothesis with a similar loss.
Most of the other 15 hypotheses cost an eighth of a pass or less. Each error in the configuration adds the same cost
again. With the defaults, SmolLM2-135M takes 160 seconds on one core.

If the layers of a model differ, a base is tried for each type of layers, and other layers get full attention or a
sliding window. Hypotheses with equal positions within a window of the text are measured only once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from locant.arguments import one_of, whole
from locant.errors import InputError, LocantError, Remedy
from locant.lab.audit_subject import OWN, USUAL, Hypothesis, LabSubject, Subject, TransformersSubject
from locant.lab.generation import is_lab_folder
from locant.lab.language_model import DTYPES, device_of, load_config, num_windows, stated_length, without_weights
from locant.lab.readable_model import read_language_model
from locant.lab.settings import ENOUGH_WINDOWS, VOCAB_SIZE
from locant.lab.significance import MIN_DIFFERENCE, margin_of_mean
from locant.lab.summary import Cell, Row
from locant.lab.text_learning import count, losses_in_windows
from locant.positions.base import PositionEncoding
from locant.spelling import dtype_name
from locant.swapping.added_point import learned_tables
from locant.text.corpus import read_corpus

TABLE = "a table of learned positions, which is part of the weights"
NOTHING_ELSE = "no positions that could be computed in another way"
MIN_WINDOWS = 2
"""The number of windows after which a hypothesis may be dropped. One is enough if it has `USUAL` tokens."""
PART_TOKENS = 32
"""The number of tokens in each part of a window. Hypotheses are dropped by comparing these parts."""


def audit(
    folder: str,
    files: Sequence[str] = (),
    *,
    length: int | None = None,
    windows: int = 16,
    device: str = "auto",
    dtype: str | Any = "auto",
    on_step: Callable[[int, int, str], object] = lambda done, total, report: None,
) -> dict[str, Any]:
    """Find the hypothesis about a model's positions under which it predicts a text best. Return JSON values.

    The verdict is one of these:

    - ``"fits"``: no other hypothesis is better than the configuration or within noise of it;
    - ``"another fits"``: another hypothesis is clearly better than the configuration;
    - ``"cannot tell"``: other hypotheses are within noise of the configuration, and none is better;
    - ``"not explained"``: the best hypothesis predicts the text no better than counting words. The weights have a
      convention that is not among the hypotheses, or they are broken, or the text is of another kind;
    - ``"nothing to find"``: the model has no positions that could be computed in another way.

    `losses` are nats per token by hypothesis, the lowest first. `dropped` contains the number of measured windows of
    each hypothesis that was dropped. The loss of such a hypothesis is an estimate: the loss of the best hypothesis so
    far, plus the mean difference in these windows. `left_out` contains the reason for each hypothesis that could not be
    measured. `unigram` is the loss of counting words, which predicts each token by its frequency.

    Args:
        folder: a local folder with safetensors and a tokenizer.json, or a GGUF file.
        files: a text of the kind that the model was trained on. Default: the documentation inside Python.
        length: tokens per window. Default: 512, or the length that the model states if it is smaller.
        windows: the largest number of windows, at least 10. Fewer do not allow a conclusion.
        dtype: the dtype to load the model in, ``float32``, ``bfloat16`` or ``float16``. ``auto`` is the saved dtype.
        on_step: called with the number of finished windows, an estimate of their total, and the name of the hypothesis.

    Raises:
        InputError: a folder without a causal language model, or a text that is too short.
    """
    windows = whole("windows", windows, ENOUGH_WINDOWS, remedy=Remedy(windows=16))
    dtype = one_of("dtype", dtype_name(dtype), DTYPES)
    place = device_of(device)
    if is_lab_folder(folder):
        model = read_language_model(folder, device=place, dtype=dtype)
        subject = LabSubject(model.module)
        if not subject.aspects:
            return _report_nothing_to_find(f"{Path(folder).name} has {_lab_positions(subject.model.encoding)}")
        usual = model.trained or USUAL
    else:
        plain = without_weights(load_config(folder).to_dict())
        if not TransformersSubject(plain).aspects:
            positions = TABLE if learned_tables(plain) else NOTHING_ELSE
            return _report_nothing_to_find(f"{type(plain).__name__} has {positions}")
        model = read_language_model(folder, device=place, dtype=dtype)
        subject = TransformersSubject(model.module)
        usual = USUAL if subject.biased else stated_length(subject.config)
    length = min(USUAL, usual) if length is None else length
    if isinstance(subject, TransformersSubject):
        subject.length = length
    corpus = read_corpus(files, tokenizer=folder, default_vocab_size=VOCAB_SIZE)
    most = num_windows(
        model.vocab_size, corpus, whole("length", length, 2, remedy=Remedy(length=512)), windows, argument="length"
    )
    if most < ENOUGH_WINDOWS:
        remedy = Remedy("use a longer text or a smaller {}", length=...)
        raise InputError(f"got {most} windows of {length:,} tokens, expected {ENOUGH_WINDOWS} or more", remedy)
    decoder, ids = model.decoder(corpus.tokenizer), corpus.ids

    def losses_of(hypothesis: Hypothesis) -> Generator[list[float]]:
        with subject.apply(hypothesis):
            for first in range(0, most * length, length):
                yield losses_in_windows(decoder, ids[first : first + length + 1], length).by_position

    unigram = count(ids, ids[: most * length + 1], model.vocab_size).unigram
    search = _Search(subject, losses_of, most, unigram, on_step)
    return {**search.run(), "unigram": unigram, "windows": most, "length": length}


def _report_nothing_to_find(why: str) -> dict[str, Any]:
    return {"verdict": "nothing to find", "sentence": f"nothing to find: {why}"}


def _lab_positions(encoding: PositionEncoding) -> str:
    if not encoding.methods():
        return NOTHING_ELSE
    return (
        TABLE
        if "embed" in encoding.methods() and encoding.state_dict()
        else f"{encoding!r}, for which locant tries no other hypotheses"
    )


@dataclass
class _Search:
    """A search among hypotheses near the configuration, and then near each hypothesis that clearly fits better.

    Args:
        losses_of: yields the loss of each token under a hypothesis in nats, window by window.
        most: the number of windows.
    """

    subject: Subject
    losses_of: Callable[[Hypothesis], Generator[list[float]]]
    most: int
    unigram: float
    on_step: Callable[[int, int, str], object]
    losses: dict[Hypothesis, np.ndarray] = field(default_factory=dict[Hypothesis, np.ndarray])
    """The losses, of shape ``windows tokens``, of the hypotheses that were measured in full."""
    dropped: dict[Hypothesis, tuple[int, float]] = field(default_factory=dict[Hypothesis, tuple[int, float]])
    """The number of measured windows of each dropped hypothesis, and an estimate of its mean loss."""
    left_out: dict[str, str] = field(default_factory=dict[str, str])
    done: int = 0

    def run(self) -> dict[str, Any]:
        seen = {repr(self.subject.positions_key(OWN))}
        self._measure([OWN])
        best = origin = OWN
        origins, near = list[Hypothesis](), list[Hypothesis]()
        while origin is not None:
            origins.append(origin)
            self._measure(self._neighbours(origin, seen))
            lowest = min(self.losses, key=self._loss)
            best = lowest if self._is_clear(lowest, best) else best
            near = [each for each in self.losses if each != best and not self._is_clear(each, best)]
            # If something else is wrong, too, the correct layout may not be better than the wrong layout.
            layouts = (each for each in near if replace(each, layout=best.layout) == best)
            origin = next((each for each in (best, *layouts) if each not in origins), None)
        self.on_step(self.done, self.done, best.name)
        means = {each.name: self._loss(each) for each in self.losses}
        means |= {each.name: loss for each, (_, loss) in self.dropped.items()}
        verdict, sentence = self._verdict(best, near)
        names = [each.name for each in near]
        return {
            "verdict": verdict,
            "sentence": "; within noise of it: ".join(filter(None, (sentence, "; ".join(names)))),
            "configuration": " or ".join(dict.fromkeys(map(str, self.subject.own.values()))) or "ALiBi",
            "best": best.name,
            "within_noise": names,
            "losses": dict(sorted(means.items(), key=lambda each: each[1])),
            "dropped": {each.name: windows for each, (windows, _) in self.dropped.items()},
            "left_out": self.left_out,
        }

    def _neighbours(self, origin: Hypothesis, seen: set[str]) -> list[Hypothesis]:
        """Return the hypotheses that differ from `origin` in one thing, except if their positions are in `seen`."""
        new = list[Hypothesis]()
        for hypothesis in (origin.but(name, each) for name, values in self.subject.aspects.items() for each in values):
            try:
                computed = repr(self.subject.positions_key(hypothesis))
            except LocantError as error:
                self.left_out[hypothesis.name] = error.cause
                continue
            if computed not in seen:
                seen.add(computed)
                new.append(hypothesis)
        return new

    def _measure(self, hypotheses: Sequence[Hypothesis]) -> None:
        for waiting, hypothesis in zip(reversed(range(len(hypotheses))), hypotheses, strict=True):
            try:
                self._measure_windows(hypothesis, waiting, looks=len(hypotheses) * (self.most - MIN_WINDOWS))
            except LocantError as error:
                if hypothesis == OWN:
                    raise
                self.left_out[hypothesis.name] = error.cause

    def _measure_windows(self, hypothesis: Hypothesis, waiting: int, looks: int) -> None:
        """Measure a hypothesis, but stop when it is clearly worse than the best hypothesis so far.

        Args:
            waiting: the number of hypotheses that come after this one.
            looks: the number of looks at all hypotheses of this round.
        """
        usual = max(MIN_WINDOWS, self.most // 4)
        best = self.losses[min(self.losses, key=self._loss)] if self.losses else None
        windows = list[list[float]]()
        with closing(self.losses_of(hypothesis)) as measured:
            for window in measured:
                if not math.isfinite(sum(window)):
                    raise InputError(f"got a loss that is not finite under {hypothesis.name}", Remedy(dtype="float32"))
                windows.append(window)
                self.done += 1
                left = (self.most if best is None else max(usual, len(windows))) - len(windows) + waiting * usual
                self.on_step(self.done, self.done + left, hypothesis.name)
                can_be_dropped = len(windows) < self.most and (len(windows) >= MIN_WINDOWS or len(window) >= USUAL)
                if best is not None and can_be_dropped and _is_worse(np.array(windows), best, looks):
                    worse = float(np.mean(windows) - np.mean(best[: len(windows)]))
                    self.dropped[hypothesis] = len(windows), float(np.mean(best)) + worse
                    return
        self.losses[hypothesis] = np.array(windows)

    def _verdict(self, best: Hypothesis, near: Sequence[Hypothesis]) -> tuple[str, str]:
        if self._loss(best) >= self.unigram and (best != OWN or not near):
            reason = f"its loss of {self._loss(best):.3f} nats per token is not below that of counting words"
            return "not explained", f"no hypothesis explains the weights: {best.name} is the best, and {reason}"
        if best != OWN:
            better = f"by {self._loss(OWN) - self._loss(best):.3f} nats per token"
            return "another fits", f"the weights do not fit the configuration: {best.name} fits better, {better}"
        if near:
            return "cannot tell", "no hypothesis fits better than the configuration"
        return "fits", "the weights fit the configuration, and no other hypothesis fits as well"

    def _loss(self, hypothesis: Hypothesis) -> float:
        return float(np.mean(self.losses[hypothesis]))

    def _is_clear(self, one: Hypothesis, other: Hypothesis) -> bool:
        comparisons = max(1, len(self.losses) + len(self.dropped) - 1)
        return _is_clear(self.losses[one].mean(1), self.losses[other].mean(1), comparisons)


def _is_worse(losses: np.ndarray, best: np.ndarray, looks: int) -> bool:
    """Return whether the first losses of a hypothesis are clearly above the best losses, at one of `looks` looks."""
    differences = losses - best[: len(losses)]
    parts = np.array_split(differences, max(1, differences.shape[1] // PART_TOKENS), axis=1)
    by_part = np.stack([part.mean(1) for part in parts])
    return bool(
        differences.mean() > max(MIN_DIFFERENCE, margin_of_mean(float(by_part.std(ddof=1)), by_part.size, looks))
    )


def _is_clear(one: np.ndarray, other: np.ndarray, comparisons: int) -> bool:
    """Return whether two hypotheses differ by more than chance, by the rule of `Row.is_clear`."""
    first, second = (
        Row(
            encoding="", num_seeds=1, train_loss=None, by_position=(), by_length={1: Cell.of([float(np.mean(losses))])},
            by_window={1: tuple(Cell.of([loss]) for loss in losses)},
        )
        for losses in (one, other)
    )  # fmt: skip
    return first.is_clear(1, second, 1, comparisons=comparisons)
