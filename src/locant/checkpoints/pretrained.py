"""Read the input tables of a published model from its folder, or load a model that was saved while swapped.

The input consists of the token, position and segment tables and the norm of their sum. Nothing else of the model is
read, and every shape and dtype must match the configuration. No code of the folder is run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from locant.arguments import one_of, short_repr, whole
from locant.checkpoints.checkpoint_folder import DTYPES, TensorFolder, read_headers
from locant.checkpoints.config_source import CONFIG, read_json, read_source, require_no_code
from locant.checkpoints.gguf_model import GgufTables, gguf_input_facts
from locant.embedding.ngram import NGramEmbedding
from locant.embedding.per_layer import PerLayerEmbedding
from locant.errors import InputError
from locant.extras import require
from locant.gguf_file import find_gguf
from locant.models.architecture import UNKNOWN, Architecture
from locant.models.config_values import Config, flag, integer, number, part_of, required
from locant.models.encodings import encoding_from_config
from locant.models.lab_decoder import is_lab_decoder
from locant.models.ngram_tables import ngram_tables
from locant.models.per_layer_tables import PerLayerTable, per_layer_table, require_per_layer_table
from locant.models.registry import read_config, read_known_config
from locant.models.weights import InputTables, RowScale
from locant.positions.base import PositionEncoding
from locant.positions.description import from_config
from locant.positions.registry import encodings
from locant.spelling import dtype_name
from locant.swapping.plan import CONFIG_KEY, FUNCTION_KEYS, FUSION_KEY, LOADER, remove_record
from locant.swapping.swap import swap
from locant.tensors import as_dtype

OLD_NAMES = {"weight": "gamma", "bias": "beta"}
"""The names of a norm's parameters in checkpoints converted from TensorFlow."""

PART_WITH_INPUT = {"blt": ("encoder_config", "local_encoder.")}
"""The part that reads the ids in a model whose other parts have token tables, too, and the prefix of its tensors."""


@dataclass(frozen=True, kw_only=True)
class PretrainedInput:
    """The options to build an embedding (on the meta device), and the tensors of its state."""

    options: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


class _Source:
    """A folder, its configuration and the row of its architecture."""

    def __init__(self, folder: Path | str, dtype: torch.dtype | str | None) -> None:
        self.dtype = None if dtype is None else as_dtype(dtype, DTYPES.values())
        self.tensors: TensorFolder | GgufTables
        if isinstance(folder, (str, Path)) and (gguf := find_gguf(folder)) is not None:
            facts = gguf_input_facts(gguf)
            self.tensors = GgufTables(gguf, read_known_config(facts)[1].inputs)
        else:
            self.tensors = TensorFolder(folder)
            facts = read_json(self.tensors.folder / CONFIG)
        self.folder = self.tensors.folder
        self.facts = facts
        if facts.get("auto_map") and read_config(facts)[1].rotary is UNKNOWN:
            kind = short_repr(facts.get("model_type"))
            got = f"got {self.folder}, a model_type {kind} with code of its own, which is not run"
            raise InputError(got, "call locant.register_architecture for it, as in docs/extending.md")
        part, self.prefix = PART_WITH_INPUT.get(str(facts.get("model_type")), (None, ""))
        self.config, self.row = read_known_config(facts if part is None else part_of(facts, facts.get(part)))
        self.stated = _stated_dtype(facts)

    def read(self, module: str, shape: tuple[int, ...], why: str, part: str = "weight") -> Tensor:
        """Read a tensor, and require this shape, which follows from the keys in `why`."""
        name = self._find(module, part)
        if (saved_shape := self.tensors.shape(name)) != shape:
            got = f"got {name} of shape {saved_shape} in {self.folder}, expected {shape} by its {CONFIG} ({why})"
            raise InputError(got, "use the configuration and the weights of one model")
        tensor = self.tensors.tensor(name)
        if self.dtype is not None:
            return tensor.to(self.dtype)
        if self.stated is not None and tensor.dtype != self.stated:
            dtype, stated = dtype_name(tensor.dtype), dtype_name(self.stated)
            got = f"got {name} of {dtype} in {self.folder}, expected {stated} by its {CONFIG}"
            raise InputError(got, f"dtype={dtype!r}, the dtype of the file")
        return tensor

    def num_rows(self, module: str) -> int:
        """Return the number of rows of a table in the file."""
        return self.tensors.shape(self._find(module, "weight"))[0]

    def _find(self, module: str, part: str) -> str:
        """Return the name of a tensor. Raise `InputError` if the model lacks it."""
        name = self.tensors.find(module, part) or self.tensors.find(module, OLD_NAMES.get(part, part))
        if name is None:
            got = f"got {self.folder} without a tensor {module}.{part}, which a {self.config['model_type']} needs"
            raise InputError(got, "use the folder of the whole model, with its own config.json")
        return name


