"""What a tuning did to the loss on held-out text, in a few lines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from locant.lab.evaluation import interval_of_mean
from locant.lab.summary import ENOUGH_WINDOWS
from locant.report.console import named_rows, show

__all__ = ["print_tuning", "tuning_sentences"]

TRAINED = {"all": "all weights", "new": "those of the encoding alone", "lora": "low-rank adapters"}


def print_tuning(record: Mapping[str, Any], output: Path) -> None:
    """The losses before and after, the difference with its interval, and how to load what was written."""
    steps = record["num_steps"]
    rows = named_rows()
    rows.add_row("training", _training(record))
    rows.add_row("training loss", f"{np.mean(record['train_loss'][-max(1, steps // 10) :]):.3f}")
    rows.add_row("held-out loss", _held_out(record))
    rows.add_row("difference", _difference(record["before"], record["after"]))
    rows.add_row("written to", str(output))
    rows.add_row("load it with", _loading(record, output))
    show(rows)


def tuning_sentences(record: Mapping[str, Any]) -> list[str]:
    """The same in sentences, without the folder."""
    settings = record["settings"]
    how = f"with {settings['way']}, {TRAINED[settings['train']]}, on {settings['text']['source']}"
    return [
        f"Trained {how}: {_training(record)}.",
        f"Held-out loss: {_held_out(record)}; a difference of {_difference(record['before'], record['after'])}.",
        "One training of one model on one text; locant evaluate says how the model reads other lengths.",
    ]


def _training(record: Mapping[str, Any]) -> str:
    settings = record["settings"]
    return f"{record['num_steps']:,} steps of {settings['batch_size']} x {settings['length']:,} tokens"


def _held_out(record: Mapping[str, Any]) -> str:
    return f"{np.mean(record['before']):.3f} before, {np.mean(record['after']):.3f} after"


def _difference(before: list[float], after: list[float]) -> str:
    """Window by window, with the 95 % interval of a block bootstrap."""
    differences = [b - a for a, b in zip(before, after, strict=True)]
    interval = interval_of_mean(differences)
    if interval is None or len(differences) < ENOUGH_WINDOWS:
        return f"{np.mean(differences):+.3f} nats, over {len(differences)} windows: too few to conclude from"
    return (
        f"{np.mean(differences):+.3f} nats ({interval[0]:+.3f} to {interval[1]:+.3f} over {len(differences)} windows)"
    )


def _loading(record: Mapping[str, Any], output: Path) -> str:
    if record["settings"]["adapter"]:
        return f"peft.PeftModel.from_pretrained(model, {str(output)!r}), the model with the config.json of that folder"
    if record["swapped"]:
        return f"locant.checkpoints.load_swapped({str(output)!r})"
    return f"transformers.AutoModelForCausalLM.from_pretrained({str(output)!r})"
