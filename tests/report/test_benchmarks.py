"""Recorded measurements are shown as they were recorded, and a name without any is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from locant.errors import InputError
from locant.report.benchmarks import print_recorded, read_benchmarks, table
from tests.refusal import refuses

ROW = {"question": "a copy", "contender": "copy_", "ratio": 1.0, "milliseconds": 3.5, "megabytes": None}
SLOW = {**ROW, "contender": "eager", "ratio": 41.25, "megabytes": 96.0}
PART = {"environment": {"torch": "2.13.0", "torch_threads": 2, "python": "3.11.7"}, "rows": [ROW, SLOW]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One device with two benchmarks."""
    (tmp_path / "cpu.json").write_text(json.dumps({"rotary": PART, "windows": {**PART, "rows": [SLOW]}}))
    return tmp_path


def test_a_table_has_every_ratio_under_its_question() -> None:
    lines = table([ROW, SLOW, {**ROW, "question": "another"}]).splitlines()
    assert lines[1] == "a copy"
    assert lines[2].split() == ["1.00×", "3.500", "ms", "copy_"]
    assert lines[3].split() == ["41.25×", "3.500", "ms", "96.0", "MB", "eager"]
    assert lines[5] == "another"


def test_all_or_some_benchmarks_are_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_recorded(read_benchmarks(places=[folder]))
    assert capsys.readouterr().out.count("torch 2.13.0, 2 threads, Python 3.11.7") == 2
    windows = read_benchmarks(["windows"], [folder])
    assert windows == {"cpu": {"windows": {**PART, "rows": [SLOW]}}}
    print_recorded(windows)
    assert capsys.readouterr().out.startswith("windows on cpu (torch 2.13.0, 2 threads, Python 3.11.7)\n\na copy\n")


def test_a_name_without_measurements_is_refused(folder: Path) -> None:
    with refuses(InputError, "'speed'", "rotary, windows", "locant bench rotary"):
        read_benchmarks(["speed"], [folder])


def test_no_measurements_at_all_are_refused(tmp_path: Path) -> None:
    with refuses(InputError, "no recorded measurements", "make bench"):
        read_benchmarks(places=[tmp_path, tmp_path / "nowhere"])
