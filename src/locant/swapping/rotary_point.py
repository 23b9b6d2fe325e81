"""The rotary module of a `transformers` model: what it computes, and a hook that gives its layers other angles.

A module is called with position ids, and every layer rotates by its result. How the cosine of a pair lies in that
result (once, twice side by side, one after the other, as a complex number) is found by running the module and comparing
it with what `Rotary.from_config` says, at every length from which it may compute otherwise; one that computes something
else can be given another encoding, and not its own.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
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
from locant.models.registry import read
from locant.positions.angles import AngleMode
from locant.positions.base import PositionEncoding
from locant.positions.encodings.rotary import Rotary
from locant.positions.positions import Positions
from locant.positions.scaling import LongRoPE

CALLED_SO = re.compile(r"Rotary|Rope(?=[A-Z])|RoPE(?=[A-Z])")
ANGLES = "position_embeddings"
"""What attention modules call the angles that they are given."""

NEAR = 11
"""How many positions from the first are compared, beside the last of a row."""
CLOSE = 1e-5
LAST_BIT = 2.0**-22
ROUNDED = 0.2
"""How far cosines are off at these positions in a module whose frequencies were rounded to 16 bits, at most."""

Angles = Any
"""What a rotary module returns: a cosine and a sine, the two in the other order, or one complex tensor."""

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
class Form:
    """How a rotary module returns the angles of each pair.

    Args:
        name: how a cosine and a sine for each pair lie in them, in `FORMS`; ``None``: not known.
        sines_first: whether it returns the sines before the cosines, as GPT-J does.
    """

    name: str | None
    sines_first: bool = False

    def of(self, cos: Tensor, sin: Tensor) -> Angles:
        """The angles in this form, whose name is known."""
        return self.ordered(FORMS[str(self.name)](cos, sin))

    def ordered(self, angles: Angles) -> Angles:
        """A cosine and a sine in the order of the module, or back."""
        return angles[::-1] if self.sines_first else angles

    def of_no_rotation(self, like: Angles) -> Angles:
        """The angles that rotate nothing, for as many tokens and pairs as `like`."""
        if isinstance(like, Tensor):
            return torch.ones_like(like)
        cos, sin = self.ordered(like)
        return self.ordered((torch.ones_like(cos), torch.zeros_like(sin)))


@dataclass(frozen=True)
class RotaryPoint:
    """A rotary module, where it is, and what it computes.

    Args:
        owner: the model whose layers it serves.
        own: the encoding of its configuration, for each type of layers that it tells apart.
        form: of its result; without a name it has other angles than `own` in any row.
        off: how far its cosines and sines are from those of `own` at the first `NEAR` positions, where its frequencies
            were rounded to 16 bits.
        differs_at: for types of layers for which it computes something else than `own`, the first length where it does.
    """

    path: str
    module: nn.Module
    owner: nn.Module
    own: Mapping[str | None, Rotary]
    form: Form
    off: float
    differs_at: Mapping[str | None, int]

    def require_own(self) -> None:
        """Raise unless it computes the angles of its configuration."""
        if not self.differs_at:
            return
        layer_type, length = next(iter(self.differs_at.items()))
        at = "" if self.form.name is None else f" at a length of {length}"
        told = f"the angles of its configuration{at}, {self.own[layer_type]}"
        got = f"got {_name(self.path, self.module)}, which does not compute {told}"
        raise InputError(got, "swap(model, encoding), where the encoding of the model does not matter")


class OfLength:
    """An encoding whose scaling depends on the length, for that of the longest row, as `transformers` takes it."""

    outside_of_graphs: ClassVar[Any] = None

    def __init__(self) -> None:
        self.last: tuple[Rotary, int, Rotary] | None = None
        if OfLength.outside_of_graphs is None:  # not before: it imports the compiler, which takes a second
            OfLength.outside_of_graphs = staticmethod(torch.compiler.disable(OfLength._of_longest))

    def __call__(self, encoding: Rotary, index: Tensor) -> Rotary:
        """For rows whose last tokens stand at `index`; one that is for a longer row already stays as it is."""
        if encoding.scaling.length_that_matters is None:
            return encoding
        return self.outside_of_graphs(self, encoding, index)

    def _of_longest(self, encoding: Rotary, index: Tensor) -> Rotary:
        length = int(index.max()) + 1
        if length <= max(encoding.scaling.length_that_matters or 0, encoding.seq_len or 0):
            return encoding
        if self.last is None or self.last[0] is not encoding or self.last[1] != length:
            self.last = encoding, length, encoding.for_length(length)
        return self.last[2]


class RotaryHook:
    """Called by torch after the module, whose result it replaces."""

    def __init__(self, encodings: Mapping[str | None, PositionEncoding], form: Form, names: list[str]) -> None:
        self.encodings = dict(encodings)
        self.form = form
        self.where = {name: names.index(name) for name in ("position_ids", "layer_type") if name in names}
        self.of_length = {layer_type: OfLength() for layer_type in encodings}

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Angles) -> Angles:
        layer_type = self._argument("layer_type", args, kwargs) if None not in self.encodings else None
        position_ids = self._argument("position_ids", args, kwargs)
        return _angles_of(self.encodings[layer_type], self.of_length[layer_type], position_ids, self.form, result)

    def _argument(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return kwargs[name] if name in kwargs else args[self.where[name]]


class LayerHook:
    """Called by torch before the attention of one layer, which it gives other angles than the model's.

    Args:
        of_length: one for all layers of this encoding.
    """

    def __init__(self, encoding: PositionEncoding, form: Form, names: list[str], of_length: OfLength) -> None:
        self.encoding = encoding
        self.form = form
        self.names = names
        self.of_length = of_length

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = dict(zip(self.names, args, strict=False)) | kwargs
        like = given.get(ANGLES)
        if like is None:
            return None
        position_ids = given.get("position_ids")
        if position_ids is None and self.form.name is not None and isinstance(self.encoding, Rotary):
            got = f"got no position ids for {type(module).__name__}, whose encoding is another than the model's"
            raise LocantError(got, "one encoding for all layers, or NoPE for some of them")
        return (), given | {ANGLES: _angles_of(self.encoding, self.of_length, position_ids, self.form, like)}


def _angles_of(encoding: Any, of_length: OfLength, position_ids: Any, form: Form, like: Angles) -> Angles:
    """The angles of `encoding` in the form and the dtype of a module's result; without, those that rotate nothing."""
    if form.name is None or not isinstance(encoding, Rotary):
        return form.of_no_rotation(like)
    encoding = of_length(encoding, position_ids)
    index = position_ids.movedim(0, -1) if position_ids.ndim == 3 else position_ids
    # No look at the values: on an accelerator that would wait for it, and a graph would be made for each length.
    if isinstance(like, Tensor):
        return _complex(encoding, index)
    dtype = torch.promote_types(like[0].dtype, torch.float32)
    first, second = form.of(*encoding.cos_sin(Positions.of(index, max_index=MAX_INT32), dtype))
    return first.to(like[0].dtype), second.to(like[1].dtype)


