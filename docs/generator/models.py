"""The pages of model families, from their rows and presets in `locant.models`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import ModuleType
from typing import Any

from click.testing import CliRunner
from matplotlib.figure import Figure

import locant
from docs.generator.markdown import markdown, picture, rows
from locant.cli import main
from locant.models import encoding_from_config, layer_types
from locant.models.architecture import Architecture
from locant.models.registry import FAMILIES, presets
from locant.positions.base import PositionEncoding

__all__ = ["families", "family_page", "plot_family", "presets_of", "title"]


def families() -> dict[str, ModuleType]:
    """Each family by its short name, and the module with its rows."""
    return {module.__name__.rpartition(".")[2]: module for module in FAMILIES}


def title(module: ModuleType) -> str:
    """What a family is called: the first words of its docstring.

    >>> title(families()["llama"])
    'Llama'
    """
    return re.split(r"[,:]", inspect.getdoc(module) or "")[0]


def presets_of(wanted: Callable[[PositionEncoding], bool]) -> Iterator[str]:
    """Links to the presets with such an encoding in some of their layers."""
    for name, config in presets().items():
        if any(wanted(encoding) for _, encoding in encodings_of(name)):
            yield f"[{name}](#model-{_family_of(config)})"


@cache
def encodings_of(preset: str) -> tuple[tuple[str | None, PositionEncoding], ...]:
    """The encoding of each type of layers."""
    config = presets()[preset]
    kinds = layer_types(config) or (None,)
    return tuple((kind, encoding_from_config(config, layer_type=kind)) for kind in kinds)


def family_page(name: str, module: ModuleType) -> str:
    """What a family is, its architectures, its presets with their encodings, and one of them explained."""
    first = next(_presets(module))
    explained = CliRunner().invoke(main, ["explain", first], env={"COLUMNS": "88"}, catch_exceptions=False)
    architectures = rows([_architecture(key, row) for key, row in module.ARCHITECTURES.items()])
    models = rows(
        [(f"`{preset}`", kind or "all", f"`{encoding}`") for preset in _presets(module)
         for kind, encoding in encodings_of(preset)]
    )  # fmt: skip
    layer_type = f', layer_type="{kinds[0]}"' if (kinds := layer_types(presets()[first])) else ""
    return f"""(model-{name})=
# {title(module)}

{markdown(inspect.getdoc(module) or "")}

{picture(f"models/{name}", f"Positions of {first}")}

## Architectures

| `model_type` | pairs | presets | vLLM |
|---|---|---|---|
{architectures}

## Presets

| preset | layers | encoding |
|---|---|---|
{models}

```python
import locant
from locant.models.registry import presets

config = presets()["{first}"]  # or the dictionary of a config.json
encoding = locant.encoding_from_config(config{layer_type})
```

## {first}, explained

```sh
locant explain {first}
```
```text
{explained.stdout.rstrip()}
```
"""


def plot_family(module: ModuleType, *, theme: str) -> Figure:
    """The picture of a family: of its first preset."""
    config: Mapping[str, Any] = presets()[next(_presets(module))]
    kinds = layer_types(config)
    return locant.plot(config, theme=theme, layer_type=kinds[0] if kinds else None)


def _architecture(name: str, row: Architecture) -> tuple[str, ...]:
    pairs = "–" if row.rotary is None else f"{row.rotary.layout}"
    return f"`{name}`", pairs, ", ".join(f"`{preset}`" for preset in row.presets), "yes" if row.vllm else ""


def _presets(module: ModuleType) -> Iterator[str]:
    return (preset for row in module.ARCHITECTURES.values() for preset in row.presets)


def _family_of(config: Mapping[str, Any]) -> str:
    kind = config["model_type"]
    return next(name for name, module in families().items() if kind in module.ARCHITECTURES)
