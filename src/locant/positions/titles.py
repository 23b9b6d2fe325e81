"""Read the title of an encoding: a class of another package, a heading of a tutorial, or the name of a model.

The letters of a title are cut into known words: names of encodings and of scalings, `SYNONYMS`, and words that do not
change the meaning (`FILLER`). Then these rules are tried in this order:

1. A title for rotary positions with several axes (`SEVERAL_AXES`) is not a name. The error contains the call.
2. A title that contains a scaling, and no encoding other than rotary, means this scaling.
3. If all words are known, the title means the one encoding in it. Without an encoding it may mean one of `SEVERAL`.
4. A title that begins with the name of a model means this model.
5. If a title has one encoding and unknown words, the words may mean a variant of the encoding.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from typing import NamedTuple

from locant.errors import PythonRemedy, RangeError
from locant.positions.scaling import SCALINGS, Scaling

SYNONYMS = {
    "learnable": "learned", "trainable": "learned", "sine": "sinusoidal", "sinecosine": "sinusoidal",
    "attentionisallyouneed": "sinusoidal", "no": "nope", "roformer": "rotary", "extrapolatable": "xpos",
    "linearbiases": "alibi", "kernelized": "kerple", "selfattentionwith": "shaw", "functionalinterpolationfor": "fire",
}  # fmt: skip
"""Words that mean an encoding but are not among its names."""

SEVERAL = {
    "relative": ("t5", "shaw", "transformer_xl"),
    "encoding": ("sinusoidal", "learned"),
    "pos": ("sinusoidal", "learned"),
}
"""Parts of titles that do not name an encoding, and the encodings that such titles may mean."""

_GRID = "locant.encoding('rotary', head_dim=64, sections=(16, 16), axial=True)"
SEVERAL_AXES = {
    "mrope": "locant.encoding('rotary', head_dim=128, sections=(16, 24, 24))",
    "2drope": _GRID, "2drotary": _GRID, "axialrope": _GRID, "axialrotary": _GRID,
}  # fmt: skip
"""Parts of titles of rotary encodings for images and videos, and the calls that build these encodings."""

FILLER = frozenset((
    "apply", "build", "compute", "create", "get", "make", "precompute", "embedding", "embeddings", "encoding",
    "encodings", "embed", "emb", "representation", "representations", "bias", "biases", "slopes", "scaling",
    "attention", "relative", "positional", "position", "positions", "pos", "pe", "freqs", "cache", "cis", "cos", "sin",
    "type", "tensor", "torch", "layer", "module", "py", "length", "m2m100", "fast", "flash",
    "fused", "simple", "+",
))  # fmt: skip
"""Words that do not change the meaning of a title. Any other word may change it."""

ONLY_FILLER = re.compile(f"(?:{'|'.join(map(re.escape, sorted(FILLER)))})+")
"""Names that consist of filler, such as ``position_embedding``. Such a name counts only if it is the whole title."""

ORDINARY = frozenset(("linear", "dynamic", "contextual", "path", "polar", "llama3"))
"""Names that are also ordinary words, which occur in titles of other encodings and of models."""

_ENDS = ("", "scaling", "scaled", "scale")
SCALING_BY_WORD = {
    re.sub("[^a-z0-9]", "", name) + end: kind
    for kind in SCALINGS.values() for name in (kind.info.name, *kind.info.aliases) for end in _ENDS
}  # fmt: skip
"""Scalings by name without punctuation. Each of `_ENDS` may follow a name."""


MAX_LENGTH = 200
"""The largest number of characters of a title. Longer texts are not read as titles."""


class Title(NamedTuple):
    """The encodings and the scaling that a title names, and its unknown letters."""

    encodings: set[str]
    scaling: type[Scaling] | None
    unknown: str


def encoding_in_title(title: str, names: Mapping[str, str]) -> str | None:
    """Return the name of the encoding that a title means, or ``None`` if no rule applies.

    Args:
        title: the title.
        names: the main name of each encoding, by any of its names.

    Raises:
        RangeError: the title may mean several encodings or a variant of an encoding, or it means a scaling or a
            model. The remedy contains the possible calls.
    """
    if len(title) > MAX_LENGTH:
        return None
    if (call := next((call for part, call in SEVERAL_AXES.items() if part in _letters(title)), None)) is not None:
        raise RangeError(f"got encoding {title!r}, which is rotary with several position axes", _remedy(call, "rotary"))
    encodings, scaling, unknown = _read(title, names)
    if scaling is not None and encodings <= {"rotary"}:
        raise scaling_error(title, scaling)
    if not unknown and encodings:
        return encodings.pop() if len(encodings) == 1 else None
    if several := meanings_of_title(title, names):
        calls = " or ".join(f"locant.encoding({name!r}, ...)" for name in several)
        raise RangeError(f"got encoding {title!r}, which is a name of several", _remedy(calls, *several))
    _refuse_model(title)
    if len(encodings) == 1 and len(unknown) > 2:  # otherwise it is a typing error
        got = f"got encoding {title!r}, which is {(plain := encodings.pop())} with {unknown!r}"
        remedy = f"locant.encoding({plain!r}, ...) if the plain form is meant"
        raise RangeError(f"{got}, expected a name of locant list", _remedy(remedy, plain))
    return None


def meanings_of_title(title: str, names: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the encodings that a title about positions may mean if it does not name one.

    >>> meanings_of_title("PositionalEncoding", {}), meanings_of_title("Embedding", {})
    (('sinusoidal', 'learned'), ())
    """
    encodings, scaling, unknown = _read(title, names)
    if encodings or scaling or unknown:
        return ()
    return next((several for part, several in SEVERAL.items() if part in _letters(title)), ())


