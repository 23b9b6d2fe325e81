"""Figures of speed on pages come from the recorded benchmarks, and no page has one that is written by hand."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from docs.generator import speed

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "guides").glob("*.md"))]
NUMBER = r"(?:\d[\d.,]*|two|three|four|five|six|seven|eight|nine|ten|twice|half)"
WRITTEN = re.compile(
    rf"{NUMBER} (?:to {NUMBER} )?(?:times (?:as (?:fast|slow|long)|the time|slower|faster)|[mµu]s\b|of the time)"
)
"""A time, or a ratio of times."""
ALLOWED = {
    "README.md": "checked by test_readme.py",
}
ENVIRONMENT = {"cpu_count": 4, "machine": "arm64", "torch": "2.14.0"}


def written_figures(text: str) -> list[str]:
    return WRITTEN.findall(text)


def part(*rows: tuple[str, str, float, float, float]) -> dict[str, object]:
    names = ("question", "contender", "ratio", "milliseconds", "megabytes")
    return {"environment": ENVIRONMENT, "rows": [dict(zip(names, row, strict=True)) for row in rows]}


def test_no_page_has_a_figure_of_speed_that_is_written_by_hand() -> None:
    assert len(written_figures("It takes 0.7 to 0.9 of the time, 16 µs, and is 16 times as fast.")) == 3
    found = {page.name: written_figures(page.read_text(encoding="utf-8")) for page in PAGES}
    assert {name for name, figures in found.items() if figures} <= ALLOWED.keys(), found


def test_every_part_is_included_by_a_page() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [path for path in speed.parts() if f"reference/{path}" not in text] == []


def test_examples_of_the_generator() -> None:
    assert doctest.testmod(speed).failed == 0


def test_attention_has_each_recorded_method_with_its_machine() -> None:
    forward, plain = f"{speed.FORWARD}, float32, cpu", speed.PLAIN
    text = speed.attention_cost(
        {
            "attention": part(
                (forward, plain, 1.0, 100.0, 18.2),
                (forward, "ALiBi, locant auto", 1.14, 114.0, 22.8),
                (forward, "ALiBi, matrix through SDPA", 12.3, 1230.0, 4429.0),
                ("attention beside the softmax, 4096 tokens", plain, 1.0, 50.0, 40.0),
                ("attention beside the softmax, 4096 tokens", "sinks", 1.31, 65.0, 41.0),
                ("attention beside the softmax, 4096 tokens", "a soft cap", 1.92, 96.0, 41.0),
            )
        }
    )
    assert "4 cores (arm64, torch 2.14.0), relative to plain causal attention, which takes 18 MB" in text
    assert "| `tiled` (chosen by `auto`) | 1.1 | 23 MB |\n| `sdpa` with a matrix | 12 | 4.4 GB |" in text
    assert "x-transformers" not in text
    assert text.endswith("1.3 times with sinks and 1.9 times with a soft cap.")


def test_a_whole_model_has_a_line_for_each_library() -> None:
    questions = ("a training step of a Llama", "a prompt of 1024 tokens", "10 times one more token")
    rows = [
        (question, name, ratio, 1.0, 0.0)
        for question, ours in zip(questions, (0.9, 1.0, 1.1), strict=True)
        for name, ratio in (("plain torch", 1.0), ("locant", ours))
    ]
    text = speed.model_cost({"whole_model": part(*rows)})
    assert "| library | training step | prompt | one more token |\n|---|---|---|---|" in text
    assert "| locant | 0.90 | 1.00 | 1.10 |" in text


def test_a_table_in_a_file_has_its_resumed_training_and_a_line_for_each_way_to_read_it() -> None:
    resumed = {
        "rows": 31_000_000, "gigabytes": 16.0, "steps": 100, "seconds_written": 60.0, "seconds_a_step": 0.5,
        "undo_gigabytes": 0.62, "killed_after": 77, "resumed_from": 75,
    }  # fmt: skip
    question = "read the n-grams of 2,048 tokens from a table of 16 GB"
    rows = part((question, "in memory", 1.0, 3.0, 0.0), (question, "in a file, cold", 812.25, 2400.0, 0.0))
    text = speed.table_file_cost({"ngram_table": {**rows, "resumed": resumed}})
    assert "16.0 GB (31,000,000 rows)" in text
    assert "killed after step 77 and resumed from its checkpoint of step 75" in text
    assert f"| {question} | time relative to the first |\n|---|---|\n| in memory | 1.0 |" in text
    assert text.endswith("| in a file, cold | 812.2 |")
    missing = speed.table_file_cost({})
    assert missing.endswith("Run `python -m benchmarks.ngram_table FOLDER --gigabytes 16 --steps 100 --record`.")


def test_encodings_that_depend_on_the_text_have_their_cost_relative_to_the_others() -> None:
    one, prompt, a_token, tokens = (
        "one query over 8192 keys", "a prompt of 8192 tokens", "1 of 8192 tokens read and rotated, 8 heads",
        "8192 of 8192 tokens read and rotated, 8 heads",
    )  # fmt: skip
    ours, theirs = "Selective RoPE, locant", "Selective RoPE, as published"
    rows = part(
        (one, "PaTH, locant, in a cache that moves its keys", 2.6, 12.0, 0.0), (prompt, "PaTH, locant", 2.0, 2e3, 0.0),
        (a_token, ours, 10.0, 1.5, 0.0), (a_token, theirs, 4.0, 0.6, 0.0),
        (tokens, ours, 22.0, 264.0, 0.0), (tokens, theirs, 6.0, 80.0, 0.0),
    )  # fmt: skip
    text = speed.text_dependent_cost({"every_encoding": rows})
    assert "PaTH takes 2.0 times as long for a prompt of 8,192 tokens, and 2.6 times for one more token." in text
    assert "takes 22 times as long as rotary positions (3.3 times as long as" in text
    assert text.endswith("and 10 times (2.5) for one more token.")


@pytest.mark.parametrize(
    "function",
    [
        speed.attention_cost,
        speed.rotation_cost,
        speed.prepare_speed,
        speed.worker_cost,
        speed.model_cost,
        speed.text_dependent_cost,
        speed.explorer_cost,
    ],
)
def test_a_missing_row_gives_the_command_that_measures_it(function) -> None:
    assert re.fullmatch(r"This has not been measured yet. Run `python -m benchmarks \w+`.", function({}))
