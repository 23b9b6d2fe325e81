"""Encodings by name: this package's own, those that are registered, and those of installed packages.

This package's own are the classes in `locant.positions.encodings` whose `info` has a name: a new one is a file there.
An installed package offers one by an entry point in the group ``locant.encodings``, from the name to the class.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import Any

from locant.arguments import shown
from locant.errors import LocantError, RangeError
from locant.positions import encodings as own
from locant.positions.base import PositionEncoding, build
from locant.positions.scaling import SCALINGS, Scaling
from locant.registry import Registry

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
    """Return the class of this name, alias or phrase.

    A phrase is a name with the words of a title around it. A name that means several encodings, a scaling or a model is
    refused with what it may mean.

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
        if not isinstance(name, str):
            raise
        stem = _stem(name)
        if name.strip() and stem in AMBIGUOUS:
            meant = " or ".join(f"locant.encoding({one!r}, ...)" for one in AMBIGUOUS[stem])
            raise RangeError(f"got encoding {name!r}, which is a name of several", meant) from None
        kind = _scaling(stem)
        if kind is not None:
            raise _is_scaling(name, kind) from None
        known = {_stem(alias): each for each, _ in ENCODINGS.items() for alias in (each, *ENCODINGS.aliases(each))}
        known |= IN_TITLES
        if stem and stem in known:
            return ENCODINGS.find(known[stem])
        of_model = _encoding_of_model(stem)
        if of_model is None:
            raise
    sizes = ", ".join(f"{size}=..." for size in find(of_model).sizes())
    got = f"got encoding {name!r}, which is a model whose positions are {of_model}"
    raise RangeError(got, f"locant.encoding({of_model!r}, {sizes}), or locant.encoding_from_config of its config.json")


def name_of(encoding: str) -> str:
    """Return the one name of an encoding, from any of its names.

    >>> name_of("RoPE"), name_of("ALiBi positional bias")
    ('rotary', 'alibi')
    """
    return name_of_class(find(encoding)) or encoding


def name_of_class(kind: Kind) -> str | None:
    """Return the name under which a class is registered; ``None`` if it is not."""
    return next((known for known, each in encodings().items() if each is kind), None)


AMBIGUOUS = {"": ("sinusoidal", "learned"), "relative": ("t5", "shaw", "transformer_xl")}
"""What remains of titles that several encodings have: the positional encoding, relative position embeddings."""

IN_TITLES = {
    "learnable": "learned", "trainable": "learned", "sine": "sinusoidal", "sinecosine": "sinusoidal", "no": "nope",
    "roformer": "rotary", "extrapolatable": "xpos", "kernelized": "kerple", "selfattentionwith": "shaw",
}  # fmt: skip
"""What remains of titles that have no name in them."""

GENERIC = re.compile(
    "(embeddings?|encodings?|representations?|positional|positions?|pos|relative|bias(es)?|slopes?|scaling|attention|for|pe)$"
)
"""Words at the end of titles that do not tell encodings apart."""


def _stem(name: str) -> str:
    """Return the letters and digits of a name, without what is in parentheses and without generic words at its end.

    >>> _stem("ALiBiPositionalBias"), _stem("T5 relative position bias"), _stem("relative position"), _stem("position")
    ('alibi', 't5', 'relative', '')
    """
    word = re.sub(r"[(].*?[)]|[^a-z0-9+]", "", name.lower())
    stem, shorter = word, GENERIC.sub("", word)
    while shorter != stem:
        stem, shorter = shorter, GENERIC.sub("", shorter)
    return stem or ("relative" if "relative" in word else "")


def class_named(name: str) -> Kind | type[Scaling] | None:
    """Return the class of the encoding or scaling of this name or phrase, or ``None`` if there is none.

    >>> class_named("RoPE").__name__, class_named("YaRN").__name__, class_named("Nothing")
    ('Rotary', 'YaRN', None)
    """
    try:
        return _scaling(_stem(name)) or find(name)
    except LocantError:
        return None


def _scaling(stem: str) -> type[Scaling] | None:
    """Return the scaling of this name, which may stand behind ``rotary+``."""
    name = stem.rpartition("+")[2]
    return next((kind for own, kind in SCALINGS.items() if name in map(_stem, (own, *kind.info.aliases))), None)


def _is_scaling(name: str, kind: type[Scaling]) -> RangeError:
    """The error for a scaling in the place of an encoding, with the call that makes one."""
    example = kind.by_factor(4.0, trained=4096, dim=64, base=10_000.0)
    required = [field.name for field in fields(example) if field.default is MISSING]  # type: ignore[arg-type]  # all are dataclasses
    values = [(name, getattr(example, name)) for name in required]
    given = ", ".join(f"{name}={'...' if isinstance(value, tuple) else value}" for name, value in values)
    return RangeError(
        f"got encoding {name!r}, which is a scaling of rotary",
        f"locant.encoding('rotary', head_dim=64, scaling=locant.scaling.{type(example).__name__}({given}))",
    )


def _encoding_of_model(stem: str) -> str | None:
    """Return the name of the encoding that models of this name have, or ``None`` if no published model is called so."""
    from locant.models.encodings import encoding_from_config, layer_types
    from locant.models.registry import presets

    family = _family(stem)
    for name, config in presets().items():
        if len(family) > 2 and family in (_family(_stem(name)), _family(_stem(config["model_type"]))):
            kinds = layer_types(config)
            return type(encoding_from_config(config, layer_type=kinds[0] if kinds else None)).info.name
    return None


def _family(stem: str) -> str:
    """The letters before the version of a model."""
    return re.split(r"v?[0-9]", stem, maxsplit=1)[0]


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
