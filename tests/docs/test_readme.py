"""What the README counts is as many as there are, and its first example is read at a glance."""

from __future__ import annotations

import re
from pathlib import Path

from docs.generator.speed import readme_claim
from locant.models.registry import ARCHITECTURES
from locant.positions.scaling import KINDS
from locant.report.benchmarks import read_benchmarks

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SEARCHED = (
    "positional encoding", "position embeddings", "perplexity", "NTK", "YaRN", "BPE", "one-hot", "concatenate",
    "weight tying", "sliding windows", "RoPE", "ALiBi", "KV cache",
)  # fmt: skip
NUMBERS = ("ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen")


def test_numbers_are_those_of_the_sources() -> None:
    title = (ROOT / "tests" / "known_bugs" / "README.md").read_text(encoding="utf-8").splitlines()[0]
    assert f"{title.rpartition(' ')[2]} real bugs" in README
    assert f"{len(list(ARCHITECTURES.items()))} architectures" in README
    assert f"{NUMBERS[len({*KINDS} - {'Unscaled'}) - 10]} scalings" in README


def test_words_that_people_search_stand_in_it() -> None:
    assert [words for words in SEARCHED if words not in README] == []


def test_the_first_code_calls_nothing_by_two_underscores() -> None:
    first, *_ = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert "__" not in first


def test_what_is_not_timed_stands_before_the_installation() -> None:
    assert README.index("Nothing has been timed on a GPU yet") < README.index("## Installation")


def test_the_speed_of_attention_is_the_recorded_one() -> None:
    assert readme_claim(read_benchmarks()["cpu"]) in " ".join(README.split()), "write this sentence into README.md"
