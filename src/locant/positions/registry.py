"""Encodings by name: the encodings of this package, registered ones, and the encodings of installed packages.

The encodings of this package are the classes in `locant.positions.encodings` whose `info` has a name. To add one, add
a file there. An installed package adds an encoding by an entry point in the group ``locant.encodings``, from the name
to the class.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any

from locant.arguments import shown
from locant.errors import LocantError, RangeError
from locant.positions import encodings as package
from locant.positions.base import PositionEncoding, build
from locant.positions.scaling import SCALINGS, Scaling
from locant.registry import Registry

Kind = type[PositionEncoding]

LISTING_ORDER = (
    "nope", "learned", "sinusoidal", "rotary", "xpos", "alibi", "t5", "kerple", "fire", "sandwich", "cope", "shaw",
    "transformer_xl", "deberta",
)  # fmt: skip
"""The order of `locant list`. Other encodings follow, sorted by name."""


def encodings() -> dict[str, Kind]:
    """Return every encoding by its name, built-in ones first. `broken_encodings` has those that cannot be loaded.

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

    A phrase is a name with the words of a title around it. For a name of several encodings, of a scaling or of a model,
    raise `RangeError` with the possible calls.

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
        known = {_squeezed(alias): each for each, _ in ENCODINGS.items() for alias in (each, *ENCODINGS.aliases(each))}
        known |= NAME_BY_TITLE
        whole, stem = _squeezed(name), _stem(name)
        if whole and whole in known:
            return ENCODINGS.find(known[whole])
        if whole and stem in AMBIGUOUS:
            meant = " or ".join(f"locant.encoding({one!r}, ...)" for one in AMBIGUOUS[stem])
            raise RangeError(f"got encoding {name!r}, which is a name of several", meant) from None
        if (made := next((each for words, each in OF_GRIDS.items() if words in whole), None)) is not None:
            raise RangeError(f"got encoding {name!r}, which is rotary with several position axes", made) from None
        if "bias" not in whole and (kind := _find_scaling(stem)) is not None:
            raise _scaling_error(name, kind) from None
        by_stem = {_stem(alias): each for alias, each in known.items()} | NAME_BY_TITLE
        if stem and stem in by_stem:
            return ENCODINGS.find(by_stem[stem])
        inside, scaling, rest = _names_inside(stem, known)
        model_encoding = _encoding_for_model(stem, {*inside, *filter(None, [scaling])})
        if scaling is not None and inside <= {"rotary"}:
            raise _scaling_error(name, SCALINGS[scaling]) from None
        if model_encoding is None:
            if len(inside) == 1 and not rest:
                return ENCODINGS.find(inside.pop())
            if len(inside) != 1 or difflib.get_close_matches(whole, known, n=1, cutoff=0.9):  # a slip of the fingers
                raise
            plain = inside.pop()
            got = f"got encoding {name!r}, which is {plain} with {rest!r}, expected a name of locant list"
            raise RangeError(got, f"locant.encoding({plain!r}, ...) if the plain form is meant") from None
    sizes = ", ".join(f"{size}=..." for size in find(model_encoding).sizes())
    got = f"got encoding {name!r}, which is a model whose positions are {model_encoding}"
    remedy = f"locant.encoding({model_encoding!r}, {sizes}), or locant.encoding_from_config of its config.json"
    raise RangeError(got, remedy)


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
"""Stems of titles that several encodings share: the positional encoding, relative position embeddings."""

NAME_BY_TITLE = {
    "learnable": "learned", "trainable": "learned", "sine": "sinusoidal", "sinecosine": "sinusoidal", "no": "nope",
    "roformer": "rotary", "extrapolatable": "xpos", "kernelized": "kerple", "selfattentionwith": "shaw",
}  # fmt: skip
"""Names by the stems of titles that contain no name."""

