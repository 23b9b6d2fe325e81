"""The explanation of a model's position encoding in numbers: everything that `locant explain` prints."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from locant.checkpoints.mistral_params import ORIGIN, PARAMS
from locant.checkpoints.pretrained import describe_layers
from locant.checkpoints.rotary_settings import RotarySettings, rotary_settings
from locant.checkpoints.score_scale import scale_warnings
from locant.checkpoints.windows import FULL, SLIDING, Place, reach_by_layer
from locant.deprecation import Renamed
from locant.embedding.table import TableSize, table_sizes
from locant.errors import ConfigWarning
from locant.models.architecture import UNKNOWN, Architecture
from locant.models.config_values import (
    LENGTHS,
    NUM_LAYERS,
    WIDTHS,
    Config,
    flag,
    integer,
    integer_at,
    layer_types_in,
    sections_in,
)
from locant.models.encodings import encoding_from_config, layer_types, read_measurable, table_length
from locant.models.lab_decoder import is_lab_decoder
from locant.models.mixed_layers import ROTATION_KINDS
from locant.models.ngram_tables import ngram_tables
from locant.models.per_layer_tables import per_layer_sizes
from locant.models.registry import with_defaults
from locant.models.rope_parameters import stated_trained_length
from locant.models.rotary_config import named_layout
from locant.positions.base import PositionEncoding
from locant.positions.encodings.learned import Learned
from locant.positions.encodings.rotary import Rotary
from locant.positions.scaling import DynamicNTK, Linear, LongRoPE, Proportional, Scaling, YaRN
from locant.spelling import spell

AXES = ("time", "rows", "columns")
"""The meaning of each axis of positions of images and video."""

MAX_LAYERS = 10_000
"""The largest number of layers that are listed. No published model has a tenth of this number."""

DEFAULT_LENGTH = 2048
"""The length to measure if a configuration has no length."""

TOKEN_WIDTHS = ("embedding_size", "word_embed_proj_dim", "dim", *WIDTHS)  # widths below the layers' come first


@dataclass(frozen=True, kw_only=True)
class Serving:
    """The answer to whether vLLM follows the configuration, and the reasons if it does not."""

    answer: Literal["yes", "differently", "no"]
    reasons: tuple[str, ...] = ()


SWAPPED = Serving(answer="no", reasons=("layers have encodings from locant.swap, which vLLM does not know",))


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The layers that share one encoding. `name` is their type, or ``None`` if all layers share one."""

    name: str | None
    kind: str
    encoding: str
    methods: tuple[str, ...]
    num_parameters: int
    rotary: RotarySettings | None
    warnings: tuple[str, ...]

    doors = Renamed("methods")


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The explanation of a configuration.

    Args:
        longest, trained: the longest sequence, and the longest sequence before any extension, if known. Rows of a
            table that are not positions do not count.
        layers: the layer types, with the encodings of the architecture.
        strip: every layer, from the first to the last. It is empty if the configuration does not state the number or
            order of the layers.
        swapped: the encoding that `locant.swap` put into each layer. ``None`` means that the layer has its own
            encoding. The tuple is empty if the model is not swapped.
        defaults: the defaults of the class in `transformers` for values that the configuration lacks.
    """

    model_type: str
    longest: int | None
    trained: int | None
    layers: tuple[Layers, ...]
    strip: tuple[Layer, ...]
    swapped: tuple[str | None, ...]
    tables: tuple[TableSize, ...]
    tied: bool | None
    vllm: Serving
    defaults: Mapping[str, Any]


def explain(config: Mapping[str, Any] | object) -> Explanation:
    """Explain the position encoding of a Hugging Face configuration. Long contexts are measured, which takes a second.

    Missing values are replaced by the defaults of the architecture in `transformers`. See `with_defaults`.

    >>> explained = explain({"model_type": "gpt2", "n_positions": 1024, "n_embd": 768, "vocab_size": 50257})
    >>> explained.layers[0].methods, explained.tables[1]
    (('embed',), TableSize(name='positions', shape=(1024, 768)))
    """
    stated, architecture = read_measurable(config)
    full = with_defaults(config)
    device = "meta" if architecture.rotary_keys.no_rotation is None else "cpu"  # where lengths are measured
    built = {name: _without_values(full, name, device) for name in layer_types(full) or (None,)}
    named = {name: encoding for name, (encoding, _) in built.items()}
    longest = table_length(named.values()) or _longest(full)
    rotaries = [encoding for encoding in named.values() if isinstance(encoding, Rotary)]
    swapped = describe_layers(stated)
    return Explanation(
        model_type=full["model_type"],
        longest=longest,
        trained=trained_length(full, rotaries[0]) if rotaries else longest,
        layers=tuple(_layers(full, architecture, name, *each, longest) for name, each in built.items()),
        strip=layer_strip(full),
        swapped=swapped,
        tables=(*_tables(full, named), *per_layer_sizes(config), *(table.size for table in ngram_tables(config))),
        tied=flag("tie_word_embeddings", full["tie_word_embeddings"]) if "tie_word_embeddings" in full else None,
        vllm=SWAPPED if any(swapped) else _serving(full, architecture, rotaries),
        defaults={key: value for key, value in full.items() if key not in stated},
    )


def trained_length(config: Config, rotary: Rotary) -> int | None:
    """Return the trained length of a model, or None if its configuration lacks it, as with linear scaling."""
    stated = getattr(rotary.scaling, "original_max_seq_len", None) or stated_trained_length(config)
    return stated or (None if isinstance(rotary.scaling, (Linear, Proportional)) else _longest(config))


def _layers(
    config: Config,
    architecture: Architecture,
    name: str | None,
    encoding: PositionEncoding,
    ignored: Sequence[str],
    longest: int | None,
) -> Layers:
    rotary = None
    if isinstance(encoding, Rotary):
        trained = trained_length(config, encoding) or longest or DEFAULT_LENGTH
        rotary = rotary_settings(encoding, longest or trained, trained)
    nope = type(encoding) is PositionEncoding
    return Layers(
        name=name,
        kind="none" if nope else type(encoding).__name__,
        encoding="no position encoding (NoPE)" if nope else repr(encoding),
        methods=tuple(method for method in encoding.methods() if method != "unrotate"),  # a warning covers `unrotate`
        num_parameters=sum(size.num_parameters for size in table_sizes(encoding)),
        rotary=rotary,
        warnings=(*ignored, *_warnings(config, architecture, encoding, rotary, longest)),
    )


def _without_values(config: Config, name: str | None, device: str) -> tuple[PositionEncoding, list[str]]:
    """Build the encoding of these layers on a device, and list the values in the configuration that it ignores.

    Its tables are not initialised. If the configuration has ``rope_interleave``, it decides the layout.
    """
    with torch.device(device), _SkipInitialization(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")  # the table states that the encoding was measured
        warnings.simplefilter("always", ConfigWarning)
        encoding = encoding_from_config(config, layer_type=name, layout=named_layout(config), allow_no_rotation=True)
    return encoding, [str(each.message) for each in caught]


class _SkipInitialization(TorchFunctionMode):
    """A mode without the initialization of tables, because random numbers on the meta device load torch's compiler.

    It does not use `Weightless`, because the measurement of an architecture without a row would fail in that mode.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in (nn.init.normal_, torch.Tensor.normal_):
            return {"tensor": args[0] if args else None, **(kwargs or {})}["tensor"]
        return func(*args, **(kwargs or {}))


