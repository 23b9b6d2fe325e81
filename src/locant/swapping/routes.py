"""The routes by which a layer can get its encoding. Each route is a class, and each layer has an object of one class.

| class | what happens |
|---|---|
| `KeepOwn` | the layer keeps the model's own encoding |
| `RemovePositions` | the layer loses its positions |
| `ReplaceAngles` | the model's own code rotates by other angles |
| `AddToScores` | our attention function rotates and biases |
| `AddToEmbeddings` | the encoding is added to the token embeddings |

`choose_route` returns such an object. Its `attach_` methods change the model if necessary. They also push callbacks
onto a stack, which undo the changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from locant.errors import InputError, RangeError
from locant.models.config_values import attribute
from locant.positions.base import PositionEncoding, has_bias, reads_hidden_states
from locant.positions.encodings.rope_plus_plus import RoPEPlusPlus
from locant.positions.encodings.rotary import Rotary
from locant.swapping.added_point import EmbeddingPoint, T5BiasWithoutTable
from locant.swapping.attention_function import AttentionPoint, rotates_by_class
from locant.swapping.model_points import ModelPoints
from locant.swapping.new_encoding import NewEncoding
from locant.swapping.rotary_point import NUM_COMPARED, LayerHook, RotaryPoint


class Route:
    """The route by which one layer gets its encoding. This is the base class.

    Args:
        points: the points of the model.
        layer: the index of the layer.
        new_encoding: the new encoding of the layer, or ``None`` if the layer keeps its own encoding.
    """

    def __init__(self, points: ModelPoints, layer: int, new_encoding: NewEncoding | None) -> None:
        self.points = points
        self.layer = layer
        self.new_encoding: Any = new_encoding

    @property
    def encoding(self) -> Any:
        return None if self.new_encoding is None else self.new_encoding.encoding

    @property
    def rotation(self) -> PositionEncoding:
        """The encoding by which the model's own code rotates this layer. By default it does not rotate."""
        return PositionEncoding()

    @property
    def in_attention(self) -> NewEncoding | None:
        """The encoding that our attention function applies. In T5 it replaces the model's bias."""
        return self.new_encoding if self.points.biases else None

    @property
    def own_bias(self) -> T5BiasWithoutTable | None:
        """T5's own bias, if our attention function replaces it or computes it from its table."""
        return self.points.bias_by_layer[self.layer].own if self.points.biases else None

    @property
    def needs_function(self) -> bool:
        """Return whether the model has to call our attention function."""
        return self.in_attention is not None or self.own_bias is not None

    @property
    def reads_tokens(self) -> bool:
        """Return whether a hook reads the tokens of every call, by the names of the model's arguments."""
        return self.needs_function and not self.points.biases

    def require(self, *, is_mixed: bool) -> None:
        """Raise `InputError` if the model does not support this route, or supports it only for all layers at once."""

    def attach_to_model(self, undo: ExitStack) -> None:
        """Change the parts of the model that all layers share. This is called if all layers have this encoding."""
        for point in self.points.rotary:
            point.attach(self._rotations(point), undo)

    def attach_to_layer(self, undo: ExitStack) -> None:
        """Let the model's own code rotate this layer by other angles than the other layers."""
        if self.new_encoding is None or not self.points.rotary:
            return
        form, for_longest = self.points.rotary[0].form, self.new_encoding.for_longest
        for module in self.points.layers[self.layer]:
            LayerHook(self.rotation, form, module, for_longest).attach(module, undo)

    def attach_to_attention(self, undo: ExitStack, previous: str) -> None:
        """Store the layer's encoding and its previous attention function where our attention function finds them."""
        for module in self.points.layers.get(self.layer, ()):
            AttentionPoint(self.in_attention, previous, self.own_bias).attach(module, undo)

    def describe(self) -> str:
        """Describe the encoding of this layer in a sentence."""
        biases = self.points.bias_by_layer
        name = f"layer {self.layer} ({biases[self.layer].kind})" if biases else f"layer {self.layer}"
        is_serializable = self.new_encoding is None or self.new_encoding.description is not None
        note = "" if is_serializable else "; to load it from a file, pass it again: load_swapped(folder, encoding=...)"
        return f"{name}: {self._describe_encoding()}{note}"

    def _rotations(self, point: RotaryPoint) -> Mapping[str | None, PositionEncoding]:
        return dict.fromkeys(point.own, self.rotation)

    def _describe_encoding(self) -> str:
        raise NotImplementedError


