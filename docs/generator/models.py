"""The pages of model families, from their rows and presets in `locant.models`."""

from __future__ import annotations

import inspect
import json
import pprint
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
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
    """What a family is, its architectures, its presets with their encodings, and one of its models explained."""
    example, config = _example(module)
    architectures = rows([_architecture(key, row) for key, row in module.ARCHITECTURES.items()])
    layer_type = f', layer_type="{kinds[0]}"' if (kinds := layer_types(config)) else ""
    return f"""(model-{name})=
# {title(module)}

{markdown(inspect.getdoc(module) or "")}

{picture(f"models/{name}", f"Positions of {example}")}

## Architectures

| `model_type` | pairs | presets | vLLM |
|---|---|---|---|
{architectures}

{_presets_table(module)}```python
import locant

config = {_written(config)}
encoding = locant.encoding_from_config(config{layer_type})
```

## {example}, explained

```text
{_explained(config)}
```
"""


def plot_family(module: ModuleType, *, theme: str) -> Figure:
    """The picture of a family: of its example."""
    _, config = _example(module)
    kinds = layer_types(config)
    return locant.plot(config, theme=theme, layer_type=kinds[0] if kinds else None)


def _architecture(name: str, row: Architecture) -> tuple[str, ...]:
    pairs = "–" if row.rotary is None else f"{row.rotary.layout}"
    return f"`{name}`", pairs, ", ".join(f"`{preset}`" for preset in row.presets), "yes" if row.vllm else ""


def _example(module: ModuleType) -> tuple[str, dict[str, Any]]:
    """The first preset of a family; without one, its first architecture, small and with the defaults of its class."""
    for preset in _presets(module):
        return preset, dict(presets()[preset])
    name, row = next(iter(module.ARCHITECTURES.items()))
    return name, {"model_type": name, "hidden_size": 512, "num_attention_heads": 8, **row.defaults}


def _presets_table(module: ModuleType) -> str:
    lines = [
        (f"`{preset}`", kind or "all", f"`{encoding}`")
        for preset in _presets(module) for kind, encoding in encodings_of(preset)
    ]  # fmt: skip
    table = f"| preset | layers | encoding |\n|---|---|---|\n{rows(lines)}"
    return f"## Presets\n\n{table}\n\n" if lines else "## Example\n\n"


def _written(config: Mapping[str, Any]) -> str:
    """A configuration as Python."""
    return pprint.pformat(config, width=88, sort_dicts=False)


def _explained(config: Mapping[str, Any]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(config), encoding="utf-8")
        done = CliRunner().invoke(main, ["explain", str(file)], env={"COLUMNS": "88"}, catch_exceptions=False)
    return done.stdout.replace(str(file), "config.json").rstrip()


def _presets(module: ModuleType) -> Iterator[str]:
    return (preset for row in module.ARCHITECTURES.values() for preset in row.presets)


def _family_of(config: Mapping[str, Any]) -> str:
    kind = config["model_type"]
    return next(name for name, module in families().items() if kind in module.ARCHITECTURES)