def _warnings(
    config: Config,
    architecture: Architecture,
    encoding: PositionEncoding,
    rotary: RotarySettings | None,
    longest: int | None,
) -> Iterator[str]:
    """Yield warnings about an encoding, its measurements, and its architecture (from the row of that architecture)."""
    if architecture.rotary is UNKNOWN:
        yield "locant has no row for this architecture, so its encoding was measured on its class in transformers"
    if (reason := architecture.rotary_keys.no_rotation) is not None:
        yield f"its code {reason.removeprefix('which ')}"
    if isinstance(encoding, Rotary):
        yield from _scaling_warnings(encoding.scaling, longest)
    if rotary is not None:
        yield from _rotary_warnings(rotary, config, architecture)
        yield from _axis_warnings(config, encoding)
    if not architecture.rotary_keys.latent:  # with latent attention, head_dim is only a part of the width
        yield from scale_warnings(config, encoding.head_dim if isinstance(encoding, Rotary) else None)
    if isinstance(encoding, Learned):
        rows = encoding.max_seq_len
        first = f", after {encoding.offset} rows that are not positions" if encoding.offset else ""
        yield (
            f"the table ends at position {rows - 1:,}{first}: later positions are errors. Learned.resize interpolates "
            "the table for longer sequences, and the model then needs some training. A scaling does not apply"
        )
    messages = (each if isinstance(each, str) else each(config, encoding) for each in architecture.warnings)
    yield from filter(None, messages)


