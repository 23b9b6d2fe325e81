"""What `--jaxtyping-packages` puts around each function: jaxtyping where a shape is stated, beartype alone elsewhere.

Jaxtyping makes two functions of each one that it checks, and binds the arguments of every call; but eight functions in
nine state no shape. A function inside a function would be made anew in every call: only pyright checks it, unless it
states a shape.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any, get_args

import jaxtyping
from beartype import BeartypeConf, beartype

__all__ = ["checked", "install"]

_with_shapes = jaxtyping.jaxtyped
_check = beartype(conf=BeartypeConf(violation_type=jaxtyping.TypeCheckError))
_shapeless_inside: set[CodeType] = set()


def install() -> None:
    """Before locant is imported; the import hook asks for `jaxtyping.jaxtyped` by name."""
    jaxtyping.jaxtyped = checked


def checked(function: Any = None, *, typechecker: Callable[..., Any]) -> Any:
    if function is None:
        return functools.partial(checked, typechecker=typechecker)
    if not inspect.isfunction(function):
        return _with_shapes(function, typechecker=typechecker)
    if function.__code__ in _shapeless_inside:
        return function
    hints = {name: _hint(text, function.__globals__) for name, text in function.__annotations__.items()}
    if any(_states_shape(hint) for hint in hints.values()):
        return _with_shapes(function, typechecker=typechecker)
    if "<locals>" in function.__qualname__:
        _shapeless_inside.add(function.__code__)
        return function
    return _typed(function, hints)


def _typed(function: Callable[..., Any], hints: dict[str, object]) -> Callable[..., Any]:
    written, function.__annotations__ = function.__annotations__, hints
    strict = _check(function)
    function.__annotations__ = written
    if strict is function:  # nothing is annotated
        return function

    @functools.wraps(function)
    def wrapper(*args: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        return (function if jaxtyping.config.jaxtyping_disable else strict)(*args, **options)

    return wrapper


def _hint(written: object, names: dict[str, Any]) -> object:
    """What an annotation says, and anything where it names what is imported for type checkers alone."""
    if not isinstance(written, str):
        return written
    try:
        return eval(written, names)  # noqa: S307
    except NameError:
        return Any


def _states_shape(hint: object) -> bool:
    array = isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray)
    return array or any(_states_shape(inner) for inner in get_args(hint))
