"""Every page that is run is a notebook, too: to download, and, where the repository is known, to open in Colab.

Its first cell installs the package: by name, or from the address of a wheel, as ``notebook_wheel`` says. Colab reads
notebooks from a branch of a repository on GitHub, ``notebook_branch`` of ``notebook_repository``, where the site lies.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
from myst_nb.core.read import read_myst_markdown_notebook
from sphinx.application import Sphinx

__all__ = ["notebook", "setup"]

FOLDER = "notebooks"
COLAB = "https://colab.research.google.com/github"

LABEL = re.compile(r"^\([\w-]+\)=\n", re.MULTILINE)
LINK = re.compile(r"!?\[([^\]]*)\]\((?!https?:)[^)]*\)")
MATH = re.compile(r"\{math\}`([^`]+)`")
ROLE = re.compile(r"\{(?:py:)?\w+\}`~?([^`<]+?)(?: <[^`]*>)?`")


def notebook(text: str, wheel: str) -> nbformat.NotebookNode:
    r"""The notebook of a page, whose first cell installs `wheel`; what leads to other pages stays as words.

    >>> page = "---\nkernelspec:\n  name: python3\n---\n(a)=\n# A [page](#b)\n\n```{code-cell}\n1 + 1\n```\n"
    >>> [(cell.cell_type, cell.source) for cell in notebook(page, "locant").cells]
    [('code', '%pip install -q "locant[lab,hf]"'), ('markdown', '# A page'), ('code', '1 + 1')]
    """
    made = read_myst_markdown_notebook(text)
    for cell in made.cells:
        cell.metadata.clear()
        if cell.cell_type == "markdown":
            cell.source = ROLE.sub(r"`\1`", MATH.sub(r"$\1$", LINK.sub(r"\1", LABEL.sub("", cell.source))))
    wanted = wheel if wheel.endswith(".whl") else f"{wheel}[lab,hf]"
    made.cells.insert(0, nbformat.v4.new_code_cell(f'%pip install -q "{wanted}"'))
    for number, cell in enumerate(made.cells):
        cell.id = f"cell-{number}"  # else random: the same page is the same file
    made.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return made


def setup(app: Sphinx) -> dict[str, bool]:
    """Write a notebook when the page of one is written, and put its links below the title."""
    for name, default in (("wheel", "locant"), ("repository", ""), ("branch", "gh-pages")):
        app.add_config_value(f"notebook_{name}", default, "html")
    app.connect("html-page-context", _offer)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _offer(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    source = Path(app.env.doc2path(page))
    if app.builder.name != "html" or "kernelspec" not in app.env.metadata.get(page, {}) or not source.is_file():
        return
    name, config = f"{FOLDER}/{page}.ipynb", app.config
    file = Path(app.outdir) / name
    file.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook(source.read_text("utf-8"), config.notebook_wheel), file)
    links = {"Download the notebook": context["pathto"](name, resource=True)}
    if config.notebook_repository:
        links["Open in Colab"] = f"{COLAB}/{config.notebook_repository}/blob/{config.notebook_branch}/{name}"
    shown = " · ".join(f'<a href="{address}">{words}</a>' for words, address in links.items())
    context["body"] = context["body"].replace("</h1>", f'</h1>\n<p class="notebook">{shown}</p>', 1)