OF_GRIDS = {
    "mrope": "locant.encoding('rotary', head_dim=128, sections=(16, 24, 24))",
    "2drope": "locant.encoding('rotary', head_dim=64, sections=(16, 16), axial=True)",
    "2drotary": "locant.encoding('rotary', head_dim=64, sections=(16, 16), axial=True)",
    "axialrope": "locant.encoding('rotary', head_dim=64, sections=(16, 16), axial=True)",
    "axialrotary": "locant.encoding('rotary', head_dim=64, sections=(16, 16), axial=True)",
}
"""Titles of rotary encodings for images and videos, which have no name of their own."""

COMMON_WORDS = ("linear", "dynamic", "relative", "contextual", "polar", "conv")
"""Names that titles of other encodings contain as ordinary words."""

FILLER = re.compile(
    "apply|build|compute|create|get|make|precompute|embeddings?|encodings?|embed|emb|freqs|cache|cis|cos|sin|bias|positional"
    "|positions?|pos|type|tensor|torch|layer|module|py|conv|length|m2m100|wav2vec2|fast|flash|fused|simple|[ +]"
)
"""Words of titles beside the name of an encoding that do not change its meaning. Any other word may change it."""

SHORTEST = 4
"""Letters of a name that is looked for inside of titles; shorter ones are in other words, too."""

GENERIC = re.compile(
    "(embeddings?|encodings?|representations?|positional|positions?|pos|relative|bias(es)?|slopes?|scaling|attention|for|pe)$"
)
"""Words at the end of titles that do not distinguish encodings."""


def _stem(name: str) -> str:
    """Return the letters and digits of a name, without parentheses and their text, and without generic last words.

    >>> _stem("ALiBiPositionalBias"), _stem("T5 relative position bias"), _stem("relative position"), _stem("position")
    ('alibi', 't5', 'relative', '')
    """
    word = _squeezed(name)
    stem, shorter = word, GENERIC.sub("", word)
    while shorter != stem:
        stem, shorter = shorter, GENERIC.sub("", shorter)
    return stem or ("relative" if "relative" in word else "")


def _squeezed(name: str) -> str:
    """The letters, digits and ``+`` of a name, without the suffix of a file of Python and what is in parentheses."""
    return re.sub(r"[(].*?[)]|[^a-z0-9+]", "", name.lower().removesuffix(".py"))


def _names_inside(stem: str, known: Mapping[str, str]) -> tuple[set[str], str | None, str]:
    """Return the encodings and the scaling whose names are in a title, and the rest of the title.

    Longer names come first, and of equally long names the one that begins earlier in the title.

    >>> _names_inside("llamalinearscalingrotary", {"rotary": "rotary"})
    ({'rotary'}, 'linear', 'llama')
    """
    scalings = {_squeezed(alias): each for each, kind in SCALINGS.items() for alias in (each, *kind.info.aliases)}
    scalings |= {f"{each}scal{end}": each for each in SCALINGS for end in ("ing", "ed", "")}
    scalings |= {"dynamicntk": "dynamic", "ntk": "ntk"}
    found = set[str]()
    scaling = None
    for words in sorted({*known, *scalings}, key=lambda each: (-len(each), stem.find(each), each)):
        is_name = len(words) >= SHORTEST and words not in COMMON_WORDS
        if words in stem and (is_name or words == "ntk"):
            stem = stem.replace(words, " ")
            if words in known:
                found.add(known[words])
            else:
                scaling = scaling or scalings[words]
    return found, scaling, FILLER.sub("", stem).strip()


def class_named(name: str) -> Kind | type[Scaling] | None:
    """Return the class of the encoding or scaling of this name or phrase, or ``None`` if there is none.

    >>> class_named("RoPE").__name__, class_named("YaRN").__name__, class_named("Nothing")
    ('Rotary', 'YaRN', None)
    """
    try:
        return _find_scaling(_stem(name)) or find(name)
    except LocantError:
        return None


def meanings(name: str) -> list[Kind]:
    """Return the classes that a title of positions may mean if several have it.

    >>> [kind.__name__ for kind in meanings("PositionalEncoding")], meanings("Embedding")
    (['Sinusoidal', 'Learned'], [])
    """
    if not re.search("pos|relative|encoding", name.lower()):
        return []
    return [find(each) for each in AMBIGUOUS.get(_stem(name), ())]


