"""The page about trained models is made from records, and says which parts were not measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.real_models import engine_file
from docs.generator.trained import draw_learned_rows, page, pictures

HEAD: dict[str, Any] = {
    "command": "python -m benchmarks.real_models engines", "seconds": 120.0, "versions": {"torch": "2.13.0"},
    "environment": {"cpu_count": 2, "machine": "x86_64"},
    "weights": {"smollm2": {"title": "SmolLM2", "file": "a.gguf", "sha256": "0123456789abcdef0123"}},
}  # fmt: skip


def test_the_page_has_a_row_for_each_reading_and_names_what_is_not_measured(tmp_path: Path) -> None:
    def value(mean: float) -> dict[str, Any]:
        return {"flags": "-c 16384", "mean": mean, "blocks": [mean] * 80}

    summary = engine_file.summary({"yarn": value(2.0), "no-flags": value(3.25)})
    (tmp_path / "engines.json").write_text(json.dumps(HEAD | {"summary": summary}))
    text = page(tmp_path)
    assert "| smollm2 | 10,240 | `-c 16384` | 3.2500 | – | – | +1.250 (0–2,048: +1.25," in text
    assert "2 minutes on 2 cores (x86_64); torch 2.13.0. SmolLM2 (`a.gguf`, sha256 `0123456789abcdef`)" in text
    assert "`make real PARTS=audit` measures it" in text
    assert text.count("measures it") == 2


def test_the_picture_shows_the_recorded_similarities() -> None:
    rows = {"rows": 16, "map": [[1.0, 0.5], [0.5, 1.0]], "similarity": {"1": 0.9, "8": 0.1}, "spectrum": [0.7, 0.2]}
    figure = draw_learned_rows(rows, "light")
    left, middle, right = figure.axes[:3]
    assert left.images[0].get_array().tolist() == rows["map"]
    assert middle.lines[0].get_ydata().tolist() == [0.9, 0.1]
    assert np.allclose(right.lines[0].get_ydata(), [0.7, 0.9])
    assert pictures(Path("a folder without records")) == {}
