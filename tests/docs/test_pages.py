"""What a reader of the pages sees: code that is not cut off."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
WIDEST = 96
"""Characters of code between two sidebars, in a window of 1,280 pixels."""


def code_of(page: str) -> list[str]:
    return re.findall(r"^```(?:\{code-cell\}[^\n]*|python|sh)\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)


def test_no_line_of_code_in_the_course_is_cut_off() -> None:
    pages = [DOCS / "five-minutes.md", *sorted((DOCS / "course").glob("*.md"))]
    cells = [cell for page in pages for cell in code_of(page.read_text(encoding="utf-8"))]
    assert len(cells) > 80
    assert [line for cell in cells for line in cell.splitlines() if len(line) > WIDEST] == []