def _complex(encoding: Rotary, index: Tensor) -> Tensor:
    """Angles as complex numbers; float32 ones by `torch.polar`, whose last bit is another than that of a cosine."""
    if encoding.angles.mode == "exact":
        return torch.complex(*encoding.cos_sin(Positions.of(index, max_index=MAX_INT32)))
    tables = encoding.angles.tables(index.device)
    angle = index[..., None].float() * tables.table
    return torch.polar(torch.full_like(angle, 1.0), angle) * tables.attention_factor


# ---------------------------------------------------------------------- finding and measuring


def rotary_points(model: Any, *, angles: AngleMode) -> list[RotaryPoint]:
    """The rotary modules of the text part of the model; several only where each does what its configuration says."""
    found = [
        (path, module, owner_around(model, path))
        for path, module in model.named_modules()
        if CALLED_SO.search(type(module).__name__) and "Attention" not in type(module).__name__
    ]
    text = model.config.get_text_config(decoder=True)
    of_text = [each for each in found if each[2].config is text]
    return [_measured(path, module, owner, angles) for path, module, owner in of_text or found]


def owner_around(model: Any, path: str) -> Any:
    """The innermost model around a module."""
    from transformers import PreTrainedModel

    around = [path.split(".")[:length] for length in range(path.count(".") + 1)]
    modules = [model.get_submodule(".".join(parts)) for parts in around]
    return [module for module in modules if isinstance(module, PreTrainedModel)][-1]


