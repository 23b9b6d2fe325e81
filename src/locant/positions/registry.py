"""Encodings by name: the encodings of this package, registered ones, and the encodings of installed packages.

The encodings of this package are the classes in `locant.positions.encodings` whose `info` has a name. To add one, add
a file there. An installed package adds an encoding by an entry point in the group ``locant.encodings``. The entry
point maps the name to the class.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from typing import Any

from locant.arguments import short_repr
from locant.errors import LocantError, RangeError
from locant.positions import encodings as package
from locant.positions.base import PositionEncoding, build
from locant.positions.scaling import SCALINGS, Scaling
from locant.positions.titles import encoding_in_title, meanings_of_title, scaling_in_title
from locant.registry import Registry

Kind = type[PositionEncoding]

LISTING_ORDER = (
    "nope", "learned", "sinusoidal", "rotary", "xpos", "alibi", "t5", "kerple", "fire", "sandwich", "cope", "shaw",
    "transformer_xl", "deberta",
)  # fmt: skip
"""The encodings that come first in `locant list`, in this order. The others follow, sorted by name."""


def encodings() -> dict[str, Kind]:
    """Return every loadable encoding by name, built-in encodings first. See `broken_encodings` for the others.

    >>> list(encodings())[:4]
    ['nope', 'learned', 'sinusoidal', 'rotary']
    """
    return dict(ENCODINGS.items())


def broken_encodings() -> dict[str, str]:
    """Return the encodings of installed packages that cannot be used, each with the reason."""
    encodings()
    return dict(ENCODINGS.broken)


def find(name: str) -> Kind:
    """Return the class of this name, alias or phrase.

    A phrase is a name with the words of a title around it. Raise `RangeError` with the possible calls if the name
    belongs to several encodings, to a scaling or to a model.

    >>> find("RoPE").__name__, find("sinusoidal positional encoding").__name__
    ('Rotary', 'Sinusoidal')
    >>> find("yarn")
    Traceback (most recent call last):
    ...
    locant.errors.RangeError: got encoding 'yarn', which is a scaling of rotary; try:
    locant.encoding('rotary', head_dim=64, scaling=locant.scaling.YaRN(factor=4.0, original_max_seq_len=4096))
    """
    try:
        return ENCODINGS.find(name)
    except RangeError:
        title = encoding_in_title(name, _name_by_alias()) if isinstance(name, str) else None
        if title is None:
            raise
    return ENCODINGS.find(title)


def _name_by_alias() -> dict[str, str]:
    return {alias: name for name, _ in ENCODINGS.items() for alias in (name, *ENCODINGS.aliases(name))}


def name_of(encoding: str) -> str:
    """Return the main name of an encoding, given any of its names.

    >>> name_of("RoPE"), name_of("ALiBi positional bias")
    ('rotary', 'alibi')
    """
    return name_of_class(find(encoding)) or encoding


def name_of_class(kind: Kind) -> str | None:
    """Return the name under which a class is registered, or ``None`` if it is not registered."""
    return next((name for name, each in encodings().items() if each is kind), None)


def find_class(name: str) -> Kind | type[Scaling] | None:
    """Return the class of the encoding or scaling of this name or phrase, or ``None`` if there is none.

    >>> find_class("RoPE").__name__, find_class("YaRN").__name__, find_class("Nothing")
    ('Rotary', 'YaRN', None)
    """
    try:
        return scaling_in_title(name) or find(name)
    except LocantError:
        return None


def meanings(name: str) -> list[Kind]:
    """Return the classes that a title about positions may mean, if there are several.

    >>> [kind.__name__ for kind in meanings("PositionalEncoding")], meanings("Embedding")
    (['Sinusoidal', 'Learned'], [])
    """
    return [ENCODINGS.find(each) for each in meanings_of_title(name, _name_by_alias())]


def encoding(name: str, *unnamed: Any, **options: Any) -> PositionEncoding:
    """Build the encoding of this name. Pass all options by name.

    >>> encoding("alibi", num_heads=8)
    ALiBi(num_heads=8)
    """
    kind = find(name)
    if unnamed:
        sizes = ", ".join(f"{size}=..." for size in kind.sizes())
        got = f"got {', '.join(map(short_repr, unnamed))} without a name for {name!r}, expected options by name"
        raise RangeError(got, f"locant.encoding({name_of(name)!r}, {sizes})")
    return build(kind, options)


def register_encoding(name: str, cls: Kind, aliases: Iterable[str] = ()) -> None:
    """Make an encoding known to `locant.encoding`, `locant list`, `plot`, `compare` and the lab.

    An installed package does not need this call. It names the class in an entry point of the group
    ``locant.encodings``.

    Args:
        name: the name of the encoding.
        cls: the class. If its constructor requires more than ``d_model``, ``num_heads``, ``head_dim`` and
            ``max_seq_len``, the class must override ``for_model``.
        aliases: other names, in addition to the aliases in its `info`.

    >>> class Even(PositionEncoding):
    ...     '''Adds one to every other token.'''
    ...     def embed(self, x, positions):
    ...         return x + (positions.index % 2)[..., None]
    >>> locant.register_encoding("even", Even)  # doctest: +SKIP
    """
    ENCODINGS.register(name, cls, aliases)


def require_encoding(name: str, value: Any) -> None:
    """Raise `RangeError` unless a registered value is an encoding class and its name is not the name of a scaling."""
    if not (isinstance(value, type) and issubclass(value, PositionEncoding)):
        got = f"got {short_repr(value)} as encoding {name!r}, expected a class"
        raise RangeError(got, "register a subclass of locant.PositionEncoding")
    if name in SCALINGS:
        raise RangeError(f"got {name!r} as the name of an encoding, which is the name of a scaling", f"'my_{name}'")


def _register_built_in(registry: Registry[Kind]) -> None:
    by_name = {PositionEncoding.info.name: PositionEncoding}
    for file in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{file.name}")
        kinds = [
            kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, PositionEncoding)
        ]
        by_name |= {kind.info.name: kind for kind in kinds if kind.info.name}
    for name in (*LISTING_ORDER, *sorted({*by_name} - {*LISTING_ORDER})):
        registry.register(name, by_name[name])


ENCODINGS: Registry[Kind] = Registry(
    "encoding", "locant.encodings", require_encoding, _register_built_in, lambda kind: kind.info.aliases
)