class KeepOwn(Route):
    """The layer keeps the model's own encoding.

    Its angles may become exact, and its bias may be computed without a matrix.
    """

    @property
    def own_bias(self) -> T5BiasWithoutTable | None:
        return super().own_bias if self.points.angles == "exact" else None  # else the model's own code adds it

    def require(self, *, is_mixed: bool) -> None:
        for point in self.points.rotary:
            point.require_own()

    def _rotations(self, point: RotaryPoint) -> Mapping[str | None, PositionEncoding]:
        return point.own

    def _describe_encoding(self) -> str:
        return f"its own, {self._describe_bias() if self.points.biases else self._describe_angles()}"

    def _describe_bias(self) -> str:
        how = "by its own code" if self.own_bias is None else "without a matrix if that takes less memory"
        return f"T5Bias({self.points.bias_by_layer[self.layer].own.extra_repr()}), added {how}"

    def _describe_angles(self) -> str:
        encodings = f"{self.points.describe_own_rotation(self.layer)}, if its code rotates"
        error = max(point.rounding_error for point in self.points.rotary)
        if error == 0:
            return encodings
        rounded = f"its frequencies were rounded to 16 bits, and its angles are off by up to {error:.2g}"
        return f"{encodings}; {rounded} in the first {NUM_COMPARED} tokens, and by more in later ones"


class RemovePositions(Route):
    """The layer loses its positions and does not get others."""

    def _describe_encoding(self) -> str:
        return f"no positions, {self.points.old_positions} removed"


class ReplaceAngles(Route):
    """The model's own code rotates the layer by the angles of another rotary encoding."""

    @property
    def rotation(self) -> PositionEncoding:
        return self.encoding

    def _describe_encoding(self) -> str:
        return f"{self.encoding} in place of {self.points.describe_own_rotation(self.layer)}"


class AddToScores(Route):
    """Our attention function rotates queries and keys and adds a bias, and the model's own code does not rotate."""

    @property
    def in_attention(self) -> NewEncoding | None:
        return self.new_encoding

    def _describe_encoding(self) -> str:
        return f"{_to_one_line(self.encoding)} in its attention scores, {self.points.old_positions} removed"


class AddToEmbeddings(Route):
    """The encoding is added to the token embeddings, before the first layer."""

    @property
    def reads_tokens(self) -> bool:
        return True

    def require(self, *, is_mixed: bool) -> None:
        if is_mixed:
            got = "got an encoding for some layers that is added to the token embeddings"
            raise InputError(got, "use it for all layers")
        axes = max((each.pairs.num_axes or 1 for each in self.points.own_rotations), default=1)
        if axes > 1:
            got = f"got {self.encoding} for {self.points.name}, whose tokens have positions on {axes} axes"
            raise InputError(got, "use an encoding in the attention, such as locant.ALiBi(num_heads=...)")

    def attach_to_model(self, undo: ExitStack) -> None:
        super().attach_to_model(undo)
        for stack, arguments in zip(self.points.stacks, self.points.forward_arguments, strict=True):
            EmbeddingPoint(self.new_encoding, stack, arguments).attach(undo)

    def _describe_encoding(self) -> str:
        return f"{_to_one_line(self.encoding)} added to the token embeddings, {self.points.old_positions} removed"


def _to_one_line(encoding: PositionEncoding) -> str:
    return " ".join(str(encoding).split())


# ---------------------------------------------------------------------- choosing


