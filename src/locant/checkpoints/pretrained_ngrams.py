"""Read the n-gram tables and their gates from the folder of a published model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from locant.arguments import short_repr
from locant.checkpoints.checkpoint_folder import DTYPES, TensorFolder
from locant.checkpoints.config_source import CONFIG, read_json
from locant.errors import InputError
from locant.models.ngram_tables import NGramTable, gate_options, ngram_tables, table_at
from locant.tensors import as_dtype

GATE = {
    "key_proj.weight": "key.weight", "value_proj.weight": "value.weight", "norm_key.weight": "key_norm",
    "norm_query.weight": "query_norm", "norm_conv.weight": "conv_norm", "conv1d.weight": "taps",
}  # fmt: skip
"""The parameter of `NGramGate` for each parameter of Qwen4's gate."""


def read_pretrained_ngrams(
    folder: Path | str, index: int, dtype: torch.dtype | str | None = None
) -> tuple[NGramTable, Tensor]:
    """Return the `index`-th n-gram table of a model and its weight.

    Multipliers in the file replace those of the seed, as in `transformers`.
    """
    tensors = TensorFolder(folder)
    table = table_at(ngram_tables(read_json(tensors.folder / CONFIG)), index)
    weight = read_ngram_weight(tensors, table, dtype)
    name = tensors.find(table.module.rpartition(".")[0], "layer_multipliers")
    if name is None:
        return table, weight
    with safe_open(tensors.folder / tensors.files[name], framework="np") as file:
        stored = [int(each) for each in file.get_tensor(name)]
    if len(stored) != table.hashing.max_order:
        got = f"got {name} of {len(stored)} numbers in {tensors.folder}, expected {table.hashing.max_order}"
        raise InputError(got, "use the configuration and the weights of one model")
    multipliers = tuple(tuple(stored[:order]) for order in table.hashing.orders)
    return replace(table, hashing=replace(table.hashing, multipliers=multipliers)), weight


def read_ngram_weight(tensors: TensorFolder, table: NGramTable, dtype: torch.dtype | str | None = None) -> Tensor:
    """Return the weight of an n-gram table. One tensor is mapped into memory, and several are joined there."""
    names = _names(tensors, table.module)
    shapes = [tensors.shape(name) for name in names]
    num_rows = sum(shape[0] for shape in shapes if shape[1:] == (table.width,))
    if num_rows != table.num_rows:
        saved = f"{len(shapes)} tensors of the shapes {short_repr(shapes)}" if len(shapes) > 1 else f"shape {shapes[0]}"
        got = f"got {table.module} of {saved} in {tensors.folder}, expected {(table.num_rows, table.width)}"
        raise InputError(f"{got} by its {CONFIG}", "use the configuration and the weights of one model")
    parts = [tensors.tensor(name) for name in names]
    weight = parts[0] if len(parts) == 1 else torch.cat(parts)
    return weight if dtype is None else weight.to(as_dtype(dtype, DTYPES.values()))


def _names(tensors: TensorFolder, module: str) -> list[str]:
    """Return the names of the tensors of a table in the order of their rows: ``weight``, or one for each part."""
    if (whole := tensors.find(module)) is not None:
        return [whole]
    parts = dict[int, str]()
    for name in tensors.files:  # `module.shard_0.weight` in Qwen4, `module.0.weight` in LongCat
        _, separator, rest = f".{name}".rpartition(f".{module}.")
        number = rest.removesuffix(".weight").removeprefix("shard_")
        if separator and rest.endswith(".weight") and number.isdecimal():
            parts[int(number)] = name
    if not parts or [*sorted(parts)] != [*range(len(parts))]:
        got = f"got {tensors.folder} without {'all parts' if parts else 'the table'} of {module}"
        raise InputError(got, "use the folder of the whole model, with its own config.json")
    return [parts[number] for number in range(len(parts))]


def read_pretrained_gate(
    folder: Path | str, index: int, dtype: torch.dtype | str | None = None
) -> tuple[Mapping[str, Any], dict[str, Tensor]]:
    """Return the configuration of a Qwen4 model, and the parameters of the gate of its `index`-th n-gram table."""
    tensors = TensorFolder(folder)
    config = read_json(tensors.folder / CONFIG)
    table, options = table_at(ngram_tables(config), index), gate_options(config, index)
    module = table.module.removesuffix(".ple_embedding.ngram_embedding")
    if module == table.module:
        got = f"got {tensors.folder}, whose gates have another form than those of Qwen4"
        raise InputError(got, "use NGramGate.from_config, and copy its parameters")
    streams, d_model = options["num_streams"], options["d_model"]
    state = dict[str, Tensor]()
    for saved_name, parameter in GATE.items():
        part, _, kind = saved_name.rpartition(".")
        if (name := tensors.find(f"{module}.{part}", kind)) is None:
            got = f"got {tensors.folder} without a tensor {module}.{saved_name}"
            raise InputError(got, "use the folder of the whole model, with its own config.json")
        tensor = tensors.tensor(name)
        tensor = tensor.view(streams, d_model) if parameter.endswith("norm") else tensor
        state[parameter] = tensor.squeeze(1) if parameter == "taps" else tensor
        if dtype is not None:
            state[parameter] = state[parameter].to(as_dtype(dtype, DTYPES.values()))
    return config, state
