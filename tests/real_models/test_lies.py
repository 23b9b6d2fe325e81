"""Lies about positions are put right into tiny models and files, and `locant audit` has a reading that undoes each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig

from benchmarks.real_models import audits, lies
from benchmarks.real_models.lies import LIES, TRUTH
from locant.lab.audit_subject import OWN, TransformersSubject
from tests.gguf_files import gguf, scaled_model, write_gguf
from tests.real_models.test_bugs import llama
from tests.tolerances import LOGITS

IDS = torch.arange(1, 41)[None]


def gemma() -> Any:
    """A Gemma 3 with seven layers, so that layers 5 and 6 differ, and with the window of the trained model."""
    torch.manual_seed(0)
    rope = {"full_attention": 1e6, "sliding_attention": 1e4}
    sizes = {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 7, "head_dim": 16}
    config = Gemma3TextConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=1, sliding_window=512, max_position_embeddings=32_768,
        rope_parameters={kind: {"rope_type": "default", "rope_theta": base} for kind, base in rope.items()},
    )  # fmt: skip
    return Gemma3ForCausalLM(config).eval()


TRUE = {"smollm2": lambda: llama(max_position_embeddings=8192, initializer_range=0.3), "gemma3": gemma}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of both tiny models."""
    written = {name: tmp_path_factory.mktemp(name) for name in TRUE}
    for name, build in TRUE.items():
        with torch.random.fork_rng():
            build().save_pretrained(written[name])
    return written


def told(name: str, folders: dict[str, Path], folder: Path) -> Any:
    """The model of a lie, with no metadata of a GGUF file."""
    lies.write(LIES[name]._replace(gguf=None), folders[LIES[name].model], folder)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(IDS).logits


@pytest.mark.parametrize("name", [name for name, lie in LIES.items() if lie.gguf is None])
def test_the_reading_that_undoes_a_lie_is_tried_and_computes_what_the_truth_computes(
    name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """The oracle is the true model, as transformers runs it."""
    lie = LIES[name]
    true = AutoModelForCausalLM.from_pretrained(folders[lie.model]).eval()
    subject = TransformersSubject(told(name, folders, tmp_path))
    subject.length = max(lie.lengths)
    reading, others = OWN, [OWN]
    for _ in range(2):  # two errors in a configuration are found one after the other
        others += [
            each.but(aspect, value)
            for each in [OWN, *(each for each in others if lie.truth.startswith(each.name))]
            for aspect, values in subject.aspects.items()
            for value in values
        ]
        reading = next((each for each in others if each.name == lie.truth), reading)
    assert reading.name == lie.truth
    wrong = logits(subject.model)
    if lie.truth == TRUTH:
        assert torch.equal(wrong, logits(true))
    elif name not in ("gguf-window-128", "window-lost"):  # which longer texts show
        assert not torch.allclose(wrong, logits(true), atol=LOGITS)
    with subject.apply(reading):
        assert torch.allclose(logits(subject.model), logits(true), atol=LOGITS)


def test_rows_are_interleaved_and_exchanged_in_each_head() -> None:
    rows = torch.arange(16.0)[:, None]
    state = {"model.layers.0.self_attn.q_proj.weight": rows, "model.layers.0.self_attn.v_proj.weight": rows}
    state |= {"model.layers.0.self_attn.q_norm.weight": torch.arange(8.0)}
    orders = {lies.interleaved: [0, 4, 1, 5, 2, 6, 3, 7], lies.exchanged: [4, 5, 6, 7, 0, 1, 2, 3]}
    for change, order in orders.items():
        changed = change(state, {"head_dim": 8})
        query, value, norm = (changed[name] for name in state)
        assert query[:, 0].tolist() == [*order, *(8 + each for each in order)]
        assert value is rows
        assert norm.tolist() == order


def test_a_number_in_the_metadata_is_changed_or_missing_in_a_copy_alone(tmp_path: Path) -> None:
    true = write_gguf(scaled_model("llama", "default"), tmp_path / "true.gguf")
    before = true.read_bytes()
    for value, base in ((5e5, 5e5), (None, None)):
        lies.edit_gguf(true, tmp_path / "lie.gguf", "llama.rope.freq_base", value)
        field = gguf.GGUFReader(tmp_path / "lie.gguf").get_field("llama.rope.freq_base")
        assert (None if field is None else field.contents()) == base
    assert true.read_bytes() == before
    assert len(before) == (tmp_path / "lie.gguf").stat().st_size


def test_what_an_audit_says_of_a_lie_decides_whether_it_is_found() -> None:
    lie = LIES["base-10000"]
    for best, noise, outcome in (
        ("base 100,000", [], audits.FOUND),
        ("base 150,000", ["base 100,000"], audits.AMONG),
        (TRUTH, ["base 100,000"], audits.MISSED),
        ("base 150,000", [], audits.MISSED),
    ):
        assert audits.found(lie, {"best": best, "within_noise": noise}) == outcome


def test_the_part_stops_at_the_length_that_shows_a_lie_and_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []

    def audit(lie: Any, length: int) -> dict[str, Any]:
        asked.append((lie.sentence, length))
        best = lie.truth if length >= lie.lengths[-1] else TRUTH
        losses = {TRUTH: 3.0, lie.truth: 2.5}
        return {"best": best, "verdict": "another fits", "within_noise": [], "losses": losses, "seconds": 1.0}

    monkeypatch.setattr(audits, "_audit", audit)
    monkeypatch.setattr(audits, "_by_transformers", lambda lie, length: 2.50001)
    audits.run(folder=tmp_path)
    assert [length for sentence, length in asked if sentence == LIES["base-10000"].sentence] == [128, 512]
    audits.run(folder=tmp_path)
    assert len(asked) == sum(len(lie.lengths) for lie in LIES.values()), "nothing is measured again"
    summary = json.loads((tmp_path / "audit.json").read_text())["summary"]
    assert summary["counts"] == {audits.FOUND: 20, audits.AMONG: 0, audits.MISSED: 0}
    assert summary["rows"]["window-lost"]["lengths"] == [768]
    assert summary["checks"]["base-10000"]["difference"] == 0.49999
