"""Whether weights were trained with the positions that their configuration says.

Weights do not say how their positions were rotated, and a model that is read in another way than it was trained still
writes words. So one text is read under each plausible reading, and the losses are held against each other, window by
window. A reading differs from the configuration in one thing at first; from one that clearly fits better the search
goes on, as a configuration may be wrong in two things. Nothing is trained, and nothing is written.

Costs a forward pass of the text for each reading, some 15 of them, and as many again for each thing that is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor, nn

from locant.arguments import one_of, whole
from locant.checkpoints import convert_layout
from locant.errors import InputError, LocantError, Remedy
from locant.kernels.rotary import Layout
from locant.lab.language_model import (
    DTYPES,
    AsDecoder,
    device_of,
    load_config,
    load_model,
    num_windows,
    stated_length,
    without_weights,
)
from locant.lab.settings import VOCAB_SIZE
from locant.lab.summary import ENOUGH_WINDOWS, Cell, Row
from locant.lab.text_learning import losses_in_windows
from locant.models.encodings import layer_types, rotary_layer_types
from locant.positions.encodings.rotary import Rotary
from locant.positions.scaling import Unscaled, scaling_by_name
from locant.swapping import swap
from locant.swapping.added_point import own_tables
from locant.swapping.rotary_point import rotary_points
from locant.text.corpus import read_corpus

ROTARY: Mapping[str, tuple[Any, ...]] = {
    "layout": ("half", "interleaved"),
    "base": (1e4, 1.5e5, 5e5, 1e6, 5e6, 1e7),
    "scaling": ("none", "linear:2", "linear:4", "linear:8", "yarn:4", "llama3:8"),
    "share": (1.0, 0.5, 0.25),
}
"""Bases of Llama, gpt-oss, Llama 3, Qwen and Mistral, Yi, and models for a million tokens; and how most were scaled."""
TURNED: Mapping[str, Callable[[Tensor, int], Tensor]] = {
    "other sign": lambda bias, heads: -bias,
    "heads in reverse": lambda bias, heads: bias.unflatten(0, (-1, heads)).flip(1).flatten(0, 1),
    "none": lambda bias, heads: bias * 0,
}
BIASED = {"bloom": "alibi", "mpt": "position_bias"}
"""Models whose attention is handed ALiBi, ``heads|batch * heads, 1, key``, and the name of that argument."""
LEAST = 0.0005
"""Nats per token that are written as 0.001; of less nothing follows, however alike all windows are."""
WORDS = {
    "layout": "{} layout", "base": "base {:,.0f}", "scaling": "scaling {}", "share": "{:.0%} of each head rotated",
    "slopes": "ALiBi: {}",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What positions weights are taken to have; ``None``: what the configuration says.

    A scaling is said as ``"yarn:4"``, to the length that the model states, or as ``"none"``; slopes as in `TURNED`.

    >>> Reading(layout="interleaved", base=500_000.0).name
    'interleaved layout, base 500,000'
    """

    layout: Layout | None = None
    base: float | None = None
    scaling: str | None = None
    share: float | None = None
    slopes: str | None = None

    @property
    def name(self) -> str:
        told = (WORDS[field].format(value) for field, value in vars(self).items() if value is not None)
        return ", ".join(told) or "the configuration"


OWN = Reading()


