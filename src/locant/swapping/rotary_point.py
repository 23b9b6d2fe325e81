"""Measure the rotary module of a `transformers` model, and attach hooks that give its layers other angles.

A model calls its rotary module with position ids, and every layer rotates by the result. The result may hold the cosine
of a pair once, twice side by side, twice one after the other, or as a complex number. We find out by running the module
and comparing it with `Rotary.from_config`, at every length beyond which it may compute other angles. If a module
computes something else, its layers can get another encoding, but cannot keep their own.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import inf
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from locant.arguments import MAX_INT32
from locant.errors import InputError, LocantError
from locant.models.architecture import UNKNOWN
from locant.models.config_values import LENGTHS, TRAINED, attribute
from locant.models.encodings import rotary_from_config
from locant.models.registry import read_config
from locant.positions.angles import AngleMode
from locant.positions.base import PositionEncoding
from locant.positions.encodings.rotary import Rotary
from locant.positions.positions import Positions
from locant.positions.scaling import LongRoPE

ROTARY_CLASS_NAME = re.compile(r"Rotary|Rope(?=[A-Z])|RoPE(?=[A-Z])")
ANGLES = "position_embeddings"
"""The argument of attention modules that receives the angles."""

NUM_COMPARED = 11
"""The number of first positions that are compared, in addition to the last position of a row."""
CLOSE = 1e-5
LAST_BIT = 2.0**-22
ROUNDED = 0.2
"""The largest error of a cosine at the first `NUM_COMPARED` positions if frequencies were rounded to 16 bits."""

Angles = Any
"""The result of a rotary module: cosines and sines, sines and cosines, or one complex tensor."""

FORMS: dict[str, Callable[[Tensor, Tensor], Angles]] = {
    "half": lambda cos, sin: (torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)),
    "interleaved": lambda cos, sin: (cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)),
    "pairs": lambda cos, sin: (cos, sin),
    "complex": torch.complex,
    "backwards": lambda cos, sin: (torch.cat([cos, cos], -1), torch.cat([-sin, -sin], -1)),
}
"""Forms that hold the cosine and the sine of each pair: twice in halves, twice side by side, once, as one complex
number, and in halves with negative sines (models that rotate a pair from its second member towards its first)."""


@dataclass(frozen=True)
class Form:
    """The form in which a rotary module returns the angles of each pair.

    Args:
        name: a key of `FORMS`, or ``None`` if the form is not known.
        sines_first: whether the module returns the sines before the cosines, as GPT-J's does.
    """

    name: str | None
    sines_first: bool = False

    def arrange(self, cos: Tensor, sin: Tensor) -> Angles:
        """Return the angles in this form, whose name must be known."""
        return self.reorder(FORMS[str(self.name)](cos, sin))

    def reorder(self, angles: Angles) -> Angles:
        """Convert a cosine and a sine to the module's order, or back."""
        return angles[::-1] if self.sines_first else angles

    def zero_angles(self, like: Angles) -> Angles:
        """Return zero angles, which do not rotate, in the shape of `like`."""
        if isinstance(like, Tensor):
            return torch.ones_like(like)
        cos, sin = self.reorder(like)
        return self.reorder((torch.ones_like(cos), torch.zeros_like(sin)))


