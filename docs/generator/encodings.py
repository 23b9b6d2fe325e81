"""The pages of encodings and of scalings, from the classes' `info`, docstrings and methods."""

from __future__ import annotations

from typing import Any

import locant
from docs.generator.markdown import linked_papers, opening, picture, table
from docs.generator.models import presets_of
from docs.generator.records import TASKS_ALONE, recorded_names
from locant.positions.base import PositionEncoding
from locant.positions.scaling import KINDS, SCALINGS, Scaling, Unscaled
from locant.report.explain import METHODS
from locant.scaling import DyPE, Resonance, RIFLEx

__all__ = ["encoding_page", "plot_scaling", "question", "scaling_page", "scalings", "title"]

FACTS = {
    "kind": "kind", "parameters": "parameters", "cost_of_tokens": "cost per token", "cost_of_pairs": "cost per pair",
    "extrapolation": "beyond the trained length", "used_by": "used by", "paper": "paper",
}  # fmt: skip
"""The fields of `EncodingInfo` that a page shows, and what they are called there."""


PAPER_NAMES = {
    "PositionEncoding": "NoPE", "Learned": "Learned positions", "Rotary": "RoPE", "XPos": "xPos", "T5Bias": "T5 bias",
    "Kerple": "KERPLE", "Fire": "FIRE", "Cope": "CoPE", "TransformerXL": "Transformer-XL", "Deberta": "DeBERTa",
    "Cable": "CABLE", "Fox": "FoX", "MixedRotary": "RoPE-Mixed", "RoPEPlusPlus": "RoPE++", "RotaryByHead": "MHRoPE",
    "SelectiveRoPE": "Selective RoPE", "StringRotary": "STRING", "DualChunk": "Dual chunk attention",
    "LearnedGrid": "Learned grid (ViT)", "GridBias": "Grid bias (Swin, BEiT)",
    "ContinuousGridBias": "Continuous grid bias (Swin v2)", "DecomposedBias": "Decomposed bias (ViTDet, SAM)",
}  # fmt: skip
"""What papers call the classes whose names they do not spell so."""


def title(kind: type[PositionEncoding]) -> str:
    """What the page of an encoding is called: as its paper writes it."""
    return PAPER_NAMES.get(kind.__name__, kind.__name__)


QUESTIONS = {
    "PositionEncoding": "what is left without positions?",
    "Learned": "what does an untrained table look like?",
    "Sinusoidal": "which waves are added to a token?",
    "Rotary": "how far is each pair rotated?",
    "XPos": "how fast do rotated tokens fade?",
    "ALiBi": "how far does each head see?",
    "T5Bias": "which distances share a number?",
    "Kerple": "how fast can a head fade with distance?",
    "Fire": "what is the bias by relative distance?",
    "Sandwich": "what is the product of two sinusoids?",
    "Cope": "what if only some tokens are counted?",
    "Shaw": "how does a query score each distance?",
    "TransformerXL": "how do content and distance interact?",
    "Deberta": "how do queries and keys score each distance?",
    "Cable": "what if every token chooses its step?",
    "ContinuousGridBias": "what does an MLP learn from rows and columns?",
    "Convolutional": "how do neighbours reveal a position?",
    "DecomposedBias": "what do rows and columns add separately?",
    "DualChunk": "which distances are exact, and which bounded?",
    "FoPE": "what if a pair has several frequencies?",
    "Fox": "how much does each token forget?",
    "GridBias": "what is the bias between two patches?",
    "Inkling": "how does a query mix its own curve?",
    "LearnedGrid": "how is a table resized to an image?",
    "PaTH": "what do the tokens between do to a score?",
    "PoPE": "what if only the position is an angle?",
    "RePo": "which position does a head assign to a token?",
    "ReRoPE": "where does the distance stop growing?",
    "MixedRotary": "which diagonals can frequencies follow?",
    "RoPEPlusPlus": "what is in the imaginary part?",
    "RotaryByHead": "which heads use which axis?",
    "SelectiveRoPE": "which tokens does a rotation count?",
    "SelfExtend": "where do groups replace tokens?",
    "StringRotary": "which planes can be rotated?",
}
"""The question that the picture of each class answers."""


def question(kind: type[PositionEncoding]) -> str:
    """Return the title of an encoding, and the question that its picture answers."""
    return f"{title(kind)}: {QUESTIONS.get(kind.__name__, 'what does it do?')}"


