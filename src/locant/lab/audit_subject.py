"""Hypotheses about the positions of trained weights, and the models that are measured under them.

A hypothesis states the layout, the base, the scaling and other aspects of positions. A subject is a model that computes
with the positions of a hypothesis until a block ends. `locant.lab.audit` searches among the hypotheses.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from locant.checkpoints import convert_layout
from locant.checkpoints.config_source import CONFIG
from locant.errors import InputError
from locant.kernels.rotary import Layout
from locant.lab.decoder import Decoder
from locant.lab.language_model import stated_length
from locant.models.encodings import layer_types, rotary_layer_types
from locant.positions.description import Weightless
from locant.positions.encodings.alibi import ALiBi
from locant.positions.encodings.rotary import Rotary
from locant.positions.scaling import Scaling, Unscaled, scaling_by_name
from locant.positions.scaling.base import Arithmetic
from locant.swapping import swap
from locant.swapping.rotary_point import rotary_points

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
USUAL = 512
"""The number of tokens per window, unless the model states a smaller length."""
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


class Subject(ABC):
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
        own_rotary = self.own[layer_type]
        options: dict[str, Any] = {
            "base": dict(hypothesis.bases).get(str(layer_type)) or hypothesis.base or own_rotary.base
        }
        if hypothesis.share is not None:
            options["rotary_dim"] = int(own_rotary.head_dim * hypothesis.share)
        if hypothesis.scaling == "none":
            options["scaling"] = Unscaled()
        elif hypothesis.scaling is not None:
            trained = self.trained() // int(hypothesis.scaling.partition(":")[2])
            dim = options.get("rotary_dim", own_rotary.rotary_dim)
            options["scaling"] = scaling_by_name(hypothesis.scaling, trained, dim, options["base"])
        if hypothesis.direction == "reversed":
            options["scaling"] = _ReversedScaling(of=options.get("scaling", own_rotary.scaling))
        return own_rotary.replace(**options)

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


class TransformersSubject(Subject):
    """A model of transformers."""

    def __init__(self, model: Any) -> None:
        self.model, self.config = model, model.config.get_text_config()
        self.biased = BIAS_ARGUMENTS.get(self.config.model_type, "")
        is_alibi = self.biased or getattr(self.config, "alibi", False)  # the ALiBi of Falcon is in its attention mask
        points = [] if is_alibi else rotary_points(model, angles="float32")
        for point in points:
            point.require_own()
        own_rotaries = _with_both_types(
            {kind: rotary for point in points for kind, rotary in point.own.items()}, self.config
        )
        super().__init__(own_rotaries, bool(self.biased), lambda: stated_length(self.config))
        self.length = USUAL
        types: Sequence[str] | None = getattr(self.config, "layer_types", None)
        self.types = tuple(types or ())
        if (
            own_rotaries
            and getattr(self.config, "sliding_window", None)
            and getattr(self.config, "use_sliding_window", True)
        ):
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


class LabSubject(Subject):
    """A decoder of `locant train`. Its encoding can express every part of a hypothesis."""

    def __init__(self, model: Any) -> None:
        self.model: Decoder = model
        encoding = self.model.encoding
        own_rotaries: dict[str | None, Rotary] = {None: encoding} if isinstance(encoding, Rotary) else {}
        super().__init__(own_rotaries, isinstance(encoding, ALiBi), self._trained)

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