def read_pretrained_token(folder: Path | str, dtype: torch.dtype | str | None = None) -> PretrainedInput:
    """Read only the token table, in the form that `TokenEmbedding` takes."""
    return _token(_Source(folder, dtype))


def read_pretrained_input(folder: Path | str, dtype: torch.dtype | str | None = None) -> PretrainedInput:
    """Read everything up to the first layer, in the form that `InputEmbedding` takes."""
    source = _Source(folder, dtype)
    config, inputs = source.config, source.row.inputs
    if why := inputs.why_not(config) if callable(inputs.why_not) else inputs.why_not:
        got = f"got {folder}, a {config['model_type']}, whose input is not a sum of tables: {why}"
        raise InputError(got, "use TokenEmbedding.from_pretrained, which reads its token table")
    token = _token(source)
    options, tensors = {**token.options}, {"token.weight": token.tensors["weight"]}
    d_model = options["d_model"]
    for table in ngram_tables(source.facts):
        if table.layer is None and table.combine != "sum":
            got = f"got {folder}, whose input has projections of n-gram rows"
            raise InputError(got, "use TokenEmbedding.from_pretrained and NGramEmbedding.from_pretrained")
        if table.layer is None:
            with torch.device("meta"):
                options["ngrams"] = NGramEmbedding.from_config(source.facts)
            shape = (table.num_rows, table.width)
            tensors["ngrams.weight"] = source.read(table.module, shape, "the sizes of its n-gram table")
    if (per_layer := per_layer_table(source.facts)) is not None:
        with torch.device("meta"):
            options["per_layer"] = PerLayerEmbedding(**per_layer.embedding_options)
        tensors |= {f"per_layer.{name}": each for name, each in _per_layer_tensors(source, per_layer).items()}
    if inputs.positions is not None:
        with torch.device("meta"):
            encoding = encoding_from_config(config)
        if "embed" in encoding.methods():
            options["encoding"] = encoding
            tensors |= {f"encoding.{name}": each for name, each in _state(source, encoding).items()}
    if inputs.segments is not None and (
        num_segments := integer("type_vocab_size", config.get("type_vocab_size", 0), 0)
    ):
        options["num_segments"] = num_segments
        shape = (num_segments, d_model)
        tensors["segment.weight"] = source.read(inputs.segments, shape, "type_vocab_size and its width")
    if inputs.norm is not None:
        has_bias = inputs.norm_bias_key is None or flag(inputs.norm_bias_key, config.get(inputs.norm_bias_key, True))
        options["norm"] = nn.LayerNorm(d_model, eps=_eps(config, source.row), bias=has_bias, device="meta")
        for part in ("weight", "bias")[: 1 + has_bias]:
            tensors[f"norm.{part}"] = source.read(inputs.norm, (d_model,), "its width", part)
    if inputs.dropout_key is not None:
        options["dropout"] = number(inputs.dropout_key, config.get(inputs.dropout_key, 0.0), low=0, below=1)
    return PretrainedInput(options=options, tensors=tensors)


def read_pretrained_per_layer(folder: Path | str, dtype: torch.dtype | str | None = None) -> PretrainedInput:
    """Read the per-layer embedding of a model, in the form that `PerLayerEmbedding` takes."""
    source = _Source(folder, dtype)
    table = require_per_layer_table(source.facts)
    return PretrainedInput(options=table.embedding_options, tensors=_per_layer_tensors(source, table))


def _per_layer_tensors(source: _Source, table: PerLayerTable) -> dict[str, Tensor]:
    parts, why = table.num_layers * table.width, "the sizes of its per-layer embedding"
    shapes = {
        "projection.weight": ("per_layer_model_projection", (parts, table.d_model)),
        "norm": ("per_layer_projection_norm", (table.width,)),
    }
    if table.num_rows is not None:
        shapes["weight"] = ("embed_tokens_per_layer", (table.num_rows, parts))
    return {name: source.read(module, shape, why) for name, (module, shape) in shapes.items()}


def read_pretrained_per_layer_gate(
    folder: Path | str, layer: int, dtype: torch.dtype | str | None = None
) -> PretrainedInput:
    """Read the gate of a layer, in the form that `PerLayerGate` takes."""
    source = _Source(folder, dtype)
    table = require_per_layer_table(source.facts)
    layer = whole("layer", layer, 0, table.num_layers - 1, remedy=f"layer=0, of {table.num_layers} layers")
    shapes = {
        "gate.weight": ("per_layer_input_gate", (table.width, table.d_model)),
        "projection.weight": ("per_layer_projection", (table.d_model, table.width)),
        "norm": ("post_per_layer_input_norm", (table.d_model,)),
    }
    place, why = f"layers.{layer}.{table.block}", "the sizes of its per-layer embedding"
    tensors = {name: source.read(place + module, shape, why) for name, (module, shape) in shapes.items()}
    return PretrainedInput(options=table.gate_options, tensors=tensors)