def _find_scaling(stem: str) -> type[Scaling] | None:
    """Return the scaling of this name, which may follow ``rotary+``, or ``None``."""
    name = stem.rpartition("+")[2]
    stems = {key: map(_stem, (key, *kind.info.aliases)) for key, kind in SCALINGS.items()}
    return next((kind for key, kind in SCALINGS.items() if name in stems[key]), None)


def _scaling_error(name: str, kind: type[Scaling]) -> RangeError:
    """Return the error for a scaling instead of an encoding, with the call of a rotary encoding that has it."""
    example = kind.by_factor(4.0, trained=4096, dim=64, base=10_000.0)
    required = [field.name for field in fields(example) if field.default is MISSING]  # type: ignore[arg-type]  # all are dataclasses
    values = [(name, getattr(example, name)) for name in required]
    arguments = ", ".join(f"{name}={'...' if isinstance(value, tuple) else value}" for name, value in values)
    return RangeError(
        f"got encoding {name!r}, which is a scaling of rotary",
        f"locant.encoding('rotary', head_dim=64, scaling=locant.scaling.{type(example).__name__}({arguments}))",
    )


def _encoding_for_model(stem: str, inside: Collection[str]) -> str | None:
    """Return the name of the encoding in models of this name, or ``None`` if no published model has the name.

    Args:
        inside: names of encodings and scalings in the title, which may follow the name of a model.
    """
    from locant.models.encodings import encoding_from_config, layer_types
    from locant.models.registry import presets

    families = {
        family: config
        for name, config in presets().items()
        for family in (_family(_stem(config["model_type"])), _family(_stem(name)))
        if len(family) > 2
    }
    own = _family(stem)
    begun = sorted((each for each in families if inside and stem.startswith(each)), key=len)
    family = own if own in families else begun[-1] if begun else None
    if family is None:
        return None
    kinds = layer_types(families[family])
    return type(encoding_from_config(families[family], layer_type=kinds[0] if kinds else None)).info.name


def _family(stem: str) -> str:
    """Return the letters before the version in a model's name."""
    return re.split(r"v?[0-9]", stem, maxsplit=1)[0]


def encoding(name: str, *unnamed: Any, **options: Any) -> PositionEncoding:
    """Build the encoding of this name with these options, all given by name.

    >>> encoding("alibi", num_heads=8)
    ALiBi(num_heads=8)
    """
    kind = find(name)
    if unnamed:
        sizes = ", ".join(f"{size}=..." for size in kind.sizes())
        got = f"got {', '.join(map(shown, unnamed))} without a name for {name!r}, expected options by name"
        raise RangeError(got, f"locant.encoding({name_of(name)!r}, {sizes})")
    return build(kind, options)


def register_encoding(name: str, cls: Kind, aliases: Iterable[str] = ()) -> None:
    """Make an encoding known to `locant.encoding`, `locant list`, `plot`, `compare` and the lab.

    An installed package needs no call: it names the class in an entry point of the group ``locant.encodings``.

    Args:
        name: the name of the encoding.
        cls: the class. If its constructor requires more than ``d_model``, ``num_heads``, ``head_dim`` and
            ``max_seq_len``, it overrides ``for_model``.
        aliases: other names, in addition to the aliases in its `info`.

    >>> class Even(PositionEncoding):
    ...     '''Adds one to every other token.'''
    ...     def embed(self, x, positions):
    ...         return x + (positions.index % 2)[..., None]
    >>> locant.register_encoding("even", Even)  # doctest: +SKIP
    """
    ENCODINGS.register(name, cls, aliases)


def require_encoding(name: str, value: Any) -> None:
    """Raise `RangeError` unless a registered value is an encoding class, under a name that no scaling has."""
    if not (isinstance(value, type) and issubclass(value, PositionEncoding)):
        got = f"got {shown(value)} as encoding {name!r}, expected a class"
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
