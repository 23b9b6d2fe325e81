"""The values of `--with`, which replace the positions of a trained model.

``own`` keeps the model's positions, and ``exact`` computes them with exact angles. ``nope`` removes positions.
``drope`` is another name for ``nope``, after the recipe DroPE. ``yarn:4`` and other scalings stretch the model's
encoding by a factor. ``self-extend:8`` (with a group size), ``rerope`` and ``dual-chunk`` treat far tokens differently
from near tokens. Any other value is a name in `locant list`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from locant.arguments import one_of, real
from locant.errors import InputError, LocantError, PythonRemedy, Remedy
from locant.lab.decoder import Decoder
from locant.models.config_values import attribute
from locant.positions.base import ModelShape, PositionEncoding
from locant.positions.encodings.rotary import Rotary
from locant.positions.registry import encoding, encodings, find, name_of
from locant.positions.scaling import EXTENDING, SCALINGS, scaling_name
from locant.spelling import literal
from locant.swapping import Swap, swap
from locant.swapping.plan import LayerPlan
from locant.swapping.rotary_point import rotary_points

PLAIN = ("own", "exact", "nope")
ALIASES = {"drope": "nope"}
STRETCHES = tuple(sorted(EXTENDING, key=("linear", "ntk", "yarn").__contains__, reverse=True))  # the usual ones first
ROTARIES_BY_CLASS: dict[str, Callable[[int, int], dict[str, int]]] = {
    "self-extend": lambda group, trained: {"group": group, "neighbours": max(1, trained // 4)},
    "rerope": lambda _, trained: {"window": max(1, trained // 2)},
    "dual-chunk": lambda _, trained: {"chunk_size": max(2, trained * 3 // 4), "local_size": trained // 16},
}
"""Encodings with the model's own distances for near tokens and with bounded distances for far tokens.

Each function takes a group size and the trained length, and returns the sizes of the encoding.
"""
HIDDEN_NAMES = {"nope", "rotary", *(name.replace("-", "_") for name in ROTARIES_BY_CLASS)}
"""Names in `locant list` that `PositionOverride.names` does not add, because other values replace them."""

TAKE_NUMBER = (*STRETCHES, "self-extend")
USUAL_FACTOR = {"dynamic": 1.0, "self-extend": 8.0}
OWN_ROTARY = "use own, exact or yarn:4"
FULL = "full_attention"
"""The layers that are stretched if layers with sliding windows have another encoding."""

Replacement = PositionEncoding | LayerPlan | None
"""The positions for a model: one encoding, or one for each layer. ``None`` means the model's own encoding."""


