"""A suite fixes what decides its numbers, so that those of others can stand beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from locant import RangeError
from locant.lab import Settings, compare, results
from locant.lab import training as trainings
from locant.lab.results import SCHEMA, add_recorded, plain_settings, read_recorded_suite
from locant.lab.settings import ADDED, SIZES, SUITES, TEXT, size_of
from locant.lab.task_learning import CHOOSING, MEASURED, Accuracy
from locant.lab.task_summary import scores
from locant.lab.training import SWEEP_SEED, Training
from locant.report.commands import command
from locant.report.comparison import page
from tests.lab.fabricated import THE_FIELD, task_results
from tests.lab.fabricated import results as results_of_losses
from tests.refusal import refuses
from tests.threads import threads

SUITE = Settings(suite="v1", encodings=("alibi", "rotary+yarn"), **SIZES["small"])


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_fixes_all_but_the_encodings_and_the_size(name: str) -> None:
    settings, usual = Settings(suite=name, encodings=("alibi",), **SIZES["small"]), Settings()
    for field, value in vars(settings).items():
        if field not in ("encodings", "suite", *SIZES["small"]):
            assert value == SUITES[name].get(field, getattr(usual, field)), field
    assert size_of(vars(settings)) == "small"
    assert len(settings.seeds) >= 3, "fewer tell nothing"


@pytest.mark.parametrize(
    "option",
    [
        {"seeds": (0,)}, {"tasks": ("copy",)}, {"num_steps": 9}, {"minutes": 1.0}, {"task_length": 8},
        {"learning_rate": 1e-3}, {"rates": (2.0,)}, {"batch_size": 8}, {"multiples": (1, 2)}, {"train_length": 32},
    ],
    ids=lambda option: next(iter(option)),
)  # fmt: skip
def test_what_a_suite_fixes_cannot_be_chosen(option: dict[str, Any]) -> None:
    with refuses(RangeError, *option, "v1", "fixes"):
        Settings(suite="v1", **option)


@pytest.mark.parametrize("option", [{"d_model": 128}, {"num_layers": 5}, {"num_heads": 2}, {"d_model": 192}])
def test_a_model_of_a_suite_has_a_named_size(option: dict[str, Any]) -> None:
    assert Settings(**option).suite == ""
    with refuses(RangeError, "size", "tiny, small, medium"):
        Settings(suite="v1", **option)
    with refuses(RangeError, "v2", "v1"):
        Settings(suite="v2")


def test_the_command_of_a_suite_makes_it_again() -> None:
    plain = plain_settings(SUITE, {"files": [], "sha256": "a"})
    assert command(plain) == "locant compare --suite v1 --size small --encodings alibi,rotary+yarn"


RIGHT = {"12": 1.0, "24": 0.5}


@pytest.fixture
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Results of a suite with ALiBi alone; recorded are ALiBi, NoPE and sinusoidal, on sort only a first seed."""
    facts = {
        "suite": "v1",
        "d_model": 64,
        "num_layers": None,
        "num_heads": 4,
        "task_length": 12,
        "tasks": [TEXT, "copy"],
    }
    recorded = results_of_losses()
    recorded["settings"] |= facts
    recorded["settings"]["text"]["sha256"] = "same"
    recorded["settings"]["tasks"] = [TEXT, "sort", "copy"]
    there = {("sort" if seeds == 1 else "copy", name): seeds * [RIGHT] for seeds in (1, 2) for name in THE_FIELD}
    recorded["records"] += task_results(there)["records"]
    (tmp_path / "v1-tiny.json").write_text(json.dumps(recorded), encoding="utf-8")
    monkeypatch.setattr(results, "RECORDED", (tmp_path / "elsewhere", tmp_path))
    own = results_of_losses({"alibi": [(3.0, 3.0, 3.0, 3.0), (3.1, 3.1, 3.1, 3.1)]})
    own["settings"] |= facts
    own["settings"]["text"]["sha256"] = "same"
    own["records"] += task_results({("copy", "alibi"): [RIGHT]})["records"]
    return own


def test_a_recorded_task_with_missing_seeds_is_named_and_left_out(ours: dict[str, Any]) -> None:
    recorded = read_recorded_suite(ours["settings"])
    assert recorded is not None
    assert recorded["late"] == ["sort"]
    assert recorded["settings"]["tasks"] == [TEXT, "copy"] == list(dict.fromkeys(task for task, _ in names(recorded)))


