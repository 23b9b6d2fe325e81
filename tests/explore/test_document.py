"""The page as one file: nothing is fetched, and nothing in it can end the element that it stands in."""

from __future__ import annotations

import json
import re

import pytest

from locant.explore.document import EXPORT, IMPORT, bundle, modules, render_live_page, render_saved_page
from locant.explore.screens import screens


def test_every_import_of_a_module_is_one_line_of_names() -> None:
    for path, code in modules().items():
        assert code.count("import ") == len(IMPORT.findall(code)), path
        assert code.count("\nexport ") == len(EXPORT.findall(code)), path


@pytest.mark.parametrize("entry", ["start.js", "widget.js"])
def test_a_bundle_holds_every_module_after_those_it_imports(entry: str) -> None:
    joined: list[str] = []
    for part in re.split(r'^joined\["', bundle(entry), flags=re.MULTILINE)[1:]:
        path = part.partition('"')[0]
        assert set(re.findall(r'= joined\["([^"]+)"\];', part)) <= set(joined), path
        joined.append(path)
    assert joined[-1] == entry
    assert {f"screens/{name}.js" for name in screens()} < set(joined)


def test_an_exported_page_holds_all_that_it_needs() -> None:
    page = render_saved_page({"screen": "compare", "state": {}, "numbers": {}})
    assert bundle("start.js") in page
    assert "</" not in bundle("start.js")
    assert """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src""" in page
    assert not re.search(r'(?:src|href)="(?!data:|#)', page.replace(bundle("start.js"), ""))


def test_data_cannot_end_its_element() -> None:
    hostile = {"screen": "compare", "state": {"1": "</script><script>alert(1)</script><!--"}, "numbers": {}}
    page = render_saved_page(hostile)
    assert "alert(1)</script>" not in page
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.DOTALL)
    assert found is not None
    assert json.loads(found[1])["exported"] == hostile


def test_the_served_page_runs_no_code_of_its_own() -> None:
    page = render_live_page()
    assert re.findall(r"<script(?! type=\"application/json\")[^>]*>", page) == [
        '<script type="module" src="page/start.js">'
    ]
    assert "style=" not in page
    assert "onclick" not in page
