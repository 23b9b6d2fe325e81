"""Results of a comparison that never ran, in the form of `Results.to_dict()`, with numbers chosen by the test.

And, for one that does run, a text of random ids and the smallest settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Losses = Mapping[str, Sequence[Sequence[float | None]]]
"""For every encoding, for every seed, a loss for every length."""

LENGTHS = (64, 128, 256, 512)

VOCAB = 17
SMALL = {"train_length": 5, "num_steps": 3, "batch_size": 4, "d_model": 16, "num_layers": 1, "num_heads": 2}


def ids(count: int = 900) -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCAB, count)


THE_FIELD: Losses = {
    "nope": [(3.60, 3.62, 3.70, 3.80), (3.64, 3.66, 3.72, 3.86)],
    "sinusoidal": [(3.50, 3.90, 5.10, 6.70), (3.52, 3.92, 5.20, 6.90)],
    "alibi": [(3.55, 3.53, 3.52, 3.51), (3.57, 3.54, 3.53, 3.53)],
}


def results(
    losses: Losses = THE_FIELD,
    lengths: Sequence[int] = LENGTHS,
    by_position: Mapping[str, Sequence[float | None]] | None = None,
    windows: Mapping[str, Sequence[float]] | None = None,
    train_loss: float | None = None,
    unigram_loss: float | None = None,
    bigram_loss: float | None = None,
    stretches: Mapping[str, Sequence[Mapping[int, Sequence[float]]]] | None = None,
) -> dict[str, Any]:
    """Records as the lab writes them; `by_position` replaces the flat curve that an encoding otherwise has.

    `stretches` has, for each seed of an encoding, the loss of each stretch with so many tokens before every target.
    There are 10 windows of the longest length, in which the loss is the same, but for what `windows` adds to each of
    the windows of every length of an encoding.
    """
    by_position, windows = by_position or {}, windows or {}

    def by_window(name: str, loss: float | None, length: int) -> list[float | None]:
        added = windows.get(name, [0.0] * (10 * lengths[-1] // length))
        return [None if loss is None else loss + each for each in added]

    records = [
        {
            "encoding": name,
            "seed": seed,
            "train_length": lengths[0],
            "loss_by_length": {str(length): loss for length, loss in zip(lengths, row, strict=True)},
            "loss_by_position": list(by_position.get(name, [row[0]] * lengths[-1])),
            "loss_by_window": {
                str(length): by_window(name, loss, length) for length, loss in zip(lengths, row, strict=True)
            },
            **({"context_loss_by_stretch": _named(stretches[name][seed])} if stretches else {}),
            "train_loss": row[0] if train_loss is None else train_loss,
            "num_parameters": 1000,
            "seconds": 1.5,
        }
        for name, rows in losses.items()
        for seed, row in enumerate(rows)
    ]
    chosen = settings(losses, lengths)
    if unigram_loss is not None:
        chosen["text"]["unigram_loss"] = unigram_loss
    if bigram_loss is not None:
        chosen["text"]["bigram_loss"] = bigram_loss
    return {
        "settings": chosen,
        "environment": {"locant": "0.0.1", "torch": "9.8.7"},
        "records": records,
    }


def _named(by_length: Mapping[int, Sequence[float]]) -> dict[str, list[float]]:
    return {str(length): list(losses) for length, losses in by_length.items()}


def settings(losses: Losses, lengths: Sequence[int]) -> dict[str, Any]:
    return {
        "encodings": list(losses),
        "train_length": lengths[0],
        "multiples": [length // lengths[0] for length in lengths],
        "seeds": list(range(max(map(len, losses.values())))),
        "num_steps": 301,
        "minutes": None,
        "batch_size": 33,
        "learning_rate": 0.0025,
        "d_model": 96,
        "num_layers": 5,
        "num_heads": 6,
        "text": {
            "source": "a.txt", "files": ["a.txt"], "characters": 4321, "sha256": "ab" * 32, "tokens": 1234,
            "train_tokens": 1110, "held_out_tokens": 124,
            "tokenizer": None, "asked_vocab_size": 300, "vocab_size": 299, "tokenizer_fingerprint": "cd" * 32,
        },
    }  # fmt: skip


def task_results(shares: Mapping[tuple[str, str], Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Records of tasks: for every task and encoding, for every seed, the share of right rows at each length.

    They were trained to 12 items, and learned where nine of ten rows of these are right.
    """
    records = [
        {
            "task": task, "encoding": encoding, "seed": seed, "rate": 1.0, "train_length": 12,
            "learned": by_length["12"] >= 0.9, "steps": 700, "accuracy_by_length": dict(by_length),
            "token_accuracy_by_length": dict(by_length), "train_loss": 0.1, "num_parameters": 1000, "seconds": 1.5,
        }
        for (task, encoding), seeds in shares.items()
        for seed, by_length in enumerate(seeds)
    ]  # fmt: skip
    settings = {
        "encodings": list(dict.fromkeys(encoding for _, encoding in shares)),
        "seeds": list(range(max(map(len, shares.values())))), "task_length": 12, "num_steps": None, "text": {},
    }  # fmt: skip
    settings["tasks"] = list(dict.fromkeys(task for task, _ in shares))
    return {"schema": 2, "settings": settings, "environment": {"locant": "0.0.1"}, "records": records}


def evaluation_results(losses: Losses = THE_FIELD, lengths: Sequence[int] = LENGTHS) -> dict[str, Any]:
    """Results of an evaluation: one record for each encoding, with intervals, pass keys and a task of RULER."""
    found = results({name: rows[:1] for name, rows in losses.items()}, lengths)
    found["settings"] = {
        "lengths": list(lengths), "ways": list(losses), "keys": 1, "tasks": ["vt"], "rows": 2, "device": "cpu",
        "dtype": "auto", "text": {"model": "model", "source": "a.txt", "files": ["a.txt"], "windows": 10},
    }  # fmt: skip
    for record in found["records"]:
        record["interval_by_length"] = {length: [loss, loss] for length, loss in record["loss_by_length"].items()}
        record["pass_keys"] = [{"length": lengths[0], "depth": 0.5, "asked": 2, "recalled": 1}]
        first = {"wrote": "12", "expected": ["34"]}
        record["ruler"] = [
            {"task": "vt", "length": lengths[0], "asked": 2, "score": 0.0, "tokens": [60], "first": first}
        ]
    return found