def scaling_in_title(title: str) -> type[Scaling] | None:
    """Return the scaling that has this name, or ``None``. A word such as ``Scaling`` may follow the name."""
    return SCALING_BY_WORD.get(_letters(title))


def scaling_error(title: str, kind: type[Scaling]) -> RangeError:
    """Return the error for a scaling that is given as an encoding. The remedy is a rotary encoding with the scaling."""
    example = kind.by_factor(4.0, trained=4096, dim=64, base=10_000.0)
    required = [field.name for field in fields(example) if field.default is MISSING]  # type: ignore[arg-type]  # all are dataclasses
    values = [(name, getattr(example, name)) for name in required]
    arguments = ", ".join(f"{name}={'...' if isinstance(value, tuple) else value}" for name, value in values)
    scaling = type(example).__name__
    scaling_call = f"locant.scaling.{scaling}({arguments})"
    return RangeError(
        f"got encoding {title!r}, which is a scaling of rotary",
        PythonRemedy(
            f"locant.encoding('rotary', head_dim=64, scaling={scaling_call})",
            encodings=("rotary",),
            scaling=scaling,
        ),
    )


def _remedy(code: str, *encodings: str) -> PythonRemedy:
    return PythonRemedy(code, encodings=encodings)


def _read(title: str, names: Mapping[str, str]) -> Title:
    """Cut a title into known words. If some letters are unknown, ignore known words that are short or ordinary."""
    letters, encoding_by_word = _letters(title), {_letters(each): name for each, name in names.items()} | SYNONYMS
    if letters in encoding_by_word:
        return Title({encoding_by_word[letters]}, None, "")
    scaling_by_word = {} if "bias" in letters else SCALING_BY_WORD  # a bias is not scaled
    named = {word for word in {*encoding_by_word, *scaling_by_word} if not ONLY_FILLER.fullmatch(word)}
    words, unknown = _cut(letters, named | FILLER)
    if unknown:
        distinct = {word for word in named - ORDINARY if len(word) > 3 or word == "ntk"}
        words, unknown = _cut(letters, distinct | FILLER)
    encodings = {encoding_by_word[word] for word in words if word in named and word in encoding_by_word}
    scalings = [scaling_by_word[word] for word in words if word in scaling_by_word]
    return Title(encodings, scalings[0] if scalings else None, unknown)


def _cut(letters: str, words: Collection[str]) -> tuple[list[str], str]:
    """Cut letters into words so that the fewest letters remain. Among these cuts, use one with the fewest words.

    >>> _cut("nopositionalencodingz", {"no", "noposition", "position", "positional", "encoding"})
    (['no', 'positional', 'encoding'], 'z')
    """
    cuts = {len(letters): (list[str](), "")}  # by the index of the first cut letter
    for begin in reversed(range(len(letters))):
        after, unknown = cuts[begin + 1]
        options = [(after, letters[begin] + unknown)]
        for word in words:
            if letters.startswith(word, begin):
                after, unknown = cuts[begin + len(word)]
                options.append(([word, *after], unknown))
        cuts[begin] = min(options, key=lambda cut: (len(cut[1]), len(cut[0]), cut[0]))
    return cuts[0]


def _letters(title: str) -> str:
    """Return the letters, digits and ``+`` of a title. Leave out the suffix ``.py`` and text in parentheses."""
    return re.sub(r"[(].*?[)]|[^a-z0-9+]", "", title.lower().removesuffix(".py"))


def _refuse_model(title: str) -> None:
    """Raise `RangeError` if a title begins with the name of a published model. The remedy builds its encoding."""
    from locant.models.model_names import model_type_in, position_classes

    if (model_type := model_type_in(title)) is None:
        return
    kinds = position_classes(model_type)
    got, remedy = f"got encoding {title!r}, which is a model", "locant.encoding_from_config of its config.json"
    if not kinds:
        words = "use locant explain for its configuration, and a name of locant list here"
        raise RangeError(f"{got} whose positions depend on its configuration", PythonRemedy(remedy, words=words))
    sizes = "".join(f", {size}=..." for size in kinds[0].sizes())
    call = f"locant.encoding({kinds[0].info.name!r}{sizes})"
    names = tuple(kind.info.name for kind in kinds)
    raise RangeError(f"{got} whose positions are {' or '.join(names)}", _remedy(f"{call}, or {remedy}", *names))
