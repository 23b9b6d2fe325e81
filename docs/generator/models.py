"""The pages of model families, from their rows and presets in `locant.models`."""

from __future__ import annotations

import inspect
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from click.testing import CliRunner
from matplotlib.figure import Figure

import locant
from docs.generator.markdown import markdown, picture, rows
from locant.cli import main
from locant.models import encoding_from_config, layer_types, with_defaults
from locant.models.architecture import Architecture
from locant.models.registry import FAMILIES, presets
from locant.positions.base import PositionEncoding

__all__ = ["families", "family_of", "family_page", "plot_family", "presets_of", "title"]


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
            yield f"[{name}](#model-{family_of(config)})"


@cache
def encodings_of(preset: str) -> tuple[tuple[str | None, PositionEncoding], ...]:
    """The encoding of each type of layers."""
    config = presets()[preset]
    kinds = layer_types(config) or (None,)
    return tuple((kind, encoding_from_config(config, layer_type=kind)) for kind in kinds)


def family_page(name: str, module: ModuleType) -> str:
    """What a family is, its architectures, its presets with their encodings, and one configuration explained."""
    source, made, config = _example(module)
    architectures = rows([_architecture(key, row) for key, row in module.ARCHITECTURES.items()])
    kinds = layer_types(config)
    layer_type = f', layer_type="{kinds[0]}"' if kinds else ""
    return f"""(model-{name})=
# {title(module)}

{markdown(inspect.getdoc(module) or "")}

{picture(f"models/{name}", f"Positions of {config['model_type']}")}

## Architectures

| `model_type` | pairs | presets | vLLM |
|---|---|---|---|
{architectures}

{_presets_table(module)}
```python
import locant
{made}
encoding = locant.encoding_from_config(config{layer_type})
```

(explain-{name})=
## Explained

{_explanations(module) or _explanation(source, config)}
"""


def plot_family(module: ModuleType, *, theme: Literal["light", "dark"]) -> Figure:
    """The picture of a family: of its first preset, or first architecture."""
    _, _, config = _example(module)
    kinds = layer_types(config)
    return locant.plot(config, theme=theme, layer_type=kinds[0] if kinds else None)


def _example(module: ModuleType) -> tuple[str, str, Mapping[str, Any]]:
    """A configuration, where `locant explain` finds it, and the code that makes it."""
    for preset in _presets(module):
        made = f'from locant.models.registry import presets\n\nconfig = presets()["{preset}"]  # or a config.json, read'
        return preset, made, presets()[preset]
    sizes = {"model_type": next(iter(module.ARCHITECTURES)), "hidden_size": 4096, "num_attention_heads": 32}
    made = f"from locant.models import with_defaults\n\nsizes = {json.dumps(sizes)}\nconfig = with_defaults(sizes)"
    return "config.json", made, with_defaults(sizes)


def _explanations(module: ModuleType) -> str:
    """Every preset under a heading that a link leads to."""
    known = presets()
    parts = [f"(explain-{name})=\n### {name}\n\n{_explanation(name, known[name])}" for name in _presets(module)]
    return "\n\n".join(parts)


def _explanation(source: str, config: Mapping[str, Any]) -> str:
    return f"```sh\nlocant explain {source}\n```\n```text\n{_explained(source, config)}\n```"


def _explained(source: str, config: Mapping[str, Any]) -> str:
    """What `locant explain` prints of it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / source
        if source not in presets():
            path.write_text(json.dumps(config), encoding="utf-8")
        asked = source if source in presets() else str(path)
        shown = CliRunner().invoke(main, ["explain", asked], env={"COLUMNS": "88"}, catch_exceptions=False)
        return shown.stdout.replace(asked, source).rstrip()


def _presets_table(module: ModuleType) -> str:
    found = [
        (f"`{preset}`", kind or "all", f"`{encoding}`")
        for preset in _presets(module)
        for kind, encoding in encodings_of(preset)
    ]
    return f"## Presets\n\n| preset | layers | encoding |\n|---|---|---|\n{rows(found)}\n" if found else ""


def _architecture(name: str, row: Architecture) -> tuple[str, ...]:
    pairs = "–" if row.rotary is None else f"{row.rotary.layout}"
    return f"`{name}`", pairs, ", ".join(f"`{preset}`" for preset in row.presets), "yes" if row.vllm else ""


def _presets(module: ModuleType) -> Iterator[str]:
    return (preset for row in module.ARCHITECTURES.values() for preset in row.presets)


def family_of(config: Mapping[str, Any]) -> str:
    """The family whose module has the row of a configuration."""
    kind = config["model_type"]
    return next(name for name, module in families().items() if kind in module.ARCHITECTURES)
