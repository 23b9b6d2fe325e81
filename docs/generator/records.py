"""What the repository keeps beside the package: the list of known bugs, and recorded measurements."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

from locant.report.benchmarks import PLACES, recorded, table

__all__ = ["ROOT", "benchmarks", "known_bugs"]

ROOT = Path(__file__).parents[2]


def known_bugs(museum: str) -> str:
    r"""The table of entries in the museum's own page, with a link to every thread.

    >>> known_bugs("## Entries\n| entry | source |\n| --- | --- |\n| 1 | a/b#7 |").splitlines()[-1]
    '| 1 | [a/b#7](https://github.com/a/b/issues/7) |'
    """
    rows = [line for line in museum.partition("## Entries")[2].splitlines() if line.startswith("|")]
    thread = r"\b([\w.-]+/[\w.-]+)#(\d+)"
    return re.sub(thread, r"[\1#\2](https://github.com/\1/issues/\2)", "\n".join(rows))


def benchmarks() -> str:
    """Every recorded benchmark with its machine, and the day on which the record last changed."""
    found = recorded()
    parts = [_part(device, name, part) for device, benchmark in found.items() for name, part in benchmark.items()]
    return "\n\n".join(parts)


def _part(device: str, name: str, part: dict[str, Any]) -> str:
    made = part["environment"]
    machine = f"{made['cpu_count']} cores ({made['machine']}), {made['system']}"
    versions = f"torch {made['torch']} with {made['torch_threads']} threads, Python {made['python']}"
    return f"""## {name} on {device}

{_day(device)}{machine}; {versions}; locant {made["locant"]}.

```text
{table(part["rows"]).strip()}
```"""


def _day(device: str) -> str:
    """When the file was recorded, where git knows."""
    file = next(place / f"{device}.json" for place in PLACES if (place / f"{device}.json").is_file())
    asked = ["git", "log", "-1", "--format=%as", "--", str(file)]
    said = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603  # no input of others
    return f"Recorded {said.stdout.strip()}; " if said.stdout.strip() else ""
