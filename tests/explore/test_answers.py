"""Settings become controls, and numbers become JSON that says the same in a browser."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from locant.errors import RangeError
from locant.explore.document import render_saved_page
from locant.explore.screens import answer, answer_link, as_json, encodings_of_text, screens
from locant.explore.session import Session, State, read_address
from locant.models.registry import presets
from locant.positions.registry import encodings
from tests.explore.screens import EVALUATED, SCREENS
from tests.refusal import refuses


def test_a_setting_is_taken_within_its_limits() -> None:
    for text, value in (("2", 2), ("3", 3), ("4096", 4096)):
        assert State({"length": text}).whole("length", 128, 2, 4096) == value
    for text in ("1", "4097", "", "1.5", "x", "9" * 5000, "-1", "٣x"):
        with refuses(RangeError, "length"):
            State({"length": text}).whole("length", 128, 2, 4096)
    for text in ("nan", "inf", "1e9", "-0.1", "", "one"):
        with refuses(RangeError, "alike"):
            State({"alike": text}).real("alike", 0.5, 0, 1)
    with refuses(RangeError, "layout", "half"):
        State({"layout": "halff"}).one_of("layout", "half", ["half", "interleaved"])
    with refuses(RangeError, "text"):
        State({"text": "x" * 11}).text("text", longest=10)


def test_limits_that_follow_other_settings_take_the_nearest() -> None:
    for text, value in (("31", 15), ("15", 15), ("-1", 0)):
        state = State({"pair": text})
        assert state.whole("pair", 12, 0, 15, follows=True) == value
        assert state.settings == {"pair": str(value)}
    with refuses(RangeError, "pair"):
        State({"pair": "x"}).whole("pair", 12, 0, 15, follows=True)


LARGE = ("compare", "images", "text")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LARGE else ()) for name in (*LARGE, "rotary", "rows")]
)
def test_no_slider_ends_at_what_is_refused(name: str) -> None:
    """Nor does one make another one's value a refused one: all are at their ends, and then each at its other end."""
    numeric = {each: one for each, one in answer(name, {}, Session())["controls"].items() if "low" in one}
    highest = {each: f"{one['high']}" for each, one in numeric.items() if not one["log"]}
    answer(name, highest, Session())
    for each, one in numeric.items():
        answer(name, {**highest, each: f"{one['low']}"}, Session())
        if one["kind"] == "whole":
            answer(name, {each: f"{one['low'] + one['step']}"}, Session())


@pytest.mark.parametrize(
    ("link", "left_out", "words"),
    [
        ("compare?1=foo&length=64", ["1"], ["'foo'"]),
        ("compare?1=foo&2.slope=nan&length=64", ["1", "2.slope"], ["'foo'", "nan"]),
        ("rotary?head_dim=33&pair=5", ["head_dim"], ["33"]),
        ("images?scheme=none&rows=3", ["scheme"], ["'none'"]),
        ("rows?documents=5,+x&window=2", ["documents"], ["'x'"]),
        ("rows?indices=coupled&sum=1%2B%2B2", ["sum"], ["1++2"]),
        ("text?file=dropped-gone&count=20", ["file"], ["dropped"]),
        ("model?model=dropped-gone&method=ntk", ["model"], ["dropped"]),
        pytest.param("swap?model=gpt2&with=nothing", ["with"], ["'nothing'"], marks=pytest.mark.slow),
        ("known_bugs?bug=none", ["bug"], ["'none'"]),
        ("results?report=nowhere&steps=7", ["report"], ["'nowhere'"]),
    ],
)
def test_of_a_bad_link_the_rest_is_shown(link: str, left_out: list[str], words: list[str]) -> None:
    screen, given = read_address(link)
    shown = answer_link(screen, given, Session())
    assert shown["left_out"] == left_out
    assert all(word in " ".join(shown["refused"]) for word in words)
    rest = {name: value for name, value in given.items() if name not in left_out}
    assert {name: shown["state"][name] for name in rest} == rest
    assert as_json(shown["numbers"]) == as_json(answer(screen, rest, Session())["numbers"])


