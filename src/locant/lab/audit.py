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
sliding window. What two hypotheses compute in the same way within a window of the text is measured once.
"""

from __future__ import annotations

import copy
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
from locant.lab.readable_model import read_language_model
from locant.lab.settings import VOCAB_SIZE
from locant.lab.significance import margin_of_mean
from locant.lab.summary import ENOUGH_WINDOWS, Cell, Row
from locant.lab.text_learning import count, losses_in_windows
from locant.models.encodings import layer_types, rotary_layer_types
from locant.positions.base import PositionEncoding
from locant.positions.description import Weightless
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
    "base": (1e4, 1e5, 1.5e5, 5e5, 1e6, 5e6, 1e7),
    "scaling": ("none", "linear:2", "linear:4", "linear:8", "yarn:4", "llama3:8"),
    "share": (1.0, 0.5, 0.25),
}
"""The values to try.

The bases are from Llama, DeepSeek-Coder and SmolLM2, gpt-oss, Llama 3, Qwen and Mistral, Yi, and million-token models.
The scalings are the most common ones.
"""
FULL, SLIDING = "full_attention", "sliding_attention"
WINDOWS = (128, 512, 1024, 4096, 0)
"""The sliding windows to try, from published models. 0 means that every layer sees all tokens before it."""
PATTERNS = ((1, 0), (0, 0), (2, 1), (2, 0), (3, 0), (4, 3), (6, 5), (6, 0))
"""The layers with full attention to try: all, none, and patterns ``(every, first)`` of published models.

