"""The flags of `locant serve-args` extend the context of a model as documented."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import locant
from locant import InputError, RangeError, Rotary
from locant.checkpoints.config_source import read_source
from locant.checkpoints.extension import METHODS
from locant.cli import engines, main
from locant.engines.serve_args import ENGINES, FLAT_CONFIGS, UNSUPPORTED, serve_arguments
from tests.gguf_files import CONTEXT, scaled_model, write_gguf
from tests.refusal import refuses
from tests.tolerances import FORMULA, FREQUENCY, LLAMA_CPP, LOGITS

IDS = torch.randint(3, 300, (1, 100), generator=torch.Generator().manual_seed(1))
TO = 4 * CONTEXT
LLAMA_CPP_TYPES = {"none": 0, "linear": 1, "yarn": 2}


def text(kind: str = "llama", **more: Any) -> dict[str, Any]:
    """A configuration as folders have it."""
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": CONTEXT, "head_dim": 16}
    return {"model_type": kind, **sizes, **rope, **more}


def test_the_command_line_offers_every_engine_and_scaling() -> None:
    assert engines.SERVERS == ENGINES
    assert set(engines.METHODS) == {*METHODS}


@pytest.mark.parametrize("engine", ["vllm", "sglang", "transformers"])
@pytest.mark.parametrize("scaling", METHODS)
def test_an_override_makes_the_frequencies_in_transformers(engine: str, scaling: str) -> None:
    if scaling in UNSUPPORTED[engine]:
        pytest.skip("the engine does not have it")
    config = text()
    served = serve_arguments(config, to=TO, engine=engine, scaling=scaling)
    made = AutoConfig.for_model(**config)
    for key, value in served.override.items():  # as the servers do
        setattr(made, key, value)
    made = type(made)(**made.to_dict())
    module = LlamaRotaryEmbedding(made)
    if scaling in ("dynamic", "longrope"):
        module(torch.zeros(1), torch.arange(TO)[None])
    rotary = served.extension.rotary[1]
    assert (module.inv_freq / rotary.inv_freq - 1).abs().max() < FREQUENCY
    assert abs(module.attention_scaling - rotary.scaling.effective_attention_factor) < FORMULA
    if engine != "transformers":
        assert json.loads(served.arguments[1]) == served.override
        assert served.arguments[3] == str(TO)


def test_a_server_gets_all_rope_parameters_and_the_length() -> None:
    older = {key: value for key, value in text().items() if key != "rope_parameters"}
    for config in (text(), {**older, "rope_theta": 10_000.0}):
        override = serve_arguments(config, to=TO, engine="vllm").override
        assert override["rope_parameters"]["rope_theta"] == 10_000.0
        assert override["max_position_embeddings"] == TO
        linear = serve_arguments(config, to=TO, engine="sglang", scaling="linear").override
        assert linear.keys() == {"rope_parameters"}, "servers multiply the length by the factor of linear scaling"
    kinds = dict.fromkeys(("full_attention", "sliding_attention"), text()["rope_parameters"])
    inner = {"model_type": "gemma3", "text_config": text("gemma3_text", rope_parameters=kinds)}
    override = serve_arguments(inner, to=TO, engine="vllm").override["text_config"]
    assert override["rope_parameters"]["full_attention"]["rope_type"] == "yarn"
    assert override["rope_parameters"]["sliding_attention"] == kinds["sliding_attention"]
    with refuses(InputError, "llama.cpp"):
        serve_arguments(inner, to=TO, engine="llama.cpp")


@pytest.mark.parametrize("scaling", ["yarn", "linear", "ntk"])
def test_an_older_configuration_with_a_base_per_layer_type_gets_them_by_layer_type(scaling: str) -> None:
    """As published Gemma 3 has it: vLLM looks for each type of layers in the rope parameters."""
    older = {key: value for key, value in text("gemma3_text").items() if key != "rope_parameters"}
    older |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6, "num_hidden_layers": 6}
    for engine in ("vllm", "sglang"):
        served = serve_arguments(older, to=TO, engine=engine, scaling=scaling)
        rope = served.override["rope_parameters"]
        assert rope["sliding_attention"] == {"rope_type": "default", "rope_theta": 1e4}
        made = Rotary.from_config(text("gemma3_text", **served.override), layer_type="full_attention")
        assert torch.equal(made.inv_freq, served.extension.rotary[1].inv_freq)
        assert served.override["max_position_embeddings"] == TO, "neither multiplies it by a factor of one layer type"


@pytest.mark.parametrize("kind", FLAT_CONFIGS)
def test_a_flat_configuration_that_transformers_takes_apart_changes_in_its_text_part(kind: str) -> None:
    config = {**read_source("qwen2-vl-7b"), "model_type": kind}
    for engine in ("vllm", "sglang"):
        override = serve_arguments(config, to=131_072, engine=engine).override
        made = AutoConfig.for_model(**copy.deepcopy(config))
        for key, value in override["text_config"].items():  # as both servers do
            setattr(made.text_config, key, value)
        assert list(override) == ["text_config"]
        assert made.get_text_config().rope_parameters["rope_type"] == "yarn"
        assert made.get_text_config().max_position_embeddings == 131_072
        with refuses(InputError, "rows and columns", engine, "scaling='yarn' or ntk"):
            serve_arguments(config, to=131_072, engine=engine, scaling="linear")
    assert "rope_scaling" in serve_arguments(config, to=131_072, engine="transformers").override


@pytest.mark.parametrize("scaling", ["yarn", "linear", "ntk"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt_neox"])
def test_flags_of_llama_cpp_scale_its_angles(kind: str, scaling: str, tmp_path: Path) -> None:
    from tests.engines.llama_cpp import LlamaCpp

    model = scaled_model(kind, "default")
    served = serve_arguments(model.config.to_dict(), to=TO, engine="llama.cpp", scaling=scaling)
    flags = dict(zip(served.arguments[::2], served.arguments[1::2], strict=True))
    options: dict[str, Any] = {"rope_scaling_type": LLAMA_CPP_TYPES[flags.pop("--rope-scaling")]}
    n_ctx = int(flags.pop("-c"))
    for flag, value in flags.items():  # as its own parser stores them
        name, number = {
            "--rope-scale": ("rope_freq_scale", 1 / float(value)),
            "--yarn-orig-ctx": ("yarn_orig_ctx", int(float(value))),
            "--rope-freq-base": ("rope_freq_base", float(value)),
        }[flag]
        options[name] = number
    with LlamaCpp(write_gguf(model, tmp_path / "a.gguf"), n_ctx, **options) as llama:
        theirs = llama.logits(IDS[0].tolist())
    with torch.no_grad(), locant.swap(model, served.extension.rotary[1].replace(angles="float32")):
        ours = model(IDS).logits[0].numpy()
        assert np.abs(theirs - ours).max() < LLAMA_CPP
    with torch.no_grad():
        assert np.abs(theirs - model(IDS).logits[0].numpy()).max() > 1


def test_a_factor_that_is_not_whole_is_written_out() -> None:
    assert "--rope-scale 1.5 " in " ".join(serve_arguments(text(), to=3 * CONTEXT // 2, engine="llama.cpp").arguments)


def test_unsupported_scalings_raise() -> None:
    for engine, scalings in UNSUPPORTED.items():
        for scaling in scalings:
            with refuses(InputError, scaling, engine, "scaling='yarn'"):
                serve_arguments(text(), to=TO, engine=engine, scaling=scaling)
    latent = {**read_source("deepseek-v3"), "rope_scaling": None}
    with refuses(InputError, "llama.cpp", "temperature"):  # which is in the scale of the scores
        serve_arguments(latent, to=2**20, engine="llama.cpp")
    with refuses(RangeError, "engine"):
        serve_arguments(text(), to=TO, engine="ollama")
    with refuses(RangeError, "scaling"):
        serve_arguments(text(), to=TO, engine="vllm", scaling="none")
    with refuses(RangeError, str(CONTEXT)):
        serve_arguments(text(), to=CONTEXT, engine="vllm")


def test_ignored_keys_are_named() -> None:
    served = serve_arguments(text(), to=TO, engine="vllm", scaling="longrope")
    assert f"--max-model-len is {CONTEXT}" in served.ignored["short_factor"]
    assert "truncate" in serve_arguments(text(), to=TO, engine="llama.cpp").ignored
    assert not serve_arguments(text(), to=TO, engine="transformers").ignored


def test_it_is_printed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(text()))
    result = CliRunner().invoke(main, ["serve-args", str(tmp_path), "--to", str(TO), "--for", "llama.cpp"])
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"--rope-scaling yarn --rope-scale 4 --yarn-orig-ctx {CONTEXT} -c {TO}\nignored")
    as_json = CliRunner().invoke(main, ["serve-args", str(tmp_path), "--to", str(TO), "--for", "vllm", "--json"])
    facts = json.loads(as_json.stdout)
    assert facts["override"] == json.loads(facts["arguments"][1])
    for_transformers = CliRunner().invoke(main, ["serve-args", str(tmp_path), "--to", "999", "--for", "transformers"])
    assert json.loads(for_transformers.stdout.splitlines()[0])["max_position_embeddings"] == 999
    windows = CliRunner().invoke(main, ["serve-args", str(tmp_path), "--to", "999", "--for", "vllm", "--windows", "1"])
    assert windows.exit_code == 2
    kinds = dict.fromkeys(("full_attention", "sliding_attention"), text()["rope_parameters"])
    (tmp_path / "config.json").write_text(json.dumps(text("gemma3_text", rope_parameters=kinds)))
    asked = ["serve-args", str(tmp_path), "--to", "999", "--for", "vllm", "--text", "a.txt"]
    losses = CliRunner().invoke(main, asked)
    assert (losses.exit_code, "omit --text" in losses.output) == (2, True)


@pytest.mark.slow
def test_losses_are_those_of_the_stretched_model(tmp_path: Path) -> None:
    tokenizer = locant.Tokenizer.train(["The pass key is 0123456789; the cat sat on the mat. " * 20], 300)
    model = scaled_model("llama", "default")
    model.save_pretrained(tmp_path / "model")
    tokenizer.save(tmp_path / "model" / "tokenizer.json")
    (tmp_path / "a.txt").write_text("The cat sat on the mat. " * 400)
    asked = ["serve-args", str(tmp_path / "model"), "--to", "512", "--for", "vllm", "--text", str(tmp_path / "a.txt")]
    result = CliRunner().invoke(main, [*asked, "--windows", "1", "--json", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    ids = torch.as_tensor(tokenizer.encode("The cat sat on the mat. " * 400))[None, :513].long()
    stretched = AutoModelForCausalLM.from_pretrained(tmp_path / "model", **facts["override"]).eval()
    for made, name in ((model, "before"), (stretched, "after")):
        with torch.no_grad():
            loss = torch.nn.functional.cross_entropy(made(ids[:, :-1]).logits[0], ids[0, 1:])
        assert facts["losses"]["512"][name] == pytest.approx(float(loss), abs=LOGITS)
