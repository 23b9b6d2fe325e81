"""The words that tutorials of this field use are found by the site's search, which looks words up by their stems."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest
from sphinx.search.en import SearchEnglish

INDEX = Path(__file__).parents[2] / "docs" / "_build" / "html" / "searchindex.js"
pytestmark = pytest.mark.skipif(not INDEX.is_file(), reason="the site is not built; try: make docs")

QUERIES = (
    "token embedding", "segment embedding", "positional encoding", "sinusoidal", "learned positions", "RoPE",
    "rotary", "ALiBi", "T5 bias", "sliding window", "stride", "drop_last", "DataLoader", "batch", "tiktoken", "BPE",
    "byte pair encoding", "vocabulary", "GPT-2", "BERT", "unhappiness", "Zipf", "word order", "attention mask",
    "causal mask", "padding", "packing", "KV cache", "speculative decoding", "context parallel", "YaRN", "NTK",
    "LongRoPE", "position interpolation", "extrapolation", "nearest neighbours", "tied head", "weight tying",
    "temperature", "generation", "multi-head attention", "grouped-query", "cross-entropy", "perplexity", "logits",
    "nanoGPT", "flash-attention", "Ray", "parquet", "video", "interleaved", "bfloat16",
)  # fmt: skip


@cache
def index() -> dict[str, set[int]]:
    """The pages of each stem, of words in texts and in titles."""
    stored = json.loads(INDEX.read_text(encoding="utf-8").removeprefix("Search.setIndex(").removesuffix(")"))
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