The patterns are those of Gemma 2, gpt-oss, ModernBERT, Cohere 2 and Gemma 3, and Gemma 3 counted from the wrong end.
"""
SLOPE_CHANGES: Mapping[str, Callable[[Tensor, int], Tensor]] = {
    "other sign": lambda bias, heads: -bias,
    "heads in reverse": lambda bias, heads: bias.unflatten(0, (-1, heads)).flip(1).flatten(0, 1),
    "none": lambda bias, heads: bias * 0,
}
BIAS_ARGUMENTS = {"bloom": "alibi", "mpt": "position_bias"}
"""The argument that passes ALiBi to attention, by model type. Its shape is ``heads|batch * heads, 1, key``."""
TABLE = "a table of learned positions, which are in the weights themselves"
NOTHING_ELSE = "no positions that can be read in another way"
MIN_DIFFERENCE = 0.0005
"""The smallest difference that counts, in nats per token, even if all windows agree. It is printed as 0.001."""
MIN_WINDOWS = 2
"""The number of windows after which a hypothesis may be dropped. One is enough if it has `USUAL` tokens."""
USUAL = 512
"""The number of tokens per window, unless the model states a smaller length."""
PART_TOKENS = 32
"""The number of tokens in each part of a window. Hypotheses are dropped by comparing these parts."""
WORDS = {
    "layout": "{} layout", "direction": "{} direction", "base": "base {:,.0f}", "scaling": "scaling {}",
    "share": "{:.0%} of each head rotated", "slopes": "ALiBi: {}", "window": "sliding window {:,}",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """A hypothesis about the positions of some weights. ``None`` means the value of the configuration.

    In the reversed direction, every pair is rotated by the negative angle, as if its two dimensions were exchanged. A
    scaling such as ``"yarn:4"`` extends a quarter of the length that the model states to the whole length. ``"none"``
    removes the scaling. The names of slopes are the keys of `SLOPE_CHANGES`. `bases` has a base for some types of
    layers. `full` states the layers with full attention, one of `PATTERNS`. All others have a sliding window.

    >>> Hypothesis(layout="interleaved", base=500_000.0).name
    'interleaved layout, base 500,000'
    >>> Hypothesis(bases=(("sliding_attention", 10_000.0),), full=(6, 5)).name
    'base 10,000 in sliding_attention layers, full attention in layers 5, 11, ...'
    """

    layout: Layout | None = None
    direction: str | None = None
    base: float | None = None
    scaling: str | None = None
    share: float | None = None
    slopes: str | None = None
    bases: tuple[tuple[str, float], ...] = ()
    full: tuple[int, int] | None = None
    window: int | None = None

    @property
    def name(self) -> str:
        stated = {field: value for field, value in vars(self).items() if value is not None}
        parts = [WORDS[field].format(value) for field, value in stated.items() if field in WORDS and value != 0]
        parts += [f"base {base:,.0f} in {layer_type} layers" for layer_type, base in self.bases]
        if self.full is not None:
            parts.append(f"full attention in {_layers_in_words(*self.full)}")
        if self.window == 0:
            parts.append("no sliding window")
        return ", ".join(parts) or "the configuration"

    def but(self, aspect: str, value: Any) -> Hypothesis:
        """Return this hypothesis with another value of an aspect. A base of one type of layers is added to the others.

        >>> Hypothesis(bases=(("full", 2.0),)).but("bases", ("sliding", 1.0)).bases
        (('full', 2.0), ('sliding', 1.0))
        """
        if aspect == "bases":
            value = tuple(sorted({**dict(self.bases), value[0]: value[1]}.items()))
        return replace(self, **{aspect: value})


def _layers_in_words(every: int, first: int) -> str:
    if every < 2:
        return "every layer" if every else "no layer"
    return f"layers {first}, {first + every}, ..."


OWN = Hypothesis()


@dataclass(frozen=True, kw_only=True)
class _ReversedScaling(Scaling):
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
    """A model, its positions, and a method that gives it other positions.

    Args:
        own: the model's rotary encodings by layer type. The key ``None`` means all layers.
        has_slopes: whether the model uses ALiBi.
        trained: returns the length that the model states.
    """

    def __init__(self, own: Mapping[str | None, Rotary], has_slopes: bool, trained: Callable[[], int]) -> None:
        self.own, self.has_slopes, self.trained = own, has_slopes, trained
        self.layout = next((rotary.pairs.layout for rotary in own.values()), None)
        self.aspects: dict[str, tuple[Any, ...]] = {}
        """The values to try of each field of a hypothesis."""
        if has_slopes:
            self.aspects = {"slopes": tuple(SLOPE_CHANGES)}
        elif own:
            self.aspects = _by_layer_type(own)

    @abstractmethod
    def apply(self, hypothesis: Hypothesis) -> AbstractContextManager[object]:
        """Apply this hypothesis to the model until the block ends."""

    def rotary(self, layer_type: str | None, hypothesis: Hypothesis) -> Rotary:
        """Return the encoding that a hypothesis gives to a type of layers. The layout is not changed."""
        own = self.own[layer_type]
        options: dict[str, Any] = {"base": dict(hypothesis.bases).get(str(layer_type)) or hypothesis.base or own.base}
        if hypothesis.share is not None:
            options["rotary_dim"] = int(own.head_dim * hypothesis.share)
        if hypothesis.scaling == "none":
            options["scaling"] = Unscaled()
        elif hypothesis.scaling is not None:
            trained = self.trained() // int(hypothesis.scaling.partition(":")[2])
            dim = options.get("rotary_dim", own.rotary_dim)
            options["scaling"] = scaling_by_name(hypothesis.scaling, trained, dim, options["base"])
        if hypothesis.direction == "reversed":
            options["scaling"] = _ReversedScaling(of=options.get("scaling", own.scaling))
        return own.replace(**options)

    def positions_key(self, hypothesis: Hypothesis) -> Sequence[object]:
        """Return a key that is equal for two hypotheses that compute the same positions."""
        rotaries = {kind: repr(self.rotary(kind, hypothesis)) for kind in self.own}
        layers = [
            (rotaries.get(kind, rotaries.get(None)), window) for kind, window in self.windows(hypothesis)
        ] or rotaries.values()  # fmt: skip
        return hypothesis.layout or self.layout, hypothesis.slopes, *layers

    def windows(self, hypothesis: Hypothesis) -> Sequence[tuple[str, int]]:
        """Return the type of each layer, and the number of tokens of a text that its window shows.

        The result is empty if no layer can have a sliding window.
        """
        return ()


def _by_layer_type(own: Mapping[str | None, Rotary]) -> dict[str, tuple[Any, ...]]:
    """Return the values to try. If layers have encodings of different types, a base is tried for each type."""
    aspects = dict(ROTARY)
    if len(own) > 1:
        bases = aspects.pop("base")
        aspects["bases"] = tuple((layer_type, base) for layer_type in own for base in bases)
    return aspects


class _Subject(_AnySubject):
    """A model of transformers."""

    def __init__(self, model: Any) -> None:
        self.model, self.config = model, model.config.get_text_config()
        self.biased = BIAS_ARGUMENTS.get(self.config.model_type, "")
        is_alibi = self.biased or getattr(self.config, "alibi", False)  # the ALiBi of Falcon is in its attention mask
        points = [] if is_alibi else rotary_points(model, angles="float32")
        for point in points:
            point.require_own()
        own = _with_both_types({kind: rotary for point in points for kind, rotary in point.own.items()}, self.config)
        super().__init__(own, bool(self.biased), lambda: stated_length(self.config))
        self.length = USUAL
        types: Sequence[str] | None = getattr(self.config, "layer_types", None)
        self.types = tuple(types or ())
        if own and getattr(self.config, "sliding_window", None) and getattr(self.config, "use_sliding_window", True):
            self.aspects["window"] = WINDOWS
            if self.types and {*self.types} <= {FULL, SLIDING}:
                self.aspects["full"] = PATTERNS

    def types_of_layers(self, hypothesis: Hypothesis) -> tuple[str, ...]:
        """Return the type of each layer under a hypothesis."""
        if hypothesis.full is None:
            return self.types
        every, first = hypothesis.full
        return tuple(FULL if every and layer % every == first else SLIDING for layer in range(len(self.types)))

    def windows(self, hypothesis: Hypothesis) -> Sequence[tuple[str, int]]:
        if "window" not in self.aspects:
            return ()
        window = self.config.sliding_window if hypothesis.window is None else hypothesis.window or self.length
        types = self.types_of_layers(hypothesis) or (SLIDING,)
        return [(kind, self.length if kind == FULL else min(window, self.length)) for kind in types]

    @contextmanager
    def apply(self, hypothesis: Hypothesis) -> Generator[None]:
        with ExitStack() as undo:
            if hypothesis.full is not None or hypothesis.window is not None:
                self._rebuild(hypothesis, undo)
            if hypothesis.slopes is not None:
                self._change_bias(SLOPE_CHANGES[hypothesis.slopes], undo)
            if hypothesis.layout not in (None, self.layout):
                self._reorder(hypothesis.layout, undo)
            rotaries = {kind: self.rotary(kind, hypothesis) for kind in self.own}
            layered = None not in rotaries or len(rotary_layer_types(self.config)) < len(layer_types(self.config))
            if hypothesis.share is not None and (layered or hypothesis.layout not in (None, self.layout)):
                got = "a share of each head is not tried with another layout, or for layers that differ"
                raise InputError(got, "use another hypothesis")  # these pairs are rotated inside each layer's attention
            if [*map(repr, rotaries.values())] != [*map(repr, self.own.values())]:
                undo.enter_context(swap(self.model, layers=lambda _, kind: rotaries.get(kind, rotaries.get(None))))
            yield

    def _rebuild(self, hypothesis: Hypothesis, undo: ExitStack) -> None:
        """Let the model have the modules of another model with the same weights and with other windows."""
        config = copy.deepcopy(self.model.config)
        text = config.get_text_config()
        if self.types:
            text.layer_types = [*self.types_of_layers(hypothesis)]
        if hypothesis.window is not None:
            text.sliding_window = hypothesis.window or self.length
        with Weightless():
            other = type(self.model)(config).eval()
        other.load_state_dict(self.model.state_dict(), assign=True)
        other.tie_weights()
        if any(each.is_meta for each in (*other.parameters(), *other.buffers())):
            got = f"got {type(other).__name__}, which computes some values only while its weights are loaded"
            raise InputError(got, "use another hypothesis")
        other.to(self.model.device)
        undo.callback(vars(self.model).update, _modules=self.model._modules, config=self.model.config)
        vars(self.model).update(_modules=other._modules, config=config)

    def _reorder(self, layout: Layout | None, undo: ExitStack) -> None:
        """Reorder the weights of queries and keys, so that the model's own code rotates the pairs of this layout."""
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


