"""The README's example is run, and must print what the README says it prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def run(code: str, capsys: pytest.CaptureFixture[str]) -> str:
    exec(compile(code, "README.md", "exec"), {})  # noqa: S102  # the README is ours, and running it is the test
    return capsys.readouterr().out


def test_the_example_prints_the_shapes_that_stand_below_it(capsys):
    assert run(blocks("python")[0], capsys) == blocks("text")[0]


def test_a_changed_shape_would_be_noticed(capsys):
    assert run(blocks("python")[0].replace("length=4", "length=5"), capsys) != blocks("text")[0]


def test_the_example_has_twelve_lines_at_most():
    assert len([line for line in blocks("python")[0].splitlines() if line.strip()]) <= 12


def test_every_picture_and_page_it_points_to_is_there():
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert targets
    assert [target for target in targets if not (Path(__file__).parents[2] / target).exists()] == []
