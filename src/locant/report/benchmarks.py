"""Read and print the recorded measurements of `benchmarks/`, with one file per device and one table per question."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from locant.errors import InputError

PLACES = (Path(__file__).parent / "results", Path(__file__).parents[3] / "benchmarks" / "results")
"""The folders of results in an installed package and in a checkout."""
ENGINES = "engines"
"""The name of the file that `make engines` wrote. It does not belong to a device."""


def read_benchmarks(names: Sequence[str] = (), places: Sequence[Path] = PLACES) -> dict[str, dict[str, Any]]:
    """Return the ``environment`` and ``rows`` of one benchmark or of all benchmarks, by device and benchmark."""
    files = sorted(file for place in places if place.is_dir() for file in place.glob("*.json") if file.stem != ENGINES)
    if not files:
        raise InputError("found no recorded measurements", "run `make bench` in a checkout")
    devices = {file.stem: json.loads(_read_measurements(file)) for file in files}
    benchmarks = sorted({name for parts in devices.values() for name in parts})
    if unknown := sorted({*names} - {*benchmarks}):
        expected = f"expected one of {', '.join(benchmarks)}"
        raise InputError(f"got {unknown[0]!r}, {expected}", f"locant bench {benchmarks[0]}")
    return {
        device: {name: part for name, part in parts.items() if name in (names or benchmarks)}
        for device, parts in devices.items()
    }


def print_recorded(devices: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the measurements, one table for each benchmark."""
    from locant.kernels import native  # needs torch, which takes two seconds to import

    for device, parts in devices.items():
        for name, part in parts.items():
            setup = part["environment"]
            versions = f"torch {setup['torch']}, {setup['torch_threads']} threads, Python {setup['python']}"
            sys.stdout.write(f"{name} on {device} ({versions})\n{table(part['rows'])}\n\n")
    sys.stdout.write(f"on this machine, native kernels are {native.status()}\n")


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format rows as text.

    Below each question, list the contenders with their ratio to the first, time and known memory.

    >>> print(table([{"question": "a copy", "contender": "copy_", "ratio": 1.0, "milliseconds": 3.5}]))
    <BLANKLINE>
    a copy
           1.00×         3.500 ms                copy_
    """
    lines, question = [], None
    for row in rows:
        if row["question"] != question:
            question = row["question"]
            lines.append(f"\n{_plain(question)}")
        time = _amount(row["milliseconds"], 11, 3, "ms")
        memory = _amount(row.get("megabytes"), 10, 1, "MB")
        lines.append(f"  {row['ratio']:9,.2f}×   {time}  {memory} {_plain(row['contender'])}")
    return "\n".join(lines)


def _read_measurements(file: Path) -> str:
    """Read a file and write its dtypes in the usual way, without ``torch.``."""
    return re.sub(r"torch\.(?=b?float|u?int)", "", file.read_text(encoding="utf-8"))


def _plain(text: str) -> str:
    """Format a recorded question or contender, with commas in its numbers.

    >>> _plain("a store of 10 000 shards, 20000000 tokens")
    'a store of 10,000 shards, 20,000,000 tokens'
    """
    text = re.sub(r"(?<=\d) (?=\d{3}\b)", "", text)
    return re.sub(r"(?<![\w.,^])\d{4,}\b", lambda digits: f"{int(digits[0]):,}", text)


def _amount(value: float | None, width: int, digits: int, unit: str) -> str:
    return " " * (width + 1 + len(unit)) if value is None else f"{value:{width},.{digits}f} {unit}"
