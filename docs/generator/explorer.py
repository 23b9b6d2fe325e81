"""Facts on the page about the explorer: the record of its small model, and the size of its JavaScript."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from safetensors import safe_open

from docs.generator.encodings import title
from locant.explore.document import modules
from locant.explore.models import FOLDER, WEIGHTS
from locant.positions.registry import encodings

__all__ = ["page_size", "parts", "small_model"]

DRAWING = "drawing/"
"""The folder of the page's charts."""


def parts() -> dict[str, str]:
    """Return each part of the page by its path."""
    file = FOLDER / WEIGHTS
    with safe_open(file, "pt") as weights:
        about = json.loads(weights.metadata()["about"])
    return {
        "explorer/small_model.txt": small_model(about, file.stat().st_size),
        "explorer/page_size.txt": page_size(modules()),
    }


def small_model(about: Mapping[str, Any], size: int) -> str:
    """Return how the small model was trained, and its held-out losses.

    >>> losses = {"learned": 4.325, "alibi": 3.908, "rotary": 3.93}
    >>> about = {"steps": 2000, "batch_size": 16, "length": 128, "tokens": 143_239, "held_out_loss": losses}
    >>> print(small_model(about, 349_928).partition(". ")[2])
    The loss on the last tenth of the text is 3.91 (ALiBi), 3.93 (RoPE) and 4.33 (Learned positions) nats per token.
    """
    losses = sorted(about["held_out_loss"].items(), key=lambda pair: pair[1])
    told = [f"{loss:.2f} ({title(encodings()[name])})" for name, loss in losses]
    return (
        f"Its file of {size / 1000:.0f} kB was trained for {about['steps']:,} steps of {about['batch_size']} windows "
        f"of {about['length']} tokens, from a text of {about['tokens']:,} tokens. The loss on the last tenth of the "
        f"text is {', '.join(told[:-1])} and {told[-1]} nats per token."
    )


def page_size(sources: Mapping[str, str]) -> str:
    """Return how large the page's JavaScript is, and the charts in it.

    >>> page_size({"drawing/axes.js": 2000 * "a", "router.js": 3000 * "b"})
    'The charts have 2 kB of readable JavaScript, and the whole page 5 kB.'
    """
    sizes = {path: len(text.encode()) for path, text in sources.items()}
    drawing = sum(size for path, size in sizes.items() if path.startswith(DRAWING))
    return (
        f"The charts have {drawing / 1000:.0f} kB of readable JavaScript, and the whole page "
        f"{sum(sizes.values()) / 1000:.0f} kB."
    )
