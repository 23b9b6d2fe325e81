"""A page that is run can be downloaded as a notebook, and opened in Colab where its repository is known."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from sphinx.application import Sphinx

from docs.generator.colab import notebook

DOCS = Path(__file__).parents[2] / "docs"
HEAD = "---\nfile_format: mystnb\nkernelspec:\n  name: python3\n---\n"
PAGE = f"{HEAD}(here)=\n# Title\n\nSee [this](#here).\n\n```{{code-cell}} ipython3\n:tags: [hide-input]\n1 + 1\n```\n"


def built(folder: Path, **config: str) -> Path:
    (folder / "in" / "sub").mkdir(parents=True)
    (folder / "in" / "index.md").write_text("# Start\n\n```{toctree}\nsub/page\n```\n", encoding="utf-8")
    (folder / "in" / "sub" / "page.md").write_text(PAGE, encoding="utf-8")
    options = {"extensions": ["myst_nb", "docs.generator.colab"], "nb_execution_mode": "off", **config}
    app = Sphinx(
        folder / "in", None, folder / "out", folder / "trees", "html", options, status=None, warningiserror=True
    )
    app.build()
    return folder / "out"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")
@pytest.mark.parametrize("wheel", ["locant", "https://example.invalid/locant-1.0-py3-none-any.whl"])
def test_the_links_of_a_page_lead_to_its_notebook(tmp_path: Path, wheel: str) -> None:
    site = built(tmp_path, notebook_repository="somebody/locant", notebook_wheel=wheel)
    page = (site / "sub" / "page.html").read_text("utf-8")
    links = dict(reversed(each) for each in re.findall(r'<a href="([^"]+)">([^<]+)</a>', page.split("</h1>")[1]))
    made = nbformat.read((site / "sub" / links["Download the notebook"]).resolve(), as_version=4)
    nbformat.validate(made)
    assert links["Open in Colab"].endswith("/github/somebody/locant/blob/gh-pages/notebooks/sub/page.ipynb")
    installs, words, code = (cell.source for cell in made.cells)
    assert installs == f'%pip install -q "{wheel}{"" if wheel.endswith(".whl") else "[lab,hf]"}"'
    assert (words, code) == ("# Title\n\nSee this.", "1 + 1")
    assert "notebook" not in (site / "index.html").read_text("utf-8").split("</h1>")[1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")
def test_without_a_repository_nothing_leads_to_colab(tmp_path: Path) -> None:
    page = (built(tmp_path) / "sub" / "page.html").read_text("utf-8")
    assert "Download the notebook" in page
    assert "Colab" not in page


@pytest.mark.parametrize("path", [path for path in DOCS.rglob("*.md") if path.read_text("utf-8").startswith(HEAD[:24])],
                         ids=lambda path: path.stem)  # fmt: skip
def test_no_page_has_what_colab_would_show_as_it_is_written(path: Path) -> None:
    made = notebook(path.read_text("utf-8"), "locant")
    nbformat.validate(made)
    assert len(made.cells) > 2
    left = [cell.source for cell in made.cells if cell.cell_type == "markdown"]
    assert [each for each in left if re.search(r"^\([\w-]+\)=|\]\([#.]|\{[\w:]+\}`", each, re.MULTILINE)] == []
