"""`swap`: another position encoding in a `transformers` model, and back."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

from torch import nn

from locant.arguments import one_of, shown
from locant.errors import InputError, RangeError
from locant.extras import require
from locant.models.config_values import attribute
from locant.positions.angles import AngleMode
from locant.positions.base import PositionEncoding, has_bias, reads_hidden_states
from locant.positions.encodings.rope_plus_plus import RoPEPlusPlus
from locant.positions.encodings.rotary import Rotary
from locant.swapping.added_point import (
    BiasPoint,
    EmbeddingPoint,
    GivenBias,
    bias_points,
    layer_types,
    own_tables,
    self_attention,
    take_out,
)
from locant.swapping.attention_point import (
    KEY,
    AttentionPoint,
    PlacesHooks,
    attention_modules,
    goes_by_class,
    has_learned_bias,
    name_again,
    name_our_function,
    require_point,
)
from locant.swapping.plan import LayerPlan, forget, own_configurations, planned, record
from locant.swapping.rotary_point import (
    ANGLES,
    NEAR,
    LayerHook,
    OfLength,
    RotaryHook,
    RotaryPoint,
    owner_around,
    rotary_points,
)

HOLDER = "locant"
"""Where a model holds the encodings that were put into it: their parameters are trained and saved with the model."""

MARK = "_locant_swapped"

REMOVABLE = "a model with rotary positions, with one table of learned ones, or with T5's bias"
"""What an encoding can be put in the place of."""


def swap(
    model: Any,
    encoding: PositionEncoding | None = None,
    *,
    layers: LayerPlan | None = None,
    angles: AngleMode = "exact",
) -> Swap:
    """Give a `transformers` model another position encoding, or its own in exact angles; in place, until `undo`.

    No forward is replaced, and no class: a hook after the rotary module gives every layer other angles; what is added
    to scores, or rotates otherwise than the model's code can, goes through `AttentionInterface`; what is added to
    token embeddings through a hook after them. The positions that the model had are taken out: rotary ones, a table of
    learned ones, or the bias of T5 and its kin (mT5, UMT5, ByT5, Switch Transformers). Parameters of the encoding
    become parameters of the model, as `locant` of its inner model, and `save_pretrained` writes them;
    `locant.checkpoints.load_swapped` reads such a folder, and `from_pretrained` alone refuses it. The model gets a copy
    of its configuration for this, and keeps it, so that other models of the same one are not touched. With its own
    encoding in every layer nothing is written: such a folder is one of the model as it was.

    The layers of T5 are counted through, those of its encoder first, and ``"encoder"`` or ``"decoder"`` is their type.
    Its cross-attention has no positions, and gets none. Its own bias gives the bits that it gave before. From 2^20
    scores on, all heads counted, rows without padding go without a matrix of it and are alike up to rounding, unless
    something is trained or compiled; ``angles="float32"`` leaves all of it to the model's own code.

    Args:
        model: any model of `transformers`, as long as its points are known; it may be compiled, sharded or given
            adapters afterwards. A copy of a swapped model stays swapped: only the one that was given is taken back.
        encoding: for every layer; ``None``: the model's own. It is no copy: it is moved to the device and the dtype of
            the model and trained there, and `undo` leaves it so.
        layers: where layers differ: ``{"every": 4, "encoding": other}`` gives every fourth layer the other one, and a
            function of a layer's index and type (of ``config.layer_types``) gives each what it returns, ``None`` for
            its own.
        angles: for the model's own encoding: ``"exact"``, or ``"float32"`` for the bits that the model had before.
            Other encodings are made with angles of their own.

    Returns:
        A handle: `undo` takes all of it back, leaving a ``with`` block does so too, and `sentences` says what each
        layer has.

    Raises:
        InputError: a model that cannot be swapped, by name: without rotary positions where its own are asked for,
            with code of its own, with fused attention. Nothing is changed then.
        RangeError: an encoding for other sizes than the model's, or a plan that fits no layer.

    Costs: the model's own angles are still computed, and a bias is added as a matrix where rows are padded, packed or
    in a window. Where a scaling depends on the length, that is read from the device in every call, outside of graphs.

    Position ids of the caller's are read with a mask and without, and kept beside the keys of a cache; a cache of one
    shape (``"static"``) keeps none, and its keys are taken to count up to the last query without a gap.

    >>> import locant
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=99, **sizes))
    >>> with swap(model, locant.ALiBi(num_heads=4)) as swapped:
    ...     swapped.sentences[0]
    'layer 0: ALiBi(num_heads=4) in its attention scores, its rotary positions taken out'
    """
    one_of("angles", angles, ("exact", "float32"), "angles='exact'")
    text = _require_model(model)
    points = rotary_points(text, angles=angles)
    biases = [] if points else bias_points(text)
    # The innermost model, which has the layers: OPT's classes go past the one around it.
    tables = [] if points or biases else own_tables(text)
    owner: Any = points[0].owner if points else text.base_model
    if len(tables) == 1:
        owner = owner_around(text, tables[0][0])
    if any(point.owner is not owner for point in points):
        got = f"got {type(model).__name__} with rotary modules of {len({id(point.owner) for point in points})} models"
        raise InputError(got, "swap of the inner model that is meant, such as model.model.decoder")
    if encoding is None and layers is None and not points and not biases:
        got = f"got {type(model).__name__}, which has no rotary positions to be made exact"
        raise InputError(got, "swap(model, encoding) with an encoding of locant" if len(tables) == 1 else REMOVABLE)
    plan = planned(encoding, layers, layer_types(biases, owner.config))
    if angles != "exact" and None not in plan:
        got = f"got angles={angles!r} beside encodings for all layers, which have angles of their own"
        raise InputError(got, f"the encoding made with it, such as locant.Rotary(..., angles={angles!r})")
    return _Work(model, owner, points, biases, plan, angles).done()


class Swap:
    """What was put into a model, and how to take it out again.

    Args:
        sentences: one for each layer.
    """

    def __init__(self, undo: Sequence[Callable[[], object]], sentences: Sequence[str]) -> None:
        self._undo = list(undo)
        self.sentences = tuple(sentences)

    def undo(self) -> None:
        """Take it out: the model is as it was before, bit for bit. A second time does nothing."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Swap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def __repr__(self) -> str:
        return "\n".join(self.sentences)


