"""One file in llama.cpp: losses in chunks, flags, and what a wrong flag costs. The model is tiny and random."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from benchmarks.real_models import engine_file
from benchmarks.real_models.engine_file import READINGS, context_options
from locant.engines.serve_args import serve_arguments
from tests.gguf_files import CONTEXT, scaled_model, write_gguf
from tests.tolerances import LLAMA_CPP

IDS = torch.randint(3, 300, (101,), generator=torch.Generator().manual_seed(1))


def losses_of(model: Any) -> np.ndarray:
    with torch.no_grad():
        return F.cross_entropy(model(IDS[None, :-1]).logits[0], IDS[1:], reduction="none").numpy()


@pytest.mark.parametrize("flags", ["", "--rope-freq-base 500", f"--rope-scaling linear --rope-scale 4 -c {CONTEXT}"])
def test_losses_in_chunks_are_those_of_transformers_with_the_same_positions(
    flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_file, "CHUNK", 300 * 16)  # 16 tokens at a time
    path = write_gguf(scaled_model("llama", "default"), tmp_path / "a.gguf")
    found = engine_file.losses_of_llama_cpp(path, IDS.tolist(), flags, threads=1)
    same = {"--rope-freq-base": ("default", {"rope_theta": 500.0}), "--rope-scaling": ("linear", {"factor": 4.0})}
    rope_type, rope = same.get(flags.partition(" ")[0], ("default", {}))
    assert np.abs(found - losses_of(scaled_model("llama", rope_type, **rope))).max() < LLAMA_CPP
    if flags:
        assert np.abs(found - losses_of(scaled_model("llama", "default"))).max() > 0.1


def test_printed_flags_become_options_of_the_context() -> None:
    config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 8192}
    served = serve_arguments(config | {"rope_theta": 1e5}, to=16_384, engine="llama.cpp")
    expected = {"rope_scaling_type": 2, "rope_freq_scale": 0.5, "yarn_orig_ctx": 8192, "n_ctx": 16_384}
    assert context_options(" ".join(served.arguments)) == expected


def test_each_wrong_flag_is_compared_with_the_right_reading_of_the_same_text() -> None:
    for name, reading in READINGS.items():
        if reading.right:
            right = READINGS[reading.right]
            assert (right.model, right.length, right.right) == (reading.model, reading.length, "")
            assert [*READINGS].index(reading.right) < [*READINGS].index(name)


def test_costs_by_position_are_differences_of_blocks() -> None:
    def value(mean: float, last: float) -> dict[str, Any]:
        return {"flags": "", "mean": mean, "blocks": [2.0] * 64 + [last] * 16}

    rows = engine_file.summary({"yarn": value(2.2, 3.0), "no-flags": value(3.0, 7.0)})["rows"]
    assert rows["no-flags"]["cost"] == 0.8
    assert rows["no-flags"]["cost_by_position"] == [[0, 2048, 0.0], [2048, 8192, 0.0], [8192, 10_240, 4.0]]
