"""The README has every entry of the tests, their number is the same everywhere, and every encoding is looked at."""

from __future__ import annotations

import re

import pytest
import torch

from locant import Convolutional, Positions
from locant.positions.base import reads_hidden_states
from locant.positions.registry import encodings
from tests.known_bugs.catalog import FOLDER, README, count, docstrings, entries, entry, with_entries
from tests.known_bugs.subjects import EVERY, differences, queries, use

ROOT = FOLDER.parents[1]
COUNTED = re.compile(r"(\d+|\ba hundred) (?:real|known)(?: [\w-]+)? bugs|\ball (\d+) entries")
PAGES = ["README.md", "CONTRIBUTING.md", "docs/**/*.md", "tests/known_bugs/*.md", "src/locant/explore/**/*.js"]


def miscounts(text: str, right: int) -> list[str]:
    """Return each number of known bugs in a text that is not the right one."""
    return [match[0] for match in COUNTED.finditer(text) if (match[1] or match[2]) != str(right)]


def test_the_readme_is_that_of_the_tests() -> None:
    text = README.read_text(encoding="utf-8")
    assert text == with_entries(text), "run: python -m tests.known_bugs.catalog"
    assert with_entries(text.replace("| 7 |", "| 77 |")) == text, "a wrong row is replaced"


def test_every_test_of_an_entry_names_its_source() -> None:
    source = {each.number: each.sources[0][0].replace("/attacks/", " `attacks/`") for each in entries()}
    missing = [test for number, test, docstring in docstrings() if source[number] not in docstring]
    assert missing == []


def test_titles_name_bugs_and_differ() -> None:
    """The name of a test states the right behaviour, and the title of its entry the bug."""
    titles = [each.title for each in entries()]
    assert len({*titles}) == len(titles)
    same = [each.title for each in entries() if each.title.lower().replace(" ", "_") in each.test]
    assert same == []


@pytest.mark.parametrize(
    ("docstring", "fault"),
    [
        ("A bug.\n\na/b#1: It broke.\n\nTest: one.", "3 paragraphs"),
        ("A bug.\n\nIt broke: badly.\n\nCheck: call.\n\nTest: one.", "names no thread"),
        ("A bug.\n\na/b#1\n\nCheck: call.\n\nTest: one.", "does not state what happened"),
        ("A bug.\n\na/b#1: It broke.\n\nCall.\n\nTest: one.", "no check"),
        ("A bug.\n\na/b#1: It broke. It did. Badly.\n\nCheck: call.\n\nTest: one.", "more than two sentences"),
    ],
)
def test_a_docstring_without_its_parts_is_refused(docstring: str, fault: str) -> None:
    with pytest.raises(AssertionError, match=fault):
        entry("7", "tests/test.py::test", docstring)


def test_their_number_is_the_same_everywhere() -> None:
    assert miscounts("110 real bugs, a hundred known bugs, all 7 entries, 121 known bugs", 121) == [
        "110 real bugs", "a hundred known bugs", "all 7 entries",
    ]  # fmt: skip
    pages = [page for pattern in PAGES for page in sorted(ROOT.glob(pattern)) if "reference" not in page.parts]
    texts = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in pages}
    wrong = {name: found for name, text in texts.items() if (found := miscounts(" ".join(text.split()), count()))}
    assert wrong == {}
    for name in ("README.md", "docs/index.md", "docs/guides/explorer.md"):
        assert COUNTED.search(" ".join(texts[name].split())), f"{name} has no number of known bugs"


def test_every_encoding_of_the_catalog_is_shown() -> None:
    shown = {type(build()) for build in EVERY.values()}
    assert {*encodings().values()} - shown == {Convolutional}, "whose documents have to be whole"


def test_every_subject_does_something_with_positions() -> None:
    for name, build in EVERY.items():
        encoding = build()
        x = queries(encoding, 6)
        moved = differences(use(encoding, x, Positions.after(100, 6)), use(encoding, x, Positions.after(103, 6)))
        relative = differences(
            use(encoding, x, Positions.arange(6)), use(encoding, x, Positions.of([0, 2, 5, 9, 20, 50]))
        )
        # CoPE counts tokens that matter, and others sum what they read: of indices these look only at the order.
        order = differences(use(encoding, x, Positions.arange(6)), use(encoding, x, Positions.of([5, 3, 4, 0, 2, 1])))
        read = reads_hidden_states(encoding)
        assert name == "nope" or read or moved or relative or order, f"{name} is the same everywhere"
        assert name in ("nope", "cope") or read or moved or relative, f"{name} looks at nothing but the order"


def test_differences_sees_one_bit_and_one_dtype() -> None:
    ours = {"q": torch.tensor([1.0, 2.0]), "k": torch.tensor([3.0])}
    one_bit = {**ours, "q": torch.tensor([1.0, 2.0]).nextafter(torch.tensor(9.0))}
    assert differences(ours, dict(ours)) == {}
    assert differences(ours, one_bit).keys() == {"q"}
    assert differences(ours, {**ours, "k": ours["k"].double()}) == {"k": float("inf")}
    assert differences({"q": torch.tensor(float("nan"))}, {"q": torch.tensor(float("nan"))}), "NaN is no agreement"
