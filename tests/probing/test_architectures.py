"""`probe` on models, classes, configurations and peers; every rotary module of transformers is in tests/models."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import locant
from locant import InputError, Positions, RangeError, Rotary
from locant.checkpoints.config_source import find_source
from locant.checkpoints.explanation import explain
from locant.models.registry import ARCHITECTURES
from locant.probing.report import RotationReport
from tests.refusal import refuses


@pytest.fixture
def _no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nobody had added a row for these two."""
    assert {"qwen3", "glm"} <= {*dict(ARCHITECTURES.items())}
    for name in ("_values", "_aliases"):
        kept = {key: each for key, each in getattr(ARCHITECTURES, name).items() if key not in ("qwen3", "glm")}
        monkeypatch.setattr(ARCHITECTURES, name, kept)


QWEN = {"model_type": "qwen3", "hidden_size": 64, "num_attention_heads": 4, "head_dim": 32, "vocab_size": 9}
GLM = {"model_type": "glm", "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16}


@pytest.mark.usefixtures("_no_row")
def test_an_architecture_without_a_row_is_measured_and_that_is_said() -> None:
    with pytest.warns(UserWarning, match="qwen3 has no row .* measured on Qwen3RotaryEmbedding of transformers"):
        found = Rotary.from_config({**QWEN, "rope_theta": 1e6}, angles="float32")
    assert repr(found) == repr(Rotary(32, base=1e6, angles="float32"))
    with pytest.warns(UserWarning, match="glm has no row"):
        partial = locant.encoding_from_config(GLM)
    assert repr(partial) == repr(Rotary(16, layout="interleaved", rotary_dim=8))
    explained = explain({**QWEN, "rope_theta": 1e6}).layers[0]
    assert explained.encoding == repr(Rotary(32, base=1e6))
    assert any("measured" in warning for warning in explained.warnings)


@pytest.mark.usefixtures("_no_row")
def test_what_a_measurement_cannot_name_is_refused() -> None:
    scaled = {**QWEN, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 64}
    with refuses(InputError, "qwen3", "length from position 64", "layout="):
        Rotary.from_config(scaled)
    with refuses(InputError, "nobodys", "layout="):
        Rotary.from_config({**QWEN, "model_type": "nobodys", "rope_theta": 1e4})
    with refuses(InputError, "bert", "no rotary module", "head_dim="):
        locant.probe({"model_type": "bert"})


def test_why_a_configuration_cannot_be_measured_is_said_truly(monkeypatch: pytest.MonkeyPatch) -> None:
    with refuses(InputError, "'nobodys', which the installed transformers does not know"):
        locant.probe({"model_type": "nobodys"})
    monkeypatch.setitem(sys.modules, "transformers", None)
    for call in (lambda: locant.probe({**QWEN, "rope_theta": 1e6}), lambda: find_source("qwen3")):
        with refuses(InputError, "transformers", "not installed", "pip install 'locant[hf]'"):
            call()
    assert find_source("llama-3.1-8b").note is None


def test_warnings_of_transformers_and_classes_of_images_have_no_part_in_what_is_measured_of_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers.models.step3p7 import modeling_step3p7

    flat = {**QWEN, "rope_theta": 1e6, "rope_scaling": None, "vision_config": {"model_type": ""}}
    with pytest.warns(UserWarning, match="got_ocr2 configuration without text_config") as said:
        report = locant.probe({**flat, "model_type": "got_ocr2"})
    assert [each.category for each in said] == [UserWarning]
    assert isinstance(report, RotationReport)
    assert repr(report.encoding) == repr(Rotary(64, base=1e6, angles="float32"))  # by the defaults of its text part

    def fail(*args: Any, **options: Any) -> None:
        raise KeyError("a missing key")

    monkeypatch.setattr(modeling_step3p7.Step3p7RotaryEmbedding, "__init__", fail)
    with pytest.raises(InputError, match=r"'step3p7'.*KeyError: 'a missing key'") as caught:
        locant.probe({"model_type": "step3p7"})
    assert "Vision" not in str(caught.value)


@pytest.mark.parametrize("name", ["gptj", "codegen"])
def test_tables_of_sines_before_cosines_are_of_a_part_of_the_head_and_end(name: str) -> None:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING[name](vocab_size=9, n_embd=64, n_layer=1, n_head=4, rotary_dim=8, n_positions=128)
    report = locant.probe(AutoModelForCausalLM.from_config(config))
    assert isinstance(report, RotationReport)
    assert repr(report.encoding) == repr(Rotary(16, layout="interleaved", rotary_dim=8))
    assert (report.last, report.ended) == (127, "IndexError")
    assert "It rotates 8 of 16 dimensions" in str(report)
    assert "Its positions end at 127: a later one raises IndexError." in str(report)


def test_what_attention_reorders_before_its_rotary_module_is_no_warning() -> None:
    from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniDiTConfig

    report = locant.probe(Qwen2_5OmniDiTConfig())
    assert isinstance(report, RotationReport)
    assert not any("interleaved" in warning for warning in report.warnings)
    assert report.note is not None
    assert "attention reorders dimensions" in report.note


def test_a_model_its_class_and_its_configuration_are_one() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8, vocab_size=9,
        bos_token_id=0, eos_token_id=0, rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    )  # fmt: skip
    reports = [
        locant.probe(LlamaForCausalLM(config)),
        locant.probe(LlamaForCausalLM, config=config),
        locant.probe(config),
    ]
    for report in reports:
        assert isinstance(report, RotationReport)
        assert repr(report.encoding) == repr(Rotary(32, base=5e5, angles="float32"))
        assert list(report.casts) == ["bfloat16", "float16"]
        assert report.differences == ()
        assert report.to_dict()["encoding"] == repr(report.encoding)
        assert report.arrangement.grows_at is None
    changed = locant.probe(config, expected=Rotary(32, base=1e4))
    assert "another frequency" in changed.differences[0]


