"""Plug-ins for exact angles in vLLM and SGLang. They do nothing unless an environment variable is set.

All rotary classes of both engines compute their table of cosines and sines from float32 angles, in the method `METHOD`.
With ``LOCANT_VLLM=exact`` or ``LOCANT_SGLANG=exact``, the plug-in replaces the table by the result of
`Rotary.cos_sin_cache` for the model's configuration, if the two differ only by the rounding of angles. The engine keeps
its table if the configuration cannot be read, if a class does not have one table, or if the engine reads the
configuration differently. The log states the reason. An engine may still round a table to the model's dtype.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from locant.arguments import one_of
from locant.errors import LocantError
from locant.models.config_values import Config
from locant.models.encodings import encoding_from_config, layer_types, rotary_layer_types
from locant.models.registry import with_defaults
from locant.positions import Positions, Rotary
from locant.spelling import spell

METHOD = "_compute_cos_sin_cache"
NUM_COMPARED = 4096
"""The number of rows at which two tables are compared, spread over the tables."""

ROUNDING = 2.0**-21
"""The relative error of frequencies that the engine's table may have: four roundings of float32."""


def vllm() -> None:
    """Install the plug-in. vLLM calls this entry point of ``vllm.general_plugins`` in each of its processes."""
    if _is_enabled("LOCANT_VLLM"):
        from vllm.model_executor.layers import rotary_embedding  # pyright: ignore[reportMissingImports]

        _replace_tables(rotary_embedding, _config_of_vllm, logging.getLogger("vllm.locant"))


def sglang() -> None:
    """Install the plug-in. SGLang calls this entry point of ``sglang.srt.plugins`` in each of its processes."""
    if _is_enabled("LOCANT_SGLANG"):
        from sglang.srt.layers.rotary_embedding import factory  # pyright: ignore[reportMissingImports]

        _replace_tables(factory, _config_of_sglang, logging.getLogger("sglang.locant"))


def _is_enabled(variable: str) -> bool:
    value = os.environ.get(variable)
    return bool(value) and one_of(variable, value, ("exact",), f"set {variable}=exact, or unset it") == value


def _config_of_vllm() -> Any:
    from vllm.config import get_current_vllm_config_or_none  # pyright: ignore[reportMissingImports]

    current = get_current_vllm_config_or_none()
    return None if current is None or current.model_config is None else current.model_config.hf_config


def _config_of_sglang() -> Any:
    from sglang.srt.runtime_context import get_model, publish_role  # pyright: ignore[reportMissingImports]
    from sglang.srt.utils.hf_transformers_utils import get_config  # pyright: ignore[reportMissingImports]

    if publish_role() is None:
        return None
    options = get_model()
    overrides = json.loads(options.json_model_override_args)
    config = get_config(options.model_path, options.trust_remote_code, options.revision, overrides).to_dict()
    for part in (config, config.get("text_config") or {}):
        rope = part.get("rope_parameters") or {}
        if "rope_type" in rope:
            rope.pop("type", None)  # SGLang adds it, and does not update it when rope_type is overridden
    return config


def _replace_tables(module: ModuleType, read_config: Callable[[], Any], log: logging.Logger) -> None:
    """Wrap `METHOD` once in each class that defines it."""
    bases = {base for each in vars(module).values() if isinstance(each, type) for base in each.__mro__}
    for each in bases:
        compute = vars(each).get(METHOD)
        if compute is not None and not hasattr(compute, "__wrapped__"):
            setattr(each, METHOD, _wrap(compute, read_config, log))


def _wrap(compute: Callable[..., Any], read_config: Callable[[], Any], log: logging.Logger) -> Callable[..., Any]:
    @functools.wraps(compute)
    def table(module: Any, *args: Any, **options: Any) -> Any:
        engine_table = compute(module, *args, **options)
        name = type(module).__name__
        try:
            with torch.device("cpu"):  # engines build models with another default device
                rotary = _same_encoding(engine_table, read_config())
                exact = rotary.cos_sin_cache(len(engine_table))
        except LocantError as error:
            log.warning("%s keeps its own table: %s", name, error)
            return engine_table
        log.info("%s: %s exact rows of %s", name, f"{len(engine_table):,}", rotary)
        return exact.to(engine_table)

    return table


def _same_encoding(table: object, config: Any) -> Rotary:
    """Return the encoding of the configuration whose float32 table is equal to the table of the engine."""
    if config is None:
        raise LocantError("the engine has no configuration")
    if not isinstance(table, Tensor) or table.ndim != 2 or not table.is_floating_point():
        raise LocantError("it is not one table of positions")
    rows = torch.linspace(0, len(table) - 1, NUM_COMPARED, dtype=torch.float64).long().unique()
    sample = table.cpu()[rows].float()
    errors = [(_error(each, rows, sample), each) for each in _encodings(config, len(table))]
    error, nearest = min(errors, key=lambda each: each[0], default=(float("inf"), None))
    if nearest is None or error > len(table) * ROUNDING + 1e-6:
        raise LocantError(f"it differs by {spell(error, 2)} from {nearest}, the encoding of the configuration")
    return nearest


def _error(rotary: Rotary, rows: Tensor, sample: Tensor) -> float:
    expected = torch.cat(rotary.replace(angles="float32").cos_sin(Positions.of(rows[None])), dim=-1)[0]
    return float((expected - sample).abs().max()) if expected.shape == sample.shape else float("inf")


def _encodings(config: Config, length: int) -> Iterator[Rotary]:
    """Yield the encoding of each kind of layer for text, which has one index on all axes."""
    full = with_defaults(config)
    for kind in rotary_layer_types(full) or layer_types(full) or (None,):
        rotary = encoding_from_config(full, layer_type=kind)
        if isinstance(rotary, Rotary):
            rotary = rotary if rotary.sections is None else rotary.replace(sections=None, axial=False)
            yield rotary if rotary.scaling.length_threshold is None else rotary.for_length(length)
