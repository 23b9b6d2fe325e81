"""What a test of an engine measures, kept for the table of engines in the documentation (`make engines`)."""

from __future__ import annotations

import json
import os
from importlib.metadata import version
from pathlib import Path

FOLDER = "LOCANT_ENGINE_RESULTS"
"""The environment variable that names the folder; without it nothing is kept."""


def record(engine: str, subject: str, difference: float, *, package: str, unit: str = "logits") -> None:
    """Keep one row: the largest `difference` between locant and an engine, in `unit`, and the version it ran with.

    Args:
        engine: as its users call it, such as ``vLLM``.
        subject: what was compared, such as ``log-probabilities of YaRN``.
        package: the distribution whose version counts.
    """
    if folder := os.environ.get(FOLDER):
        test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
        row = {"engine": engine, "version": version(package), "subject": subject, "difference": difference}
        with (Path(folder) / f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({**row, "unit": unit, "test": test}) + "\n")
