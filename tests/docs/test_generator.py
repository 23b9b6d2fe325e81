"""The pages that are generated say what the classes say, all of it."""

from __future__ import annotations

import ast
import inspect
import json
import pydoc
import re
from pathlib import Path
from types import SimpleNamespace
from typing import get_overloads

import pytest
from docutils.nodes import SkipNode, math_block
from sphinx.pycode import ModuleAnalyzer

import locant
from docs.generator import reference
from docs.generator.docstrings import _show_one_signature, _show_the_constructor
from docs.generator.encodings import encoding_page
from docs.generator.markdown import picture, summary
from docs.generator.mathml import _block, mathml
from docs.generator.models import families
from docs.generator.models_table import COLUMNS, row_of
from locant import KVCache
from locant.attention import PagedKVCache, StaticKVCache
from locant.models.architecture import Architecture
from locant.models.registry import presets
from locant.positions.base import EncodingInfo, PositionEncoding
from locant.positions.registry import encodings
from locant.positions.scaling import KINDS, SCALINGS
from tests.docs.test_pages import PAGES

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return reference.pages()


def test_every_encoding_scaling_and_family_has_a_page_and_a_picture(pages: dict[str, str]) -> None:
    wanted = {
        *(f"encodings/{name}" for name in encodings()),
        *(f"scalings/{kind.info.name or name.lower()}" for name, kind in KINDS.items() if name != "Unscaled"),
        *(f"models/{name}" for name in families()),
    }
    written = {path.removesuffix(".md") for path in pages if not path.startswith("api/") and path.endswith(".md")}
    assert wanted == {path for path in written if "/" in path and not path.endswith("index")}
    others = reference.pictures().keys() - wanted
    assert wanted <= reference.pictures().keys()
    shown = [*(text for path, text in pages.items() if path.endswith(".txt")), *PAGES.values()]
    assert all(any(f"/{name}-light.svg" in text for text in shown) for name in others)
    assert all(path.rpartition("/")[2] in pages[f"{path.partition('/')[0]}/index.md"] for path in wanted)


@pytest.mark.parametrize("name", encodings())
def test_the_page_of_an_encoding_has_all_that_its_class_says(name: str, pages: dict[str, str]) -> None:
    kind, page = encodings()[name], pages[f"encodings/{name}.md"]
    facts = (kind.info.kind, kind.info.parameters, kind.info.cost_of_tokens, kind.info.cost_of_pairs)
    for fact in (*facts, kind.info.extrapolation, kind.info.used_by, *kind.info.aliases, *kind.methods()):
        assert fact in page
    assert pydoc.locate(*re.findall(r"autoclass:: (\S+)", page)) is kind
    assert "https://arxiv.org/abs/" in page or kind.info.paper.split()[-1] in page, "a paper, or a page"


@pytest.mark.parametrize("kind", [*encodings().values(), *SCALINGS.values()])
def test_a_docstring_has_what_its_page_shows(kind: type) -> None:
    for part in (".. math::", "Limits:", "Tested against:", ">>>"):
        assert part in (kind.__doc__ or ""), f"{kind.__name__} has no {part}; docs/reference shows one"


@pytest.fixture(scope="module")
def known_labels(pages: dict[str, str]) -> set[str]:
    texts = [*pages.values(), *(file.read_text(encoding="utf-8") for file in DOCS.rglob("*.md"))]
    found = re.findall(r"^\(([\w.-]+)\)=$|^:name: (\S+)$", "\n".join(texts), flags=re.MULTILINE)
    return {label for pair in found for label in pair if label} | {
        "models-table"
    }  # which is measured, and not in `pages`


@pytest.mark.parametrize("kind", ["encodings", "scalings"])
def test_a_page_ends_with_links_to_lesson_live_figure_results_and_models(
    kind: str, pages: dict[str, str], known_labels: set[str]
) -> None:
    settings = json.loads((DOCS / "results" / "v1-tiny.json").read_text(encoding="utf-8"))["settings"]
    recorded = {re.split("[+@]", each)[0] for each in settings["encodings"]}
    for name in encodings() if kind == "encodings" else SCALINGS:
        links = re.findall(r"\(#([\w-]+)\)", pages[f"{kind}/{name}.md"].partition("## See also")[2])
        assert [each.partition("-")[0] for each in links[:2]] == ["course", "lesson"]
        assert {"models-table", "which-encoding"} <= {*links} <= known_labels
        assert kind == "scalings" or ("results" in links) == (name in recorded), name


def test_the_page_of_attention_begins_with_attend(pages: dict[str, str]) -> None:
    directives = re.findall(r"^\.\. (auto\w+:: .*)$", pages["api/locant.attention.md"], flags=re.MULTILINE)
    assert directives[0] == "autofunction:: locant.attend"


def test_a_function_with_overloads_has_one_signature() -> None:
    analyzer = ModuleAnalyzer.for_module("locant.attention.attend")
    analyzer.analyze()
    assert analyzer.overloads or get_overloads(locant.attend)  # autodoc would list these
    _show_one_signature(None, "function", "locant.attend", locant.attend, None, None, None)
    assert analyzer.overloads == {}


@pytest.mark.parametrize("kind", encodings().values())
def test_an_encoding_has_the_signature_of_its_constructor(kind: type[PositionEncoding]) -> None:
    """Its `__new__`, which autodoc would show, takes anything."""
    shown, returned = _show_the_constructor(None, "class", kind.__name__, kind, None, None, None) or ("", "")
    assert re.findall(r"(\w+):", shown) == [*inspect.signature(kind.__init__).parameters][1:]
    assert returned is None
    assert "arguments" in str(inspect.signature(kind.__new__))


