"""All settings of experiments are checked in one way: a value of a wrong kind is named, and numbers become plain."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from locant.errors import LocantError, RangeError
from locant.lab.evaluation import EvaluationSettings
from locant.lab.settings import Settings
from locant.lab.tuning import TuneSettings
from tests.refusal import refuses

KINDS: dict[type, dict[str, Any]] = {
    Settings: {}, EvaluationSettings: {"device": "cpu"}, TuneSettings: {"way": "own", "device": "cpu"},
}  # fmt: skip
UNCHECKED = {(Settings, "suite"), (Settings, "device"), (TuneSettings, "way")}
"""A suite is looked up, a device is asked for when it is used, and an encoding is read when a model is loaded."""

pytestmark = pytest.mark.unchecked  # the annotations refuse the same values

CHECKED = [(kind, field.name) for kind in KINDS for field in fields(kind) if (kind, field.name) not in UNCHECKED]


@pytest.mark.parametrize(("kind", "name"), CHECKED)
@pytest.mark.parametrize("wrong", [-1, 2.5, "no such", ("no such",), b"bytes"], ids=str)
def test_a_value_of_a_wrong_kind_is_refused(kind: type, name: str, wrong: Any) -> None:
    if wrong == 2.5 and name in ("minutes", "learning_rate"):
        return
    with pytest.raises(LocantError, match=r"^got "):
        kind(**{**KINDS[kind], name: wrong})


def test_numbers_become_plain_as_json_needs_them() -> None:
    for kind, name in ((EvaluationSettings, "windows"), (TuneSettings, "rank"), (Settings, "d_model")):
        assert type(getattr(kind(**KINDS[kind], **{name: np.int64(8)}), name)) is int


def test_repeated_entries_are_dropped_by_an_evaluation_and_refused_by_a_comparison() -> None:
    settings = EvaluationSettings(device="cpu", lengths=[64, 16, 64], ways=("own", "OWN", "alibi"))
    assert (settings.lengths, settings.ways) == ((16, 64), ("own", "alibi"))
    with refuses(RangeError, "seeds", "one or more, each once"):
        Settings(seeds=(1, 1))
