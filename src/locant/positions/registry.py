"""Encodings by name: this package's own, those that are registered, and those of installed packages.

This package's own are the classes in `locant.positions.encodings` whose `info` has a name: a new one is a file there.
An installed package offers one by an entry point in the group ``locant.encodings``, from the name to the class.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import Any

from locant.arguments import shown
from locant.errors import RangeError
from locant.positions import encodings as own
from locant.positions.base import PositionEncoding, build
from locant.positions.scaling import SCALINGS
from locant.registry import Registry, key_of

Kind = type[PositionEncoding]

FIRST = (
    "nope", "learned", "sinusoidal", "rotary", "xpos", "alibi", "t5", "kerple", "fire", "sandwich", "cope", "shaw",
    "transformer_xl", "deberta",
)  # fmt: skip
"""The order of `locant list`; what is not named here comes after, by name."""


def encodings() -> dict[str, Kind]:
    """Every encoding by its name, this package's own first; those that cannot be loaded are in `broken_encodings`.

    >>> list(encodings())[:4]
    ['nope', 'learned', 'sinusoidal', 'rotary']
    """
    return dict(ENCODINGS.items())


def broken_encodings() -> dict[str, str]:
    """The encodings of installed packages that cannot be used, with what is wrong with each."""
    encodings()
    return dict(ENCODINGS.broken)


def find(name: str) -> Kind:
    """The class of this name or alias; an unknown one gets the nearest name.

    >>> find("RoPE").__name__
    'Rotary'
    >>> find("yarn")
    Traceback (most recent call last):
    ...
    locant.errors.RangeError: got encoding 'yarn', which is a scaling of rotary; try:
    locant.encoding('rotary', head_dim=64, scaling=locant.scaling.YaRN(factor=4.0, original_max_seq_len=4096))
    """
    try:
        return ENCODINGS.find(name)
    except RangeError:
        scaling = key_of(name).rpartition("+")[2] if isinstance(name, str) else ""
        kind = next((kind for name, kind in SCALINGS.items() if scaling in (name, *kind.info.aliases)), None)
        if kind is None:
            raise
    example = kind.by_factor(4.0, trained=4096, dim=64, base=10_000.0)
    required = [field.name for field in fields(example) if field.default is MISSING]  # type: ignore[arg-type]  # all are dataclasses
    values = [(name, getattr(example, name)) for name in required]
    given = ", ".join(f"{name}={'...' if isinstance(value, tuple) else value}" for name, value in values)
    raise RangeError(
        f"got encoding {name!r}, which is a scaling of rotary",
        f"locant.encoding('rotary', head_dim=64, scaling=locant.scaling.{type(example).__name__}({given}))",
    )


def encoding(name: str, **options: Any) -> PositionEncoding:
    """The encoding of this name, built with these options.

    >>> encoding("alibi", num_heads=8)
    ALiBi(num_heads=8)
    """
    return build(find(name), options)


def register_encoding(name: str, cls: Kind, aliases: Iterable[str] = ()) -> None:
    """Make an encoding known to `locant.encoding`, `locant list`, `plot`, `compare` and the lab.

    An installed package needs no call: it names the class in an entry point of the group ``locant.encodings``.

    Args:
        name: by which it is found.
        cls: the class. Where its constructor requires more than ``d_model``, ``num_heads``, ``head_dim`` and
            ``max_seq_len``, it overrides ``for_model``.
        aliases: other names, beside those in its `info`.

    >>> class Even(PositionEncoding):
    ...     '''Adds one to every other token.'''
    ...     def embed(self, x, positions):
    ...         return x + (positions.index % 2)[..., None]
    >>> locant.register_encoding("even", Even)  # doctest: +SKIP
    """
    ENCODINGS.register(name, cls, aliases)


def require_encoding(name: str, value: Any) -> None:
    """A `RangeError` unless a value from outside is a class of encodings, with a name that no scaling has."""
    if not (isinstance(value, type) and issubclass(value, PositionEncoding)):
        got = f"got {shown(value)} as encoding {name!r}, expected a class"
        raise RangeError(got, "a subclass of locant.PositionEncoding")
    if name in SCALINGS:
        raise RangeError(f"got {name!r} as the name of an encoding, which is that of a scaling", f"'my_{name}'")


def _register_own(registry: Registry[Kind]) -> None:
    by_name = {PositionEncoding.info.name: PositionEncoding}
    for file in pkgutil.iter_modules(own.__path__):
        module = importlib.import_module(f"{own.__name__}.{file.name}")
        kinds = [
            kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, PositionEncoding)
        ]
        by_name |= {kind.info.name: kind for kind in kinds if kind.info.name}
    for name in (*FIRST, *sorted({*by_name} - {*FIRST})):
        registry.register(name, by_name[name])


ENCODINGS: Registry[Kind] = Registry(
    "encoding", "locant.encodings", require_encoding, _register_own, lambda kind: kind.info.aliases
)