@dataclass(frozen=True)
class RotaryPoint:
    """A rotary module, its path, and the angles that it computes.

    Args:
        owner: the model whose layers use the module.
        own: the encoding of its configuration, for each layer type that the module distinguishes.
        form: the form of its result. If the form has no name, the angles differ from `own` at every length.
        rounding_error: the largest difference of its cosines and sines from `own` at the first `NUM_COMPARED`
            positions, if its frequencies were rounded to 16 bits.
        differs_at: the first length at which the angles differ from `own`, for each layer type with a difference.
    """

    path: str
    module: nn.Module
    owner: nn.Module
    own: Mapping[str | None, Rotary]
    form: Form
    rounding_error: float
    differs_at: Mapping[str | None, int]

    def attach(self, encodings: Mapping[str | None, PositionEncoding], undo: ExitStack) -> None:
        """Let the module return the angles of an encoding for each layer type."""
        hook = RotaryHook(encodings, self.form, self.module)
        undo.callback(self.module.register_forward_hook(hook, with_kwargs=True).remove)

    def require_own(self) -> None:
        """Raise `InputError` unless the module computes the angles of its configuration."""
        if not self.differs_at:
            return
        layer_type, length = next(iter(self.differs_at.items()))
        at = "" if self.form.name is None else f" at a length of {length}"
        angles = f"the angles of its configuration{at}, {self.own[layer_type]}"
        got = f"got {_name(self.path, self.module)}, which does not compute {angles}"
        raise InputError(got, "swap(model, encoding), which does not need the model's own encoding")


class ForLongestRow:
    """A function that rescales an encoding for the longest row of a call if its scaling depends on the length.

    It does so as `transformers` does. It keeps the last rescaled encoding.
    """

    outside_of_graphs: ClassVar[Any] = None

    def __init__(self) -> None:
        self.last: tuple[Rotary, int, Rotary] | None = None
        if ForLongestRow.outside_of_graphs is None:  # not at import, because this imports the compiler (a second)
            ForLongestRow.outside_of_graphs = staticmethod(torch.compiler.disable(ForLongestRow._rescale))

    def __call__(self, encoding: Rotary, index: Tensor) -> Rotary:
        """Return the encoding for the largest position in `index`. An encoding for a longer row does not change."""
        if encoding.scaling.length_threshold is None:
            return encoding
        return self.outside_of_graphs(self, encoding, index)

    def _rescale(self, encoding: Rotary, index: Tensor) -> Rotary:
        length = int(index.max()) + 1
        if length <= max(encoding.scaling.length_threshold or 0, encoding.seq_len or 0):
            return encoding
        if self.last is None or self.last[0] is not encoding or self.last[1] != length:
            self.last = encoding, length, encoding.for_length(length)
        return self.last[2]