def _state(source: _Source, encoding: PositionEncoding) -> dict[str, Tensor]:
    """Read the tensors of an encoding, stored under the name of the architecture's position table."""
    module, why = source.row.inputs.positions or "", "its positions and its width"
    return {name: source.read(module, tuple(each.shape), why, name) for name, each in encoding.state_dict().items()}


def read_lab_encoding(source: Path | str) -> PositionEncoding | None:
    """Read the encoding of a decoder of `locant train` with its learned weights, or return ``None`` for other models.

    Args:
        source: the folder, or its `config.json`.

    Raises:
        InputError: the folder has no parameters of the encoding, or the encoding cannot be built.
    """
    path = Path(source)
    if not path.exists() or not is_lab_decoder(config := read_source(path)):
        return None
    with torch.random.fork_rng(devices=[]):
        encoding = encoding_from_config(config)
    if encoding.state_dict():
        encoding.load_state_dict(_state(_Source(path if path.is_dir() else path.parent, None), encoding), assign=True)
    return encoding


def _token(source: _Source) -> PretrainedInput:
    config, inputs = source.config, source.row.inputs
    table = f"{source.prefix}{inputs.tokens}"
    # the published configurations of Gemma 3 have only the values that differ from the defaults of the class
    rows = required(config, "vocab_size") if "vocab_size" in config else source.num_rows(table)
    width_key = inputs.width_key(config)
    width = required(config, width_key)
    options: dict[str, Any] = {"vocab_size": rows, "d_model": width, "scale": _scale(config, inputs)}
    padding = config.get("pad_token_id", None if _states_no_padding(source.facts) else inputs.default_padding)
    if inputs.padding and padding is not None:
        row = integer("pad_token_id", padding, -rows)
        if row >= rows:
            got = f"got pad_token_id={row} in {source.folder / CONFIG}, of a vocabulary of {rows}"
            raise InputError(got, f"set 'pad_token_id': null, or a number below {rows}")
        options["padding_idx"] = row
    weight = source.read(table, (rows, width), f"vocab_size and {width_key}")
    return PretrainedInput(options=options, tensors={"weight": weight})


def _states_no_padding(facts: Config) -> bool:
    """Return whether a configuration states null as the padding token, which replaces the default of the class."""
    text = facts.get("text_config")
    stated = text if isinstance(text, Mapping) else facts
    return "pad_token_id" in stated and stated["pad_token_id"] is None


def _scale(config: Config, inputs: InputTables) -> RowScale | None:
    """Return the factor on the rows, or None for a factor of one."""
    if inputs.scale_key not in config:
        return inputs.scale(config) if callable(inputs.scale) else inputs.scale
    factor = number(inputs.scale_key, config[inputs.scale_key])
    return None if factor == 1 else factor


def _eps(config: Config, row: Architecture) -> float:
    key = row.inputs.norm_eps
    if not isinstance(key, str):
        return key
    if key not in config:
        raise row.lacks(key, config)
    return number(key, config[key], low=0)


def _stated_dtype(facts: Config) -> torch.dtype | None:
    """Return the dtype of the weights in a configuration: ``dtype``, or ``torch_dtype`` up to transformers 4."""
    inner = facts.get("text_config")
    places = [facts, inner] if isinstance(inner, Mapping) else [facts]
    name = next((place[key] for place in places for key in ("dtype", "torch_dtype") if place.get(key)), None)
    if name in (None, "auto"):
        return None
    dtypes = {dtype_name(dtype): dtype for dtype in DTYPES.values()}
    if not isinstance(name, str) or dtype_name(name) not in dtypes:
        got = f"got dtype={short_repr(name)} in {CONFIG}, expected one of {', '.join(dtypes)}"
        raise InputError(got, "set 'dtype': null")
    return dtypes[dtype_name(name)]


# ---------------------------------------------------------------------- swapped models

HOLDER = ".locant."
SAVED = "use the folder as it was saved"
NOT_SERIALIZED = "an encoding that its configuration does not describe"


