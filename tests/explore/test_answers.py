"""Settings become controls, and numbers become JSON that says the same in a browser."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest

from locant.errors import RangeError
from locant.explore.answers import answer, as_json
from locant.explore.screen import screens
from locant.explore.session import Session
from locant.explore.state import State
from tests.explore.screens import SCREENS
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


def test_settings_of_a_part_are_told_by_their_full_names() -> None:
    state = State({"2.base": "500000.5"})
    assert state.part("2").real("base", 1e4, 2, 1e9) == 500_000.5
    assert state.part("1").real("base", 1e4, 2, 1e9) == 1e4
    assert state.settled == {"2.base": "500000.5", "1.base": "10000"}


def test_arrays_arrive_bit_for_bit_and_other_numbers_as_json_has_them() -> None:
    values = np.array([[0.1, -0.0], [np.nan, 3e38]], dtype=np.float32)
    told = json.loads(as_json({"a": values, "n": [float("inf"), 0.1, None, True], "i": np.arange(3)}))
    assert told["a"]["shape"] == [2, 2]
    assert base64.b64decode(told["a"]["data"]) == values.astype("<f4").tobytes()
    assert told["n"] == [None, 0.1, None, True]
    assert told["i"]["array"] == "int32"


@pytest.mark.parametrize("name", list(SCREENS))
def test_settled_settings_give_the_same_answer(name: str) -> None:
    first = answer(name, {}, Session())
    again = answer(name, first["state"], Session())
    assert as_json(again) == as_json(first)


@pytest.mark.parametrize("name", list(SCREENS))
def test_a_screen_says_its_python_which_runs_as_it_stands(name: str) -> None:
    compile(answer(name, {}, Session())["numbers"]["python"], name, "exec")


def test_screens_have_places_of_their_own() -> None:
    places = [screen.place for screen in screens().values()]
    assert places == sorted(set(places))
