"""Tuning on several processes: the same training as in one, also if it was interrupted, and one report."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import locant
from locant.errors import InputError, RangeError
from locant.lab import TuneSettings, tune, tuning
from locant.lab.processes import join_process_group
from tests.lab.on_a_device import small_model
from tests.lab.tuning_ranks import ALIKE, RANKS, TUNED, find_out, tuned
from tests.ranks import found_on, needs_gloo
from tests.refusal import refuses
from tests.tolerances import LOGITS, assert_close

pytestmark = needs_gloo

LAUNCHED = {"RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text and two models, ``model`` with dropout and ``plain`` without."""
    folder = tmp_path_factory.mktemp("processes")
    small_model(folder)
    shutil.copytree(folder / "model", folder / "plain")
    config = json.loads((folder / "plain" / "config.json").read_text())
    (folder / "plain" / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.0}))
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    """What each of two processes has found. Their imports take most of the time."""
    pytest.importorskip("peft")
    return found_on(RANKS, find_out, str(folder))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALIKE)
def test_two_processes_train_as_one(found: list[dict[str, Any]], folder: Path, kind: str) -> None:
    """One is held against plain torch in `test_tuning.py`. Only the order of sums differs, because nothing drops."""
    alone = tuned(folder, "plain", f"one-{kind}", ALIKE[kind])
    assert [each["alike"][kind]["steps"] for each in found] == [[1, 2, 3, 4], []], "only the first one reports"
    for each in found:
        record = each["alike"][kind]
        assert record["train_loss"] == found[0]["alike"][kind]["train_loss"]
        np.testing.assert_allclose(record["train_loss"], alone["train_loss"], rtol=0, atol=LOGITS)
        np.testing.assert_allclose(record["held_out"], alone["held_out"], rtol=0, atol=LOGITS)
        assert record["left"] == [f"two-{kind}"], "it is there when any process returns, and no state is left"
    before, one, two = (weights(folder / name) for name in ("plain", f"one-{kind}", f"two-{kind}"))
    for name, each in one.items():
        assert_close(two[name], each)
    assert any(not torch.equal(each, one[name]) for name, each in before.items())


@pytest.mark.slow
def test_an_interrupted_run_of_two_processes_ends_with_the_same_bits(found: list[dict[str, Any]], folder: Path) -> None:
    """Dropout draws the same numbers as in the run that nothing interrupted."""
    assert found[0]["interrupted"]["steps"] == [3, 4], "the first two steps are not taken again"
    assert found[1]["interrupted"]["train_loss"] == found[0]["whole"]["train_loss"]
    whole, again = weights(folder / "whole"), weights(folder / "interrupted")
    assert all(torch.equal(each, again[name]) for name, each in whole.items())


@pytest.mark.slow
def test_gradients_are_added_and_random_numbers_differ(found: list[dict[str, Any]]) -> None:
    for process in found:
        each = process["exchanged"]
        assert each["loss"] == 1.5
        assert each["both"] == [[3.0] * 3] * 2
        assert each["first"] == [[5.0] * 3] * 2, "the second process has no gradient, and gets that of the first"
        assert each["none"] is None, "no process has one, so weight decay leaves the parameter alone"
        assert each["smallest"] == 9
        assert each["drawn"][0] == each["drawn"][2]
    drawn = [tuple(numbers) for process in found for numbers in process["exchanged"]["drawn"][:2]]
    assert len({*drawn}) == 4, "another process or another step draws other numbers"


@pytest.mark.slow
def test_a_launcher_starts_it_and_one_process_prints(tmp_path: Path) -> None:
    small_model(tmp_path)
    source = str(Path(locant.__file__).parents[1])
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "locant", "tune", "model",
             "text.txt", "--with", "own", "--steps", "2", "--batch", "2", "--device", "cpu", "--json"]  # fmt: skip
    done = subprocess.run(
        words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": source}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["settings"]["num_processes"] == 2
    assert len(record["train_loss"]) == 2
    assert (tmp_path / "model-own" / "model.safetensors").exists()


def test_a_batch_that_cannot_be_shared_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "world_size", lambda: 3)
    with refuses(RangeError, "8 windows for 3 processes", "batch_size=9"):
        tune(tmp_path, [], TuneSettings(way="own"), output=tmp_path / "out")


def test_another_number_of_processes_does_not_continue_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    model, files = small_model(tmp_path)
    settings = TuneSettings(way="own", **TUNED)
    monkeypatch.setattr(tuning, "world_size", lambda: 2)
    with pytest.raises(KeyboardInterrupt):
        tune(model, files, settings, output=tmp_path / "out", on_step=stop)
    monkeypatch.undo()
    with refuses(InputError, "another num_processes", "force=True"):
        tune(model, files, settings, output=tmp_path / "out")


def test_each_process_gets_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    calls = list[object]()
    monkeypatch.setattr("locant.lab.processes.device_of", torch.device)
    monkeypatch.setattr(torch.accelerator, "set_device_index", calls.append)
    monkeypatch.setattr(dist, "init_process_group", calls.append)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("left"))
    monkeypatch.setattr("locant.lab.processes.rank", lambda: 1)
    for name, value in {**LAUNCHED, "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    with join_process_group("cuda") as device:
        print("of the second process")  # noqa: T201
    assert (device, calls, capsys.readouterr().out) == ("cuda:1", [1, "nccl", "left"], "")
    with refuses(InputError, "cuda:1 for 2 processes", "device='cuda'"), join_process_group("cuda:1"):
        raise AssertionError
    monkeypatch.setenv("WORLD_SIZE", "1")
    with join_process_group("cuda:1") as device:
        assert device == "cuda:1"


@pytest.mark.parametrize("missing", LAUNCHED)
@pytest.mark.parametrize("size", ["2", "", "x"])
def test_variables_of_a_scheduler_alone_start_one_process(
    monkeypatch: pytest.MonkeyPatch, size: str, missing: str
) -> None:
    for name, value in {**LAUNCHED, "WORLD_SIZE": size}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    with join_process_group("cpu") as device:
        assert device == "cpu"
