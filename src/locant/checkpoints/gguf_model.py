"""Load a GGUF file as a model of `transformers`, its configuration, or its input tables.

`transformers` reads the metadata and undoes the changes that llama.cpp's converter made to names and weights. It
decides which architectures can be read. Quantised weights become float32, so a model takes four bytes for each weight.

`transformers` does not read the scaling of the positions from most files, which `unread_scaling` reports, and it skips
tensors for which the class of the model has no place, which `unread_tensors` lists.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from locant.checkpoints.loading import offline, require_all_weights, translate_errors
from locant.errors import InputError
from locant.extras import require
from locant.gguf_file import UNQUANTISED, GgufFile, find_gguf, open_gguf
from locant.models.config_values import integer
from locant.models.weights import InputTables
from locant.positions.description import Weightless
from locant.spelling import dtype_name, spell

METADATA = "metadata"
EMBEDDING = "token_embd"
PER_LAYER = {
    "embed_tokens_per_layer": "per_layer_token_embd", "per_layer_model_projection": "per_layer_model_proj",
    "per_layer_projection_norm": "per_layer_proj_norm",
}  # fmt: skip
"""The modules of the per-layer embedding of Gemma 3n and Gemma 4, and their names in a file."""
PER_LAYER_GATE = {
    "per_layer_input_gate": "inp_gate", "per_layer_projection": "proj", "post_per_layer_input_norm": "post_norm",
}  # fmt: skip
"""The modules of the per-layer gate in each layer, and their names in a file."""
FACTORS = ("rope_freqs.", "rope_factors_")
"""The beginnings of the names of the factors of a scaling, which `unread_scaling` reports."""
FREQUENCIES = (".attn_rot_embd.",)
"""Parts of the names of inverse frequencies, which are computed from the base."""
BLOCK = re.compile(r"blk\.(\d+)\.")
MODULE_IN_LAYER = re.compile(r"layers\.(\d+)\.(\w+)")
NEXTN = ".nextn."
"""A part of the names of tensors that predict further tokens."""
MOST_NAMES = 4
"""The number of tensors that a sentence names."""


class GgufWeights(NamedTuple):
    """A report on how the weights of a file were read.

    Args:
        file: the path of the file.
        read: the tensors that are read, ``"weights"`` for all or ``"token table"``.
        types: the share of the weights that each type of the file stores.
        dtype: the dtype in memory.
        num_bytes: the size in memory.
        unread: the tensors of the file that `transformers` skips.
        notes: sentences on what `transformers` does not read.
    """

    file: str
    read: str
    types: Mapping[str, float]
    dtype: str
    num_bytes: int
    unread: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        shares = {name: f" ({share:.1%})" if len(self.types) > 1 else "" for name, share in self.types.items()}
        types = ", ".join(f"{name}{share}" for name, share in shares.items() if share != " (0.0%)")
        changed = "dequantised" if self.types.keys() - UNQUANTISED else "converted"
        size = f"{self.num_bytes / 1e6:,.0f} MB" if self.num_bytes < 1e9 else f"{self.num_bytes / 1e9:,.1f} GB"
        return f"{Path(self.file).name}: {self.read} in {types}, {changed} to {self.dtype} ({size} in memory)"


def gguf_weights(path: Path | str, dtype: str | torch.dtype = "auto", *, table_only: bool = False) -> GgufWeights:
    """Return what becomes of the weights of a GGUF file when it is loaded.

    Args:
        table_only: whether only the token table is read.

    Raises:
        InputError: as `load_gguf_config`.
    """
    file, name = open_gguf(path), "float32" if dtype == "auto" else dtype_name(dtype)
    config = load_gguf_config(file.path)  # first, because nothing is read of a file that is no model
    names = [each for each in (f"{EMBEDDING}.weight",) if table_only and each in file.tensors]
    count = sum(int(file.tensors[each].n_elements) for each in names) if names else file.num_weights
    width = getattr(torch, name).itemsize
    unread = () if table_only else _unread_tensors_of(file, config)
    notes = () if table_only else tuple(_notes(file, config, unread))
    read = "token table" if names else "weights"
    return GgufWeights(str(path), read, file.types(*names), name, count * width, unread, notes)


def _notes(file: GgufFile, config: Any, unread: Sequence[str]) -> Generator[str]:
    """Yield a sentence on the scaling and on each kind of tensor that `transformers` does not read from a file."""
    if (scaling := unread_scaling(file, config)) is not None:
        yield scaling
    layers = config.get_text_config().num_hidden_layers
    kinds: dict[str, list[str]] = {}
    for name in unread:
        if not (name.startswith(FACTORS) and scaling):
            kinds.setdefault(_consequence(file, name, layers), []).append(name)
    for consequence, names in kinds.items():
        count = "1 tensor" if len(names) == 1 else f"{len(names)} tensors"
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        listed = ", ".join(names[:MOST_NAMES])
        yield f"{file.path.name} has {count} that transformers does not read ({listed}{more}): {consequence}"


def _consequence(file: GgufFile, name: str, layers: int) -> str:
    """Return what follows from a tensor that is not read into a model with this number of layers."""
    if name.startswith(FACTORS):
        in_config = "the scaling of the positions is in the configuration"
        return f"{in_config if _scales(file, name) else 'all factors are 1'}, so nothing is missing"
    if any(part in name for part in FREQUENCIES):
        return "the frequencies are computed from the base, so nothing is missing"
    block = BLOCK.match(name)
    if block and int(block[1]) >= layers and any(NEXTN in each for each in file.tensors):
        return f"they predict further tokens, and the {layers} layers of the model do not use them"
    return "the model computes without them, but llama.cpp uses them or refuses the file"


def unread_tensors(file: GgufFile, model: Any) -> tuple[str, ...]:
    """Return the names of the tensors of a file that `transformers` skips when it loads this model, without a word.

    Args:
        model: a model of the class and the configuration that the file is loaded into. Its values are not used.
    """
    with _reading(file):
        from transformers import modeling_gguf_pytorch_utils as loader

        if not _by_names_alone(file.architecture):  # another loader reports what it does not know
            layers = model.config.get_text_config().num_hidden_layers
            blocks = {name: BLOCK.match(name) for name in file.tensors}
            return tuple(name for name, block in blocks.items() if block and int(block[1]) >= layers)
        kind = loader.TENSOR_PROCESSORS.get(file.architecture, loader.TensorProcessor)
        read_names = loader.get_gguf_hf_weights_map(model, kind(config={}))
        return tuple(name for name in file.tensors if name not in read_names)


def _by_names_alone(architecture: str) -> bool:
    """Return whether `transformers` reads the tensors of an architecture by a table of names, and skips all others."""
    try:
        from transformers.integrations.gguf.utils import is_gguf_arch_supported
    except ImportError:  # an older release, which has no other way
        return True
    return not is_gguf_arch_supported(architecture)


def _unread_tensors_of(file: GgufFile, config: Any) -> tuple[str, ...]:
    """Return the tensors of a file that are skipped when a causal language model is loaded from it."""
    if config.get_text_config().num_hidden_layers > len(file.tensors):  # a wrong number, which would take hours
        return ()
    with _reading(file) as transformers, Weightless():
        model = transformers.AutoModelForCausalLM.from_config(config)
    return unread_tensors(file, model)


def unread_scaling(file: GgufFile, config: Any) -> str | None:
    """Return a sentence on the scaling of the positions in a file, if it is not in the configuration."""
    prefix = f"{file.architecture}.rope.scaling"
    kind = file.value(f"{prefix}.type")
    factor = file.value(f"{prefix}.factor") or file.value(f"{file.architecture}.rope.scale_linear")
    factors = next((name for name in file.tensors if name.startswith(FACTORS) and _scales(file, name)), None)
    stated = kind not in (None, "none") and (kind != "linear" or factor not in (None, 0, 1))
    if not stated and factors is None and factor in (None, 0, 1):
        return None
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    kinds = {each.get("rope_type") for each in (rope, *rope.values()) if isinstance(each, Mapping)}
    if kinds - {None, "default"}:
        return None
    in_file = f"{kind or 'linear'} by {spell(factor)}" if factor not in (None, 0, 1) else kind if stated else factors
    return (
        f"{file.path.name} states a scaling of the positions ({in_file}), which transformers does not read: "
        f"its positions are not scaled here"
    )


def _scales(file: GgufFile, name: str) -> bool:
    """Return whether a tensor of factors changes any frequency."""
    return bool((file.dequantise(name) != 1).any())


def load_gguf_config(path: Path | str) -> Any:
    """Return the configuration of `transformers` for a GGUF file.

    Raises:
        InputError: the file is damaged, is only a part of a model, or has an architecture that `transformers` cannot
            read.
    """
    file = open_gguf(path)
    file.require_model()
    with _reading(file) as transformers:
        config = transformers.AutoConfig.from_pretrained(**file.pretrained_arguments)
    if hasattr(config, "hidden_size_per_layer_input"):  # transformers does not read it, and takes the class's default
        for key, value in _per_layer_sizes(file, config.num_hidden_layers).items():
            setattr(config, key, value)
    return config


def gguf_input_facts(path: Path | str) -> dict[str, Any]:
    """Return a configuration that describes the input tables of a GGUF file.

    `transformers` does not read Gemma 3n from GGUF, so the sizes of its tables are read here.

    Raises:
        InputError: as `load_gguf_config`.
    """
    file = open_gguf(path)
    if file.architecture != "gemma3n":
        return json.loads(load_gguf_config(file.path).to_json_string())
    file.require_model()
    keys = {
        "num_hidden_layers": "gemma3n.block_count",
        "hidden_size": "gemma3n.embedding_length",
        "rms_norm_eps": "gemma3n.attention.layer_norm_rms_epsilon",
        "pad_token_id": "tokenizer.ggml.padding_token_id",
    }
    stated = {name: value for name, key in keys.items() if (value := file.value(key)) is not None}
    layers = integer(keys["num_hidden_layers"], stated.get("num_hidden_layers"))
    tables = {"vocab_size": _rows(file, EMBEDDING), **_per_layer_sizes(file, layers)}
    return {"model_type": "gemma3n_text", **stated, **tables}


def _per_layer_sizes(file: GgufFile, num_layers: int) -> dict[str, int]:
    """Return the rows of the per-layer table and the width of a layer's part, which is 0 without a table."""
    name = f"{PER_LAYER['embed_tokens_per_layer']}.weight"
    if name not in file.tensors:
        return {"hidden_size_per_layer_input": 0}
    parts, rows = (int(size) for size in file.tensors[name].shape)
    return {"hidden_size_per_layer_input": parts // num_layers, "vocab_size_per_layer_input": rows}


def _rows(file: GgufFile, table: str) -> int:
    """Return the number of rows of a table."""
    if (tensor := file.tensors.get(f"{table}.weight")) is None:
        raise InputError(f"got {file.path} without {table}.weight", "use the file of the whole model")
    return int(tensor.shape[1])


def load_gguf(path: Path | str, *, cls: Any = None, config: Any = None, dtype: str | torch.dtype = "auto") -> Any:
    """Load a model of `transformers` from a GGUF file, to measure it, to swap its positions or to train it.

    The weights are dequantised, so the model can be trained, and `save_pretrained` writes it as safetensors. Nothing is
    downloaded. A warning names the tensors and the scaling of positions that `transformers` skips.

    Args:
        path: a ``.gguf`` file, or a folder with one and without safetensors.
        cls: a class of `transformers`. Default: ``AutoModelForCausalLM``.
        config: a configuration with other positions, which replaces the one of the file.
        dtype: ``float32`` (also for ``"auto"``), ``bfloat16`` or ``float16``.

    Raises:
        InputError: the file is damaged, is only a part of a model, has no language model, or has an architecture that
            `transformers` cannot read.

    >>> model = load_gguf("SmolLM2-135M-Instruct.Q4_1.gguf")  # doctest: +SKIP
    >>> with locant.swap(model, locant.encoding("nope")):  # doctest: +SKIP
    ...     model.generate(...)
    """
    gguf_path = find_gguf(path)
    if gguf_path is None:
        raise InputError(f"got {path}, expected a .gguf file, or a folder with one", "use load_swapped for a folder")
    file = open_gguf(gguf_path)
    file.require_model()
    if not file.tensors:
        raise InputError(f"got {file.path}, a vocabulary without weights", "use the file of the whole model")
    if cls is None and file.value(f"{file.architecture}.pooling_type"):
        got = f"got {file.path}, a model for sentence embeddings, which does not predict tokens"
        raise InputError(got, "use the file of a causal language model")
    require("accelerate", "loading a GGUF file")
    if config is None:
        config = load_gguf_config(gguf_path)
    options: dict[str, Any] = {"dtype": getattr(torch, "float32" if dtype == "auto" else dtype_name(dtype))}
    with redirect_stderr(StringIO()), _reading(file) as transformers:  # for a bar that transformers draws
        if hasattr(transformers, "GgufConfig"):  # else transformers may keep blocks and download a kernel for them
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
        load = (cls or transformers.AutoModelForCausalLM).from_pretrained
        options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
        model, report = load(**file.pretrained_arguments, config=config, **options)
    require_all_weights(report, type(model).__name__, file.path, METADATA)
    if (quantizer := getattr(model, "hf_quantizer", None)) is not None:
        quantizer.remove_quantization_config(model)  # the weights are plain, so the model can be trained and saved
    for note in _notes(file, config, unread_tensors(file, model)):
        warnings.warn(note, stacklevel=2)
    return model.eval()


@contextmanager
def _reading(file: GgufFile) -> Generator[Any]:
    """Provide transformers, and name the architecture if transformers cannot read it."""
    try:
        with (
            translate_errors(file.path, "download or convert the file again") as transformers,
            offline(),
            file.shared_with_transformers(),
        ):
            yield transformers
    except InputError as error:
        why = str(error.__cause__)
        if "not supported" not in why and "Unknown gguf model_type" not in why:
            raise
        got = f"got {file.path} of the architecture {file.architecture}, which transformers does not read from GGUF"
        remedy = "use the model in safetensors, or a newer transformers, or locant explain for its positions alone"
        raise InputError(got, remedy) from error


class GgufTables:
    """The input tables of a GGUF file, with the interface of `TensorFolder`. A table is dequantised when it is read.

    Args:
        names: the modules of the tables in `transformers`.
    """

    def __init__(self, path: Path | str, names: InputTables) -> None:
        self.file = open_gguf(path)
        self.folder = self.file.path
        modules = {
            names.tokens: EMBEDDING, names.positions: "position_embd", names.segments: "token_types",
            names.norm: "token_embd_norm", **PER_LAYER,
        }  # fmt: skip
        self._names = {module: name for module, name in modules.items() if module is not None}

    def find(self, module: str, part: str = "weight") -> str | None:
        """Return the name of this module's tensor in the file, or ``None``."""
        in_layer = MODULE_IN_LAYER.fullmatch(module)
        gguf_module = f"blk.{in_layer[1]}.{PER_LAYER_GATE.get(in_layer[2])}" if in_layer else self._names.get(module)
        name = f"{gguf_module}.{part}"
        return name if name in self.file.tensors else None

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, which GGUF states in reverse."""
        return tuple(int(size) for size in reversed(self.file.tensors[name].shape))

    def tensor(self, name: str) -> Tensor:
        """Return the tensor as float32."""
        return torch.from_numpy(self.file.dequantise(name).copy()).view(self.shape(name))
