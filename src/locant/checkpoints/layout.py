"""Which dimensions of a head form a pair, changed in the weights: ``"half"`` to ``"interleaved"`` and back.

Rotary positions turn pairs of dimensions. Llama and NeoX pair dimension i with i + d/2, GPT-J and the paper 2i with
2i + 1, and weights trained with one are wrong with the other. A model computes the same scores in both layouts if the
rows of its projections of queries and keys, and the weights of their norms, change their order too. Values do not.

Nothing is computed with, rows are only moved: there and back gives the same bytes, whatever the dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Shaped
from torch import Tensor

from locant.checkpoints.head_shapes import HeadShape, head_shape_of, rotary_dialect_of
from locant.checkpoints.projections import (
    FUSED,
    NORMS,
    SEPARATE,
    Part,
    Run,
    layer_of,
    norm_runs,
    part_of,
    runs_of,
)
from locant.errors import InputError, ShapeError
from locant.kernels.rotary import Layout
from locant.positions.rope_config.config import config_dict
from locant.positions.rope_config.dialects import DIALECTS
from locant.positions.rope_config.sizes import Config, named_layout

__all__ = ["LayoutChange", "convert_layout", "row_order"]

LAYOUTS = ("half", "interleaved")
SHOWN = 8
"""How many names an error lists."""


def convert_layout(
    state_dict: Mapping[str, Shaped[Tensor, "*_"]],
    config: Config | object,
    *,
    to: Layout,
    source: Layout | None = None,
) -> dict[str, Shaped[Tensor, "*_"]]:
    """The same weights for a rotation in the other layout.

    Moves the rows of query and key projections, fused ones included, of their biases and LoRA's B, and the weights of
    query and key norms. Every other tensor is the same object in the result. Costs one copy of what is moved.

    Args:
        state_dict: names as in transformers; it and its tensors stay as they are.
        config: the model's configuration, as an object or as the dictionary of its ``config.json``.
        to: the layout to convert to; it has no default.
        source: the layout of these weights; by default what `config` says as ``rope_interleave``, and where it says
            nothing the layout of the architecture.

    Raises:
        InputError: weights that are in this layout already, a name that may belong to queries or keys and is not
            known, quantised weights, an architecture whose order of rows is not known.
        ShapeError: a tensor that does not have the rows that the configuration speaks of.

    >>> config = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2}
    >>> weights = {"layers.0.self_attn.q_proj.bias": torch.arange(8), "layers.0.self_attn.v_proj.bias": torch.arange(8)}
    >>> for tensor in convert_layout(weights, config, to="interleaved").values():
    ...     print(tensor)
    tensor([0, 2, 1, 3, 4, 6, 5, 7])
    tensor([0, 1, 2, 3, 4, 5, 6, 7])
    """
    change = LayoutChange(config, to=to, source=source)
    moved = change.moves({name: tuple(tensor.shape) for name, tensor in state_dict.items()})
    require_moves(moved)
    return {
        name: _reordered(tensor, moved[name], to) if name in moved else tensor for name, tensor in state_dict.items()
    }


class LayoutChange:
    """From which layout to which, for the tensors of one model.

    Args:
        config: the model's configuration.
        to: the layout to convert to.
        source: the layout of the weights; ``None`` to take the configuration's word for it.
    """

    def __init__(self, config: Config | object, *, to: Layout, source: Layout | None = None) -> None:
        self.facts = config_dict(config)
        self.architecture: str | None = self.facts.get("model_type")
        self.own: Layout | None = rotary_dialect_of(self.facts).layout
        for name, layout in (("to", to), ("source", source)):
            if layout not in (*LAYOUTS, *([None] if name == "source" else [])):
                raise InputError(f"got {name}={layout!r}, expected 'half' or 'interleaved'", "one of these")
        self.to: Layout = to
        self.source: Layout = self._stated() if source is None else source
        if self.source == to:
            said = f"source={source!r}" if source else "the configuration"
            other = "interleaved" if to == "half" else "half"
            raise InputError(
                f"got weights that are in the layout {to!r} already, as {said} says",
                f"the other layout, or source={other!r} (--from {other}) if these weights were converted before",
            )

    def moves(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[Run, ...]]:
        """The tensors whose rows change their order, and how these rows are divided into heads."""
        parts = {name: part_of(name, self.architecture) for name in shapes}
        self._require_known({name for name, (part, _) in parts.items() if part is Part.UNKNOWN})
        _require_plain({name for name, (part, _) in parts.items() if part is Part.QUANTISED})
        return {
            name: self._runs(name, shapes[name], component)
            for name, (part, component) in parts.items()
            if part in (Part.ROWS, Part.NORM)
        }

    def _runs(self, name: str, shape: Sequence[int], component: str) -> tuple[Run, ...]:
        heads = head_shape_of(self.facts, layer_of(name))
        norm = component in NORMS
        rows = math.prod(shape) if norm or ".lora_magnitude_vector" in name else shape[0] if shape else 0
        runs = norm_runs(component, heads, rows) if norm else runs_of(component, self.architecture, heads)
        expected = sum(run.rows for run in runs)
        if rows != expected:
            raise ShapeError(
                f"got {name} of shape {tuple(shape)}, expected {expected} {'weights' if norm else 'rows'} for "
                f"{_in_words(heads)}",
                "the configuration of this very model, and weights that are neither sharded nor quantised",
            )
        return runs

    def _stated(self) -> Layout:
        """The layout of the weights according to the configuration."""
        said = named_layout(self.facts)
        if said is not None:
            return said
        if self.own is None:
            raise InputError(
                f"got model_type={self.architecture!r}, whose layout is not known; known are "
                + ", ".join(sorted(DIALECTS)),
                "source='half' or 'interleaved' (--from), as its weights were trained with",
            )
        return self.own

    def _require_known(self, names: set[str]) -> None:
        if names:
            fused = sorted(name for name, orders in FUSED.items() if self.architecture in orders)
            raise InputError(
                f"got {_listed(names)}, which may belong to queries or keys of {self.architecture!r} and "
                f"{'is' if len(names) == 1 else 'are'} not known; known are {', '.join([*SEPARATE, *fused, *NORMS])}",
                "names as in transformers, without these tensors if they have nothing to do with it",
            )


def require_moves(moved: Mapping[str, object]) -> None:
    """A checkpoint without queries and keys is not what was meant."""
    if not moved:
        raise InputError(
            "got no tensor of queries or keys, so that there is nothing to convert", "names as in transformers"
        )


def row_order(run: Run, to: Layout) -> list[int]:
    """For every row of one head of a run in the layout `to`, which row it was before.

    >>> row_order(Run(count=1, width=6, start=1, turned=4), "interleaved")
    [0, 1, 3, 2, 4, 5]
    """
    half = run.turned // 2
    pairs = [(pair, pair + half) for pair in range(half)]
    if to == "interleaved":
        turned = [row for pair in pairs for row in pair]
    else:
        turned = [*range(0, run.turned, 2), *range(1, run.turned, 2)]
    end = run.start + run.turned
    return [*range(run.start), *(run.start + row for row in turned), *range(end, run.width)]


def _reordered(tensor: Tensor, runs: Sequence[Run], to: Layout) -> Tensor:
    order: list[int] = []
    for run in runs:
        head, first = row_order(run, to), len(order)
        order += [first + place * run.width + row for place in range(run.count) for row in head]
    flat = tensor.detach().reshape(len(order), tensor.numel() // len(order))
    return flat.index_select(0, torch.tensor(order, device=tensor.device)).reshape(tensor.shape)


def _require_plain(names: set[str]) -> None:
    if names:
        raise InputError(
            f"got {_listed(names)}: queries or keys are quantised, and their rows share what they are scaled by",
            "the weights before they were quantised",
        )


def _listed(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more"


def _in_words(heads: HeadShape) -> str:
    before = f" after {heads.latent} latent rows" if heads.latent else ""
    return f"{heads.queries} heads of queries and {heads.keys} of keys, of {heads.width} dimensions{before}"
