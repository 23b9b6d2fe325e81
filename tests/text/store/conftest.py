"""The store that tests break."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.text.store.made import make


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("store"), sources=[{"path": "a.txt", "size": 9}], options={"a": [1]}).path
