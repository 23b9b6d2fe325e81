"""Calling conventions of targets that make tables of angles. Other functions rotate tokens by these tables."""

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
    CALL_ERRORS,
    HEADS,
    NUM_TOKENS,
    ROTATION_REMEDY,
    Convention,
    Failures,
    UnusableError,
    counting_call,
    for_both_sides,
    function_of,
)

WIDTHS = (64, 128, 32, 80, 96, 256, 16, 48, 72, 112, 40, 24, 8, 512, 192, 12, 6, 4, 2)
"""The head widths to try if nothing states the width."""

Apply = Callable[..., Any]
"""A function that rotates tokens by tables."""

Trial = tuple[int, int, Convention]


def is_axial(target: Any) -> bool:
    """Return whether a target is a rotary module of `transformers` with a row and a column for each patch."""
    return hasattr(target, "compute_axial_rope_parameters")


POSITION_ARGUMENTS: dict[str, Callable[[Tensor, Tensor], tuple[Any, ...]]] = {
    "x, ids [batch, seq]": lambda x, index: (x[:, 0], *index.unbind(-1)) if index.shape[-1] == 1 else (),
    "x, ids [axes, batch, seq]": lambda x, index: (x[:, 0], index.movedim(-1, 0)),
    "x, ids [seq, axes]": lambda x, index: (x[:, 0], index[0]),
    "x, ids [batch, seq, axes]": lambda x, index: (x[:, 0], index),
    "ids [seq]": lambda x, index: (index[0, :, 0],),
    "ids [batch, seq]": lambda x, index: (*index.unbind(-1),) if index.shape[-1] == 1 else (),
}
"""The arguments that make tables of given positions."""

LENGTH_ARGUMENTS: dict[str, Callable[[Tensor, int], tuple[Any, ...]]] = {
    "seq_len": lambda x, width: (x.shape[2],),
    "x": lambda x, width: (x,),
    "x [batch, seq, dim]": lambda x, width: (x[:, 0],),
    "x, seq_len": lambda x, width: (x, x.shape[2]),
    "head_dim, seq_len": lambda x, width: (width, x.shape[2]),
}
"""The arguments that make tables of the first positions."""

Shape = Callable[[Tensor, int], tuple[Tensor, Callable[[Tensor], Tensor]]]