def encoding_page(name: str, kind: type[PositionEncoding]) -> str:
    """What an encoding is, its picture, its facts, how it is built, drawn and compared, and its docstring."""
    facts = {
        "class": f"`{_path(kind)}`",
        "name": ", ".join(f"`{each}`" for each in (name, *kind.info.aliases)),
        "method": ", ".join(f"`{method}`: {METHODS[method]}" for method in kind.methods()) or "none",
        **{words: linked_papers(getattr(kind.info, fact)) for fact, words in FACTS.items()},
        "presets": ", ".join(presets_of(lambda encoding: type(encoding) is kind)),
    }
    return f"""(encoding-{name})=
# {title(kind)}

{opening(kind)}

{picture(f"encodings/{name}", f"{title(kind)}, drawn by locant plot")}

{table(facts)}

{_named(name, kind)}

## Reference

```{{eval-rst}}
.. autoclass:: {_path(kind)}
   :members:
   :exclude-members: info, is_arithmetic, is_traceable_per_pair, extra_repr
```

## See also

{_links(name, kind)}
"""


LESSONS = {"embed": "addition", "rotate": "rotation", "bias": "biases"}
"""The lesson about each method, which has a live figure."""


def _links(name: str, kind: type[PositionEncoding]) -> str:
    """The lesson of an encoding with its live figure, its measured results, and the models that have it."""
    lesson = next((LESSONS[method] for method in kind.methods() if method in LESSONS), "addition")
    results = "not recorded yet"
    if name in recorded_names():
        results = "[losses and tasks beyond the trained length](#results)"
    elif name in recorded_names(TASKS_ALONE):
        results = "[tasks beyond the trained length](#results-text-dependent)"
    return _see_also(lesson, f"{results}, and [what papers claim](#published)")


def _see_also(lesson: str, results: str) -> str:
    return f"""- Lesson: [](#course-{lesson})
- Live figure: [in the lesson](#lesson-{lesson}), and [more without Python](#without-python)
- Results: {results}
- Models: [which model has which encoding](#models-table)
- Choose: [which encoding?](#which-encoding)"""


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


EXAMPLES = {
    RIFLEx: RIFLEx(num_frames=66, pair=RIFLEx.pair_that_repeats(50, 64, 10_000.0)), DyPE: DyPE(factor=8.0),
    Resonance: Resonance(),
}  # fmt: skip
"""An example of each scaling without a name, which therefore cannot be built from a name and a factor."""


def scalings() -> dict[str, type[Scaling]]:
    """Return every scaling by the name of its page, those with a name first."""
    unnamed = {kind.__name__.lower(): kind for kind in KINDS.values() if kind is not Unscaled and not kind.info.name}
    return {**SCALINGS, **unnamed}


def plot_scaling(name: str, theme: str) -> Any:
    """Draw the wavelengths before and after a scaling."""
    kind = scalings()[name]
    return locant.plot("rotary", scaling=f"{name}:8" if kind.info.name else EXAMPLES[kind], theme=theme)


def scaling_page(name: str, kind: type[Scaling]) -> str:
    """What a scaling is, the wavelengths before and after, the models that have it, and its docstring."""
    facts = {
        "name": f"`{name}`" if kind.info.name else "none: pass an object to `Rotary`",
        "presets": ", ".join(presets_of(lambda encoding: type(getattr(encoding, "scaling", None)) is kind)),
    }
    drawn = f"{kind.__name__} by 8" if kind.info.name else repr(EXAMPLES[kind])
    return f"""(scaling-{name})=
# {kind.__name__}

{opening(kind)}

{picture(f"scalings/{name}", f"Wavelengths before and after {drawn}")}

{table(facts)}

{_used(name, kind)}

## Reference

```{{eval-rst}}
.. autoclass:: locant.scaling.{kind.__name__}
   :members: effective_attention_factor, length_threshold
```

## See also

{_see_also("stretching", "[a real model read further than it was trained](#guide-how-far)")}
"""


def _used(name: str, kind: type[Scaling]) -> str:
    if kind.info.name:
        return f"""```sh
locant plot rotary --scaling {name}:8
locant compare --encodings rotary,rotary+{name}
```"""
    return f"""```python
from locant import Rotary
from locant.scaling import {kind.__name__}

rotary = Rotary(64, scaling={EXAMPLES[kind]!r})
```"""
