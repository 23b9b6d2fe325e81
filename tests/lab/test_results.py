"""A folder of results: made, used again, or refused; means, spreads, ratios and ranks are those of its records."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from locant.errors import InputError, LocantError, Remedy
from locant.lab import ruler
from locant.lab.comparison import Watcher, compare_files
from locant.lab.evaluation import EvaluationSettings, evaluate_model
from locant.lab.results import BY_LENGTH, BY_POSITION, PAGE, ResultsFolder
from locant.lab.summary import Cell, Row, summarise
from tests.lab.fabricated import LENGTHS, THE_FIELD, results
from tests.lab.on_a_device import TEXT, small_model
from tests.refusal import refuses
from tests.tolerances import FEW_ROUNDINGS, FORMULA, LOSS


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_new_folder_gets_the_results(tmp_path: Path) -> None:
    place = ResultsFolder(tmp_path / "deep" / "report")
    place.write(results())
    assert json.loads((place.path / "results.json").read_text()) == results()
    assert names(place.path) == ["results.json"]


def test_results_of_a_newer_release_are_kept(tmp_path: Path) -> None:
    ResultsFolder(tmp_path).write({**results(), "schema": 99})
    with refuses(InputError, "results.json", "a newer release of locant wrote", "schema 99", "pip install -U locant"):
        ResultsFolder(tmp_path)
    assert json.loads((tmp_path / "results.json").read_text())["schema"] == 99


def test_an_earlier_report_stays_until_the_first_result(tmp_path: Path) -> None:
    ResultsFolder(tmp_path).write(results())
    for name in (PAGE, BY_LENGTH, BY_POSITION):
        (tmp_path / name).write_text("drawn")
    before = names(tmp_path)
    second = ResultsFolder(tmp_path)
    assert second.holds_earlier
    assert names(tmp_path) == before
    second.write(results({"a": [(1.0,)]}, (8,)))
    assert names(tmp_path) == ["results.json"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"settings": 1}', "\x00"])
def test_a_folder_of_other_things_is_refused_and_with_force_kept(tmp_path: Path, content: str) -> None:
    """A file that only has the name of results is no report."""
    (tmp_path / "thesis.txt").write_text("mine")
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(InputError, match=r"holds other things than a report; try: use another folder, or force=True"):
        ResultsFolder(tmp_path)
    forced = ResultsFolder(tmp_path, force=True)
    assert not forced.holds_earlier
    assert names(tmp_path) == ["results.json", "thesis.txt"]
    forced.write(results())
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_a_file_in_the_place_of_the_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    for path in (tmp_path / "x", tmp_path / "x" / "y"):
        with pytest.raises(InputError):
            ResultsFolder(path)


def test_new_folders_are_removed_if_they_stay_empty_and_others_are_not(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    with ResultsFolder(tmp_path / "old" / "new" / "newer"):
        pass
    assert names(tmp_path) == ["old"]
    assert names(tmp_path / "old") == []
    with ResultsFolder(tmp_path / "old"):
        pass
    assert names(tmp_path) == ["old"]


def test_records_of_another_version_are_measured_again(tmp_path: Path) -> None:
    model, files = small_model(tmp_path)
    settings = EvaluationSettings(lengths=(16,), ways=("own",), windows=2, keys=0, device="cpu")
    found = evaluate_model(model, files, settings, output=tmp_path / "out")
    for version, is_reused in ((found["environment"]["locant"], True), ("0.0.1", False)):
        marked = [{**found["records"][0], "seconds": -1.0}]
        earlier = {**found, "environment": {**found["environment"], "locant": version}, "records": marked}
        (tmp_path / "out" / "results.json").write_text(json.dumps(earlier))
        again = evaluate_model(model, files, settings, output=tmp_path / "out")["records"][0]
        assert (again["seconds"] == -1) is is_reused


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of a small comparison on a text and a task, with its folder, and its arguments."""
    folder = tmp_path_factory.mktemp("compared")
    (folder / "text.txt").write_text(TEXT)
    options = {
        "encodings": ("nope",), "tasks": ("text", "copy"), "seeds": (0,), "train_length": 8, "multiples": (1, 2),
        "num_steps": 1, "batch_size": 2, "d_model": 8, "num_layers": 1, "num_heads": 2, "task_length": 2,
    }  # fmt: skip
    asked = {"files": [str(folder / "text.txt")], "options": options, "folder": folder / "out", "force": False}
    asked |= {"watcher": Watcher(), "tokenizer": "bytes"}
    return {"asked": asked, "results": compare_files(**asked)}


