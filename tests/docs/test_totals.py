"""What pages claim to have all of, they have: encodings, scalings and what is recorded of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from docs.generator.records import recorded
from docs.generator.reference import pages
from locant.positions.registry import encodings
from locant.positions.scaling import KINDS

ROOT = Path(__file__).parents[2]
PAGES = {
    page.relative_to(ROOT).as_posix(): " ".join(page.read_text(encoding="utf-8").split())
    for pattern in ("README.md", "docs/*.md", "docs/guides/*.md", "docs/results/*.md")
    for page in sorted(ROOT.glob(pattern))
}
COUNTED = re.compile(r"(\d+) positional encodings|of (\d+) encodings")
TOO_MUCH = re.compile(
    r"every (?:known |published )?position(?:al)? encoding\b|\b(?:each|every|all) encodings? on a text", re.IGNORECASE
)


def wrong_claims(text: str, total: int) -> list[str]:
    """Return claims about all encodings that are not true."""
    counts = [match[0] for match in COUNTED.finditer(text) if (match[1] or match[2]) != str(total)]
    return counts + [match[0] for match in TOO_MUCH.finditer(text)]


def test_pages_claim_no_more_encodings_than_there_are() -> None:
    claims = "Every positional encoding, 31 positional encodings, each encoding on a text, 2 of 32 encodings."
    assert wrong_claims(claims, 32) == [
        "31 positional encodings", "Every positional encoding", "each encoding on a text",
    ]  # fmt: skip
    wrong = {page: found for page, text in PAGES.items() if (found := wrong_claims(text, len(encodings())))}
    assert wrong == {}
    assert f"{len(encodings())} positional encodings" in PAGES["README.md"]


def test_the_page_of_results_says_which_encodings_it_has() -> None:
    names, found = [*encodings()], {}
    for file in ("v1-tiny", "data_dependent"):
        records = json.loads((ROOT / "docs" / "results" / f"{file}.json").read_text(encoding="utf-8"))["records"]
        found[file] = {name for name in names if any(re.fullmatch(rf"{name}([+@].*)?", e["encoding"]) for e in records)}
    shown = {*found["v1-tiny"], *found["data_dependent"]}
    sentence, alone, others = recorded().split(". ")
    assert sentence.startswith(f"The results have {len(shown)} of {len(names)} encodings: ")
    assert {*re.findall(r"`(\w+)`", sentence)} == shown
    assert {*re.findall(r"`(\w+)`", alone)} == found["data_dependent"] - found["v1-tiny"]
    assert {*re.findall(r"`(\w+)`", others)} == {*names} - shown
    for page in ("docs/results/index.md", "docs/which-encoding.md"):
        assert "reference/recorded.txt" in PAGES[page]


@pytest.mark.parametrize(
    ("index", "total"), [("encodings", len(encodings())), ("scalings", len({*KINDS} - {"Unscaled"}))]
)
def test_one_page_for_each_is_one_page_for_each(index: str, total: int) -> None:
    written = pages()
    made = [path for path in written if path.startswith(f"{index}/") and not path.endswith("index.md")]
    assert len(made) == total
    assert str(total) in written[f"{index}/index.md"].partition("::::")[0]