def load_swapped(
    folder: str | Path, *, cls: Any = None, encoding: Any = None, layers: Any = None, **options: Any
) -> Any:
    """Load a model that was saved while it was swapped, with its encoding and the encoding's learned weights.

    Args:
        folder: the folder that `save_pretrained` wrote.
        cls: a class of `transformers`. The default is ``AutoModelForCausalLM``, or ``AutoModelForSeq2SeqLM`` for a
            model with an encoder and a decoder.
        encoding, layers: as for `locant.swap`, if the configuration does not describe the encoding. Its parameters are
            read from the folder.
        options: for ``from_pretrained``, such as ``dtype``.

    Raises:
        InputError: the model was not swapped or had its own encoding in every layer, its ``locant`` entry is damaged,
            the parameters of its encoding are missing, or the folder has custom code, pickles or incomplete files.
    """
    require("transformers", "loading a swapped model")
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    path = Path(folder)
    facts = read_json(path / CONFIG)
    if CONFIG_KEY not in facts and any(LOADER in str(facts.get(key)) for key in (*FUNCTION_KEYS, FUSION_KEY)):
        raise _damage_error(path, "it is missing")
    if CONFIG_KEY not in facts:
        got = f"got {path}, whose model is not swapped, or has its own encoding in every layer"
        raise InputError(got, f"from_pretrained({str(folder)!r}), then locant.swap")
    require_no_code(path, facts)
    read_headers(path)
    is_described = encoding is None and layers is None
    # with an argument, the saved encodings are not built, because their package may not be installed
    build = lambda each: from_config(each) if is_described and each is not None else NOT_SERIALIZED  # noqa: E731
    plan = _map_layers(path, facts[CONFIG_KEY], build)
    if is_described:
        if NOT_SERIALIZED in plan:
            got = f"got {path}, with {NOT_SERIALIZED}"
            raise InputError(got, "load_swapped(folder, encoding=...) with the same encoding")
        layers = lambda layer, _: plan[layer] if layer < len(plan) else None  # noqa: E731
    config: Any = AutoConfig.from_pretrained(path)
    remove_record(config)
    options = {"local_files_only": True, "use_safetensors": True, **options}
    usual = AutoModelForSeq2SeqLM if getattr(config, "is_encoder_decoder", False) else AutoModelForCausalLM
    model = (cls or usual).from_pretrained(path, config=config, **options)
    swapped = swap(model, encoding, layers=layers, angles=facts[CONFIG_KEY].get("angles", "exact"))
    if len(swapped.sentences) != len(plan):
        raise _damage_error(path, f"{len(plan)} layers for {len(swapped.sentences)}")
    _read_parameters(path, model)
    return model


def _map_layers(folder: Path, entry: Any, convert: Callable[[Any], Any]) -> list[Any]:
    """Call `convert` on the record of the encoding of each layer. ``None`` means the model's own encoding."""
    try:
        layer_encodings = [convert(each) for each in entry["encodings"]]
        last = len(layer_encodings) - 1
        places = [None if each is None else whole("layers", each, 0, last, remedy=SAVED) for each in entry["layers"]]
        one_of("angles", entry.get("angles", "exact"), ("exact", "float32"), SAVED)
    except (AttributeError, LookupError, TypeError, ValueError) as error:  # somebody may have changed the entry
        raise _damage_error(folder, f"{type(error).__name__}: {error}") from error
    return [None if each is None else layer_encodings[each] for each in places]


def _read_parameters(folder: Path, model: Any) -> None:
    parameters = {name: each for name, each in model.state_dict().items() if HOLDER in f".{name}"}
    files = {tensor.name: folder / file for file, header in read_headers(folder).items() for tensor in header.tensors}
    for name, parameter in parameters.items():
        if name not in files:
            raise InputError(f"got {folder} without {name}, a parameter of its encoding", SAVED)
        with safe_open(files[name], framework="pt") as file:
            saved = file.get_tensor(name)
        if saved.shape != parameter.shape:
            got = f"got {name} of shape {short_repr(tuple(saved.shape))}, expected {tuple(parameter.shape)}"
            raise InputError(got, SAVED)
        with torch.no_grad():
            parameter.copy_(saved)


def describe_layers(config: Mapping[str, Any]) -> tuple[str | None, ...]:
    """Describe the encoding of every layer, as `record` wrote it. ``None`` means the model's own encoding.

    The result is empty if the model is not swapped.

    >>> alibi = {"name": "alibi", "options": {"num_heads": 4}}
    >>> describe_layers({"locant": {"encodings": [alibi], "layers": [0, None]}})
    ('alibi(num_heads=4)', None)
    """
    if config.get(CONFIG_KEY) is None:
        return ()
    return tuple(
        _map_layers(Path(), config[CONFIG_KEY], lambda each: NOT_SERIALIZED if each is None else _describe(each))
    )


def _describe(description: Mapping[str, Any]) -> str:
    options = ", ".join(f"{name}={short_repr(value)}" for name, value in description["options"].items())
    return f"{one_of('encoding', description['name'], encodings())}({options})"


def _damage_error(folder: Path, why: str) -> InputError:
    """Return the error for an entry that was changed by hand."""
    got = f"got {folder / CONFIG}, whose entry {CONFIG_KEY!r} does not describe the encoding of each layer ({why})"
    return InputError(got, SAVED)
