"""What the README counts is as many as there are, its parts are made from the records, and its pictures move."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks.real_models import moving_picture
from benchmarks.real_models.record import RESULTS, read
from docs.generator import readme
from locant.errors import InputError
from locant.figures.canvas import THEMES
from locant.models.registry import ARCHITECTURES
from locant.positions.scaling import KINDS
from tests.tolerances import SEVEN_DIGITS

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


def test_what_is_not_timed_stands_with_the_times() -> None:
    assert [*readme.SPEED.parent.glob("*.json")] == [readme.SPEED, readme.SPEED.with_name("engines.json")]
    times = README.partition("<!-- begin times -->")[2].partition("\n## ")[0]
    assert "Nothing has been timed on a GPU yet" in times


def test_parts_are_those_of_the_records_and_sources() -> None:
    """If this fails: python -m docs.generator.readme."""
    assert readme.with_parts(README) == README


@pytest.mark.parametrize("name", readme.PARTS)
def test_another_number_is_replaced_and_a_missing_place_is_noticed(name: str) -> None:
    begin = f"<!-- begin {name} -->\n"
    assert readme.with_parts(README.replace(begin, f"{begin}7.77\n")) == README
    with pytest.raises(InputError, match=name):
        readme.with_parts(README.replace(begin, ""))


def test_costs_are_rounded_from_the_record() -> None:
    record = json.loads(readme.RECORD.read_text(encoding="utf-8"))["summary"]["rows"]
    cells = [row.split(" | ") for row in readme.costs_of_bugs().splitlines()[2:]]
    assert 5 <= len(cells) <= 7
    for key, (_, source, *found) in zip(readme.BUGS, cells, strict=True):
        assert source.endswith(f"{record[key]['source'].replace('#', '/issues/')})")
        for (model, length), cell in zip(readme.COLUMNS, found, strict=True):
            cost = record[key]["costs"].get(model, {}).get(str(length))
            number = cell.removesuffix(" |")
            assert number == "–" if cost is None else abs(float(number) - cost["cost"]) <= 0.00501


def test_ratios_are_those_of_the_record() -> None:
    """By their times, as they were measured, not as the table rounds them."""
    record = json.loads(readme.SPEED.read_text(encoding="utf-8"))
    ratios = [float(each) for each in re.findall(r"\(([\d.]+) ×\)", readme.measured())]
    expected = [
        next(row["ratio"] for row in rows if row["contender"] == other)
        / next(row["ratio"] for row in rows if row["contender"] == question.ours)
        for question in readme.QUESTIONS
        for rows in [[row for row in record[question.part]["rows"] if re.match(question.pattern, row["question"])]]
        for other in question.others
    ]
    assert len(ratios) == len(expected) >= 8
    assert all(abs(found - right) < 0.06 + 0.005 * right for found, right in zip(ratios, expected, strict=True))


PICTURES = re.findall(r'(?:src|srcset)="([^"]+)"', README)


def test_pictures_are_there_and_small_and_the_first_one_moves_without_a_script() -> None:
    assert len(PICTURES) == 6
    for picture in PICTURES:
        file = ROOT / picture
        assert file.stat().st_size < 500_000
        text = file.read_text(encoding="utf-8") if file.suffix == ".svg" else ""
        assert "<script" not in text
        assert not re.search(r"(?:href|src)=\"(?!#)", text)
        assert ("@keyframes" in text) is ("breaking" in picture)


def test_the_moving_picture_is_that_of_the_record() -> None:
    record = read("bugs", RESULTS)
    for name, theme in THEMES.items():
        file = moving_picture.FOLDER / f"breaking_curves-{name}.svg"
        assert file.read_text(encoding="utf-8") == moving_picture.draw(record, theme)


@pytest.mark.parametrize(
    ("rises", "breaks"), [([0, 0, 1, 0.2, 1, 1, 1, 1], 4), ([1] * 8, 0), ([0.1, *[0.3] * 7], 1), ([0] * 8, 8)]
)
def test_a_curve_breaks_where_it_does_not_come_back(rises: list[float], breaks: int) -> None:
    measured = {
        f"smollm2/1024/{name}": {"value": {"windows": [{"blocks": [2.0 + each for each in blocks]}]}}
        for name, blocks in (("bug", rises), ("correct text", [0.0] * 8))
    }
    found = moving_picture.curve({"measured": measured}, "bug", 1024)
    assert found.breaks == breaks * 128
    assert found.positions[-1] <= 1024
    np.testing.assert_allclose(found.rises[:3], rises[:3], rtol=0, atol=SEVEN_DIGITS)


SENTENCE = re.compile(r"(?<=[.:?!])\s+(?=[A-Z`*\[])|\n\n|\n- |\n\|")


def test_it_is_short_and_so_are_its_sentences() -> None:
    assert len(README.splitlines()) <= 250
    by_hand = re.sub(r"```.*?```|<!-- begin.*?<!-- end [^>]*>|<[^>]*>", "", README, flags=re.DOTALL)
    prose = re.sub(r"\]\([^)]*\)|^\|.*$", "", by_hand, flags=re.MULTILINE)
    assert [found for found in SENTENCE.split(prose) if len(found.split()) > 30] == []
