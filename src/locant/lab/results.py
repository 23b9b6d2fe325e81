"""What a comparison found, with what it was made, the command that makes it again, and the folder it is written to."""

from __future__ import annotations

import dataclasses
import os
import platform
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch

from locant._version import __version__
from locant.errors import InputError
from locant.files import json_text, write_whole
from locant.lab.resume import earlier
from locant.lab.settings import Settings

__all__ = [
    "BY_LENGTH",
    "BY_POSITION",
    "PAGE",
    "RECORD",
    "RESULTS",
    "Record",
    "Results",
    "ResultsFolder",
    "command",
    "environment",
]

RESULTS = "results.json"
RECORD = "tuning.json"
"""What `tune` writes, into the folder of the model."""

PAGE, BY_LENGTH, BY_POSITION = DRAWN = ("report.html", "loss_by_length.png", "loss_by_position.png")


def environment(device: str = "cpu") -> dict[str, str | int]:
    """Versions and machine, and the kind of a device; without names of hosts, users or paths."""
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return {
        "locant": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "tokenizers": tokenizers.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "cpu_count": os.cpu_count() or 0,
        "torch_threads": torch.get_num_threads(),
        **({} if device == "cpu" else {"device": device if name is None else name(device)}),
    }


@dataclass(frozen=True, kw_only=True)
class Record:
    """One measured model. Losses are nats per token on held-out text; ``None`` where one was not finite."""

    encoding: str
    seed: int
    train_length: int
    loss_by_length: dict[int, float | None]
    loss_by_position: list[float | None]
    """At each position of the longest windows."""
    loss_by_window: dict[int, list[float | None]]
    """For each length, in each window, in the order of the text."""
    train_loss: float | None
    """Over the last tenth of the training steps."""
    num_parameters: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Results:
    """Settings, environment, how much text there was, and the records so far."""

    settings: Settings
    environment: dict[str, str | int] = field(default_factory=environment)
    text: dict[str, Any] = field(default_factory=dict)
    records: tuple[Record, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, numbers and strings, ready for JSON: lengths become strings, and `text` one of the settings."""
        records = [dataclasses.asdict(record) for record in self.records]
        for record in records:
            for name in ("loss_by_length", "loss_by_window"):
                record[name] = {str(length): loss for length, loss in record[name].items()}
        plain = dataclasses.asdict(self.settings).items()
        settings = {name: list(value) if isinstance(value, tuple) else value for name, value in plain}
        return {"settings": {**settings, "text": self.text}, "environment": self.environment, "records": records}


SHORTER = {"num_steps": "steps", "batch_size": "batch"}
"""Settings whose option of ``locant compare`` has another name; `minutes` only chose the number of steps."""


def command(settings: Mapping[str, Any]) -> str:
    """The line for a shell that makes a comparison again, from the settings in its results.

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
    for name, value in settings.items():
        if name not in ("text", "minutes"):
            words += [f"--{SHORTER.get(name, name).replace('_', '-')}"]
            words += [",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)]
    return shlex.join(words)


class ResultsFolder:
    """A folder to write results into, made if it is not there; what a comparison did not write is never changed.

    An earlier report stays until the first result of the new one. Any other folder with something in it is refused,
    unless `force` allows to write beside what is there.
    """

    def __init__(self, path: Path | str, *, force: bool = False) -> None:
        self.path = Path(path)
        self.holds_earlier = {"settings", "environment", "records"} <= earlier(self.path / RESULTS).keys()
        self._stale = DRAWN if self.holds_earlier else ()
        elsewhere = f"-o {self.path}-report"
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"got {self.path}, which is a file, as the folder of the report", elsewhere)
        if self.path.is_dir() and any(self.path.iterdir()) and not (self.holds_earlier or force):
            remedy = f"{elsewhere}, or --force to write beside them"
            raise InputError(f"{self.path} holds other things than a report", remedy)
        self._made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot make {self.path}: {error.strerror}", "a folder that you may write to") from None
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise InputError(f"got {self.path}, where nothing may be written", "a folder that you may write to")

    def write(self, results: Mapping[str, Any]) -> None:
        """Replace the results; what was drawn from earlier ones is removed."""
        write_whole(self.path / RESULTS, json_text(results))
        for name in self._stale:
            (self.path / name).unlink(missing_ok=True)
        self._stale = ()

    def remove_if_empty(self) -> None:
        """Remove the folders that were made here, if nothing was written into them."""
        for folder in self._made:
            if any(folder.iterdir()):
                return
            folder.rmdir()