def names(of: Any) -> list[tuple[str, str]]:
    return list(dict.fromkeys((record.get("task", TEXT), record["encoding"]) for record in of["records"]))


def test_recorded_and_measured_results_are_shown_together(ours: dict[str, Any]) -> None:
    own, both = names(ours), names(add_recorded(ours))
    others = [(task, f"{name} (recorded)") for task in (TEXT, "copy") for name in ("nope", "sinusoidal")]
    assert both == [*own, *others]
    assert [score.encoding for score in scores(add_recorded(ours))] == ["alibi", *(name for _, name in others[2:])]
    assert "nope (recorded)" not in page(ours)
    assert "nope (recorded)" in page(add_recorded(ours))


@pytest.mark.parametrize(
    ("change", "others"),
    [
        ({"text": {"sha256": "another"}}, [("copy", "nope (recorded)"), ("copy", "sinusoidal (recorded)")]),
        ({"suite": ""}, []),
        ({"suite": "v0"}, []),
        ({"d_model": 192}, []),
        (dict(SIZES["small"]), []),
    ],
    ids=str,
)
def test_recorded_results_need_the_same_suite_size_and_text(
    ours: dict[str, Any], change: dict[str, Any], others: list[tuple[str, str]]
) -> None:
    own = names(ours)
    ours["settings"] |= change
    assert names(add_recorded(ours)) == [*own, *others]


def test_results_older_than_suites_are_read(ours: dict[str, Any]) -> None:
    del ours["settings"]["suite"]
    assert add_recorded(ours) is ours


def test_rates_are_chosen_on_neither_the_held_out_text_nor_the_measured_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    read, seeds = dict[str, set[int]](), dict[str, set[int]]()
    kinds = {True: "choosing", False: "measuring"}
    run, sweeping = trainings.run, [False]

    def noted(training: Training, *rest: Any) -> Any:
        sweeping[0] = training.seed == SWEEP_SEED
        return run(training, *rest)

    def fit(model: object, candidate: object, ids: np.ndarray, *_: object, **__: object) -> float:
        read.setdefault("training to choose" if sweeping[0] else "training", set()).update(ids.tolist())
        return 0.0

    def losses(model: object, ids: np.ndarray, length: int, **_: object) -> Any:
        read.setdefault(kinds[sweeping[0]], set()).update(ids.tolist())
        return trainings.Losses(mean=0.0, by_position=[0.0] * length, by_window=[0.0])

    def accuracy(*_: object, seed: int, **__: object) -> Accuracy:
        seeds.setdefault(kinds[sweeping[0]], set()).add(seed)
        return Accuracy(0.0, 0.0)

    monkeypatch.setattr("locant.lab.pool.run", noted)
    monkeypatch.setattr(trainings, "fit", fit)
    monkeypatch.setattr(trainings, "losses_in_windows", losses)
    monkeypatch.setattr(trainings, "in_context", lambda model, ids, *_: losses(model, ids, 1).by_window)
    monkeypatch.setattr(trainings, "accuracy", accuracy)
    options: dict[str, Any] = {"num_steps": 2, "task_length": 3, "batch_size": 2, "num_layers": 1}
    settings = Settings(tasks=(TEXT, "copy"), encodings=("nope",), seeds=(0,), rates=(0.5, 1.0), **options)
    with threads(1):
        compare(np.arange(10_000), 10_000, settings)
    assert read == {
        "training": {*range(9_000)}, "measuring": {*range(9_000, 10_000)},
        "training to choose": {*range(8_000)}, "choosing": {*range(8_000, 9_000)},
    }  # fmt: skip
    assert seeds == {"choosing": {CHOOSING}, "measuring": {MEASURED}}
    assert CHOOSING != MEASURED


def test_the_schema_of_what_is_recorded_is_that_of_today() -> None:
    """Each of `docs/results` is of a suite of today, with every encoding and seed on every task."""
    files = [*results.RECORDED[1].glob("v*.json")]
    assert files
    for file in files:
        recorded = json.loads(file.read_text(encoding="utf-8"))
        settings = recorded["settings"]
        assert recorded["schema"] == SCHEMA
        assert file.stem == f"{settings['suite']}-{size_of(settings)}"
        whole = read_recorded_suite(settings)
        assert whole is not None
        assert whole["late"] == []
        assert len(settings["encodings"]) >= 15
        again = Settings(suite="v1", encodings=(*settings["encodings"],), **SIZES[size_of(settings)])
        assert json.loads(json.dumps(plain_settings(again, settings["text"]))) == ADDED | settings
