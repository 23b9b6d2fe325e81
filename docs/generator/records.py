"""The measurements that the repository keeps beside the package."""

from __future__ import annotations

import json
import re
import subprocess
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from locant.lab.results import read_recorded
from locant.positions.registry import encodings
from locant.report.benchmarks import PLACES, read_benchmarks, table
from locant.report.sentences import join_and

__all__ = ["ROOT", "TASKS_ALONE", "benchmarks", "difference", "engines", "recorded", "recorded_names"]

ROOT = Path(__file__).parents[2]
ADDRESS = re.compile(r"https?://[^\s()]+")


SUITE, TASKS_ALONE = "v1-tiny", "data_dependent"
"""The comparison on a text and on all tasks, and the one of encodings that depend on the text, on three tasks."""


@cache
def recorded_names(comparison: str = SUITE) -> frozenset[str]:
    """Return the encodings of a recorded comparison."""
    return frozenset(re.split("[+@]", record["encoding"])[0] for record in read_recorded(comparison)["records"])


def recorded(names: Collection[str] | None = None) -> str:
    """Return how many encodings the results have, and which they lack.

    >>> recorded(["rotary", "alibi"]).partition(":")[0]
    'The results have 2 of 34 encodings'
    """
    measured = recorded_names() if names is None else names
    tasks_alone = frozenset() if names else recorded_names(TASKS_ALONE) - recorded_names()

    def listed(wanted: Callable[[str], bool]) -> list[str]:
        return [f"`{name}`" for name in encodings() if wanted(name)]

    shown = listed(lambda name: name in measured or name in tasks_alone)
    missing = listed(lambda name: name not in measured and name not in tasks_alone)
    alone = f" {join_and(listed(tasks_alone.__contains__))} were trained on tasks alone." if tasks_alone else ""
    return (
        f"The results have {len(shown)} of {len(encodings())} encodings: {', '.join(shown)}.{alone} "
        f"The others are not recorded yet, or are for images or sound: {', '.join(missing)}."
    )


def benchmarks() -> str:
    """Every recorded benchmark with its machine, and the day on which the record last changed."""
    found = read_benchmarks()
    parts = [_part(device, name, part) for device, benchmark in found.items() for name, part in benchmark.items()]
    return "\n\n".join(parts)


def engines(record: dict[str, Any] | None = None) -> str:
    """The table of engines: a row for each, with what was measured in it, the command for that, and what it cannot do.

    >>> row = {"engine": "One", "version": "1.2", "subject": "a layer", "difference": 2.4e-7, "unit": "absolute"}
    >>> part = {"measured": "2026-11-24", "rows": [row | {"command": "make engines"}], "cannot": {"One": ["sing"]}}
    >>> print(engines({"one": part}).partition("not supported")[2].strip())
    * - One 1.2 (2026-11-24)
      - - a layer: 2.4e-07 absolute
        - `make engines`
      - sing
    :::
    """
    if record is None:
        record = json.loads((ROOT / "benchmarks" / "results" / "engines.json").read_text(encoding="utf-8"))
    lines = [
        ":::{list-table}\n:header-rows: 1\n",
        "* - engine\n  - largest difference, and its test\n  - not supported",
    ]
    late = []
    for name, part in record.items():
        for engine in dict.fromkeys([*(row["engine"] for row in part["rows"]), *part["cannot"]]):
            rows = [row for row in part["rows"] if row["engine"] == engine]
            commands = [f"`{command}`" for command in dict.fromkeys(row["command"] for row in rows)]
            cannot = part["cannot"].get(engine, [])
            lines.extend(
                _row(
                    f"{' '.join([engine, *dict.fromkeys(row['version'] for row in rows)])} ({part['measured']})",
                    _differences(rows) + commands,
                    [re.sub(ADDRESS, r"[source](\g<0>)", _without_test(each, commands)) for each in cannot],
                )
            )
        if "not_repeated" in part:
            late.append(f"\nNot measured again: {name} ({part['not_repeated']}).")
    return "\n".join([*lines, ":::", *late])


