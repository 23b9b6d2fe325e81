"""`swap` gives a `transformers` model another position encoding, and takes it out again."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal

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
    T5BiasWithoutTable,
    bias_points,
    layer_types,
    own_tables,
    remove_table,
    self_attention,
)
from locant.swapping.attention_point import (
    KEY,
    AttentionPoint,
    PlacesHooks,
    attention_modules,
    has_learned_bias,
    install_function,
    require_point,
    restore_function,
    rotates_by_class,
)
from locant.swapping.plan import LayerPlan, copy_configurations, encodings_by_layer, forget, record
from locant.swapping.rotary_point import (
    ANGLES,
    NEAR,
    ForLongestRow,
    LayerHook,
    RotaryHook,
    RotaryPoint,
    owner_around,
    rotary_points,
)

HOLDER = "locant"
"""The attribute of a model that holds its new encodings, so that their parameters are trained and saved with it."""

MARK = "_locant_swapped"

REMOVABLE = "use a model with rotary positions, with one table of learned positions, or with T5's bias"
"""The positions that an encoding can replace."""

Injection = Literal["own", "angles", "scores", "embed"]
"""How a layer gets its encoding: it keeps its own, or the new one replaces its angles, goes into its scores, or is
added to the token embeddings."""


def swap(
    model: Any,
    encoding: PositionEncoding | None = None,
    *,
    layers: LayerPlan | None = None,
    angles: AngleMode = "exact",
) -> Swap:
    """Give a `transformers` model another position encoding, or its own with exact angles, in place until `undo`.

    No forward and no class is replaced. A hook after the rotary module gives every layer other angles. An encoding that
    adds to the scores, or rotates in a way that the model's code cannot, goes through `AttentionInterface`. An encoding
    that adds to the token embeddings goes through a hook after them. The old positions are removed: rotary positions, a
    table of learned positions, or the bias of T5 and its relatives (mT5, UMT5, ByT5, Switch Transformers).

    The encoding's parameters become parameters of the model, as `locant` of its inner model, and `save_pretrained`
    writes them. `locant.checkpoints.load_swapped` loads such a folder, and `from_pretrained` alone raises an error. The
    model gets and keeps a copy of its configuration, so that other models with the same configuration do not change. If
    every layer keeps its own encoding, nothing is written, and a saved folder is a folder of the original model.

    The layers of T5 are numbered consecutively, the encoder's first, and their type is ``"encoder"`` or ``"decoder"``.
    Cross-attention has no positions and gets none. T5's own bias gives the same bits as before. From 2^20 scores on
    (over all heads), rows without padding use no matrix of the bias and agree up to rounding, unless the model is
    trained or compiled. With ``angles="float32"`` the model's own code computes the whole bias.

    Args:
        model: any model of `transformers` whose extension points are known. You may compile it, shard it or give it
            adapters afterwards. A copy of a swapped model stays swapped: `undo` restores only the model passed here.
        encoding: the encoding of every layer, ``None`` for the model's own. It is not copied. It is moved to the
            model's device and dtype and trained there, and `undo` leaves it there.
        layers: a plan, if layers differ. ``{"every": 4, "encoding": other}`` gives every fourth layer the other
            encoding. A function of a layer's index and type (from ``config.layer_types``) returns the encoding of each
            layer, ``None`` for its own.
        angles: for the model's own encoding: ``"exact"``, or ``"float32"`` for the same bits as before. Other encodings
            are built with their own angles.

    Returns:
        A handle. `undo`, or leaving a ``with`` block, restores the model. `sentences` describes each layer.

    Raises:
        InputError: the model cannot be swapped, and the error names the reason: it has no rotary positions although its
            own encoding is requested, its class is not part of `transformers`, or its attention is fused. Nothing has
            changed then.
        RangeError: the encoding has other sizes than the model, or the plan fits no layer.

    Costs: the model still computes its own angles. A bias is added as a matrix if rows are padded, packed or in a
    window. If a scaling depends on the length, every call reads the length from the device, outside of graphs.

    The caller's position ids are used with or without a mask, and kept with the keys of a cache. A static cache
    (``"static"``) keeps none: its keys are assumed to count up to the last query without a gap.

    >>> import locant
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=99, **sizes))
    >>> with swap(model, locant.ALiBi(num_heads=4)) as swapped:
    ...     swapped.sentences[0]
    'layer 0: ALiBi(num_heads=4) in its attention scores, its rotary positions removed'
    """
    one_of("angles", angles, ("exact", "float32"), "angles='exact'")
    text = _require_model(model)
    points = rotary_points(text, angles=angles)
    biases = [] if points else bias_points(text)
    # Take the innermost model, which has the layers: OPT's classes do not call the model around it.
    tables = [] if points or biases else own_tables(text)
    owner: Any = points[0].owner if points else text.base_model
    if len(tables) == 1:
        owner = owner_around(text, tables[0][0])
    if any(point.owner is not owner for point in points):
        got = f"got {type(model).__name__} with rotary modules of {len({id(point.owner) for point in points})} models"
        raise InputError(got, "swap the inner model that you mean, such as model.model.decoder")
    if encoding is None and layers is None and not points and not biases:
        got = f"got {type(model).__name__}, which has no rotary positions to compute exactly"
        raise InputError(got, "swap(model, encoding) with an encoding of locant" if len(tables) == 1 else REMOVABLE)
    plan = encodings_by_layer(encoding, layers, layer_types(biases, owner.config))
    if angles != "exact" and None not in plan:
        got = f"got angles={angles!r} and encodings for all layers, but it applies only to the model's own encoding"
        raise InputError(got, f"build the encoding with it, such as locant.Rotary(..., angles={angles!r})")
    return _Attachment(model, owner, points, biases, plan, angles).attach()


class Swap:
    """A handle of a swapped model, which can restore the model.

    Args:
        undo: functions that undo one step each, in the order of the steps.
        sentences: a description of each layer's encoding.
    """

    def __init__(self, undo: Sequence[Callable[[], object]], sentences: Sequence[str]) -> None:
        self._undo = list(undo)
        self.sentences = tuple(sentences)

    def undo(self) -> None:
        """Restore the model, bit for bit. A second call does nothing."""
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


class _Attachment:
    """Attach encodings to a model. The constructor checks everything, before `attach` changes anything."""

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
        self.for_longest = {index: ForLongestRow() for index in (None, *range(len(self.foreign)))}
        self.tables = [] if points or biases else own_tables(owner)
        self.injections = [
            _injection(each, layer, owner, points, has_t5_bias=bool(biases)) for layer, each in enumerate(plan)
        ]
        self.base = plan[0] if all(each is plan[0] for each in plan) else None
        self.modules = self_attention(biases) or (attention_modules(owner) if self.foreign else {})
        self.calls_ours = "scores" in self.injections or bool(biases and (self.foreign or angles == "exact"))
        self._require()
        generates = model.can_generate()
        stacks = [point.stack for point in biases] or [owner]
        self.embeddings = [
            EmbeddingPoint(owner, 0, stack, generates=generates) for stack in stacks if "embed" in self.injections
        ]
        self.places = PlacesHooks(owner, generates=generates) if self.calls_ours and not biases else None
        self.descriptions: Sequence[object] = ()
        self.undo: list[Callable[[], object]] = []

    def attach(self) -> Swap:
        """Attach every encoding, and return the handle."""
        setattr(self.owner, MARK, True)
        self.undo.append(lambda: delattr(self.owner, MARK))
        if self.foreign or self.calls_ours:
            copy_configurations(self.model)
        if self.foreign:
            self._register_encodings()
        if self.calls_ours:
            self._attach_scores()
        self.undo += [hook.remove for point in self.embeddings for hook in point.attach()]
        if self.foreign:
            self.undo += [remove_table(self.owner, path) for path, _ in self.tables]
        self._attach_angles()
        return Swap(self.undo, [self._sentence(layer) for layer in range(len(self.plan))])

    def _require(self) -> None:
        name = type(self.model).__name__
        mixed = len({id(each) for each in self.plan}) > 1
        if None in self.plan:
            for point in self.points:
                point.require_own()
        if "embed" in self.injections and mixed:
            got = "got an encoding for some layers that is added to the token embeddings"
            raise InputError(got, "use it for all layers")
        axes = max((each.pairs.num_axes or 1 for point in self.points for each in point.own.values()), default=1)
        if "embed" in self.injections and axes > 1:
            got = f"got {self.base} for {name}, whose tokens have positions on {axes} axes"
            raise InputError(got, "use an encoding in the attention, such as locant.ALiBi(num_heads=...)")
        if self.foreign and not self.points and not self.biases:
            if len(self.tables) != 1:
                count = len(self.tables)
                reason = f"with {count} tables of positions, expected one" if count else _irremovable(self.owner)
                raise InputError(f"got {name} {reason}", REMOVABLE)
            if mixed:
                got = f"got an encoding for some layers of {name}, which adds positions once, before its first layer"
                raise InputError(got, "use one encoding for all layers")
        needs_modules = self.foreign and (mixed or "scores" in self.injections)
        if needs_modules and sorted(self.modules) != list(range(len(self.plan))):
            got = f"got {name}, whose attention modules cannot be assigned to its layers"
            raise InputError(got, "use one encoding for all layers that rotates like the model's own")
        if self.calls_ours:
            require_point(self.owner, has_known_bias=bool(self.biases))
        for module in (each for layer in self.modules.values() for each in layer if mixed and self.points):
            if ANGLES not in _parameter_names(module):
                got = f"got {name}, whose {type(module).__name__} receives no angles"
                raise InputError(got, "use one encoding for all layers")

    def _register_encodings(self) -> None:
        """Register the encodings in the model, and write them into its configuration."""
        parameters = [*self.owner.parameters()]
        first = next((each for each in parameters if not each.is_meta), None)  # offloaded parameters hold no numbers
        holder = nn.Module()  # not a list: PEFT does not train lists that modules_to_save names
        for index, encoding in enumerate(self.foreign):
            holder.add_module(str(index), encoding)
        device = None if first is None else first.device  # the meta device would delete the encodings' numbers
        setattr(self.owner, HOLDER, holder.to(device=device, dtype=parameters[0].dtype))
        self.undo.append(lambda: delattr(self.owner, HOLDER))
        indices = [self._index(each) for each in self.plan]
        self.descriptions = record(self.model.config, self.foreign, indices, self.angles)
        self.undo.append(lambda: forget(self.model.config))

    def _index(self, encoding: PositionEncoding | None) -> int | None:
        return next((index for index, each in enumerate(self.foreign) if each is encoding), None)

    def _attach_scores(self) -> None:
        previous = self.owner.config._attn_implementation
        # T5's own bias is left out of every layer that gets another encoding.
        injections = ("scores", "embed") if self.biases else ("scores",)
        for layer, modules in self.modules.items():
            index = self._index(self.plan[layer]) if self.injections[layer] in injections else None
            for module in modules:
                own, for_longest = self._own_bias(layer), self.for_longest[index]
                self._attach_point(module, AttentionPoint(self.owner, index, previous, for_longest, own))
        for point in self.biases:
            for module in point.cross:
                self._attach_point(module, AttentionPoint(self.owner, None, previous, self.for_longest[None]))
            if self._uses_table(point):
                self.undo += [hook.remove for hook in point.pass_table()]
        self.undo += [hook.remove for hook in install_function(self.owner, self.places)]
        self.undo.append(lambda: restore_function(self.owner, previous))

    def _attach_point(self, module: nn.Module, point: AttentionPoint) -> None:
        setattr(module, KEY, point)
        self.undo.append(lambda: delattr(module, KEY))

    def _point_of(self, layer: int) -> BiasPoint:
        return [point for point in self.biases for _ in point.layers][layer]

    def _own_bias(self, layer: int) -> T5BiasWithoutTable | None:
        """Return the layer's own bias if its attention function must leave it out, or add it from its table."""
        if not self.biases:
            return None
        point = self._point_of(layer)
        return point.own if self.plan[layer] is not None or self._uses_table(point) else None

    def _uses_table(self, point: BiasPoint) -> bool:
        """Return whether no layer of the stack needs the matrix that the model's own code makes from its table."""
        plan = [each for layer, each in enumerate(self.plan) if self._point_of(layer) is point]
        return self.angles == "exact" or None not in plan

    def _attach_angles(self) -> None:
        for point in self.points:
            encodings: Mapping[str | None, PositionEncoding] = point.own
            if self.base is not None:
                encodings = dict.fromkeys(point.own, self._rotation(0))
            hook = RotaryHook(encodings, point.form, _parameter_names(point.module))
            self.undo.append(point.module.register_forward_hook(hook, with_kwargs=True).remove)
        if self.base is not None or not self.points:
            return
        for layer, modules in self.modules.items():
            index = self._index(self.plan[layer])
            for module in modules if index is not None else ():
                names, for_longest = _parameter_names(module), self.for_longest[index]
                hook = LayerHook(self._rotation(layer), self.points[0].form, names, for_longest)
                self.undo.append(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def _rotation(self, layer: int) -> PositionEncoding:
        """Return the encoding by which the model's own code rotates a layer: none, if it has another injection."""
        encoding = self.plan[layer] if self.injections[layer] == "angles" else None
        return PositionEncoding() if encoding is None else encoding

    def _sentence(self, layer: int) -> str:
        index = self._index(self.plan[layer])
        is_serializable = index is None or self.descriptions[index] is not None
        name = f"layer {layer} ({self._point_of(layer).kind})" if self.biases else f"layer {layer}"
        note = "" if is_serializable else "; to load it from a file, pass it again: load_swapped(folder, encoding=...)"
        return f"{name}: {self._describe_encoding(layer)}{note}"

    def _describe_encoding(self, layer: int) -> str:
        encoding, injection = self.plan[layer], self.injections[layer]
        if encoding is None:
            return f"its own, {self._describe_own_bias(layer) if self.biases else self._describe_own_angles()}"
        old = "its rotary positions" if self.points else "the model's table of positions"
        removal = f"{'its learned bias' if self.biases else old} removed"
        if type(encoding) is PositionEncoding:
            return f"no positions, {removal}"
        if injection == "angles":
            return f"{encoding} in place of {next(iter(self.points[0].own.values()))}"
        target = "added to the token embeddings" if injection == "embed" else "in its attention scores"
        return f"{' '.join(str(encoding).split())} {target}, {removal}"

    def _describe_own_angles(self) -> str:
        encodings = [*dict.fromkeys(str(each) for point in self.points for each in point.own.values())]
        own = f"{' or '.join(encodings)}, if its code rotates"
        error = max(point.rounding_error for point in self.points)
        if error == 0:
            return own
        rounded = f"its frequencies were rounded to 16 bits, and its angles are off by up to {error:.2g}"
        return f"{own}; {rounded} in the first {NEAR} tokens, and by more in later ones"

    def _describe_own_bias(self, layer: int) -> str:
        point = self._point_of(layer)
        how = "without a matrix if that takes less memory" if self._uses_table(point) else "by its own code"
        return f"T5Bias({point.own.extra_repr()}), added {how}"


def _irremovable(owner: Any) -> str:
    """Describe the positions of a model that has no rotary positions, no table and no T5 bias."""
    if has_learned_bias(owner):
        return "with a learned bias in its attention, which cannot be removed"
    if any("alibi" in name for name in dir(owner)):
        return "with ALiBi in its own code: its attention computes the scores itself and calls no function by name"
    return "with positions of an unknown kind, which cannot be removed"


def _parameter_names(module: nn.Module) -> list[str]:
    return [*inspect.signature(module.forward).parameters]


def _require_model(model: Any) -> Any:
    """Return the model, or the model inside a PEFT model, if it is a model of `transformers` that is not swapped."""
    require("transformers", "swapping encodings")
    from transformers import PreTrainedModel

    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(inner, PreTrainedModel):
        got = f"got {shown(model) if len(repr(model)) < 80 else type(model).__name__}, expected a model of transformers"
        raise InputError(got, "transformers.AutoModelForCausalLM.from_pretrained(folder)")
    if not any(cls.__module__.startswith("transformers.models.") for cls in type(inner).__mro__):
        got = f"got {type(inner).__name__}, whose code is not part of transformers ({type(inner).__module__})"
        raise InputError(got, "use a model whose class is part of transformers")
    if any(getattr(module, MARK, False) for module in inner.modules()):
        got = f"got {type(inner).__name__}, which is already swapped, or is a copy of a swapped model"
        raise InputError(got, "call handle.undo() before the next swap, and copy or save a model before you swap it")
    return inner


def _injection(
    encoding: Any, layer: int, owner: Any, points: Sequence[RotaryPoint], *, has_t5_bias: bool = False
) -> Injection:
    """Return how a layer gets its encoding, or raise if it cannot."""
    if encoding is None:
        return "own"
    if type(encoding) is PositionEncoding:
        return "scores" if has_t5_bias else "angles"
    _require_sizes(encoding, layer, owner)
    if reads_hidden_states(encoding):
        got = f"got {encoding}, which reads the hidden states of each layer: the attention function receives none"
        raise InputError(got, "use an encoding that reads none, such as locant.ALiBi(num_heads=...)")
    if "embed" in encoding.doors():
        return "embed"
    rotary: Any = encoding.rotary if rotates_by_class(encoding) else encoding
    _require_fixed_length(encoding)
    if type(rotary) is not Rotary:
        return "scores"
    own = [rotary for point in points for rotary in point.own.values()]
    # Angles cannot express a temperature of the queries. If the model has the same one, its own code applies it.
    fits_temperature = all(rotary.temperature in (None, each.temperature) for each in own)
    is_form_known = all(point.form.name is not None for point in points)
    fits_angles = fits_temperature and is_form_known and all(rotary.pairs == each.pairs for each in own)
    if rotary is encoding and own and fits_angles:
        return "angles"
    layout = own[0].pairs.layout if own else rotary.pairs.layout
    if layout != rotary.pairs.layout:
        got = f"got {encoding} for weights that were trained with layout={layout!r}"
        raise RangeError(got, f"layout={layout!r}")
    return "scores"


def _require_fixed_length(encoding: PositionEncoding) -> None:
    """Raise if a scaling depends on the length, but its encoding cannot be rebuilt for every length."""
    for each in encoding.modules():
        if type(encoding) is Rotary or not isinstance(each, Rotary) or each.seq_len is not None:
            continue
        if each.scaling.length_that_matters is not None:
            got = f"got {encoding}, whose scaling depends on the length, and which is not rebuilt for every length"
            raise InputError(got, "build it with rotary.for_length(seq_len), for the longest sequence")


def _require_sizes(encoding: Any, layer: int, owner: Any) -> None:
    """Raise `RangeError` unless the encoding has the layer's number and width of heads, or the width of embeddings."""
    if isinstance(encoding, RoPEPlusPlus):
        got = "got RoPEPlusPlus, which makes twice as many heads as the projection after the model's attention takes"
        raise RangeError(got, "use locant.lab.Decoder, which has a wider projection, or locant.Rotary")
    config_value = partial(attribute, owner.config, layer=layer)
    heads, width, hidden = (config_value(name) for name in ("num_attention_heads", "head_dim", "hidden_size"))
    if heads is None or (width or hidden) is None:
        missing = "num_attention_heads" if heads is None else "head_dim and no hidden_size"
        got = f"got {type(owner).__name__}, whose configuration has no {missing}"
        raise InputError(got, "use a model with attention, whose configuration states its heads")
    width, latent = width or hidden // heads, config_value("qk_rope_head_dim")
    if not has_bias(encoding):  # a rotation of queries and keys counts the heads of keys
        heads = config_value("num_key_value_heads") or heads
    sizes = {"num_heads": (heads,), "head_dim": (width, latent)}
    if "embed" in encoding.doors():
        sizes["d_model"] = (owner.get_input_embeddings().weight.shape[-1],)
    for name, allowed in sizes.items():
        size = getattr(encoding, name, None)
        if size is not None and size not in allowed:
            target = f"layer {layer}" if getattr(owner.config, "is_heterogeneous", False) else "a model"
            raise RangeError(f"got {encoding} for {target} with {name}={allowed[0]}", f"{name}={allowed[0]}")
