"""Models on another device than the CPU: one that is made up in Python, and a GPU where there is one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import locant
from locant.errors import RangeError
from locant.lab.language_model import device_of
from tests.refusal import refuses
from tests.tolerances import BFLOAT16_LOSS, LOGITS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["other", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_another_device_measures_and_trains_like_the_cpu(device: str, tmp_path: Path) -> None:
    """Nothing meets a tensor of the CPU there; a tuning that was interrupted goes on with the device's own numbers."""
    paths = os.pathsep.join([str(Path(locant.__file__).parents[1]), str(ROOT)])
    command = [sys.executable, "-m", "tests.lab.on_a_device", device, tmp_path]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    here, there = (found[f"evaluated {where}"] for where in ("cpu", device))
    assert (here["settings"]["device"], there["settings"]["device"]) == ("cpu", device)
    assert "device" in there["environment"]
    for mine, theirs in zip(here["records"], there["records"], strict=True):
        np.testing.assert_allclose(mine["loss_by_position"], theirs["loss_by_position"], rtol=0, atol=LOGITS)
    for mine, theirs in zip(found["searched cpu"], found[f"searched {device}"], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=LOGITS)
    assert found.get("asked cpu") == found.get(f"asked {device}")
    here, there = (found[f"compared {where}"] for where in ("cpu", device))
    assert there["environment"]["device"]
    assert not [each for each in there["records"] if "failed" in each]
    for mine, theirs in zip(here["records"], there["records"], strict=True):
        near = LOGITS if device == "other" and mine["task"] == "text" else BFLOAT16_LOSS  # Muon rounds to bfloat16
        assert mine["train_loss"] == pytest.approx(theirs["train_loss"], abs=near)
        for length, loss in mine.get("loss_by_length", {}).items():
            assert loss == pytest.approx(theirs["loss_by_length"][length], abs=near)
    whole, interrupted = found["tuned"], found["tuned again"]
    assert "another device" in interrupted["elsewhere"]
    assert whole["settings"]["device"] == device
    if device == "other":  # a GPU may add up in another order each time
        assert whole["train_loss"] == interrupted["train_loss"]
        mine, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "interrupted"))
        assert all(torch.equal(each, theirs[name]) for name, each in mine.items())
    else:
        np.testing.assert_allclose(whole["train_loss"], interrupted["train_loss"], rtol=0, atol=LOGITS)


def test_a_device_that_is_not_there_is_refused_with_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def there(kind: str | None, count: int) -> None:
        found = None if kind is None else torch.device(kind)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)

    there(None, 0)
    assert device_of("auto") == device_of("cpu") == torch.device("cpu")
    with refuses(RangeError, "'cuda' for device", "finds on this machine: cpu;", "device='cpu'"):
        device_of("cuda")
    there("cuda", 2)
    assert [device_of(name) for name in ("auto", "cuda:1")] == [torch.device("cuda"), torch.device("cuda:1")]
    with refuses(RangeError, "'cuda:2'", "cpu, cuda, cuda:0, cuda:1"):
        device_of("cuda:2")
    there("mps", 1)
    assert [device_of(name) for name in ("auto", "mps", "mps:0")] == [
        torch.device(each) for each in ("cpu", *["mps"] * 2)
    ]