def choose_route(points: ModelPoints, layer: int, new_encoding: NewEncoding | None) -> Route:
    """Return the route by which a layer gets its encoding.

    Raises:
        InputError: the encoding reads hidden states or cannot be rebuilt for every length, or the configuration does
            not state the heads.
        RangeError: the sizes or the layout of the encoding do not fit the model.
    """
    if new_encoding is None:
        return KeepOwn(points, layer, None)
    encoding: Any = new_encoding.encoding
    if type(encoding) is PositionEncoding:
        return RemovePositions(points, layer, new_encoding)
    _require_sizes(encoding, layer, points.owner)
    if reads_hidden_states(encoding):
        got = f"got {encoding}, which reads hidden states, but the attention function does not receive them"
        raise InputError(got, "use an encoding that does not read them, such as locant.ALiBi(num_heads=...)")
    if "embed" in encoding.methods():
        return AddToEmbeddings(points, layer, new_encoding)
    _require_fixed_length(encoding)
    if type(encoding) is Rotary and _fits_angles(encoding, points):
        return ReplaceAngles(points, layer, new_encoding)
    _require_layout(encoding, points)
    return AddToScores(points, layer, new_encoding)


def _fits_angles(encoding: Rotary, points: ModelPoints) -> bool:
    """Return whether the model's own code can rotate by the angles of an encoding."""
    rotations = points.own_rotations
    # Angles cannot express a temperature of the queries, but the model's own code may apply the same temperature.
    fits_temperature = all(encoding.temperature in (None, each.temperature) for each in rotations)
    is_form_known = all(point.form.name is not None for point in points.rotary)
    fits_pairs = all(encoding.pairs == each.pairs for each in rotations)
    return bool(rotations) and fits_temperature and is_form_known and fits_pairs


def _require_layout(encoding: Any, points: ModelPoints) -> None:
    """Raise `RangeError` if an encoding rotates pairs for which the weights were not trained."""
    rotary = encoding.rotary if rotates_by_class(encoding) else encoding
    if type(rotary) is Rotary and points.own_rotations:
        layout = points.own_rotations[0].pairs.layout
        if layout != rotary.pairs.layout:
            got = f"got {encoding} for weights that were trained with layout={layout!r}"
            raise RangeError(got, f"layout={layout!r}")


def _require_fixed_length(encoding: PositionEncoding) -> None:
    """Raise `InputError` if a scaling depends on the length, but its encoding cannot be rebuilt for every length."""
    for each in encoding.modules():
        if type(encoding) is Rotary or not isinstance(each, Rotary) or each.seq_len is not None:
            continue
        if each.scaling.length_threshold is not None:
            got = f"got {encoding}, whose scaling depends on the length, but which cannot be rebuilt for every length"
            raise InputError(got, "build it with rotary.for_length(seq_len), for the longest sequence")


def _require_sizes(encoding: Any, layer: int, owner: Any) -> None:
    """Raise `RangeError` unless the encoding fits the layer's heads, or the width of the embeddings.

    Raise `InputError` if the configuration does not state the heads.
    """
    if isinstance(encoding, RoPEPlusPlus):
        got = "got RoPEPlusPlus, which doubles the heads, but the model's output projection takes the usual number"
        raise RangeError(got, "use locant.lab.Decoder, which has a wider projection, or locant.Rotary")
    config_value = partial(attribute, owner.config, layer=layer)
    heads, width, hidden = (config_value(name) for name in ("num_attention_heads", "head_dim", "hidden_size"))
    if heads is None or (width or hidden) is None:
        missing = "num_attention_heads" if heads is None else "head_dim or hidden_size"
        got = f"got {type(owner).__name__}, whose configuration has no {missing}"
        raise InputError(got, "use a model with attention, whose configuration states its heads")
    width, latent = width or hidden // heads, config_value("qk_rope_head_dim")
    if not has_bias(encoding):  # `num_heads` of an encoding without a bias counts the heads of keys
        heads = config_value("num_key_value_heads") or heads
    sizes = {"num_heads": (heads,), "head_dim": (width, latent)}
    if "embed" in encoding.methods():
        sizes["d_model"] = (owner.get_input_embeddings().weight.shape[-1],)
    for name, allowed in sizes.items():
        size = getattr(encoding, name, None)
        if size is not None and size not in allowed:
            target = f"layer {layer}" if getattr(owner.config, "is_heterogeneous", False) else "a model"
            raise RangeError(f"got {encoding} for {target} with {name}={allowed[0]}", f"{name}={allowed[0]}")
