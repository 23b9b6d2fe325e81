"""A widget of a notebook: the numbers are those of the page, and what is wrong is said."""

from __future__ import annotations

import sys

import pytest

from locant.errors import InputError, RangeError
from locant.explore import widget
from locant.explore.screens import answer, as_json
from locant.explore.session import Session
from tests.refusal import refuses

pytest.importorskip("anywidget", reason="a widget needs the extra `notebook`")


def test_a_widget_holds_the_answer_to_its_settings() -> None:
    made = widget("rows?documents=4, 4")
    made.settings = {"documents": "2, 3"}
    assert made.answer == as_json(answer("rows", {"documents": "2, 3"}, Session()))
    assert made.refused == ""


def test_what_is_wrong_is_said_and_the_answer_stays() -> None:
    made = widget("compare?length=16")
    before = made.answer
    made.settings = {"length": "1"}
    assert made.answer == before
    assert "for length" in made.refused
    assert "Try: length=" in made.refused
    made.settings = {"length": "16"}
    assert made.refused == ""


def test_a_widget_reads_files_as_the_command_does(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.txt").write_text("the cat " * 40)
    made = widget("text", files=[str(tmp_path / "mine.txt")])
    assert "mine.txt" in made.answer
    with refuses(RangeError, "screen"):
        widget("nowhere")
    with refuses(InputError, "no file"):
        widget("text", files=["absent.txt"])
    (tmp_path / "empty").mkdir()
    with refuses(InputError, "results.json"):
        widget("text", files=[str(tmp_path / "empty")])
    with refuses(InputError, "screen compare shows nothing of"):
        widget("compare", files=[str(tmp_path / "mine.txt")])
    monkeypatch.setitem(sys.modules, "anywidget", None)
    with refuses(InputError, "anywidget"):
        widget("compare")
