"""The command that makes a comparison again, with every setting spelled out."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

__all__ = ["OPTIONS", "command"]

OPTIONS: Mapping[str, str] = {
    "encodings": "--encodings",
    "train_length": "--train-length",
    "multiples": "--multiples",
    "seeds": "--seeds",
    "num_steps": "--steps",
    "batch_size": "--batch",
    "learning_rate": "--learning-rate",
    "d_model": "--d-model",
    "num_layers": "--num-layers",
    "num_heads": "--num-heads",
}
"""The option of ``locant compare`` behind every setting. `minutes` is not among them: the steps it led to are."""


def command(settings: Mapping[str, Any]) -> str:
    """A line for a shell.

    >>> text = {"files": ["my text.txt"], "tokenizer": "bytes"}
    >>> command({"seeds": [0, 1], "minutes": 2.0, "num_steps": 170, "text": text})
    "locant compare 'my text.txt' --tokenizer bytes --seeds 0,1 --steps 170"
    """
    text = settings.get("text", {})
    words = ["locant", "compare", *text.get("files", [])]
    if text.get("tokenizer"):
        words += ["--tokenizer", text["tokenizer"]]
    elif text.get("asked_vocab_size"):
        words += ["--vocab-size", str(text["asked_vocab_size"])]
    for name, option in OPTIONS.items():
        if name in settings:
            words += [option, _word(settings[name])]
    return shlex.join(words)


def _word(value: object) -> str:
    return ",".join(str(part) for part in value) if isinstance(value, (list, tuple)) else str(value)