def _scaling_warnings(scaling: Scaling, longest: int | None) -> Iterator[str]:
    if isinstance(scaling, (YaRN, LongRoPE)) and longest is not None:
        reached = scaling.factor * scaling.original_max_seq_len
        if round(reached) != longest:
            yield (
                f"factor {spell(scaling.factor)} x original {scaling.original_max_seq_len:,} = {reached:,.0f}, but "
                f"max_position_embeddings is {longest:,}: programs that derive one from the others disagree"
            )
    if isinstance(scaling, Linear) and longest is not None:
        yield (
            f"linear scaling has no trained length: max_position_embeddings {longest:,} may be the length before or "
            f"after the factor {spell(scaling.factor)}, and published models have both"
        )
    if isinstance(scaling, (LongRoPE, DynamicNTK)):
        yield (
            f"the frequencies change after {scaling.original_max_seq_len:,} tokens: keys cached before are rotated "
            "wrongly, unless you set the final length first (for_length) or rotate them again (rerotate)"
        )


def _rotary_warnings(rotary: RotarySettings, config: Config, architecture: Architecture) -> Iterator[str]:
    width, rotated = rotary.head_dim, rotary.rotary_dim
    if rotated != width:
        yield (
            f"only {rotated} of {width} dimensions are rotated, and exponents, ramps and factors count "
            f"those {rotated}: code that counts {width} is wrong everywhere except at position 0"
        )
    share = _share(config)
    if share is not None and not (width * share).is_integer() and rotary.scaling != "Proportional":
        yield f"{spell(share)} x {width} is {spell(width * share)} dimensions, rounded down to {rotated}"
    if width % 2:
        yield f"head_dim {width} is odd: kernels that work on pairs read beyond the head"
    if rotary.precision.at_longest > 2**-8:
        yield (
            f"float32 angles change cosines by up to {spell(rotary.precision.at_longest, 1)} near position "
            f"{rotary.length:,}, more than rounding to bfloat16 does. The model was trained with these errors, so "
            "compare both on your own data"
        )
    keys = architecture.rotary
    if keys is not None and keys.layout_doubt:
        yield keys.layout_doubt
    if config.get(ORIGIN) == PARAMS:
        yield (
            f"a {PARAMS} belongs to Mistral's own weights, in which the dimensions of a pair are neighbours. Pass "
            "layout='half' for the weights of transformers, which are the same weights in another order"
        )
    elif keys is not None and keys.layout and not keys.interleave_key and keys.layout != rotary.layout:
        yield (
            f"according to rope_interleave these weights were converted, but the code of {config['model_type']} in "
            f"transformers and vLLM ignores it and pairs dimensions as {keys.layout}. Convert them back for those, and "
            f"pass layout={rotary.layout!r} here"
        )


