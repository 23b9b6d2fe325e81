"""What a tuning did to the loss on held-out text, in a few lines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from locant.lab.evaluation import interval_of_mean
from locant.lab.summary import ENOUGH_WINDOWS
from locant.report.console import named_rows, show

__all__ = ["print_tuning"]


def print_tuning(record: Mapping[str, Any], output: Path) -> None:
    """The losses before and after, the difference with its interval, and how to load what was written."""
    steps, settings = record["num_steps"], record["settings"]
    rows = named_rows()
    rows.add_row("training", f"{steps:,} steps of {settings['batch_size']} x {settings['length']:,} tokens")
    rows.add_row("training loss", f"{np.mean(record['train_loss'][-max(1, steps // 10) :]):.3f}")
    rows.add_row("held-out loss", f"{np.mean(record['before']):.3f} before, {np.mean(record['after']):.3f} after")
    rows.add_row("difference", _difference(record["before"], record["after"]))
    rows.add_row("written to", str(output))
    rows.add_row("load it with", _loading(record, output))
    show(rows)


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