class RotaryHook:
    """A forward hook that replaces the result of a rotary module."""

    def __init__(self, encodings: Mapping[str | None, PositionEncoding], form: Form, module: nn.Module) -> None:
        names = _parameter_names(module)
        self.encodings = dict(encodings)
        self.form = form
        self.argument_indices = {name: names.index(name) for name in ("position_ids", "layer_type") if name in names}
        self.for_longest = {layer_type: ForLongestRow() for layer_type in encodings}

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Angles) -> Angles:
        layer_type = self._argument("layer_type", args, kwargs) if None not in self.encodings else None
        position_ids = self._argument("position_ids", args, kwargs)
        return _angles(self.encodings[layer_type], self.for_longest[layer_type], position_ids, self.form, result)

    def _argument(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return kwargs[name] if name in kwargs else args[self.argument_indices[name]]


class LayerHook:
    """A forward pre-hook that replaces the model's angles in the attention of one layer.

    Args:
        form: the form of the model's angles.
        attention: the attention module.
        for_longest: an object that all layers of this encoding share.
    """

    def __init__(
        self, encoding: PositionEncoding, form: Form, attention: nn.Module, for_longest: ForLongestRow
    ) -> None:
        self.encoding = encoding
        self.form = form
        self.names = _parameter_names(attention)
        self.for_longest = for_longest

    def attach(self, attention: nn.Module, undo: ExitStack) -> None:
        """Register the hook."""
        undo.callback(attention.register_forward_pre_hook(self, with_kwargs=True).remove)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = dict(zip(self.names, args, strict=False)) | kwargs
        like = arguments.get(ANGLES)
        if like is None:
            return None
        position_ids = arguments.get("position_ids")
        if position_ids is None and self.form.name is not None and isinstance(self.encoding, Rotary):
            got = f"got no position ids for {type(module).__name__}, whose encoding differs from the model's"
            raise LocantError(got, "use one encoding for all layers, or NoPE for some of them")
        return (), arguments | {ANGLES: _angles(self.encoding, self.for_longest, position_ids, self.form, like)}


def receives_angles(attention: nn.Module) -> bool:
    """Return whether an attention module receives the angles as an argument."""
    return ANGLES in _parameter_names(attention)


def _parameter_names(module: nn.Module) -> list[str]:
    return [*inspect.signature(module.forward).parameters]


def _angles(encoding: Any, for_longest: ForLongestRow, position_ids: Any, form: Form, like: Angles) -> Angles:
    """Return the angles of `encoding` in the form and dtype of `like`, or zero angles if it does not rotate."""
    if form.name is None or not isinstance(encoding, Rotary):
        return form.zero_angles(like)
    encoding = for_longest(encoding, position_ids)
    index = position_ids.movedim(0, -1) if position_ids.ndim == 3 else position_ids
    # Do not read the values: an accelerator would have to synchronize, and each length would need its own graph.
    if isinstance(like, Tensor):
        return _complex_angles(encoding, index)
    dtype = torch.promote_types(like[0].dtype, torch.float32)
    first, second = form.arrange(*encoding.cos_sin(Positions.of(index, max_index=MAX_INT32), dtype))
    return first.to(like[0].dtype), second.to(like[1].dtype)


def _complex_angles(encoding: Rotary, index: Tensor) -> Tensor:
    """Return the angles as complex numbers.

    In float32 we use `torch.polar`, as models do, because its last bit differs from the last bit of a cosine.
    """
    if encoding.angles.mode == "exact":
        return torch.complex(*encoding.cos_sin(Positions.of(index, max_index=MAX_INT32)))
    tables = encoding.angles.tables(index.device)
    angle = index[..., None].float() * tables.table
    return torch.polar(torch.full_like(angle, 1.0), angle) * tables.attention_factor


# ---------------------------------------------------------------------- finding and measuring


def rotary_points(model: Any, *, angles: AngleMode) -> list[RotaryPoint]:
    """Return the rotary modules of the model's text part, or of all its parts if the text part has none."""
    modules = [
        (path, module, owner_around(model, path))
        for path, module in model.named_modules()
        if ROTARY_CLASS_NAME.search(type(module).__name__) and "Attention" not in type(module).__name__
    ]
    text = model.config.get_text_config(decoder=True)
    text_modules = [each for each in modules if each[2].config is text]
    return [_rotary_point(path, module, owner, angles) for path, module, owner in text_modules or modules]


def owner_around(model: Any, path: str) -> Any:
    """Return the innermost model that contains the module at this path."""
    from transformers import PreTrainedModel

    parents = [path.split(".")[:length] for length in range(path.count(".") + 1)]
    modules = [model.get_submodule(".".join(parts)) for parts in parents]
    return [module for module in modules if isinstance(module, PreTrainedModel)][-1]


def _rotary_point(path: str, module: nn.Module, owner: Any, angles: AngleMode) -> RotaryPoint:
    name = _name(path, module)
    parameters = _parameter_names(module)
    if "position_ids" not in parameters or not set(parameters) <= {"x", "hidden_states", "position_ids", "layer_type"}:
        got = f"got {name}, which is called with {', '.join(parameters)}, expected x, position_ids"
        raise InputError(got, "use a model whose rotary module takes the arguments of Llama's")
    meta_buffer = next((key for key, each in module.named_buffers() if each.is_meta), None)
    if meta_buffer is not None:
        got = f"got {name}, whose {meta_buffer} is on the meta device and holds no numbers"
        raise InputError(got, "load the model with from_pretrained, or build it on a device, before you swap it")
    config = getattr(module, "config", owner.config)
    own_encodings = _own_encodings(config, module, takes_types="layer_type" in parameters)
    measurements = {
        layer_type: _measure(module, rotary, layer_type, _lengths(config, module))
        for layer_type, rotary in own_encodings.items()
    }
    known_forms = {each.form for each in measurements.values() if each.form.name is not None}
    orders = {each.form.sines_first for each in measurements.values()}
    if len(known_forms) > 1 or len(orders) > 1:
        got = f"got {name}, which returns angles in a different form for each layer type"
        raise InputError(got, "use a model that returns all angles in one form")
    return RotaryPoint(
        path,
        module,
        owner,
        own={layer_type: each.rotary.replace(angles=angles) for layer_type, each in measurements.items()},
        form=known_forms.pop() if all(each.form.name for each in measurements.values()) else Form(None, orders.pop()),
        rounding_error=max(each.rounding_error for each in measurements.values()),
        differs_at={kind: each.differs_at for kind, each in measurements.items() if each.differs_at is not None},
    )


def _name(path: str, module: nn.Module) -> str:
    return f"{path}, a {type(module).__name__}"


def _lengths(config: Any, module: nn.Module) -> list[int]:
    """Return lengths on both sides of every length in the configuration, beyond which a module may change its angles.

    If a module looks up its angles in a table, the lengths end with the table. Its model raises an error for longer
    rows.
    """
    rows = min((len(buffer) for buffer in module.buffers() if buffer.ndim == 2), default=MAX_INT32)
    rope = attribute(config, "rope_parameters") or {}
    ropes = [rope, *(each for each in rope.values() if isinstance(each, Mapping))]
    configured = {
        *(each.get(TRAINED) for each in ropes),
        *(attribute(config, key) for key in (TRAINED, *LENGTHS, "sliding_window")),
    }
    lengths = {length for each in configured if isinstance(each, int) for length in (each, each + 1, 2 * each)}
    return [NUM_COMPARED + 1, *sorted(length for length in lengths if NUM_COMPARED + 1 < length <= rows)]


def _own_encodings(config: Any, module: nn.Module, *, takes_types: bool) -> dict[str | None, Rotary]:
    """Return the encoding of the configuration, for each layer type that has its own rope parameters."""
    rope = attribute(config, "rope_parameters") or {}
    nested = any(isinstance(value, Mapping) for value in rope.values())
    if not (takes_types and nested):
        # A model with an unknown name has the rotary module of a known model. The layout affects its layers, but not
        # its angles. The same holds if the weights may have another layout.
        keys = read_config(config)[1].rotary_keys
        layout = (keys.layout or "half") if keys is UNKNOWN or keys.layout_doubt else None
        options: dict[str, Any] = {"layer_type": None, "angles": "float32", "layout": layout}
        return {None: rotary_from_config(Rotary, config, **options, for_all_layers=False)}
    types = [kind for kind in getattr(module, "layer_types", rope) if isinstance(rope.get(kind), Mapping)]
    by_type = {kind: each for kind, each in rope.items() if each is None or isinstance(each, Mapping)}
    if len(by_type) < len(rope):  # transformers 5.0 also adds the keys of plain rope parameters
        config = copy.copy(config)
        config.rope_parameters = by_type
    return {kind: Rotary.from_config(config, layer_type=kind, angles="float32") for kind in dict.fromkeys(types)}


class Measurement(NamedTuple):
    """The comparison of a module's result with an encoding.

    Args:
        form: the form in which the result holds the angles of `rotary`. It has no name if the angles differ in every
            row.
        rounding_error: the largest error of rounded frequencies.
        differs_at: the length of the first row whose angles differ.
    """

    rotary: Rotary
    form: Form
    rounding_error: float
    differs_at: int | None


def _measure(module: nn.Module, rotary: Rotary, layer_type: str | None, lengths: Sequence[int]) -> Measurement:
    """Compare a module with the encoding of its configuration.

    If they differ, try again without LongRoPE's long factors, which a module may ignore (PhiMoE of `transformers`).
    """
    measurement = _compare(module, rotary, layer_type, lengths)
    if measurement.differs_at is None or not isinstance(rotary.scaling, LongRoPE):
        return measurement
    short = rotary.replace(scaling=replace(rotary.scaling, long_factor=rotary.scaling.short_factor))
    short_measurement = _compare(module, short, layer_type, lengths)
    return short_measurement if short_measurement.differs_at is None else measurement


def _compare(module: nn.Module, rotary: Rotary, layer_type: str | None, lengths: Sequence[int]) -> Measurement:
    module = copy.deepcopy(module)  # some modules remember the longest sequence that they have processed
    forms, rounding_error, sines_first = [*FORMS], 0.0, False
    for length in lengths:
        index, angles = _result(module, rotary, layer_type, length)
        if length == lengths[0]:
            sines_first = _returns_sines_first(angles)
        angles = angles[::-1] if sines_first else angles
        trained = rotary.scaling.length_threshold
        for_length = rotary if trained is None or length <= trained else rotary.for_length(length)
        cos, sin = for_length.cos_sin(Positions.of(index))
        distances = {form: _distance(FORMS[form](cos, sin), angles) for form in forms}
        # Devices round the last bit of a frequency differently.
        exact = tolerance = CLOSE + LAST_BIT * torch.tensor([*range(NUM_COMPARED), length - 1])
        if any(map(_is_rounded, module.buffers())):
            tolerance = torch.tensor(
                [ROUNDED] * NUM_COMPARED + [inf]
            )  # far from position 0, 16 bits leave no correct digit
        matches = [form for form in forms if bool((distances[form] <= tolerance).all())]
        if not matches:
            name = None if length == lengths[0] else forms[0]
            return Measurement(rotary, Form(name, sines_first), rounding_error, length)
        forms, distance = matches, distances[matches[0]]
        rounding_error = max(rounding_error, torch.where(distance > exact, distance, 0.0)[:NUM_COMPARED].max().item())
    return Measurement(rotary, Form(forms[0], sines_first), rounding_error, None)


def _returns_sines_first(angles: Angles) -> bool:
    """Return whether the first of two results is 0 at position 0, as sines are, and the second is not."""
    if isinstance(angles, Tensor):
        return False
    first, second = (each[..., 0, :].abs().max().item() for each in angles)
    return first == 0 and second > 0


def _result(module: nn.Module, rotary: Rotary, layer_type: str | None, length: int) -> tuple[Tensor, Angles]:
    """Return the first positions and the last position of a row of this length, and the module's angles for them."""
    device = next(module.buffers(), torch.empty(0)).device
    axes = rotary.pairs.num_axes or 1
    position_ids = torch.tensor([[*range(NUM_COMPARED), length - 1]]).to(device)
    if axes > 1:  # different positions on every axis
        by_axis = [torch.arange(NUM_COMPARED, device=device) * (axis + 1) % (NUM_COMPARED + 1) for axis in range(axes)]
        position_ids = torch.stack([torch.cat([each, position_ids[0, -1:]])[None] for each in by_axis])
    options = {} if layer_type is None else {"layer_type": layer_type}
    with torch.no_grad():
        angles = module(torch.zeros(1, NUM_COMPARED + 1, 1, device=device), position_ids=position_ids, **options)
    return position_ids.movedim(0, -1) if axes > 1 else position_ids, angles


def _is_rounded(buffer: Tensor) -> bool:
    """Return whether the numbers fit into 16 bits in any dtype, as after `model.bfloat16().float()`."""
    narrow = (buffer.to(dtype).to(buffer.dtype) for dtype in (torch.bfloat16, torch.float16))
    return buffer.is_floating_point() and buffer.ndim > 0 and any(torch.equal(each, buffer) for each in narrow)


def _distance(first: Angles, second: Angles) -> Tensor:
    """Return the largest difference at each position, or infinity if the forms differ."""
    pairs = [*zip(*((each,) if isinstance(each, Tensor) else each for each in (first, second)), strict=False)]
    if isinstance(first, Tensor) != isinstance(second, Tensor) or any(x.shape != y.shape for x, y in pairs):
        return torch.full((NUM_COMPARED + 1,), inf)
    return torch.stack([(x - y).abs().amax((0, 2)) for x, y in pairs]).amax(0).cpu()