def _measured(path: str, module: nn.Module, owner: Any, angles: AngleMode) -> RotaryPoint:
    name = _name(path, module)
    parameters = [*inspect.signature(module.forward).parameters]
    if "position_ids" not in parameters or not set(parameters) <= {"x", "hidden_states", "position_ids", "layer_type"}:
        got = f"got {name}, which is called with {', '.join(parameters)}, expected x, position_ids"
        raise InputError(got, "a model whose rotary module is called as Llama's is")
    hollow = next((key for key, each in module.named_buffers() if each.is_meta), None)
    if hollow is not None:
        got = f"got {name}, whose {hollow} is on the meta device and holds no numbers"
        raise InputError(got, "load the model with from_pretrained, or build it on a device, and swap it then")
    config = getattr(module, "config", owner.config)
    own = _own(config, module, takes_types="layer_type" in parameters)
    measures = {
        layer_type: _measure(module, rotary, layer_type, _lengths(config, module)) for layer_type, rotary in own.items()
    }
    known = {each.form for each in measures.values() if each.form.name is not None}
    orders = {each.form.sines_first for each in measures.values()}
    if len(known) > 1 or len(orders) > 1:
        got = f"got {name}, which returns angles in another form for each type of layers"
        raise InputError(got, "a model with one form")
    return RotaryPoint(
        path,
        module,
        owner,
        own={layer_type: each.rotary.alike(angles=angles) for layer_type, each in measures.items()},
        form=known.pop() if all(each.form.name for each in measures.values()) else Form(None, orders.pop()),
        off=max(each.off for each in measures.values()),
        differs_at={kind: each.differs_at for kind, each in measures.items() if each.differs_at is not None},
    )


def _name(path: str, module: nn.Module) -> str:
    return f"{path}, a {type(module).__name__}"


def _lengths(config: Any, module: nn.Module) -> list[int]:
    """Lengths on both sides of every one that the configuration names, from where a module may compute otherwise.

    A module that looks its angles up has none for longer rows than its table: its model raises there.
    """
    rows = min((len(buffer) for buffer in module.buffers() if buffer.ndim == 2), default=MAX_INT32)
    rope = attribute(config, "rope_parameters") or {}
    ropes = [rope, *(each for each in rope.values() if isinstance(each, Mapping))]
    named = {
        *(each.get(TRAINED) for each in ropes),
        *(attribute(config, key) for key in (TRAINED, *LENGTHS, "sliding_window")),
    }
    lengths = {length for each in named if isinstance(each, int) for length in (each, each + 1, 2 * each)}
    return [NEAR + 1, *sorted(length for length in lengths if NEAR + 1 < length <= rows)]


def _own(config: Any, module: nn.Module, *, takes_types: bool) -> dict[str | None, Rotary]:
    """The encoding of the configuration, for each type of layers that has rope parameters of its own."""
    rope = attribute(config, "rope_parameters") or {}
    nested = any(isinstance(value, Mapping) for value in rope.values())
    if not (takes_types and nested):
        # A model that calls itself by another name has the module of one that is known. Its layout matters to its
        # layers and not to its angles, and so does one that weights may not have.
        keys = read(config)[1].rotary_keys
        layout = (keys.layout or "half") if keys is UNKNOWN or keys.layout_doubt else None
        options: dict[str, Any] = {"layer_type": None, "angles": "float32", "layout": layout}
        return {None: rotary_from_config(Rotary, config, **options, for_all_layers=False)}
    types = [kind for kind in getattr(module, "layer_types", rope) if isinstance(rope.get(kind), Mapping)]
    of_types = {kind: each for kind, each in rope.items() if each is None or isinstance(each, Mapping)}
    if len(of_types) < len(rope):  # copied by transformers 5.0, which writes the keys of a plain one beside them
        config = copy.copy(config)
        config.rope_parameters = of_types
    return {kind: Rotary.from_config(config, layer_type=kind, angles="float32") for kind in dict.fromkeys(types)}


class Measure(NamedTuple):
    """What a module computes, beside an encoding.

    Args:
        form: in which form its result holds the angles of `rotary`; without a name it holds others in any row.
        off: how far rounded ones are off.
        differs_at: the length of the first row whose angles are others.
    """

    rotary: Rotary
    form: Form
    off: float
    differs_at: int | None


