"""`swap` gives a `transformers` model another position encoding, and can restore the model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from locant.arguments import one_of
from locant.errors import InputError
from locant.positions.angles import AngleMode
from locant.positions.base import PositionEncoding
from locant.swapping.added_point import remove_table
from locant.swapping.attention_function import AttentionPoint
from locant.swapping.attention_point import install_function, require_point
from locant.swapping.model_points import SWAPPED_MARK, ModelPoints, find_points
from locant.swapping.new_encoding import NewEncoding, hold_encodings
from locant.swapping.plan import LayerPlan, copy_configurations, encodings_by_layer, record
from locant.swapping.routes import Route, choose_route
from locant.swapping.token_places import PlacesHooks


def swap(
    model: Any,
    encoding: PositionEncoding | None = None,
    *,
    layers: LayerPlan | None = None,
    angles: AngleMode = "exact",
) -> Swap:
    """Give a `transformers` model another position encoding, or make its own angles exact, in place until `undo`.

    No forward and no class is replaced. A hook after the rotary module gives every layer other angles. An encoding that
    adds to the scores, or rotates in a way that the model's code cannot, goes through `AttentionInterface`. An encoding
    that adds to the token embeddings goes through a hook after them. The old positions are removed: rotary positions, a
    table of learned positions, or the bias of T5 and its relatives (mT5, UMT5, ByT5, Switch Transformers).

    The encoding's parameters become parameters of the model, in the attribute `locant` of its inner model, and
    `save_pretrained` writes them. `locant.checkpoints.load_swapped` loads the saved folder, and `from_pretrained` alone
    raises an error. The model gets and keeps a copy of its configuration, so that other models with the same
    configuration do not change. If every layer keeps its own encoding, the configuration has no new entry, and a saved
    folder is a folder of the original model.

    The layers of T5 are numbered consecutively, and the encoder's layers come first. Their type is ``"encoder"`` or
    ``"decoder"``. Cross-attention has no positions and does not get any. T5's own bias gives the same bits as before,
    with one exception. With 2^20 scores or more (over all heads), rows without padding do not use the matrix of the
    bias, and their results agree up to rounding. A model that is trained or compiled always uses the matrix. With
    ``angles="float32"`` the model's own code computes the whole bias.

    Args:
        model: any model of `transformers` whose extension points are known. You may compile it, shard it or give it
            adapters afterwards. A copy of a swapped model stays swapped: `undo` restores only the model passed here.
        encoding: the encoding of every layer, or ``None`` for the model's own encoding. It is not copied. It is moved
            to the model's device and dtype and trained there, and `undo` leaves it there.
        layers: a plan, if layers differ. ``{"every": 4, "encoding": other}`` gives every fourth layer the other
            encoding. A function of a layer's index and type (from ``config.layer_types``) returns the encoding of each
            layer, or ``None`` if the layer keeps its own encoding.
        angles: the angles of the model's own encoding: ``"exact"``, or ``"float32"`` for the same bits as before. Other
            encodings are built with their own angles.

    Returns:
        A handle. `undo`, or leaving a ``with`` block, restores the model. `sentences` describes each layer.

    Raises:
        InputError: the model cannot be swapped. For example, it has no rotary positions although its own encoding is
            requested, its class is not part of `transformers`, or its attention is fused. The error states the reason,
            and the model is unchanged.
        RangeError: the sizes of the encoding do not fit the model, or the plan does not match any layer.

    Costs: the model still computes its own angles. A bias is added as a matrix if rows are padded, packed or in a
    window. If a scaling depends on the length, every call reads the length from the device, outside of graphs.

    The caller's position ids are used with or without a mask, and are stored with the keys of a cache. A static cache
    (``"static"``) does not store them. Its keys are assumed to count up to the last query without a gap.

    >>> import locant
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=99, **sizes))
    >>> with swap(model, locant.ALiBi(num_heads=4)) as swapped:
    ...     swapped.sentences[0]
    'layer 0: ALiBi(num_heads=4) in its attention scores, its rotary positions removed'
    """
    one_of("angles", angles, ("exact", "float32"), "angles='exact'")
    points = find_points(model, angles)
    if encoding is None and layers is None:
        points.require_own_positions()
    plan = encodings_by_layer(encoding, layers, points.layer_types)
    if angles != "exact" and None not in plan:
        got = f"got angles={angles!r} and encodings for all layers, but it applies only to the model's own encoding"
        raise InputError(got, f"build the encoding with it, such as locant.Rotary(..., angles={angles!r})")
    encodings = {id(each): each for each in plan if each is not None}.values()  # without repetitions
    new = {id(each): NewEncoding(points.owner, index, each) for index, each in enumerate(encodings)}
    routes = [choose_route(points, layer, new.get(id(each))) for layer, each in enumerate(plan)]
    _require(points, routes)
    return _attach(points, routes, [*new.values()])


class Swap:
    """A handle that can restore a swapped model.

    Args:
        undo: a stack of callbacks that undo every step.
        sentences: a description of each layer's encoding.
    """

    def __init__(self, undo: ExitStack, sentences: Sequence[str]) -> None:
        self._undo = undo
        self.sentences = tuple(sentences)

    def undo(self) -> None:
        """Restore the model, bit for bit. A second call does nothing."""
        self._undo.close()

    def __enter__(self) -> Swap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def __repr__(self) -> str:
        return "\n".join(self.sentences)


def _is_mixed(routes: Sequence[Route]) -> bool:
    """Return whether layers have different encodings."""
    return any(route.new_encoding is not routes[0].new_encoding for route in routes)


def _needs_function(routes: Sequence[Route]) -> bool:
    """Return whether the model has to call our attention function."""
    return any(route.needs_function for route in routes)


def _require(points: ModelPoints, routes: Sequence[Route]) -> None:
    """Raise `InputError` unless the model has all points that the routes need. The model is not changed."""
    is_mixed = _is_mixed(routes)
    for route in routes:
        route.require(is_mixed=is_mixed)
    if any(route.new_encoding is not None for route in routes):
        points.require_removable()
    if is_mixed:
        points.require_different_layers()
    if is_mixed or any(route.in_attention is not None for route in routes):
        points.require_modules()
    if _needs_function(routes):
        require_point(points.owner, has_known_bias=bool(points.biases))
    if any(route.reads_tokens for route in routes):
        points.require_forward_arguments()


def _attach(points: ModelPoints, routes: Sequence[Route], encodings: Sequence[NewEncoding]) -> Swap:
    """Attach every route. If a step fails, undo the previous steps."""
    model, owner = points.model, points.owner
    with ExitStack() as undo:
        setattr(owner, SWAPPED_MARK, True)
        undo.callback(delattr, owner, SWAPPED_MARK)
        if encodings or _needs_function(routes):
            copy_configurations(model)
        if encodings:
            hold_encodings(owner, encodings, undo)
            record(model.config, encodings, [route.new_encoding for route in routes], points.angles, undo)
            for path in points.tables:
                remove_table(owner, path, undo)
        if _needs_function(routes):
            _attach_to_attention(points, routes, undo)
        if _is_mixed(routes):
            for point in points.rotary:  # for the layers that keep the model's own angles
                point.attach(point.own, undo)
            for route in routes:
                route.attach_to_layer(undo)
        else:
            routes[0].attach_to_model(undo)
        sentences = [route.describe() for route in routes]
        return Swap(undo.pop_all(), sentences)


def _attach_to_attention(points: ModelPoints, routes: Sequence[Route], undo: ExitStack) -> None:
    """Let the model call our attention function, and pass the data of the layers to this function."""
    previous = points.owner.config._attn_implementation
    for route in routes:
        route.attach_to_attention(undo, previous)
    for point in points.biases:
        for module in point.cross:
            AttentionPoint(None, previous).attach(module, undo)
        own_biases = [route.own_bias for route, each in zip(routes, points.bias_by_layer, strict=True) if each is point]
        if None not in own_biases:  # no layer needs the matrix that the model's own code makes from the table
            point.pass_table(undo)
    if not points.biases:  # T5 and its relatives have no position ids
        PlacesHooks(points.forward_arguments[0]).attach(points.owner, undo)
    install_function(points.owner, undo)
