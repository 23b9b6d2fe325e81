"""The site that `make docs` builds: offline, and every warning is an error."""

import hashlib
import os
import sys
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util.parallel import make_chunks

# One thread for each notebook: several run at a time, their models are small, and threads would wait for threads.
# Before torch is imported, which happens with the classes of locant.
os.environ["OMP_NUM_THREADS"] = "1"

from locant import __version__

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))  # so that extensions are found as docs.generator

SOURCES = hashlib.sha256(b"".join(file.read_bytes() for file in sorted((ROOT / "src").rglob("*.py"))))

project = "locant"
version = release = __version__
copyright = "the authors of locant; Apache 2.0"  # noqa: A001  # Sphinx's name for it
needs_sphinx = "9.0"
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_design",
    "docs.generator.colab",
    "docs.generator.docstrings",
    "docs.generator.kernels",
    "docs.generator.live",
    "docs.generator.llms",
    "docs.generator.mathml",
    "docs.generator.reference",
]
exclude_patterns = ["_build", "generator"]
default_role = "py:obj"  # `attend` in a docstring is a link where there is something to link to

# Pages are Markdown. Those that begin with a kernel are notebooks, executed when they, or the package, have changed.
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "force"  # whenever a page is read: jupyter-cache is not made for several processes
nb_execution_timeout = 600  # of one cell, on a busy machine
nb_execution_show_tb = True
nb_merge_streams = True
nb_code_prompt_show, nb_code_prompt_hide = "Show the code", "Hide the code"
nb_ipywidgets_js = {}  # they would be fetched from another machine
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # which are widgets, where ipywidgets is installed
nb_render_markdown_format = "myst"
notebook_wheel = os.environ.get("LOCANT_WHEEL", "locant")  # what notebooks install: a name, or the address of a wheel
notebook_repository = os.environ.get("GITHUB_REPOSITORY", "")  # OWNER/NAME, where Colab finds them
os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"  # or a notebook's figures would not be shown

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Limits", "Tested against"]

html_theme = "pydata_sphinx_theme"
html_title = f"locant {__version__}"
html_math_renderer = "mathml"
html_context = {"default_mode": "auto"}  # as the system; without it the theme complains in the console
html_static_path = ["_static"]
html_css_files = ["locant.css"]
html_js_files = [("table.js", {"defer": "defer"})]
WIDE = (
    "index", "five-minutes", "live", "from-integers-to-rope", "which-encoding", "versions",
    "reference/gallery", "reference/models/all", "results/index",
)  # fmt: skip
html_sidebars = {page: [] for page in WIDE}
TABLES = (
    "reference/models/all", "guides/conventions", "guides/diffusers", "guides/swapped-models", "guides/engines",
    "guides/trained-models", "guides/position-bugs",
)  # fmt: skip
html_theme_options = {
    "navbar_align": "left",
    "header_links_before_dropdown": 8,
    "secondary_sidebar_items": {"**": ["page-toc", "sourcelink"]} | {page: [] for page in TABLES},
    "show_toc_level": 2,
    "footer_start": ["copyright"],
    "footer_end": [],
}


def setup(app: Sphinx) -> None:
    """Read all pages anew when the package has changed."""
    from docs.generator.pictures import give_places

    app.add_config_value("sources", SOURCES.hexdigest(), "env")
    app.connect("env-before-read-docs", _spread)
    app.connect("doctree-resolved", give_places)


def _spread(app: Sphinx, env: object, names: list[str]) -> None:
    """A process reads a chunk of neighbours: the notebooks that train models come into different chunks."""
    count = len(make_chunks(names, max(app.parallel, 1)))
    names[:] = [name for start in range(count) for name in names[start::count]]