@dataclass(frozen=True)
class PositionOverride:
    """A value of `--with`: a name and, for some names, a factor or a group size.

    >>> PositionOverride.of("yarn:8"), PositionOverride.of("DroPE")
    (PositionOverride(name='yarn', factor=8.0), PositionOverride(name='nope', factor=None))
    """

    name: str
    factor: float | None = None

    @classmethod
    def of(cls, text: str) -> PositionOverride:
        """Parse a value such as ``yarn:4``, ``drope`` or ``alibi``."""
        name, colon, factor = text.strip().lower().partition(":")
        name = _name_of(name)
        if name not in (*STRETCHES, *ROTARIES_BY_CLASS):
            one_of("with", name, cls.names())
        if name not in TAKE_NUMBER:
            if colon:
                raise InputError(f"got {text}, but {name} takes no number", name)
            return cls(name)
        try:
            times = float(factor) if colon else USUAL_FACTOR[name]
        except (KeyError, ValueError):
            raise InputError(f"got {text}, expected a number after a colon", f"{name}:4") from None
        if name == "self-extend" and not times.is_integer():
            raise InputError(f"got {text}, expected a whole number, the size of a group", f"{name}:4")
        return cls(name, float(real("with", times, low=1, remedy=f"{name}:4")))

    def __str__(self) -> str:
        usual = self.factor in (None, USUAL_FACTOR.get(self.name))
        return self.name if usual else f"{self.name}:{literal(self.factor or 1)}"

    @staticmethod
    def names() -> tuple[str, ...]:
        """Return all names. The names in `TAKE_NUMBER` take a number after a colon."""
        return (*PLAIN, *STRETCHES, *ROTARIES_BY_CLASS, *(name for name in encodings() if name not in HIDDEN_NAMES))

    @property
    def is_scaling(self) -> bool:
        """Return whether this override scales the model's own encoding."""
        return self.name in STRETCHES

    @property
    def is_built_from_rotary(self) -> bool:
        """Return whether this override is built from the model's own rotary encoding."""
        return self.is_scaling or self.name in ROTARIES_BY_CLASS

    @property
    def is_for_reading_only(self) -> bool:
        """Return whether this override is only for reading.

        A model cannot be trained with it, and a folder cannot contain it.
        """
        return self.name in ("exact", *ROTARIES_BY_CLASS)

    def stretched_length(self, trained: int) -> int:
        """Return the length to which this override stretches a model. Without a scaling, return the trained length."""
        return round(trained * self.factor) if self.is_scaling and self.factor else trained

    def encoding(
        self, model: Any, trained: int, longest: int, layer_type: str | None = None
    ) -> PositionEncoding | None:
        """Return the encoding for `swap`, or ``None`` for the model's own encoding.

        Args:
            trained: the length that the model was trained at.
            longest: the longest length that the model will read.
            layer_type: the type of the layers that use the encoding, if layer types have different encodings.
        """
        if self.name != "own" and hasattr(model.config, "locant"):
            got = f"got {self.name} for a model that was saved with another encoding in it"
            raise InputError(got, "use own, or the model before the swap")
        return self._build(lambda: self._own(model, layer_type), lambda: _shape_of(model, self.name, longest), trained)

    def replacement(self, model: Any, trained: int, longest: int) -> Replacement:
        """Return the positions that `swap_positions` gives to the model. The arguments are the same as for `encoding`.

        If the layers of the model have several rotary encodings, as in Gemma 3, only layers with full attention are
        stretched, as `locant extend` does. Layers with a sliding window keep their own encoding, because the distances
        in a window do not grow with the text.
        """
        kinds = {kind for point in rotary_points(model, angles="exact") for kind in point.own}
        if not (self.is_built_from_rotary and len(kinds) > 1 and FULL in kinds):
            return self.encoding(model, trained, longest)
        stretched = self.encoding(model, trained, longest, FULL)
        return lambda _, layer_type: stretched if layer_type == FULL else None

    def for_decoder(self, model: Decoder, longest: int) -> PositionEncoding | None:
        """Return the encoding for a decoder of the lab at this length, or ``None`` for the decoder's own encoding."""
        own_encoding = model.encoding

        def rotary() -> Rotary:
            if isinstance(own_encoding, Rotary):
                return own_encoding
            got = f"got {self.name} for a model with the encoding {own_encoding!r}, which is not rotary"
            raise InputError(got, "use own, nope or another encoding, or train a model with --encoding rotary")

        if self.is_built_from_rotary and model.train_length is None:
            got = f"got {self.name} for a model whose config.json does not state the length of its training"
            raise InputError(got, "add 'train_length': 64 to it, with the tokens per window in its training")
        if self.name == "exact":
            return rotary().replace(angles="exact")
        shape = ModelShape(d_model=model.embedding.token.d_model, num_heads=model.num_heads, max_seq_len=longest)
        return self._build(rotary, lambda: shape, model.train_length or longest)

    def _build(
        self, own: Callable[[], Rotary], shape: Callable[[], ModelShape], trained: int
    ) -> PositionEncoding | None:
        if self.name in PLAIN:
            return PositionEncoding() if self.name == "nope" else None
        if self.name in ROTARIES_BY_CLASS:
            sizes = ROTARIES_BY_CLASS[self.name](int(self.factor or 1), trained)
            return encoding(self.name.replace("-", "_"), rotary=own(), **sizes)
        if self.factor is not None:
            rotary = own()
            scaling = SCALINGS[self.name].by_factor(self.factor, trained, rotary.rotary_dim, rotary.base)
            return rotary.replace(scaling=scaling, seq_len=None)
        return find(self.name).for_model(shape())

    def _own(self, model: Any, layer_type: str | None) -> Rotary:
        points = rotary_points(model, angles="exact")
        for point in points:
            point.require_own()
        rotaries = [each for point in points for each in point.own.items()]
        different = {
            repr(rotary): rotary for kind, rotary in rotaries if layer_type is None or kind in (None, layer_type)
        }
        if len(different) != 1:
            got = f"got {self.name} for {type(model).__name__}, which has {len(different)} rotary encodings"
            raise InputError(
                got, "use own, exact or nope" if different else "use own, or a model with rotary positions"
            )
        return next(iter(different.values()))


def swap_positions(model: Any, replacement: Replacement) -> Swap:
    """Swap the positions of a model of `transformers`. See `locant.swap`."""
    if replacement is None or isinstance(replacement, PositionEncoding):
        return swap(model, replacement)
    return swap(model, layers=replacement)


def _shape_of(model: Any, way: str, longest: int) -> ModelShape:
    config = model.config.get_text_config()
    if (heads := attribute(config, "num_attention_heads")) is None:
        raise InputError(f"got {way} for {type(model).__name__}, which has no attention heads", "use own")
    return ModelShape(
        d_model=config.hidden_size,
        num_heads=heads,
        num_kv_heads=attribute(config, "num_key_value_heads"),
        head_dim=attribute(config, "head_dim") or 0,
        max_seq_len=longest,
    )


def _remedy_for(remedy: PythonRemedy) -> str:
    """Return the remedy in values of `--with`."""
    if "rotary" in remedy.encodings:
        return OWN_ROTARY
    return Remedy(**{"with": remedy.encodings[0]}) if remedy.encodings else remedy.words


def _name_of(text: str) -> str:
    """Return the canonical name of a scaling, an encoding or another value. Return an unknown name unchanged."""
    if text in (*PLAIN, *ALIASES, *ROTARIES_BY_CLASS):
        return ALIASES.get(text, text)
    if scaling := scaling_name(text):
        return scaling
    try:
        name = name_of(text)
    except LocantError as error:
        # The text is known, for example as a model. Scalings were read above, so a similar text is misspelt.
        if isinstance(error.remedy, PythonRemedy) and not error.remedy.scaling:
            raise InputError(error.cause, _remedy_for(error.remedy)) from None
        return text
    if name == "rotary":
        raise InputError(f"got {text}, but models with rotary positions have their own", OWN_ROTARY)
    return next((each for each in ROTARIES_BY_CLASS if each.replace("-", "_") == name), name)
