"""SGLang's tables of angles beside ours; its engine does not run on a CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from locant import Rotary
from locant.engines.serve_args import serve_arguments
from tests.engines.record import record
from tests.tolerances import ANGLE

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
]

TRAINED, LONGEST, TO = 1024, 4096, 16384
ROPES: dict[str, dict[str, Any]] = {
    "none": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED},
    "llama3": {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": TRAINED,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "longrope": {
        "rope_type": "longrope", "short_factor": [1 + i / 16 for i in range(16)], "factor": 4.0,
        "long_factor": [1 + i * 1.5 for i in range(16)], "original_max_position_embeddings": TRAINED,
    },
    "partial": {"partial_rotary_factor": 0.5},
}  # fmt: skip
STRETCHED = ("yarn", "linear", "ntk", "dynamic", "llama3", "longrope")


def config_of(rope: dict[str, Any]) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10_000.0, **rope}
    sizes = {"vocab_size": 100, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    kind = ("stablelm", "StableLmForCausalLM") if "partial_rotary_factor" in rope else ("llama", "LlamaForCausalLM")
    more = {"architectures": [kind[1]], "max_position_embeddings": LONGEST, "intermediate_size": 96}
    return {"model_type": kind[0], **sizes, **more, "num_key_value_heads": 2, "rope_parameters": rope}


def table_of(rotary: Rotary, rope: str, rows: int) -> Tensor:
    """As SGLang lays it out: LongRoPE's has that of the trained length before that of the longest."""
    parts = (TRAINED, rows - TRAINED) if rope == "longrope" else (rows,)
    return torch.cat([rotary.for_length(part).cos_sin_cache(part) for part in parts])


@dataclass
class Runs:
    own: dict[str, dict[str, Tensor]]
    exact: dict[str, dict[str, Tensor]]
    said: str
    """What the plug-in logged."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("sglang")
    jobs = []
    for name, rope in ROPES.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config_of(rope)))
        jobs.append({"name": name, "model": str(folder / name), "options": {}})
    for scaling in STRETCHED:
        flags = serve_arguments(config_of({}), to=TO, engine="sglang", scaling=scaling).arguments
        assert flags[::2] == ("--json-model-override-args", "--context-length")
        options = {"json_model_override_args": flags[1], "context_length": int(flags[3])}
        jobs.append({"name": scaling + "-flags", "model": str(folder / "none"), "options": options})
    (folder / "jobs.json").write_text(json.dumps(jobs))
    answers = []
    for asked in ({}, {"LOCANT_SGLANG": "exact"}):
        out = folder / f"out{len(answers)}"
        out.mkdir()
        command = [sys.executable, "-m", "tests.engines.sglang_runs", str(folder / "jobs.json"), str(out)]
        done = subprocess.run(command, env={**os.environ, **asked}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-5000:]
        answers.append({job["name"]: load_file(out / f"{job['name']}.safetensors") for job in jobs})
    return Runs(*answers, done.stderr)


@pytest.mark.parametrize("name", ROPES)
def test_its_table_is_ours_and_with_the_plug_in_exact(runs: Runs, name: str) -> None:
    table = runs.own[name]["table"]
    rotary = Rotary.from_config(config_of(ROPES[name]))
    difference = float((table_of(rotary.replace(angles="float32"), name, len(table)) - table).abs().max())
    record("SGLang", f"table: {name}", difference, package="sglang", unit="cosines")
    assert difference < (len(table) * ANGLE if name == "dynamic" else 2 * ANGLE)
    assert torch.equal(runs.exact[name]["table"], table_of(rotary, name, len(table)))


@pytest.mark.parametrize("scaling", STRETCHED)
def test_flags_stretch_the_context(runs: Runs, scaling: str) -> None:
    rotary = serve_arguments(config_of({}), to=TO, engine="sglang", scaling=scaling).extension.rotary[1]
    run = runs.exact[scaling + "-flags"]
    rows = len(run["table"])
    assert run["context"] == TO
    assert rows >= TO
    expected = rotary.cos_sin_cache(TO)
    assert torch.equal(run["table"][rows - TO :] if scaling == "longrope" else run["table"][:TO], expected)
