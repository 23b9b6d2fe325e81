"""The page as one file: nothing is fetched, and nothing in it can end the element that it stands in."""

from __future__ import annotations

import base64
import json
import re

from locant.explore.document import EXPORTED_POLICY, exported, modules, served


def test_every_import_of_a_module_is_there_and_one_line() -> None:
    for path, code in modules().items():
        assert code.count("import ") - code.count("import(") <= code.count(' from "'), path


def test_an_exported_page_holds_every_module_by_name() -> None:
    page = exported({"screen": "compare", "state": {}, "numbers": {}})
    found = re.search(r'<script type="importmap">(.*?)</script>', page, flags=re.DOTALL)
    assert found is not None
    named = json.loads(found[1])["imports"]
    assert {f"locant/{path}" for path in modules()} == set(named)
    for address in named.values():
        code = base64.b64decode(address.partition(",")[2]).decode()
        wanted = re.findall(r'from "([^"]+)";', code)
        assert set(wanted) <= set(named)
    assert EXPORTED_POLICY in page
    assert not re.search(r'(?:src|href)="(?!data:|#)', page)


def test_data_cannot_end_its_element() -> None:
    hostile = {"screen": "compare", "state": {"1": "</script><script>alert(1)</script><!--"}, "numbers": {}}
    page = exported(hostile)
    assert "alert(1)</script>" not in page
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.DOTALL)
    assert found is not None
    assert json.loads(found[1])["exported"] == hostile


def test_the_served_page_runs_no_code_of_its_own() -> None:
    page = served()
    assert re.findall(r"<script(?! type=\"application/json\")[^>]*>", page) == [
        '<script type="module" src="page/start.js">'
    ]
    assert "style=" not in page
    assert "onclick" not in page
