"""Check whether weights were trained with the positions that their configuration states.

Weights do not show how their positions were rotated, and a model with the wrong positions still writes words. So the
model reads one text with each plausible interpretation of its positions, called a reading. The losses are compared
window by window. At first, a reading differs from the configuration in one thing. If a reading clearly fits better, the
search continues from it, because a configuration may be wrong in two things. Nothing is trained and nothing is written.

A reading is dropped once it is clearly worse than the best so far, but not before two windows were measured. It is
clearly worse if the mean of the paired differences over parts of 32 tokens exceeds 0 by more than the margin of a 95 %
interval by Student's t. The interval holds for all looks at all readings of one round at once (Bonferroni). The
configuration and the readings near the best are always measured in full, and the verdict compares whole windows.

The audit costs one forward pass over the text for the configuration and for each reading with a similar loss. It costs
an eighth of a pass for most of the other 14 readings. Each error in the configuration adds the same cost again.
SmolLM2-135M takes 160 seconds of one core with the defaults.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from locant.arguments import one_of, whole
from locant.checkpoints import convert_layout
from locant.checkpoints.config_source import CONFIG
from locant.errors import InputError, LocantError, Remedy
from locant.kernels.rotary import Layout
from locant.lab.decoder import Decoder
from locant.lab.generation import is_lab_folder
from locant.lab.language_model import (
    DTYPES,
    device_of,
    load_config,
    num_windows,
    stated_length,
    without_weights,
)
from locant.lab.readable import read_language_model
from locant.lab.settings import VOCAB_SIZE
from locant.lab.significance import margin_of_mean
from locant.lab.summary import ENOUGH_WINDOWS, Cell, Row
from locant.lab.text_learning import count, losses_in_windows
from locant.models.encodings import layer_types, rotary_layer_types
from locant.positions.base import PositionEncoding
from locant.positions.encodings.alibi import ALiBi
from locant.positions.encodings.rotary import Rotary
from locant.positions.scaling import Scaling, Unscaled, scaling_by_name
from locant.positions.scaling.base import Arithmetic
from locant.spelling import dtype_name
from locant.swapping import swap
from locant.swapping.added_point import learned_tables
from locant.swapping.rotary_point import rotary_points
from locant.text.corpus import read_corpus

ROTARY: Mapping[str, tuple[Any, ...]] = {
    "layout": ("half", "interleaved"),
    "direction": (None, "reversed"),
    "base": (1e4, 1.5e5, 5e5, 1e6, 5e6, 1e7),
    "scaling": ("none", "linear:2", "linear:4", "linear:8", "yarn:4", "llama3:8"),
    "share": (1.0, 0.5, 0.25),
}
"""The values to try. The bases are from Llama, gpt-oss, Llama 3, Qwen and Mistral, Yi, and million-token models.

