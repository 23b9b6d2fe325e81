"""Files to prepare, in a folder of their own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.text.prepare.corpus import SEPARATOR, TEXTS


@pytest.fixture(autouse=True)
def _nothing_is_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here is about power cuts, and flushing takes most of the time of a small run."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number, texts in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(SEPARATOR.join(texts))
    return folder
