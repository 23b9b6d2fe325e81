"""The rotary module of a `transformers` model: what it computes, and a hook that gives its layers other angles.

A module is called with position ids, and every layer rotates by its result. How the cosine of a pair lies in that
result (once, twice side by side, one after the other, as a complex number) is found by running the module and comparing
it with what `Rotary.from_config` says; a module that computes something else is refused.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from locant.arguments import MAX_INT32
from locant.errors import InputError, LocantError
from locant.models.architecture import UNKNOWN
from locant.models.config_values import LENGTHS, TRAINED
from locant.models.registry import read
from locant.positions.angles import AngleMode
from locant.positions.base import PositionEncoding
from locant.positions.encodings.rotary import Rotary
from locant.positions.positions import Positions
from locant.positions.scaling import LongRoPE

__all__ = ["ANGLES", "LayerHook", "RotaryPoint", "innermost_model", "rotary_points"]

CALLED_SO = re.compile(r"Rotary|Rope(?=[A-Z])|RoPE(?=[A-Z])")
ANGLES = "position_embeddings"
"""What attention modules call the angles that they are given."""

PROBED = 12
CLOSE = 1e-5
LAST_BIT = 2.0**-22
ROUNDED = 0.2
"""How far cosines at a dozen positions are off in a module whose frequencies were rounded to 16 bits, at most."""

Angles = Any
"""What a rotary module returns: a cosine and a sine, or one complex tensor."""

FORMS: dict[str, Callable[[Tensor, Tensor], Angles]] = {
    "half": lambda cos, sin: (torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)),
    "interleaved": lambda cos, sin: (cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)),
    "pairs": lambda cos, sin: (cos, sin),
    "complex": torch.complex,
    "backwards": lambda cos, sin: (torch.cat([cos, cos], -1), torch.cat([-sin, -sin], -1)),
}
"""How the cosine and the sine of each pair lie in the result: twice side by side, twice one after the other, once, as
one number; and the sines of models that rotate from the second of a pair towards the first."""


@dataclass(frozen=True)
class RotaryPoint:
    """A rotary module, where it is, and what it computes.

    Args:
        owner: the model whose layers it serves.
        own: the encoding of its configuration, for each type of layers that it tells apart.
        form: how a cosine and a sine for each pair lie in its result.
    """

    path: str
    module: nn.Module
    owner: nn.Module
    own: Mapping[str | None, Rotary]
    form: str

    def hook(self, encodings: Mapping[str | None, PositionEncoding]) -> RotaryHook:
        """A forward hook that puts the angles of these encodings in the place of the module's."""
        return RotaryHook(encodings, self.form, [*inspect.signature(self.module.forward).parameters])