DAMAGES: dict[str, Callable[[dict[str, Any], dict[str, Any]], object]] = {
    "a loss as text": lambda text, _: text["loss_by_length"].update({"16": "5.0"}),
    "a loss that is true": lambda text, _: text["loss_by_length"].update({"16": True}),
    "losses as a list": lambda text, _: text.update(loss_by_length=[1, 2]),
    "a length in letters": lambda text, _: text["loss_by_length"].update({"abc": 1.0}),
    "a loss below zero": lambda text, _: text["loss_by_length"].update({"16": -5.0}),
    "a loss that its windows have not": lambda text, _: text["loss_by_length"].update({"16": 0.001}),
    "a huge loss": lambda text, _: text["loss_by_length"].update({"16": 1e308}),
    "a length without a loss": lambda text, _: text["loss_by_length"].pop("16"),
    "a length too many": lambda text, _: text["loss_by_length"].update({"99": 5.0}),
    "fewer windows": lambda text, _: text["loss_by_window"]["16"].pop(),
    "no windows": lambda text, _: text.update(loss_by_window={"8": None, "16": None}),
    "windows as text": lambda text, _: text["loss_by_window"].update({"16": ["a"] * 9}),
    "positions as text": lambda text, _: text.update(loss_by_position=["a"] * 16),
    "stretches as text": lambda text, _: text.update(context_loss_by_stretch={"8": ["a"]}),
    "a seed as text": lambda text, _: text.update(seed="0"),
    "a number as a name": lambda text, _: text.update(encoding=3),
    "a trained length of another run": lambda text, _: text.update(train_length=10**30),
    "no seconds": lambda text, _: text.pop("seconds"),
    "a field too many": lambda text, _: text.update(more=1),
    "nothing known of learning": lambda _, task: task.update(learned=None),
    "an accuracy above one": lambda _, task: task["accuracy_by_length"].update({"2": 1.5}),
    "an accuracy without tokens": lambda _, task: task["token_accuracy_by_length"].pop("2"),
}


