"""Modules that give tables of cosines and sines, as in `transformers`, and the functions that rotate by them."""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from locant.models.probe.trial import FAILED, HEADS, TRIAL, Rotate, Tried, Way

__all__ = ["Apply", "is_axial", "returns_tables", "ways_with_tables"]

Apply = Callable[..., Any]


def returns_tables(target: Any) -> bool:
    """Whether a module's name says that it makes tables, and its module has a function that rotates by them."""
    return isinstance(target, nn.Module) and any(word in type(target).__name__ for word in ("Rotary", "Rope", "RoPE"))


def ways_with_tables(
    target: nn.Module,
    stated: int | None,
    counts: tuple[int, ...],
    apply: Apply | None,
    layer_type: str | None,
    tried: Tried,
) -> Iterator[tuple[int, int, Way]]:
    """Every way to make tables, with every function of the same module that rotates by them."""
    functions = [apply] if apply is not None else _functions_beside(target)
    forms = [form for form in FORMS if not is_axial(target) or "axes]" in form]
    for axes, form in itertools.product(counts, forms):
        make = functools.partial(_made, form=form, layer_type=layer_type)
        try:
            with torch.no_grad():
                first = make(target, torch.zeros(1, HEADS, TRIAL, 8), torch.zeros(1, TRIAL, axes, dtype=torch.int64))[0]
        except FAILED as error:
            tried.setdefault(f"module({form})", error)
            continue
        widths = [stated] if stated else [first.shape[-1], 2 * first.shape[-1]]
        for width, function, rotate in itertools.product(widths, functions, ROTATING):
            yield width, axes, _tabled(form, make, function, rotate)


def _functions_beside(target: nn.Module) -> list[Apply]:
    """Those of its Python module, the likely first: axial ones have a name of their own, and so have interleaved."""
    beside, config = vars(sys.modules[type(target).__module__]), getattr(target, "config", None)
    latent = hasattr(config, "qk_rope_head_dim") and getattr(config, "rope_interleave", True)
    words = ("_vision", "_2d", "_multidimensional") if is_axial(target) else ("_interleave",) if latent else ()
    last = () if words else ("_interleave", "_vision")
    names = [name for name in beside if name.startswith("apply") and ("rot" in name or "rope" in name)]
    names.sort(key=lambda name: (any(map(name.endswith, last)), not any(word in name for word in words), len(name)))
    return [beside[name] for name in names if callable(beside[name])]


def is_axial(target: Any) -> bool:
    """A rotary module of `transformers` that takes a row and a column for each patch."""
    return hasattr(target, "compute_axial_rope_parameters")


FORMS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, ...]]] = {
    "x, ids [batch, seq]": lambda x, index: (x[:, 0], *index.unbind(-1)) if index.shape[-1] == 1 else (),
    "x, ids [axes, batch, seq]": lambda x, index: (x[:, 0], index.movedim(-1, 0)),
    "x, ids [seq, axes]": lambda x, index: (x[:, 0], index[0]),
    "x, ids [batch, seq, axes]": lambda x, index: (x[:, 0], index),
    "ids [seq]": lambda x, index: (index[0, :, 0],),
}


def _made(target: nn.Module, x: Tensor, index: Tensor, *, form: str, layer_type: str | None) -> tuple[Tensor, ...]:
    """The tables of these positions."""
    options = {} if layer_type is None else {"layer_type": layer_type}
    tables = target(*FORMS[form](x, index), **options)
    parts = tables if isinstance(tables, tuple) else (tables,)
    if not isinstance(parts[0], Tensor) or not parts[0].ndim:
        raise TypeError("no tables")
    return parts


def _tabled(
    form: str,
    make: Callable[..., tuple[Any, ...]],
    function: Apply,
    rotate: Callable[..., tuple[Tensor, Tensor]],
) -> Way:
    def rotation_of(target: nn.Module, axes: int) -> Rotate:
        return lambda x, index: rotate(function, x, make(target, x, index), index)

    return Way(f"module({form}) makes tables, and {function.__name__} rotates by them", rotation_of)


def _whole(function: Apply, x: Tensor, tables: tuple[Any, ...], index: Tensor) -> tuple[Tensor, Tensor]:
    takes = [*inspect.signature(inspect.unwrap(function)).parameters.values()]
    ids = (index,) if any(one.name == "position_ids" and one.default is one.empty for one in takes) else ()
    if "k" not in "".join(one.name for one in takes[:2]):
        return (rotated := function(x, *tables, *ids), rotated)
    named = {"cos": tables[0], "sin": tables[1]} if {"cos", "sin"} <= {one.name for one in takes} else {}
    q, k = function(x, x.clone(), *(() if named else tables), *ids, **named)[:2]
    return q, k


def _on_its_width(function: Apply, x: Tensor, tables: tuple[Any, ...], index: Tensor) -> tuple[Tensor, Tensor]:
    """As attention classes do, whose function takes no more than the part of a head that is rotated."""
    width = tables[0].shape[-1] * (2 if tables[0].is_complex() else 1)
    q, k = _whole(function, x[..., :width], tables, index)
    return torch.cat([q, x[..., width:]], -1), torch.cat([k, x[..., width:]], -1)


def _heads_last(function: Apply, x: Tensor, tables: tuple[Any, ...], index: Tensor) -> tuple[Tensor, Tensor]:
    q, k = _whole(function, x.transpose(1, 2), tables, index)
    return q.transpose(1, 2), k.transpose(1, 2)


def _one_row(function: Apply, x: Tensor, tables: tuple[Any, ...], index: Tensor) -> tuple[Tensor, Tensor]:
    """Patches without a batch, ``[seq, heads, width]``."""
    sides = _whole(function, x.flatten(0, 1).transpose(0, 1), tables, index)
    q, k = (side.transpose(0, 1).unflatten(0, x.shape[:2]) for side in sides)
    return q, k


ROTATING = (_whole, _on_its_width, _heads_last, _one_row)
