"""The pages of encodings and of scalings, from the classes' `info`, docstrings and doors."""

from __future__ import annotations

import locant
from docs.generator.markdown import linked_papers, picture, summary, table
from docs.generator.models import presets_of
from locant.positions.base import PositionEncoding
from locant.positions.scaling import Scaling

__all__ = ["encoding_page", "scaling_page", "title"]

FACTS = {
    "kind": "kind", "parameters": "parameters", "cost_of_tokens": "cost per token", "cost_of_pairs": "cost per pair",
    "extrapolation": "beyond the trained length", "used_by": "used by", "paper": "paper",
}  # fmt: skip
"""The fields of `EncodingInfo` that a page shows, and what they are called there."""

DOOR_WORDS = {
    "embed": "`embed`: added to the token embeddings",
    "rotate": "`rotate`: rotates queries and keys",
    "bias": "`bias`: added to the attention scores",
    "unrotate": "`unrotate`: rotates the output of attention back",
}


def title(kind: type[PositionEncoding]) -> str:
    """What the page of an encoding is called."""
    return "No position encoding (NoPE)" if kind is PositionEncoding else kind.__name__


def encoding_page(name: str, kind: type[PositionEncoding]) -> str:
    """What an encoding is, its picture, its facts, how it is built, drawn and compared, and its docstring."""
    facts = {
        "name": ", ".join(f"`{each}`" for each in (name, *kind.info.aliases)),
        "method": "; ".join(DOOR_WORDS[door] for door in kind.doors()) or "none",
        **{words: linked_papers(getattr(kind.info, fact)) for fact, words in FACTS.items()},
        "presets": ", ".join(presets_of(lambda encoding: type(encoding) is kind)),
    }
    return f"""(encoding-{name})=
# {title(kind)}

{summary(kind)}

{picture(f"encodings/{name}", f"What {kind.__name__} does")}

{table(facts)}

{_named(name, kind)}

## Reference

```{{eval-rst}}
.. autoclass:: {_path(kind)}
   :members:
   :exclude-members: info, is_arithmetic, is_for_pairs, extra_repr
```
"""


def _path(kind: type[PositionEncoding]) -> str:
    """The shortest that it is imported from."""
    for module in (locant, locant.positions):
        if getattr(module, kind.__name__, None) is kind:
            return f"{module.__name__}.{kind.__name__}"
    return f"{kind.__module__}.{kind.__name__}"


def _named(name: str, kind: type[PositionEncoding]) -> str:
    sizes = "".join(f", {size}=..." for size in kind.sizes())
    other = "alibi" if name == "rotary" else "rotary"
    return f"""```python
encoding = locant.encoding("{name}"{sizes})
```
```sh
locant list {name}
locant plot {name}
locant compare --encodings {name},{other}
```"""


def scaling_page(name: str, kind: type[Scaling]) -> str:
    """What a scaling is, the wavelengths before and after, the models that have it, and its docstring."""
    facts = {
        "name": f"`{name}`",
        "presets": ", ".join(presets_of(lambda encoding: type(getattr(encoding, "scaling", None)) is kind)),
    }
    return f"""(scaling-{name})=
# {kind.__name__}

{summary(kind)}

{picture(f"scalings/{name}", f"Wavelengths before and after {kind.__name__} by 8")}

{table(facts)}

```sh
locant plot rotary --scaling {name}:8
locant compare --encodings rotary,rotary+{name}
```

## Reference

```{{eval-rst}}
.. autoclass:: locant.scaling.{kind.__name__}
   :members: effective_attention_factor, length_that_matters
```
"""