def read_again(compared: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
    (compared["asked"]["folder"] / "results.json").write_text(json.dumps(results))
    return compare_files(**compared["asked"])


def test_results_from_before_a_setting_are_continued_if_it_has_its_usual_value(
    compared: dict[str, Any],
) -> None:
    earlier = json.loads(json.dumps(compared["results"]))
    del earlier["settings"]["qk_norm"]
    earlier["records"] = [{**record, "seconds": -1.0} for record in earlier["records"]]
    assert [record["seconds"] for record in read_again(compared, earlier)["records"]] == [-1.0, -1.0]
    (compared["asked"]["folder"] / "results.json").write_text(json.dumps(earlier))
    options = {**compared["asked"]["options"], "qk_norm": True}
    again = compare_files(**{**compared["asked"], "options": options})
    assert all(record["seconds"] >= 0 for record in again["records"])


@pytest.mark.parametrize("damage", DAMAGES)
def test_each_damage_of_a_record_is_one_error(compared: dict[str, Any], damage: str) -> None:
    results = json.loads(json.dumps(compared["results"]))
    DAMAGES[damage](*results["records"])
    with refuses(InputError, "results.json", "holds damaged records", "delete this file"):
        read_again(compared, results)


@pytest.mark.parametrize("records", [None, {}, "some", [None], [1], [[]]])
def test_records_that_are_not_a_list_are_an_error(compared: dict[str, Any], records: Any) -> None:
    with refuses(InputError, "results.json", "holds damaged records"):
        read_again(compared, {**compared["results"], "records": records})


def test_two_records_of_one_training_are_an_error_and_results_as_written_are_none(compared: dict[str, Any]) -> None:
    results = json.loads(json.dumps(compared["results"]))
    assert read_again(compared, results) == results
    with refuses(InputError, "'nope' and seed 0 twice"):
        read_again(compared, {**results, "records": [*results["records"], results["records"][0]]})


@pytest.mark.parametrize("field", ["loss_by_length", "interval_by_length", "pass_keys", "ruler"])
def test_damaged_records_of_an_evaluation_are_an_error(tmp_path: Path, field: str) -> None:
    model, files = small_model(tmp_path)
    settings = EvaluationSettings(lengths=(16,), ways=("own",), windows=2, keys=0, device="cpu")
    found = json.loads(json.dumps(evaluate_model(model, files, settings, output=tmp_path / "out")))
    for wrong in ("x", ["x"], {"16": "x"}, None):
        damaged = {**found, "records": [{**found["records"][0], field: wrong}]}
        (tmp_path / "out" / "results.json").write_text(json.dumps(damaged))
        with refuses(InputError, "results.json", "holds damaged records"):
            evaluate_model(model, files, settings, output=tmp_path / "out")


def test_a_model_that_cannot_write_is_refused_before_a_loss_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, files = small_model(tmp_path)
    answered, steps = ruler.write_answer, list[int]()

    def written(model: Any, *asked: Any) -> str:
        if hasattr(model.model, "locant"):
            raise LocantError("got half of a text", "give it whole")
        return answered(model, *asked)

    monkeypatch.setattr(ruler, "write_answer", written)
    settings = EvaluationSettings(lengths=(16,), ways=("own", "convolutional"), windows=2, keys=1, device="cpu")
    with refuses(InputError, "convolutional", "cannot be measured: got half of a text", "give it whole"):
        evaluate_model(model, files, settings, output=tmp_path / "out", on_step=lambda done, _: steps.append(done))
    assert steps == []
    assert not (tmp_path / "out").exists()


def test_every_cell_is_the_mean_and_spread_over_seeds() -> None:
    summary = summarise(results())
    for row in summary.rows:
        table = np.array(THE_FIELD[row.encoding])
        for place, length in enumerate(LENGTHS):
            cell = row.by_length[length]
            assert cell is not None
            assert cell.mean == pytest.approx(table[:, place].mean(), rel=FEW_ROUNDINGS, abs=0)
            assert cell.deviation == pytest.approx(table[:, place].std(ddof=1), rel=FORMULA, abs=0)
            assert (cell.low, cell.high) == (table[:, place].min(), table[:, place].max())


def test_encodings_and_lengths_keep_their_order_whatever_the_order_of_records() -> None:
    shuffled = results()
    shuffled["records"] = [shuffled["records"][number] for number in (4, 0, 3, 1, 5, 2)]
    summary = summarise(shuffled)
    assert [row.encoding for row in summary.rows] == ["alibi", "nope", "sinusoidal"]
    assert summary.lengths == LENGTHS
    assert all(row.num_seeds == 2 for row in summary.rows)


@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
def test_one_seed_without_a_loss_leaves_no_mean_of_the_others(bad: float | None) -> None:
    assert Cell.of([2.0, bad, 2.0]) is None


def test_the_best_is_the_lowest_mean_and_a_missing_loss_never_wins() -> None:
    summary = summarise(results({"a": [(2.0, None)], "b": [(3.0, 9.0)]}, (8, 16)))
    assert [summary.best(length).encoding for length in (8, 16)] == ["a", "b"]  # type: ignore[union-attr]
    assert [row.encoding for row in summary.rank(16)] == ["b", "a"]
    assert summarise(results({"a": [(2.0, None)]}, (8, 16))).best(16) is None


def test_ratios_are_to_the_training_length() -> None:
    row = summarise(results()).rows[1]
    assert row.ratio(512, 64) == pytest.approx((6.70 + 6.90) / (3.50 + 3.52), rel=FEW_ROUNDINGS, abs=0)
    assert row.ratio(1024, 64) is None


def test_a_comparison_cut_short_counts_the_fewest_seeds() -> None:
    assert summarise(results({"a": [(1.0, 2.0), (1.0, 2.0)], "b": [(1.0, 2.0)]}, (8, 16))).num_seeds == 1


def test_results_without_records_are_an_error() -> None:
    with pytest.raises(InputError, match="without a single record"):
        summarise({**results(), "records": []})


def test_one_of_many_comparisons_needs_a_larger_difference() -> None:
    """Of sixteen windows, by the tables of Student's t with 15 degrees of freedom: 2.13 for one, 3.29 for ten."""
    draw = np.random.default_rng(0).normal(size=16)
    spread = (draw - draw.mean()) / draw.std(ddof=1) * 4  # whose mean has a standard error of 1

    def is_clear(mean: float, comparisons: int) -> bool:
        rows = [
            Row(encoding="", num_seeds=1, train_loss=None, by_length={8: Cell.of([float(losses.mean())])},
                by_position=(), by_window={8: tuple(Cell.of([float(each)]) for each in losses)})
            for losses in (np.full(16, 9.0), 9 + mean + spread)
        ]  # fmt: skip
        return rows[0].is_clear(8, rows[1], 8, comparisons=comparisons)

    assert (is_clear(2.12, 1), is_clear(2.14, 1)) == (False, True)
    assert (is_clear(3.26, 10), is_clear(3.31, 10)) == (False, True)


def stretches(*gains: float, wiggle: float = 0.0, count: int = 16) -> list[dict[int, list[float]]]:
    """For each gain a seed, whose loss falls by it from 64 to 512 tokens of context; up and down by stretch."""
    away = [wiggle * (-1) ** stretch for stretch in range(count)]
    return [{64: [3.0 + gain + each for each in away], 512: [3.0] * count} for gain in gains]


@pytest.mark.parametrize(
    ("seeds", "gain", "clear"),
    [
        (stretches(0.1, 0.1), 0.1, True),
        (stretches(-0.1, -0.1), -0.1, True),
        (stretches(0.1), 0.1, True),
        (stretches(0.0, 0.0), 0.0, False),
        (stretches(0.1, 0.1, count=9), 0.1, False),
        (stretches(0.1, 0.117), 0.1085, True),  # an interval over seeds of 12.706 * 0.0085 = 0.1080
        (stretches(0.1, 0.118), 0.109, False),  # of 0.1144
        (stretches(0.1, 0.1, wiggle=0.18), 0.1, True),  # over stretches, of 2.131 * 0.18 * sqrt(16 / 15) / 4 = 0.0990
        (stretches(0.1, 0.1, wiggle=0.183), 0.1, False),  # of 0.1007
    ],
)
def test_far_tokens_count_as_used_if_the_loss_falls_by_more_than_chance(seeds, gain: float, clear: bool) -> None:
    losses = {"a": [(3.0,) * 4] * len(seeds)}
    [row] = summarise(results(losses, stretches={"a": seeds})).rows
    assert row.far is not None
    assert row.far.mean == pytest.approx(-gain, abs=LOSS)
    assert row.far_is_clear == clear
    assert row.in_context(512) == 3.0


def test_older_results_allow_no_conclusion_about_far_tokens() -> None:
    for row in summarise(results()).rows:
        assert row.far is None
        assert not row.far_is_clear
        assert row.in_context(512) is None


def test_a_loss_that_is_not_finite_allows_no_conclusion_about_far_tokens() -> None:
    seeds: Any = stretches(0.1, 0.1)
    seeds[0][512][3] = None
    [row] = summarise(results({"a": [(3.0,) * 4] * 2}, stretches={"a": seeds})).rows
    assert (row.far, row.far_is_clear, row.in_context(512)) == (None, False, None)


def test_two_runs_do_not_write_one_folder(tmp_path: Path) -> None:
    """The lock of a run that was killed is none, and its file is nothing that a report would be written beside."""
    with ResultsFolder(tmp_path / "out"):
        folder = ResultsFolder(tmp_path / "out")
        with refuses(InputError, "another run"), folder:
            pass
    assert not (tmp_path / "out").exists()
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / ".lock").touch()
    with ResultsFolder(tmp_path / "killed") as folder:
        folder.write({"settings": {}, "environment": {}, "records": []})
    assert [file.name for file in (tmp_path / "killed").iterdir()] == ["results.json"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("lengths", ()), ("ways", ()), ("lengths", (1,)), ("windows", 0), ("keys", -1), ("rows", 0)],
)
def test_remedies_name_arguments_of_python(name: str, value: Any) -> None:
    with pytest.raises(LocantError) as caught:
        EvaluationSettings(**{"device": "cpu", name: value})
    remedy = caught.value.remedy
    assert isinstance(remedy, Remedy)
    assert name in remedy.arguments
    EvaluationSettings(**{"device": "cpu", **remedy.arguments})
