"""Exact angles in vLLM and SGLang: a plug-in for each, which does nothing unless an environment variable asks for it.

Every rotary class of both computes its table of cosines and sines from float32 angles, in a method of one name. With
``LOCANT_VLLM=exact`` or ``LOCANT_SGLANG=exact`` the table is that of the model's configuration, as
`Rotary.cos_sin_cache` makes it, wherever the engine's own is the same but for the rounding of its angles. The engine's
own stays where the configuration cannot be read, where a class keeps something else than one table, and where the
engine reads the configuration otherwise; the log says which. An engine may still round a table to the model's dtype.
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
MOST_POSITIONS = 4096
"""Rows at which two tables are compared, spread over them."""

ROUNDING = 2.0**-21
"""Relative, of frequencies: four roundings of float32, which are what the engine's own table may be off."""


def vllm() -> None:
    """The entry point in the group ``vllm.general_plugins``, which vLLM calls in each of its processes."""
    if _asked("LOCANT_VLLM"):
        from vllm.model_executor.layers import rotary_embedding  # pyright: ignore[reportMissingImports]

        _replace_tables(rotary_embedding, _config_of_vllm, logging.getLogger("vllm.locant"))


def sglang() -> None:
    """The entry point in the group ``sglang.srt.plugins``, which SGLang calls in each of its processes."""
    if _asked("LOCANT_SGLANG"):
        from sglang.srt.layers.rotary_embedding import factory  # pyright: ignore[reportMissingImports]

        _replace_tables(factory, _config_of_sglang, logging.getLogger("sglang.locant"))


def _asked(variable: str) -> bool:
    value = os.environ.get(variable)
    return bool(value) and one_of(variable, value, ("exact",), f"{variable}=exact, or none") == value


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
            rope.pop("type", None)  # SGLang adds it, and leaves it as it was when the other is overridden
    return config


def _replace_tables(module: ModuleType, read_config: Callable[[], Any], log: logging.Logger) -> None:
    """Wrap the method of every class that has one of its own, once."""
    bases = {base for each in vars(module).values() if isinstance(each, type) for base in each.__mro__}
    for each in bases:
        compute = vars(each).get(METHOD)
        if compute is not None and not hasattr(compute, "__wrapped__"):
            setattr(each, METHOD, _exact(compute, read_config, log))


def _exact(compute: Callable[..., Any], read_config: Callable[[], Any], log: logging.Logger) -> Callable[..., Any]:
    @functools.wraps(compute)
    def table(module: Any, *args: Any, **options: Any) -> Any:
        own = compute(module, *args, **options)
        name = type(module).__name__
        try:
            with torch.device("cpu"):  # engines build models with another default device
                rotary = _same_encoding(own, read_config())
                exact = rotary.cos_sin_cache(len(own))
        except LocantError as error:
            log.warning("%s keeps its own table: %s", name, error)
            return own
        log.info("%s: %s exact rows of %s", name, f"{len(own):,}", rotary)
        return exact.to(own)

    return table


def _same_encoding(own: object, config: Any) -> Rotary:
    """The encoding of the configuration whose float32 table is the engine's own."""
    if config is None:
        raise LocantError("the engine tells no configuration")
    if not isinstance(own, Tensor) or own.ndim != 2 or not own.is_floating_point():
        raise LocantError("it is not one table of positions")
    rows = torch.linspace(0, len(own) - 1, MOST_POSITIONS, dtype=torch.float64).long().unique()
    theirs = own.cpu()[rows].float()
    errors = [(_error(each, rows, theirs), each) for each in _encodings(config, len(own))]
    error, nearest = min(errors, key=lambda each: each[0], default=(float("inf"), None))
    if nearest is None or error > len(own) * ROUNDING + 1e-6:
        raise LocantError(f"it is off by {spell(error, 2)} from {nearest}, which is what the configuration says")
    return nearest


def _error(rotary: Rotary, rows: Tensor, theirs: Tensor) -> float:
    ours = torch.cat(rotary.alike(angles="float32").cos_sin(Positions.of(rows[None])), dim=-1)[0]
    return float((ours - theirs).abs().max()) if ours.shape == theirs.shape else float("inf")


def _encodings(config: Config, length: int) -> Iterator[Rotary]:
    """Of every kind of layers, for text, which has one index on all axes."""
    full = with_defaults(config)
    for kind in rotary_layer_types(full) or layer_types(full) or (None,):
        rotary = encoding_from_config(full, layer_type=kind)
        if isinstance(rotary, Rotary):
            rotary = rotary if rotary.sections is None else rotary.alike(sections=None, axial=False)
            yield rotary if rotary.scaling.length_that_matters is None else rotary.for_length(length)
