"""The record of a part: one JSON file with versions, checksums, the command, and what was measured, key by key.

Each measurement is written down as soon as it is made, so a part that was stopped goes on where it was. A measurement
counts as made if the versions, the checksums of the weights and its own settings are the same. Measurements with other
versions or weights stay in the file until the same key is measured again. Their rows have the number of an entry of
``earlier``, which has the versions, the weights and the environment that they were made with.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.real_models import weights
from locant.files import write_whole
from locant.lab import environment

__all__ = ["DECIDING", "RESULTS", "Record", "describe_versions", "read"]

RESULTS = Path(__file__).parents[1] / "results" / "real_models"
DECIDING = ("torch", "transformers", "tokenizers", "gguf")
"""The packages whose versions decide whether a measurement counts as made."""
ORIGIN = ("command", "versions", "weights")
"""The keys of a record that decide whether its measurements count as made."""


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def read(part: str, folder: Path = RESULTS) -> dict[str, Any]:
    """Return the record of a part, or an empty dictionary if there is none."""
    file = folder / f"{part}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def describe_versions(record: Mapping[str, Any]) -> str:
    """Return the versions with which a record was measured, and the number of its rows with other versions.

    >>> describe_versions({"versions": {"torch": "2.13.0", "gguf": None}, "measured": {"a": {}}})
    'torch 2.13.0'
    >>> describe_versions({"versions": {"torch": "2.13.0"}, "measured": {"a": {"earlier": 0}, "b": {}}})
    'torch 2.13.0 (1 of 2 measurements with other versions or weights)'
    """
    versions = ", ".join(f"{package} {version}" for package, version in record["versions"].items() if version)
    rows = record.get("measured", {}).values()
    others = sum("earlier" in row for row in rows)
    return versions + (f" ({others} of {len(rows)} measurements with other versions or weights)" if others else "")


class Record:
    """What a part has measured.

    Args:
        part: the name of the part and of its file.
        models: the models of `weights.MODELS` that it reads.
        packages: other packages whose versions decide whether a measurement counts as made.
        anew: whether to measure everything again, and to drop what the part no longer measures.
        folder: the folder of the file.
        summary: makes what follows from all values, for the pages and the package that read the file.
        talk: is called with a line for each measurement.
    """

    def __init__(
        self, part: str, models: Sequence[str], *, packages: Sequence[str] = (), anew: bool = False,
        folder: Path = RESULTS, summary: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
        talk: Callable[[str], None] = print,
    ) -> None:  # fmt: skip
        self.part, self.folder, self.summary, self.talk = part, folder, summary, talk
        self.head = {
            "command": f"python -m benchmarks.real_models {part}",
            "versions": {package: _version(package) for package in (*DECIDING, *packages)},
            "weights": {name: weights.facts(name) for name in models},
        }
        recorded, self._drops = read(part, folder), anew
        self._measured: dict[str, dict[str, Any]] = recorded.get("measured", {})
        self._earlier: list[dict[str, Any]] = recorded.get("earlier", [])
        self._environment: dict[str, Any] | None = recorded.get("environment")
        if self._measured and any(recorded.get(key) != self.head[key] for key in ORIGIN):
            self._mark_as_earlier({key: recorded.get(key) for key in (*ORIGIN, "environment")})
            self._reuse_earlier()
        self._outdated = {key for key, row in self._measured.items() if anew or "earlier" in row}
        if self._outdated and not anew:
            count = len(self._outdated)
            talk(f"{part}: {count} measurements with other versions or weights are kept until they are made again")

    def _mark_as_earlier(self, origin: dict[str, Any]) -> None:
        """Note the versions, weights and environment of all rows that were the newest until now."""
        for row in self._measured.values():
            row.setdefault("earlier", len(self._earlier))
        self._earlier.append(origin)
        self._environment = None

    def _reuse_earlier(self) -> None:
        """Remove the mark of rows with the versions and weights of this run, such as after a run with others."""
        for number, origin in enumerate(self._earlier):
            rows = [row for row in self._measured.values() if row.get("earlier") == number]
            if rows and all(origin[key] == self.head[key] for key in ORIGIN):
                self._environment = origin["environment"]
                for row in rows:
                    del row["earlier"]

    def measure(self, key: str, settings: Mapping[str, Any], function: Callable[[], Any]) -> Any:
        """Return what `function` measures, as JSON holds it. It is not called if the same was measured before.

        Args:
            key: the name of the measurement in the file.
            settings: everything but versions and weights that decides the outcome, as plain values.
            function: returns plain values.
        """
        plain = json.loads(json.dumps(dict(settings)))
        row = self._measured.get(key)
        if row is None or row["settings"] != plain or key in self._outdated:
            began = time.perf_counter()
            value = json.loads(json.dumps(function()))
            seconds = round(time.perf_counter() - began, 1)
            self._measured[key] = row = {"settings": plain, "seconds": seconds, "value": value}
            self._outdated.discard(key)
            self._environment = environment()
            self._write()
            self.talk(f"{self.part}: {key} ({seconds} s)")
        return row["value"]

    @property
    def measured(self) -> dict[str, Any]:
        """Return all values by key, also those of earlier versions that were not measured again yet."""
        return {key: each["value"] for key, each in self._measured.items()}

    @property
    def seconds(self) -> float:
        """Return the time that all measurements took."""
        return round(sum(each["seconds"] for each in self._measured.values()), 1)

    def write(self) -> None:
        """Write the file, as each measurement does, at the end of a part.

        Measurements that the part no longer makes are dropped only if everything was to be measured again.
        """
        if self._drops:
            for key in self._outdated:
                del self._measured[key]
            self._outdated.clear()
        self._write()

    def _write(self) -> None:
        head = {**self.head, "environment": self._environment or environment(), "seconds": self.seconds}
        if any("earlier" in row for row in self._measured.values()):
            head["earlier"] = self._earlier
        parts = [json.dumps(head, indent=1).removesuffix("\n}")]
        if self.summary is not None:
            parts.append(f' "summary": {json.dumps(self.summary(self.measured), indent=1)}')
        rows = ",\n".join(f"{json.dumps(key)}: {json.dumps(each)}" for key, each in self._measured.items())
        parts.append(f' "measured": {{\n{rows}\n}}')
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / f"{self.part}.json", ",\n".join(parts) + "}\n")