def _first_dims(times: int, heads_last: bool) -> Shape:
    """Return a conversion that passes only the first ``times * width`` dimensions of tokens.

    `width` is the width of the tables. With `heads_last`, the heads come after the tokens.
    """

    def shape(x: Tensor, width: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        part, rest = x[..., : times * width], x[..., times * width :]
        if heads_last:
            return part.transpose(1, 2), lambda side: torch.cat([side.transpose(1, 2), rest], -1)
        return part, lambda side: torch.cat([side, rest], -1)

    return shape


TOKEN_SHAPES: tuple[Shape, ...] = (
    lambda x, width: (x, lambda side: side),
    _first_dims(1, heads_last=False),
    lambda x, width: (x.transpose(1, 2), lambda side: side.transpose(1, 2)),
    lambda x, width: (
        x.flatten(0, 1).transpose(0, 1), lambda side: side.transpose(0, 1).unflatten(0, x.shape[:2])
    ),
    _first_dims(2, heads_last=False), _first_dims(1, heads_last=True), _first_dims(2, heads_last=True),
    lambda x, width: (x.flatten(0, 1), lambda side: side.unflatten(0, x.shape[:2])),
    lambda x, width: (x.permute(2, 0, 1, 3), lambda side: side.permute(1, 2, 0, 3)),
)  # fmt: skip
"""Conversions of tokens to a shape that the function takes, and back.

In this order: the unchanged shape, only the first dimensions (as many as the tables have), heads after tokens, patches
without a batch ``[seq, heads, width]``, twice as many dimensions as the tables have, both of these selections with
heads after tokens, heads joined with the batch, and tokens before the batch.
"""

IS_KEY = re.compile(r"(^|_|x)k(ey|eys|s|_|$)|^(key|k)")
ARE_TABLES = re.compile(r"freq|cos|sin|rot|table|emb|theta|angle")


def _multiply(x: Tensor, matrix: Tensor) -> Tensor:
    """Multiply tokens by a matrix for each position."""
    return torch.einsum("...sij,bhsj->bhsi", matrix, x)


def table_calls(
    target: Any, widths: Sequence[int], counts: Sequence[int], functions: Sequence[Apply], layer_type: str | None,
    failures: Failures,
) -> Iterator[Trial]:  # fmt: skip
    """Yield a trial for every way to make tables, combined with every function that rotates by them."""
    options = {} if layer_type is None else {"layer_type": layer_type}
    noun = "module" if isinstance(target, nn.Module) else "f"

    def accepts(arguments: Sequence[Any]) -> bool:
        with contextlib.suppress(ValueError):  # functions written in C have no signature
            try:
                inspect.signature(function_of(target)).bind(*arguments, **options)
            except TypeError:
                return False
        return bool(arguments)

    def read_tables(tables: Any) -> tuple[Tensor, ...]:
        parts = tuple(tables) if isinstance(tables, (tuple, list)) else (tables,)
        if not parts or not isinstance(parts[0], Tensor) or not parts[0].ndim:
            raise UnusableError("returned no tables", ROTATION_REMEDY)
        return parts

    def tables_at(form: str, module: Any, x: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        return read_tables(module(*POSITION_ARGUMENTS[form](x, index), **options))

    def apply_tables(function: Apply, shape: Shape, tables: tuple[Tensor, ...], x: Tensor, index: Tensor) -> Any:
        if function is _multiply:
            return for_both_sides(_multiply(x, tables[0]))
        tokens, back = shape(x, tables[0].shape[-1] * (2 if tables[0].is_complex() else 1))
        parameters = [*inspect.signature(inspect.unwrap(function)).parameters.values()]
        ids = (index,) if any(one.name == "position_ids" and one.default is one.empty for one in parameters) else ()
        if not any(IS_KEY.search(one.name) for one in parameters[:2]):
            is_first = bool(parameters) and ARE_TABLES.search(parameters[0].name) is not None
            result = function(*tables, tokens, *ids) if is_first else function(tokens, *tables, *ids)
            return for_both_sides(back(result))
        named = {"cos": tables[0], "sin": tables[1]} if {"cos", "sin"} <= {one.name for one in parameters} else {}
        q, k = function(tokens, tokens.clone(), *(() if named else tables), *ids, **named)[:2]
        return back(q), back(k)

    def rotate(form: str, function: Apply, shape: Shape, module: Any, x: Tensor, index: Tensor) -> Any:
        return apply_tables(function, shape, tables_at(form, module, x, index), x, index)

    def rotate_all(form: str, function: Apply, shape: Shape, module: Any, x: Tensor) -> Any:
        tables = read_tables(module(*LENGTH_ARGUMENTS[form](x, x.shape[-1]), **options))
        return apply_tables(function, shape, tables, x, torch.arange(x.shape[2])[None])

    def conventions(
        form: str, tables: tuple[Tensor, ...], takes_positions: bool, shapes: Sequence[Shape]
    ) -> Iterator[Convention]:
        size, are_matrices = tables[0].shape, False
        if len(size) > 2 and size[-1] == size[-2] > NUM_TOKENS and not tables[0].is_complex():
            unit = torch.eye(size[-1], dtype=tables[0].dtype)
            are_matrices = torch.allclose(tables[0] @ tables[0].mT, unit.expand_as(tables[0]), atol=1e-4)
        for function, shape in itertools.product([_multiply] if are_matrices else functions, shapes):
            use = "the tokens are multiplied by them" if are_matrices else f"{_name(function)} rotates by them"
            notation = f"{noun}({form}) makes {'matrices' if are_matrices else 'tables'}, and {use}"
            if takes_positions:
                yield Convention(notation, partial(rotate, form, function, shape))
            else:
                call = counting_call(partial(rotate_all, form, function, shape))
                yield Convention(f"{notation}: it counts tokens from 0", call, takes_positions=False)
        if not functions and not are_matrices:
            shapes_of_tables = " and ".join(str([*one.shape]) for one in tables)
            error = UnusableError(
                f"makes tables of shape {shapes_of_tables}, but no function rotates by them", APPLY_REMEDY
            )
            failures.setdefault(f"{noun}({form})", error)

    def trials(
        form: str, tables: tuple[Tensor, ...], axes: int, shapes: Sequence[Shape], takes_positions: bool = True,
        width: int | None = None,
    ) -> Iterator[Trial]:  # fmt: skip
        last = tables[0].shape[-1]
        for each in [width] if width else widths or (last, 2 * last):
            yield from (
                (each, axes, one) for one in conventions(form, tables, takes_positions, shapes) if each % 2 == 0
            )

    usual = itertools.product([TOKEN_SHAPES[:4]], counts, [*POSITION_ARGUMENTS][:5])
    for shapes, axes, form in itertools.chain(usual, itertools.product([TOKEN_SHAPES], counts, POSITION_ARGUMENTS)):
        if is_axial(target) and "axes]" not in form:
            continue
        x, index = torch.zeros(1, HEADS, NUM_TOKENS, 8), torch.zeros(1, NUM_TOKENS, axes, dtype=torch.int64)
        if not accepts(POSITION_ARGUMENTS[form](x, index)):
            continue
        try:
            tables = tables_at(form, target, x, index)
        except CALL_ERRORS as error:
            failures.setdefault(f"{noun}({form})", error)
            continue
        yield from trials(form, tables, axes, shapes)
    for form, make in LENGTH_ARGUMENTS.items() if not is_axial(target) else ():
        for width in widths or ((64,) if form == "seq_len" else WIDTHS):
            arguments = make(torch.zeros(1, HEADS, NUM_TOKENS, width), width)
            if not accepts(arguments):
                break
            try:
                tables = read_tables(target(*arguments, **options))
            except CALL_ERRORS as error:
                failures.setdefault(f"{noun}({form})", error)
                continue
            yield from trials(form, tables, 1, TOKEN_SHAPES, False, width if form != "seq_len" or widths else None)


APPLY_REMEDY = "locant.probe(module, apply=apply_rotary, head_dim=64), with the function that rotates by its tables"


def _name(function: Apply) -> str:
    return getattr(function, "__name__", None) or type(function).__name__


def rotating_functions(target: Any) -> list[Apply]:
    """Return functions in a module's Python file and class whose names suggest a rotation, the most likely first."""
    module = sys.modules.get(type(target).__module__)
    if not isinstance(target, nn.Module) or module is None:
        return []
    members, config = vars(module), getattr(target, "config", None)
    latent = hasattr(config, "qk_rope_head_dim") and getattr(config, "rope_interleave", True)
    words = ("_vision", "_2d", "_multidimensional") if is_axial(target) else ("_interleave",) if latent else ()
    last = () if words else ("_interleave", "_vision")
    names = [name for name in members if name.startswith("apply") and ("rot" in name or "rope" in name)]
    names.sort(key=lambda name: (name.endswith(last), not any(word in name for word in words), len(name)))
    if not module.__name__.startswith("transformers."):
        others = [name for name, each in members.items() if name not in names and inspect.isfunction(each)]
        names += [name for name in others if "rot" in name.lower() or "rope" in name.lower()]
    functions = [members[name] for name in names if callable(members[name])]
    method_names = [
        name for name in dir(type(target)) if name.startswith("apply") and ("rot" in name or "rope" in name)
    ]
    return functions + [getattr(target, name) for name in method_names]