class RotaryHook:
    """Called by torch after the module, whose result it replaces."""

    def __init__(self, encodings: Mapping[str | None, PositionEncoding], form: str, names: list[str]) -> None:
        self.encodings = dict(encodings)
        self.form = form
        self.where = {name: names.index(name) for name in ("position_ids", "layer_type") if name in names}
        self.of_length: dict[tuple[str | None, int], Rotary] = {}

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Angles) -> Angles:
        layer_type = self._argument("layer_type", args, kwargs) if None not in self.encodings else None
        encoding = self.encodings[layer_type]
        if not isinstance(encoding, Rotary):
            return identity(result)
        position_ids = self._argument("position_ids", args, kwargs)
        return angles_of(self._for_length(encoding, layer_type, position_ids), position_ids, self.form, result)

    def _argument(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return kwargs[name] if name in kwargs else args[self.where[name]]

    def _for_length(self, encoding: Rotary, layer_type: str | None, position_ids: Tensor) -> Rotary:
        """For scalings that depend on the length: those of the longest row, as `transformers` takes them."""
        trained = encoding.scaling.length_that_matters
        if trained is None or (length := int(position_ids.max()) + 1) <= trained:
            return encoding
        if (layer_type, length) not in self.of_length:
            self.of_length = {(layer_type, length): encoding.for_length(length)}
        return self.of_length[layer_type, length]


class LayerHook:
    """Called by torch before the attention of one layer, which it gives other angles than the model's."""

    def __init__(self, encoding: PositionEncoding, form: str, names: list[str]) -> None:
        self.encoding = encoding
        self.form = form
        self.names = names

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = dict(zip(self.names, args, strict=False)) | kwargs
        like = given.get(ANGLES)
        if like is None:
            return None
        if isinstance(self.encoding, Rotary):
            if given.get("position_ids") is None:
                got = f"got no position ids for {type(module).__name__}, whose encoding is another than the model's"
                raise LocantError(got, "one encoding for all layers, or NoPE for some of them")
            return (), given | {ANGLES: angles_of(self.encoding, given["position_ids"], self.form, like)}
        return (), given | {ANGLES: identity(like)}


def angles_of(encoding: Rotary, position_ids: Tensor, form: str, like: Angles) -> Angles:
    """The angles of `encoding` in the form and the dtype of a module's result."""
    index = position_ids.movedim(0, -1) if position_ids.ndim == 3 else position_ids
    # No look at the values: on an accelerator that would wait for it, and a graph would be made for each length.
    if isinstance(like, Tensor):
        return _complex(encoding, index)
    dtype = torch.promote_types(like[0].dtype, torch.float32)
    cos, sin = FORMS[form](*encoding.cos_sin(Positions.of(index, max_index=MAX_INT32), dtype))
    return cos.to(like[0].dtype), sin.to(like[1].dtype)


def _complex(encoding: Rotary, index: Tensor) -> Tensor:
    """Angles as complex numbers; float32 ones by `torch.polar`, whose last bit is another than that of a cosine."""
    if encoding.angles.mode == "exact":
        return torch.complex(*encoding.cos_sin(Positions.of(index, max_index=MAX_INT32)))
    tables = encoding.angles.tables(index.device)
    angle = index[..., None].float() * tables.table
    return torch.polar(torch.full_like(angle, 1.0), angle) * tables.attention_factor


def identity(like: Angles) -> Angles:
    """The angles that rotate nothing."""
    if isinstance(like, Tensor):
        return torch.ones_like(like)
    cos, sin = like
    return torch.ones_like(cos), torch.zeros_like(sin)


# ---------------------------------------------------------------------- finding and measuring


def rotary_points(model: Any, *, angles: AngleMode) -> list[RotaryPoint]:
    """The rotary modules of the text part of the model; several only where each does what its configuration says."""
    found = [
        (path, module, innermost_model(model, path))
        for path, module in model.named_modules()
        if CALLED_SO.search(type(module).__name__) and "Attention" not in type(module).__name__
    ]
    text = model.config.get_text_config(decoder=True)
    of_text = [each for each in found if each[2].config is text]
    return [_measured(path, module, owner, angles) for path, module, owner in of_text or found]


def innermost_model(model: Any, path: str) -> Any:
    """The innermost model around a module."""
    from transformers import PreTrainedModel

    around = [path.split(".")[:length] for length in range(path.count(".") + 1)]
    modules = [model.get_submodule(".".join(parts)) for parts in around]
    return [module for module in modules if isinstance(module, PreTrainedModel)][-1]


def _measured(path: str, module: nn.Module, owner: Any, angles: AngleMode) -> RotaryPoint:
    name = f"{path}, a {type(module).__name__}"
    parameters = [*inspect.signature(module.forward).parameters]
    if "position_ids" not in parameters or not set(parameters) <= {"x", "hidden_states", "position_ids", "layer_type"}:
        got = f"got {name}, which is called with {', '.join(parameters)}, expected x, position_ids"
        raise InputError(got, "a model whose rotary module is called as Llama's is")
    config = getattr(module, "config", owner.config)
    lengths = _lengths(config)
    own, forms = dict[str | None, Rotary](), set[str]()
    for layer_type, rotary in _own(config, module, takes_types="layer_type" in parameters).items():
        own[layer_type], form = _computed(name, module, rotary, layer_type, lengths)
        forms.add(form)
    if len(forms) > 1:
        raise InputError(f"got {name} with results of several forms, {sorted(forms)}", "a model with one form")
    exact = {layer_type: rotary.alike(angles=angles) for layer_type, rotary in own.items()}
    return RotaryPoint(path, module, owner, exact, forms.pop())


def _lengths(config: Any) -> list[int]:
    """Lengths on both sides of every one that the configuration names, from where a module may compute otherwise."""
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [rope, *(each for each in rope.values() if isinstance(each, Mapping))]
    named = {
        *(each.get(TRAINED) for each in ropes),
        *(getattr(config, key, None) for key in (TRAINED, *LENGTHS, "sliding_window")),
    }
    lengths = {length for each in named if isinstance(each, int) for length in (each, each + 1, 2 * each)}
    return [PROBED, *sorted(length for length in lengths if length > PROBED)]


def _own(config: Any, module: nn.Module, *, takes_types: bool) -> dict[str | None, Rotary]:
    """The encoding of the configuration, for each type of layers that has rope parameters of its own."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = bool(rope) and all(value is None or isinstance(value, Mapping) for value in rope.values())
    if not (takes_types and nested):
        # A model that calls itself by another name has the module of one that is known. Its layout matters to its
        # layers and not to its angles.
        layout = "half" if read(config)[1].rotary is UNKNOWN else None
        return {None: Rotary.from_config(config, angles="float32", layout=layout)}
    types = [kind for kind in getattr(module, "layer_types", rope) if rope.get(kind) is not None]
    return {kind: Rotary.from_config(config, layer_type=kind, angles="float32") for kind in dict.fromkeys(types)}


def _computed(
    name: str, module: nn.Module, rotary: Rotary, layer_type: str | None, lengths: Sequence[int]
) -> tuple[Rotary, str]:
    """What the module computes, and the form in which it returns that.

    The configuration says it; but a module may pass by its long factors (PhiMoE of `transformers`).
    """
    reasons = []
    for each in (rotary, *_with_short_factors(rotary)):
        form, wrong = _form(module, each, layer_type, lengths)
        if wrong is None:
            return each, form
        reasons.append(f" at a length of {wrong}" if form else "")
    raise InputError(
        f"got {name}, which does not compute the angles of its configuration{reasons[0]}, {rotary}",
        "swap(model, encoding), where the encoding of the model does not matter",
    )


def _with_short_factors(rotary: Rotary) -> list[Rotary]:
    """The same with the short factors at every length, where there are long ones."""
    if not isinstance(rotary.scaling, LongRoPE):
        return []
    return [rotary.alike(scaling=replace(rotary.scaling, long_factor=rotary.scaling.short_factor))]


def _form(module: nn.Module, rotary: Rotary, layer_type: str | None, lengths: Sequence[int]) -> tuple[str, int | None]:
    """In which form the module returns the angles of `rotary`, and the first length at which it does not."""
    forms = [*FORMS]
    module = copy.deepcopy(module)  # some remember the longest sequence that they have seen
    for length in lengths:
        index, theirs = _result(module, rotary, layer_type, length)
        trained = rotary.scaling.length_that_matters
        of_length = rotary if trained is None or length <= trained else rotary.for_length(length)
        cos, sin = of_length.cos_sin(Positions.of(index))
        alike = [form for form in forms if _near(FORMS[form](cos, sin), theirs, _tolerance(module, length))]
        if not alike:
            return "" if length == lengths[0] else forms[0], length
        forms = alike
    return forms[0], None


def _tolerance(module: nn.Module, length: int) -> Tensor:
    """By how much the angles of each position may be off: another device rounds the last bit of a frequency its way."""
    if any(buffer.dtype.itemsize < 4 for buffer in module.buffers() if buffer.is_floating_point()):
        return torch.tensor([ROUNDED] * (PROBED - 1) + [math.inf])[:, None]  # far from 0 nothing is left of 16 bits
    return torch.tensor([CLOSE + position * LAST_BIT for position in [*range(PROBED - 1), length - 1]])[:, None]


def _result(module: nn.Module, rotary: Rotary, layer_type: str | None, length: int) -> tuple[Tensor, Angles]:
    """The first positions of a row of that length and its last one, and what the module makes of them."""
    device = next(module.buffers(), torch.empty(0)).device
    axes = rotary.pairs.num_axes or 1
    position_ids = torch.tensor([[*range(PROBED - 1), length - 1]], device=device)
    if axes > 1:  # apart on every axis
        moved = [torch.arange(PROBED - 1, device=device) * (axis + 1) % PROBED for axis in range(axes)]
        position_ids = torch.stack([torch.cat([each, position_ids[0, -1:]])[None] for each in moved])
    options = {} if layer_type is None else {"layer_type": layer_type}
    with torch.no_grad():
        theirs = module(torch.zeros(1, PROBED, 1, device=device), position_ids=position_ids, **options)
    return position_ids.movedim(0, -1) if axes > 1 else position_ids, theirs


def _near(ours: Angles, theirs: Angles, near: Tensor) -> bool:
    pairs = zip(*((each,) if isinstance(each, Tensor) else each for each in (ours, theirs)), strict=False)
    return isinstance(ours, Tensor) == isinstance(theirs, Tensor) and all(
        one.shape == other.shape and bool(((one - other).abs() <= near.to(one.device)).all()) for one, other in pairs
    )
