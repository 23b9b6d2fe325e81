"""The reference by module: every public name is described once, at its encoding's page or where it is met first."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import locant
from docs.generator.markdown import markdown, rows, summary

__all__ = ["api_pages"]

MODULES = (
    "locant.text", "locant.embedding", "locant.positions", "locant.scaling", "locant.attention", "locant.parallel",
    "locant.models", "locant.checkpoints", "locant.lab", "locant.formats", "locant.errors",
)  # fmt: skip
"""In the order of the way from a text to attention."""


def api_pages(elsewhere: Mapping[type, str]) -> dict[str, str]:
    """A page per module; `elsewhere` are the labels of classes that have a page of their own."""
    seen: set[int] = set()
    found: dict[str, str] = {}
    for module in map(importlib.import_module, MODULES):
        own = [(path, value) for path, value in _public(module) if id(value) not in seen]
        seen |= {id(value) for _, value in own}
        links = [f"[{path}](#{elsewhere[value]})" for path, value in own if _in(elsewhere, value)]
        described = [_describe(path, value) for path, value in own if not _in(elsewhere, value)]
        found[f"api/{module.__name__}.md"] = _page(module, links, described)
    return found | {"api/index.md": _index()}


def _in(elsewhere: Mapping[type, str], value: object) -> bool:
    return isinstance(value, type) and value in elsewhere


def _public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """The names of a module from a to z, by the shortest path that they are imported from."""
    names = getattr(module, "__all__", None) or dir(module)
    for name in sorted((name for name in names if not name.startswith("_")), key=str.lower):
        value = getattr(module, name)
        if not inspect.ismodule(value) and str(getattr(value, "__module__", "")).startswith("locant"):
            short = name in locant.__all__ and getattr(locant, name) is value
            yield f"{'locant' if short else module.__name__}.{name}", value


def _describe(path: str, value: object) -> str:
    if isinstance(value, type):
        members = "   :members:\n   :exclude-members: info, extra_repr\n"
        return f".. autoclass:: {path}\n" + ("" if issubclass(value, BaseException) else members)
    return f".. autofunction:: {path}\n" if inspect.isroutine(value) else f".. autodata:: {path}\n"


def _page(module: ModuleType, links: list[str], described: list[str]) -> str:
    name = module.__name__
    pages = f"\nThese classes have their own pages: {', '.join(links)}.\n" if links else ""
    body = "\n".join(described)
    return f"""(api-{name})=
# {name}

{markdown(inspect.getdoc(module) or "")}
{pages}
```{{eval-rst}}
{body}
```
"""


def _index() -> str:
    modules = rows([(f"[{name}](#api-{name})", summary(importlib.import_module(name))) for name in MODULES])
    contents = "\n".join(MODULES)
    return f"""(api)=
# API

Types are from jaxtyping: `Float[Tensor, "batch seq"]` is a tensor of floating point numbers with two axes. If a
signature names an axis twice, both have the same size. Tests run every example below.

| module | contents |
|---|---|
{modules}

```{{eval-rst}}
.. autofunction:: locant.plot

.. autofunction:: locant.prepare

.. autofunction:: locant.probe
```

```{{toctree}}
:hidden:

{contents}
```
"""
