"""The table of engines in the documentation is that of the record, and numbers on its page are too."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import benchmarks.engines.__main__ as measuring
from benchmarks.engines.__main__ import RESULTS, ROOT, Environment, NotMeasuredError, environments
from docs.generator.records import SMALL, difference, engines

RECORD: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
ROWS: list[dict[str, Any]] = [row for part in RECORD.values() for row in part["rows"]]
PAGE = (ROOT / "docs" / "guides" / "engines.md").read_text(encoding="utf-8")


def test_every_row_stands_in_the_table_with_its_version_and_command() -> None:
    table = engines(RECORD)
    assert len(ROWS) > 10
    for row in ROWS:
        assert f"{row['engine']} {row['version']} (" in table
        own_day = f" ({row['measured']})" if "measured" in row else ""
        assert f"{row['subject']}: {difference(row)}{own_day}\n" in table or is_in_a_line_of_several(row, table)
        assert f"`{row['command']}`" in table
        file = row["command"].removeprefix("pytest ")
        assert file.startswith("make engines ENGINES=") or (ROOT / file).is_file()
    assert "reference/engines.txt" in PAGE


def is_in_a_line_of_several(row: dict[str, Any], table: str) -> bool:
    """Return whether a line names the row among others, with a small difference that is not below the row's."""
    words, _, name = row["subject"].partition(": ")
    part = re.search(rf"\* - {re.escape(row['engine'])} .*?(?=\n\* - |\n:::)", table, flags=re.DOTALL)
    lines = re.findall(rf"- {re.escape(words)} \((.+)\): (?:none|at most (\S+) (.+))$", part[0], flags=re.MULTILINE)
    size = float(f"{row['difference']:.2g}")  # as the page prints it
    return any(
        name in names.split(", ") and size <= float(bound or 0) < SMALL and unit == (row["unit"] if bound else "")
        for names, bound, unit in lines
    )


def test_a_line_of_several_is_found_only_if_it_is_right() -> None:
    row = {"engine": "One", "subject": "table: yarn", "unit": "nats", "difference": 2e-4}
    for line, is_right in (
        ("table (linear, yarn): at most 0.0002 nats", True), ("table (linear, yarn): at most 0.0001 nats", False),
        ("table (linear, ntk): at most 0.0002 nats", False), ("table (linear, yarn): none", False),
        ("flags (linear, yarn): at most 0.0002 nats", False),
    ):  # fmt: skip
        assert is_in_a_line_of_several(row, f"* - One 1.2 (today)\n  - - {line}\n    - `make`\n:::") == is_right, line


def test_numbers_on_the_page_are_those_of_the_record() -> None:
    measured = {row["subject"]: difference(row) for row in ROWS if row["unit"] == "logits from transformers"}
    told = re.findall(r"^\| (.+?) \| ([\d.e-]+) \| .+ \|$", PAGE, flags=re.MULTILINE)
    assert {subject: f"{number} logits from transformers" for subject, number in told} == measured


@pytest.mark.parametrize("name", environments())
def test_what_an_engine_cannot_do_names_its_test_or_its_source(name: str) -> None:
    environment = environments()[name]
    for statement in (each for statements in environment.cannot.values() for each in statements):
        (source,) = re.findall(r"\(([^()]+)\)$", statement)
        assert source.startswith("https://") or (ROOT / source).is_file(), statement
    for file in (word for word in environment.tests if word.endswith(".py")):
        assert (ROOT / file).is_file()
    assert environment.name == "development" or environment.packages or environment.alone
    assert RECORD.get(name, {}).get("cannot", environment.cannot) == environment.cannot, "make engines, once more"


def test_what_cannot_be_measured_keeps_what_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(environment: Environment) -> None:
        raise NotMeasuredError("pip failed")

    path = tmp_path / "engines.json"
    row = {"engine": "JAX", "version": "1", "subject": "a port", "difference": 2.0, "unit": "apples", "command": "make"}
    path.write_text(json.dumps({"jax": {"measured": "2026-11-24", "rows": [row], "cannot": {}}}))
    monkeypatch.setattr(measuring, "RESULTS", path)
    monkeypatch.setattr(measuring, "measured", fail)
    with pytest.raises(SystemExit) as end:
        measuring.main(["jax"])
    assert end.value.code
    record = json.loads(path.read_text())
    assert record["jax"]["rows"] == [row]
    assert "JAX 1 (2026-11-24)" in engines(record)
    assert "Not measured again: jax (pip failed)." in engines(record)
    with pytest.raises(SystemExit, match="unheard_of"):
        measuring.main(["unheard_of"])


def test_a_listed_version_counts_more_than_a_constraint() -> None:
    constraints = {*(ROOT / "constraints.txt").read_text().splitlines()}
    pinned = Environment("pinned", ["transformers", "kernels==0.1 ; python_version > '3'"], ["torch>=2"]).constraints()
    assert {*pinned.splitlines()} - constraints == {"kernels==0.1 "}
    missing = [line for line in constraints - {*pinned.splitlines()} if not line.startswith("#")]
    assert [line.partition("==")[0] for line in missing] == ["kernels"]