def test_other_classes_keep_their_signature() -> None:
    assert _show_the_constructor(None, "class", "KVCache", KVCache, None, "(max_len: int)", None) is None
    assert _show_the_constructor(None, "method", "rotate", locant.Rotary.rotate, None, "(q, k)", None) is None


def test_a_default_that_a_dataclass_makes_is_one_that_sphinx_reads() -> None:
    shown = _show_the_constructor(None, "class", "Architecture", Architecture, None, "(keys: dict = <factory>)", None)
    assert shown == ("(keys: dict = ...)", None)
    ast.parse(f"def constructor{shown[0]}: pass")


def test_the_api_shows_no_constant_of_a_cache() -> None:
    names = {name for cache in (KVCache, PagedKVCache, StaticKVCache) for name in dir(cache)}
    assert {name for name in names if name.isupper() and not name.startswith("_")} == set()


def test_a_new_fact_of_a_class_comes_into_its_page() -> None:
    class Odd(PositionEncoding):
        """Does nothing. Nobody uses it."""

        info = EncodingInfo(parameters="one for every prime", paper="Nobody 2030, arXiv 3001.00001")

    page = encoding_page("odd", Odd)
    assert "one for every prime" in page
    assert "Does nothing. Nobody uses it.\n" in page
    assert "(https://arxiv.org/abs/3001.00001)" in page


def test_every_preset_stands_on_the_page_of_its_family(pages: dict[str, str]) -> None:
    for name, config in presets().items():
        (page,) = (pages[f"models/{family}.md"] for family, module in families().items()
                   if config["model_type"] in module.ARCHITECTURES)  # fmt: skip
        assert f"`{name}`" in page


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cohere2", {"layout": "interleaved", "windows": "4096 in 30 of 40", "without positions": "10 of 40"}),
        ("smollm3", {"base": "2000000", "windows": "", "without positions": "9 of 36"}),
        ("llama4_text", {"windows": "chunks of 8192 in 36 of 48", "without positions": "12 of 48"}),
        ("mistral", {"windows": "4096", "without positions": ""}),
        ("mistral-7b", {"base": "1000000", "windows": ""}),
        ("gemma-3-4b", {"base": "1000000, 10000", "scaling": "Linear × 8", "windows": "1024 in 29 of 34"}),
        ("deepseek_v3", {"rotated": "33%", "layout": "interleaved"}),
        ("glm4", {"rotated": "50%"}),
        ("bloom", {"encoding": "ALiBi", "base": "", "layout": ""}),
        ("wav2vec2-bert", {"encoding": "Shaw"}),
    ],
)
def test_a_row_of_the_table_of_models_is_what_the_modeling_code_does(name: str, expected: dict[str, str]) -> None:
    cells = dict(zip(COLUMNS, row_of(name, presets().get(name, {"model_type": name})), strict=True))
    assert {column: re.sub(r"(?<=\d),(?=\d)", "", cells[column]) for column in expected} == expected


def test_a_row_of_the_table_leads_to_its_family_and_to_what_explain_says(pages: dict[str, str]) -> None:
    for name in ("llama-3.1-8b", "swin", "t5"):
        row = row_of(name, presets().get(name, {"model_type": name}))
        for label in re.findall(r"\(#(.+?)\)", row[0] + row[-1]):
            assert any(f"({label})=" in page for page in pages.values()), label


def test_a_family_without_a_preset_has_an_example_of_its_first_architecture(pages: dict[str, str]) -> None:
    for name, module in families().items():
        explained = next((preset for row in module.ARCHITECTURES.values() for preset in row.presets), "config.json")
        assert f"locant explain {explained}\n" in pages[f"models/{name}.md"]
        assert re.search(rf"\nmodel +{re.escape(explained)}\b", pages[f"models/{name}.md"])
    assert any("locant explain config.json" in page for page in pages.values())


def test_a_public_name_is_described_once(pages: dict[str, str]) -> None:
    described = [
        line for page in pages.values() for line in page.splitlines()
        if line.startswith((".. autoclass::", ".. autofunction::", ".. autodata::"))
    ]  # fmt: skip
    assert len(described) == len(set(described)) > 60


def test_pages_are_written_once_and_stale_ones_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "pages", lambda: {"a/one.md": "words"})
    monkeypatch.setattr(reference, "pictures", dict)
    monkeypatch.setattr(reference, "MEASURED", {})
    (tmp_path / "gone.md").write_text("of an encoding that was removed")
    reference.write(tmp_path)
    before = (tmp_path / "a" / "one.md").stat().st_mtime_ns
    reference.write(tmp_path)
    assert sorted(file.name for file in tmp_path.rglob("*.md")) == ["one.md"]
    assert (tmp_path / "a" / "one.md").stat().st_mtime_ns == before


def test_a_sentence_ends_at_a_full_stop_and_not_at_a_product() -> None:
    class Described:
        """The product q . k depends on distance. More follows."""

    assert summary(Described) == "The product q . k depends on distance."


def test_a_picture_is_shown_in_one_theme_each() -> None:
    assert picture("a/b", "words").count("only-") == 2


def test_a_formula_becomes_mathml_without_a_script() -> None:
    assert "<mfrac>" in mathml(r"\frac{1}{2}", display=True)
    with pytest.raises(Exception, match="nonsense"):
        mathml(r"\nonsense", display=True)


def test_parts_of_a_formula_are_elements_of_their_own() -> None:
    writer = SimpleNamespace(body=[])
    with pytest.raises(SkipNode):
        _block(writer, math_block("", r"a = b, \qquad c = \frac{d}{e}"))  # type: ignore[arg-type]
    assert [part.startswith("<math") for part in writer.body] == [False, True, True, False]
    assert r"<mi>b</mi>" in writer.body[1]
    assert "<mfrac>" in writer.body[2]
