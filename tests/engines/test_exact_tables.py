"""The plug-in for vLLM and SGLang on classes made as theirs are; test_vllm.py and test_sglang.py have the real ones."""

from __future__ import annotations

import logging
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from locant import RangeError, Rotary
from locant.engines import exact_tables
from tests.refusal import refuses

LENGTH = 2048
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": LENGTH,
    "rope_parameters": {"rope_theta": 10_000.0, **YARN},
}  # fmt: skip
GEMMA: dict[str, Any] = {
    "model_type": "gemma3_text", "hidden_size": 256, "num_attention_heads": 4, "head_dim": 64,
    "max_position_embeddings": LENGTH, "num_hidden_layers": 6,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
}  # fmt: skip


class Said(logging.Handler):
    """What was logged: pytest's own plug-in for that is off in this suite."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def table_of(rotary: Rotary, config: Any, *, made: Any = None) -> tuple[Any, str]:
    """What a class of an engine keeps that computes the float32 table of this encoding, and what was logged."""

    class Base:
        def _compute_cos_sin_cache(self) -> Any:
            return rotary.replace(angles="float32").cos_sin_cache(LENGTH) if made is None else made

    class Theirs(Base):
        """Inherits the method, as most classes do."""

    module, log, said = ModuleType("rotary_embedding"), logging.getLogger(__name__), Said()
    log.setLevel(logging.INFO)
    log.handlers = [said]
    module.Theirs = Theirs  # type: ignore[attr-defined]
    exact_tables._replace_tables(module, lambda: config, log)
    once = Base._compute_cos_sin_cache
    exact_tables._replace_tables(module, lambda: config, log)
    assert Base._compute_cos_sin_cache is once
    return Theirs()._compute_cos_sin_cache(), " ".join(said.lines)


def test_a_table_becomes_exact_if_the_engine_reads_the_configuration_equally() -> None:
    rotary = Rotary.from_config(LLAMA)
    table, said = table_of(rotary, LLAMA)
    assert torch.equal(table, rotary.cos_sin_cache(LENGTH))
    assert said == f"Theirs: 2,048 exact rows of {rotary}"


def test_every_kind_of_layers_has_its_own_table() -> None:
    for kind in ("full_attention", "sliding_attention"):
        rotary = Rotary.from_config(GEMMA, layer_type=kind)
        assert torch.equal(table_of(rotary, GEMMA)[0], rotary.cos_sin_cache(LENGTH))


@pytest.mark.parametrize(
    ("config", "made", "words"),
    [
        (None, None, "no configuration"),
        ({"model_type": "unheard-of"}, None, "unheard-of"),
        ({**LLAMA, "rope_parameters": {"rope_theta": 10_000.0, **YARN, "factor": 2.0}}, None, "differs by"),
        ({**LLAMA, "head_dim": 32}, None, "differs by inf"),
        ({"model_type": "bloom", "n_head": 4, "hidden_size": 64}, None, "differs by inf from None"),
        (LLAMA, (1, 2), "not one table"),
        (LLAMA, torch.zeros(2, 3, 64), "not one table"),
        (LLAMA, torch.zeros(9, 64, dtype=torch.complex64), "not one table"),
    ],
)
def test_otherwise_the_engine_keeps_its_table_and_logs_the_reason(config: Any, made: Any, words: str) -> None:
    rotary = Rotary.from_config(LLAMA)
    table, said = table_of(rotary, config, made=made)
    own = rotary.replace(angles="float32").cos_sin_cache(LENGTH) if made is None else made
    assert torch.equal(table, own) if isinstance(own, Tensor) else table is own
    assert said.startswith("Theirs keeps its own table: ")
    assert words in said


def test_engines_make_models_with_another_default_dtype_and_device() -> None:
    own = Rotary.from_config(LLAMA, angles="float32").cos_sin_cache(LENGTH)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            table, _ = table_of(Rotary.from_config(LLAMA), LLAMA, made=own)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(table, Rotary.from_config(LLAMA).cos_sin_cache(LENGTH))


@pytest.mark.parametrize(("plugin", "variable"), [("vllm", "LOCANT_VLLM"), ("sglang", "LOCANT_SGLANG")])
def test_nothing_happens_without_the_environment_variable(
    plugin: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(variable, raising=False)
    assert getattr(exact_tables, plugin)() is None  # without the engine
    monkeypatch.setenv(variable, "exakt")
    with refuses(RangeError, variable, "exact"):
        getattr(exact_tables, plugin)()


@pytest.mark.parametrize(("group", "name"), [("vllm.general_plugins", "vllm"), ("sglang.srt.plugins", "sglang")])
def test_the_entry_points_exist(group: str, name: str) -> None:
    """That engines find them is for test_vllm.py and test_sglang.py."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert EntryPoint("locant", project["entry-points"][group]["locant"], group).load() is getattr(exact_tables, name)