The scalings are the most common ones.
"""
TURNED: Mapping[str, Callable[[Tensor, int], Tensor]] = {
    "other sign": lambda bias, heads: -bias,
    "heads in reverse": lambda bias, heads: bias.unflatten(0, (-1, heads)).flip(1).flatten(0, 1),
    "none": lambda bias, heads: bias * 0,
}
BIASED = {"bloom": "alibi", "mpt": "position_bias"}
"""Models that pass ALiBi to their attention, and the argument's name. Its shape is ``heads|batch * heads, 1, key``."""
TABLE = "a table of learned positions, which are in the weights themselves"
NOTHING_ELSE = "no positions that can be read in another way"
LEAST = 0.0005
"""The smallest difference that counts, in nats per token, even if all windows agree. It is printed as 0.001."""
FEWEST = 2
"""The number of windows after which a reading may be dropped."""
PART = 32
"""The number of tokens in each part of a window. Readings are dropped by comparing these parts."""
WORDS = {
    "layout": "{} layout", "direction": "{} direction", "base": "base {:,.0f}", "scaling": "scaling {}",
    "share": "{:.0%} of each head rotated", "slopes": "ALiBi: {}",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """A hypothesis about the positions of some weights. ``None`` means the value of the configuration.

    In the reversed direction every pair is rotated by the negative angle, as if its two dimensions were exchanged. A
    scaling such as ``"yarn:4"`` extends a quarter of the length that the model states to this length. ``"none"``
    removes the scaling. The names of slopes are the keys of `TURNED`.

    >>> Hypothesis(layout="interleaved", base=500_000.0).name
    'interleaved layout, base 500,000'
    """

    layout: Layout | None = None
    direction: str | None = None
    base: float | None = None
    scaling: str | None = None
    share: float | None = None
    slopes: str | None = None

    @property
    def name(self) -> str:
        parts = (WORDS[field].format(value) for field, value in vars(self).items() if value is not None)
        return ", ".join(parts) or "the configuration"


OWN = Hypothesis()


@dataclass(frozen=True, kw_only=True)
class _Reversed(Scaling):
    """The negated frequencies of another scaling."""

    of: Scaling

    def formula(self, numbers: Arithmetic, dim: int, base: float, seq_len: int | None) -> Any:
        return -self.of.formula(numbers, dim, base, seq_len)

    @property
    def effective_attention_factor(self) -> float:
        return self.of.effective_attention_factor

    @property
    def length_threshold(self) -> int | None:
        return self.of.length_threshold


class _AnySubject(ABC):
    """A model, its positions, and a method to read it with other positions.

    Args:
        own: the model's rotary encodings by layer type. The key ``None`` means all layers.
        has_slopes: whether the model uses ALiBi.
        trained: returns the length that the model states.
    """

    def __init__(self, own: Mapping[str | None, Rotary], has_slopes: bool, trained: Callable[[], int]) -> None:
        self.own, self.has_slopes, self.trained = own, has_slopes, trained
        self.layout = next((rotary.pairs.layout for rotary in own.values()), None)
        self.aspects = {"slopes": tuple(TURNED)} if has_slopes else ROTARY if own else {}

    @abstractmethod
    def read_as(self, reading: Hypothesis) -> AbstractContextManager[object]:
        """Apply this reading to the model until the block ends."""

    def rotary(self, own: Rotary, reading: Hypothesis) -> Rotary:
        """Return the encoding that a reading puts in place of `own`. The layout is not changed."""
        options: dict[str, Any] = {"base": reading.base or own.base}
        if reading.share is not None:
            options["rotary_dim"] = int(own.head_dim * reading.share)
        if reading.scaling == "none":
            options["scaling"] = Unscaled()
        elif reading.scaling is not None:
            trained = self.trained() // int(reading.scaling.partition(":")[2])
            dim = options.get("rotary_dim", own.rotary_dim)
            options["scaling"] = scaling_by_name(reading.scaling, trained, dim, options["base"])
        if reading.direction == "reversed":
            options["scaling"] = _Reversed(of=options.get("scaling", own.scaling))
        return own.replace(**options)

    def computed(self, reading: Hypothesis) -> Sequence[object]:
        """Return a key that is equal for two readings if both compute the same positions."""
        rotaries = (repr(self.rotary(own, reading)) for own in self.own.values())
        return reading.layout or self.layout, reading.slopes, *rotaries


class _Subject(_AnySubject):
    """A model of transformers."""

    def __init__(self, model: Any) -> None:
        self.model, self.config = model, model.config.get_text_config()
        self.biased = BIASED.get(self.config.model_type, "")
        is_alibi = self.biased or getattr(self.config, "alibi", False)  # Falcon's is in its attention mask
        points = [] if is_alibi else rotary_points(model, angles="float32")
        for point in points:
            point.require_own()
        own = {kind: rotary for point in points for kind, rotary in point.own.items()}
        super().__init__(own, bool(self.biased), lambda: stated_length(self.config))

    @contextmanager
    def read_as(self, reading: Hypothesis) -> Generator[None]:
        with ExitStack() as undo:
            if reading.slopes is not None:
                self._change_bias(TURNED[reading.slopes], undo)
            if reading.layout not in (None, self.layout):
                self._reorder(reading.layout, undo)
            rotaries = {kind: self.rotary(own, reading) for kind, own in self.own.items()}
            layered = None not in rotaries or len(rotary_layer_types(self.config)) < len(layer_types(self.config))
            if reading.share is not None and (layered or reading.layout not in (None, self.layout)):
                got = "a share of each head is not tried with another layout, or for layers that differ"
                raise InputError(got, "use another reading")  # these pairs are rotated inside each layer's attention
            if [*map(repr, rotaries.values())] != [*map(repr, self.own.values())]:
                undo.enter_context(swap(self.model, layers=lambda _, kind: rotaries.get(kind, rotaries.get(None))))
            yield

    def _reorder(self, layout: Layout | None, undo: ExitStack) -> None:
        """Reorder rows of queries and keys, so that the model's own code rotates the pairs of this layout."""
        state, to = self.model.state_dict(), self.layout
        for name, rows in convert_layout(state, self.model.config, source=layout, to=cast(Layout, to)).items():
            if rows is not state[name]:
                parameter = self.model.get_parameter(name)
                undo.callback(setattr, parameter, "data", parameter.data)
                parameter.data = rows

    def _change_bias(self, change: Callable[[Tensor, int], Tensor], undo: ExitStack) -> None:
        """Change the bias that is passed to each attention module."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            bias = change(kwargs[self.biased], self.config.num_attention_heads)
            return args, kwargs | {self.biased: bias}

        for module in self.model.modules():
            if "Attention" in type(module).__name__:
                undo.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)


class _LabSubject(_AnySubject):
    """A decoder of `locant train`. Its encoding can express every part of a reading."""

    def __init__(self, model: Any) -> None:
        self.model: Decoder = model
        encoding = self.model.encoding
        own: dict[str | None, Rotary] = {None: encoding} if isinstance(encoding, Rotary) else {}
        super().__init__(own, isinstance(encoding, ALiBi), self._trained)

    def _trained(self) -> int:
        if self.model.train_length is None:
            got = f"got a model whose {CONFIG} does not state the length of its training"
            raise InputError(got, "add 'train_length': 64 to it, with the tokens per window in its training")
        return self.model.train_length

    def read_as(self, reading: Hypothesis) -> AbstractContextManager[object]:
        encoding = self.model.encoding
        if reading.slopes is not None and isinstance(encoding, ALiBi):
            slopes = torch.as_tensor(encoding.slopes).detach()
            turned = TURNED[reading.slopes](slopes, len(slopes)).tolist()
            encoding = ALiBi(len(slopes), slopes=turned).to(slopes.device)
        elif self.own:
            encoding = self.rotary(self.own[None], reading).replace(layout=reading.layout or self.layout)
        return self.model.reading_with(encoding)


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
    """Find the reading of a model's positions under which it predicts a text best. The result is ready for JSON.

    The verdict is one of these:

    - ``"fits"``: no other reading is better than the configuration or within noise of it;
    - ``"another fits"``: another reading is clearly better than the configuration;
    - ``"cannot tell"``: other readings are within noise of the configuration, and none is better;
    - ``"not explained"``: the best reading predicts the text no better than counting words does, so the weights have a
      convention that is not among the readings, or they are broken, or the text is of another kind;
    - ``"nothing to find"``: the model has no positions that can be read in another way.

    `losses` are nats per token by reading, the lowest first. `dropped` has the number of measured windows of each
    reading that was dropped. The loss of such a reading is estimated: the loss of the best reading so far, plus the
    mean difference in these windows. `unigram` is the loss of counting words, that is, of the frequency of each token.

    Args:
        folder: a local folder with safetensors and a tokenizer.json, or a GGUF file.
        files: a text of the kind that the model was trained on. Default: the documentation inside Python.
        length: tokens per window. Default: 512, or the length that the model states if it is smaller.
        windows: the largest number of windows. It is 10 or more, because fewer do not allow a conclusion.
        dtype: the dtype to load the model in, ``float32``, ``bfloat16`` or ``float16``. ``auto`` is the saved dtype.
        on_step: called with the number of finished windows, an estimate of their total, and the name of the reading.

    Raises:
        InputError: a folder without a causal language model, or a text that is too short.
    """
    dtype = one_of("dtype", dtype_name(dtype), DTYPES)
    place = device_of(device)
    if is_lab_folder(folder):
        model = read_language_model(folder, device=place, dtype=dtype)
        subject = _LabSubject(model.module)
        if not subject.aspects:
            return _nothing_to_find(f"{Path(folder).name} has {_lab_positions(subject.model.encoding)}")
        usual = model.trained or 512
    else:
        plain = without_weights(load_config(folder).to_dict())
        if not _Subject(plain).aspects:
            return _nothing_to_find(f"{type(plain).__name__} has {TABLE if learned_tables(plain) else NOTHING_ELSE}")
        model = read_language_model(folder, device=place, dtype=dtype)
        subject = _Subject(model.module)
        usual = 512 if subject.biased else stated_length(subject.config)
    length = min(512, usual) if length is None else length
    corpus = read_corpus(files, tokenizer=folder, default_vocab_size=VOCAB_SIZE)
    most = num_windows(
        model.vocab_size, corpus, whole("length", length, 2, remedy=Remedy(length=512)), windows, argument="length"
    )
    if most < ENOUGH_WINDOWS:
        remedy = Remedy("use {}, a longer text or a smaller {}", windows=16, length=...)
        raise InputError(f"got {most} windows of {length:,} tokens, expected {ENOUGH_WINDOWS} or more", remedy)
    decoder, ids = model.decoder(corpus.tokenizer), corpus.ids

    def losses_of(reading: Hypothesis) -> Generator[list[float]]:
        with subject.read_as(reading):
            for first in range(0, most * length, length):
                yield losses_in_windows(decoder, ids[first : first + length + 1], length).by_position

    unigram = count(ids, ids[: most * length + 1], model.vocab_size).unigram
    search = _Search(subject, losses_of, most, unigram, on_step)
    return {**search.run(), "unigram": unigram, "windows": most, "length": length}


def _nothing_to_find(why: str) -> dict[str, Any]:
    return {"verdict": "nothing to find", "sentence": f"nothing to find: {why}"}


def _lab_positions(encoding: PositionEncoding) -> str:
    if not encoding.methods():
        return NOTHING_ELSE
    return (
        TABLE
        if "embed" in encoding.methods() and encoding.state_dict()
        else f"{encoding!r}, for which locant tries no other readings"
    )


@dataclass
class _Search:
    """A search among readings near the configuration, then near each reading that clearly fits better.

    Args:
        losses_of: yields the nats of each token under a reading, window by window.
        most: the number of windows.
    """

    subject: _AnySubject
    losses_of: Callable[[Hypothesis], Generator[list[float]]]
    most: int
    unigram: float
    on_step: Callable[[int, int, str], object]
    losses: dict[Hypothesis, np.ndarray] = field(default_factory=dict[Hypothesis, np.ndarray])
    """The losses ``windows tokens`` of readings that were measured in full."""
    dropped: dict[Hypothesis, tuple[int, float]] = field(default_factory=dict[Hypothesis, tuple[int, float]])
    """The number of measured windows of each dropped reading, and an estimate of its mean loss."""
    left_out: dict[str, str] = field(default_factory=dict[str, str])
    done: int = 0

    def run(self) -> dict[str, Any]:
        seen = {repr(self.subject.computed(OWN))}
        self._measure([OWN])
        best = origin = OWN
        origins, near = list[Hypothesis](), list[Hypothesis]()
        while origin is not None:
            origins.append(origin)
            self._measure(self._around(origin, seen))
            lowest = min(self.losses, key=self._loss)
            best = lowest if self._is_clear(lowest, best) else best
            near = [each for each in self.losses if each != best and not self._is_clear(each, best)]
            # If something else is wrong, too, the right layout may not be better than the wrong one.
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

    def _around(self, origin: Hypothesis, seen: set[str]) -> list[Hypothesis]:
        """Return the readings that differ from `origin` in one thing. Skip readings that compute the same positions."""
        new = list[Hypothesis]()
        for reading in (replace(origin, **{name: each}) for name, of in self.subject.aspects.items() for each in of):
            try:
                computed = repr(self.subject.computed(reading))
            except LocantError as error:
                self.left_out[reading.name] = error.cause
                continue
            if computed not in seen:
                seen.add(computed)
                new.append(reading)
        return new

    def _measure(self, readings: Sequence[Hypothesis]) -> None:
        for waiting, reading in zip(reversed(range(len(readings))), readings, strict=True):
            try:
                self._read(reading, waiting, looks=len(readings) * (self.most - FEWEST))
            except LocantError as error:
                if reading == OWN:
                    raise
                self.left_out[reading.name] = error.cause

    def _read(self, reading: Hypothesis, waiting: int, looks: int) -> None:
        """Measure a reading, until it is clearly worse than the best so far.

        Args:
            waiting: the number of readings that come after it.
            looks: the number of looks at all readings of this round.
        """
        usual = max(FEWEST, self.most // 4)
        best = self.losses[min(self.losses, key=self._loss)] if self.losses else None
        windows = list[list[float]]()
        with closing(self.losses_of(reading)) as measured:
            for window in measured:
                if not math.isfinite(sum(window)):
                    raise InputError(f"got a loss that is not finite under {reading.name}", Remedy(dtype="float32"))
                windows.append(window)
                self.done += 1
                left = (self.most if best is None else max(usual, len(windows))) - len(windows) + waiting * usual
                self.on_step(self.done, self.done + left, reading.name)
                can_be_dropped = FEWEST <= len(windows) < self.most
                if best is not None and can_be_dropped and _is_worse(np.array(windows), best, looks):
                    worse = float(np.mean(windows) - np.mean(best[: len(windows)]))
                    self.dropped[reading] = len(windows), float(np.mean(best)) + worse
                    return
        self.losses[reading] = np.array(windows)

    def _verdict(self, best: Hypothesis, near: Sequence[Hypothesis]) -> tuple[str, str]:
        if self._loss(best) >= self.unigram and (best != OWN or not near):
            reason = f"its loss of {self._loss(best):.3f} nats per token is not below that of counting words"
            return "not explained", f"no reading explains the weights: {best.name} is the best, and {reason}"
        if best != OWN:
            better = f"by {self._loss(OWN) - self._loss(best):.3f} nats per token"
            return "another fits", f"the weights do not fit the configuration: {best.name} fits better, {better}"
        if near:
            return "cannot tell", "no reading fits better than the configuration"
        return "fits", "the weights fit the configuration, and no other reading fits as well"

    def _loss(self, reading: Hypothesis) -> float:
        return float(np.mean(self.losses[reading]))

    def _is_clear(self, one: Hypothesis, other: Hypothesis) -> bool:
        comparisons = max(1, len(self.losses) + len(self.dropped) - 1)
        return _is_clear(self.losses[one].mean(1), self.losses[other].mean(1), comparisons)


def _is_worse(losses: np.ndarray, best: np.ndarray, looks: int) -> bool:
    """Return whether the first losses of a reading are clearly above the best reading's, at one of `looks` looks."""
    differences = losses - best[: len(losses)]
    parts = np.array_split(differences, max(1, differences.shape[1] // PART), axis=1)
    by_part = np.stack([part.mean(1) for part in parts])
    return bool(differences.mean() > max(LEAST, margin_of_mean(float(by_part.std(ddof=1)), by_part.size, looks)))


def _is_clear(one: np.ndarray, other: np.ndarray, comparisons: int) -> bool:
    """Return whether two readings differ by more than chance and by `LEAST` or more."""
    if not abs(np.mean(one) - np.mean(other)) >= LEAST:
        return False
    first, second = (
        Row(
            encoding="", num_seeds=1, train_loss=None, by_position=(), by_length={1: Cell.of([float(np.mean(losses))])},
            by_window={1: tuple(Cell.of([loss]) for loss in losses)},
        )
        for losses in (one, other)
    )  # fmt: skip
    return first.is_clear(1, second, 1, comparisons=comparisons)
