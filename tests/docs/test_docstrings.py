"""Docstrings come into the site's pages as they are written."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("sphinx", reason="the site needs the extra `docs`")

from sphinx.application import Sphinx

from docs.generator import reference

pytestmark = pytest.mark.filterwarnings("ignore:The mapping interface for autodoc options")  # napoleon's, of Sphinx 9

DOCS = Path(__file__).parents[2] / "docs"
EXTENSIONS = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "docs.generator.docstrings"]
SETS = ("HF_HUB_DISABLE_PROGRESS_BARS", "MPLBACKEND", "OMP_NUM_THREADS")
"""What the site's configuration puts into the environment."""

Renders = Callable[[str], str]

MODULE = '''
class Odd:
    one: int = 3
    """One per head: a parameter if learned."""

    two = None
    """`head_dim` or more: the width."""

    @property
    def three(self) -> int:
        """Three in all: never more.

        Raises:
            ValueError: there is none.
        """
'''


@pytest.fixture
def rendered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Renders:
    """Directives of autodoc as text, by the site's own configuration."""
    for name in SETS:
        monkeypatch.setenv(name, "1")  # so that it is put back
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "odd_module.py").write_text(MODULE)

    def render(directives: str) -> str:
        (tmp_path / "index.rst").write_text(f"API\n===\n\n{directives}")
        out = tmp_path / "out"
        Sphinx(tmp_path, DOCS, out, out, "text", {"extensions": EXTENSIONS}, status=None, warning=None).build()
        return " ".join((out / "index.txt").read_text("utf-8").split())

    return render


def test_a_colon_in_the_docstring_of_an_attribute_is_a_colon(rendered: Renders) -> None:
    text = rendered(".. autoclass:: odd_module.Odd\n   :members:\n   :undoc-members:\n")
    for sentence in ("One per head: a parameter if learned.", "or more: the width.", "Three in all: never more."):
        assert sentence in text
    assert "Raises: **ValueError** -- there is none." in text
    assert "Type:" not in text
    assert "slopes One slope per held head: a parameter" in rendered(".. autoclass:: locant.ALiBi\n   :members:\n")


@pytest.mark.slow
def test_no_attribute_of_the_api_has_a_sentence_for_a_type(rendered: Renders) -> None:
    pages = [page for path, page in reference.pages().items() if path.endswith(".md")]
    directives = [each for page in pages for each in re.findall(r"```\{eval-rst\}\n(.*?)```", page, re.DOTALL)]
    text = rendered("\n".join(directives))
    assert len(text) > 100_000
    assert " Type: " not in text