@pytest.mark.parametrize("name", encodings())
def test_every_screen_shows_every_encoding_that_it_offers(name: str) -> None:
    """Also where one refuses: then it says why, beside what the others draw."""
    if name in encodings_of_text():
        long = answer("compare", {"1": name, "2": "nope", "3": "none", "length": str(2**17)}, Session())["numbers"]
        first, second = long["encodings"]
        assert ("note" in first) != ("mean" in first)
        assert len(second["mean"]) == 256
        text = answer("text", {"model": "untrained", "encoding": name, "tokenizer": "bytes"}, Session())["numbers"]
        assert text["attention"]["weights"].shape == (48, 48)
    row = {"encoding": name, "documents": "192", "times": "512"}
    backend = answer("rows", row, Session())["numbers"]["backend"]
    assert backend["reason"]
    assert (backend["name"] == "none") == ("continuous" in name or name in ("decomposed", "grid_bias"))


FOLDER = "a-folder-of-mine"


@pytest.mark.parametrize("screen", ["compare", "text", "model", "swap", "results"])
def test_an_exported_page_has_no_path_of_this_machine(screen: str, tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    for name in ("report", "model"):
        (folder / name).mkdir(parents=True)
    (folder / "story.txt").write_text("the cat sat on the mat " * 40)
    text = folder / "story.txt"
    read = {"source": str(text), "files": [str(text)]}
    evaluated = {**EVALUATED, "settings": {**EVALUATED["settings"], "text": read}}
    (folder / "report" / "results.json").write_text(json.dumps(evaluated))
    assert str(text) in json.dumps(answer("results", {}, Session([folder / "report"]))["numbers"]["said"])
    config = {**presets()["mistral-7b"], "_name_or_path": str(folder / "model")}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    session = Session.of([str(folder / each) for each in ("story.txt", "report", "model")], [])
    settings = {"model": "untrained"} if screen == "text" else {}
    alone = answer(screen, settings, replace(session, is_shared=True))
    page = render_saved_page(alone)
    assert FOLDER not in page
    assert str(tmp_path) not in page
    if screen != "compare":
        own = {"text": "story.txt", "results": "report"}.get(screen, "model")
        assert any(own in control.get("choices", ()) for control in alone["controls"].values())
    python = answer(screen, settings, session)["numbers"]["python"]
    assert (FOLDER in str(python)) == (screen in ("text", "swap", "results"))  # what is run here finds the file


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "story.txt").write_text(name)
    (tmp_path / "other.txt").write_text("other")
    files = [tmp_path / "a" / "story.txt", tmp_path / "b" / "story.txt", tmp_path / "other.txt"]
    assert Session(files).names == dict(zip(["a/story.txt", "b/story.txt", "other.txt"], files, strict=True))


def test_settings_of_a_part_are_told_by_their_full_names() -> None:
    state = State({"2.base": "500000.5"})
    assert state.part("2").real("base", 1e4, 2, 1e9) == 500_000.5
    assert state.part("1").real("base", 1e4, 2, 1e9) == 1e4
    assert state.settings == {"2.base": "500000.5", "1.base": "10000"}


def test_arrays_arrive_bit_for_bit_and_other_numbers_as_json_has_them() -> None:
    values = np.array([[0.1, -0.0], [np.nan, 3e38]], dtype=np.float32)
    told = json.loads(as_json({"a": values, "n": [float("inf"), 0.1, None, True], "i": np.arange(3)}))
    assert told["a"]["shape"] == [2, 2]
    assert base64.b64decode(told["a"]["data"]) == values.astype("<f4").tobytes()
    assert told["n"] == [None, 0.1, None, True]
    assert told["i"]["array"] == "int32"


@pytest.mark.parametrize("name", SCREENS)
def test_settled_settings_give_the_same_answer_whose_python_can_be_read(name: str) -> None:
    first = answer(name, {}, Session())
    again = answer(name, first["state"], Session())
    assert as_json(again) == as_json(first)
    python = first["numbers"]["python"]
    for code in python.values() if isinstance(python, dict) else [python]:
        compile(code, name, "exec")


def test_screens_have_places_of_their_own() -> None:
    places = [screen.place for screen in screens().values()]
    assert places == sorted(set(places))
