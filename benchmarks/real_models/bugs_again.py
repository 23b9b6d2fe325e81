"""The costs of some bugs, calculated a second time: plain `transformers` and a hook of a few lines for each.

Nothing here comes from `bugs.py` and `cost_of_bugs.py` but the recorded costs that are compared. The tokens are chosen
anew from the texts, the logits of a whole window come from one call of the model, and `transformers`' own loss is used.
"""

from __future__ import annotations

import argparse
import tarfile
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor

from benchmarks.real_models import weights
from benchmarks.real_models.record import RESULTS, Record, read
from locant.errors import InputError

__all__ = ["HOOKS", "run"]

MODEL, LENGTH = "smollm2", 2048
BASE = 100_000.0
ROUNDED = 2e-4
"""Half a unit of the last digit of two recorded losses, and the rounding of a float32 mean over two thousand tokens."""


def _angles(positions: Tensor, base: float = BASE) -> Tensor:
    return positions[..., None].float() * base ** (-torch.arange(0, 64, 2) / 64)


HOOKS: dict[str, Callable[[Tensor], Tensor]] = {
    "frequencies-bfloat16": lambda p: p[..., None].float() * (BASE ** (-torch.arange(0, 64, 2) / 64)).bfloat16(),
    "positions-bfloat16": lambda p: _angles(p.bfloat16()),
    "positions-float16": lambda p: _angles(p.half()),
    "base-10000": lambda p: _angles(p, 1e4),
    "base-times-10": lambda p: _angles(p, 1e6),
    "linear-unasked": lambda p: _angles(p) / 4,
    "direction-reversed": lambda p: -_angles(p),
    "pairs-not-rotated": lambda p: torch.cat([_angles(p)[..., :16], 0 * _angles(p)[..., 16:]], -1),
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


def _again(model: Any, tokenizer: Any, hook: Callable[[Tensor], Tensor]) -> dict[str, float]:
    def wrong(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> tuple[Tensor, Tensor]:
        angles = hook(kwargs["position_ids"]).repeat(1, 1, 2)
        return angles.cos(), angles.sin()

    right = [_loss(model, ids) for ids in _windows(tokenizer)]
    with model.model.rotary_emb.register_forward_hook(wrong, with_kwargs=True):
        rises = [_loss(model, ids) - loss for ids, loss in zip(_windows(tokenizer), right, strict=True)]
    return {"cost": round(sum(rises) / len(rises), 5)}


def run(*, anew: bool = False, folder: Path = RESULTS) -> None:
    """Calculate the costs again, and compare them with the recorded ones.

    Raises:
        InputError: a recorded cost is not confirmed, or there is none.
    """
    rows = read("bugs", folder).get("summary", {"rows": {}})["rows"]
    record, loaded = Record("bugs-again", [MODEL], anew=anew, folder=folder), list[Any]()
    differences = dict[str, float]()
    for key, hook in HOOKS.items():
        recorded = rows.get(key, {"costs": {}})["costs"].get(MODEL, {}).get(str(LENGTH))
        if recorded is None:
            raise InputError(f"found no recorded cost of {key}", "python -m benchmarks.real_models bugs")
        settings = {"recorded": recorded["cost"]}

        def measure(hook: Callable[[Tensor], Tensor] = hook) -> dict[str, float]:
            loaded[:] = loaded or weights.load(MODEL)
            return _again(*loaded, hook)

        found = record.measure(key, settings, measure)
        differences[key] = round(abs(found["cost"] - recorded["cost"]), 5)
    record.summarise({"largest difference": max(differences.values()), "differences": differences})
    if wrong := {key: each for key, each in differences.items() if each > ROUNDED}:
        raise InputError(f"recorded costs differ from the second calculation: {wrong}", "find out which is wrong")
