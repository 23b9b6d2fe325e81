"""A folder of results: made, used again, or refused; nothing of others is changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from locant.errors import InputError
from locant.lab.evaluation import EvaluationSettings, evaluate_model
from locant.lab.results import BY_LENGTH, BY_POSITION, PAGE, ResultsFolder
from tests.lab.fabricated import results
from tests.lab.on_a_device import small_model


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_new_folder_gets_the_results(tmp_path: Path) -> None:
    place = ResultsFolder(tmp_path / "deep" / "report")
    place.write(results())
    assert json.loads((place.path / "results.json").read_text()) == results()
    assert names(place.path) == ["results.json"]


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
    with pytest.raises(InputError, match=r"holds other things than a report; try: -o .*-report, or --force"):
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


def test_folders_made_for_nothing_are_removed_and_others_are_not(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    with ResultsFolder(tmp_path / "old" / "new" / "newer"):
        pass
    assert names(tmp_path) == ["old"]
    assert names(tmp_path / "old") == []
    with ResultsFolder(tmp_path / "old"):
        pass
    assert names(tmp_path) == ["old"]


def test_records_of_another_version_are_measured_anew(tmp_path: Path) -> None:
    model, files = small_model(tmp_path)
    settings = EvaluationSettings(lengths=(16,), ways=("own",), windows=2, keys=0, device="cpu")
    found = evaluate_model(model, files, settings, output=tmp_path / "out")
    for version, is_reused in ((found["environment"]["locant"], True), ("0.0.1", False)):
        marked = [{**found["records"][0], "seconds": -1}]
        earlier = {**found, "environment": {**found["environment"], "locant": version}, "records": marked}
        (tmp_path / "out" / "results.json").write_text(json.dumps(earlier))
        again = evaluate_model(model, files, settings, output=tmp_path / "out")["records"][0]
        assert (again["seconds"] == -1) is is_reused
