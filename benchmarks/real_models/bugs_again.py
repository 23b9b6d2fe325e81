"""The costs of some bugs, calculated a second time: plain `transformers` and a hook of a few lines for each.

Nothing here comes from `bugs.py` and `cost_of_bugs.py` but the recorded costs that are compared. The tokens are chosen
anew from the texts, the logits of a whole window come from one call of the model, and `transformers`' own loss is used.
"""

from __future__ import annotations

import argparse
import tarfile
import typing
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
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
CORRECT = "correct"
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
    recorded = {key: rows.get(key, {"costs": {}})["costs"].get(MODEL, {}).get(str(LENGTH)) for key in ANGLES}
    if missing := [key for key, each in recorded.items() if each is None]:
        raise InputError(f"found no recorded cost of {', '.join(missing)}", "python -m benchmarks.real_models bugs")

    def summary(measured: Mapping[str, Any]) -> dict[str, Any]:
        costs = {key: _mean(wrong) - _mean(measured[CORRECT]) for key, wrong in measured.items() if key in ANGLES}
        differences = {key: round(abs(cost - recorded[key]["cost"]), 6) for key, cost in costs.items()}
        return {"largest difference": max(differences.values(), default=0.0), "differences": differences}

    record = Record("bugs-again", [MODEL], anew=anew, folder=folder, summary=summary)
    load = cache(partial(weights.load, MODEL))
    for key in (CORRECT, *ANGLES):
        record.measure(key, {"length": LENGTH}, partial(_losses, ANGLES.get(key), load))
    record.write()
    differences = summary(record.measured)["differences"]
    if unequal := {key: each for key, each in differences.items() if each > ROUNDED}:
        raise InputError(f"recorded costs differ from the second calculation: {unequal}", "find out which is wrong")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
