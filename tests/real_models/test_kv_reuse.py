"""Reused keys: chunks, their drift, and the page that follows from a record. No weights are needed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.real_models import kv_reuse
from benchmarks.real_models.kv_reuse import Plan, chunk_of, drift, exactly_moved
from benchmarks.real_models.reach import Subject
from docs.generator.reach import reused_keys
from tests.tolerances import DOUBLE, LOGITS, PRINTED

PLAN = Plan(chunk=320, continuation=32, moves=(0, 8, 64), texts=2, numbers=2, steps=(8, 64, -8), checked=2)


def test_chunks_are_the_same_after_every_text_and_the_text_goes_on(subject: Subject) -> None:
    near, far = (chunk_of(subject, 1, move, PLAN) for move in (8, 64))
    assert len(near.before) == 8
    assert (far.before[-8:] == near.before).all()
    assert (near.chunk == far.chunk).all()
    assert (near.after == far.after).all()
    assert len(near.chunk) + len(near.after) == PLAN.chunk
    chunk, after = (subject.tokenizer.decode(each.tolist()) for each in (near.chunk, near.after))
    assert chunk.count("The secret number of") == 2
    assert after.count("What is the secret number of") == 2
    assert "secret" not in subject.tokenizer.decode(near.after[: PLAN.continuation].tolist())
    for start, stop in near.answers:
        assert subject.tokenizer.decode(near.after[start:stop].tolist()) in chunk
    other = chunk_of(subject, 0, 8, PLAN)
    assert len(other.chunk) != len(near.chunk) or (other.chunk != near.chunk).any()


def test_losses_are_those_of_transformers_alone(subject: Subject, tmp_path: Path) -> None:
    kv_reuse.run(folder=tmp_path, plan=PLAN, subject=subject)
    record = json.loads((tmp_path / "kv_reuse.json").read_text())
    checks = record["summary"]["checks"]
    assert checks.keys() == {f"{move}/{number}" for move in PLAN.moves for number in range(2)}
    for ways in checks.values():
        assert ways.keys() == {"anew", "moved"}
        for each in ways.values():
            assert each["first"] == pytest.approx(each["second"], abs=2 * LOGITS)
    rows = record["summary"]["moves"]
    for way in ("moved", "not moved"):
        assert rows["0"][way]["rise"] == pytest.approx(0, abs=2 * PRINTED[4]), (
            "nothing moved, and nothing was before the chunk"
        )
        assert abs(rows["64"][way]["rise"]) > 4 * PRINTED[4]
    assert rows["64"]["moved"]["loss"] != rows["64"]["not moved"]["loss"]
    drifts = record["summary"]["drift"]
    assert len(drifts["float32"]["by_moves"]) == 3
    for dtype in (torch.float32, torch.bfloat16):
        unit, last = torch.finfo(dtype).eps, drifts[str(dtype).removeprefix("torch.")]["by_moves"][-1]
        assert unit / 10 < last < unit * len(PLAN.steps)
    page = reused_keys(record)
    assert f"| 64 | moved | {rows['64']['moved']['loss']:.3f} |" in page
    rows["64"]["moved"]["loss"] = 9.876
    assert "9.876" not in page
    assert "9.876" in reused_keys(record)
    assert "make real PARTS=kv_reuse" in reused_keys({})


def test_drift_is_the_error_against_a_rotation_by_complex_numbers() -> None:
    keys = torch.randn(1, 2, 3, 8, generator=torch.Generator().manual_seed(0))
    pairs = keys[..., :4].double().numpy() + 1j * keys[..., 4:].double().numpy()
    turned = pairs * np.exp(1j * 5 * 100.0 ** (-np.arange(4) / 4))
    expected = np.concatenate([turned.real, turned.imag], -1)
    np.testing.assert_allclose(exactly_moved(keys.numpy(), 5, 100.0), expected, rtol=0, atol=DOUBLE)
    assert drift([keys], lambda moved, by: moved[0].copy_(moved[0] * 1.01), [0, 0], 100.0) == [0.01, 0.0201]
