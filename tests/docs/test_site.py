"""The built site: links and anchors lead somewhere, nothing is fetched, pages are near and have something to see.

The words that tutorials of this field use are found by its search, which looks words up by their stems.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import pytest
from sphinx.search.en import SearchEnglish

from locant.models.registry import ARCHITECTURES, presets

SITE = Path(__file__).parents[2] / "docs" / "_build" / "html"
pytestmark = pytest.mark.skipif(not (SITE / "searchindex.js").is_file(), reason="the site is not built; try: make docs")

EXAMPLES = {"cell_output", "doctest", "highlight-text"}
"""What a notebook put out, an example of a docstring, and output that `tests/house/test_documentation.py` checks."""

LISTS = {"genindex.html", "search.html", "py-modindex.html"}
"""Made by Sphinx."""


@dataclass
class Page(HTMLParser):
    """What matters of a page: where it leads, what it fetches, its anchors, pictures and examples."""

    links: list[str] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)
    pictures: int = 0
    examples: int = 0
    in_article: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        classes = given.get("class", "").split()
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag in ("script", "img", "iframe", "source") and "src" in given:
            self.fetched.append(given["src"])
        elif tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload", "modulepreload"):
            self.fetched.append(given["href"])
        self.in_article |= tag == "article"
        self.pictures += self.in_article and tag == "img"
        self.examples += bool(EXAMPLES & {*classes})

    def handle_endtag(self, tag: str) -> None:
        self.in_article &= tag != "article"


@cache
def pages() -> dict[str, Page]:
    found = {}
    for file in sorted(SITE.rglob("*.html")):
        if "_static" not in file.parts and "_sources" not in file.parts:
            page = Page()
            page.feed(file.read_text(encoding="utf-8"))
            found[file.relative_to(SITE).as_posix()] = page
    return found


def targets(name: str, page: Page) -> Iterator[tuple[str, str]]:
    """Where the links of a page lead inside the site: a file, relative to its root, and an anchor."""
    for link in page.links:
        parts = urlsplit(link)
        if not parts.scheme and not parts.netloc:
            path, anchor = urldefrag(unquote(link))
            file = (SITE / name).parent / path if path else SITE / name
            yield file.resolve().relative_to(SITE.resolve()).as_posix(), anchor


def broken(found: dict[str, Page]) -> list[tuple[str, str, str]]:
    return [
        (name, file, anchor)
        for name, page in found.items()
        for file, anchor in targets(name, page)
        if not (SITE / file).is_file() or (anchor and file in found and anchor not in found[file].anchors)
    ]


def test_every_link_leads_to_a_page_and_an_anchor_that_are_there() -> None:
    assert len(pages()) > 40
    assert broken(pages()) == []


def test_a_reader_fetches_nothing_from_elsewhere() -> None:
    elsewhere = [(name, each) for name, page in pages().items() for each in page.fetched if urlsplit(each).netloc]
    assert elsewhere == []


def test_every_page_is_two_clicks_from_the_start() -> None:
    reached = {"index.html"}
    for _ in range(2):
        reached |= {file for name in reached for file, _ in targets(name, pages()[name]) if file in pages()}
    assert set(pages()) - reached - LISTS == set()


def test_every_page_has_a_picture_or_an_example() -> None:
    assert [name for name, page in pages().items() if not page.pictures + page.examples and name not in LISTS] == []


UNSEEN = re.compile(r"&lt;\w+ size \d+x\d+ with \d+ Axes&gt;| at 0x[0-9a-f]+&gt;")
"""How a notebook writes down a figure that it does not show, and an object that has nothing to say."""


def test_what_a_notebook_shows_is_more_than_the_name_of_an_object() -> None:
    texts = {name: (SITE / name).read_text(encoding="utf-8") for name in pages()}
    assert [name for name, text in texts.items() if UNSEEN.search(text)] == []
    assert UNSEEN.search("<pre>&lt;Figure size 1150x760 with 5 Axes&gt;</pre>")


def test_llms_txt_leads_to_the_source_of_every_page() -> None:
    text = (SITE / "llms.txt").read_text(encoding="utf-8")
    listed = re.findall(r"^- \[.+\]\((\S+)\)", text, flags=re.MULTILINE)
    assert text.startswith("# locant\n\n> Positional encodings for transformers")
    assert {Path(address).with_suffix("").with_suffix(".html") for address in listed} == {
        Path("_sources") / name for name in pages() if name not in LISTS
    }
    assert all((SITE / address).is_file() for address in listed)


def test_the_page_of_every_encoding_and_scaling_shows_a_formula_limits_and_what_it_is_tested_against() -> None:
    shown = [*SITE.glob("reference/encodings/*.html"), *SITE.glob("reference/scalings/*.html")]
    texts = {file: file.read_text(encoding="utf-8") for file in shown if file.stem != "index"}
    assert len(texts) >= 21
    assert [file.name for file, text in texts.items() if 'pre">arguments<' in text] == [], "signatures of __new__"
    for part in ("<math", "Limits", "Tested against", "doctest", r"-light\d*\.svg", r"-dark\d*\.svg"):
        assert [file.name for file, text in texts.items() if not re.search(part, text)] == []


def test_the_table_of_models_has_a_row_for_each_and_what_sorts_it() -> None:
    text = (SITE / "reference" / "models" / "all.html").read_text(encoding="utf-8")
    table = re.findall(r'<table class="[^"]*sortable[^"]*">(.*?)</table>', text, flags=re.DOTALL)
    assert len(table) == 1
    assert table[0].count("<tr") == 1 + len(presets()) + len(list(ARCHITECTURES.items()))
    assert "table.js" in text


QUERIES = (
    "token embedding", "segment embedding", "positional encoding", "sinusoidal", "learned positions", "RoPE",
    "rotary", "ALiBi", "T5 bias", "sliding window", "stride", "drop_last", "DataLoader", "batch", "tiktoken", "BPE",
    "byte pair encoding", "vocabulary", "GPT-2", "BERT", "unhappiness", "Zipf", "word order", "attention mask",
    "causal mask", "padding", "packing", "KV cache", "speculative decoding", "context parallel", "YaRN", "NTK",
    "LongRoPE", "position interpolation", "extrapolation", "nearest neighbours", "tied head", "weight tying",
    "temperature", "generation", "multi-head attention", "grouped-query", "cross-entropy", "perplexity", "logits",
    "nanoGPT", "flash-attention", "Ray", "parquet", "video", "interleaved", "bfloat16", "extend Llama 3 128k",
    "finetune", "install", "rope_theta", "token_type_ids", "M-RoPE", "diffusers", "vLLM", "Hugging Face Trainer",
    "theta", "cite", "BibTeX", "mrope", "padded batch", "inv_freq", "inverse frequencies", "fine-tune", "installation",
    "offline", "megatron bin", "NaN", "glossary", "troubleshooting",
)  # fmt: skip


@cache
def index() -> dict[str, set[int]]:
    """The pages of each stem, of words in texts and in titles."""
    stored = json.loads(
        (SITE / "searchindex.js").read_text(encoding="utf-8").removeprefix("Search.setIndex(").removesuffix(")")
    )
    found: dict[str, set[int]] = {}
    for part in ("terms", "titleterms"):
        for stem, pages in stored[part].items():
            found.setdefault(stem, set()).update(pages if isinstance(pages, list) else [pages])
    return found


def pages_with(query: str) -> set[int]:
    """The pages that have every word of a query."""
    language = SearchEnglish({})
    words = [word for word in re.findall(r"\w+", query.lower()) if language.word_filter(language.stem(word))]
    assert words, query
    return set.intersection(*(index().get(language.stem(word), set()) for word in words))


@pytest.mark.parametrize("query", QUERIES)
def test_a_word_of_the_tutorials_is_found(query: str) -> None:
    assert pages_with(query)


def test_a_word_that_is_nowhere_is_not_found() -> None:
    assert not pages_with("sliding wombat")
