"""One browser for the tests of a run: Playwright begins once in a process."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


def chromium() -> str | None:
    named = os.environ.get("LOCANT_CHROMIUM")
    return named or shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    api = pytest.importorskip("playwright.sync_api", reason="tests in a browser need playwright")
    if (path := chromium()) is None:
        pytest.skip("found no Chromium; try: make chromium, or LOCANT_CHROMIUM=/path/to/it")
    with api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=[*FLAGS])
        yield launched
        launched.close()
