"""Calls of modules and functions that make tables, by which other functions rotate tokens."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from locant.probing.token_calls import (
    FAILED,
    HEADS,
    ROTATES,
    TRIAL,
    Tried,
    UnusableError,
    Way,
    counting_call,
    for_both_sides,
    function_of,
)

WIDTHS = (64, 128, 32, 80, 96, 256, 16, 48, 72, 112, 40, 24, 8, 512, 192, 12, 6, 4, 2)
"""Widths of a head that are tried where nothing says it."""

Apply = Callable[..., Any]
"""A function that rotates by tables."""

Trial = tuple[int, int, Way]


def is_axial(target: Any) -> bool:
    """A rotary module of `transformers` that takes a row and a column for each patch."""
    return hasattr(target, "compute_axial_rope_parameters")


# ---------------------------------------------------------------------- modules and functions that make tables

FORMS: dict[str, Callable[[Tensor, Tensor], tuple[Any, ...]]] = {
    "x, ids [batch, seq]": lambda x, index: (x[:, 0], *index.unbind(-1)) if index.shape[-1] == 1 else (),
    "x, ids [axes, batch, seq]": lambda x, index: (x[:, 0], index.movedim(-1, 0)),
    "x, ids [seq, axes]": lambda x, index: (x[:, 0], index[0]),
    "x, ids [batch, seq, axes]": lambda x, index: (x[:, 0], index),
    "ids [seq]": lambda x, index: (index[0, :, 0],),
    "ids [batch, seq]": lambda x, index: (*index.unbind(-1),) if index.shape[-1] == 1 else (),
}
"""What is called with to make tables of these positions."""

COUNTED_FORMS: dict[str, Callable[[Tensor, int], tuple[Any, ...]]] = {
    "seq_len": lambda x, width: (x.shape[2],),
    "x": lambda x, width: (x,),
    "x [batch, seq, dim]": lambda x, width: (x[:, 0],),
    "x, seq_len": lambda x, width: (x, x.shape[2]),
    "head_dim, seq_len": lambda x, width: (width, x.shape[2]),
}
"""What is called with to make tables of the first positions."""

Shape = Callable[[Tensor, int], tuple[Tensor, Callable[[Tensor], Tensor]]]


def _part(times: int, heads_behind: bool) -> Shape:
    """The first dimensions alone: as many as a table has, or twice as many, where it has one number for each pair."""

    def shape(x: Tensor, width: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        part, rest = x[..., : times * width], x[..., times * width :]
        if heads_behind:
            return part.transpose(1, 2), lambda side: torch.cat([side.transpose(1, 2), rest], -1)
        return part, lambda side: torch.cat([side, rest], -1)

    return shape


SHAPES: tuple[Shape, ...] = (
    lambda x, width: (x, lambda side: side),
    _part(1, heads_behind=False),
    lambda x, width: (x.transpose(1, 2), lambda side: side.transpose(1, 2)),
    lambda x, width: (
        x.flatten(0, 1).transpose(0, 1), lambda side: side.transpose(0, 1).unflatten(0, x.shape[:2])
    ),
    _part(2, heads_behind=False), _part(1, heads_behind=True), _part(2, heads_behind=True),
    lambda x, width: (x.flatten(0, 1), lambda side: side.unflatten(0, x.shape[:2])),
    lambda x, width: (x.permute(2, 0, 1, 3), lambda side: side.permute(1, 2, 0, 3)),
)  # fmt: skip
"""Tokens as the function takes them, and the way back: as they are; the part that tables are for, where it takes no
more; heads behind; patches without a batch, ``[seq, heads, width]``; other parts; no heads; tokens first."""

IS_KEY = re.compile(r"(^|_|x)k(ey|eys|s|_|$)|^(key|k)")
ARE_TABLES = re.compile(r"freq|cos|sin|rot|table|emb|theta|angle")


def _multiply(x: Tensor, matrix: Tensor) -> Tensor:
    """A matrix for each position, by which tokens are multiplied."""
    return torch.einsum("...sij,bhsj->bhsi", matrix, x)


def table_calls(
    target: Any, widths: Sequence[int], counts: Sequence[int], functions: Sequence[Apply], layer_type: str | None,
    tried: Tried,
) -> Iterator[Trial]:  # fmt: skip
    """Every way to make tables, with every function that rotates by them."""
    options = {} if layer_type is None else {"layer_type": layer_type}
    noun = "module" if isinstance(target, nn.Module) else "f"

    def takes(given: Sequence[Any]) -> bool:
        with contextlib.suppress(ValueError):  # of what is written in C
            try:
                inspect.signature(function_of(target)).bind(*given, **options)
            except TypeError:
                return False
        return bool(given)

    def read_tables(tables: Any) -> tuple[Tensor, ...]:
        parts = tuple(tables) if isinstance(tables, (tuple, list)) else (tables,)
        if not parts or not isinstance(parts[0], Tensor) or not parts[0].ndim:
            raise UnusableError("gave no tables", ROTATES)
        return parts

    def tables_at(form: str, module: Any, x: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        return read_tables(module(*FORMS[form](x, index), **options))

    def apply_tables(function: Apply, shape: Shape, tables: tuple[Tensor, ...], x: Tensor, index: Tensor) -> Any:
        if function is _multiply:
            return for_both_sides(_multiply(x, tables[0]))
        tokens, back = shape(x, tables[0].shape[-1] * (2 if tables[0].is_complex() else 1))
        takes = [*inspect.signature(inspect.unwrap(function)).parameters.values()]
        ids = (index,) if any(one.name == "position_ids" and one.default is one.empty for one in takes) else ()
        if not any(IS_KEY.search(one.name) for one in takes[:2]):
            first = bool(takes) and ARE_TABLES.search(takes[0].name) is not None
            return for_both_sides(back(function(*tables, tokens, *ids) if first else function(tokens, *tables, *ids)))
        named = {"cos": tables[0], "sin": tables[1]} if {"cos", "sin"} <= {one.name for one in takes} else {}
        q, k = function(tokens, tokens.clone(), *(() if named else tables), *ids, **named)[:2]
        return back(q), back(k)

    def rotate(form: str, function: Apply, shape: Shape, module: Any, x: Tensor, index: Tensor) -> Any:
        return apply_tables(function, shape, tables_at(form, module, x, index), x, index)

    def rotate_all(form: str, function: Apply, shape: Shape, module: Any, x: Tensor) -> Any:
        tables = read_tables(module(*COUNTED_FORMS[form](x, x.shape[-1]), **options))
        return apply_tables(function, shape, tables, x, torch.arange(x.shape[2])[None])

    def ways(form: str, tables: tuple[Tensor, ...], given: bool, shapes: Sequence[Shape]) -> Iterator[Way]:
        size, orthogonal = tables[0].shape, False
        if len(size) > 2 and size[-1] == size[-2] > TRIAL and not tables[0].is_complex():
            unit = torch.eye(size[-1], dtype=tables[0].dtype)
            orthogonal = torch.allclose(tables[0] @ tables[0].mT, unit.expand_as(tables[0]), atol=1e-4)
        for function, shape in itertools.product([_multiply] if orthogonal else functions, shapes):
            told = "the tokens are multiplied by them" if orthogonal else f"{_name(function)} rotates by them"
            called = f"{noun}({form}) makes {'matrices' if orthogonal else 'tables'}, and {told}"
            if given:
                yield Way(called, partial(rotate, form, function, shape))
            else:
                call = counting_call(partial(rotate_all, form, function, shape))
                yield Way(f"{called}: it counts tokens from 0", call, given=False)
        if not functions and not orthogonal:
            made = " and ".join(str([*one.shape]) for one in tables)
            error = UnusableError(f"makes tables of shape {made}, by which nothing rotates", APPLY)
            tried.setdefault(f"{noun}({form})", error)

    def trials(
        form: str, tables: tuple[Tensor, ...], axes: int, shapes: Sequence[Shape], given: bool = True,
        width: int | None = None,
    ) -> Iterator[Trial]:  # fmt: skip
        last = tables[0].shape[-1]
        for each in [width] if width else widths or (last, 2 * last):
            yield from ((each, axes, way) for way in ways(form, tables, given, shapes) if each % 2 == 0)

    usual = itertools.product([SHAPES[:4]], counts, [*FORMS][:5])
    for shapes, axes, form in itertools.chain(usual, itertools.product([SHAPES], counts, FORMS)):
        if is_axial(target) and "axes]" not in form:
            continue
        x, index = torch.zeros(1, HEADS, TRIAL, 8), torch.zeros(1, TRIAL, axes, dtype=torch.int64)
        if not takes(FORMS[form](x, index)):
            continue
        try:
            tables = tables_at(form, target, x, index)
        except FAILED as error:
            tried.setdefault(f"{noun}({form})", error)
            continue
        yield from trials(form, tables, axes, shapes)
    for form, make in COUNTED_FORMS.items() if not is_axial(target) else ():
        for width in widths or ((64,) if form == "seq_len" else WIDTHS):
            given = make(torch.zeros(1, HEADS, TRIAL, width), width)
            if not takes(given):
                break
            try:
                tables = read_tables(target(*given, **options))
            except FAILED as error:
                tried.setdefault(f"{noun}({form})", error)
                continue
            yield from trials(form, tables, 1, SHAPES, False, width if form != "seq_len" or widths else None)


APPLY = "locant.probe(module, apply=apply_rotary, head_dim=64), with the function that rotates tokens by its tables"


def _name(function: Apply) -> str:
    return getattr(function, "__name__", None) or type(function).__name__


def rotating_functions(target: Any) -> list[Apply]:
    """Those of its Python module, the likely first: axial ones have a name of their own, and so have interleaved."""
    module = sys.modules.get(type(target).__module__)
    if not isinstance(target, nn.Module) or module is None:
        return []
    beside, config = vars(module), getattr(target, "config", None)
    latent = hasattr(config, "qk_rope_head_dim") and getattr(config, "rope_interleave", True)
    words = ("_vision", "_2d", "_multidimensional") if is_axial(target) else ("_interleave",) if latent else ()
    last = () if words else ("_interleave", "_vision")
    names = [name for name in beside if name.startswith("apply") and ("rot" in name or "rope" in name)]
    names.sort(key=lambda name: (name.endswith(last), not any(word in name for word in words), len(name)))
    if not module.__name__.startswith("transformers."):
        others = [name for name, each in beside.items() if name not in names and inspect.isfunction(each)]
        names += [name for name in others if "rot" in name.lower() or "rope" in name.lower()]
    functions = [beside[name] for name in names if callable(beside[name])]
    own = [name for name in dir(type(target)) if name.startswith("apply") and ("rot" in name or "rope" in name)]
    return functions + [getattr(target, name) for name in own]