class _Subject:
    """A model, what it has of positions, and how to read it otherwise."""

    def __init__(self, model: Any) -> None:
        self.model, self.config = model, model.config.get_text_config()
        self.biased = BIASED.get(self.config.model_type, "")
        is_alibi = self.biased or getattr(self.config, "alibi", False)  # Falcon's is in its attention mask
        points = [] if is_alibi else rotary_points(model, angles="float32")
        for point in points:
            point.require_own()
        self.own = {kind: rotary for point in points for kind, rotary in point.own.items()}
        self.layout = next((rotary.pairs.layout for rotary in self.own.values()), None)
        self.aspects = {"slopes": tuple(TURNED)} if self.biased else ROTARY if self.own else {}

    def rotary(self, own: Rotary, reading: Reading) -> Rotary:
        """The encoding of a reading in the place of an own one, but for the layout."""
        options: dict[str, Any] = {"base": reading.base or own.base}
        if reading.share is not None:
            options["rotary_dim"] = int(own.head_dim * reading.share)
        if reading.scaling == "none":
            options["scaling"] = Unscaled()
        elif reading.scaling is not None:
            trained = stated_length(self.config) // int(reading.scaling.partition(":")[2])
            dim = options.get("rotary_dim", own.rotary_dim)
            options["scaling"] = scaling_by_name(reading.scaling, trained, dim, options["base"])
        return own.alike(**options)

    def computed(self, reading: Reading) -> Sequence[object]:
        """Equal for readings that differ in words alone."""
        rotaries = (repr(self.rotary(own, reading)) for own in self.own.values())
        return reading.layout or self.layout, reading.slopes, *rotaries

    @contextmanager
    def read_as(self, reading: Reading) -> Generator[None]:
        """The model under this reading, until the block is left."""
        with ExitStack() as undo:
            if reading.slopes is not None:
                self._turn(TURNED[reading.slopes], undo)
            if reading.layout not in (None, self.layout):
                self._reorder(reading.layout, undo)
            rotaries = {kind: self.rotary(own, reading) for kind, own in self.own.items()}
            layered = None not in rotaries or len(rotary_layer_types(self.config)) < len(layer_types(self.config))
            if reading.share is not None and (layered or reading.layout not in (None, self.layout)):
                got = "got another share of heads beside another layout, or for layers that differ"
                raise InputError(got, "another reading")  # in the attention of each layer such pairs are rotated
            if [*map(repr, rotaries.values())] != [*map(repr, self.own.values())]:
                undo.enter_context(swap(self.model, layers=lambda _, kind: rotaries.get(kind, rotaries.get(None))))
            yield

    def _reorder(self, layout: Layout | None, undo: ExitStack) -> None:
        """Move rows of queries and keys so that the model's own code rotates the pairs of this layout."""
        state, to = self.model.state_dict(), self.layout
        for name, rows in convert_layout(state, self.model.config, source=layout, to=cast(Layout, to)).items():
            if rows is not state[name]:
                parameter = self.model.get_parameter(name)
                undo.callback(setattr, parameter, "data", parameter.data)
                parameter.data = rows

    def _turn(self, change: Callable[[Tensor, int], Tensor], undo: ExitStack) -> None:
        """Change the bias that each attention is handed."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            bias = change(kwargs[self.biased], self.config.num_attention_heads)
            return args, kwargs | {self.biased: bias}

        for module in self.model.modules():
            if "Attention" in type(module).__name__:
                undo.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)


def audit(
    folder: str,
    files: Sequence[str] = (),
    *,
    length: int | None = None,
    windows: int = 16,
    device: str = "auto",
    dtype: str = "auto",
    on_step: Callable[[int, int], object] = lambda done, total: None,
) -> dict[str, Any]:
    """Find the reading of a model's positions under which it predicts a text best; what is found is ready for JSON.

    The verdict is ``"fits"``, ``"another fits"``, ``"cannot tell"`` where others are within noise of the configuration
    and none is better, or ``"nothing to find"``. `losses` are nats per token by reading, the lowest first.

    Args:
        folder: of this machine, with safetensors and a tokenizer.json.
        files: a text of the kind that the model was trained on; none: the documentation inside Python.
        length: tokens of each window; default: 512, or what the model states, where that is less.
        windows: at most so many, and 10 or more: fewer are too few to conclude from.
        dtype: what the model is read in, ``float32``, ``bfloat16`` or ``float16``; ``auto``: as it was saved.

    Raises:
        InputError: a folder that holds no causal language model, or a text that is too short.
    """
    one_of("dtype", dtype, DTYPES)
    plain = without_weights(load_config(folder).to_dict())
    if not _Subject(plain).aspects:
        table = "a table of learned positions, which are in the weights themselves"
        what = table if own_tables(plain) else "no positions that can be read in another way"
        return {"verdict": "nothing to find", "sentence": f"nothing to find: {type(plain).__name__} has {what}"}
    subject = _Subject(model := load_model(folder, device=device_of(device), dtype=dtype))
    if length is None:
        length = 512 if subject.biased else min(512, stated_length(subject.config))
    corpus = read_corpus(files, tokenizer=folder, usual_vocab_size=VOCAB_SIZE)
    count = num_windows(
        model, corpus, whole("length", length, 2, remedy=Remedy(length=512)), windows, argument="length"
    )
    if count < ENOUGH_WINDOWS:
        remedy = Remedy("{}, a longer text or a smaller {}", windows=16, length=...)
        raise InputError(f"got {count} windows of {length:,} tokens, expected {ENOUGH_WINDOWS} or more", remedy)

    def measured(reading: Reading) -> Row:
        with subject.read_as(reading):
            losses = losses_in_windows(AsDecoder(model, corpus.tokenizer), corpus.ids[: count * length + 1], length)
        if (cell := Cell.of([losses.mean])) is None:
            raise InputError(f"got a loss that is not finite under {reading.name}", "a model in float32")
        windows = {length: tuple(Cell.of([loss]) for loss in losses.by_window)}
        of_all: dict[str, Any] = {"num_seeds": 1, "train_loss": None, "by_position": ()}
        return Row(encoding=reading.name, by_length={length: cell}, by_window=windows, **of_all)

    return {**_search(subject, measured, on_step), "windows": count, "length": length}


def _search(
    subject: _Subject, measured: Callable[[Reading], Row], on_step: Callable[[int, int], object]
) -> dict[str, Any]:
    best = origin = OWN
    rows, seen, left_out = {best: measured(best)}, {subject.computed(best)}, dict[str, str]()
    origins, near = list[Reading](), list[Reading]()
    while origin is not None:
        origins.append(origin)
        around = [replace(origin, **{name: each}) for name, values in subject.aspects.items() for each in values]
        for done, reading in enumerate(around):
            try:
                if (computed := subject.computed(reading)) not in seen:
                    seen.add(computed)
                    rows[reading] = measured(reading)
            except LocantError as error:
                left_out[reading.name] = error.cause
            on_step(done + 1, len(around))
        lowest = min(rows, key=lambda each: _loss(rows[each]))
        best = lowest if _is_clear(rows, lowest, best) else best
        near = [each for each in rows if each != best and not _is_clear(rows, each, best)]
        # With another thing wrong beside it, the right layout may be no better than the wrong one.
        layouts = (each for each in near if replace(each, layout=best.layout) == best)
        origin = next((each for each in (best, *layouts) if each not in origins), None)
    sentence = "no reading fits better than the configuration"
    if best != OWN:
        sentence = f"the weights fit {best.name}, by {_loss(rows[OWN]) - _loss(rows[best]):.3f} nats per token"
    names = [each.name for each in near]
    return {
        "verdict": "another fits" if best != OWN else "cannot tell" if near else "fits",
        "sentence": "; within noise of it: ".join(filter(None, (sentence, "; ".join(names)))),
        "configuration": " or ".join(dict.fromkeys(map(str, subject.own.values()))) or "ALiBi",
        "best": best.name,
        "within_noise": names,
        "losses": {row.encoding: _loss(row) for row in sorted(rows.values(), key=_loss)},
        "left_out": left_out,
    }


def _loss(row: Row) -> float:
    (cell,) = row.by_length.values()
    return cell.mean if cell else math.inf


def _is_clear(rows: Mapping[Reading, Row], one: Reading, other: Reading) -> bool:
    if not abs(_loss(rows[one]) - _loss(rows[other])) >= LEAST:
        return False
    (length,) = rows[one].by_length
    return rows[one].is_clear(length, rows[other], length, comparisons=max(1, len(rows) - 1))