SMALL, ALIKE = 1e-3, 3
"""Differences below the first number are one line, if at least so many subjects begin with the same words."""


def _differences(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each difference, and one for small differences of subjects that begin with the same words.

    >>> sizes = {"table: linear": 0.0, "table: yarn": 2e-4, "table: ntk": 1e-4, "table: longrope": 15.7, "flags": 0.0}
    >>> _differences([{"subject": each, "difference": size, "unit": "nats"} for each, size in sizes.items()])
    ['table: longrope: 15.7 nats', 'flags: none', 'table (linear, yarn, ntk): at most 0.0002 nats']
    """
    alike = defaultdict[tuple[str, str], list[dict[str, Any]]](list)
    for row in rows:
        if row["difference"] < SMALL:
            alike[row["subject"].partition(": ")[0], row["unit"] + _own_day(row)].append(row)
    groups = {key: group for key, group in alike.items() if len(group) >= ALIKE}
    joined = [id(row) for group in groups.values() for row in group]
    lines = [f"{row['subject']}: {difference(row)}{_own_day(row)}" for row in rows if id(row) not in joined]
    for (words, _), group in groups.items():
        largest = max(group, key=lambda row: row["difference"])
        names = ", ".join(row["subject"].partition(": ")[2] for row in group)
        bound = "at most " if largest["difference"] else ""
        lines.append(f"{words} ({names}): {bound}{difference(largest)}{_own_day(largest)}")
    return lines


def _without_test(statement: str, commands: Collection[str]) -> str:
    """Return a statement without the file of its test if a command beside it names that file.

    >>> _without_test("sing (tests/a.py)", ["`pytest tests/a.py`"]), _without_test("sing (tests/b.py)", ["`make b`"])
    ('sing', 'sing (`tests/b.py`)')
    """
    claim, _, file = statement.removesuffix(")").rpartition(" (")
    if not claim or file.startswith("https://"):
        return statement
    return claim if f"`pytest {file}`" in commands else f"{claim} (`{file}`)"


def _own_day(row: dict[str, Any]) -> str:
    """Return the day of a row that was measured alone, after the other rows of its part.

    >>> _own_day({"measured": "2026-11-29"}), _own_day({})
    (' (2026-11-29)', '')
    """
    return f" ({row['measured']})" if "measured" in row else ""


def difference(row: dict[str, Any]) -> str:
    """As pages tell it.

    >>> [difference({"difference": size, "unit": "logits"}) for size in (12.84, 0.000144, 0.0)]
    ['12.8 logits', '0.00014 logits', 'none']
    """
    size = row["difference"]
    return f"{size:{'.1f' if size >= 1 else '.2g'}} {row['unit']}" if size else "none"


def _row(first: str, *cells: list[str]) -> Iterator[str]:
    yield f"* - {first}"
    for cell in cells:
        if len(cell) < 2:
            yield f"  - {''.join(cell) or '–'}"
        else:
            yield from (f"  {' ' if number else '-'} - {line}" for number, line in enumerate(cell))


def _part(device: str, name: str, part: dict[str, Any]) -> str:
    made = part["environment"]
    machine = f"{made['cpu_count']} cores ({made['machine']}), {made['system']}"
    versions = f"torch {made['torch']} with {made['torch_threads']} threads, Python {made['python']}"
    return f"""## {name.replace("_", " ").capitalize()} on {"a CPU" if device == "cpu" else device}

{_day(device)}{machine}; {versions}; locant {made["locant"]}.

```text
{table(part["rows"]).strip()}
```"""


@cache
def _day(device: str) -> str:
    """When the file was recorded, where git knows."""
    file = next(place / f"{device}.json" for place in PLACES if (place / f"{device}.json").is_file())
    asked = ["git", "log", "-1", "--format=%as", "--", str(file)]
    said = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603  # no input of others
    return f"Recorded {said.stdout.strip()}; " if said.stdout.strip() else ""