def _with_both_types(own: dict[str | None, Rotary], config: Any) -> dict[str | None, Rotary]:
    """Return the encodings of both types of layers, if the configuration has both but all layers are of one type."""
    ropes = getattr(config, "rope_parameters", None) or {}
    if len(own) != 1 or not {*own} < {FULL, SLIDING} <= {*ropes}:
        return own
    both = copy.deepcopy(config)
    both.layer_types = [FULL, SLIDING] * (len(config.layer_types) // 2) + [FULL] * (len(config.layer_types) % 2)
    return {kind: Rotary.from_config(both, layer_type=kind, angles="float32") for kind in (FULL, SLIDING)}


class _LabSubject(_AnySubject):
    """A decoder of `locant train`. Its encoding can express every part of a hypothesis."""

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

    def apply(self, hypothesis: Hypothesis) -> AbstractContextManager[object]:
        encoding = self.model.encoding
        if hypothesis.slopes is not None and isinstance(encoding, ALiBi):
            slopes = torch.as_tensor(encoding.slopes).detach()
            turned = SLOPE_CHANGES[hypothesis.slopes](slopes, len(slopes)).tolist()
            encoding = ALiBi(len(slopes), slopes=turned).to(slopes.device)
        elif self.own:
            encoding = self.rotary(None, hypothesis).replace(layout=hypothesis.layout or self.layout)
        return self.model.use_encoding(encoding)


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
    - ``"nothing to find"``: the model has no positions that can be read in another way.

    `losses` are nats per token by hypothesis, the lowest first. `dropped` contains the number of measured windows of
    each hypothesis that was dropped. The loss of such a hypothesis is an estimate: the loss of the best hypothesis so
    far, plus the mean difference in these windows. `left_out` contains the reason for each hypothesis that could not be
    measured. `unigram` is the loss of counting words, which predicts each token by its frequency.

    Args:
        folder: a local folder with safetensors and a tokenizer.json, or a GGUF file.
        files: a text of the kind that the model was trained on. Default: the documentation inside Python.
        length: tokens per window. Default: 512, or the length that the model states if it is smaller.
        windows: the largest number of windows. Fewer than 10 windows do not allow a conclusion and raise an error.
        dtype: the dtype to load the model in, ``float32``, ``bfloat16`` or ``float16``. ``auto`` is the saved dtype.
        on_step: called with the number of finished windows, an estimate of their total, and the name of the hypothesis.

    Raises:
        InputError: a folder without a causal language model, or a text that is too short.
    """
    dtype = one_of("dtype", dtype_name(dtype), DTYPES)
    place = device_of(device)
    if is_lab_folder(folder):
        model = read_language_model(folder, device=place, dtype=dtype)
        subject = _LabSubject(model.module)
        if not subject.aspects:
            return _report_nothing_to_find(f"{Path(folder).name} has {_lab_positions(subject.model.encoding)}")
        usual = model.trained or USUAL
    else:
        plain = without_weights(load_config(folder).to_dict())
        if not _Subject(plain).aspects:
            positions = TABLE if learned_tables(plain) else NOTHING_ELSE
            return _report_nothing_to_find(f"{type(plain).__name__} has {positions}")
        model = read_language_model(folder, device=place, dtype=dtype)
        subject = _Subject(model.module)
        usual = USUAL if subject.biased else stated_length(subject.config)
    length = min(USUAL, usual) if length is None else length
    if isinstance(subject, _Subject):
        subject.length = length
    corpus = read_corpus(files, tokenizer=folder, default_vocab_size=VOCAB_SIZE)
    most = num_windows(
        model.vocab_size, corpus, whole("length", length, 2, remedy=Remedy(length=512)), windows, argument="length"
    )
    if most < ENOUGH_WINDOWS:
        remedy = Remedy("use {}, a longer text or a smaller {}", windows=16, length=...)
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

    subject: _AnySubject
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
    """Return whether two hypotheses differ by more than chance and by `MIN_DIFFERENCE` or more."""
    if not abs(np.mean(one) - np.mean(other)) >= MIN_DIFFERENCE:
        return False
    first, second = (
        Row(
            encoding="", num_seeds=1, train_loss=None, by_position=(), by_length={1: Cell.of([float(np.mean(losses))])},
            by_window={1: tuple(Cell.of([loss]) for loss in losses)},
        )
        for losses in (one, other)
    )  # fmt: skip
    return first.is_clear(1, second, 1, comparisons=comparisons)
