"""The costs of some bugs, calculated a second time: plain `transformers` and a hook of a few lines for each.

Nothing here comes from `bugs.py` and `cost_of_bugs.py` but the recorded costs that are compared. The tokens are chosen
anew from the texts, the logits of a whole window come from one call of the model, and `transformers`' own loss is used.
"""

from __future__ import annotations

import argparse
import tarfile
import typing
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor

from benchmarks.real_models import weights
from benchmarks.real_models.record import RESULTS, Record, read
from locant.errors import InputError

__all__ = ["ANGLES", "run"]

MODEL, LENGTH = "smollm2", 2048
BASE = 100_000.0
ROUNDED = 2e-4
"""Half a unit of the last digit of two recorded losses, and the rounding of a float32 mean over two thousand tokens."""


def _frequencies(base: float = BASE) -> Tensor:
    return base ** (-torch.arange(0, 64, 2) / 64)


def _angles(positions: Tensor, base: float = BASE) -> Tensor:
    return positions[..., None].float() * _frequencies(base)


def _of_half(angles: Tensor) -> Tensor:
    first, second = angles.chunk(2, -1)
    return torch.cat([first, 0 * second], -1)


ANGLES: dict[str, Callable[[Tensor], Tensor]] = {
    "frequencies-bfloat16": lambda p: p[..., None].float() * _frequencies().bfloat16(),
    "positions-bfloat16": lambda p: _angles(p.bfloat16()),
    "positions-float16": lambda p: _angles(p.half()),
    "base-10000": lambda p: _angles(p, 1e4),
    "base-times-10": lambda p: _angles(p, 1e6),
    "linear-unasked": lambda p: _angles(p) / 4,
    "direction-reversed": lambda p: -_angles(p),
    "pairs-not-rotated": lambda p: _of_half(_angles(p)),
    "restarts": lambda p: _angles(p % (LENGTH // 2)),
    "gap": lambda p: _angles(p + 128 * (p >= LENGTH // 2)),
}
"""The angles of each bug in SmolLM2, by its id."""


def _windows(tokenizer: Any) -> Iterator[Tensor]:
    documentation = "\n\n".join(topics[name].strip("\n") for name in sorted(topics)) + "\n"
    files = [Path(module.__file__ or "") for module in (tarfile, argparse, typing)]
    for text in (documentation, "\n\n".join(file.read_text(encoding="utf-8") for file in files)):
        yield tokenizer(text, return_tensors="pt").input_ids[:, : LENGTH + 1]


def _loss(model: Any, ids: Tensor) -> float:
    with torch.no_grad():
        logits = model(ids[:, :-1], use_cache=False).logits
        return model.loss_function(logits, None, model.vocab_size, shift_labels=ids[:, 1:]).item()


@contextmanager
def _hooked(model: Any, angles: Callable[[Tensor], Tensor]) -> Generator[None]:
    def hook(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> tuple[Tensor, Tensor]:
        both = angles(kwargs["position_ids"]).repeat(1, 1, 2)
        return both.cos(), both.sin()

    with model.model.rotary_emb.register_forward_hook(hook, with_kwargs=True):
        yield


def _losses(angles: Callable[[Tensor], Tensor] | None, load: Callable[[], tuple[Any, Any]]) -> list[float]:
    model, tokenizer = load()
    with nullcontext() if angles is None else _hooked(model, angles):
        return [_loss(model, ids) for ids in _windows(tokenizer)]


def run(*, anew: bool = False, folder: Path = RESULTS) -> None:
    """Calculate the costs again, and compare them with the recorded ones.

    Raises:
        InputError: a recorded cost is not confirmed, or there is none.
    """
    rows = read("bugs", folder).get("summary", {"rows": {}})["rows"]
    record, load = Record("bugs-again", [MODEL], anew=anew, folder=folder), cache(partial(weights.load, MODEL))
    right = record.measure("correct", {"length": LENGTH}, partial(_losses, None, load))
    differences = dict[str, float]()
    for key, angles in ANGLES.items():
        recorded = rows.get(key, {"costs": {}})["costs"].get(MODEL, {}).get(str(LENGTH))
        if recorded is None:
            raise InputError(f"found no recorded cost of {key}", "python -m benchmarks.real_models bugs")
        wrong = record.measure(key, {"length": LENGTH}, partial(_losses, angles, load))
        cost = sum(a - b for a, b in zip(wrong, right, strict=True)) / len(right)
        differences[key] = round(abs(cost - recorded["cost"]), 6)
    record.summarise({"largest difference": max(differences.values()), "differences": differences})
    if unequal := {key: each for key, each in differences.items() if each > ROUNDED}:
        raise InputError(f"recorded costs differ from the second calculation: {unequal}", "find out which is wrong")