def test_peers_are_measured_as_they_are_made() -> None:
    from rotary_embedding_torch import RotaryEmbedding

    found = locant.probe(RotaryEmbedding(32), head_dim=64)
    assert repr(found.encoding) == repr(Rotary(64, layout="interleaved", rotary_dim=32, angles="float32"))
    assert any("positions counted in bfloat16" in warning for warning in found.warnings)
    scaled = locant.probe(RotaryEmbedding(64, interpolate_factor=4.0, theta=500_000), head_dim=64)
    assert repr(scaled.encoding) == repr(
        Rotary(64, base=5e5, layout="interleaved", scaling=locant.scaling.Linear(factor=4.0), angles="float32")
    )


def test_x_transformers_is_measured_as_it_is_made() -> None:
    x_transformers = pytest.importorskip("x_transformers.x_transformers", reason="x-transformers is not installed")
    found = locant.probe(x_transformers.RotaryEmbedding(32), head_dim=64)
    assert isinstance(found.encoding, Rotary)
    assert repr(found.encoding.replace(angles="exact")) == repr(Rotary(64, layout="interleaved", rotary_dim=32))


def test_torchtune_puts_heads_behind() -> None:
    """The calling convention of torchtune: ``(x [batch seq heads width], input_pos)``."""
    rotary = Rotary(16, layout="interleaved")

    def module(x: Tensor, *, input_pos: Tensor | None = None) -> Tensor:
        positions = Positions.arange(x.shape[1]) if input_pos is None else Positions.of(input_pos)
        return rotary.rotate_one(x.transpose(1, 2), positions).transpose(1, 2)

    report = locant.probe(lambda x, input_pos: module(x, input_pos=input_pos), head_dim=16)
    assert repr(report.encoding) == repr(rotary)
    assert report.warnings == ()


def test_a_table_of_all_positions_is_not_asked_for_one_of_gigabytes() -> None:
    asked: list[int] = []

    def table(x: Tensor, positions: Tensor) -> Tensor:
        asked.append(int(positions.max()))
        rows = torch.arange(asked[-1] + 1)[:, None] * 10_000.0 ** -(torch.arange(0, 16, 2) / 16)
        angle = rows[positions]
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    report = locant.probe(table, head_dim=16)
    assert repr(report.encoding) == repr(Rotary(16, angles="float32"))
    assert max(asked) < 2**21


def test_a_name_or_a_path_is_taken_as_in_the_command_line(tmp_path: Path) -> None:
    report = locant.probe("OlmoForCausalLM")
    assert isinstance(report, RotationReport)
    assert "It was made from the defaults of OlmoConfig in transformers" in str(report)
    (tmp_path / "config.json").write_text(json.dumps(QWEN | {"rope_theta": 1e4}))
    found = [str(locant.probe(each)) for each in (tmp_path, str(tmp_path), QWEN | {"rope_theta": 1e4})]
    assert len({*found}) == 1
    with refuses(InputError, "not a file, a folder", "presets"):
        locant.probe("no-such-model")


@pytest.mark.parametrize(
    ("name", "reason"),
    [("gemma3_text", "'sliding_attention' or 'full_attention'"), ("llama", "all layers have the same rope parameters")],
)
def test_a_layer_type_that_a_model_does_not_have_is_refused(name: str, reason: str) -> None:
    with refuses(RangeError, "'foo' for layer_type", reason):
        locant.probe({"model_type": name}, layer_type="foo")