class _Work:
    """One swap while it is made: everything is looked at before anything is changed."""

    def __init__(
        self,
        model: Any,
        owner: Any,
        points: Sequence[RotaryPoint],
        biases: Sequence[BiasPoint],
        plan: Sequence[PositionEncoding | None],
        angles: AngleMode,
    ) -> None:
        self.model, self.owner, self.points, self.biases, self.plan = model, owner, points, biases, plan
        self.angles: AngleMode = angles
        self.foreign = [*{id(each): each for each in plan if each is not None}.values()]
        self.of_length = {place: OfLength() for place in (None, *range(len(self.foreign)))}
        self.tables = [] if points or biases else own_tables(owner)
        self.ways = [_way(each, layer, owner, points, learned=bool(biases)) for layer, each in enumerate(plan)]
        self.base = plan[0] if all(each is plan[0] for each in plan) else None
        self.modules = self_attention(biases) or (attention_modules(owner) if self.foreign else {})
        self.calls_ours = "scores" in self.ways or bool(biases and (self.foreign or angles == "exact"))
        self._require()
        generates = model.can_generate()
        stacks = [point.stack for point in biases] or [owner]
        self.embeddings = [
            EmbeddingPoint(owner, 0, stack, generates=generates) for stack in stacks if "embed" in self.ways
        ]
        self.places = PlacesHooks(owner, generates=generates) if self.calls_ours and not biases else None
        self.told: Sequence[object] = ()
        self.undo: list[Callable[[], object]] = []

    def done(self) -> Swap:
        """Attach everything."""
        setattr(self.owner, MARK, True)
        self.undo.append(lambda: delattr(self.owner, MARK))
        if self.foreign or self.calls_ours:
            own_configurations(self.model)
        if self.foreign:
            self._hold()
        if self.calls_ours:
            self._attach_scores()
        self.undo += [hook.remove for point in self.embeddings for hook in point.attach()]
        if self.foreign:
            self.undo += [take_out(self.owner, path) for path, _ in self.tables]
        self._attach_angles()
        return Swap(self.undo, [self._sentence(layer) for layer in range(len(self.plan))])

    def _require(self) -> None:
        name = type(self.model).__name__
        mixed = len({id(each) for each in self.plan}) > 1
        if None in self.plan:
            for point in self.points:
                point.require_own()
        if "embed" in self.ways and mixed:
            raise InputError("got an encoding that is added to embeddings for some layers", "it for all layers")
        axes = max((each.pairs.num_axes or 1 for point in self.points for each in point.own.values()), default=1)
        if "embed" in self.ways and axes > 1:
            got = f"got {self.base} for {name}, whose tokens have positions on {axes} axes"
            raise InputError(got, "an encoding in its attention, such as locant.ALiBi(num_heads=...)")
        if self.foreign and not self.points and not self.biases:
            own = [path for path, _ in self.tables]
            if len(own) != 1:
                why = f"with {len(own)} tables of positions, expected one" if own else _why_it_stays(self.owner)
                raise InputError(f"got {name} {why}", REMOVABLE)
            if mixed:
                got = f"got some layers of {name}, whose positions are added once, before the first of them"
                raise InputError(got, "one encoding for all layers")
        if self.foreign and (mixed or "scores" in self.ways) and sorted(self.modules) != list(range(len(self.plan))):
            got = f"got {name}, whose attention modules are not found layer by layer"
            raise InputError(got, "one encoding for all layers that rotates as the model's own does")
        if self.calls_ours:
            require_point(self.owner, has_known_bias=bool(self.biases))
        for module in (each for layer in self.modules.values() for each in layer if mixed and self.points):
            if ANGLES not in _names(module):
                got = f"got {name}, whose {type(module).__name__} is given no angles"
                raise InputError(got, "one encoding for all layers")

    def _hold(self) -> None:
        """Register the encodings in the model, and write them into its configuration."""
        parameters = [*self.owner.parameters()]
        first = next((each for each in parameters if not each.is_meta), None)  # offloaded ones hold no numbers
        held = nn.Module()  # no list: PEFT trains those that are named in modules_to_save, but for lists
        for place, encoding in enumerate(self.foreign):
            held.add_module(str(place), encoding)
        device = None if first is None else first.device  # one without numbers would take those of the encodings
        setattr(self.owner, HOLDER, held.to(device=device, dtype=parameters[0].dtype))
        self.undo.append(lambda: delattr(self.owner, HOLDER))
        self.told = record(self.model.config, self.foreign, [self._place(each) for each in self.plan], self.angles)
        self.undo.append(lambda: forget(self.model.config))

    def _place(self, encoding: PositionEncoding | None) -> int | None:
        return next((place for place, each in enumerate(self.foreign) if each is encoding), None)

    def _attach_scores(self) -> None:
        before = self.owner.config._attn_implementation
        through = ("scores", "embed") if self.biases else ("scores",)  # an own bias is left out of every layer
        for layer, modules in self.modules.items():
            place = self._place(self.plan[layer]) if self.ways[layer] in through else None
            for module in modules:
                own, of_length = self._own_bias(layer), self.of_length[place]
                self._attach_point(module, AttentionPoint(self.owner, place, before, of_length, own))
        for point in self.biases:
            for module in point.cross:
                self._attach_point(module, AttentionPoint(self.owner, None, before, self.of_length[None]))
            if self._gets_table(point):
                self.undo += [hook.remove for hook in point.leave_matrix_out()]
        self.undo += [hook.remove for hook in name_our_function(self.owner, self.places)]
        self.undo.append(lambda: name_again(self.owner, before))

    def _attach_point(self, module: nn.Module, point: AttentionPoint) -> None:
        setattr(module, KEY, point)
        self.undo.append(lambda: delattr(module, KEY))

    def _point_of(self, layer: int) -> BiasPoint:
        return [point for point in self.biases for _ in point.layers][layer]

    def _own_bias(self, layer: int) -> GivenBias | None:
        """What the layer has of its own, where it is to know: to leave it out, or to add it by its table."""
        if not self.biases:
            return None
        point = self._point_of(layer)
        return point.own if self.plan[layer] is not None or self._gets_table(point) else None

    def _gets_table(self, point: BiasPoint) -> bool:
        """Whether no layer of the stack needs the matrix that the model's own code makes of its table."""
        plan = [each for layer, each in enumerate(self.plan) if self._point_of(layer) is point]
        return self.angles == "exact" or None not in plan

    def _attach_angles(self) -> None:
        for point in self.points:
            encodings: Mapping[str | None, PositionEncoding] = point.own
            if self.base is not None:
                encodings = dict.fromkeys(point.own, self._rotating(0))
            hook = RotaryHook(encodings, point.form, _names(point.module))
            self.undo.append(point.module.register_forward_hook(hook, with_kwargs=True).remove)
        if self.base is not None or not self.points:
            return
        for layer, modules in self.modules.items():
            place = self._place(self.plan[layer])
            for module in modules if place is not None else ():
                hook = LayerHook(self._rotating(layer), self.points[0].form, _names(module), self.of_length[place])
                self.undo.append(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def _rotating(self, layer: int) -> PositionEncoding:
        """What the model's own code rotates this layer by: nothing, where the encoding goes through another point."""
        encoding = self.plan[layer] if self.ways[layer] == "angles" else None
        return PositionEncoding() if encoding is None else encoding

    def _sentence(self, layer: int) -> str:
        place = self._place(self.plan[layer])
        untold = place is not None and self.told[place] is None
        where = f"layer {layer} ({self._point_of(layer).kind})" if self.biases else f"layer {layer}"
        again = "; saved, it is to be given again: load_swapped(folder, encoding=...)" if untold else ""
        return f"{where}: {self._what(layer)}{again}"

    def _what(self, layer: int) -> str:
        encoding, way = self.plan[layer], self.ways[layer]
        if encoding is None:
            return f"its own, {self._own_bias_in_words(layer) if self.biases else self._own_angles_in_words()}"
        before = "its rotary positions" if self.points else "the model's table of positions"
        out = f"{'its learned bias' if self.biases else before} taken out"
        if type(encoding) is PositionEncoding:
            return f"no positions, {out}"
        if way == "angles":
            return f"{encoding} in the place of {next(iter(self.points[0].own.values()))}"
        where = "added to the token embeddings" if way == "embed" else "in its attention scores"
        return f"{' '.join(str(encoding).split())} {where}, {out}"

    def _own_angles_in_words(self) -> str:
        kinds = [*dict.fromkeys(str(each) for point in self.points for each in point.own.values())]
        own = f"{' or '.join(kinds)}, where its code rotates"
        off = max(point.off for point in self.points)
        if off == 0:
            return own
        rounded = f"its frequencies were rounded to 16 bits, its angles off by up to {off:.2g}"
        return f"{own}; {rounded} in the first {NEAR} tokens, and by more in later ones"

    def _own_bias_in_words(self, layer: int) -> str:
        point = self._point_of(layer)
        how = "without a matrix where that takes less" if self._gets_table(point) else "by its own code"
        return f"T5Bias({point.own.extra_repr()}), added {how}"


def _why_it_stays(owner: Any) -> str:
    """Of a model without rotary positions, without a table and without T5's bias, in words."""
    if has_learned_bias(owner):
        return "with a learned bias in its attention, which cannot be taken out"
    if any("alibi" in name for name in dir(owner)):
        return "with ALiBi of its own code: its attention makes its scores itself and calls no function by name"
    return "with positions of an unknown kind, which cannot be taken out"


def _names(module: nn.Module) -> list[str]:
    return [*inspect.signature(module.forward).parameters]


def _require_model(model: Any) -> Any:
    """The model itself, also inside of PEFT's."""
    require("transformers", "swapping encodings")
    from transformers import PreTrainedModel

    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(inner, PreTrainedModel):
        got = f"got {shown(model) if len(repr(model)) < 80 else type(model).__name__}, expected a model of transformers"
        raise InputError(got, "transformers.AutoModelForCausalLM.from_pretrained(folder)")
    if not any(cls.__module__.startswith("transformers.models.") for cls in type(inner).__mro__):
        got = f"got {type(inner).__name__}, with code of its own ({type(inner).__module__})"
        raise InputError(got, "a model whose class is part of transformers")
    if any(getattr(module, MARK, False) for module in inner.modules()):
        got = f"got {type(inner).__name__}, which is swapped already, or is a copy of a swapped model"
        raise InputError(got, "handle.undo() before the next swap; copy or save a model before it is swapped")
    return inner


def _way(encoding: Any, layer: int, owner: Any, points: Sequence[RotaryPoint], *, learned: bool = False) -> str:
    """``own``, or through which point the encoding goes: ``angles``, ``scores`` or ``embed``."""
    if encoding is None:
        return "own"
    if type(encoding) is PositionEncoding:
        return "scores" if learned else "angles"
    _require_sizes(encoding, layer, owner)
    if reads_hidden_states(encoding):
        got = f"got {encoding}, which reads the hidden states of each layer: the attention function is given none"
        raise InputError(got, "an encoding that reads none, such as locant.ALiBi(num_heads=...)")
    if "embed" in encoding.doors():
        return "embed"
    rotary: Any = encoding.rotary if goes_by_class(encoding) else encoding
    _require_one_length(encoding)
    if type(rotary) is not Rotary:
        return "scores"
    own = [rotary for point in points for rotary in point.own.values()]
    # Angles cannot tell a temperature of the queries; where the model has the same, its own code applies it.
    told = all(rotary.temperature in (None, each.temperature) for each in own)
    known = all(point.form.name is not None for point in points)
    if rotary is encoding and own and told and known and all(rotary.pairs == each.pairs for each in own):
        return "angles"
    layout = own[0].pairs.layout if own else rotary.pairs.layout
    if layout != rotary.pairs.layout:
        got = f"got {encoding} for weights that were trained with layout={layout!r}"
        raise RangeError(got, f"layout={layout!r}")
    return "scores"


def _require_one_length(encoding: PositionEncoding) -> None:
    """Raise where a scaling that depends on the length is inside of what cannot be made anew for every length."""
    for each in encoding.modules():
        if type(encoding) is Rotary or not isinstance(each, Rotary) or each.seq_len is not None:
            continue
        if each.scaling.length_that_matters is not None:
            got = f"got {encoding}, whose scaling depends on the length, and is not made anew for every length"
            raise InputError(got, "it with rotary.for_length(seq_len), for the longest sequence")


def _require_sizes(encoding: Any, layer: int, owner: Any) -> None:
    """Raise unless the encoding is for as many heads, as wide, as a layer has, or for token embeddings as wide."""
    if isinstance(encoding, RoPEPlusPlus):
        got = "got RoPEPlusPlus, which makes twice as many heads as the projection after the model's attention takes"
        raise RangeError(got, "locant.lab.Decoder, whose projection is as wide; or locant.Rotary")
    read = partial(attribute, owner.config, layer=layer)
    heads, width, hidden = (read(name) for name in ("num_attention_heads", "head_dim", "hidden_size"))
    if heads is None or (width or hidden) is None:
        missing = "num_attention_heads" if heads is None else "head_dim and no hidden_size"
        got = f"got {type(owner).__name__}, whose configuration has no {missing}"
        raise InputError(got, "use a model with attention, whose configuration states its heads")
    width, latent = width or hidden // heads, read("qk_rope_head_dim")
    if not has_bias(encoding):  # what turns queries and keys counts the heads of keys
        heads = read("num_key_value_heads") or heads
    sizes = {"num_heads": (heads,), "head_dim": (width, latent)}
    if "embed" in encoding.doors():
        sizes["d_model"] = (owner.get_input_embeddings().weight.shape[-1],)
    for name, of_model in sizes.items():
        has = getattr(encoding, name, None)
        if has is not None and has not in of_model:
            place = f"layer {layer}" if getattr(owner.config, "is_heterogeneous", False) else "a model"
            raise RangeError(f"got {encoding} for {place} with {name}={of_model[0]}", f"{name}={of_model[0]}")