def _measure(module: nn.Module, rotary: Rotary, layer_type: str | None, lengths: Sequence[int]) -> Measure:
    """Beside what the configuration says; but a module may pass by its long factors (PhiMoE of `transformers`)."""
    measure = _compared(module, rotary, layer_type, lengths)
    if measure.differs_at is None or not isinstance(rotary.scaling, LongRoPE):
        return measure
    short = rotary.alike(scaling=replace(rotary.scaling, long_factor=rotary.scaling.short_factor))
    measure_of_short = _compared(module, short, layer_type, lengths)
    return measure_of_short if measure_of_short.differs_at is None else measure


def _compared(module: nn.Module, rotary: Rotary, layer_type: str | None, lengths: Sequence[int]) -> Measure:
    module = copy.deepcopy(module)  # some remember the longest sequence that they have seen
    forms, off, sines_first = [*FORMS], 0.0, False
    for length in lengths:
        index, theirs = _result(module, rotary, layer_type, length)
        if length == lengths[0]:
            sines_first = _returns_sines_first(theirs)
        theirs = theirs[::-1] if sines_first else theirs
        trained = rotary.scaling.length_that_matters
        of_length = rotary if trained is None or length <= trained else rotary.for_length(length)
        cos, sin = of_length.cos_sin(Positions.of(index))
        distances = {form: _distance(FORMS[form](cos, sin), theirs) for form in forms}
        # Another device rounds the last bit of a frequency its way.
        exact = tolerance = CLOSE + LAST_BIT * torch.tensor([*range(NEAR), length - 1])
        if any(map(_is_rounded, module.buffers())):
            tolerance = torch.tensor([ROUNDED] * NEAR + [inf])  # far from 0 nothing is left of 16 bits
        matches = [form for form in forms if bool((distances[form] <= tolerance).all())]
        if not matches:
            name = None if length == lengths[0] else forms[0]
            return Measure(rotary, Form(name, sines_first), off, length)
        forms, distance = matches, distances[matches[0]]
        off = max(off, torch.where(distance > exact, distance, 0.0)[:NEAR].max().item())
    return Measure(rotary, Form(forms[0], sines_first), off, None)


def _returns_sines_first(angles: Angles) -> bool:
    """Whether the first of two results is 0 at position 0, and the second is not: whatever the frequencies are."""
    if isinstance(angles, Tensor):
        return False
    first, second = (each[..., 0, :].abs().max().item() for each in angles)
    return first == 0 and second > 0


def _result(module: nn.Module, rotary: Rotary, layer_type: str | None, length: int) -> tuple[Tensor, Angles]:
    """The first positions of a row of that length and its last one, and what the module makes of them."""
    device = next(module.buffers(), torch.empty(0)).device
    axes = rotary.pairs.num_axes or 1
    position_ids = torch.tensor([[*range(NEAR), length - 1]]).to(device)
    if axes > 1:  # apart on every axis
        moved = [torch.arange(NEAR, device=device) * (axis + 1) % (NEAR + 1) for axis in range(axes)]
        position_ids = torch.stack([torch.cat([each, position_ids[0, -1:]])[None] for each in moved])
    options = {} if layer_type is None else {"layer_type": layer_type}
    with torch.no_grad():
        theirs = module(torch.zeros(1, NEAR + 1, 1, device=device), position_ids=position_ids, **options)
    return position_ids.movedim(0, -1) if axes > 1 else position_ids, theirs


def _is_rounded(buffer: Tensor) -> bool:
    """Whether these are numbers of 16 bits, whatever holds them now: `model.bfloat16().float()` has rounded them."""
    narrow = (buffer.to(dtype).to(buffer.dtype) for dtype in (torch.bfloat16, torch.float16))
    return buffer.is_floating_point() and buffer.ndim > 0 and any(torch.equal(each, buffer) for each in narrow)


def _distance(ours: Angles, theirs: Angles) -> Tensor:
    """By how much the two are apart at each position, at most; infinity where they have not one form."""
    both = [*zip(*((each,) if isinstance(each, Tensor) else each for each in (ours, theirs)), strict=False)]
    if isinstance(ours, Tensor) != isinstance(theirs, Tensor) or any(one.shape != other.shape for one, other in both):
        return torch.full((NEAR + 1,), inf)
    return torch.stack([(one - other).abs().amax((0, 2)) for one, other in both]).amax(0).cpu()