def _axis_warnings(config: Config, encoding: PositionEncoding) -> Iterator[str]:
    """Yield a warning with the number of pairs of each axis, if these numbers differ from ``mrope_section``."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if (
        not isinstance(encoding, Rotary)
        or encoding.pairs.axes is None
        or encoding.num_axes != len(AXES)
        or rope.get("mrope_section") is None
    ):
        return
    stated, dealt = sections_in(rope), tuple(map(encoding.pairs.axes.count, range(len(AXES))))
    if stated == dealt:
        return
    rest = len(encoding.pairs) - sum(stated)
    more = f". The {rest} pairs that no section covers are rotated by time" if rest > 0 else ""
    got = " and ".join(
        [
            ", ".join(f"{count} to {axis}" for count, axis in zip(dealt[:2], AXES, strict=False)),
            f"{dealt[2]} to {AXES[2]}",
        ]
    )
    yield f"mrope_section is {[*stated]}, but the code of {config['model_type']} deals pairs out in turns: {got}{more}"


def _share(config: Config) -> float | None:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", config.get("rotary_pct")))
    return None if share is None else float(share)


def _serving(config: Config, architecture: Architecture, rotaries: Sequence[Rotary]) -> Serving:
    """Return whether vLLM rotates as a configuration prescribes, according to its sources and open issues in 2025."""
    if is_lab_decoder(config):
        return Serving(answer="no", reasons=("only locant reads a model of locant train",))
    if not architecture.vllm:
        return Serving(answer="no", reasons=(f"locant knows of no vLLM implementation of {config['model_type']}",))
    if config.get("position_embedding_type", "absolute") != "absolute":
        return Serving(answer="no", reasons=("its BERT has only absolute positions",))
    if config.get(ORIGIN) == PARAMS:  # vLLM reorders these weights when it loads them
        rotaries = [rotary.replace(layout=architecture.rotary_keys.layout) for rotary in rotaries]
    reasons = tuple(dict.fromkeys(reason for rotary in rotaries for reason in _reasons(rotary, architecture)))
    return Serving(answer="differently" if reasons else "yes", reasons=reasons)


def _reasons(rotary: Rotary, architecture: Architecture) -> Iterator[str]:
    scaling, keys = rotary.scaling, architecture.rotary_keys
    if isinstance(scaling, YaRN) and scaling.attention_factor is not None:
        yield "its YaRN ignores attention_factor (vllm#46280)"
    if isinstance(scaling, YaRN) and scaling.mscale is not None and not keys.latent:
        yield "its YaRN reads mscale only for DeepSeek's models"
    if isinstance(scaling, DynamicNTK):
        yield "its dynamic scaling is fixed at the longest length, also for short sequences (vllm#3488)"
    if isinstance(scaling, LongRoPE):
        yield "it uses the long factors for every sequence if it is started with a longer context (vllm#27414)"
    if keys.layout not in (None, rotary.layout):
        yield f"it pairs dimensions as {keys.layout} for this architecture and ignores rope_interleave"


def _tables(config: Config, named: Mapping[str | None, PositionEncoding]) -> tuple[TableSize, ...]:
    vocab = integer_at(config, "vocab_size")
    width = next((integer_at(config, key) for key in TOKEN_WIDTHS if config.get(key) is not None), None)
    tables: list[TableSize] = []
    if vocab is not None and width is not None:
        tables.append(TableSize(name="tokens", shape=(vocab, width)))
        segments = integer_at(config, "type_vocab_size", low=0)
        if segments:
            tables.append(TableSize(name="segments", shape=(segments, width)))
    for name, encoding in named.items():
        for size in table_sizes(encoding):
            table = "positions" if isinstance(encoding, Learned) else f"positions.{size.name}"
            tables.append(TableSize(name=table if name is None else f"{table} ({name})", shape=size.shape))
    return tuple(tables)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer.

    Args:
        kind: the name in `Explanation.layers`, or ``None`` if all layers share one encoding.
        window: the number of tokens that the layer attends to, including the token itself. ``None`` means all tokens,
            and 0 means no attention.
        place: where these tokens are, see `Reach`.
    """

    kind: str | None
    window: int | None
    place: Place = field(default="before", repr=False)


def _longest(config: Config) -> int | None:
    """Return the longest sequence. If no other length is stated, it is the training length (BLOOM, Qwen 1)."""
    longest = integer_at(config, *LENGTHS)
    return integer_at(config, "seq_length") if longest is None else longest


def layer_strip(config: Mapping[str, Any] | object) -> tuple[Layer, ...]:
    """Return all layers in order, or an empty tuple if a configuration lacks their number or order.

    >>> config = {"model_type": "gpt2", "n_positions": 1024, "n_embd": 768, "n_layer": 12}
    >>> len(layer_strip(config)), layer_strip(config)[0]
    (12, Layer(kind=None, window=None))
    """
    _, row = read_measurable(config)
    full = with_defaults(config)
    if isinstance(full.get("num_hidden_layers"), Mapping):  # one number for each of several parts (LXMERT)
        return ()
    count = min(integer_at(full, *NUM_LAYERS) or 0, MAX_LAYERS)
    kinds = layer_types(full)
    reaches = reach_by_layer(full, row, count)
    if kinds == ("encoder", "decoder"):
        decoder = min(integer_at(full, "num_decoder_layers") or count, MAX_LAYERS)
        return tuple(Layer(kind=kind, window=None) for kind in [kinds[0]] * count + [kinds[1]] * decoder)
    named = (
        _rotary_by_layer(full, count)
        if kinds and set(kinds) <= set(ROTATION_KINDS)
        else layer_types_in(full)[:MAX_LAYERS]
    )
    named = named or tuple(FULL if reach.window is None else SLIDING for reach in reaches)
    if kinds and (len(named) != count or not {*named} <= {*kinds}):
        return ()
    return tuple(
        Layer(kind=named[number] if kinds else None, window=reach.window, place=reach.place)
        for number, reach in enumerate(reaches)
    )


def _rotary_by_layer(config: Config, count: int) -> tuple[str, ...]:
    """Return ``with`` or ``without`` rotary positions per layer, by the keys of `listed_layers` and `based_layers`."""
    has = config.get("layer_rope_theta") or config.get("no_rope_layers")
    if not has:
        every = integer("no_rope_layer_interval", config.get("no_rope_layer_interval", 4))
        has = [(number + 1) % every for number in range(count)]
    return tuple(ROTATION_KINDS[not each] for each in has)
